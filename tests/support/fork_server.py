"""Runs `torchace` commands in forked processes in which everything is already imported.

Started as a program, it imports what commands need, and then forks a process for each command that it is sent: a
command that is to be killed need not spend seconds on imports first.
"""

from __future__ import annotations

import contextlib
import json
import os
import select
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

PATIENCE = 120.0  # seconds until a process that does not do what it should is given up
# What a process can be told to die at: before or after a certain call of these.
OPERATIONS = ("os.replace", "os.rename", "os.fsync", "os.mkdir", "os.unlink")


class ForkServer:
    """Client of the server."""

    def __init__(self) -> None:
        root = Path(__file__).parents[2]
        self.process = subprocess.Popen(
            [sys.executable, str(Path(__file__))],
            cwd=root,
            env={
                **os.environ,
                "OMP_NUM_THREADS": "1",
                "OPENBLAS_NUM_THREADS": "1",
                "PYTHONPATH": os.pathsep.join([str(root / "src"), str(root)]),
            },
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        self.running: dict[int, Command] = {}
        if self._line() != "ready":
            self.close()
            raise AssertionError("the server does not start")

    def start(self, *arguments: object, folder: Path, **options: Any) -> Command:
        """A command in a folder; for options see `_child`."""
        for name in ("stdout", "stderr"):
            (folder / name).write_text("")
        self._say({"arguments": [str(a) for a in arguments], "folder": str(folder), **options})
        command = Command(self, int(self._line()), folder)
        self.running[command.pid] = command
        return command

    def close(self) -> None:
        """Kills what a failed test left, and ends."""
        with self.process:  # its pipes are closed, whatever happens: that ends it
            for command in list(self.running.values()):
                command.end(signal.SIGKILL)

    def _say(self, content: Any) -> None:
        assert self.process.stdin is not None
        self.process.stdin.write(json.dumps(content) + "\n")
        self.process.stdin.flush()

    def _line(self) -> str:
        assert self.process.stdout is not None
        return self.process.stdout.readline().strip()


class Command:
    """A process that a server has forked; one at a time."""

    def __init__(self, server: ForkServer, pid: int, folder: Path) -> None:
        self.server, self.pid, self.folder = server, pid, folder
        self.began = time.monotonic()
        self._ended = os.pidfd_open(pid)

    def wait_until(self, condition: Callable[[], bool]) -> bool:
        """Whether the condition came true before the process ended; looked at again and again."""
        while not select.select([self._ended], [], [], 0.0005)[0]:
            if condition():
                return True
            assert time.monotonic() < self.began + PATIENCE, "the process does not get there"
        return False

    def end(self, number: signal.Signals | None = None) -> tuple[int, str, str]:
        """Its exit code (minus the signal that killed it), and what it printed."""
        if number is not None:
            with contextlib.suppress(ProcessLookupError):
                os.kill(self.pid, number)
        os.close(self._ended)
        del self.server.running[self.pid]
        self.server._say({"wait": self.pid})
        code = int(self.server._line())
        return code, *((self.folder / name).read_text() for name in ("stdout", "stderr"))


def _serve() -> None:
    import torch

    torch.set_num_threads(1)

    import matplotlib.figure  # noqa: F401
    import optuna  # noqa: F401
    import pandas  # noqa: F401
    import pyarrow.parquet  # noqa: F401

    from torchace.lab.cli import app as cli  # noqa: F401

    print("ready", flush=True)
    for line in sys.stdin:
        asked = json.loads(line)
        if "wait" in asked:
            _, status = os.waitpid(asked["wait"], 0)
            print(os.waitstatus_to_exitcode(status), flush=True)
            continue
        pid = os.fork()
        if pid == 0:
            _child(**asked)
        print(pid, flush=True)


def _child(
    arguments: list[str],
    folder: str,
    every: float = 30.0,
    page: bool = True,
    die: tuple[str, int, bool] | None = None,
    count: bool = False,
    held: tuple[str, int] | None = None,
) -> None:
    """Does a command and ends.

    Args:
        arguments: Arguments of `torchace`.
        folder: Where; what is printed is written to `stdout` and `stderr` in it.
        every: Seconds between checkpoints.
        page: Whether a page is written instead of a report.
        die: An operation, which call of it, and whether after it rather than before, at which the process is killed.
        count: Whether to write to `operations` how often each operation was called.
        held: A function and after which call of it the process waits for a signal, see `tests.support.paused_command`.
    """
    code, calls = 1, {}
    try:
        os.chdir(folder)
        for descriptor, name in ((1, "stdout"), (2, "stderr")):
            os.dup2(os.open(name, os.O_CREAT | os.O_WRONLY | os.O_TRUNC, 0o644), descriptor)
        sys.stdout, sys.stderr = (os.fdopen(d, "w", buffering=1) for d in (1, 2))
        os.close(0)

        from tests.lab.cli.command_line import fake_report
        from tests.support.paused_command import hold
        from torchace.lab import cli, report
        from torchace.lab.cli.terminal import console
        from torchace.lab.tables import fit as table_fit
        from torchace.lab.tuning import search as tuning_search

        console.file = sys.stdout
        table_fit.SAVE_EVERY = every
        real = tuning_search.SearchCache
        tuning_search.SearchCache = lambda directory: real(directory, every)  # type: ignore[assignment,misc]
        if page:
            report.write_report = fake_report  # type: ignore[assignment]
        calls = _count_operations(die)
        if held is not None:
            hold(*held)
        sys.argv = ["torchace", *arguments]
        cli.main()
    except SystemExit as error:
        code = error.code if isinstance(error.code, int) else 0
    except BaseException:
        import traceback

        traceback.print_exc()
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        if count:
            Path("operations").write_text(json.dumps(calls))
        os._exit(code)


def _count_operations(die: tuple[str, int, bool] | None) -> dict[str, int]:
    """Counts the calls of all operations from now on, and dies at one of them."""
    import shutil

    calls = dict.fromkeys(OPERATIONS, 0)
    where, number, after = die or ("", 0, False)
    for operation in OPERATIONS:
        module, name = {"os": os, "shutil": shutil}[operation.split(".")[0]], operation.split(".")[1]
        original = getattr(module, name)

        def counted(*args: Any, operation: str = operation, real: Any = original, **options: Any) -> Any:
            calls[operation] += 1
            here = operation == where and calls[operation] == number
            if here and not after:
                os.kill(os.getpid(), signal.SIGKILL)
            result = real(*args, **options)
            if here:
                os.kill(os.getpid(), signal.SIGKILL)
            return result

        setattr(module, name, counted)
    return calls


if __name__ == "__main__":
    _serve()
    os._exit(0)  # without seconds of taking modules apart
