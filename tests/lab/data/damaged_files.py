"""Damaged files, and a check of the error messages that follow."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from torchace.lab.data import DataError, load


def load_error(name: str, folder: Path, file: str) -> str:
    """The sentence with which a data set is refused, after checking that it is one."""
    with pytest.raises(DataError) as error:
        load(name, directory=folder, download=False)
    sentence = str(error.value)
    assert "\n" not in sentence
    assert file in sentence
    assert str(folder) in sentence
    assert sentence.endswith(".")
    assert error.value.__suppress_context__ or error.value.__context__ is None  # no chain of causes behind it
    return sentence


def flip_bit(data: bytes, place: int) -> bytes:
    altered = bytearray(data)
    altered[place] ^= 0xFF
    return bytes(altered)


def mutations(data: bytes, count: int, seed: int) -> list[bytes]:
    """Cut, overwrite, insert or remove a few bytes at random."""
    rng = np.random.default_rng(seed)
    out = []
    for _ in range(count):
        altered = bytearray(data)
        # near the front as often as anywhere: that is where the structure is
        for _ in range(rng.integers(1, 4)):
            place = int(rng.integers(0, min(len(altered), 64) if rng.random() < 0.5 else len(altered)))
            match rng.integers(4):
                case 0:
                    altered[place] = rng.integers(256)
                case 1:
                    altered[place:place] = rng.bytes(rng.integers(1, 5))
                case 2:
                    del altered[place : place + int(rng.integers(1, 5))]
                case _:
                    del altered[place + 1 :]
        out.append(bytes(altered))
    return out
