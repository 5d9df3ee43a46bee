"""Model directories on the disk: where they may go, and saves that stop half-way."""

import contextlib
import errno
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.support.saved_models import (
    one_sentence,
    save_example,
    state,
)
from torchace import _model_files as files
from torchace.models import mlp
from torchace.nn import SMOC, Ensemble
from torchace.nn.base import EnsembleModule
from torchace.saving import ModelFileError, load_model, save_model


@pytest.fixture
def saved(tmp_path: Path) -> tuple[Path, EnsembleModule]:
    return tmp_path / "model", save_example(tmp_path / "model")


# -- places ------------------------------------------------------------------------------------------------------------


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
    (path / "manifest.json").write_text('{"name": "a web application"}')


def make_model_with_notes(path: Path) -> None:
    save_model(path, Ensemble([mlp(4, 3, 2)]))
    (path / "notes.txt").write_text("mine")


@pytest.mark.parametrize("make", [make_file, make_directory, Path.mkdir, make_other_manifest, make_model_with_notes])
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


# -- saves that stop ---------------------------------------------------------------------------------------------------


class Crash(BaseException):
    """The machine stops: nothing that comes after happens."""


OPERATIONS = ("mkdir", "fsync", "rename", "unlink", "rmdir", "open")


class Operations:
    """Counts the operations on files, and fails at one of them: once, or from there on."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, error: BaseException, fail_at: int, *, for_ever: bool) -> None:
        self.count = 0
        for name in OPERATIONS:
            real = getattr(os, name)

            def operation(*args: Any, real: Any = real, **kwargs: Any) -> Any:
                self.count += 1
                if self.count == fail_at or (for_ever and self.count > fail_at):
                    raise error
                return real(*args, **kwargs)

            monkeypatch.setattr(os, name, operation)


def count_operations(monkeypatch: pytest.MonkeyPatch, path: Path) -> int:
    with monkeypatch.context() as patch:
        operations = Operations(patch, Crash(), 10**9, for_ever=False)
        save_model(path, Ensemble([mlp(4, 3, 2)]))
    return operations.count


def test_a_crash_at_any_step_leaves_the_old_model_or_the_new(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    old, new = Ensemble([mlp(4, 3, 2)]), Ensemble([mlp(4, 5, 2)])
    save_model(tmp_path / "scratch", old)
    steps = count_operations(monkeypatch, tmp_path / "scratch")
    assert steps >= 9  # two files and two directories flushed, two renames, three removals
    seen = set()
    for step in range(1, steps + 1):
        path = tmp_path / str(step) / "model"
        save_model(path, old)
        with monkeypatch.context() as patch:
            Operations(patch, Crash(), step, for_ever=True)
            with pytest.raises(Crash):
                save_model(path, new)
        found = state(load_model(path))
        assert found in (state(old), state(new))
        seen.add("old" if found == state(old) else "new")
        save_model(path, new)  # and saving goes on as if nothing had been
        assert state(load_model(path)) == state(new)
        assert not path.with_name(".model.previous").exists()
    assert seen == {"old", "new"}


def test_a_crash_while_a_first_model_is_saved(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    new = Ensemble([mlp(4, 5, 2)])
    for step in range(1, 9):
        path = tmp_path / str(step) / "model"
        path.parent.mkdir()
        with monkeypatch.context() as patch:
            Operations(patch, Crash(), step, for_ever=True)
            with contextlib.suppress(Crash):
                save_model(path, new)
        if path.exists():
            assert state(load_model(path)) == state(new)
        else:
            with pytest.raises(ModelFileError, match="There is no model"):
                load_model(path)


def check_reason(error: ModelFileError, code: int) -> None:
    assert os.strerror(code) in one_sentence(error)
    assert isinstance(error.__cause__, OSError)


@pytest.mark.parametrize("code", [errno.ENOSPC, errno.EIO, errno.EACCES])
def test_an_error_at_any_step_keeps_the_old_model(code: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    old, new = Ensemble([mlp(4, 3, 2)]), Ensemble([mlp(4, 5, 2)])
    save_model(tmp_path / "scratch", old)
    steps = count_operations(monkeypatch, tmp_path / "scratch")
    failed = 0
    for step in range(1, steps + 1):
        path = tmp_path / str(step) / "model"
        save_model(path, old)
        with monkeypatch.context() as patch:
            Operations(patch, OSError(code, os.strerror(code)), step, for_ever=False)
            expected = new
            try:
                save_model(path, new)  # succeeds where only the removal of the old model fails
            except ModelFileError as error:
                check_reason(error, code)
                expected = old
                failed += 1
        assert state(load_model(path)) == state(expected)
        if expected is old:
            assert os.listdir(path.parent) == ["model"]
    assert failed >= 6


def test_a_full_disk(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Writing itself fails, after half of the bytes."""
    old, new = Ensemble([mlp(4, 3, 2)]), Ensemble([mlp(40, 50, 2)])
    path = tmp_path / "model"
    save_model(path, old)

    def write(file: Path, data: bytes) -> None:
        file.write_bytes(data[: len(data) // 2])
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(files, "_write", write)
    with pytest.raises(ModelFileError, match="No space left on device") as caught:
        save_model(path, new)
    one_sentence(caught.value)
    assert state(load_model(path)) == state(old)
    assert os.listdir(tmp_path) == ["model"]


def test_a_limit_on_file_sizes(tmp_path: Path) -> None:
    resource = pytest.importorskip("resource")  # a real error of the operating system, not on Windows
    old, new = Ensemble([mlp(4, 3, 2)]), Ensemble([mlp(400, 500, 2)])
    save_model(tmp_path / "model", old)
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (100_000, limits[1]))
    try:
        with pytest.raises(ModelFileError, match="could not be saved") as caught:
            save_model(tmp_path / "model", new)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    one_sentence(caught.value)
    assert state(load_model(tmp_path / "model")) == state(old)
    assert os.listdir(tmp_path) == ["model"]


def test_files_of_a_killed_save_are_removed(tmp_path: Path) -> None:
    left = tmp_path / ".model.0123456789abcdef.partial"
    left.mkdir()
    (left / "weights.safetensors").write_bytes(b"half")
    (tmp_path / ".other.0123456789abcdef.partial").mkdir()
    save_model(tmp_path / "model", Ensemble([mlp(4, 3, 2)]))
    assert sorted(os.listdir(tmp_path)) == [".other.0123456789abcdef.partial", "model"]
