"""Real processes, stopped and killed at any moment: the repeated command ends where an uninterrupted one does.

`TORCHACE_KILLS` is how many processes are killed, 8 unless set; a fifth of them or more while they write a checkpoint.
"""

from __future__ import annotations

import json
import os
import random
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.lab.sweeps.small_sweeps import leftovers, stored_files
from tests.support.fork_server import ForkServer
from tests.support.paused_command import CHECKPOINT
from torchace._files import PARTIAL
from torchace.lab.store import RunStore, RunStoreError

pytestmark = pytest.mark.extended

KILLS = int(os.environ.get("TORCHACE_KILLS", "8"))

# Two jobs, one after the other. The state, 2 MB, takes about as long to write as a step takes to compute.
SWEEP = """
[model]
hidden = [256]
num_members = 4
[train]
steps = 30
batch_size = 64
[sweep]
diversities = [0.0, 0.5]
seeds = [0, 1]
group_size = 2
"""


OWN_CODE = """
from sklearn.datasets import load_digits
import torch
from torch import nn

def make_member():
    return nn.Sequential(
        nn.Conv2d(1, 4, 3), nn.BatchNorm2d(4), nn.ReLU(), nn.Dropout(0.1), nn.Flatten(), nn.Linear(144, 10)
    )

def load():
    digits = load_digits()
    x, y = torch.tensor(digits.images)[:, None] / 16, torch.tensor(digits.target)
    return (x[:300], y[:300]), (x[300:400], y[300:400])
"""
OWN_SWEEP = """
data = { factory = "own_code:load" }
model = { factory = "own_code:make_member", num_members = 2 }
train = { epochs = 5, batch_size = 30 }
sweep = { diversities = [0.0, 0.3, 0.6], seeds = [0, 1, 2] }
"""


class Sweeping:
    """`torchace run` on one directory."""

    def __init__(self, server: ForkServer, file: Path, directory: Path, every: int = 1, held: bool = False) -> None:
        self.directory, folder = directory, Path(tempfile.mkdtemp(dir=file.parent))
        for code in file.parent.glob("*.py"):
            shutil.copy(code, folder)
        arguments = ("run", file, "--out", directory, "--set", f"checkpoint.steps={every}")
        self.command = server.start(*arguments, folder=folder, held=(CHECKPOINT, 1) if held else None)
        self.wait_until = self.command.wait_until
        self.is_over = False

    def end(self, number: signal.Signals | None = None) -> tuple[int, str, str]:
        self.is_over = True
        return self.command.end(number)

    def is_writing(self) -> bool:
        """Whether a checkpoint is being written now."""
        return any(name.endswith(PARTIAL) for names in self._checkpoints().values() for name in names)

    def is_torn(self) -> bool:
        """Whether a checkpoint was begun that no manifest names yet. For a process that is dead."""
        for job, names in self._checkpoints().items():
            manifest = self.directory / "checkpoints" / job / "manifest.json"
            saved = json.loads(manifest.read_text())["progress"]["step"] if manifest.exists() else -1
            if self.is_writing() or any(step > saved for step in _steps(names)):
                return True
        return False

    def progress(self) -> tuple[str, int]:
        """The job at hand and the step of its newest checkpoint."""
        return max(
            ((job, max(_steps(names), default=-1)) for job, names in self._checkpoints().items()), default=("", -1)
        )

    def has_results(self) -> int:
        """Number of files of finished runs, including partial ones."""
        return len(list(self.directory.glob("runs/*"))) + len(list(self.directory.glob("runs/.*")))

    def _checkpoints(self) -> dict[str, list[str]]:
        try:
            return {job.name: os.listdir(job) for job in os.scandir(self.directory / "checkpoints")}
        except FileNotFoundError:
            return {}


def _steps(names: list[str]) -> list[int]:
    return [int(name.split("-")[1].split(".")[0]) for name in names if name.startswith("state-")]


def read_untimed(directory: Path) -> dict[str, Any]:
    """Everything but times and how often the state was saved."""
    assert leftovers(directory) == []
    store = stored_files(directory)
    del store["experiment.json"]["config"]["checkpoint"]
    return store


@pytest.fixture(scope="module")
def sweep_file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    file = tmp_path_factory.mktemp("kill") / "sweep.toml"
    file.write_text(SWEEP)
    return file


@pytest.fixture(scope="module")
def server() -> Iterator[ForkServer]:
    server = ForkServer()
    yield server
    server.close()


@pytest.fixture
def started(server: ForkServer) -> Iterator[Callable[..., Sweeping]]:
    """Starts processes and leaves none behind."""
    sweeps: list[Sweeping] = []

    def start(*arguments: Any, **options: Any) -> Sweeping:
        sweeps.append(Sweeping(server, *arguments, **options))
        return sweeps[-1]

    yield start
    for sweeping in sweeps:
        if not sweeping.is_over:
            sweeping.end(signal.SIGKILL)


@pytest.fixture(scope="module")
def uninterrupted(server: ForkServer, sweep_file: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    directory = tmp_path_factory.mktemp("uninterrupted") / "out"
    code, out, err = Sweeping(server, sweep_file, directory).end()
    assert (code, err) == (0, "")
    assert "4 of 4 runs are finished." in out
    return read_untimed(directory)


def finish(sweeping: Sweeping) -> dict[str, Any]:
    code, _, err = sweeping.end()
    assert (code, err) == (0, "")
    return read_untimed(sweeping.directory)


def test_stop_request(
    sweep_file: Path, uninterrupted: dict[str, Any], tmp_path: Path, started: Callable[..., Sweeping]
) -> None:
    directory = tmp_path / "out"
    for number in (signal.SIGTERM, signal.SIGINT):
        sweeping = started(sweep_file, directory, held=True)
        before = sweeping.progress()
        assert sweeping.wait_until(lambda s=sweeping, b=before: s.progress() != b)
        # a second process on the same directory
        with pytest.raises(RunStoreError, match=f"Process {sweeping.command.pid} is using"), RunStore(directory).lock():
            pass
        code, _, err = sweeping.end(number)
        assert code == 3
        assert err == f"Interrupted. Everything so far is in {directory}; repeat the command to resume.\n"
        assert not sweeping.is_torn()
    assert finish(started(sweep_file, directory)) == uninterrupted


def test_killed(
    sweep_file: Path, uninterrupted: dict[str, Any], tmp_path: Path, started: Callable[..., Sweeping]
) -> None:
    draw = random.Random(KILLS)
    kills = torn = sweeps = 0
    directory = tmp_path / f"out{sweeps}"
    for attempt in range(4 * KILLS + 4):
        if kills >= KILLS and torn >= KILLS // 5:
            break
        kind = ("writing", "anywhere", "writing", "results")[attempt % 4]
        sweeping = started(sweep_file, directory, every=draw.choice([1, 3, 10]) if kind == "anywhere" else 1)
        alive = MOMENTS[kind](sweeping, draw)
        code, _, err = sweeping.end(signal.SIGKILL if alive else None)
        assert err == ""
        if code == -signal.SIGKILL:
            kills += 1
            torn += sweeping.is_torn()
            continue
        assert code == 0  # it was done before it could be killed
        assert read_untimed(directory) == uninterrupted
        sweeps += 1
        directory = tmp_path / f"out{sweeps}"
    assert kills >= KILLS
    assert torn >= KILLS // 5
    if directory.exists():
        sweeps += 1
        assert finish(started(sweep_file, directory)) == uninterrupted
    print(f"{kills} killed, {torn} of them while a checkpoint was being written; {sweeps} sweeps")


def test_an_own_network_killed_ten_times(server: ForkServer, tmp_path: Path, started: Callable[..., Sweeping]) -> None:
    (tmp_path / "own_code.py").write_text(OWN_CODE)
    file = tmp_path / "own.toml"
    file.write_text(OWN_SWEEP)
    uninterrupted = finish(Sweeping(server, file, tmp_path / "uninterrupted"))
    kills, sweeps, draw = 0, 0, random.Random(0)
    while kills < 10:
        sweeping = started(file, tmp_path / f"killed{sweeps}")
        alive = MOMENTS["results" if kills % 5 == 4 else "writing"](sweeping, draw)
        code, _, err = sweeping.end(signal.SIGKILL if alive else None)
        assert (code, err) in ((-signal.SIGKILL, ""), (0, ""))
        kills += code != 0
        sweeps += code == 0  # it was done before it could be killed
    for i in range(sweeps + 1):
        assert finish(started(file, tmp_path / f"killed{i}")) == uninterrupted


def _writing(sweeping: Sweeping, draw: random.Random) -> bool:
    """While a checkpoint is being written, some checkpoints from now."""
    seen, wanted = {sweeping.progress()}, draw.randint(2, 6)
    return sweeping.wait_until(
        lambda: seen.add(sweeping.progress()) is None and len(seen) > wanted and sweeping.is_writing()
    )


def _anywhere(sweeping: Sweeping, draw: random.Random) -> bool:
    """At a random moment after work has begun."""
    lock = sweeping.directory / "lock"
    mine = str(sweeping.command.pid)
    begun = sweeping.wait_until(lambda: lock.exists() and lock.read_text() == mine)
    moment = time.monotonic() + draw.uniform(0, 0.3)
    return begun and sweeping.wait_until(lambda: time.monotonic() >= moment)


def _results(sweeping: Sweeping, draw: random.Random) -> bool:
    """While the results of a job are being written, some files from now."""
    wanted = sweeping.has_results() + draw.randint(1, 4)
    return sweeping.wait_until(lambda: sweeping.has_results() >= wanted)


MOMENTS = {"writing": _writing, "anywhere": _anywhere, "results": _results}


def test_a_second_command_is_refused_by_name(
    sweep_file: Path, tmp_path: Path, started: Callable[..., Sweeping]
) -> None:
    directory = tmp_path / "out"
    with RunStore(directory).lock():
        code, out, err = started(sweep_file, directory).end()
    assert (code, out) == (1, "")
    assert err == f"Error: Process {os.getpid()} is using {directory}. Wait for it, or choose another --out.\n"


def test_a_lock_dies_with_its_process(tmp_path: Path) -> None:
    code = (
        "import fcntl, sys; f = open(sys.argv[1], 'a'); fcntl.flock(f, fcntl.LOCK_EX); print('held', flush=True); "
        "sys.stdin.read()"
    )
    arguments = [sys.executable, "-c", code, str(tmp_path / "lock")]
    with subprocess.Popen(arguments, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as holder:
        assert holder.stdout is not None
        assert holder.stdout.readline() == "held\n"
        with pytest.raises(RunStoreError, match="is using"), RunStore(tmp_path).lock():
            pass
        holder.kill()
    with RunStore(tmp_path).lock():
        pass
