"""The search for files, and downloads from a local server."""

from __future__ import annotations

import hashlib
import sys
import threading
from collections.abc import Iterator
from dataclasses import replace
from functools import partial
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pooch
import pytest

from tests.lab.data import writers
from torchace.lab.data import DataError, load
from torchace.lab.data.datasets import SOURCES, cache_dir, download_file

RETRIEVE = pooch.retrieve
NOWHERE = "http://127.0.0.1:9/"  # the discard port: nothing answers


class Quiet(SimpleHTTPRequestHandler):
    def log_message(self, format: str, *args: object) -> None:
        pass


@pytest.fixture
def server(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[tuple[str, Path]]:
    """An address and the folder it serves."""
    monkeypatch.setattr("pooch.retrieve", RETRIEVE)
    monkeypatch.setenv("NO_PROXY", "127.0.0.1")
    folder = tmp_path / "served"
    folder.mkdir()
    with ThreadingHTTPServer(("127.0.0.1", 0), partial(Quiet, directory=folder)) as httpd:
        thread = threading.Thread(target=httpd.serve_forever, kwargs={"poll_interval": 0.01})
        thread.start()
        yield f"http://127.0.0.1:{httpd.server_port}/", folder
        httpd.shutdown()
        thread.join()


def sha256(path: Path) -> str:
    return hashlib.sha256(path.read_bytes()).hexdigest()


def served_mnist(url: str, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A small MNIST whose files this server has, with the hashes they have."""
    writers.write_mnist(folder)
    small = writers.small_mnist()
    train, test = (
        tuple(replace(file, sha256=sha256(folder / f"{file.name}.gz")) for file in files)
        for files in (small.train, small.test)
    )
    monkeypatch.setitem(SOURCES, "mnist", replace(small, urls=(NOWHERE, url), train=train, test=test))


@pytest.mark.parametrize("progress", [True, False])
def test_download_once(server, monkeypatch, capsys, progress):
    url, folder = server
    served_mnist(url, folder, monkeypatch)
    first = load("mnist", progress=progress)
    assert sorted(path.name for path in (cache_dir() / "mnist").iterdir()) == sorted(p.name for p in folder.iterdir())
    assert ("100%" in capsys.readouterr().err) == progress
    monkeypatch.setattr("pooch.retrieve", None)  # from now on a download would fail
    again = load("mnist")
    assert first.train.x.equal(again.train.x)


def test_only_missing_files_are_downloaded(server, tmp_path, monkeypatch):
    url, folder = server
    served_mnist(url, folder, monkeypatch)
    own = tmp_path / "own"
    writers.write_mnist(own)
    (own / "t10k-labels-idx1-ubyte.gz").unlink()
    load("mnist", directory=own, progress=False)
    assert [path.name for path in (cache_dir() / "mnist").iterdir()] == ["t10k-labels-idx1-ubyte.gz"]


def test_download_of_cifar(server, monkeypatch):
    from tests.lab.data.test_datasets import check_small_cifar, write_archive

    url, folder = server
    archive = folder / "cifar-10-binary.tar.gz"
    write_archive(archive, writers.cifar_files())
    monkeypatch.setitem(SOURCES, "cifar10", replace(writers.small_cifar(), urls=(url,), sha256=sha256(archive)))
    check_small_cifar(load("cifar10", progress=False))
    archive.unlink()
    check_small_cifar(load("cifar10", progress=False))


def download_error(url: str, *, name: str = "file.gz", folder: Path | None = None, digest: str = "0" * 64) -> str:
    with pytest.raises(DataError) as error:
        download_file(replace(SOURCES["mnist"], urls=(url,)), name, digest, folder or cache_dir(), progress=False)
    sentence = str(error.value)
    assert "\n" not in sentence
    assert name in sentence
    assert "TORCHACE_DATA" in sentence
    assert error.value.__suppress_context__ or error.value.__context__ is None
    return sentence


def test_failed_downloads(server, tmp_path):
    url, folder = server
    (folder / "file.gz").write_bytes(b"something else")
    assert "127.0.0.1: " in download_error(NOWHERE)
    assert "404" in download_error(url, name="other.gz")
    assert "hash" in download_error(url)
    assert not list(cache_dir().glob("*"))  # nothing half-done is left behind
    (tmp_path / "file").write_bytes(b"")
    assert "Not a directory" in download_error(url, folder=tmp_path / "file")


def test_a_connection_lost_half_way(server, monkeypatch):
    """The server promises more than it sends."""
    url, folder = server
    (folder / "file.gz").write_bytes(bytes(1000))
    original = Quiet.send_header

    def send_header(self: Quiet, keyword: str, value: str) -> None:
        original(self, keyword, "100000" if keyword == "Content-Length" else value)

    monkeypatch.setattr(Quiet, "send_header", send_header)
    assert "Connection broken" in download_error(url)
    assert not list(cache_dir().glob("*"))


@pytest.mark.parametrize("name", ["mnist", "fashion_mnist", "cifar10"])
def test_not_found_and_no_download(tmp_path, name):
    with pytest.raises(DataError) as error:
        load(name, directory=tmp_path, download=False)
    sentence = str(error.value)
    assert "\n" not in sentence
    for part in ("was not found in", str(tmp_path / name), str(cache_dir() / name), "TORCHACE_DATA", ".gz"):
        assert part in sentence


def test_a_data_folder_that_is_not_there(tmp_path, monkeypatch):
    monkeypatch.setenv("TORCHACE_DATA", str(tmp_path / "missing"))
    with pytest.raises(DataError, match="TORCHACE_DATA, is not a folder"):
        load("mnist")
    with pytest.raises(DataError, match="`directory`, is not a folder"):
        load("mnist", directory=tmp_path / "other")
    load("digits")  # needs no folder


def test_without_the_extra(monkeypatch):
    monkeypatch.setitem(sys.modules, "pooch", None)
    with pytest.raises(ImportError, match=r"pip install 'torchace\[tool\]'") as error:
        load("mnist")
    assert "\n" not in str(error.value)


def test_digits_without_scikit_learn(monkeypatch):
    monkeypatch.setitem(sys.modules, "sklearn.datasets", None)
    with pytest.raises(ImportError, match=r"digits needs scikit-learn.*pip install 'torchace\[tool\]'"):
        load("digits")


def test_cache_dir(monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", "/somewhere")
    assert cache_dir() == Path("/somewhere/torchace")
    monkeypatch.setenv("XDG_CACHE_HOME", "")
    monkeypatch.setenv("HOME", "/home/ada")
    assert cache_dir() == Path("/home/ada/.cache/torchace")
