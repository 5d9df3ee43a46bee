"""Bounded reading of files, atomic writes, and leftovers of killed processes."""

import gzip
import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from torchace import _files as files
from torchace._files import (
    PathError,
    atomic_file,
    is_name,
    is_unchanged,
    refuse_links,
    remove_abandoned,
    remove_partial,
    with_checksum,
    write_atomic,
)


@pytest.mark.parametrize("read", [files.open_regular, files.check_regular, lambda path: files.read_bounded(path, 9)])
@pytest.mark.parametrize("make", [os.mkfifo, Path.mkdir, lambda path: path.symlink_to("/dev/zero")])
def test_only_regular_files_are_read(
    read: Callable[[Path], object], make: Callable[[Path], object], tmp_path: Path
) -> None:
    make(tmp_path / "file")
    with pytest.raises(OSError, match=r"not a regular file|Is a directory"):
        read(tmp_path / "file")


def test_a_file_is_read_up_to_a_bound(tmp_path: Path) -> None:
    file = tmp_path / "file"
    file.write_bytes(b"12345")
    assert files.read_bounded(file, 5) == b"12345"
    os.truncate(file, 1 << 40)  # nothing of it is on the disk, and nothing is read
    with pytest.raises(OSError, match="1,099,511,627,776 bytes, more than the limit of 5"):
        files.read_bounded(file, 5)


@pytest.mark.parametrize(
    ("text", "why"),
    [
        ("[" * 101 + "]" * 101, "100 levels"),
        ('{"a":' * 500 + "1" + "}" * 500, "100 levels"),
        ("[" * 10**5, "100 levels"),
        ("[" + "[]," * 3_000_000 + "0]", "4,000,000 values"),
        ("[1", "delimiter"),
    ],
)
def test_json_that_would_cost_much_is_refused(text: str, why: str) -> None:
    with pytest.raises(ValueError, match=why):
        files.parse_json(text.encode())


def test_json_of_the_allowed_depth_can_be_processed() -> None:
    value = files.parse_json(b"[" * 100 + b"]" * 100)
    assert json.loads(json.dumps(value)) == value


@pytest.mark.parametrize("members", [1, 3])
def test_a_gzip_file_that_becomes_far_more_is_refused(members: int, tmp_path: Path) -> None:
    zeros = gzip.compress(bytes(100 << 20))  # 100 MiB in 100 kB
    (tmp_path / "bomb.gz").write_bytes(gzip.compress(b"innocent") * (members - 1) + zeros)
    with pytest.raises(OSError, match="far too much for a file of this size"):
        files.check_gzip(tmp_path / "bomb.gz")
    (tmp_path / "fine.gz").write_bytes(gzip.compress(os.urandom(1000) * 50) * members)
    files.check_gzip(tmp_path / "fine.gz")


def test_the_memory_limit_of_a_process_counts() -> None:
    code = (
        "import os, resource; from torchace._files import available_memory; "
        "used = int(open('/proc/self/statm').read().split()[0]) * os.sysconf('SC_PAGE_SIZE'); "
        "resource.setrlimit(resource.RLIMIT_AS, (used + (1 << 28),) * 2); print(available_memory())"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert 0 < int(done.stdout) <= 1 << 28


HELD = """
import sys
from pathlib import Path
from torchace._files import atomic_file
with atomic_file(Path(sys.argv[1])) as temporary:
    temporary.write_text("half")
    print(temporary, flush=True)
    sys.stdin.read()
"""


def test_temporary_files_of_killed_processes_are_removed(tmp_path: Path) -> None:
    target = tmp_path / "scores.json"
    writing = subprocess.Popen(
        [sys.executable, "-c", HELD, str(target)], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    assert writing.stdout is not None
    half = Path(writing.stdout.readline().strip())
    others = [
        tmp_path / ".other.json.123.partial",
        tmp_path / ".scores.json.backup",
        tmp_path / ".scores.json.a b.partial",
    ]
    for other in others:
        other.write_text("other")
    try:
        remove_abandoned(target)
        assert half.read_text() == "half"
    finally:
        writing.kill()
        writing.communicate()
    assert half.exists()
    remove_abandoned(target)
    assert sorted(tmp_path.iterdir()) == sorted(others)


def test_a_failed_write_leaves_no_file(tmp_path: Path) -> None:
    target = tmp_path / "new" / "folder" / "file"
    with pytest.raises(ZeroDivisionError), atomic_file(target) as temporary:
        temporary.write_bytes(b"half" * (1 // 0))
    assert list(tmp_path.iterdir()) == []
    write_atomic(target, b"whole")
    assert target.read_bytes() == b"whole"
    assert os.listdir(target.parent) == ["file"]


@pytest.mark.parametrize(
    "value",
    ["", ".", "..", ".a", "-a", "/a", "a/b", "../a", "a\\b", "a\0", "a\n", "a b", "ä", "a" * 101, None, 3, ["a"]],
)
def test_invalid_names(value: object) -> None:
    assert not is_name(value)


def test_valid_names() -> None:
    assert all(map(is_name, ["main-0", "main-l0.5-s3", "main-l1e-07-s2147483647", "search-0dd37e7058a0", "0", "_a"]))


@pytest.mark.parametrize("target", ["elsewhere", "nowhere", "a/file"])
@pytest.mark.parametrize("place", ["a", "a/link", "a/b/c/link"])
def test_links_are_refused_at_any_depth(place: str, target: str, tmp_path: Path) -> None:
    (tmp_path / "elsewhere").mkdir()
    link = tmp_path / "run" / place
    link.parent.mkdir(parents=True)
    link.symlink_to(tmp_path / target)
    with pytest.raises(PathError, match="is a symbolic link, which torchace never creates") as caught:
        refuse_links(tmp_path / "run", ["a"])
    assert str(caught.value).startswith(str(link))
    refuse_links(tmp_path / "run", ["b", "lock"])  # other names are a user's own
    (tmp_path / "linked").symlink_to(tmp_path / "elsewhere")
    refuse_links(tmp_path / "linked", ["a"])  # so is where the directory itself is


def test_a_pipe_is_no_file(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "lock")
    with pytest.raises(PathError, match="lock is neither a file nor a directory"):
        refuse_links(tmp_path, ["lock"])


def test_a_link_instead_of_the_temporary_file_is_not_followed(tmp_path: Path) -> None:
    mine = tmp_path / "mine"
    mine.write_text("mine")
    (tmp_path / f".result.json.{os.getpid()}.partial").symlink_to(mine)
    write_atomic(tmp_path / "result.json", b"new")
    assert (mine.read_text(), (tmp_path / "result.json").read_bytes()) == ("mine", b"new")
    assert sorted(os.listdir(tmp_path)) == ["mine", "result.json"]


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
