"""Connections to PostgreSQL that do not wait for ever for a server that is there and does not answer."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Generator
from typing import Any

from sqlalchemy import URL

CONNECT = 10  # seconds for a connection
SILENCE = 20.0  # seconds without a word from a server that was asked something
# a machine or a network that is gone: noticed by the system
KEEPALIVE = {"keepalives_idle": 15, "keepalives_interval": 5, "keepalives_count": 3, "tcp_user_timeout": 20_000}


def connector(url: URL) -> Callable[[], Any]:
    """What makes connections for an engine, with psycopg.

    A server may be frozen while the system keeps its sockets open: no timeout of TCP's or of its own helps. Once it was
    silent for too long, every call on all of these connections fails at once: what follows an error asks it again.
    """
    import psycopg

    lost = threading.Event()

    class Connection(psycopg.Connection[Any]):
        def wait(self, gen: Any, *arguments: Any, **options: Any) -> Any:
            try:
                return super().wait(_limited(gen, lost), *arguments, **options)
            except TimeoutError as error:
                self.close()
                raise psycopg.OperationalError(str(error)) from None

    kind = url.get_dialect()
    positional, named = kind(dbapi=kind.import_dbapi()).create_connect_args(url)  # type: ignore[call-arg]
    named = {"connect_timeout": CONNECT, **KEEPALIVE, **named}

    def connect() -> Any:
        if lost.is_set():
            raise psycopg.OperationalError(_said())
        return Connection.connect(*positional, **named)

    return connect


def _limited(gen: Generator[Any, Any, Any], lost: threading.Event) -> Generator[Any, Any, Any]:
    """What psycopg waits for, until nothing came for too long; it asks again every tenth of a second."""
    try:
        wanted, heard = next(gen), time.monotonic()
        while True:
            ready = yield wanted
            if ready:
                heard = time.monotonic()
            elif lost.is_set() or time.monotonic() - heard > SILENCE:
                lost.set()
                raise TimeoutError(_said())
            wanted = gen.send(ready)
    except StopIteration as end:
        return end.value


def _said() -> str:
    return f"the server did not answer within {SILENCE:g} seconds"
