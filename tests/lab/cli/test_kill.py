"""`fit`, `tune` and `run`, killed at any moment: the repeated command ends where an uninterrupted one does.

`TORCHACE_KILLS` is how many processes of each command are killed, 5 unless set; half of them at a random moment, half
right before or after a file is flushed, renamed, copied or removed.
"""

from __future__ import annotations

import contextlib
import json
import os
import random
import signal
import time
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from pathlib import Path

import optuna
import pytest

from tests.lab.cli.command_line import pets, write_table
from tests.lab.sweeps.small_sweeps import leftovers, stored_files
from tests.lab.tables.small_fits import is_complete, read_untimed
from tests.support.fork_server import OPERATIONS, ForkServer
from tests.support.paused_command import CHECKPOINT

pytestmark = pytest.mark.extended

KILLS = int(os.environ.get("TORCHACE_KILLS", "5"))

# Long enough to be killed in: three rounds of groups, then the model.
SETTINGS = ("--target", "pet", "--num-members", "3", "--hidden", "16", "--epochs", "6", "--batch-size", "8")
FIT = ("fit", "pets.csv", *SETTINGS, "--out", "model")
TUNE = ("tune", "pets.csv", *SETTINGS, "--seeds", "2", "--out", "search")
TRIALS = ("tune", "pets.csv", "--target", "pet", "--epochs", "1", "--trials", "4", "--out", "study")
RUN = ("run", "sweep.toml", "--out", "out")
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
[checkpoint]
steps = 1
"""


@pytest.fixture(scope="module")
def server() -> Iterator[ForkServer]:
    server = ForkServer()
    yield server
    server.close()


@dataclass(frozen=True)
class Uninterrupted:
    """The results of an uninterrupted command."""

    folder: Path
    seconds: float
    operations: dict[str, int]  # on files, those that there were


@dataclass
class Killing:
    """A command that is killed again and again in one folder, until it is done."""

    server: ForkServer
    folder: Path
    command: tuple[str, ...]
    usual: Uninterrupted
    draw: random.Random
    kills: int = 0
    kept: dict[str, tuple[int, bytes]] = field(default_factory=dict)  # finished groups, and when they were written

    def again(self) -> bool:
        """Starts the command and kills it; whether it was done before."""
        every = self.draw.choice([0.0, 0.02, 30.0])
        if self.draw.random() < 0.5 and self.usual.operations:
            operation = self.draw.choice(sorted(self.usual.operations))
            die = (operation, self.draw.randint(1, self.usual.operations[operation]), self.draw.random() < 0.5)
            code, _, err = self.server.start(*self.command, folder=self.folder, every=every, die=die).end()
        else:
            process = self.server.start(*self.command, folder=self.folder, every=every)
            share = 0.8
            if self.command is TRIALS:  # some trials from now
                share, wanted = 0.2, self.draw.randint(0, 2)
                process.wait_until(lambda: (self.folder / "stdout").read_text().count("Trial") >= wanted)
            moment = time.monotonic() + self.draw.uniform(0, share * self.usual.seconds)
            process.wait_until(lambda: time.monotonic() >= moment)
            code, _, err = process.end(signal.SIGKILL)
        assert err == ""
        assert code in (0, -signal.SIGKILL)
        self.kills += code != 0
        return code == 0

    def check_groups(self, store: Path) -> None:
        """Check that finished work exists and was not trained again."""
        if not store.exists():
            return
        now = {file.name: (file.stat().st_mtime_ns, file.read_bytes()) for file in store.glob("*.json")}
        assert self.kept.items() <= now.items()
        self.kept = now


def uninterrupted(server: ForkServer, command: tuple[str, ...], folder: Path) -> Uninterrupted:
    prepared(folder)
    process = server.start(*command, folder=folder, count=True, every=0.02)
    code, _, err = process.end()
    assert (code, err) == (0, "")
    seconds = time.monotonic() - process.began
    operations = json.loads((folder / "operations").read_text())
    return Uninterrupted(folder, seconds, {name: calls for name, calls in operations.items() if calls})


def prepared(folder: Path) -> Path:
    folder.mkdir()
    write_table(pets(), folder / "pets.csv")
    (folder / "sweep.toml").write_text(SWEEP)
    return folder


def kill_and_repeat(
    usual: Uninterrupted, server: ForkServer, command: tuple[str, ...]
) -> Iterator[tuple[Killing, bool]]:
    """Until there were enough kills, in as many folders as that takes; after each process, and whether it was done."""
    draw, kills, folders = random.Random(KILLS), 0, 0
    while kills < KILLS:
        killing = Killing(server, prepared(usual.folder.parent / f"{folders}"), command, usual, draw, kills)
        done = False
        while not done:
            done = killing.again() if killing.kills < KILLS else finish_command(server, command, killing.folder)
            yield killing, done
        kills, folders = killing.kills, folders + 1
    print(f"{kills} killed in {folders} folders")


def finish_command(server: ForkServer, command: tuple[str, ...], folder: Path) -> bool:
    code, _, err = server.start(*command, folder=folder).end()
    assert (code, err) == (0, "")
    return True


def test_a_killed_fit(server: ForkServer, tmp_path: Path) -> None:
    usual = uninterrupted(server, FIT, tmp_path / "uninterrupted")
    assert set(usual.operations) == set(OPERATIONS)
    for killing, done in kill_and_repeat(usual, server, FIT):
        folder = killing.folder
        assert is_complete(folder / "model") or not done  # never anything that loads but is not complete
        if not done:
            killing.check_groups(folder / "model.work" / "search" / "groups")
            continue
        # a killed process may have put the model in place and left its working directory
        finish_command(server, FIT, folder)
        assert read_untimed(folder / "model") == read_untimed(usual.folder / "model")
        assert sorted(path.name for path in folder.iterdir()) == ["model", "pets.csv", "stderr", "stdout", "sweep.toml"]


def test_a_killed_search_for_lambda(server: ForkServer, tmp_path: Path) -> None:
    usual = uninterrupted(server, TUNE, tmp_path / "uninterrupted")
    expected = json.loads((usual.folder / "search" / "tune.json").read_text())
    for killing, done in kill_and_repeat(usual, server, TUNE):
        killing.check_groups(killing.folder / "search" / "search" / "groups")
        file = killing.folder / "search" / "tune.json"
        assert json.loads(file.read_text()) == expected if file.exists() else not done


def test_a_killed_sweep(server: ForkServer, tmp_path: Path) -> None:
    usual = uninterrupted(server, RUN, tmp_path / "uninterrupted")
    for killing, done in kill_and_repeat(usual, server, RUN):
        out = killing.folder / "out"
        killing.check_groups(out / "runs")
        if done:
            assert leftovers(out) == []
            assert stored_files(out) == stored_files(usual.folder / "out")


def test_a_killed_search_of_all_hyperparameters(server: ForkServer, tmp_path: Path) -> None:
    """No finished trial is lost or changed; trials of killed processes would be retried after 90 seconds."""
    usual = replace(uninterrupted(server, TRIALS, tmp_path / "uninterrupted"), operations={})  # SQLite has its own
    before: dict[int, float] = {}
    for killing, done in kill_and_repeat(usual, server, TRIALS):
        now = complete(killing.folder / "study" / "study.db")
        assert before.items() <= now.items()
        before = {} if done else now  # of the next folder
        if done:
            found = json.loads((killing.folder / "study" / "tune.json").read_text())
            assert len(now) == 4
            assert {trial["number"]: trial["value"] for trial in found["trials"] if trial["state"] == "complete"} == now
            assert {trial["state"] for trial in found["trials"]} <= {"complete", "failed", "running"}
            assert found["best"]["value"] == min(now.values())


def finished_trials(folder: Path) -> list[tuple[dict[str, float], float]]:
    """Return the parameters and values of the finished trials, in order."""
    trials = json.loads((folder / "study" / "tune.json").read_text())["trials"]
    return [(trial["params"], trial["value"]) for trial in trials if trial["state"] == "complete"]


def complete(file: Path) -> dict[int, float]:
    """The values of a study's complete trials by number."""
    if not file.exists():
        return {}
    verbosity = optuna.logging.get_verbosity()
    optuna.logging.set_verbosity(optuna.logging.ERROR)
    storage = optuna.storages.RDBStorage(f"sqlite:///{file}")
    try:
        study = optuna.load_study(study_name="torchace", storage=storage)
        trials = study.get_trials(deepcopy=False)
        return {t.number: t.value for t in trials if t.state == optuna.trial.TrialState.COMPLETE}
    except KeyError:  # killed before the study was made
        return {}
    finally:
        storage.engine.dispose()
        optuna.logging.set_verbosity(verbosity)


# -- stop signals -----------------------------------------------------------------------------------------------------


def checkpoints(folder: Path) -> set[tuple[Path, int]]:
    """The checkpoints that there are, by when they were written."""
    found = set()
    for file in folder.rglob("checkpoints/*/manifest.json"):
        with contextlib.suppress(FileNotFoundError):  # the process is at work
            found.add((file, file.stat().st_mtime_ns))
    return found


@pytest.mark.parametrize(
    ("command", "where", "result"),
    [
        (FIT, "model.work", "model/manifest.json"),
        (TUNE, "search", "search/tune.json"),
        (RUN, "out", "out/report/index.html"),
    ],
    ids=["fit", "tune", "run"],
)
def test_stop_request(command: tuple[str, ...], where: str, result: str, server: ForkServer, tmp_path: Path) -> None:
    uninterrupted(server, command, tmp_path / "uninterrupted")
    folder = prepared(tmp_path / "stopped")
    for number in (signal.SIGTERM, signal.SIGINT):
        before = checkpoints(folder)
        process = server.start(*command, folder=folder, every=0.0, held=(CHECKPOINT, 1))
        assert process.wait_until(lambda before=before: not checkpoints(folder) <= before)
        code, out, err = process.end(number)
        assert code == 3
        assert out.startswith("Column ") if command is FIT else out == ""  # how the table was read
        assert err == f"Interrupted. Everything so far is in {where}; repeat the command to resume.\n"
        assert not (folder / result).exists()
    assert finish_command(server, command, folder)
    if command is FIT:
        assert read_untimed(folder / "model") == read_untimed(tmp_path / "uninterrupted" / "model")
    elif command is RUN:
        assert stored_files(folder / "out") == stored_files(tmp_path / "uninterrupted" / "out")
    else:
        assert (folder / result).read_bytes() == (tmp_path / "uninterrupted" / result).read_bytes()


def test_trials_with_a_stop_request(server: ForkServer, tmp_path: Path) -> None:
    folder = prepared(tmp_path / "stopped")
    told = "torchace.lab.cli.progress:TrialProgress.on_trial"
    command = server.start(*TRIALS, folder=folder, held=(told, 2))
    assert command.wait_until(lambda: "Trial 1" in (folder / "stdout").read_text())
    code, _, err = command.end(signal.SIGTERM)
    assert (code, err) == (3, "Interrupted. Everything so far is in study; repeat the command to resume.\n")
    before = complete(folder / "study" / "study.db")
    assert len(before) == 2
    assert finish_command(server, TRIALS, folder)
    now = complete(folder / "study" / "study.db")
    assert len(now) == 4
    assert before.items() <= now.items()
    uninterrupted(server, TRIALS, tmp_path / "uninterrupted")
    assert finished_trials(folder) == finished_trials(tmp_path / "uninterrupted")


def test_a_second_command_is_refused(server: ForkServer, tmp_path: Path) -> None:
    folder = prepared(tmp_path / "twice")
    first = server.start(*FIT, folder=folder, every=0.0, held=(CHECKPOINT, 1))
    assert first.wait_until(lambda: bool(checkpoints(folder)))
    (tmp_path / "elsewhere").mkdir()
    second = server.start("fit", folder / "pets.csv", *FIT[2:-1], folder / "model", folder=tmp_path / "elsewhere")
    code, out, err = second.end()
    assert code == 1
    assert out.startswith("Column ")  # how the table was read
    assert err == f"Error: Process {first.pid} is using {folder}/model.work. Wait for it, or choose another --out.\n"
    assert first.end(signal.SIGUSR1)[0] == 0  # it goes on
    assert is_complete(folder / "model")


def test_a_real_report_in_a_process_of_its_own(server: ForkServer, tmp_path: Path) -> None:
    """Killed while the report is drawn and written, and drawn again."""
    folder = prepared(tmp_path / "report")
    command = ("fit", "pets.csv", "--target", "pet", "--diversity", "0.5", "--epochs", "1", "--out", "model")
    process = server.start(*command, folder=folder, page=False, held=("torchace.lab.report.page:write_atomic", 1))
    assert process.wait_until(lambda: any(folder.glob("model.work/model/report/*.svg")))
    process.end(signal.SIGKILL)
    assert not (folder / "model").exists()
    code, _, err = server.start(*command, folder=folder, page=False).end()
    assert (code, err) == (0, "")
    assert is_complete(folder / "model")
    assert not (folder / "model.work").exists()
