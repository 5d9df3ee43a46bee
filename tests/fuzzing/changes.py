"""Random changes to bytes, to JSON and to what a file is; each a function of the random numbers that it is given."""

from __future__ import annotations

import copy
import os
import random
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any


def mutate_bytes(data: bytes, rng: random.Random) -> bytes:
    """Flip, overwrite, cut, insert, exchange or repeat a few bytes."""
    if not data:
        return rng.randbytes(3)
    changed = bytearray(data)
    i, j = rng.randrange(len(data)), rng.randrange(len(data))
    n = rng.randint(1, 9)
    match rng.randrange(8):
        case 0:
            changed[i] ^= 1 << rng.randrange(8)
        case 1:
            changed[i] = rng.randrange(256)
        case 2:
            del changed[i:]
        case 3:
            del changed[i : i + n]
        case 4:
            changed[i:i] = rng.randbytes(n)
        case 5:
            changed[i], changed[j] = changed[j], changed[i]
        case 6:
            changed[i : i + n], changed[j : j + n] = changed[j : j + n], changed[i : i + n]
        case _:
            changed[i:i] = changed[j : j + n]
    return bytes(changed)


def splice(data: bytes, other: bytes, rng: random.Random) -> bytes:
    """The front of one file and the end of another."""
    return data[: rng.randrange(len(data) + 1)] + other[rng.randrange(len(other) + 1) :]


NUMBERS = (b"0", b"-1", b"1e999", b"1e308", b"99999999999", b"9" * 5000, b"0.5", b"NaN", b"inf", b'"7"', b"true")


def mutate_number(data: bytes, rng: random.Random) -> bytes:
    """One of the numbers in a text replaced by another, huge ones among them."""
    places = list(re.finditer(rb"\d+(\.\d+)?", data))
    if not places:
        return mutate_bytes(data, rng)
    place = rng.choice(places)
    return data[: place.start()] + rng.choice(NUMBERS) + data[place.end() :]


def nest(data: bytes, rng: random.Random) -> bytes:
    """Lists in lists, dictionaries in dictionaries, keys of many parts, put somewhere into a text."""
    deep = rng.choice([90, 300, 990, 5000, 100_000])
    nested = (
        b"[" * deep + b"]" * deep,
        b'{"a":' * deep + b"1" + b"}" * deep,
        b"\na" + b".a" * deep + b" = 1\n",
        b"(" * deep,
    )
    place = rng.choice([match.start() for match in re.finditer(rb"[\d\"\n]", data)] or [0])
    return data[:place] + rng.choice(nested) + data[place + rng.randrange(2) :]


VALUES: list[Any] = [None, True, False, 0, 1, -1, 2, 10**9, 10**30, 2**63, 0.5, -0.0, 1e308, "", "x", "mlp", "fc", "7"]
VALUES += ["float64", "\ud800", "<b>", "\x1b[31m", [], [1], [[]], {}, {"name": 1}, ["a"] * 100]


def mutate_json(content: Any, rng: random.Random) -> Any:
    """One change somewhere: another value, a key less or more, an element less or twice, two elements exchanged."""
    content = copy.deepcopy(content)
    places = [content]
    while True:
        inner = [
            v
            for v in (places[-1].values() if isinstance(places[-1], dict) else places[-1])
            if isinstance(v, dict | list)
        ]
        inner = [v for v in inner if v]
        if not inner or rng.random() < 0.3:
            break
        places.append(rng.choice(inner))
    place = places[-1]
    keys = list(place) if isinstance(place, dict) else list(range(len(place)))
    key, other = rng.choice(keys), rng.choice(keys)
    match rng.randrange(6):
        case 0 | 1:
            place[key] = rng.choice(VALUES)
        case 2:
            del place[key]
        case 3:
            place[key], place[other] = place[other], place[key]
        case 4:
            deep: Any = 1
            for _ in range(rng.choice([5, 90, 200])):
                deep = [deep]
            place[key] = deep
        case _:
            if isinstance(place, dict):
                place[f"{key}x"] = place[key]
            else:
                place.append(place[key])
    return content


def _sparse(path: Path) -> None:
    os.truncate(path, 1 << 33)  # eight gigabytes, of which the disk holds nothing


def _replace(make: Callable[[Path], object]) -> Callable[[Path], None]:
    def change(path: Path) -> None:
        path.unlink()
        make(path)

    return change


KINDS_OF_FILE: dict[str, Callable[[Path], None]] = {
    "pipe": _replace(os.mkfifo),
    "folder": _replace(Path.mkdir),
    "link to a device": _replace(lambda path: path.symlink_to("/dev/zero")),
    "link to itself": _replace(lambda path: path.symlink_to(path)),
    "link to nowhere": _replace(lambda path: path.symlink_to(path.parent / "nowhere")),
    "empty": _replace(lambda path: path.write_bytes(b"")),
    "gone": Path.unlink,
    "8 GiB of nothing": _sparse,
}
