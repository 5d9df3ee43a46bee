"""Sweeps on a Ray cluster of two nodes give the results of a local sweep, also after workers are killed."""

from __future__ import annotations

import io
import os
import re
import signal
import socket
import subprocess
import sys
import tempfile
import time
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from rich.console import Console

from tests.lab.cli.command_line import Invoke
from tests.lab.sweeps.small_sweeps import PATIENCE, command, leftovers, stored_files, wait_until
from tests.support.paused_ray import make_paused_sender
from torchace.lab.cli.progress import SweepProgress
from torchace.lab.cli.terminal import INTERRUPTED, SOME_FAILED
from torchace.lab.schema.experiment import Experiment
from torchace.lab.schema.results import GroupPlan, RunKey
from torchace.lab.store import RunStore
from torchace.lab.sweeps.api import sweep
from torchace.lab.sweeps.callbacks import Callback
from torchace.lab.sweeps.config import ConfigError, load_experiment
from torchace.lab.sweeps.executor import UnfinishedRunsError
from torchace.lab.sweeps.sweep import Sweep
from torchace.lab.training.loop import Interrupted, Progress

pytest.importorskip("ray", reason="needs the extra `ray`")

import psutil  # it comes with Ray
import ray
from ray.cluster_utils import Cluster

from torchace.lab.sweeps import ray as on_ray
from torchace.lab.sweeps.ray import RayExecutor

pytestmark = pytest.mark.extended


# Two jobs whose runs fail at once, then four that last, or wait to be killed: see `make_paused_sender`.
SWEEP = """
[model]
hidden = [256]
num_members = 4
[train]
steps = 60
batch_size = 64
[sweep]
diversities = [0.0, 0.5]
seeds = [0, 1, 2, 3]
group_size = 2
[checkpoint]
steps = 3
[[arms]]
name = "wild"
diversities = [0.0]
train = { optimizer = "sgd", learning_rate = 1e38, steps = 5 }
[[arms]]
name = "calm"
"""
RUNS, FAILED = 12, 4


# -- clusters and workers ---------------------------------------------------------------------------------------------


class Nodes:
    """Two nodes of one core each."""

    def __init__(self, cluster: Cluster) -> None:
        self.cluster = cluster
        self.address: str = cluster.address
        self.add()

    def add(self, **resources: int) -> Any:
        return self.cluster.add_node(num_cpus=1, object_store_memory=100_000_000, **resources)

    def workers(self, node: Any = None) -> dict[str, psutil.Process]:
        """The processes that do a job now, by the job's name; of all nodes unless one is given."""
        found = {}
        for each in self.cluster.list_all_nodes() if node is None else [node]:
            for process, title in _children(each):
                if match := re.match(r"ray::torchace (\w+-\d+)", title):
                    found[match[1]] = process
        return found


def _children(node: Any) -> Iterator[tuple[psutil.Process, str]]:
    """The processes of a node and their titles."""
    try:
        children = psutil.Process(node.all_processes["raylet"][0].process.pid).children()
    except psutil.NoSuchProcess:
        return
    for process in children:
        try:
            yield process, " ".join(process.cmdline())
        except psutil.Error:  # it has just ended
            continue


@pytest.fixture(scope="module")
def nodes() -> Iterator[Nodes]:
    head = {"num_cpus": 1, "object_store_memory": 100_000_000, "include_dashboard": False}
    with short_folder() as folder, pytest.MonkeyPatch.context() as patch:
        patch.setenv("RAY_TMPDIR", folder)
        patch.setenv("RAY_worker_niceness", "0")  # or workers wait for other processes on this machine
        patch.setenv("RAY_AUTH_MODE", "disabled")  # or Ray writes a token to the user's home
        patch.setenv("GRPC_ENABLE_FORK_SUPPORT", "0")  # or some processes that it starts for ray:// die at their start
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", "unclosed file .*ray_client_server", ResourceWarning)  # Ray's own
            cluster = Cluster(initialize_head=True, head_node_args={**head, "ray_client_server_port": _free_port()})
        try:
            yield Nodes(cluster)
        finally:
            cluster.shutdown()


def short_folder() -> tempfile.TemporaryDirectory[str]:
    """Not pytest's: Ray's sockets are in it, and a socket's name has 107 characters at most."""
    return tempfile.TemporaryDirectory(prefix="ray", ignore_cleanup_errors=True)


@pytest.fixture(scope="module")
def joined(nodes: Nodes) -> Iterator[Nodes]:
    """This process is a driver: several sweeps have the same workers, which import torch once."""
    ray.init(nodes.address, log_to_driver=False)
    try:
        yield nodes
    finally:
        ray.shutdown()


def _free_port() -> int:
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        return int(listener.getsockname()[1])


# -- sweeps, local clusters -------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def sweep_file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    file = tmp_path_factory.mktemp("ray") / "sweep.toml"
    file.write_text(SWEEP)
    return file


@pytest.fixture(scope="module")
def experiment(sweep_file: Path) -> Experiment:
    return load_experiment(str(sweep_file))


@pytest.fixture(scope="module")
def uninterrupted(experiment: Experiment, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    directory = tmp_path_factory.mktemp("uninterrupted") / "out"
    failures = Sweep(experiment, directory).run()
    assert [run.arm for run in failures] == ["wild"] * FAILED
    return stored_files(directory)


class Counting(Callback):
    """Counts what is finished, and who died."""

    def __init__(self) -> None:
        self.counts: list[int] = []
        self.deaths: list[str] = []

    def on_group_end(self, job: GroupPlan, done: int) -> None:
        self.counts.append(done)

    def on_worker_lost(self, job: GroupPlan, how: str) -> None:
        self.deaths.append(how)


def assert_finished(sweep: Sweep, callback: Counting, uninterrupted: dict[str, Any]) -> None:
    """Runs a sweep and compares."""
    failures = sweep.run(callback)
    assert [run.arm for run in failures] == ["wild"] * FAILED
    assert callback.counts == list(range(2, RUNS + 1, 2))  # every job once
    assert same(sweep.directory, uninterrupted)


def same(directory: Path, uninterrupted: dict[str, Any]) -> bool:
    ours, theirs = stored_files(directory), {**uninterrupted}
    for store in (ours, theirs):  # how often the state was saved is no part of a result
        store["experiment.json"] = {**store["experiment.json"], "config": None}
    assert leftovers(directory) == []
    return ours == theirs


def saved_every(steps: int | None, experiment: Experiment) -> Experiment:
    return experiment.model_copy(update={"checkpoint": experiment.checkpoint.model_copy(update={"steps": steps})})


Hold = Callable[[Callable[[str], bool]], None]


@pytest.fixture
def hold(monkeypatch: pytest.MonkeyPatch) -> Hold:
    """From now on the workers of this test wait while they must, see `make_paused_sender`."""
    return lambda must_wait: monkeypatch.setattr(on_ray, "Sender", make_paused_sender(must_wait))


# -- lost workers ------------------------------------------------------------------------------------------------------


def test_two_nodes_give_what_one_machine_gives(
    joined: Nodes, experiment: Experiment, uninterrupted: dict[str, Any], tmp_path: Path, hold: Hold
) -> None:
    at_work: dict[Any, int] = {}  # most jobs that wait on a node at once
    directory, go = tmp_path / "out", tmp_path / "go"

    class Looking(Counting):
        messages = 0

        def on_group_step(self, job: GroupPlan, progress: Progress) -> None:
            self.messages += job.id.startswith("calm")
            for node in [] if go.exists() else joined.cluster.list_all_nodes():
                if held := [name for name in joined.workers(node) if name.startswith("calm")]:
                    at_work[node] = max(len(held), at_work.get(node, 0))
            if len(at_work) == 2 and self.messages > 200:
                go.touch()

    hold(lambda job: job.startswith("calm") and not go.exists())  # or one node may do it all
    callback = Looking()
    assert_finished(Sweep(experiment, directory, RayExecutor()), callback, uninterrupted)
    assert list(at_work.values()) == [1, 1]  # a job that sends messages keeps its CPU
    assert callback.deaths == []


def test_five_workers_killed(
    joined: Nodes, experiment: Experiment, uninterrupted: dict[str, Any], tmp_path: Path, hold: Hold
) -> None:
    quota = {"calm-0": 3, "calm-1": 2}
    hold(lambda job: job in quota and not (tmp_path / f"go-{job}").exists())

    class Killing(Counting):
        """Kills workers that got further than those before them."""

        seen: set[str]
        killed: list[str]

        def on_group_step(self, job: GroupPlan, progress: Progress) -> None:
            new = {str(path) for path in tmp_path.glob(f"out/checkpoints/{job.id}/state-*.safetensors")} - self.seen
            worker = joined.workers().get(job.id)
            if new and worker is not None and self.killed.count(job.id) < quota.get(job.id, 0):
                self.seen |= new
                self.killed.append(job.id)
                if self.killed.count(job.id) == quota[job.id]:
                    (tmp_path / f"go-{job.id}").touch()
                worker.kill()

    callback = Killing()
    callback.seen, callback.killed = set(), []
    assert_finished(Sweep(saved_every(1, experiment), tmp_path / "out", RayExecutor()), callback, uninterrupted)
    assert callback.deaths == ["WorkerCrashedError"] * sum(quota.values())


def test_a_node_dies(
    joined: Nodes, experiment: Experiment, uninterrupted: dict[str, Any], tmp_path: Path, hold: Hold
) -> None:
    nodes = [joined.add()]
    go = tmp_path / "go"
    hold(lambda job: job.startswith("calm") and not go.exists())

    class Pulling(Counting):
        def on_group_step(self, job: GroupPlan, progress: Progress) -> None:
            if nodes and job.id in joined.workers(nodes[0]):
                joined.cluster.remove_node(nodes.pop(), allow_graceful=False)
                go.touch()

    callback = Pulling()
    try:
        assert_finished(Sweep(experiment, tmp_path / "out", RayExecutor()), callback, uninterrupted)
    finally:
        for node in nodes:
            joined.cluster.remove_node(node)
    assert nodes == []
    assert len(callback.deaths) == 1


def test_a_group_whose_workers_die_repeatedly_is_skipped(
    joined: Nodes,
    experiment: Experiment,
    uninterrupted: dict[str, Any],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    hold: Hold,
) -> None:
    class Killing(Counting):
        def on_group_step(self, job: GroupPlan, progress: Progress) -> None:
            if job.id == "calm-3" and (worker := joined.workers().get(job.id)):
                worker.kill()

    hold(lambda job: job == "calm-3")
    monkeypatch.setattr(on_ray, "MAX_DEATHS", 2)
    sweep, callback = Sweep(experiment, tmp_path, RayExecutor()), Killing()
    with pytest.raises(UnfinishedRunsError) as caught:
        sweep.run(callback)
    lost = [RunKey("calm", 0.5, 2), RunKey("calm", 0.5, 3)]
    assert caught.value.reasons == dict.fromkeys(lost, "its worker died 2 times (WorkerCrashedError)")
    assert [run for run in _runs(tmp_path) if not RunStore(tmp_path).is_finished(run)] == lost

    monkeypatch.undo()
    callback = Counting()
    sweep.run(callback)
    assert callback.counts == [RUNS]
    assert same(tmp_path, uninterrupted)


def _runs(directory: Path) -> list[RunKey]:
    return [run for job in RunStore(directory).groups() for run in job.runs]


def test_stopped_and_resumed_from_a_damaged_checkpoint(
    joined: Nodes,
    experiment: Experiment,
    uninterrupted: dict[str, Any],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    hold: Hold,
) -> None:
    hold(lambda job: job == "calm-0")  # which does not finish before the sweep is stopped
    sweep = Sweep(experiment, tmp_path, RayExecutor())
    with pytest.raises(Interrupted):
        sweep.run(stop=lambda: any(tmp_path.glob("checkpoints/calm-0/manifest.json")))
    for worker in joined.workers().values():  # as the end of the driver would
        worker.kill()
    monkeypatch.undo()
    (state,) = tmp_path.glob("checkpoints/calm-0/state-*.safetensors")
    whole = state.read_bytes()
    state.write_bytes(whole[:-1] + b"?")
    with pytest.raises(UnfinishedRunsError) as caught:
        sweep.run()
    assert [run for run in _runs(tmp_path) if not RunStore(tmp_path).is_finished(run)] == list(caught.value.reasons)
    assert set(caught.value.reasons.values()) == {
        f"The checkpoint in {state.parent} is damaged ({state.name} was changed or truncated). "
        "Remove that folder to restart its runs"
    }
    state.write_bytes(whole)
    sweep.run()
    assert same(tmp_path, uninterrupted)


# -- errors -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("device", "words"),
    [
        ("cuda", "Expected a Ray cluster with GPUs for --device cuda, but it has none. Use --device cpu."),
        ("cuda:1", "Expected --device auto, cpu or cuda with --ray, but got 'cuda:1'. Ray chooses the GPU."),
    ],
)
def test_a_device_the_cluster_does_not_have(joined: Nodes, device: str, words: str) -> None:
    with pytest.raises(ValueError, match=re.escape(words)):
        RayExecutor(device)
    assert RayExecutor("auto").device == RayExecutor("cpu").device == "cpu"


def test_more_threads_than_a_node_has_cores(joined: Nodes) -> None:
    with pytest.raises(
        ValueError, match=r"a node with 3 CPUs.* the largest node has 1\. Set OMP_NUM_THREADS=1 or less"
    ):
        RayExecutor(threads=3)


@pytest.mark.skipif(torch.cuda.is_available(), reason="needs a torch without CUDA")
def test_a_gpu_that_torch_does_not_see(joined: Nodes) -> None:
    node = joined.add(num_gpus=1)
    try:
        assert (RayExecutor("auto").device, RayExecutor("cpu").device) == ("cuda", "cpu")
        with pytest.raises(ValueError, match=r"cannot train on cuda \(AssertionError: Torch not compiled with CUDA"):
            RayExecutor("auto").hardware()
    finally:
        joined.cluster.remove_node(node)


def test_a_wrong_address_in_python_names_the_argument() -> None:
    data = torch.randn(40, 4), torch.arange(40) % 2
    with pytest.raises(ConfigError, match=r"^Expected ray=auto, local"):
        sweep(lambda: torch.nn.Linear(4, 2), data, data, ray="cluster", epochs=1)


@pytest.mark.parametrize(
    ("address", "words"),
    [
        ("nonsense", "Expected --ray auto, local, HOST:PORT or ray://HOST:PORT, but got 'nonsense'."),
        ("ray://somewhere", "Expected --ray auto, local, HOST:PORT or ray://HOST:PORT, but got 'ray://somewhere'."),
        ("127.0.0.1:{port}", "Cannot reach a Ray cluster at 127.0.0.1:{port}: Connection refused."),
        ("ray://127.0.0.1:{port}", "Cannot reach a Ray cluster at ray://127.0.0.1:{port}: Connection refused."),
        ("ray://no.such.host.invalid:10001", "Cannot reach a Ray cluster at ray://no.such.host.invalid:10001: "),
    ],
)
def test_an_unreachable_address(address: str, words: str, sweep_file: Path, tmp_path: Path, invoke: Invoke) -> None:
    port = _free_port()
    code, out, err = invoke("run", sweep_file, "--out", tmp_path / "out", "--ray", address.format(port=port))
    assert (code, out) == (1, "")
    assert err.startswith(f"Error: {words.format(port=port)}")
    assert err.count("\n") == 1
    assert not (tmp_path / "out").exists()


def test_runs_that_were_given_up_are_named(
    sweep_file: Path, tmp_path: Path, invoke: Invoke, monkeypatch: pytest.MonkeyPatch
) -> None:
    @contextmanager
    def fail_to_train(*arguments: Any) -> Iterator[None]:
        raise UnfinishedRunsError({RunKey("main", 0.5, 1): "its worker died"})
        yield

    monkeypatch.setattr(on_ray, "connect_ray", fail_to_train)
    assert invoke("run", sweep_file, "--out", tmp_path, "--ray", "local") == (
        1,
        "",
        "Run λ=0.5, seed 1 (main) is not finished: its worker died.\n"
        f"All other runs are in {tmp_path}. Repeat the command to retry the unfinished ones.\n",
    )


def test_without_ray(sweep_file: Path, tmp_path: Path) -> None:
    code = "import sys; sys.modules['ray'] = None; from torchace.lab.cli.app import main; main()"
    arguments = [sys.executable, "-c", code, "run", str(sweep_file), "--out", str(tmp_path / "out"), "--ray", "local"]
    result = subprocess.run(arguments, capture_output=True, text=True, check=False)
    assert (result.returncode, result.stdout) == (1, "")
    assert result.stderr == "Error: Sweeps on Ray need ray: pip install 'torchace[ray]'.\n"


def test_a_local_sweep_does_not_import_ray() -> None:
    code = "import sys, torchace.lab.cli, torchace.lab.cli.progress; print('ray' in sys.modules)"
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert result.stdout == "False\n"


def test_several_jobs_at_once_have_a_bar_each() -> None:
    screen = io.StringIO()
    jobs = [GroupPlan(f"main-{seed}", (RunKey("main", 0.5, seed),)) for seed in range(2)]
    with SweepProgress(Console(file=screen, force_terminal=True, width=120)) as progress:
        progress.on_plan(0, 2)
        for step, job in enumerate(jobs, 3):
            progress.on_group_start(job)
            progress.on_group_step(job, Progress(step, 12, [2.5]))
        progress.bars.refresh()
        progress.on_worker_lost(jobs[1], "NodeDiedError")
        for done, job in enumerate(jobs, 1):
            progress.on_group_end(job, done)
    shown = re.sub(r"\x1b\[[0-9;?]*[A-Za-z]", "", screen.getvalue())
    assert re.search(r"main λ=0.5, seed 0 [━╺╸]+ +3/12", shown)
    assert re.search(r"main λ=0.5, seed 1 [━╺╸]+ +4/12", shown)
    words = "main λ=0.5, seed 1: the worker died (NodeDiedError). Resuming from the newest checkpoint."
    assert words in shown


# -- commands ---------------------------------------------------------------------------------------------------------


class Driving:
    """`torchace run --ray ADDRESS` as a process of its own, in a process group of its own."""

    def __init__(self, file: Path, directory: Path, address: str, held: bool, env: dict[str, str]) -> None:
        self.directory = directory
        arguments = ("run", str(file), "--out", str(directory), "--ray", address)
        options: dict[str, Any] = {"start_new_session": True, "env": env}
        if held:
            self.process = command(str(directory / "never"), *arguments, module="tests.support.paused_ray", **options)
        else:
            self.process = command(*arguments, **options)

    def wait_until(self, condition: Callable[[], object]) -> None:
        wait_until(condition, self.process, self.end)

    def checkpoints(self) -> set[Path]:
        return set(self.directory.glob("checkpoints/*/state-*.safetensors"))

    def results(self) -> set[Path]:
        return set(self.directory.glob("runs/*.json"))

    def end(self) -> tuple[int, str, str]:
        out, err = self.process.communicate(timeout=PATIENCE)
        return self.process.returncode, out, err

    def close(self) -> None:
        with self.process:  # its pipes are closed, whether it is killed now or has ended long ago
            self.process.kill()


@pytest.fixture
def drive(sweep_file: Path, tmp_path: Path) -> Iterator[Callable[..., Driving]]:
    """Starts drivers, all on one directory, and leaves none behind."""
    drivers: list[Driving] = []

    def start(address: str, held: bool = False, **env: str) -> Driving:
        drivers.append(Driving(sweep_file, tmp_path / "out", address, held, env))
        return drivers[-1]

    yield start
    for driver in drivers:
        driver.close()


def assert_driver_finished(driver: Driving, uninterrupted: dict[str, Any], already: int = 0) -> None:
    code, out, err = driver.end()
    assert code == SOME_FAILED, err
    assert re.fullmatch(rf"(Run λ=0, seed \d \(wild\) failed at step .*\n){{{FAILED}}}", err)
    if already:
        assert out.startswith(f"{already} of {RUNS} runs are already finished.\n")
    counts = [int(count) for count in re.findall(rf": (\d+) of {RUNS} runs are finished\.", out)]
    assert counts == list(range(already + 2, RUNS + 1, 2))  # every job once
    assert "Report: " in out
    assert same(driver.directory, uninterrupted)


def test_a_driver_is_killed_and_stopped_and_repeated_from_outside(
    nodes: Nodes, drive: Callable[..., Driving], uninterrupted: dict[str, Any]
) -> None:
    driver = drive(nodes.address, held=True)
    driver.wait_until(lambda: driver.results() and driver.checkpoints())
    driver.process.kill()
    assert driver.end()[0] == -signal.SIGKILL
    kept = {file: (file.stat().st_ino, file.stat().st_mtime_ns) for file in driver.results()}
    before = driver.checkpoints()

    driver = drive("auto", held=True, RAY_ADDRESS=nodes.address)
    driver.wait_until(lambda: driver.checkpoints() - before)
    driver.process.terminate()
    code, _, err = driver.end()
    assert code == INTERRUPTED
    assert err == f"Interrupted. Everything so far is in {driver.directory}; repeat the command to resume.\n"

    done = len(driver.results())
    port = nodes.cluster.head_node._ray_params.ray_client_server_port
    assert_driver_finished(drive(f"ray://{nodes.address.split(':')[0]}:{port}"), uninterrupted, done)
    assert {file: (file.stat().st_ino, file.stat().st_mtime_ns) for file in kept} == kept


def test_a_local_cluster_stops_with_its_driver(
    nodes: Nodes, drive: Callable[..., Driving], experiment: Experiment, uninterrupted: dict[str, Any]
) -> None:
    with short_folder() as folder:
        driver = drive("local", held=True, RAY_TMPDIR=folder)
        driver.wait_until(driver.checkpoints)
        assert _listening(folder) == {"127.0.0.1"}  # and not to the network
        os.killpg(driver.process.pid, signal.SIGINT)  # as a terminal does: to all processes
        code, _, err = driver.end()
        assert (code, err.partition(".")[0]) == (INTERRUPTED, "Interrupted")
        give_up = time.monotonic() + PATIENCE
        while _mentioning(folder):
            assert time.monotonic() < give_up, "Ray's processes outlive their driver"
    # runs started on Ray resume without it
    assert len(Sweep(experiment, driver.directory).run()) == FAILED
    assert same(driver.directory, uninterrupted)


def _mentioning(folder: str) -> list[int]:
    """Processes that have a folder's name among their arguments."""
    return [p.pid for p in psutil.process_iter(["cmdline"]) if folder in " ".join(p.info["cmdline"] or ())]


def _listening(folder: str) -> set[str]:
    """The addresses at which these processes can be reached."""
    sockets = [c for pid in _mentioning(folder) for c in psutil.Process(pid).net_connections("tcp")]
    return {c.laddr.ip.removeprefix("::ffff:") for c in sockets if c.status == psutil.CONN_LISTEN}
