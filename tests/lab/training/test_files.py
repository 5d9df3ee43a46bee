"""Files stay where they belong, and say when they were changed."""

import json
import os
from pathlib import Path

import pytest

from torchace.lab.training.files import (
    PathError,
    is_name,
    is_unchanged,
    refuse_links,
    remove_partial,
    with_checksum,
    write_whole,
)


@pytest.mark.parametrize(
    "value",
    ["", ".", "..", ".a", "-a", "/a", "a/b", "../a", "a\\b", "a\0", "a\n", "a b", "ä", "a" * 101, None, 3, ["a"]],
)
def test_names_that_lead_elsewhere(value: object) -> None:
    assert not is_name(value)


def test_names_of_ours() -> None:
    assert all(map(is_name, ["main-0", "main-l0.5-s3", "main-l1e-07-s2147483647", "search-0dd37e7058a0", "0", "_a"]))


@pytest.mark.parametrize("target", ["elsewhere", "nowhere", "a/file"])
@pytest.mark.parametrize("place", ["a", "a/link", "a/b/c/link"])
def test_links_are_refused_at_any_depth(place: str, target: str, tmp_path: Path) -> None:
    (tmp_path / "elsewhere").mkdir()
    link = tmp_path / "run" / place
    link.parent.mkdir(parents=True)
    link.symlink_to(tmp_path / target)
    with pytest.raises(PathError, match="is a symbolic link, which torchace never makes") as caught:
        refuse_links(tmp_path / "run", ["a"])
    assert str(caught.value).startswith(str(link))
    refuse_links(tmp_path / "run", ["b", "lock"])  # other names are a user's own
    (tmp_path / "linked").symlink_to(tmp_path / "elsewhere")
    refuse_links(tmp_path / "linked", ["a"])  # so is where the directory itself is


def test_a_pipe_is_no_file(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "lock")
    with pytest.raises(PathError, match="lock is neither a file nor a directory"):
        refuse_links(tmp_path, ["lock"])


def test_a_link_in_place_of_the_temporary_file_is_not_followed(tmp_path: Path) -> None:
    mine = tmp_path / "mine"
    mine.write_text("mine")
    (tmp_path / f".result.json.{os.getpid()}.partial").symlink_to(mine)
    write_whole(tmp_path / "result.json", b"new")
    assert (mine.read_text(), (tmp_path / "result.json").read_bytes()) == ("mine", b"new")
    assert sorted(os.listdir(tmp_path)) == ["mine", "result.json"]


def test_only_temporary_files_of_ours_are_removed(tmp_path: Path) -> None:
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
