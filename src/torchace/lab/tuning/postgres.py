"""PostgreSQL connections with a timeout for servers that accept connections and do not answer."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Generator
from typing import Any

from sqlalchemy import URL

CONNECT_TIMEOUT = 10  # seconds
ANSWER_TIMEOUT = 20.0  # seconds
# the operating system notices a machine or a network that is gone
KEEPALIVE = {"keepalives_idle": 15, "keepalives_interval": 5, "keepalives_count": 3, "tcp_user_timeout": 20_000}


def connection_factory(url: URL) -> Callable[[], Any]:
    """Return a function that opens psycopg connections for an engine.

    A frozen server keeps its sockets open, so that neither TCP's timeouts nor its own help. After one timeout every
    call on all connections fails at once: error handling would query the server again.
    """
    import psycopg

    lost = threading.Event()
    message = f"the server did not answer within {ANSWER_TIMEOUT:g} seconds"

    def limit(gen: Generator[Any, Any, Any]) -> Generator[Any, Any, Any]:
        """Forward psycopg's wait, which polls every tenth of a second, until the timeout."""
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
