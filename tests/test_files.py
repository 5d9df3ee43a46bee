"""Atomic writes, checksums, arrays, and leftovers of killed processes."""

import json
import os
from pathlib import Path

import numpy as np
import pytest

from torchace._files import (
    atomic_file,
    available_memory,
    is_unchanged,
    read_npz,
    remove_partial,
    with_checksum,
    write_atomic,
)


def test_available_memory() -> None:
    assert (available_memory() or 1 << 30) > 1 << 20


def test_arrays_are_read_without_pickle(tmp_path: Path) -> None:
    np.savez(tmp_path / "a.npz", x=np.arange(3), y=np.array([{}], dtype=object))
    assert read_npz(tmp_path / "a.npz", ("x", "z"))["x"].tolist() == [0, 1, 2]
    with pytest.raises(ValueError, match="pickle"):
        read_npz(tmp_path / "a.npz")
    data = (tmp_path / "a.npz").read_bytes()
    for damaged in (b"", data[:100], b"x" * 200, data[:60] + b"y" + data[61:]):
        (tmp_path / "b.npz").write_bytes(damaged)
        with pytest.raises((OSError, ValueError), match=r"."):
            read_npz(tmp_path / "b.npz", ("x",))


def test_a_failed_write_leaves_no_file(tmp_path: Path) -> None:
    target = tmp_path / "new" / "folder" / "file"
    with pytest.raises(ZeroDivisionError), atomic_file(target) as temporary:
        temporary.write_bytes(b"half" * (1 // 0))
    assert list(target.parent.iterdir()) == []
    write_atomic(target, b"whole")
    assert target.read_bytes() == b"whole"
    assert os.listdir(target.parent) == ["file"]


def test_only_temporary_files_are_removed(tmp_path: Path) -> None:
    (tmp_path / ".folder.1.partial").mkdir()
    for name in (".jobs.json.123.partial", ".video.partial", "a.1.partial"):
        (tmp_path / name).write_text("")
    remove_partial(tmp_path)
    assert sorted(os.listdir(tmp_path)) == [".folder.1.partial", ".video.partial", "a.1.partial"]


def test_a_checksum_covers_everything_and_survives_json() -> None:
    content = {"b": [0.1, None, "λ"], "a": {"c": 1e-300, "d": True}}
    read = json.loads(json.dumps(with_checksum(content), indent=1))
    assert is_unchanged(read)
    assert not is_unchanged({**read, "b": [0.1000000001, None, "λ"]})
    assert not is_unchanged({**read, "more": 1})
    assert not is_unchanged({**read, "b": float("inf")})
    assert not is_unchanged(content)
