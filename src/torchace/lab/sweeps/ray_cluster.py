"""Connect to a Ray cluster, with a time limit."""

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

from torchace._extras import missing_extra

# Read when Ray is imported: no worker logs in the terminal, no usage statistics.
os.environ.setdefault("RAY_DEDUP_LOGS_SKIP_REGEX", ".")
os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")

try:
    import ray
    from ray.exceptions import RayError
except ModuleNotFoundError as error:
    raise missing_extra("Sweeps on Ray need ray", "ray") from error

__all__ = ["RayAddressError", "join_cluster", "last_line", "ray"]  # import ray from here

CONNECT_SECONDS = 5.0
JOIN_SECONDS = 60.0  # a cluster that answers may still be starting


class RayAddressError(ValueError):
    """The Ray cluster cannot be used."""


def join_cluster(address: str) -> None:
    """Connect this process to a cluster, or raise `RayAddressError`.

    `local` starts Ray on this machine, `auto` finds a running one, `HOST:PORT` is a cluster that this machine belongs
    to, `ray://HOST:PORT` any other.
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
    handler = signal.getsignal(signal.SIGTERM)  # Ray replaces it
    try:
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", "Ray Client connection timed out")  # raised below
            try:
                with _on_loopback() if address == "local" else nullcontext():
                    ray.init(address, **options)
            except ConnectionAbortedError:
                # Ray forks a process for each ray:// client while gRPC's threads run; on a busy machine about one in
                # twenty dies, so try once more.
                ray.init(address, **options)
    except (RayError, RuntimeError, OSError, ValueError, ImportError) as error:
        raise _join_error(address, last_line(error)) from error
    finally:
        signal.signal(signal.SIGTERM, handler)


@contextmanager
def _on_loopback() -> Iterator[None]:
    """Make Ray listen on 127.0.0.1 only; the default on Linux is every interface."""
    from ray._private import ray_constants

    before = ray_constants.ENABLE_RAY_CLUSTER
    ray_constants.ENABLE_RAY_CLUSTER = False
    try:
        yield
    finally:
        ray_constants.ENABLE_RAY_CLUSTER = before


def _check_reachable(address: str) -> None:
    """Refuse an address that is invalid or does not answer; Ray itself would try for minutes."""
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
    """Join in a subprocess first: Ray has no time limit and ends the process on failure."""
    code = f"import ray; ray.init({address!r}, log_to_driver=False)"
    # new session: Ctrl-C is handled by the sweep
    options: dict[str, Any] = {"capture_output": True, "text": True, "check": False, "start_new_session": True}
    try:
        attempt = subprocess.run([sys.executable, "-c", code], timeout=JOIN_SECONDS, **options)
    except subprocess.TimeoutExpired:
        raise _join_error(address, f"it did not answer within {JOIN_SECONDS:.0f} seconds") from None
    if attempt.returncode != 0:
        raise _join_error(address, last_line(attempt.stderr))


def _join_error(address: str, reason: str) -> RayAddressError:
    return RayAddressError(
        f"Cannot join a Ray cluster with --ray {address} ({reason}). From a machine outside the cluster use "
        "ray://HOST:10001; if it asks for a token, set RAY_AUTH_MODE=token; without a cluster use --ray local."
    )


def last_line(text: object) -> str:
    """Return the last line of a Ray error, after its traceback."""
    return (str(text).strip().splitlines() or ["no reason given"])[-1].rstrip(".")
