"""Optuna's studies: opened or refused in one sentence, without the password; trials of dead processes marked failed."""

from __future__ import annotations

import fcntl
import time
import warnings
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from itertools import chain
from pathlib import Path
from typing import IO, Any

import optuna
from optuna.exceptions import ExperimentalWarning, StorageInternalError, UpdateFinishedTrialError
from optuna.pruners import BasePruner
from optuna.samplers import BaseSampler
from optuna.storages import InMemoryStorage, RDBStorage, RetryHeartbeatStaleTrialCallback
from optuna.study import Study, StudyDirection
from optuna.trial import FrozenTrial, TrialState
from sqlalchemy import URL, make_url
from sqlalchemy.exc import ArgumentError, IntegrityError, NoSuchModuleError, ProgrammingError, SQLAlchemyError

from torchace.runs.trials import difference

FINGERPRINT = "torchace"  # the study's attribute
FAILURE = "failure"  # a trial's: why it failed for good
RETRIES = 3  # of a trial whose process died: it may be what kills it
ATTEMPTS = 20  # to make the tables, which other processes may be making too


class StorageError(ValueError):
    """A storage that cannot be used: one sentence that says why and what to do."""


@contextmanager
def opened_study(
    where: str | Path | None,
    name: str,
    fingerprint: Mapping[str, Any],
    *,
    sampler: BaseSampler,
    pruner: BasePruner,
    heartbeat: int,
) -> Iterator[Study]:
    """A study of this search, made where there is none yet. Its values are minimised.

    A process at work gives a sign of life now and then. Trials of one that gave none for long are marked failed and
    tried again; those of an SQLite file that nobody else has open at once.

    Args:
        where: The path of an SQLite file, a URL as Optuna takes it, or None for this process's memory.
        name: The study's.
        fingerprint: What makes the search this one.
        sampler: Proposes parameters.
        pruner: Stops trials early.
        heartbeat: Seconds between two signs of life; after three times as long a process is held for dead.
    """
    url = _url(where)
    with _quiet(), _locked(_file(url)) as lock:
        storage = InMemoryStorage() if url is None else _connected(url, heartbeat)
        try:
            study = optuna.create_study(
                storage=storage, study_name=name, sampler=sampler, pruner=pruner, load_if_exists=True
            )
            _claim(study, fingerprint, _shown(url))
            if lock is not None:
                _recover(study, lock)
            yield study
        except (SQLAlchemyError, StorageInternalError, UnicodeError) as error:
            raise StorageError(
                f"Cannot use the storage {_shown(url)} ({_reason(error, url)}). "
                "Finished trials are kept: repeat the command to go on."
            ) from error
        finally:
            if isinstance(storage, RDBStorage):
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


# -- opening ----------------------------------------------------------------------------------------------------------


def _connected(url: URL, heartbeat: int) -> RDBStorage:
    options: dict[str, Any] = {"pool_pre_ping": True}
    if url.get_backend_name() == "sqlite":
        options["connect_args"] = {"timeout": 60}
    elif url.get_backend_name() == "postgresql":
        options["connect_args"] = {"connect_timeout": 10}
    text = url.render_as_string(hide_password=False)
    for attempt in range(ATTEMPTS):
        try:
            return RDBStorage(
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


@contextmanager
def _locked(file: Path | None) -> Iterator[IO[str] | None]:
    """Shares a lock beside an SQLite file for as long as this process works; given out where nobody else holds it."""
    if file is None:
        yield None
        return
    try:
        file.parent.mkdir(parents=True, exist_ok=True)
        lock = open(f"{file}.lock", "a")  # noqa: SIM115
    except OSError as error:
        raise StorageError(f"Cannot write to {file}: {error.strerror}. Choose another file.") from error
    with lock:
        alone = True
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            fcntl.flock(lock, fcntl.LOCK_SH)
            alone = False
        except OSError as error:
            raise StorageError(f"Cannot lock {file}: {error.strerror}. Choose another file.") from error
        yield lock if alone else None


def _recover(study: Study, lock: IO[str]) -> None:
    """Marks running trials as failed, which nobody runs, has them tried again, and lets others in.

    A process may have died between the one and the other.
    """
    for trial in study.get_trials(deepcopy=False, states=(TrialState.RUNNING,)):
        with suppress(UpdateFinishedTrialError):
            study.tell(trial.number, state=TrialState.FAIL)
    trials = study.get_trials(deepcopy=False)
    again = set(chain.from_iterable(trial.system_attrs.get("retry_history", ()) for trial in trials))
    for trial in trials:
        if trial.state == TrialState.FAIL and trial.number not in again and FAILURE not in trial.user_attrs:
            retry(study, trial.number)
    fcntl.flock(lock, fcntl.LOCK_SH)


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
