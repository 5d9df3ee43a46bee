"""DamagedFile CIFAR-10 files: each is refused in one sentence."""

from __future__ import annotations

import gzip
import io
import tarfile
from dataclasses import replace

import pytest

from tests.lab.data import writers
from tests.lab.data.damaged_files import HTML, flip_bit, gzip_bytes, load_error, make_tar
from tests.lab.data.writers import pack
from torchace.lab.data import load
from torchace.lab.data.image_files import SOURCES

pytestmark = pytest.mark.usefixtures("small_sources")

BINARY = writers.binary_batch(2)
RECORD = 3073
BINARY_FILES: dict[str, tuple[bytes, str]] = {
    "empty": (b"", "has 0 bytes"),
    "byte short": (BINARY[:-1], "but 3 images take 9219"),
    "byte more": (BINARY + b"\0", "has 9220 bytes"),
    "image short": (BINARY[:-RECORD], "has 6146 bytes"),
    "image more": (BINARY + BINARY[:RECORD], "has 12292 bytes"),
    "ten times": (BINARY * 10, "more than"),
    "first label": (b"\x0a" + BINARY[1:], "label 10 at image 0"),
    "last label": (BINARY[: 2 * RECORD] + b"\xff" + BINARY[2 * RECORD + 1 :], "label 255 at image 2"),
    "CIFAR-100": (b"\x13" + BINARY, "bytes"),
    "shifted by one": (BINARY[1:] + b"\0", "label"),
    "web page": (HTML, "bytes"),
    "packed": (pack(BINARY), "bytes"),
}


@pytest.mark.parametrize(("content", "says"), BINARY_FILES.values(), ids=BINARY_FILES)
def test_binary_batches(tmp_path, content, says):
    writers.write_cifar(tmp_path / "cifar-10-batches-bin")
    (tmp_path / "cifar-10-batches-bin" / "data_batch_2.bin").write_bytes(content)
    assert says in load_error("cifar10", tmp_path, "data_batch_2.bin")


@pytest.mark.parametrize("place", range(6))
def test_a_batch_that_is_missing(tmp_path, place):
    writers.write_cifar(tmp_path)
    name = sorted(path.name for path in tmp_path.iterdir())[place]
    (tmp_path / name).unlink()
    assert "is missing, but other batches" in load_error("cifar10", tmp_path, name)


def test_an_altered_batch(tmp_path, monkeypatch):
    small = writers.small_cifar()
    monkeypatch.setitem(SOURCES, "cifar10", replace(small, batches=dict.fromkeys(small.batches, "0")))
    writers.write_cifar(tmp_path)
    assert "altered content" in load_error("cifar10", tmp_path, "data_batch_1")


@pytest.mark.parametrize("name", ["cifar-10-batches-py/data_batch_1", "data_batch_1", "cifar-10-python.tar.gz"])
def test_the_python_version(tmp_path, name):
    """It is a pickle: the error names the version to use instead."""
    (tmp_path / name).parent.mkdir(exist_ok=True)
    (tmp_path / name).write_bytes(b"\x80\x02}.")
    assert "use the binary version (cifar-10-binary.tar.gz)" in load_error("cifar10", tmp_path, name.split("/")[0])
    writers.write_cifar(tmp_path / "cifar10")
    load("cifar10", directory=tmp_path, download=False)


def archive_with(kind: bytes, name: str) -> bytes:
    buffer = io.BytesIO()
    with tarfile.open(fileobj=buffer, mode="w:gz") as archive:
        member = tarfile.TarInfo(name)
        member.type, member.linkname = kind, "/etc/passwd"
        archive.addfile(member)
    return buffer.getvalue()


FILES = {name.replace(".", "__"): data for name, data in writers.cifar_files().items()}
WHOLE = make_tar(**FILES)
ARCHIVES: dict[str, tuple[bytes, str]] = {
    "empty": (b"", "archive"),
    "web page": (HTML, "archive"),
    "zip": (gzip_bytes(BINARY), "archive"),
    "plain tar": (gzip.decompress(WHOLE), "archive"),
    "packed text": (pack(b"text" * 500), "archive"),
    "half": (WHOLE[: len(WHOLE) // 2], "archive"),
    "first kilobyte": (WHOLE[:1000], "archive"),
    "byte wrong": (flip_bit(WHOLE, len(WHOLE) // 2), "archive"),
    "no files": (make_tar(), "has no file data_batch_1"),
    "other files": (make_tar(readme=b"hello"), "has no file data_batch_1"),
    "one batch missing": (make_tar(**{k: v for k, v in FILES.items() if "4" not in k}), "has no file data_batch_4.bin"),
    "batch cut": (make_tar(**{**FILES, "test_batch__bin": b"short"}), "test_batch.bin has 5 bytes"),
    "batch far too long": (make_tar(**{**FILES, "test_batch__bin": bytes(10**6)}), "has no file test_batch.bin"),
    "link in the place of a batch": (archive_with(tarfile.SYMTYPE, "data_batch_1.bin"), "has no file"),
    "folder in the place of a batch": (archive_with(tarfile.DIRTYPE, "data_batch_1.bin"), "has no file"),
    "out of the folder": (make_tar(**{"../../data_batch_1__bin": BINARY}), "has no file data_batch_2.bin"),
}


@pytest.mark.parametrize(("content", "says"), ARCHIVES.values(), ids=ARCHIVES)
def test_archives(tmp_path, monkeypatch, content, says):
    monkeypatch.chdir(tmp_path)
    folder = tmp_path / "data"
    folder.mkdir()
    (folder / "cifar-10-binary.tar.gz").write_bytes(content)
    assert says in load_error("cifar10", folder, "cifar-10-binary.tar.gz")
    assert [path.name for path in tmp_path.iterdir()] == ["data"]
    assert [path.name for path in folder.iterdir()] == ["cifar-10-binary.tar.gz"]
