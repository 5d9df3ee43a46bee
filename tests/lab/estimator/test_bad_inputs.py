"""Unusual tables: each is accepted, or refused with an error that names the problem."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pandas as pd
import pytest
from torch import nn

from torchace.sklearn import ACEClassifier, NCLRegressor

ROWS = 60
DRAW = np.random.default_rng(0)
FRAME = pd.DataFrame({"age": DRAW.normal(size=ROWS), "town": DRAW.choice(["Ulm", "Köln"], ROWS)})
LABELS = np.array(["cat", "dog"])[np.arange(ROWS) % 2]


def _fit(frame: Any = FRAME, y: Any = LABELS, **options: Any) -> ACEClassifier:
    tiny = {"num_members": 2, "hidden": (4,), "epochs": 1, "random_state": 0}
    return ACEClassifier(**{**tiny, **options}).fit(frame, y)


@pytest.mark.parametrize(
    ("column", "reason"),
    [
        (1, "in every row"),
        (np.nan, "empty"),
        (FRAME["town"], "those of 'town'"),
        (range(100, 160), None),
        (
            [f"2024-01-{row % 28 + 1:02}" if row % 2 else f"soon {row}" for row in range(ROWS)],
            "50 % of its values are dates",
        ),
        ([f"K{row}" for row in range(ROWS)], "identifier"),
    ],
    ids=["constant", "all missing", "duplicate", "numbers", "half dates", "identifier"],
)
def test_uninformative_columns_are_left_out(column: Any, reason: str | None) -> None:
    frame = FRAME.assign(other=column)
    dropped = dict(_fit(frame)._encoding.schema.dropped)
    assert (reason is None) == (not dropped)
    assert reason is None or reason in dropped["other"]


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: _fit(FRAME.assign(age=np.inf)), r"'age'.*row 1.*infinite"),
        (lambda: _fit(np.full((ROWS, 2), np.inf)), "infinity"),
        (lambda: _fit(pd.concat([FRAME, FRAME], axis=1)), "two columns named 'age'"),
        (lambda: _fit(y=np.full(ROWS, "cat")), "at least two classes"),
        (lambda: _fit(y=pd.Series(LABELS).where(np.arange(ROWS) > 3, None)), "NaN"),
        (lambda: _fit(FRAME[:4], LABELS[:4], early_stopping="folds"), "at least 5 samples"),
        (lambda: _fit(pd.DataFrame({"town": ["Ulm"] * ROWS})), "No column is left"),
        (lambda: _fit().predict(FRAME[["age"]]), "these are absent: 'town'"),
        (lambda: _fit().predict(FRAME[["town", "age"]]), "order of the training"),
        (lambda: _fit(FRAME["age"]), "2-dimensional container but got .*Series"),
        (lambda: _fit(FRAME[[]]), "at least one column"),
        (lambda: _fit(y=pd.Series([1, *LABELS[1:]])), "strings or numbers as labels, but got int and str"),
        (lambda: _fit(y=None), "requires y to be passed"),
        (lambda: _fit(class_weight={"cat": -1, "dog": 1}), "`class_weight` with finite weights of at least 0"),
        (lambda: _fit(class_weight={"cat": np.inf, "dog": 1}), "`class_weight` with finite weights of at least 0"),
        (lambda: _fit(callbacks=print), "`callbacks` to be a list of functions, but got <built-in function print>"),
        (lambda: _fit(y=[None, *LABELS[1:]]), "`y` has None"),
        (lambda: _fit(y=pd.Series([None, *LABELS[1:]], dtype="string")), "`y` contains NaN"),
        (lambda: NCLRegressor().fit(FRAME, pd.date_range("2020", periods=ROWS)), r"numbers in `y`, but got datetime64"),
        (lambda: _fit(y=np.tile([[1, -1], [-1, 1]], (ROWS // 2, 1))), r"of 0 and 1, but got \[-1  1\]"),
        (lambda: _fit(network=lambda inputs, outputs: nn.Linear(inputs, outputs + 1)), r"\(N, 2\), but got \(2, 3\)"),
    ],
)
def test_unusable_inputs_are_named(call: Callable[[], Any], message: str) -> None:
    with pytest.raises((ValueError, TypeError), match=message):
        call()


@pytest.mark.parametrize(
    ("network", "got"),
    [(lambda inputs, outputs: None, "it returned NoneType"), (nn.Linear(2, 2), "got Linear"), ("mlp", "got str")],
)
def test_a_network_is_a_function_that_returns_a_module(network: Any, got: str) -> None:
    with pytest.raises(TypeError, match=f"that returns a module, but {got}"):
        _fit(network=network)
