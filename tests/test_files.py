"""What may be read, how much of it, and what killed processes leave."""

import gzip
import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from torchace import _files as files
from torchace.lab.training.files import remove_abandoned, whole_file, write_whole


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
    with pytest.raises(OSError, match="1,099,511,627,776 bytes, more than the 5 that it may have"):
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


def test_json_of_the_allowed_depth_survives_what_is_done_to_it() -> None:
    value = files.parse_json(b"[" * 100 + b"]" * 100)
    assert json.loads(json.dumps(value)) == value


@pytest.mark.parametrize("members", [1, 3])
def test_a_gzip_file_that_becomes_far_more_is_refused(members: int, tmp_path: Path) -> None:
    zeros = gzip.compress(bytes(100 << 20))  # 100 MiB in 100 kB
    (tmp_path / "bomb.gz").write_bytes(gzip.compress(b"innocent") * (members - 1) + zeros)
    with pytest.raises(OSError, match="far more memory than it seems"):
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
from torchace.lab.training.files import whole_file
with whole_file(Path(sys.argv[1])) as temporary:
    temporary.write_text("half")
    print(temporary, flush=True)
    sys.stdin.read()
"""


def test_what_a_killed_process_left_is_removed_and_what_a_live_one_writes_is_not(tmp_path: Path) -> None:
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
        other.write_text("somebody's")
    try:
        remove_abandoned(target)
        assert half.read_text() == "half"
    finally:
        writing.kill()
        writing.communicate()
    assert half.exists()
    remove_abandoned(target)
    assert sorted(tmp_path.iterdir()) == sorted(others)


def test_a_failed_write_leaves_nothing(tmp_path: Path) -> None:
    target = tmp_path / "new" / "folder" / "file"
    with pytest.raises(ZeroDivisionError), whole_file(target) as temporary:
        temporary.write_bytes(b"half" * (1 // 0))
    assert list(tmp_path.iterdir()) == []
    write_whole(target, b"whole")
    assert target.read_bytes() == b"whole"
    assert os.listdir(target.parent) == ["file"]
