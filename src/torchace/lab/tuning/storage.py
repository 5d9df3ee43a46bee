"""Optuna's studies: opened or refused in one sentence, without the password; trials of dead processes marked failed."""

from __future__ import annotations

import time
import warnings
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass
from itertools import chain
from pathlib import Path
from typing import Any

import optuna
from optuna.exceptions import ExperimentalWarning, StorageInternalError, UpdateFinishedTrialError
from optuna.pruners import BasePruner
from optuna.samplers import BaseSampler
from optuna.storages import InMemoryStorage, RDBStorage, RetryHeartbeatStaleTrialCallback
from optuna.study import Study, StudyDirection
from optuna.trial import FrozenTrial, TrialState
from sqlalchemy import URL, make_url
from sqlalchemy.exc import ArgumentError, IntegrityError, NoSuchModuleError, ProgrammingError, SQLAlchemyError

from torchace._files import refuse_links
from torchace.lab.tuning.postgres import CONNECT, connector
from torchace.lab.tuning.search_cache import difference
from torchace.lab.tuning.study_locks import FileLock, ServerLock, StudyLock

FINGERPRINT = "torchace"  # the study's attribute
FAILURE = "failure"  # a trial's: why it failed for good
RETRIES = 3  # of a trial whose process died: it may be what kills it
ATTEMPTS = 20  # to make the tables, which other processes may be making too
FAREWELL = 1.0  # seconds until a server has noticed that a process died


class StorageError(ValueError):
    """A storage that cannot be used: one sentence that says why and what to do."""


class _Storage(RDBStorage):
    """Optuna's storage, whose signs of life do not fail in a thread of their own where no one notices."""

    failure: Exception | None = None

    def record_heartbeat(self, trial_id: int) -> None:
        try:
            super().record_heartbeat(trial_id)
        except Exception as error:
            self.failure = error


@dataclass(frozen=True)
class OpenStudy:
    """A study that this process works on."""

    study: Study
    lock: StudyLock
    storage: _Storage | None

    def check(self) -> None:
        """Raise what went wrong with the storage since a trial began."""
        if self.storage is not None and self.storage.failure is not None:
            raise self.storage.failure

    def recover(self) -> bool:
        """Have trials of dead processes tried again, if no other process is at work; whether that is so.

        A process may have died between marking a trial as failed and asking for another attempt. None of this process's
        own trials may be running.
        """
        with self.lock.alone() as alone:
            if alone:
                _recover(self.study)
            return alone


@contextmanager
def opened_study(
    where: str | Path | None,
    name: str,
    fingerprint: Mapping[str, Any],
    *,
    sampler: BaseSampler,
    pruner: BasePruner,
    heartbeat: int,
) -> Iterator[OpenStudy]:
    """A study of this search, made where there is none yet. Its values are minimised.

    Processes at work hold a lock beside an SQLite file or in PostgreSQL, so that one that is alone knows at once whose
    trials are dead. Beside others it waits for signs of life: trials of a process that gave none for long are marked
    failed and tried again.

    Args:
        where: The path of an SQLite file, a URL as Optuna takes it, or None for this process's memory.
        name: The study's.
        fingerprint: What makes the search this one.
        sampler: Proposes parameters.
        pruner: Stops trials early.
        heartbeat: Seconds between two signs of life; after three times as long a process is held for dead.

    Raises:
        StorageError: The storage cannot be used, or failed on the way.
    """
    url = _url(where)
    with _quiet(), ExitStack() as stack:
        lock = _locked(_file(url))
        stack.callback(lock.close)
        storage = None if url is None else _connected(url, heartbeat)
        try:
            study = optuna.create_study(
                storage=InMemoryStorage() if storage is None else storage,
                study_name=name,
                sampler=sampler,
                pruner=pruner,
                load_if_exists=True,
            )
            _claim(study, fingerprint, _shown(url))
            if storage is not None and storage.engine.dialect.name == "postgresql":
                lock = ServerLock(storage.engine, name)
                stack.callback(lock.close)
            opened = OpenStudy(study, lock, storage)
            _await_farewell(opened)
            yield opened
        except Exception as error:
            if (lost := _storage_error(error)) is None:
                raise
            raise StorageError(
                f"Cannot use the storage {_shown(url)} ({_reason(lost, url)}). "
                "Finished trials are kept: repeat the command to go on."
            ) from error
        finally:
            if storage is not None:
                storage.engine.dispose()


def retry(study: Study, number: int) -> None:
    """Has a trial that was not finished tried again, with the same parameters, by whoever comes next."""
    trial = study.get_trials(deepcopy=True)[number]
    RetryHeartbeatStaleTrialCallback(RETRIES)(study, trial)


def retried(trial: FrozenTrial) -> int | None:
    """The number of the trial that this one is another attempt at; None where it is the first."""
    return trial.system_attrs.get("failed_trial")


# -- addresses --------------------------------------------------------------------------------------------------------


def _url(where: str | Path | None) -> URL | None:
    if where is None:
        return None
    if isinstance(where, Path) or "://" not in where:
        return URL.create("sqlite", database=str(where))
    try:
        return make_url(where)
    except (ArgumentError, ValueError):  # what it says may hold the password
        raise StorageError(
            "Expected a path or a URL as in postgresql+psycopg://user:password@host/database for the storage, "
            "but got a URL that cannot be read."
        ) from None


def _file(url: URL | None) -> Path | None:
    """The SQLite file, if it is one."""
    if url is None or url.get_backend_name() != "sqlite" or not url.database or url.database == ":memory:":
        return None
    return Path(url.database)


def _shown(url: URL | None) -> str:
    """An address without its password, and without its options, among which there may be one."""
    if url is None:
        return "memory"
    return str(_file(url) or url.set(query={}).render_as_string(hide_password=True))


def _reason(error: BaseException, url: URL | None) -> str:
    """The first line of what the driver said."""
    if isinstance(error, StorageInternalError) and error.__cause__ is not None:
        error = error.__cause__  # Optuna's own words guess at the reason
    said = str(getattr(error, "orig", None) or error).strip().split("\n")[0].rstrip(".: ")
    if url is not None:
        options = [value for key, value in url.normalized_query.items() if "pass" in key]
        for secret in filter(None, (url.password, *chain.from_iterable(options))):
            said = said.replace(secret, "***")
    return said


def _storage_error(error: BaseException | None) -> BaseException | None:
    """The storage's error behind one of Optuna's, which fails itself where the storage fails."""
    while error is not None:
        if isinstance(error, SQLAlchemyError | StorageInternalError | UnicodeError):
            return error
        error = error.__cause__ or error.__context__
    return None


# -- opening ----------------------------------------------------------------------------------------------------------


def _connected(url: URL, heartbeat: int) -> _Storage:
    options: dict[str, Any] = {"pool_pre_ping": True}
    text = url.render_as_string(hide_password=False)
    for attempt in range(ATTEMPTS):
        try:
            if url.get_backend_name() == "sqlite":
                options["connect_args"] = {"timeout": 60}
            elif url.drivername == "postgresql+psycopg":
                options["creator"] = connector(url)
            elif url.get_backend_name() == "postgresql":
                options["connect_args"] = {"connect_timeout": CONNECT}
            return _Storage(
                text.replace("{", "{{").replace("}", "}}"),  # Optuna formats it
                options,
                heartbeat_interval=heartbeat,
                grace_period=3 * heartbeat,
                heartbeat_stale_trial_callback=RetryHeartbeatStaleTrialCallback(RETRIES),
            )
        except (NoSuchModuleError, ImportError) as error:
            what = error.__cause__.name if isinstance(error.__cause__, ImportError) else None
            advice = f"Install {what}" if what else "Use postgresql+psycopg:// or a path"
            raise StorageError(f"There is no driver for the storage {_shown(url)}. {advice}.") from error
        except (SQLAlchemyError, StorageInternalError, RuntimeError, UnicodeError) as error:
            # tables that another process made between our looking and our making them
            racing = isinstance(error, IntegrityError | ProgrammingError) or "already exists" in str(error)
            if racing and attempt < ATTEMPTS - 1:
                time.sleep(0.1)
                continue
            raise StorageError(
                f"Cannot open the storage {_shown(url)} ({_reason(error, url)}). Check the address."
            ) from error
    raise AssertionError("unreachable")


def _claim(study: Study, fingerprint: Mapping[str, Any], where: str) -> None:
    """Marks a new study as this search's, or refuses one that is not."""
    before = study.user_attrs.get(FINGERPRINT)
    foreign = study.directions != [StudyDirection.MINIMIZE] or not isinstance(before, dict | None)
    if before is None and not foreign and not study.get_trials(deepcopy=False):
        study.set_user_attr(FINGERPRINT, dict(fingerprint))
        return
    if before is None or foreign:
        raise StorageError(
            f"Study {study.study_name!r} in {where} was not made by torchace. Choose another name for the study."
        )
    if (other := difference(before, fingerprint)) is not None:
        raise StorageError(
            f"Study {study.study_name!r} in {where} holds a search {other}. Choose another name for the study."
        )


def _locked(file: Path | None) -> StudyLock:
    """The lock beside an SQLite file, if it is one."""
    if file is None:
        return StudyLock()
    name = f"{file.name}.lock"
    refuse_links(file.parent, [name])
    try:
        file.parent.mkdir(parents=True, exist_ok=True)
        lock = open(file.with_name(name), "a")  # noqa: SIM115
    except OSError as error:
        raise StorageError(f"Cannot write to {file}: {error.strerror}. Choose another file.") from error
    try:
        return FileLock(lock)
    except OSError as error:
        lock.close()
        raise StorageError(f"Cannot lock {file}: {error.strerror}. Choose another file.") from error


def _await_farewell(opened: OpenStudy) -> None:
    """Give a server time to notice that the process died which left a trial running."""
    give_up = time.monotonic() + FAREWELL
    while not opened.recover() and isinstance(opened.lock, ServerLock) and time.monotonic() < give_up:
        if not opened.study.get_trials(deepcopy=False, states=(TrialState.RUNNING,)):
            break
        time.sleep(0.1)


def _recover(study: Study) -> None:
    """Mark running trials as failed, which no process runs, and have all of these tried again."""
    for trial in study.get_trials(deepcopy=False, states=(TrialState.RUNNING,)):
        with suppress(UpdateFinishedTrialError):
            study.tell(trial.number, state=TrialState.FAIL)
    trials = study.get_trials(deepcopy=False)
    again = set(chain.from_iterable(trial.system_attrs.get("retry_history", ()) for trial in trials))
    for trial in trials:
        if trial.state == TrialState.FAIL and trial.number not in again and FAILURE not in trial.user_attrs:
            retry(study, trial.number)


@contextmanager
def _quiet() -> Iterator[None]:
    """Without Optuna's log, and its word on what is experimental."""
    level = optuna.logging.get_verbosity()
    optuna.logging.set_verbosity(optuna.logging.CRITICAL)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", ExperimentalWarning)
            yield
    finally:
        optuna.logging.set_verbosity(level)
