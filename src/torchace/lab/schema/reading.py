"""Read result files, with bounds on their size; errors of pydantic as one sentence."""

from __future__ import annotations

import difflib
import re
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any, TypeVar

from pydantic import BaseModel, ValidationError

from torchace._files import CHECKSUM, is_unchanged, read_json
from torchace.lab.schema.results import FORMAT, ResultFile

TAGS = ("one", "many")  # of a value that may be a list
DATASETS, GIVEN = ("digits", "mnist", "fashion_mnist", "cifar10"), "given"  # given: as objects, in Python
DATA_NAME = f"^({'|'.join(DATASETS)}|{GIVEN})$"
OBJECT_NAME, OPTIMIZER_NAME = r"^.+:.+$", r"^(sgd|adam|adamw|.+:.+)$"
PATTERNS = {
    r"^[a-z0-9_]+$": "lowercase letters, digits and underscores",
    DATA_NAME: "'digits', 'mnist', 'fashion_mnist' or 'cifar10'",
    OBJECT_NAME: "the name of an object, such as 'package.module:function'",
    OPTIMIZER_NAME: "'sgd', 'adam', 'adamw' or a class such as 'torch.optim:RMSprop'",
}
# expected value by pydantic's error type
EXPECTED = {
    "int_type": "a whole number",
    "int_from_float": "a whole number",
    "float_type": "a number",
    "finite_number": "a finite number",
    "bool_type": "true or false",
    "string_type": "text in quotes",
    "list_type": "a list",
    "tuple_type": "a list",
    "dict_type": "a section",
    "model_type": "a section",
    "dataclass_type": "a section",
    "greater_than": "more than {gt:g}",
    "greater_than_equal": "at least {ge:g}",
    "less_than": "less than {lt:.10g}",
    "less_than_equal": "at most {le:g}",
    "literal_error": "{expected}",
    "too_short": "a list with at least one value",
    "string_too_long": "at most {max_length} characters",
    "string_pattern_mismatch": "letters, digits, '_', '.' and '-'",
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
        key = str(first["loc"][-1])
        hint = did_you_mean(key, known).replace(" '", f" '{where.removesuffix(key)}")
        hint = hint or f" Known keys: {', '.join(known)}."
        return f"there is no key {where!r}.{hint}"
    if kind == "value_error":  # raised by our validators: a complete sentence
        message = str(context["error"])
        return message if not where else f"{where}: {message}"
    if kind == "missing":
        return f"expected a value for {where}, but there is none."
    got = repr(first["input"])
    got = "a section" if isinstance(first["input"], dict) else got if len(got) <= 60 else f"{got[:57]}..."
    if expected := PATTERNS.get(context.get("pattern", "")) or EXPECTED.get(kind):
        return f"expected {where} to be {expected.format(**context)}, but got {got}."
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
_UNPRINTABLE = re.compile("[\x00-\x1f\x7f-\x9f\u202a-\u202e\u2066-\u2069\ud800-\udfff]")


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
        content = read_json(path)
    except FileNotFoundError:
        folder = str(path).removesuffix(name) or "."
        raise ResultFileError(
            f"Found no {name} in {folder}. Give a directory of `torchace run` or `torchace fit`."
        ) from None
    except OSError as error:
        raise ResultFileError(f"Could not read {name}: {error.strerror}.") from None
    except ValueError:
        raise ResultFileError(f"Expected JSON in {name}, but the file is damaged or has another format.") from None
    if not isinstance(content, dict):
        raise ResultFileError(f"Expected an object in {name}, but got {repr(content)[:40]}.")
    if CHECKSUM in content and not is_unchanged(content):  # earlier versions wrote none
        raise ResultFileError(f"{name} was changed after it was written: its SHA-256 differs.")
    if (version := content.get("format")) != FORMAT:
        got = repr(version)[:40]
        raise ResultFileError(f"Expected format {FORMAT} in {name}, but got {got}. Use the torchace that wrote it.")
    try:
        return model.model_validate(printable(content))
    except ValidationError as error:
        raise ResultFileError(f"{name} is damaged: {describe_error(error, model)}") from None
