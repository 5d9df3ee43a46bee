"""Tables for tests, and a check of error messages about invalid ones."""

from __future__ import annotations

import csv
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import torch

from torchace.lab.data import DataError
from torchace.lab.data.encoding import Encoding, learn_encoding
from torchace.lab.data.inference import infer_schema
from torchace.lab.data.tables import iterate_table


def one_sentence(error: BaseException, *words: str) -> str:
    """The sentence of an error, after checking that it is one, that it has these words, and says what to do."""
    assert isinstance(error, DataError), repr(error)
    sentence = str(error)
    assert "\n" not in sentence, sentence
    assert "\r" not in sentence, sentence
    assert sentence.endswith("."), sentence
    assert len(sentence) < 600, sentence
    assert not re.search(r"[.!?] [A-Z]", sentence), sentence  # not two of them
    assert "; " in sentence, sentence  # what is wrong; what to do
    assert error.__suppress_context__ or error.__context__ is None  # no chain of causes behind it
    for word in words:
        assert word in sentence, (word, sentence)
    return sentence


def write_csv(path: Path, columns: Mapping[str, Sequence[object]], delimiter: str = ",") -> Path:
    with open(path, "w", newline="", encoding="utf-8") as file:
        writer = csv.writer(file, delimiter=delimiter)
        writer.writerow(columns)
        writer.writerows(zip(*columns.values(), strict=True))
    return path


def pets(rows: int = 30, **replaced: Any) -> pd.DataFrame:
    """A small table with a number, a category and a target of two classes; columns may be replaced or added."""
    places = np.arange(rows)
    columns: dict[str, Any] = {
        "age": places * 1.5 % 7,
        "fur": np.array(["long", "short", "none at all"])[places % 3],
        "pet": np.array(["cat", "dog"])[places // 2 % 2],
    }
    return pd.DataFrame({**columns, **replaced})


def learn(frame: pd.DataFrame, target: str = "pet", **options: Any) -> Encoding:
    return learn_encoding(infer_schema(frame, target, **options), frame)


def matrix_of_chunks(encoding: Encoding, path: Path, rows: int) -> torch.Tensor:
    return torch.cat([encoding.matrix(chunk) for chunk in iterate_table(path, rows=rows)])


def same(left: torch.Tensor, right: torch.Tensor) -> bool:
    """Equal bit for bit, NaN too."""
    return left.dtype == right.dtype and torch.equal(left.view(torch.int64), right.view(torch.int64))
