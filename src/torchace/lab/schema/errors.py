"""Pydantic errors as one sentence."""

from __future__ import annotations

import difflib
from collections.abc import Callable, Iterable, Sequence
from typing import Any

from pydantic import BaseModel, ValidationError

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
    # unknown keys first: a misspelt key may also be reported as missing
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
    """Start a sentence with a capital; the symbol λ stays small."""
    return message if message.startswith("λ") else message[:1].upper() + message[1:]


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
