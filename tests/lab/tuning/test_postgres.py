"""One study on a real PostgreSQL server, worked on by two processes, one of which dies."""

from __future__ import annotations

import json
import multiprocessing
import time
from collections import Counter
from collections.abc import Iterator
from dataclasses import replace
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any

import optuna
import pytest
import sqlalchemy
import torch
from optuna.trial import FrozenTrial, TrialState

from tests.lab.tuning.test_optuna_search import PLAN, found, states, value_alone
from tests.support import postgres
from torchace.lab.tuning import optuna_search
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
    found(0, server.url(), study_name="two")  # makes the tables
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
        assert trial.value == pytest.approx(value_alone(trial.params), rel=1e-9)
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
    with pytest.raises(StorageError, match=r"Cannot use the storage postgresql\+psycopg://tuner:\*\*\*@") as caught:
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


def test_a_study_of_other_data_is_refused(server: postgres.Server) -> None:
    found(1, server.url(), study_name="mine")
    with pytest.raises(
        StorageError, match=r"Study 'mine' in postgresql.* holds a search with epochs = 6, but now it is 7"
    ):
        found(1, server.url(), study_name="mine", plan=replace(PLAN, epochs=7))
