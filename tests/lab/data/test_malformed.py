"""Files that are not what they should be: each is one sentence that names the file. Here: idx files, and no files."""

from __future__ import annotations

import bz2
import io
import lzma
import struct
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from tests.lab.data import writers
from tests.lab.data.damaged_files import HTML, POINTER, flip_bit, gzip_bytes, load_error, make_tar, mutations
from tests.lab.data.writers import idx, images, labels, pack
from torchace.lab.data import DataError, load
from torchace.lab.data.image_files import SOURCES

pytestmark = pytest.mark.usefixtures("small_sources")

IMAGES, LABELS = idx(images(writers.TRAIN)), idx(labels(writers.TRAIN))


def header(*dims: int, magic: bytes = b"\0\0\x08\x03") -> bytes:
    return magic + struct.pack(f">{len(dims)}I", *dims)


def saved(array: np.ndarray) -> bytes:
    buffer = io.BytesIO()
    np.save(buffer, array)
    return buffer.getvalue()


PIXELS = IMAGES[16:]
# what stands in the place of the training images' .gz, and what the sentence says
IMAGE_FILES: dict[str, tuple[bytes, str]] = {
    "empty": (b"", "is empty"),
    "one byte": (pack(IMAGES)[:1], "idx file"),
    "half a gzip header": (pack(IMAGES)[:5], "truncated"),
    "gzip header alone": (pack(IMAGES)[:10], "truncated"),
    "half": (pack(IMAGES)[: len(pack(IMAGES)) // 2], "truncated"),
    "last byte gone": (pack(IMAGES)[:-1], "truncated"),
    "checksum gone": (pack(IMAGES)[:-8], "truncated"),
    "checksum wrong": (flip_bit(pack(IMAGES), -8), "CRC"),
    "length wrong": (flip_bit(pack(IMAGES), -1), "ncorrect length"),
    "byte wrong": (flip_bit(pack(IMAGES), 5000), "gzip"),
    "gzip method unknown": (flip_bit(pack(IMAGES), 2), "gzip"),
    "text behind": (pack(IMAGES) + b"more", "gzip"),
    "twice": (pack(IMAGES) * 2, "more"),
    "byte behind in a second member": (pack(IMAGES) + pack(b"\0"), "more"),
    "web page": (HTML, "web page"),
    "packed web page": (pack(HTML), "web page"),
    "git-lfs pointer": (POINTER, "idx file"),
    "text": (b"images\n", "idx file"),
    "json": (b'{"message": "Not Found"}', "idx file"),
    "png": (b"\x89PNG\r\n\x1a\n" + bytes(100), "idx file"),
    "zip": (gzip_bytes(IMAGES), "idx file"),
    "bzip2": (bz2.compress(IMAGES), "idx file"),
    "xz": (lzma.compress(IMAGES), "idx file"),
    "tar.gz": (make_tar(images=IMAGES), "idx file"),
    "numpy file": (saved(images(3)), "idx file"),
    "packed twice": (pack(pack(IMAGES)), "idx file"),
    "packed nothing": (pack(b""), "is empty"),
    "three bytes": (pack(b"\0\0\x08"), "idx file"),
    "magic alone": (pack(b"\0\0\x08\x03"), "truncated within its header"),
    "header cut": (pack(IMAGES[:13]), "truncated within its header"),
    "header alone": (pack(IMAGES[:16]), "only 0 bytes"),
    "byte short": (pack(IMAGES[:-1]), "only 15679 bytes"),
    "byte more": (pack(IMAGES + b"\0"), "more bytes"),
    "image short": (pack(header(20, 28, 28) + PIXELS[:-784]), "only 14896 bytes"),
    "floats": (pack(b"\0\0\x0d\x03" + IMAGES[4:]), "type 0x0d"),
    "signed bytes": (pack(b"\0\0\x09\x03" + IMAGES[4:]), "type 0x09"),
    "magic reversed": (pack(b"\x03\x08\0\0" + IMAGES[4:]), "idx file"),
    "magic wrong": (pack(b"\0\x01\x08\x03" + IMAGES[4:]), "idx file"),
    "two dimensions": (pack(header(20, 784, magic=b"\0\0\x08\x02") + PIXELS), "2 dimensions"),
    "255 dimensions": (pack(b"\0\0\x08\xff" + IMAGES[4:]), "255 dimensions"),
    "no dimensions": (pack(b"\0\0\x08\0" + IMAGES[4:]), "0 dimensions"),
    "labels": (pack(LABELS), "images and labels swapped"),
    "more images than there are": (pack(header(21, 28, 28) + PIXELS), "21 x 28 x 28"),
    "fewer images": (pack(idx(images(19))), "19 x 28 x 28"),
    "no images": (pack(header(0, 28, 28)), "0 x 28 x 28"),
    "little-endian counts": (pack(b"\0\0\x08\x03" + struct.pack("<3I", 20, 28, 28) + PIXELS), "335544320"),
    "rows": (pack(header(20, 27, 28) + PIXELS), "20 x 27 x 28"),
    "columns": (pack(header(20, 28, 32) + PIXELS), "20 x 28 x 32"),
    "four billion of each": (pack(header(*[0xFFFFFFFF] * 3)), "4294967295"),
    "the test images": (pack(idx(images(writers.TEST))), "10 x 28 x 28"),
}
LABEL_FILES: dict[str, tuple[bytes, str]] = {
    "label 10": (pack(LABELS[:-1] + b"\x0a"), "label 10 at image 19"),
    "label 255": (pack(LABELS[:8] + b"\xff" + LABELS[9:]), "label 255 at image 0"),
    "images": (pack(IMAGES), "images and labels swapped"),
    "one more": (pack(idx(labels(21))), "array of 21, not 20"),
    "one fewer": (pack(idx(labels(19))), "array of 19, not 20"),
    "byte behind": (pack(LABELS + b"\0"), "more bytes"),
    "byte short": (pack(LABELS[:-1]), "only 19 bytes"),
    "plain, byte short": (LABELS[:-1], "only 19 bytes"),
    "plain, byte behind": (LABELS + b"\n", "more bytes"),
    "text": (b"5,0,4,1,9", "idx file"),
    "space and a web page": (b"\n\n " + HTML, "web page"),
}


@pytest.mark.parametrize(
    ("file", "content", "says"),
    [
        pytest.param(file, *case, id=f"{file}: {name}")
        for file, cases in (("train-images-idx3-ubyte.gz", IMAGE_FILES), ("train-labels-idx1-ubyte.gz", LABEL_FILES))
        for name, case in cases.items()
    ],
)
def test_idx_files(tmp_path, file, content, says):
    writers.write_mnist(tmp_path / "mnist")
    (tmp_path / "mnist" / file).write_bytes(content)
    assert says in load_error("mnist", tmp_path, file)


def make_loop(path: Path) -> None:
    path.symlink_to(path)


NOT_FILES: dict[str, Callable[[Path], object]] = {
    "folder": Path.mkdir,
    "link to nowhere": lambda path: path.symlink_to(path.parent / "nowhere"),
    "link to itself": make_loop,
    "link to a folder": lambda path: path.symlink_to(path.parent),
}


@pytest.mark.parametrize("make", NOT_FILES.values(), ids=NOT_FILES)
@pytest.mark.parametrize(("name", "file"), [("mnist", "t10k-labels-idx1-ubyte.gz"), ("cifar10", "test_batch.bin")])
def test_paths_that_are_not_regular_files(tmp_path, name, file, make):
    writers.write_mnist(tmp_path)
    writers.write_cifar(tmp_path)
    (tmp_path / file).unlink()
    make(tmp_path / file)
    load_error(name, tmp_path, file)


@pytest.mark.parametrize("name", ["mnist", "cifar10"])
def test_permission_denied(tmp_path, name, monkeypatch):
    writers.write_mnist(tmp_path)
    writers.write_cifar(tmp_path)

    def closed(
        path: Path, mode: str, **options: object
    ) -> None:  # the tests may run as root, to whom nothing is denied
        raise PermissionError(13, "Permission denied", str(path))

    monkeypatch.setattr("torchace.lab.data.image_files.open", closed, raising=False)
    monkeypatch.setattr(Path, "read_bytes", lambda path: closed(path, "rb"))
    assert "Permission denied" in load_error(name, tmp_path, "images" if name == "mnist" else "data_batch_1.bin")


def test_a_folder_that_may_not_be_entered(tmp_path, monkeypatch):
    def closed(path: Path) -> None:
        raise PermissionError(13, "Permission denied", str(path))

    monkeypatch.setattr("torchace.lab.data.image_files.os.lstat", closed)
    assert "permissions" in load_error("mnist", tmp_path, "train-images-idx3-ubyte.gz")


def test_a_disk_that_fails(tmp_path, monkeypatch):
    writers.write_mnist(tmp_path)

    def fails(*args: object, **options: object) -> None:
        raise OSError(5, "Input/output error")

    monkeypatch.setattr("torchace.lab.data.image_files._check_header", fails)
    assert "Input/output error" in load_error("mnist", tmp_path, "train-images-idx3-ubyte.gz")


def test_a_line_break_in_a_name(tmp_path):
    folder = tmp_path / "my\ndata"
    writers.write_mnist(folder)
    (folder / "train-images-idx3-ubyte.gz").write_bytes(b"")
    with pytest.raises(DataError, match="is empty") as error:
        load("mnist", directory=folder)
    assert "\n" not in str(error.value)


@pytest.mark.parametrize("source", [SOURCES["mnist"], SOURCES["fashion_mnist"]], ids=lambda source: source.name)
def test_content_that_is_not_the_official_one(tmp_path, monkeypatch, source):
    """Well-formed files of the right size with other pixels are not MNIST, nor Fashion-MNIST."""
    monkeypatch.setitem(SOURCES, source.name, source)
    files = {
        "train-images-idx3-ubyte": np.zeros((60_000, 28, 28), np.uint8),
        "train-labels-idx1-ubyte": np.zeros(60_000, np.uint8),
        "t10k-images-idx3-ubyte": np.zeros((10_000, 28, 28), np.uint8),
        "t10k-labels-idx1-ubyte": np.zeros(10_000, np.uint8),
    }
    for name, array in files.items():
        (tmp_path / name).write_bytes(idx(array))
    assert f"not the official file of {source.title}" in load_error(source.name, tmp_path, "train-images-idx3-ubyte")


@pytest.mark.parametrize("source", [SOURCES["mnist"], SOURCES["fashion_mnist"]], ids=lambda source: source.name)
def test_every_official_file_has_a_known_content_and_comes_by_https_first(source):
    assert all(file.content is not None for file in (*source.train, *source.test))
    assert source.urls[0].startswith("https://")


@pytest.mark.parametrize(
    ("name", "file", "original"),
    [
        ("mnist", "train-labels-idx1-ubyte.gz", pack(LABELS)),
        ("mnist", "train-images-idx3-ubyte.gz", IMAGES),
        ("cifar10", "data_batch_2.bin", writers.binary_batch(2)),
    ],
    ids=["packed labels", "plain images", "batch"],
)
def test_random_damage(tmp_path, name, file, original):
    """Whatever is done to a file, it is read or refused in one sentence; no other error comes out."""
    writers.write_mnist(tmp_path)
    writers.write_cifar(tmp_path)
    sentences = []
    for altered in mutations(original, 300, seed=0):
        (tmp_path / file).write_bytes(altered)
        try:
            load(name, directory=tmp_path, download=False)
        except DataError as error:
            sentences.append(str(error))
    assert all("\n" not in sentence and file in sentence for sentence in sentences)
    assert 300 - len(sentences) < 150  # a changed pixel cannot be seen without a known hash; most damage can
