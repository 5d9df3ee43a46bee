"""Calls of the command line for tests, and small tables."""

from __future__ import annotations

import hashlib
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pandas as pd
import pytest

from torchace.lab.cli import app as cli

# The least that can be called a fit.
TINY = ("--diversity", "0.5", "--num-members", "2", "--hidden", "4", "--epochs", "1", "--no-baselines")
NOISE = ("Traceback", "site-packages", "PosixPath", "<class", "Errno", "argument of type", "object has no", "NoneType")
PYDANTIC = ("pydantic", "Section", "Input should", "validation error", "For further information")


class Outcome(NamedTuple):
    code: int
    out: str
    err: str


class Invoke:
    """Calls `torchace.lab.cli.app.main` in this process."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
        self.monkeypatch, self.capsys = monkeypatch, capsys

    def __call__(self, *arguments: object) -> Outcome:
        self.monkeypatch.setattr(sys, "argv", ["torchace", *map(str, arguments)])
        with pytest.raises(SystemExit) as caught:
            cli.main()
        captured = self.capsys.readouterr()
        code = caught.value.code
        assert code is None or isinstance(code, int)
        return Outcome(code or 0, captured.out, captured.err)


def fake_report(directory: Path, out: Path | None = None) -> Path:
    """A page in no time, where a test is about something else."""
    page = Path(directory) / "report" / "index.html"
    page.parent.mkdir(exist_ok=True)
    page.write_text("<!doctype html>")
    return page


def assert_one_sentence(outcome: Outcome, *words: str) -> None:
    """One line on standard error, exit code 1 or 2, no traceback, every word in it."""
    assert outcome.code in (1, 2), outcome
    assert outcome.err.startswith("Error: "), outcome
    assert outcome.err.count("\n") == 1, outcome
    assert outcome.code == 2 or outcome.err.endswith((".\n", "?\n")), outcome  # sentences about usage are typer's own
    assert len(outcome.err) < 700, outcome
    for noise in (*NOISE, *PYDANTIC) if outcome.code == 1 else NOISE:
        assert noise not in outcome.err, outcome
    for word in words:
        assert word in outcome.err, (word, outcome.err)


def folder_contents(folder: Path) -> dict[str, str]:
    """Every file, folder and link, with what it holds."""
    found = {}
    for path in sorted(folder.rglob("*")):
        content = hashlib.sha256(path.read_bytes()).hexdigest() if path.is_file() else str(path.lstat().st_mode)
        found[str(path.relative_to(folder))] = content
    return found


# -- tables -----------------------------------------------------------------------------------------------------------


def pets(rows: int = 60, seed: int = 0, **replaced: Any) -> pd.DataFrame:
    """Numbers of two sizes with gaps, categories with gaps, a truth value, a target of three classes."""
    draw = np.random.default_rng(seed)
    age, fur = draw.normal(8, 3, rows).round(2), draw.choice(["long", "short", "none at all"], rows)
    born = 1e9 + draw.integers(0, 1000, rows)
    chipped = draw.random(rows) < 0.5
    heat = age + 4 * (fur == "long") + 3 * chipped + draw.normal(0, 1, rows)
    columns: dict[str, Any] = {
        "age": np.where(draw.random(rows) < 0.1, np.nan, age),
        "born": born,
        "fur": pd.Series(fur).where(draw.random(rows) > 0.1, None),
        "chipped": chipped,
        "pet": np.array(["cat", "dog", "cow"])[np.digitize(heat, [9, 13])],
    }
    return pd.DataFrame({**columns, **replaced})


def houses(rows: int = 60, seed: int = 0, **replaced: Any) -> pd.DataFrame:
    """A regression: prices of about 3e5 with a deviation of about 1e5."""
    draw = np.random.default_rng(seed)
    area, town = draw.normal(100, 30, rows).round(1), draw.choice(["Ulm", "Köln"], rows)
    price = 3000 * area + 1e5 * (town == "Köln") + draw.normal(0, 1e4, rows)
    return pd.DataFrame({"area": area, "town": town, "price": price.round(2), **replaced})


def write_table(frame: pd.DataFrame, path: Path) -> Path:
    """A table as CSV, Parquet or NPZ, by the file's name."""
    if path.suffix == ".parquet":
        frame.to_parquet(path, index=False)
    elif path.suffix == ".npz":
        np.savez(path, **{name: _array(frame[name]) for name in frame})
    else:
        frame.to_csv(path, index=False)
    return path


def _array(column: pd.Series) -> np.ndarray:
    return column.to_numpy() if column.dtype.kind in "biuf" else column.fillna("").to_numpy(dtype=str)


def options(given: Mapping[str, object]) -> list[str]:
    """`{"num_members": 2}` as `--num-members 2`."""
    return [part for name, value in given.items() for part in (f"--{name.replace('_', '-')}", str(value))]
