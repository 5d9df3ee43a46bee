"""Optuna studies in memory, in an SQLite file or in a database."""

from __future__ import annotations

import warnings
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import optuna
from optuna.exceptions import ExperimentalWarning, StorageInternalError
from optuna.storages import RDBStorage, RetryHeartbeatStaleTrialCallback
from optuna.study import Study, StudyDirection
from sqlalchemy import URL, make_url
from sqlalchemy.exc import ArgumentError, IntegrityError, NoSuchModuleError, ProgrammingError, SQLAlchemyError

from torchace.lab.tuning.search import fingerprint_difference

FINGERPRINT = "torchace"  # attribute of a study
RETRIES = 3  # of a trial whose process died


class StorageError(ValueError):
    """The storage cannot be used."""


@contextmanager
def open_study(
    where: str | Path | None, name: str, fingerprint: Mapping[str, Any], heartbeat: int, **options: Any
) -> Iterator[Study]:
    """Open or create a study that minimizes, with options of `optuna.create_study`.

    Trials of other processes without a heartbeat for three times `heartbeat` seconds are retried.
    """
    url = _parse_url(where)
    verbosity = optuna.logging.get_verbosity()
    optuna.logging.set_verbosity(optuna.logging.CRITICAL)
    storage = None
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", ExperimentalWarning)
            storage = None if url is None else _connect(url, heartbeat)
            study = optuna.create_study(storage=storage, study_name=name, load_if_exists=True, **options)
            _check_fingerprint(study, fingerprint, _display(url))
            yield study
    except StorageError:
        raise
    except Exception as error:
        cause: BaseException | None = error  # Optuna may fail itself after an error of the storage
        while cause is not None and not isinstance(cause, SQLAlchemyError | StorageInternalError):
            cause = cause.__cause__ or cause.__context__
        if cause is None:
            raise
        raise StorageError(
            f"Cannot use the storage {_display(url)} ({_reason(cause, url)}). "
            "Finished trials are kept: repeat the command to resume."
        ) from error
    finally:
        optuna.logging.set_verbosity(verbosity)
        if storage is not None:
            storage.engine.dispose()


def _parse_url(where: str | Path | None) -> URL | None:
    if where is None:
        return None
    if isinstance(where, Path) or "://" not in where:
        Path(where).parent.mkdir(parents=True, exist_ok=True)
        return URL.create("sqlite", database=str(where))
    try:
        return make_url(where)
    except (ArgumentError, ValueError):  # its message may contain the password
        raise StorageError(
            "Expected the storage as a path or a URL such as postgresql+psycopg://user:password@host/database, "
            "but got a URL that cannot be read."
        ) from None


def _connect(url: URL, heartbeat: int) -> RDBStorage:
    is_sqlite = url.get_backend_name() == "sqlite"
    text = url.render_as_string(hide_password=False).replace("{", "{{").replace("}", "}}")  # Optuna formats it
    make = partial(
        RDBStorage,
        text,
        {"connect_args": {"timeout": 60}} if is_sqlite else {"pool_pre_ping": True},
        heartbeat_interval=heartbeat,
        grace_period=3 * heartbeat,
        heartbeat_stale_trial_callback=RetryHeartbeatStaleTrialCallback(RETRIES),
    )
    try:
        try:
            return make()
        except (IntegrityError, ProgrammingError, StorageInternalError):  # another process creates the tables
            return make()
    except (ImportError, NoSuchModuleError) as error:
        package = getattr(error.__cause__, "name", None)
        advice = f"Install {package}" if package else "Use postgresql+psycopg:// or a path"
        raise StorageError(f"No driver is installed for the storage {_display(url)}. {advice}.") from None


def _check_fingerprint(study: Study, fingerprint: Mapping[str, Any], where: str) -> None:
    """Store the fingerprint in a new study; refuse a study of another search."""
    before = study.user_attrs.get(FINGERPRINT)
    if before is None and not study.get_trials(deepcopy=False):
        study.set_user_attr(FINGERPRINT, dict(fingerprint))
        return
    if before is None or study.directions != [StudyDirection.MINIMIZE]:
        difference: str | None = "was not made by torchace"
    elif (difference := fingerprint_difference(before, fingerprint)) is not None:
        difference = f"holds a search {difference}"
    if difference is not None:
        raise StorageError(f"Study {study.study_name!r} in {where} {difference}. Choose another name for the study.")


def _display(url: URL | None) -> str:
    if url is None:
        return "memory"
    if url.get_backend_name() == "sqlite":
        return str(url.database)
    return url.set(query={}).render_as_string(hide_password=True)


def _reason(error: BaseException, url: URL | None) -> str:
    """Return the first line of the driver's message, without the password."""
    if isinstance(error, StorageInternalError) and error.__cause__ is not None:
        error = error.__cause__  # Optuna's message is generic
    message = str(getattr(error, "orig", None) or error).strip().split("\n")[0].rstrip(".: ")
    return message if url is None or not url.password else message.replace(str(url.password), "***")
