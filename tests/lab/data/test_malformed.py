"""Malformed image files: one-sentence errors that name the file."""

from __future__ import annotations

import io
import struct
import tarfile
from dataclasses import replace

import numpy as np
import pytest

from tests.lab.data import writers
from tests.lab.data.damaged_files import flip_bit, load_error, mutations
from tests.lab.data.writers import idx, images, labels, pack
from torchace.lab.data import DataError, load
from torchace.lab.data.datasets import SOURCES

pytestmark = pytest.mark.usefixtures("small_sources")

HTML = b"<!DOCTYPE html>\n<html><body>404\nNot Found</body></html>\n"
IMAGES, LABELS = idx(images(writers.TRAIN)), idx(labels(writers.TRAIN))
BATCH = writers.binary_batch(2)

# what stands in the place of the training images' .gz, and what the sentence says
IMAGE_FILES: dict[str, tuple[bytes, str]] = {
    "empty": (b"", "not an idx file"),
    "half": (pack(IMAGES)[: len(pack(IMAGES)) // 2], "cannot be read"),
    "checksum wrong": (flip_bit(pack(IMAGES), -8), "CRC"),
    "byte wrong": (flip_bit(pack(IMAGES), 5000), "cannot be read"),
    "web page": (HTML, "not an idx file"),
    "packed web page": (pack(HTML), "not an idx file"),
    "header alone": (pack(IMAGES[:16]), "not an idx file of 20 x 28 x 28 bytes"),
    "byte short": (pack(IMAGES[:-1]), "not an idx file"),
    "byte more": (IMAGES + b"\0", "not an idx file"),
    "floats": (pack(b"\0\0\x0d\x03" + IMAGES[4:]), "not an idx file"),
    "labels": (pack(LABELS), "not an idx file"),
    "fewer images": (pack(idx(images(19))), "not an idx file"),
    "little-endian": (pack(b"\0\0\x08\x03" + struct.pack("<3I", 20, 28, 28) + IMAGES[16:]), "not an idx file"),
}


@pytest.mark.parametrize(("content", "says"), IMAGE_FILES.values(), ids=IMAGE_FILES)
def test_idx_files(tmp_path, content, says):
    file = "train-images-idx3-ubyte.gz"
    writers.write_mnist(tmp_path / "mnist")
    (tmp_path / "mnist" / file).write_bytes(content)
    assert says in load_error("mnist", tmp_path, file)


@pytest.mark.parametrize("content", [b"", BATCH[:-1], BATCH + b"\0", HTML, pack(BATCH)])
def test_binary_batches(tmp_path, content):
    writers.write_cifar(tmp_path / "cifar-10-batches-bin")
    (tmp_path / "cifar-10-batches-bin" / "data_batch_2.bin").write_bytes(content)
    assert "its size or SHA-256 is wrong" in load_error("cifar10", tmp_path, "data_batch_2.bin")


@pytest.mark.parametrize("place", [0, 5])
def test_a_batch_that_is_missing(tmp_path, place):
    writers.write_cifar(tmp_path)
    name = sorted(path.name for path in tmp_path.iterdir())[place]
    (tmp_path / name).unlink()
    assert "is missing; add it" in load_error("cifar10", tmp_path, name)


def test_an_altered_batch(tmp_path, monkeypatch):
    small = writers.small_cifar()
    monkeypatch.setitem(SOURCES, "cifar10", replace(small, batches=dict.fromkeys(small.batches, "0")))
    writers.write_cifar(tmp_path)
    assert "SHA-256 is wrong" in load_error("cifar10", tmp_path, "data_batch_1")


def make_tar(**files: bytes) -> bytes:
    buffer = io.BytesIO()
    with tarfile.open(fileobj=buffer, mode="w:gz") as archive:
        for name, data in files.items():
            member = tarfile.TarInfo(f"{name}.bin")
            member.size = len(data)
            archive.addfile(member, io.BytesIO(data))
    return buffer.getvalue()


BATCHES = {name.removesuffix(".bin"): data for name, data in writers.cifar_files().items()}
ARCHIVES: dict[str, tuple[bytes, str]] = {
    "empty": (b"", "cannot be read"),
    "web page": (HTML, "cannot be read"),
    "half": (make_tar(**BATCHES)[: len(make_tar(**BATCHES)) // 2], "cannot be read"),
    "other files": (make_tar(readme=b"hello"), "data_batch_1.bin is missing"),
    "batch cut": (make_tar(**{**BATCHES, "test_batch": b"short"}), "test_batch.bin is not the official"),
}


@pytest.mark.parametrize(("content", "says"), ARCHIVES.values(), ids=ARCHIVES)
def test_archives(tmp_path, content, says):
    (tmp_path / "cifar-10-binary.tar.gz").write_bytes(content)
    assert says in load_error("cifar10", tmp_path, "cifar-10-binary.tar.gz")
    assert [path.name for path in tmp_path.iterdir()] == ["cifar-10-binary.tar.gz"]


@pytest.mark.parametrize("source", [SOURCES["mnist"], SOURCES["fashion_mnist"]], ids=lambda source: source.name)
def test_content_that_is_not_the_official_one(tmp_path, monkeypatch, source):
    """Well-formed files of the right size with other pixels are not MNIST, nor Fashion-MNIST."""
    monkeypatch.setitem(SOURCES, source.name, source)
    for file in (*source.train, *source.test):
        assert file.content is not None
        (tmp_path / file.name).write_bytes(idx(np.zeros(file.shape, np.uint8)))
    assert f"not the official file of {source.title}" in load_error(source.name, tmp_path, "train-images-idx3-ubyte")


@pytest.mark.parametrize(
    ("name", "file", "original"),
    [("mnist", "train-labels-idx1-ubyte.gz", pack(LABELS)), ("cifar10", "data_batch_2.bin", BATCH)],
)
def test_random_damage(tmp_path, name, file, original):
    """A damaged file is read or refused in one sentence; there is no other error."""
    writers.write_mnist(tmp_path)
    writers.write_cifar(tmp_path)
    sentences = []
    for altered in mutations(original, 100, seed=0):
        (tmp_path / file).write_bytes(altered)
        try:
            load(name, directory=tmp_path, download=False)
        except DataError as error:
            sentences.append(str(error))
    assert all("\n" not in sentence and file in sentence for sentence in sentences)
    assert len(sentences) > 50  # a changed pixel cannot be seen without a known hash; most damage can
