"""CIFAR-10 files that are not what they should be: one sentence each, and nothing in them is executed."""

from __future__ import annotations

import gzip
import io
import os
import pickle
import tarfile
from dataclasses import replace
from pathlib import Path

import pytest

from tests.lab.data import writers
from tests.lab.data.damage import HTML, POINTER, flipped, refused, tarred, zipped
from tests.lab.data.writers import number, packed, python_batch, text
from torchace.lab.data.pickled import read_pickled
from torchace.lab.data.sources import SOURCES

pytestmark = pytest.mark.usefixtures("small_sources")

BINARY = writers.binary_batch(2)
RECORD = 3073
BINARY_FILES: dict[str, tuple[bytes, str]] = {
    "empty": (b"", "has 0 bytes"),
    "byte short": (BINARY[:-1], "but 3 images take 9219"),
    "byte more": (BINARY + b"\0", "has 9220 bytes"),
    "image short": (BINARY[:-RECORD], "has 6146 bytes"),
    "image more": (BINARY + BINARY[:RECORD], "has 12292 bytes"),
    "ten times": (BINARY * 10, "too many"),
    "first label": (b"\x0a" + BINARY[1:], "label 10 at image 0"),
    "last label": (BINARY[: 2 * RECORD] + b"\xff" + BINARY[2 * RECORD + 1 :], "label 255 at image 2"),
    "CIFAR-100": (b"\x13" + BINARY, "bytes"),
    "shifted by one": (BINARY[1:] + b"\0", "label"),
    "web page": (HTML, "bytes"),
    "packed": (packed(BINARY), "bytes"),
    "python batch": (python_batch(2), "bytes"),
}


@pytest.mark.parametrize(("content", "says"), BINARY_FILES.values(), ids=BINARY_FILES)
def test_binary_batches(tmp_path, content, says):
    writers.write_cifar(tmp_path / "cifar-10-batches-bin", "binary")
    (tmp_path / "cifar-10-batches-bin" / "data_batch_2.bin").write_bytes(content)
    assert says in refused("cifar10", tmp_path, "data_batch_2.bin")


@pytest.mark.parametrize("version", ["binary", "python"])
@pytest.mark.parametrize("place", range(6))
def test_a_batch_that_is_missing(tmp_path, version, place):
    writers.write_cifar(tmp_path, version)
    name = sorted(path.name for path in tmp_path.iterdir())[place]
    (tmp_path / name).unlink()
    assert "is missing beside the other batches" in refused("cifar10", tmp_path, name)


def test_an_altered_batch(tmp_path, monkeypatch):
    small = writers.small_cifar()
    for version in ("binary", "python"):
        monkeypatch.setitem(
            SOURCES, "cifar10", replace(small, **{version: dict.fromkeys(getattr(small, version), "0")})
        )
        writers.write_cifar(tmp_path / version, version)
        assert "altered content" in refused("cifar10", tmp_path / version, "data_batch_1")


class Bomb:
    """What the standard library would run on reading."""

    def __init__(self, path: Path) -> None:
        self.path = str(path)

    def __reduce__(self) -> tuple[object, ...]:
        return os.mkdir, (self.path,)


X, _ = writers.cifar_arrays(2)
SYSTEM = b"cposix\nmkdir\n(U\x04EVILtR"
PYTHON_FILES: dict[str, tuple[bytes, str]] = {
    "empty": (b"", "Python batch"),
    "web page": (HTML, "Python batch"),
    "git-lfs pointer": (POINTER, "Python batch"),
    "binary batch": (BINARY, "Python batch"),
    "packed": (packed(python_batch(2)), "Python batch"),
    "cut at 1": (python_batch(2)[:1], "Python batch"),
    "cut in a string": (python_batch(2)[:15], "Python batch"),
    "cut in the data": (python_batch(2)[:5000], "Python batch"),
    "no end": (python_batch(2)[:-1], "Python batch"),
    "zeros": (bytes(1000), "Python batch"),
    "protocol 0": (pickle.dumps({"data": 1}, 0), "instruction"),
    "protocol 3": (pickle.dumps({b"data": b"x", b"labels": [1]}, 3), "instruction PROTO"),
    "protocol 4": (pickle.dumps({b"data": X, b"labels": [1]}, 4), "instruction"),
    "protocol 5": (pickle.dumps({b"data": X, b"labels": [1]}, 5), "instruction"),
    "a list": (b"\x80\x02]q\x01.", "no dictionary"),
    "no data": (b"\x80\x02}q\x01(" + text(b"labels") + b"]u.", "no dictionary"),
    "two things": (b"\x80\x02}}.", "in the middle"),
    "nothing": (b"\x80\x02.", "in the middle"),
    "half an item": (python_batch(2, extra=text(b"key")), "Python batch"),
    "labels a number": (python_batch(2, classes=number(3)), "no list"),
    "labels text": (python_batch(2, classes=b"](" + text(b"a") * 3 + b"e"), "no list"),
    "labels true": (python_batch(2, classes=b"](\x88\x88\x88e"), "no list"),
    "labels too few": (python_batch(2, classes=b"](K\x01K\x02e"), "2 labels, not 3"),
    "labels too many": (python_batch(2, classes=b"](K\x01K\x02K\x03K\x04e"), "4 labels, not 3"),
    "label 10": (python_batch(2, classes=b"](K\x01K\x0aK\x03e"), "label 10 at image 1"),
    "label -1": (python_batch(2, classes=b"](K\x01" + number(-1) + b"K\x03e"), "label -1 at image 1"),
    "data a number": (python_batch(2, pixels=number(3)), "no numpy array"),
    "data text": (python_batch(2, pixels=text(X.tobytes())), "no numpy array"),
    "data of another shape": (python_batch(2, pixels=writers.array(X, shape=(3072, 3))), "another shape"),
    "data of 255 images": (python_batch(2, pixels=writers.array(X, shape=(255, 3072))), "another shape"),
    "data of floats": (python_batch(2, pixels=writers.array(X, dtype=b"f8")), "unsigned bytes"),
    "data of objects": (python_batch(2, pixels=writers.array(X, dtype=b"O8")), "unsigned bytes"),
    "data by columns": (python_batch(2, pixels=writers.array(X, fortran=b"\x88")), "another shape"),
    "data short": (python_batch(2, pixels=writers.array(X, data=b"abc")), "number of bytes"),
    "dtype in the place of data": (
        python_batch(2, pixels=b"cnumpy\ndtype\n" + text(b"u1") + b"\x85R"),
        "no numpy array",
    ),
    "state that is no tuple": (
        python_batch(2, pixels=b"cnumpy.core.multiarray\n_reconstruct\ncnumpy\nndarray\n\x85R]b"),
        "no numpy array",
    ),
    "state of one": (
        python_batch(2, pixels=b"cnumpy.core.multiarray\n_reconstruct\ncnumpy\nndarray\n\x85RK\x01\x85b"),
        "no numpy array",
    ),
    "data of another class": (
        python_batch(2, pixels=writers.array(X).replace(b"cnumpy\nndarray", b"cnumpy\nmemmap")),
        "'numpy.memmap'",
    ),
    "calls posix.mkdir": (python_batch(2, extra=text(b"x") + SYSTEM), "'posix.mkdir'"),
    "calls it first": (b"\x80\x02" + SYSTEM + b"0" + python_batch(2)[2:], "'posix.mkdir'"),
    "calls it in the place of data": (python_batch(2, pixels=SYSTEM), "'posix.mkdir'"),
    "calls it in the place of _reconstruct": (
        python_batch(2, pixels=writers.array(X, function=b"cposix\nmkdir\n")),
        "'posix.mkdir'",
    ),
    "calls eval": (python_batch(2, extra=text(b"x") + b"c__builtin__\neval\nU\x031/0\x85R"), "eval"),
    "calls by INST": (python_batch(2, extra=text(b"x") + b"(U\x04EVILiposix\nmkdir\n"), "instruction INST"),
    "calls by OBJ": (python_batch(2, extra=text(b"x") + b"(cposix\nmkdir\nU\x04EVILo"), "posix.mkdir"),
    "calls numpy by OBJ": (python_batch(2, extra=text(b"x") + b"(cnumpy\ndtype\nU\x02u1o"), "instruction OBJ"),
    "calls by NEWOBJ": (python_batch(2, extra=text(b"x") + b"cnumpy\ndtype\nU\x02u1\x85\x81"), "instruction NEWOBJ"),
    "calls by STACK_GLOBAL": (
        python_batch(2, extra=text(b"x") + b"\x8c\x05posix\x8c\x05mkdir\x93U\x04EVIL\x85R"),
        "instruction",
    ),
    "calls by EXT1": (python_batch(2, extra=text(b"x") + b"\x82\x01"), "instruction EXT1"),
    "persistent": (python_batch(2, extra=text(b"x") + b"Pid\n"), "instruction PERSID"),
    "calls a string": (python_batch(2, extra=text(b"x") + text(b"os.mkdir") + b")R"), "calls something"),
    "calls a call": (python_batch(2, extra=text(b"x") + b"cnumpy\ndtype\n)R)R"), "calls something"),
    "calls with a list": (python_batch(2, extra=text(b"x") + b"cnumpy\ndtype\n]R"), "calls something"),
    "state for a dictionary": (b"\x80\x02}}b.", "do not fit"),
    "items for a list": (b"\x80\x02]K\x01K\x02s.", "do not fit"),
    "items for nothing": (b"\x80\x02u.", "do not fit"),
    "a list as a key": (b"\x80\x02}]K\x01s.", "do not fit"),
    "a memory that is not": (b"\x80\x02h\x07.", "do not fit"),
    "a memory of four billion": (b"\x80\x02}r\xff\xff\xff\xffj\xfe\xff\xff\xff.", "do not fit"),
    "a string of two billion": (b"\x80\x02T\xff\xff\xff\x7fabc.", "Python batch"),
    "a string of negative length": (b"\x80\x02T\xff\xff\xff\xffabc.", "Python batch"),
    "a number of a thousand digits": (b"\x80\x02I" + b"9" * 5000 + b"\n.", "Python batch"),
    "without end": (b"\x80\x02" + b"K\x01" * 3000 + b".", "instructions"),
    "doubled forty times": (b"\x80\x02]q\x00" + b"h\x00h\x00\x86q\x00" * 40 + b".", "Python batch"),
    "nested a thousand times": (b"\x80\x02" + b"]" * 500 + b"a" * 499 + b".", "no dictionary"),
    "a shape nested 500 times": (
        python_batch(
            2, pixels=writers.array(X).replace(number(3072) + b"\x86", number(3072) + b"\x85" * 500 + b"\x86")
        ),
        "another shape",
    ),
    "itself": (b"\x80\x02]q\x00h\x00a.", "no dictionary"),
}


@pytest.mark.parametrize(("content", "says"), PYTHON_FILES.values(), ids=PYTHON_FILES)
def test_python_batches(tmp_path, monkeypatch, content, says):
    monkeypatch.chdir(tmp_path)
    folder = tmp_path / "data" / "cifar-10-batches-py"
    writers.write_cifar(folder, "python")
    (folder / "data_batch_2").write_bytes(content)
    assert says in refused("cifar10", tmp_path / "data", "data_batch_2")
    assert [path.name for path in tmp_path.iterdir()] == ["data"]  # no folder EVIL was made


def test_the_bombs_are_live(tmp_path, monkeypatch):
    """What the library refuses does explode in the standard reader: the tests above test something."""
    monkeypatch.chdir(tmp_path)
    pickle.loads(PYTHON_FILES["calls it first"][0][: 2 + len(SYSTEM)] + b".")
    assert (tmp_path / "EVIL").is_dir()
    data = pickle.dumps(Bomb(tmp_path / "second"), 2)
    with pytest.raises(ValueError, match=r"posix\.mkdir"):
        read_pickled(data, max_instructions=100)
    assert not (tmp_path / "second").exists()


def test_nesting_does_not_reach_the_bottom_of_the_stack():
    """Hashing a tuple nested this deep would end the process, not raise."""
    nested = b")" + b"\x85" * 200_000
    with pytest.raises(ValueError, match="do not fit"):
        read_pickled(b"\x80\x02}" + nested + b"K\x01s.", max_instructions=10**6)


def archive_with(kind: bytes, name: str) -> bytes:
    buffer = io.BytesIO()
    with tarfile.open(fileobj=buffer, mode="w:gz") as archive:
        member = tarfile.TarInfo(name)
        member.type, member.linkname = kind, "/etc/passwd"
        archive.addfile(member)
    return buffer.getvalue()


FILES = {name.replace(".", "__"): data for name, data in writers.cifar_files("binary").items()}
WHOLE = tarred(**FILES)
ARCHIVES: dict[str, tuple[bytes, str]] = {
    "empty": (b"", "archive"),
    "web page": (HTML, "archive"),
    "zip": (zipped(BINARY), "archive"),
    "plain tar": (gzip.decompress(WHOLE), "archive"),
    "packed text": (packed(b"text" * 500), "archive"),
    "half": (WHOLE[: len(WHOLE) // 2], "archive"),
    "first kilobyte": (WHOLE[:1000], "archive"),
    "byte wrong": (flipped(WHOLE, len(WHOLE) // 2), "archive"),
    "no files": (tarred(), "has no file data_batch_1"),
    "other files": (tarred(readme=b"hello"), "has no file data_batch_1"),
    "one batch missing": (tarred(**{k: v for k, v in FILES.items() if "4" not in k}), "has no file data_batch_4.bin"),
    "batch cut": (tarred(**{**FILES, "test_batch__bin": b"short"}), "test_batch.bin has 5 bytes"),
    "batch far too long": (tarred(**{**FILES, "test_batch__bin": bytes(10**6)}), "has no file test_batch.bin"),
    "link in the place of a batch": (archive_with(tarfile.SYMTYPE, "data_batch_1.bin"), "has no file"),
    "folder in the place of a batch": (archive_with(tarfile.DIRTYPE, "data_batch_1.bin"), "has no file"),
    "out of the folder": (tarred(**{"../../data_batch_1__bin": BINARY}), "has no file data_batch_2.bin"),
    "python bomb": (tarred(**dict.fromkeys(writers.cifar_files("python"), PYTHON_FILES["calls it first"][0])), "posix"),
}


@pytest.mark.parametrize(("content", "says"), ARCHIVES.values(), ids=ARCHIVES)
def test_archives(tmp_path, monkeypatch, content, says):
    monkeypatch.chdir(tmp_path)
    folder = tmp_path / "data"
    folder.mkdir()
    (folder / "cifar-10-binary.tar.gz").write_bytes(content)
    assert says in refused("cifar10", folder, "cifar-10-binary.tar.gz")
    assert [path.name for path in tmp_path.iterdir()] == ["data"]
    assert [path.name for path in folder.iterdir()] == ["cifar-10-binary.tar.gz"]
