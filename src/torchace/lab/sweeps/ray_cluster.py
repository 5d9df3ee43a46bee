"""Connecting to a Ray cluster: within seconds, or one sentence with the reason."""

from __future__ import annotations

import logging
import os
import signal
import socket
import subprocess
import sys
import warnings
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from typing import Any

# Read when Ray is imported: its messages about lost workers would mix with ours, and a cluster that we start reports
# nothing to its makers.
os.environ.setdefault("RAY_DEDUP_LOGS_SKIP_REGEX", ".")
os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")

try:
    import ray
    from ray.exceptions import RayError
except ModuleNotFoundError as error:
    raise ImportError("Sweeps on Ray need an extra package: pip install 'torchace[ray]'.") from error

__all__ = ["RayAddressError", "join_cluster", "last_line", "ray"]  # import ray from here: set up and checked

CONNECT_SECONDS = 5.0  # for a connection to an address
JOIN_SECONDS = 60.0  # to join a cluster once its address answers: it may still be starting


class RayAddressError(ValueError):
    """A cluster that cannot be used; one sentence with the reason and what to do."""


def join_cluster(address: str) -> None:
    """Connect this process to a cluster, or raise `RayAddressError`.

    `local` starts Ray on this machine, `auto` finds the one that runs here, `HOST:PORT` is a cluster this machine is
    part of, `ray://HOST:PORT` any other.
    """
    address = address.strip()
    if address == "auto":
        address = os.environ.get("RAY_ADDRESS", "").strip() or "auto"
    options: dict[str, Any] = {"logging_level": logging.CRITICAL, "log_to_driver": False}
    if address == "local":
        options["include_dashboard"] = False
    else:
        if address != "auto":
            _check_reachable(address)
        if not address.startswith("ray://"):
            _try_join(address)
    handler = signal.getsignal(signal.SIGTERM)  # Ray sets one that ends the process at once
    try:
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", "Ray Client connection timed out")  # an error below
            try:
                with _on_loopback() if address == "local" else nullcontext():
                    ray.init(address, **options)
            except ConnectionAbortedError:
                # The cluster forks a process for each client that comes by ray://, with gRPC's threads running: on a
                # busy machine one in twenty dies there. The next one is another process.
                ray.init(address, **options)
    except (RayError, RuntimeError, OSError, ValueError, ImportError) as error:
        raise _join_error(address, last_line(error)) from error
    finally:
        signal.signal(signal.SIGTERM, handler)


@contextmanager
def _on_loopback() -> Iterator[None]:
    """Let Ray listen at 127.0.0.1 alone, as on macOS; on Linux it would listen to the whole network."""
    from ray._private import ray_constants

    before = ray_constants.ENABLE_RAY_CLUSTER
    ray_constants.ENABLE_RAY_CLUSTER = False
    try:
        yield
    finally:
        ray_constants.ENABLE_RAY_CLUSTER = before


def _check_reachable(address: str) -> None:
    """Refuse what is not an address, and one that does not answer: Ray itself would try for minutes."""
    host, colon, port = address.removeprefix("ray://").rstrip("/").rpartition(":")
    if not colon or not host or not port.isdigit() or not 0 < int(port) < 65536:
        raise RayAddressError(f"Expected --ray auto, local, HOST:PORT or ray://HOST:PORT, but got {address!r}.")
    try:
        socket.create_connection((host.strip("[]"), int(port)), CONNECT_SECONDS).close()
    except OSError as error:
        raise RayAddressError(
            f"Cannot reach a Ray cluster at {address}: {error.strerror or error}. Start one with `ray start --head` "
            "(it listens at 6379, for ray:// at 10001), or use --ray local."
        ) from error


def _try_join(address: str) -> None:
    """Join in a process of its own first: Ray has no time limit, and ends the process it fails in."""
    code = f"import ray; ray.init({address!r}, log_to_driver=False)"
    # a new session: away from the terminal's Ctrl-C, which the sweep handles
    options: dict[str, Any] = {"capture_output": True, "text": True, "check": False, "start_new_session": True}
    try:
        tried = subprocess.run([sys.executable, "-c", code], timeout=JOIN_SECONDS, **options)
    except subprocess.TimeoutExpired:
        raise _join_error(address, f"it did not answer within {JOIN_SECONDS:.0f} seconds") from None
    if tried.returncode != 0:
        raise _join_error(address, last_line(tried.stderr))


def _join_error(address: str, reason: str) -> RayAddressError:
    return RayAddressError(
        f"Cannot join a Ray cluster with --ray {address} ({reason}). From a machine outside the cluster use "
        "ray://HOST:10001; where it asks for a token, set RAY_AUTH_MODE=token; without a cluster use --ray local."
    )


def last_line(text: object) -> str:
    """Return the last line of an error of Ray: the reason, after a traceback."""
    return (str(text).strip().splitlines() or ["no reason given"])[-1].rstrip(".")
