"""One study on a real PostgreSQL server, worked on by two processes, one of which dies."""

from __future__ import annotations

import json
import multiprocessing
import signal
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from dataclasses import replace
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any

import optuna
import pytest
import sqlalchemy
import torch
from optuna.trial import FrozenTrial, TrialState

from tests.lab.tuning.test_optuna_search import PLAN, SPACE, ended, found, states, value_alone
from tests.support import postgres
from torchace.lab.tuning import optuna_search
from torchace.lab.tuning import storage as postgres_module
from torchace.lab.tuning.optuna_search import StudyResult
from torchace.lab.tuning.storage import StorageError

pytestmark = [
    pytest.mark.extended,
    pytest.mark.skipif(postgres.binaries() is None, reason="no initdb and pg_ctl on the path"),
]
TRIALS = 8
PATIENCE = 120.0  # seconds until a process that does not do what it should is given up


@pytest.fixture(scope="module")
def server() -> Iterator[postgres.Server]:
    with postgres.running() as running:
        yield running


def stored_trials(server: postgres.Server, name: str) -> list[FrozenTrial]:
    """The trials of a study, read by Optuna alone."""
    storage = optuna.storages.RDBStorage(server.url().replace("{", "{{").replace("}", "}}"))
    try:
        return optuna.load_study(study_name=name, storage=storage).trials
    finally:
        storage.engine.dispose()


def work(url: str, folder: str, name: str) -> None:
    """Record every finished trial; wait in the second one until a file appears."""
    torch.set_num_threads(1)
    place = Path(folder)
    finished: list[int] = []
    asked = 0
    objective = optuna_search._Objective.__call__

    def noted(self: Any, trial: optuna.Trial) -> float:
        (place / f"{name}.trial").write_text(str(trial.number))
        return objective(self, trial)

    optuna_search._Objective.__call__ = noted  # type: ignore[method-assign]

    def watch(number: int, *_: Any) -> None:
        nonlocal asked
        finished.append(number)
        asked = 0
        (place / f"{name}.json").write_text(json.dumps(finished))

    def stop() -> bool:
        nonlocal asked
        asked += 1
        if len(finished) == 1 and asked == 5:
            (place / f"{name}.waits").touch()
            while not (place / f"{name}.go").exists():
                time.sleep(0.01)
        return False

    found(TRIALS, url, study_name="two", watch=watch, stop=stop, pruning=False)


def wait_for(file: Path, process: BaseProcess) -> None:
    give_up = time.monotonic() + PATIENCE
    while not file.exists():
        process.join(0.01)
        assert process.exitcode is None, f"ended with {process.exitcode} before it wrote {file.name}"
        assert time.monotonic() < give_up, f"no {file.name}"


def test_two_workers_one_of_which_is_killed(server: postgres.Server, tmp_path: Path) -> None:
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload([__name__])
    # both find an empty database: they make its tables at the same time
    workers = {
        name: context.Process(target=work, args=(server.url(), str(tmp_path), name), daemon=True)
        for name in ("lives", "dies")
    }
    try:
        for worker in workers.values():
            worker.start()
        for name, worker in workers.items():
            wait_for(tmp_path / f"{name}.waits", worker)
        killed, other = (int((tmp_path / f"{name}.trial").read_text()) for name in ("dies", "lives"))
        running = {trial.number for trial in stored_trials(server, "two") if trial.state == TrialState.RUNNING}
        assert running == {killed, other}
        workers["dies"].kill()
        workers["dies"].join()
        _age_heartbeat(server, killed)
        (tmp_path / "lives.go").touch()
        workers["lives"].join(PATIENCE)
        assert workers["lives"].exitcode == 0
    finally:
        for worker in workers.values():
            worker.kill()
            worker.join()

    trials = stored_trials(server, "two")
    done = {name: json.loads((tmp_path / f"{name}.json").read_text()) for name in workers}
    finished = [trial for trial in trials if trial.state == TrialState.COMPLETE]
    assert Counter(done["lives"] + done["dies"]) == Counter(trial.number for trial in finished)
    assert len(done["dies"]) == 1
    assert len(finished) == TRIALS
    # the one in whose middle it was killed is failed and was tried again, no other
    (dead,) = (trial for trial in trials if trial.state == TrialState.FAIL)
    assert dead.number == killed
    (again,) = (trial for trial in trials if trial.system_attrs.get("retry_history"))
    assert again.system_attrs["retry_history"] == [dead.number]
    assert (again.params, again.state) == (dead.params, TrialState.COMPLETE)
    assert len(trials) == TRIALS + 1
    assert len({json.dumps(trial.params, sort_keys=True) for trial in finished}) == TRIALS, "proposed twice"
    for trial in finished:
        # a run group equals its runs trained alone to rounding
        assert trial.value == pytest.approx(value_alone(trial.user_attrs["values"]), rel=1e-9)
    result = found(TRIALS, server.url(), study_name="two", pruning=False)
    assert result.best is not None
    assert result.best.value == min(trial.value for trial in finished if trial.value is not None)


def _age_heartbeat(server: postgres.Server, number: int) -> None:
    """Set the last heartbeat of a trial to an hour ago."""
    engine = sqlalchemy.create_engine(server.url())
    with engine.begin() as connection:
        aged = connection.execute(
            sqlalchemy.text(
                "UPDATE trial_heartbeats SET heartbeat = heartbeat - interval '1 hour' "
                "WHERE trial_id = (SELECT trial_id FROM trials WHERE number = :number)"
            ),
            {"number": number},
        )
        assert aged.rowcount == 1
    engine.dispose()


def test_a_wrong_password_is_reported_without_printing_it(server: postgres.Server) -> None:
    with pytest.raises(StorageError, match="password authentication failed") as caught:
        found(1, server.url(password="hunter2"))
    assert "hunter2" not in str(caught.value)
    assert "\n" not in str(caught.value)


def test_an_unreachable_server_is_reported_in_one_sentence(server: postgres.Server, tmp_path: Path) -> None:
    with pytest.raises(StorageError, match=r"Cannot open the storage postgresql\+psycopg://tuner:\*\*\*@") as caught:
        found(1, server.url(folder=tmp_path))
    assert postgres.PASSWORD not in str(caught.value)
    assert "\n" not in str(caught.value)


def test_finished_trials_survive_a_lost_server(server: postgres.Server) -> None:
    seen: list[float | None] = []

    def watch(number: int, value: float | None, best: float | None) -> None:
        seen.append(value)
        if len(seen) == 2:
            server.stop()

    with pytest.raises(StorageError, match="Finished trials are kept: repeat the command to resume") as caught:
        found(4, server.url(), study_name="lost", watch=watch, pruning=False)
    assert "\n" not in str(caught.value)
    assert postgres.PASSWORD not in str(caught.value)
    server.start()
    result: StudyResult = found(4, server.url(), study_name="lost", pruning=False)
    assert states(result) == ["complete"] * 4
    assert [trial.value for trial in result.trials[:2]] == seen


def at(trial: int, step: int, act: Callable[[], None]) -> dict[str, Any]:
    """Options that do something before a step of a trial, once."""
    finished = asked = 0

    def watch(*_: Any) -> None:
        nonlocal finished, asked
        finished, asked = finished + 1, 0

    def stop() -> bool:
        nonlocal asked
        asked += 1
        if (finished, asked) == (trial, step):
            act()
        return False

    return {"watch": watch, "stop": stop, "pruning": False, "num_seeds": 1}


UNDISTURBED: dict[str, Any] = {"pruning": False, "num_seeds": 1}


def assert_equals_undisturbed(result: StudyResult, count: int) -> None:
    assert ended(result) == ended(found(count, **UNDISTURBED))
    assert "running" not in states(result)
    assert "waiting" not in states(result)


@pytest.mark.parametrize("step", [1, 2, 5])
def test_a_server_lost_during_a_trial(server: postgres.Server, step: int, capfd: pytest.CaptureFixture[str]) -> None:
    """Optuna fails itself where it cannot write down that a trial failed; heartbeats fail in another thread."""
    name = f"away {step}"
    with pytest.raises(StorageError, match=r"Cannot use the storage postgresql.*repeat the command") as caught:
        found(4, server.url(), study_name=name, heartbeat=1, **at(2, step, server.stop))
    assert "\n" not in str(caught.value)
    assert capfd.readouterr().err == ""
    server.start()
    # at once: long before its trial would be stale
    assert_equals_undisturbed(found(4, server.url(), study_name=name, **UNDISTURBED), 4)


def test_a_server_restart_between_two_heartbeats(server: postgres.Server) -> None:
    def restart() -> None:
        server.stop()
        server.start()

    assert_equals_undisturbed(found(3, server.url(), study_name="restarted", **at(1, 1, restart)), 3)


@pytest.mark.parametrize("epochs", [6, 10**6])
def test_a_frozen_server_is_reported(
    server: postgres.Server, epochs: int, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    """At the end of a trial, or in the middle of one that writes nothing but signs of life."""
    assert 30 + postgres_module.ANSWER_TIMEOUT < 60  # between two signs of life, and until the second is given up
    monkeypatch.setattr(postgres_module, "ANSWER_TIMEOUT", 0.5)
    with ExitStack() as stack:
        options = at(0, 5, lambda: stack.enter_context(server.frozen()))
        options |= {"plan": replace(PLAN, epochs=epochs), "space": replace(SPACE, width=2, num_layers=1, num_members=1)}
        with pytest.raises(StorageError, match=r"\(the server did not answer within 0.5 seconds\)") as caught:
            found(1, server.url(), study_name=f"frozen {epochs}", heartbeat=1, **options)
    assert "\n" not in str(caught.value)
    assert capfd.readouterr().err == ""


def dies(url: str, folder: str, name: str) -> None:
    """Waits in its second trial, until it is killed."""
    torch.set_num_threads(1)

    def wait() -> None:
        (Path(folder) / f"{name}.waits").touch()
        signal.pause()

    found(4, url, study_name=name, **at(1, 3, wait))


@pytest.mark.parametrize("beside", [False, True])
def test_a_killed_processs_trial_is_retried_at_once(server: postgres.Server, tmp_path: Path, beside: bool) -> None:
    """By the next process, or by one that was at work beside it and would have ended before the trial is stale."""
    name = f"killed {beside}"
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload([__name__])
    process = context.Process(target=dies, args=(server.url(), str(tmp_path), name), daemon=True)
    process.start()

    def kill() -> None:
        process.kill()
        process.join()

    try:
        wait_for(tmp_path / f"{name}.waits", process)
        if beside:
            result = found(4, server.url(), study_name=name, **at(1, 2, kill))
            counted = [(state, value) for state, _, value in ended(result)]
            assert [state for state, _ in counted] == ["complete"] * 4
            assert states(result).count("failed") == 1
            assert {"running", "waiting"}.isdisjoint(states(result))
        else:
            kill()
            assert_equals_undisturbed(found(4, server.url(), study_name=name, **UNDISTURBED), 4)
    finally:
        kill()


def test_a_study_of_other_data_is_refused(server: postgres.Server) -> None:
    found(1, server.url(), study_name="mine")
    with pytest.raises(
        StorageError, match=r"Study 'mine' in postgresql.* holds a search with epochs = 6, but now it is 7"
    ):
        found(1, server.url(), study_name="mine", plan=replace(PLAN, epochs=7))
