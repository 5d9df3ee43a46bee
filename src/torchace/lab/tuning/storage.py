"""Optuna studies in a file or a database: open, check, recover trials of dead processes; locks of PostgreSQL."""

from __future__ import annotations

import fcntl
import hashlib
import threading
import time
import warnings
from collections.abc import Callable, Generator, Iterator, Mapping
from contextlib import ExitStack, closing, contextmanager, nullcontext, suppress
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
from sqlalchemy import URL, Engine, make_url, text
from sqlalchemy.exc import (
    ArgumentError,
    DBAPIError,
    IntegrityError,
    NoSuchModuleError,
    ProgrammingError,
    SQLAlchemyError,
)

from torchace.lab.tuning.search import fingerprint_difference

CONNECT_TIMEOUT = 10  # seconds
ANSWER_TIMEOUT = 20.0  # seconds
KEEPALIVE = {"keepalives_idle": 15, "keepalives_interval": 5, "keepalives_count": 3, "tcp_user_timeout": 20_000}


def connection_factory(url: URL) -> Callable[[], Any]:
    """Return a function that opens psycopg connections for an engine.

    TCP timeouts do not detect a frozen server. After one timeout all connections fail at once, because error handling
    would query the server again.
    """
    import psycopg

    lost = threading.Event()
    message = f"the server did not answer within {ANSWER_TIMEOUT:g} seconds"

    def limit(gen: Generator[Any, Any, Any]) -> Generator[Any, Any, Any]:
        """Add a timeout to psycopg's wait, which polls every 0.1 s."""
        try:
            wanted, last_answer = next(gen), time.monotonic()
            while True:
                ready = yield wanted
                if ready:
                    last_answer = time.monotonic()
                elif lost.is_set() or time.monotonic() - last_answer > ANSWER_TIMEOUT:
                    lost.set()
                    raise TimeoutError(message)
                wanted = gen.send(ready)
        except StopIteration as end:
            return end.value

    class Connection(psycopg.Connection[Any]):
        def wait(self, gen: Any, *arguments: Any, **options: Any) -> Any:
            try:
                return super().wait(limit(gen), *arguments, **options)
            except TimeoutError as error:
                self.close()
                raise psycopg.OperationalError(str(error)) from None

    dialect = url.get_dialect()
    positional, named = dialect(dbapi=dialect.import_dbapi()).create_connect_args(url)  # type: ignore[call-arg]
    named = {"connect_timeout": CONNECT_TIMEOUT, **KEEPALIVE, **named}

    def connect() -> Any:
        if lost.is_set():
            raise psycopg.OperationalError(message)
        return Connection.connect(*positional, **named)

    return connect


class ServerLock:
    """PostgreSQL advisory lock, released with the connection."""

    def __init__(self, engine: Engine, study_name: str) -> None:
        digest = hashlib.sha256(f"torchace {study_name}".encode()).digest()
        self.key = int.from_bytes(digest[:8], signed=True)
        self.connection = engine.connect().execution_options(isolation_level="AUTOCOMMIT")
        self._select("pg_advisory_lock_shared")

    @contextmanager
    def exclusive(self) -> Iterator[bool]:
        """Yield whether no other process works on the study; others wait until the context ends."""
        try:
            acquired = self._select("pg_try_advisory_lock")
        except DBAPIError as error:
            if not error.connection_invalidated:
                raise
            self.connection.rollback()  # the server restarted and released the lock
            self._select("pg_advisory_lock_shared")
            acquired = self._select("pg_try_advisory_lock")
        try:
            yield acquired
        finally:
            if acquired:
                self._select("pg_advisory_unlock")

    def close(self) -> None:
        """Close the connection, which releases the lock."""
        self.connection.invalidate()
        self.connection.close()

    def _select(self, function: str) -> bool:
        return bool(self.connection.execute(text(f"SELECT {function}(:key)"), {"key": self.key}).scalar())


FINGERPRINT = "torchace"  # attribute of a study
FAILURE = "failure"  # attribute of a trial: the reason; such a trial is not retried
RETRIES = 3  # of a trial whose process died
ATTEMPTS = 20  # to create the tables: other processes may do the same
SERVER_DELAY = 1.0  # seconds until a server notices that a process died


class StorageError(ValueError):
    """The storage cannot be used."""


class _Storage(RDBStorage):
    """Optuna's storage; keeps an error of the heartbeat thread for the main thread."""

    failure: Exception | None = None

    def record_heartbeat(self, trial_id: int) -> None:
        try:
            super().record_heartbeat(trial_id)
        except Exception as error:
            self.failure = error


class FileLock:
    """Lock file beside an SQLite file, shared by the processes of one machine."""

    def __init__(self, database: Path) -> None:
        name = f"{database.name}.lock"
        try:
            database.parent.mkdir(parents=True, exist_ok=True)
            self.file = open(database.with_name(name), "a")  # noqa: SIM115
            fcntl.flock(self.file, fcntl.LOCK_SH)
        except OSError as error:
            raise StorageError(f"Cannot write to {database}: {error.strerror}. Choose another file.") from error

    @contextmanager
    def exclusive(self) -> Iterator[bool]:
        """Yield whether no other process works on the study; others wait until the context ends."""
        acquired = True
        try:
            fcntl.flock(self.file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            acquired = False
        try:
            yield acquired
        finally:
            fcntl.flock(self.file, fcntl.LOCK_SH)  # a failed attempt may have released it

    def close(self) -> None:
        """Release the lock."""
        self.file.close()


@dataclass(frozen=True)
class OpenStudy:
    """An open study."""

    study: Study
    lock: FileLock | ServerLock | None
    storage: _Storage | None

    def check(self) -> None:
        """Raise the error of the last heartbeat, if any."""
        if self.storage is not None and self.storage.failure is not None:
            raise self.storage.failure

    def recover(self) -> bool:
        """If no other process works on the study, retry trials of dead ones; return whether this process is alone.

        This process must have no running trial.
        """
        with nullcontext(False) if self.lock is None else self.lock.exclusive() as is_alone:
            if is_alone:
                for trial in self.study.get_trials(deepcopy=False, states=(TrialState.RUNNING,)):
                    with suppress(UpdateFinishedTrialError):
                        self.study.tell(trial.number, state=TrialState.FAIL)
                trials = self.study.get_trials(deepcopy=False)
                retried = set(chain.from_iterable(trial.system_attrs.get("retry_history", ()) for trial in trials))
                for trial in trials:
                    failed = trial.state == TrialState.FAIL and FAILURE not in trial.user_attrs
                    if failed and trial.number not in retried:
                        retry_trial(self.study, trial.number)
            return is_alone

    def wait_for_server(self) -> None:
        """Recover; wait until a server notices dead processes."""
        deadline = time.monotonic() + SERVER_DELAY
        while not self.recover() and isinstance(self.lock, ServerLock) and time.monotonic() < deadline:
            if not self.study.get_trials(deepcopy=False, states=(TrialState.RUNNING,)):
                break
            time.sleep(0.1)


@contextmanager
def open_study(
    where: str | Path | None,
    name: str,
    fingerprint: Mapping[str, Any],
    *,
    sampler: BaseSampler,
    pruner: BasePruner,
    heartbeat: int,
) -> Iterator[OpenStudy]:
    """Open or create a study that minimizes.

    All processes hold a shared lock, so that a process that is alone can recover trials of dead ones at once. Otherwise
    trials without a heartbeat are retried.
    """
    url = _parse_url(where)
    with _silence_optuna(), ExitStack() as stack:
        lock: FileLock | ServerLock | None = None
        if (file := _sqlite_file(url)) is not None:
            lock = stack.enter_context(closing(FileLock(file)))
        storage = None if url is None else _connect(url, heartbeat)
        try:
            study = optuna.create_study(
                storage=InMemoryStorage() if storage is None else storage,
                study_name=name,
                sampler=sampler,
                pruner=pruner,
                load_if_exists=True,
            )
            _check_fingerprint(study, fingerprint, _display(url))
            if storage is not None and storage.engine.dialect.name == "postgresql":
                lock = stack.enter_context(closing(ServerLock(storage.engine, name)))
            opened = OpenStudy(study, lock, storage)
            opened.wait_for_server()
            yield opened
        except Exception as error:
            if (cause := _storage_cause(error)) is None:
                raise
            raise StorageError(
                f"Cannot use the storage {_display(url)} ({_reason(cause, url)}). "
                "Finished trials are kept: repeat the command to resume."
            ) from error
        finally:
            if storage is not None:
                storage.engine.dispose()


def retry_trial(study: Study, number: int) -> None:
    """Queue a retry of an unfinished trial with the same parameters."""
    trial = study.get_trials(deepcopy=True)[number]
    RetryHeartbeatStaleTrialCallback(RETRIES)(study, trial)


def first_attempt(trial: FrozenTrial) -> int | None:
    """Return the number of the trial that this one retries, if any."""
    return trial.system_attrs.get("failed_trial")


def _parse_url(where: str | Path | None) -> URL | None:
    if where is None:
        return None
    if isinstance(where, Path) or "://" not in where:
        return URL.create("sqlite", database=str(where))
    try:
        return make_url(where)
    except (ArgumentError, ValueError):  # its message may contain the password
        raise StorageError(
            "Expected the storage as a path or a URL such as postgresql+psycopg://user:password@host/database, "
            "but got a URL that cannot be read."
        ) from None


def _sqlite_file(url: URL | None) -> Path | None:
    if url is None or url.get_backend_name() != "sqlite" or not url.database or url.database == ":memory:":
        return None
    return Path(url.database)


def _display(url: URL | None) -> str:
    if url is None:
        return "memory"
    return str(_sqlite_file(url) or url.set(query={}).render_as_string(hide_password=True))


def _reason(error: BaseException, url: URL | None) -> str:
    """Return the first line of the driver's message, without passwords."""
    if isinstance(error, StorageInternalError) and error.__cause__ is not None:
        error = error.__cause__  # Optuna's message is generic
    message = str(getattr(error, "orig", None) or error).strip().split("\n")[0].rstrip(".: ")
    if url is not None:
        options = [value for key, value in url.normalized_query.items() if "pass" in key]
        for secret in filter(None, (url.password, *chain.from_iterable(options))):
            message = message.replace(secret, "***")
    return message


def _storage_cause(error: BaseException | None) -> BaseException | None:
    """Return the storage error that caused another error, if any."""
    while error is not None:
        if isinstance(error, SQLAlchemyError | StorageInternalError | UnicodeError):
            return error
        error = error.__cause__ or error.__context__
    return None


def _connect(url: URL, heartbeat: int) -> _Storage:
    options: dict[str, Any] = {"pool_pre_ping": True}
    for attempt in range(ATTEMPTS):
        try:
            if url.get_backend_name() == "sqlite":
                options["connect_args"] = {"timeout": 60}
            elif url.drivername == "postgresql+psycopg":
                options["creator"] = connection_factory(url)
            elif url.get_backend_name() == "postgresql":
                options["connect_args"] = {"connect_timeout": CONNECT_TIMEOUT}
            return _Storage(
                url.render_as_string(hide_password=False).replace("{", "{{").replace("}", "}}"),  # Optuna formats it
                options,
                heartbeat_interval=heartbeat,
                grace_period=3 * heartbeat,
                heartbeat_stale_trial_callback=RetryHeartbeatStaleTrialCallback(RETRIES),
            )
        except (NoSuchModuleError, ImportError) as error:
            missing = (e.name for e in (error, error.__cause__) if isinstance(e, ImportError))
            package = next(filter(None, missing), None)
            advice = f"Install {package}" if package else "Use postgresql+psycopg:// or a path"
            raise StorageError(f"No driver is installed for the storage {_display(url)}. {advice}.") from error
        except (SQLAlchemyError, StorageInternalError, RuntimeError, UnicodeError) as error:
            # another process created a table at the same time
            raced = isinstance(error, IntegrityError | ProgrammingError) or "already exists" in str(error)
            if not raced or attempt == ATTEMPTS - 1:
                raise StorageError(
                    f"Cannot open the storage {_display(url)} ({_reason(error, url)}). Check the address."
                ) from error
            time.sleep(0.1)
    raise AssertionError("unreachable")


def _check_fingerprint(study: Study, fingerprint: Mapping[str, Any], where: str) -> None:
    """Store the fingerprint in a new study; refuse a study of another search."""
    before = study.user_attrs.get(FINGERPRINT)
    foreign = study.directions != [StudyDirection.MINIMIZE] or not isinstance(before, dict | None)
    if before is None and not foreign and not study.get_trials(deepcopy=False):
        study.set_user_attr(FINGERPRINT, dict(fingerprint))
        return
    if before is None or foreign:
        difference: str | None = "was not made by torchace"
    elif (difference := fingerprint_difference(before, fingerprint)) is not None:
        difference = f"holds a search {difference}"
    if difference is not None:
        raise StorageError(f"Study {study.study_name!r} in {where} {difference}. Choose another name for the study.")


@contextmanager
def _silence_optuna() -> Iterator[None]:
    level = optuna.logging.get_verbosity()
    optuna.logging.set_verbosity(optuna.logging.CRITICAL)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", ExperimentalWarning)
            yield
    finally:
        optuna.logging.set_verbosity(level)
