"""PostgreSQL: connections with a timeout, and a lock shared by all processes."""

from __future__ import annotations

import hashlib
import threading
import time
from collections.abc import Callable, Generator, Iterator
from contextlib import contextmanager
from typing import Any

from sqlalchemy import URL, Engine, text
from sqlalchemy.exc import DBAPIError

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
