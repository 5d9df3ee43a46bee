"""Read result files, with bounds on their size; errors of pydantic as one sentence."""

from __future__ import annotations

import difflib
import json
import re
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any, TypeVar

from pydantic import BaseModel, ValidationError

from torchace._files import CHECKSUM, is_unchanged
from torchace.lab.schema.results import FORMAT, ResultFile

TAGS = ("one", "many")  # of a value that may be a list
PATTERNS = {r"^[a-z0-9_]+$": "lowercase letters, digits and underscores"}
# expected value by pydantic's error type
EXPECTED: dict[str, Callable[[dict[str, Any]], str]] = {
    "int_type": lambda c: "a whole number",
    "int_from_float": lambda c: "a whole number",
    "float_type": lambda c: "a number",
    "finite_number": lambda c: "a finite number",
    "bool_type": lambda c: "true or false",
    "string_type": lambda c: "text in quotes",
    "list_type": lambda c: "a list",
    "dict_type": lambda c: "a section",
    "model_type": lambda c: "a section",
    "greater_than": lambda c: f"more than {c['gt']:g}",
    "greater_than_equal": lambda c: f"at least {c['ge']:g}",
    "less_than": lambda c: f"less than {c['lt']:g}",
    "less_than_equal": lambda c: f"at most {c['le']:g}",
    "literal_error": lambda c: c["expected"],
    "too_short": lambda c: "a list with at least one value",
    "string_too_long": lambda c: f"at most {c['max_length']} characters",
    "string_pattern_mismatch": lambda c: PATTERNS.get(c["pattern"], "letters, digits, '_', '.' and '-'"),
}


def describe_error(
    error: ValidationError, model: type[BaseModel], place: Sequence[int | str] = (), name: Callable[[str], str] = str
) -> str:
    """Return the first error as one sentence.

    `place` is the location of the model in the file; `name` formats a key for the user.
    """
    errors = error.errors(include_url=False)
    # unknown keys first: a misspelled key may also be reported as missing
    first = next((one for one in errors if one["type"] == "extra_forbidden"), errors[0])
    where = ".".join(str(part) for part in (*place, *first["loc"]) if part not in TAGS)
    where = name(where) if where else ""
    kind, context = first["type"], first.get("ctx", {})
    if kind == "extra_forbidden":
        known = _keys(model, first["loc"][:-1])
        hint = did_you_mean(str(first["loc"][-1]), known) or f" Known keys: {', '.join(known)}."
        return f"there is no key {where!r}.{hint}"
    if kind == "value_error":  # raised by our validators: a complete sentence
        message = str(context["error"])
        return message if not where else f"{where}: {message}"
    if kind == "missing":
        return f"expected a value for {where}, but there is none."
    got = repr(first["input"])
    got = "a section" if isinstance(first["input"], dict) else got if len(got) <= 60 else f"{got[:57]}..."
    if kind in EXPECTED:
        return f"expected {where} to be {EXPECTED[kind](context)}, but got {got}."
    return f"{where}: {first['msg'][0].lower()}{first['msg'][1:]}, but got {got}."


def capitalize(message: str) -> str:
    """Start a sentence with a capital; the symbol λ and the name of a setting stay small."""
    starts_with_name = re.match(r"λ|[\w.]+(:| =) ", message)
    return message if starts_with_name else message[:1].upper() + message[1:]


def did_you_mean(wrong: str, known: Iterable[str]) -> str:
    """Return a question such as ` Did you mean 'epochs'?`, or an empty string."""
    close = difflib.get_close_matches(wrong, list(known), n=1)
    return f" Did you mean {close[0]!r}?" if close else ""


def _keys(model: type[BaseModel], location: Sequence[int | str]) -> list[str]:
    for part in location:
        if isinstance(part, int):
            continue  # index in a list
        annotation = model.model_fields[part].annotation
        kinds = [annotation, *getattr(annotation, "__args__", ())]  # a section, or a list of sections
        model = next(kind for kind in kinds if isinstance(kind, type) and issubclass(kind, BaseModel))
    return list(model.model_fields)


File = TypeVar("File", bound=ResultFile)

# control characters, bidirectional marks, surrogates
_HIDDEN = "\x7f-\x9f\u202a-\u202e\u2066-\u2069\ud800-\udfff"
_UNPRINTABLE = re.compile(f"[\x00-\x1f{_HIDDEN}]")
_ESCAPED_OR_HIDDEN = re.compile(rf"[\\{_HIDDEN}]")


class ResultFileError(ValueError):
    """A result file is missing, damaged or of another version."""


def printable(value: Any) -> Any:
    """Replace unprintable characters in all strings of parsed JSON by spaces."""
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
        data = path.read_bytes()
        parsed = json.loads(data)
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
