"""Model directories on disk: paths, and interrupted saves."""

import errno
import os
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.support.saved_models import one_sentence, save_example, state
from torchace.models import mlp
from torchace.nn import SMOC, Ensemble
from torchace.nn.base import EnsembleModule
from torchace.saving import ModelFileError, load_model, save_model


@pytest.fixture
def saved(tmp_path: Path) -> tuple[Path, EnsembleModule]:
    return tmp_path / "model", save_example(tmp_path / "model")


# -- paths -------------------------------------------------------------------------------------------------------------


def test_replaces_a_model(saved: tuple[Path, EnsembleModule]) -> None:
    path, _ = saved
    other = SMOC(mlp(4, 3, None), 3, 2, num_members=4)
    save_model(path, other)
    assert state(load_model(path)) == state(other)
    assert os.listdir(path.parent) == ["model"]


def test_makes_parent_directories_and_follows_links(tmp_path: Path) -> None:
    ensemble = Ensemble([mlp(4, 3, 2)])
    save_model(tmp_path / "a" / "b" / "model", ensemble)
    (tmp_path / "link").symlink_to(tmp_path / "a" / "b" / "model")
    other = Ensemble([mlp(4, 5, 2)])
    save_model(str(tmp_path / "link"), other)
    assert (tmp_path / "link").is_symlink()
    assert state(load_model(tmp_path / "a" / "b" / "model")) == state(other)


def test_the_umask_decides_who_may_read(tmp_path: Path) -> None:
    before = os.umask(0o022)
    try:
        save_model(tmp_path / "model", Ensemble([mlp(4, 3, 2)]))
    finally:
        os.umask(before)
    assert (tmp_path / "model").stat().st_mode & 0o777 == 0o755


def make_file(path: Path) -> None:
    path.write_text("something else")


def make_directory(path: Path) -> None:
    path.mkdir()
    (path / "data.csv").write_text("1,2")


def make_other_manifest(path: Path) -> None:
    path.mkdir()
    for name in ("manifest.json", "weights.safetensors"):
        (path / name).write_text('{"name": "a web application"}')


def make_model_with_notes(path: Path) -> None:
    save_model(path, Ensemble([mlp(4, 3, 2)]))
    (path / "notes.txt").write_text("mine")


@pytest.mark.parametrize("make", [make_file, make_directory, make_other_manifest, make_model_with_notes])
def test_refuses_to_replace_other_files(make: Callable[[Path], None], tmp_path: Path) -> None:
    path = tmp_path / "model"
    make(path)
    before = contents(tmp_path)
    with pytest.raises(ModelFileError, match="remove it or choose another path") as caught:
        save_model(path, Ensemble([mlp(4, 3, 2)]))
    one_sentence(caught.value)
    assert contents(tmp_path) == before


def contents(folder: Path) -> dict[str, bytes | None]:
    return {str(p.relative_to(folder)): p.read_bytes() if p.is_file() else None for p in folder.rglob("*")}


# -- interrupted saves -------------------------------------------------------------------------------------------------


def test_a_full_disk(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    old, new = Ensemble([mlp(4, 3, 2)]), Ensemble([mlp(40, 50, 2)])
    path = tmp_path / "model"
    save_model(path, old)

    def fails(descriptor: int) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(os, "fsync", fails)
    with pytest.raises(ModelFileError, match="No space left on device") as caught:
        save_model(path, new)
    one_sentence(caught.value)
    assert state(load_model(path)) == state(old)
    assert os.listdir(tmp_path) == ["model"]


@pytest.mark.parametrize(
    ("error", "raised"),
    [(OSError(errno.EIO, "Input/output error"), ModelFileError), (KeyboardInterrupt(), KeyboardInterrupt)],
)
def test_an_interrupted_replacement_keeps_the_old_model(
    error: BaseException, raised: type[BaseException], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    old, path, rename = Ensemble([mlp(4, 3, 2)]), tmp_path / "model", os.rename
    save_model(path, old)

    def fails(source: Path, target: Path) -> None:
        if target == path and "partial" in str(source):
            raise error
        rename(source, target)

    monkeypatch.setattr(os, "rename", fails)
    with pytest.raises(raised):
        save_model(path, Ensemble([mlp(4, 5, 2)]))
    assert state(load_model(path)) == state(old)
    assert os.listdir(tmp_path) == ["model"]
