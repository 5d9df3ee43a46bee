"""Where a data file is: in `$TORCHACE_DATA`, in the user's cache, or on the network."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, BinaryIO
from urllib.parse import urlsplit

from torchace._files import open_regular
from torchace.lab.data.errors import DataError, damaged, require_extra

ENVIRONMENT = "TORCHACE_DATA"


def cache_dir() -> Path:
    """Where downloads are kept: `$XDG_CACHE_HOME/torchace`, else `~/.cache/torchace`."""
    base = os.environ.get("XDG_CACHE_HOME") or os.path.join(os.path.expanduser("~"), ".cache")
    return Path(base) / "torchace"


def data_dir(directory: str | os.PathLike[str] | None = None) -> Path | None:
    """The user's own folder of data: the one given, else `$TORCHACE_DATA`, else none.

    A folder that is named but is not there is an error, so that a misspelt one does not start a download.
    """
    named = os.fspath(directory) if directory is not None else os.environ.get(ENVIRONMENT, "")
    if not named:
        return None
    path = Path(os.path.expanduser(named))
    if not path.is_dir():
        origin = "`directory`" if directory is not None else f"the environment variable {ENVIRONMENT}"
        raise DataError(f"{path}, named by {origin}, is not a folder; correct the name, or leave it out.")
    return path


def search_path(name: str, folders: Sequence[str], directory: str | os.PathLike[str] | None = None) -> list[Path]:
    """The folders in which the files of a data set are looked for, in this order."""
    root = data_dir(directory)
    own = [] if root is None else [root / folder for folder in folders]
    return [*own, cache_dir() / name]


def is_present(path: Path) -> bool:
    """Whether something, whatever it is, stands at this path."""
    try:
        os.lstat(path)
    except (FileNotFoundError, NotADirectoryError):
        return False
    except OSError as error:
        raise DataError(f"{path} cannot be looked at ({error.strerror}); check the folder's permissions.") from None
    return True


def find(path: Sequence[Path], names: Sequence[str]) -> Path | None:
    """The first of several names in the first of several folders that has one."""
    return next((folder / name for folder in path for name in names if is_present(folder / name)), None)


def missing(title: str, name: str, path: Sequence[Path]) -> DataError:
    looked = ", ".join(str(folder) for folder in path)
    return DataError(
        f"{name} of {title} was not found in {looked}; put the official file in one of these folders, set "
        f"{ENVIRONMENT} to the folder that has it, or allow the download."
    )


@contextmanager
def opened(path: Path) -> Iterator[BinaryIO]:
    """A regular file, open for reading; whatever the system has against it is one sentence."""
    try:
        with open_regular(path) as file:
            yield file
    except OSError as error:
        raise damaged(path, f"cannot be read ({error.strerror or error})") from None


def fetch(title: str, name: str, *, urls: Sequence[str], sha256: str, folder: Path, progress: bool = True) -> Path:
    """Download a file with a known hash into a folder, from the first address that has it.

    The file appears under its name only when it is whole and its hash is right.
    """
    pooch = require_extra("pooch", "pooch", f"Downloading {title}")
    failures = []
    log = pooch.get_logger()
    level = log.level
    for url in urls:
        bar = _Bar(name) if progress else None
        log.setLevel("WARNING")  # the bar says what is going on
        try:
            downloader = pooch.HTTPDownloader(progressbar=bar or False, chunk_size=1 << 16, timeout=30)
            return Path(pooch.retrieve(url + name, f"sha256:{sha256}", fname=name, path=folder, downloader=downloader))
        except (OSError, ValueError) as error:  # the network's errors are OSErrors, a wrong hash is a ValueError
            failures.append(f"{urlsplit(url).hostname}: {_reason(error, folder)}")
        finally:
            log.setLevel(level)
            if bar is not None:
                bar.close()
    raise DataError(
        f"{name} of {title} could not be downloaded ({'; '.join(failures)}); check the connection, or put the file in "
        f"{folder} or in the folder that {ENVIRONMENT} names."
    )


def _reason(error: Exception, folder: Path) -> str:
    requests = require_extra("requests", "requests", "Downloading")
    if isinstance(error, requests.HTTPError):
        return f"HTTP status {error.response.status_code}"
    if isinstance(error, requests.Timeout):
        return "no answer"
    if isinstance(error, requests.RequestException):
        return "no connection"
    if isinstance(error, OSError):
        return f"{folder} cannot be written, {error.strerror or type(error).__name__}"
    return "what came has the wrong SHA-256"


class _Bar:
    """A progress bar with the four verbs that pooch calls, drawn by rich on standard error."""

    def __init__(self, name: str) -> None:
        console = require_extra("rich.console", "rich", "A progress bar")
        progress = require_extra("rich.progress", "rich", "A progress bar")
        columns = (progress.TextColumn("{task.description}"), progress.BarColumn(), progress.DownloadColumn())
        self._progress: Any = progress.Progress(
            *columns, progress.TimeRemainingColumn(), console=console.Console(stderr=True)
        )
        self._task = self._progress.add_task(name, total=None)
        self._progress.start()
        self.close: Callable[[], None] = self._progress.stop

    @property
    def total(self) -> float | None:
        total: float | None = self._progress.tasks[0].total
        return total

    @total.setter
    def total(self, total: int) -> None:
        self._progress.update(self._task, total=total or None)

    def update(self, count: int) -> None:
        self._progress.advance(self._task, count)

    def reset(self) -> None:
        self._progress.update(self._task, completed=0)
