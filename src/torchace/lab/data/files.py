"""Search for data files in `$TORCHACE_DATA` and in the user's cache; download."""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, BinaryIO
from urllib.parse import urlsplit

from torchace._extras import import_extra
from torchace._files import open_regular
from torchace.lab.data.errors import DataError, damaged_file

ENVIRONMENT = "TORCHACE_DATA"


def cache_dir() -> Path:
    """Download folder: `$XDG_CACHE_HOME/torchace`, else `~/.cache/torchace`."""
    base = os.environ.get("XDG_CACHE_HOME") or os.path.join(os.path.expanduser("~"), ".cache")
    return Path(base) / "torchace"


def search_path(name: str, folders: Sequence[str], directory: str | os.PathLike[str] | None = None) -> list[Path]:
    """Folders to search for a data set: below `directory` or `$TORCHACE_DATA`, then the user's cache.

    A missing root folder is an error: a misspelled name must not start a download.
    """
    given = os.fspath(directory) if directory is not None else os.environ.get(ENVIRONMENT, "")
    if not given:
        return [cache_dir() / name]
    root = Path(os.path.expanduser(given))
    if not root.is_dir():
        origin = "`directory`" if directory is not None else f"the environment variable {ENVIRONMENT}"
        raise DataError(f"{root}, named by {origin}, is not a folder; correct the name, or leave it out.")
    return [*(root / folder for folder in folders), cache_dir() / name]


def is_present(path: Path) -> bool:
    """Whether anything exists at this path."""
    try:
        os.lstat(path)
    except (FileNotFoundError, NotADirectoryError):
        return False
    except OSError as error:
        raise DataError(f"{path} cannot be accessed ({error.strerror}); check the folder's permissions.") from None
    return True


def find(path: Sequence[Path], names: Sequence[str]) -> Path | None:
    """First existing file among `names` in the first folder that has one."""
    return next((folder / name for folder in path for name in names if is_present(folder / name)), None)


def not_found(title: str, name: str, path: Sequence[Path]) -> DataError:
    """Error for a file that is in none of the folders."""
    return DataError(
        f"{name} of {title} was not found in {', '.join(map(str, path))}; put the official file in one of these "
        f"folders, set {ENVIRONMENT} to the folder that has it, or allow the download."
    )


@contextmanager
def open_data(path: Path) -> Iterator[BinaryIO]:
    """Open a regular file for reading; raise system errors as `DataError`."""
    try:
        with open_regular(path) as file:
            yield file
    except OSError as error:
        raise damaged_file(path, f"cannot be read ({error.strerror or error})") from None


def download(title: str, name: str, *, urls: Sequence[str], sha256: str, folder: Path, progress: bool = True) -> Path:
    """Download a file from the first working address; it appears only complete and with the right hash."""
    pooch = import_extra("pooch", f"Downloading {title} needs")
    failures = []
    log = pooch.get_logger()
    level = log.level
    for url in urls:
        bar = _ProgressBar(name) if progress else None
        log.setLevel("WARNING")  # the progress bar replaces pooch's messages
        try:
            downloader = pooch.HTTPDownloader(progressbar=bar or False, chunk_size=1 << 16, timeout=30)
            return Path(pooch.retrieve(url + name, f"sha256:{sha256}", fname=name, path=folder, downloader=downloader))
        except (OSError, ValueError) as error:  # network errors are OSErrors, a wrong hash is a ValueError
            failures.append(f"{urlsplit(url).hostname}: {_download_error(error, folder)}")
        finally:
            log.setLevel(level)
            if bar is not None:
                bar.close()
    raise DataError(
        f"{name} of {title} could not be downloaded ({'; '.join(failures)}); check the connection, or put the file in "
        f"{folder} or in the folder that {ENVIRONMENT} names."
    )


def _download_error(error: Exception, folder: Path) -> str:
    requests = import_extra("requests", "Downloading needs")
    if isinstance(error, requests.HTTPError):
        return f"HTTP status {error.response.status_code}"
    if isinstance(error, requests.Timeout):
        return "no answer"
    if isinstance(error, requests.RequestException):
        return "no connection"
    if isinstance(error, OSError):
        return f"{folder} cannot be written, {error.strerror or type(error).__name__}"
    return "the downloaded file has the wrong SHA-256"


class _ProgressBar:
    """Adapt rich's progress bar to the interface that pooch expects."""

    def __init__(self, name: str) -> None:
        console = import_extra("rich.console", "A progress bar needs").Console(stderr=True)
        rich = import_extra("rich.progress", "A progress bar needs")
        columns = (rich.TextColumn("{task.description}"), rich.BarColumn(), rich.DownloadColumn())
        self._progress: Any = rich.Progress(*columns, rich.TimeRemainingColumn(), console=console)
        self._task = self._progress.add_task(name, total=None)
        self._progress.start()
        self.close = self._progress.stop

    @property
    def total(self) -> float | None:
        return self._progress.tasks[0].total

    @total.setter
    def total(self, total: int) -> None:
        self._progress.update(self._task, total=total or None)

    def update(self, count: int) -> None:
        self._progress.advance(self._task, count)

    def reset(self) -> None:
        self._progress.update(self._task, completed=0)
