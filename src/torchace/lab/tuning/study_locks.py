"""Locks that every process at work on a study shares, and that the system lifts when a process dies."""

from __future__ import annotations

import fcntl
import hashlib
from collections.abc import Iterator
from contextlib import contextmanager
from typing import IO

from sqlalchemy import Engine, text
from sqlalchemy.exc import DBAPIError


class StudyLock:
    """No lock: whether other processes are at work is not known."""

    @contextmanager
    def alone(self) -> Iterator[bool]:
        """Whether no other process is at work on the study; none begins before the context ends."""
        yield False

    def close(self) -> None:
        """Lift the lock."""


class FileLock(StudyLock):
    """A lock on a file, for processes of one machine."""

    def __init__(self, file: IO[str]) -> None:
        self.file = file
        fcntl.flock(file, fcntl.LOCK_SH)

    @contextmanager
    def alone(self) -> Iterator[bool]:
        alone = True
        try:
            fcntl.flock(self.file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            alone = False
        try:
            yield alone
        finally:
            fcntl.flock(self.file, fcntl.LOCK_SH)  # also after a refusal, which may have lifted it

    def close(self) -> None:
        self.file.close()


class ServerLock(StudyLock):
    """An advisory lock of PostgreSQL: it ends with the connection, so with the process."""

    def __init__(self, engine: Engine, study_name: str) -> None:
        digest = hashlib.sha256(f"torchace {study_name}".encode()).digest()
        self.key = int.from_bytes(digest[:8], signed=True)
        self.connection = engine.connect().execution_options(isolation_level="AUTOCOMMIT")
        self._ask("pg_advisory_lock_shared")

    @contextmanager
    def alone(self) -> Iterator[bool]:
        try:
            alone = self._ask("pg_try_advisory_lock")
        except DBAPIError as error:
            if not error.connection_invalidated:
                raise
            self.connection.rollback()  # the server was away: the lock went with the connection
            self._ask("pg_advisory_lock_shared")
            alone = self._ask("pg_try_advisory_lock")
        try:
            yield alone
        finally:
            if alone:
                self._ask("pg_advisory_unlock")

    def close(self) -> None:
        self.connection.invalidate()
        self.connection.close()

    def _ask(self, function: str) -> bool:
        return bool(self.connection.execute(text(f"SELECT {function}(:key)"), {"key": self.key}).scalar())
