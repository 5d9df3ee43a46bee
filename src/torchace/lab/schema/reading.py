"""Read result files, with bounds on their size."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any, TypeVar

from pydantic import ValidationError

from torchace._files import CHECKSUM, JSON_BYTES, is_unchanged, parse_json, read_bounded
from torchace.lab.schema.errors import describe_error
from torchace.lab.schema.results import FORMAT, ResultFile

File = TypeVar("File", bound=ResultFile)

# control characters, bidirectional marks, surrogates
_HIDDEN = "\x7f-\x9f\u202a-\u202e\u2066-\u2069\ud800-\udfff"
_UNPRINTABLE = re.compile(f"[\x00-\x1f{_HIDDEN}]")
_ESCAPED_OR_HIDDEN = re.compile(rf"[\\{_HIDDEN}]")


class ResultFileError(ValueError):
    """A result file is missing, damaged or of another version."""


def printable(value: Any) -> Any:
    r"""Replace unprintable characters in all strings of parsed JSON by spaces.

    Example:
        >>> printable({"a\n": ["\ud800", 3, None]})
        {'a ': [' ', 3, None]}
    """
    if isinstance(value, str):
        return _UNPRINTABLE.sub(" ", value)
    if isinstance(value, list):
        return [printable(item) for item in value]
    if isinstance(value, dict):
        return {printable(key): printable(item) for key, item in value.items()}
    return value


def read_result(path: Path, model: type[File], name: str = "") -> File:
    """Read and validate a result file; `name` is its name in errors, by default `path.name`."""
    name = name or path.name
    try:
        data = read_bounded(path, JSON_BYTES)
        parsed = parse_json(data)
        text = data.decode()
    except FileNotFoundError:
        folder = str(path).removesuffix(name) or "."
        raise ResultFileError(
            f"Found no {name} in {folder}. Give a directory of `torchace run` or `torchace fit`."
        ) from None
    except OSError as error:
        raise ResultFileError(f"Could not read {name}: {error.strerror}.") from None
    except ValueError:
        raise ResultFileError(f"Expected JSON in {name}, but the file is damaged or has another format.") from None
    if not isinstance(parsed, dict):
        raise ResultFileError(f"Expected an object in {name}, but got {printable(repr(parsed)[:40])}.")
    if CHECKSUM in parsed and not is_unchanged(parsed):  # earlier versions wrote none
        raise ResultFileError(f"{name} was changed after it was written: its SHA-256 differs.")
    if (version := parsed.get("format")) != FORMAT:
        got = printable(repr(version)[:40])
        raise ResultFileError(f"Expected format {FORMAT} in {name}, but got {got}. Use the torchace that wrote it.")
    try:
        return model.model_validate(printable(parsed) if _ESCAPED_OR_HIDDEN.search(text) else parsed)
    except ValidationError as error:
        raise ResultFileError(f"{name} is damaged: {describe_error(error, model)}") from None
