"""Locks that all processes of a study share; the operating system or the server releases them when a process dies."""

from __future__ import annotations

import fcntl
import hashlib
from collections.abc import Iterator
from contextlib import contextmanager
from typing import IO

from sqlalchemy import Engine, text
from sqlalchemy.exc import DBAPIError


class StudyLock:
    """No lock: other processes are not visible."""

    @contextmanager
    def exclusive(self) -> Iterator[bool]:
        """Whether no other process works on the study; none starts before the context ends."""
        yield False

    def close(self) -> None:
        """Release the lock."""


class FileLock(StudyLock):
    """A lock on a file, for processes of one machine."""

    def __init__(self, file: IO[str]) -> None:
        self.file = file
        fcntl.flock(file, fcntl.LOCK_SH)

    @contextmanager
    def exclusive(self) -> Iterator[bool]:
        acquired = True
        try:
            fcntl.flock(self.file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            acquired = False
        try:
            yield acquired
        finally:
            fcntl.flock(self.file, fcntl.LOCK_SH)  # also after a refusal, which may have released it

    def close(self) -> None:
        self.file.close()


class ServerLock(StudyLock):
    """An advisory lock of PostgreSQL: it ends with the connection."""

    def __init__(self, engine: Engine, study_name: str) -> None:
        digest = hashlib.sha256(f"torchace {study_name}".encode()).digest()
        self.key = int.from_bytes(digest[:8], signed=True)
        self.connection = engine.connect().execution_options(isolation_level="AUTOCOMMIT")
        self._select("pg_advisory_lock_shared")

    @contextmanager
    def exclusive(self) -> Iterator[bool]:
        try:
            acquired = self._select("pg_try_advisory_lock")
        except DBAPIError as error:
            if not error.connection_invalidated:
                raise
            self.connection.rollback()  # the server restarted: the lock was lost with the connection
            self._select("pg_advisory_lock_shared")
            acquired = self._select("pg_try_advisory_lock")
        try:
            yield acquired
        finally:
            if acquired:
                self._select("pg_advisory_unlock")

    def close(self) -> None:
        self.connection.invalidate()
        self.connection.close()

    def _select(self, function: str) -> bool:
        return bool(self.connection.execute(text(f"SELECT {function}(:key)"), {"key": self.key}).scalar())
