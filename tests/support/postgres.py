"""A temporary PostgreSQL server, if PostgreSQL is installed."""

from __future__ import annotations

import os
import pwd
import shutil
import signal
import subprocess
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

USER, PASSWORD, DATABASE = "tuner", "s3cret-{w}", "postgres"  # braces: Optuna formats URLs


def binaries() -> Path | None:
    """The folder with `initdb` and `pg_ctl`; Debian has it off the path."""
    found = shutil.which("initdb")
    folders = [Path(found).resolve().parent] if found else []
    folders += sorted(Path("/usr/lib/postgresql").glob("*/bin"), reverse=True)
    return next((f for f in folders if (f / "initdb").exists() and (f / "pg_ctl").exists()), None)


@dataclass(frozen=True)
class Server:
    """A server that listens on a socket in its folder alone."""

    folder: Path
    binaries: Path
    account: dict[str, Any]  # who it runs as

    def url(self, password: str = PASSWORD, folder: Path | None = None) -> str:
        quoted = password.replace("{", "%7B").replace("}", "%7D")
        return f"postgresql+psycopg://{USER}:{quoted}@/{DATABASE}?host={folder or self.folder}"

    def start(self) -> None:
        options = f"-c listen_addresses='' -c unix_socket_directories='{self.folder}' -c fsync=off"
        self.run("pg_ctl", "-D", "data", "-l", "log", "-o", options, "-w", "start")

    def stop(self) -> None:
        self.run("pg_ctl", "-D", "data", "-m", "immediate", "-w", "stop")

    def processes(self) -> list[int]:
        """The server's process and those that it started, one for each connection among them."""
        first = int((self.folder / "data" / "postmaster.pid").read_text().split()[0])
        others = [stat for stat in Path("/proc").glob("[0-9]*/stat") if _fields(stat)[1:2] == [str(first)]]
        return [first, *(int(stat.parent.name) for stat in others)]

    @contextmanager
    def frozen(self) -> Iterator[None]:
        """Stopped where it is: connections stay open, and nothing answers."""
        frozen = self.processes()
        for process in frozen:
            os.kill(process, signal.SIGSTOP)
        try:
            yield
        finally:
            for process in frozen:
                os.kill(process, signal.SIGCONT)

    def run(self, command: str, *arguments: str) -> None:
        # to a file: a pipe would stay open for as long as the server runs
        with open(self.folder / "out", "ab") as out:
            done = subprocess.run(
                [str(self.binaries / command), *arguments],
                cwd=self.folder,
                env={**os.environ, "LC_ALL": "C"},
                stdout=out,
                stderr=subprocess.STDOUT,
                check=False,
                **self.account,
            )
        assert done.returncode == 0, (self.folder / "out").read_text() + _text(self.folder / "log")


@contextmanager
def running() -> Iterator[Server]:
    """A new server, stopped and removed at the end. It refuses root, so root starts it as another user."""
    found = binaries()
    assert found is not None
    folder = Path(tempfile.mkdtemp(prefix="pg"))  # short: a socket's path is
    account: dict[str, Any] = {}
    if os.getuid() == 0:
        unprivileged = pwd.getpwnam("nobody")
        account = {"user": unprivileged.pw_uid, "group": unprivileged.pw_gid, "extra_groups": []}
        os.chown(folder, unprivileged.pw_uid, unprivileged.pw_gid)
    server = Server(folder, found, account)
    try:
        (folder / "password").write_text(PASSWORD)
        (folder / "password").chmod(0o644)
        server.run(
            *("initdb", "-D", "data", "-U", USER, "--pwfile=password", "-A", "scram-sha-256"),
            *("--encoding=UTF8", "--locale=C", "--no-sync"),
        )
        server.start()
        try:
            yield server
        finally:
            server.stop()
    finally:
        shutil.rmtree(folder)


def _fields(stat: Path) -> list[str]:
    """State, parent and more of a process, from the system's table; nothing where it has ended since."""
    try:
        return stat.read_text().rpartition(")")[2].split()
    except OSError:
        return []


def _text(file: Path) -> str:
    return file.read_text() if file.exists() else ""
