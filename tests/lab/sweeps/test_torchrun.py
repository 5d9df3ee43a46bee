"""Real `torchrun` jobs: the same results as one process, a killed rank, a stopped job."""

from __future__ import annotations

import csv
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from tests.lab.cli.command_line import Invoke
from tests.lab.sweeps.small_sweeps import PATIENCE, PYTHONPATH, leftovers, small, wait_until
from tests.support.processes import team
from torchace.lab.sweeps.config import ConfigError, load_experiment
from torchace.lab.sweeps.executor import RankExecutor, _check
from torchace.lab.sweeps.sweep import Sweep
from torchace.lab.training.loop import Interrupted

pytestmark = pytest.mark.extended

EXACT = 1e-10  # float64: sums in another order, carried along for 60 steps
EVERY = 20  # steps between checkpoints
SWEEP = """
[data]
limit = 300
validation = 0.2
[model]
hidden = [6]
num_members = 3
[train]
steps = 60
batch_size = 50
learning_rate = 0.01
precision = "float64"
[sweep]
diversities = [0.0, 0.5]
seeds = [0, 1]
group_size = 2
[checkpoint]
steps = 20
"""


class Job:
    """`torchrun ... -m torchace run` on one directory; torchrun keeps each rank's output apart from its own.

    A held one waits once it has saved a checkpoint, see `tests.support.paused_command`.
    """

    def __init__(self, folder: Path, size: int, *arguments: str, held: bool = False, restarts: int = 0) -> None:
        self.logs = Path(tempfile.mkdtemp(dir=folder))
        self.process = subprocess.Popen(
            [
                *(sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={size}"),
                *(f"--max-restarts={restarts}", "--redirects=3", f"--log-dir={self.logs}"),
                *("-m", "tests.support.paused_command" if held else "torchace", "run", *arguments),
            ],
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            env={**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": PYTHONPATH},
        )

    def wait_until(self, condition: Callable[[], bool]) -> None:
        wait_until(condition, self.process, self.rank_outputs)

    def ranks(self) -> dict[int, int]:
        """The process of each rank."""
        found = {}
        children = Path(f"/proc/{self.process.pid}/task/{self.process.pid}/children").read_text().split()
        for pid in children:
            variables = Path(f"/proc/{pid}/environ").read_bytes().split(b"\0")
            found |= {int(v.partition(b"=")[2]): int(pid) for v in variables if v.startswith(b"RANK=")}
        return found

    def rank_outputs(self, stream: str = "stderr") -> list[str]:
        """Return the output of each rank before a restart by torchrun."""
        files = sorted(self.logs.glob(f"*/attempt_0/*/{stream}.log"), key=lambda file: int(file.parent.name))
        return [file.read_text() for file in files]

    def kill(self, rank: int) -> None:
        """Kills a rank; if it is not the first one, the first one detects it."""
        ranks = self.ranks()
        os.kill(ranks[rank], signal.SIGKILL)
        if rank != 0:
            os.kill(ranks[0], signal.SIGUSR1)

    def end(self) -> int:
        return self.process.wait(PATIENCE)


@pytest.fixture
def started(tmp_path: Path) -> Iterator[Callable[..., Job]]:
    """Starts jobs and leaves none behind."""
    jobs: list[Job] = []

    def start(size: int, *arguments: str, **options: Any) -> Job:
        jobs.append(Job(tmp_path, size, *arguments, **options))
        return jobs[-1]

    yield start
    for job in jobs:
        if job.process.poll() is None:
            job.process.terminate()  # torchrun ends its workers
            job.process.wait()


@pytest.fixture(scope="module")
def file(tmp_path_factory: pytest.TempPathFactory) -> str:
    file = tmp_path_factory.mktemp("torchrun") / "sweep.toml"
    file.write_text(SWEEP)
    return str(file)


@pytest.fixture(scope="module")
def alone(file: str, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """Results of one process."""
    directory = tmp_path_factory.mktemp("alone") / "out"
    Sweep(load_experiment(file), directory).run()
    return results(directory)


def results(directory: Path) -> dict[str, Any]:
    """Return the results of each run without times, digests and hardware."""
    assert leftovers(directory) == []
    found = {}
    for written in sorted(directory.glob("runs/*.json")):
        content = json.loads(written.read_text())
        kept = ("arm", "diversity", "seed", "status", "failure", "metrics", "history", "steps", "parameters", "job")
        found[content["run"]] = {key: content[key] for key in kept}
    return found


def assert_same_results(ours: Any, theirs: Any, where: str = "") -> None:
    if isinstance(theirs, dict):
        assert ours.keys() == theirs.keys(), where
        for key, value in theirs.items():
            assert_same_results(ours[key], value, f"{where}.{key}")
    elif isinstance(theirs, list):
        assert len(ours) == len(theirs), where
        for i, value in enumerate(theirs):
            assert_same_results(ours[i], value, f"{where}[{i}]")
    elif isinstance(theirs, float):
        assert ours == pytest.approx(theirs, abs=EXACT), where
    else:
        assert ours == theirs, where


def test_a_killed_rank_ends_the_job_and_the_next_job_resumes(
    file: str, alone: dict[str, Any], tmp_path: Path, started: Callable[..., Job]
) -> None:
    directory = tmp_path / "out"
    job = started(2, file, "--out", str(directory), "--parallel", "members", held=True)
    job.wait_until(lambda: saved_steps(directory) == [EVERY])
    job.kill(0)
    killed = time.monotonic()
    assert job.end() == 1
    assert time.monotonic() - killed < 60
    assert job.rank_outputs() == ["", lost_rank_message(1)]
    assert saved_steps(directory) == [EVERY]

    # another layout resumes from the checkpoint; with --max-restarts automatically
    job = started(2, file, "--out", str(directory), "--parallel", "data", held=True, restarts=1)
    job.wait_until(lambda: saved_steps(directory) != [EVERY])
    assert saved_steps(directory) == [2 * EVERY]
    job.kill(1)
    assert job.end() == 0, job.rank_outputs()
    assert job.rank_outputs() == [lost_rank_message(0), ""]
    assert_same_results(results(directory), alone)


def lost_rank_message(rank: int) -> str:
    return (
        f"Error: Rank {rank} lost contact with the others: one of them ended or does not respond. "
        "Checkpoints and finished runs are kept; repeat the command to resume.\n"
    )


def test_a_stopped_sweep_is_finished_by_more_processes(
    file: str, alone: dict[str, Any], tmp_path: Path, started: Callable[..., Job]
) -> None:
    directory = tmp_path / "out"
    job = started(2, file, "--out", str(directory), held=True)
    job.wait_until(lambda: saved_steps(directory) == [EVERY])
    job.process.send_signal(signal.SIGTERM)  # torchrun passes it on
    assert job.end() != 0
    assert job.rank_outputs() == [
        f"Interrupted. Everything so far is in {directory}; repeat the command to resume.\n",
        "",
    ]
    (stopped,) = saved_steps(directory)
    assert EVERY <= stopped < 3 * EVERY

    # another layout; the second of two jobs from its beginning
    job = started(3, file, "--out", str(directory), "--parallel", "members", "--tracker", "csv")
    assert job.end() == 0, job.rank_outputs()
    with open(directory / "metrics.csv") as rows:
        steps = [int(row["step"]) for row in csv.DictReader(rows)]
    assert steps[0] > stopped  # it resumed
    assert_same_results(results(directory), alone)
    # one rank prints and writes
    assert job.rank_outputs() == [""] * 3
    out, *silent = job.rank_outputs("stdout")
    assert silent == [""] * 2
    assert out.count("4 of 4 runs are finished.") == 1
    assert out.count("Report: ") == 1
    assert (directory / "report" / "index.html").is_file()
    assert json.loads((directory / "experiment.json").read_text())["hardware"]["processes"] == 3


def saved_steps(directory: Path) -> list[int]:
    """The steps of the checkpoints that are complete."""
    files = directory.glob("checkpoints/*/manifest.json")
    return [json.loads(file.read_text())["progress"]["step"] for file in files]


def test_an_error_is_printed_by_one_rank(file: str, tmp_path: Path, started: Callable[..., Job]) -> None:
    options = ("--set", "train.batches=separate", "--out", str(tmp_path / "out"), "--parallel", "members")
    job = started(2, file, *options)
    assert job.end() == 1
    assert job.rank_outputs("stdout") == ["", ""]
    assert sorted(text.count("\n") for text in job.rank_outputs()) == [0, 1]
    reason = (
        "λ > 0 needs members that see each other's predictions: with batches = 'separate' set diversities = [0.0], "
    )
    assert "".join(job.rank_outputs()) == f"Error: {file}: {reason}or use batches = 'exchanged'.\n"
    assert not (tmp_path / "out").exists()


def test_parallel_without_torchrun(file: str, invoke: Invoke) -> None:
    assert invoke("run", file, "--parallel", "members") == (
        1,
        "",
        "Error: --parallel needs several processes: torchrun --nproc-per-node=N -m torchace run ... "
        "--parallel members.\n",
    )


@pytest.mark.parametrize(
    ("sections", "ranks", "message"),
    [
        ({"model": {"kind": "smoc"}}, (2, 1), "model.kind: members of 'smoc' share a trunk and cannot be spread"),
        ({"train": {"detach_others": False}}, (2, 1), "train.detach_others: expected true, because members on other"),
        ({"train": {"batch_size": 3}}, (1, 4), "train.batch_size: expected a sample for each of 4 ranks, but got 3"),
    ],
)
def test_experiments_that_cannot_be_spread(sections: dict[str, Any], ranks: tuple[int, int], message: str) -> None:
    [arm] = small(**sections).complete_arms()
    with pytest.raises(ConfigError, match=message):
        _check(arm, SimpleNamespace(members=ranks[0], data=ranks[1]))  # type: ignore[arg-type]
    _check(arm, SimpleNamespace(members=1, data=2))  # type: ignore[arg-type]


def rank_sweep(folder: str, sections: dict[str, Any], layout: str) -> Sweep:
    experiment = small(**sections)
    return Sweep(experiment, Path(folder), RankExecutor(experiment, "cpu", layout))


def run_and_expect_error(folder: str, sections: dict[str, Any], layout: str) -> str:
    try:
        rank_sweep(folder, sections, layout).run()
    except ConfigError as error:
        return str(error)
    return ""


def test_more_ranks_than_members(tmp_path: Path) -> None:
    found = team().run(4, run_and_expect_error, str(tmp_path / "out"), {"model": {"num_members": 3}}, "members")
    message = "expected a member for each of 4 ranks, but got 3. Change it, or use fewer ranks or --parallel data."
    assert found == [f"model.num_members: {message}"] * 4  # every rank reports it, none waits
    assert not (tmp_path / "out").exists()


def started_with(sections: list[dict[str, Any]], parallel: list[str], folder: str) -> str:
    """Return the error of a rank where ranks got different settings."""
    import torch.distributed as dist

    rank = dist.get_rank()
    try:
        rank_sweep(folder, sections[rank], parallel[rank])
    except ValueError as error:
        return str(error)
    return ""


def test_ranks_with_different_configurations(tmp_path: Path) -> None:
    others = [{}, {"train": {"learning_rate": 0.02}}]
    found = team().run(2, started_with, others, ["data", "data"], str(tmp_path))
    end = "on every rank, but rank 1 differs from rank 0. Start all ranks with one command."
    assert found == [f"Expected the same experiment {end}"] * 2
    found = team().run(2, started_with, [{}, {}], ["data", "members"], str(tmp_path))
    assert found == [f"Expected the same --parallel {end}"] * 2
    assert team().run(2, started_with, [{}, {}], ["data", "data"], str(tmp_path)) == [""] * 2
    assert list(tmp_path.iterdir()) == []


def swept(folder: str, sections: dict[str, Any], layout: str) -> bool:
    sweep = rank_sweep(folder, sections, layout)
    failures = sweep.run()
    return sweep.executor.is_first or failures == {}


ARMS: dict[str, dict[str, Any]] = {
    "exchanged": {"train": {"batches": "exchanged"}},
    "convolutions": {
        "model": {"network": "resnet", "depth": 8, "width": 2},
        "train": {"steps": 2},
        "data": {"limit": 60},
    },
    "a shared trunk": {"model": {"kind": "smoc"}},
    "a failure": {"train": {"learning_rate": 1e300}},
}


@pytest.mark.parametrize(
    ("name", "size", "layout"),
    [
        ("exchanged", 2, "members"),
        ("exchanged", 4, "2x2"),
        ("convolutions", 2, "members"),  # with batch norm: every rank has the whole batch
        ("a shared trunk", 2, "data"),
        ("a failure", 2, "members"),
        ("a failure", 2, "data"),
    ],
)
def test_sweeps_equal_one_process(tmp_path: Path, name: str, size: int, layout: str) -> None:
    common = {"train": {"precision": "float64", "steps": 6}}
    sections = {**ARMS[name], "train": {**common["train"], **ARMS[name].get("train", {})}}
    assert team().run(size, swept, str(tmp_path / "ranks"), sections, layout) == [True] * size
    failures = Sweep(small(**sections), tmp_path / "one").run()
    assert (len(failures) > 0) == (name == "a failure")
    assert_same_results(results(tmp_path / "ranks"), results(tmp_path / "one"))
    # nothing is left to do for one process
    before = sorted((tmp_path / "ranks" / "runs").iterdir())
    Sweep(small(**sections), tmp_path / "ranks").run()
    assert sorted((tmp_path / "ranks" / "runs").iterdir()) == before


@pytest.mark.parametrize("layout", ["data", "members"])
def test_ranks_do_not_go_on_from_the_weights_of_others(tmp_path: Path, layout: str) -> None:
    now: dict[str, Any] = {"train": {"precision": "float64", "steps": 6}, "sweep": {"diversities": [0.0]}}
    before = {**now, "sweep": {"diversities": [0.9]}}
    stop = iter([False] * 4 + [True])
    with pytest.raises(Interrupted):
        Sweep(small(**before), tmp_path / "ranks").run(stop=lambda: next(stop))
    (tmp_path / "ranks" / "jobs.json").unlink()
    assert team().run(2, swept, str(tmp_path / "ranks"), now, layout) == [True] * 2
    Sweep(small(**now), tmp_path / "one").run()
    assert_same_results(results(tmp_path / "ranks"), results(tmp_path / "one"))
    assert leftovers(tmp_path / "ranks") == []
