from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.lab.report.figure_lines import draw, holds
from tests.lab.report.synthetic_fits import FitSpec, write_fit
from torchace.lab.report import read_results
from torchace.lab.report.model_findings import (
    comparison_figures,
    comparison_headline,
    detail_tables,
    model_findings,
    model_table,
)
from torchace.lab.schema.values import ModelComparison

CLASSES = [
    {"name": "no", "train": 960, "rows": 240, "recall": 1.0, "precision": 0.96},
    {"name": "yes", "train": 40, "rows": 10, "recall": 0.0, "precision": None},
]


def _comparison(difference: float, low: float, high: float, **changes: Any) -> ModelComparison:
    loss = changes.get("loss", "cross_entropy")
    if loss == "mse":
        scores = {"mse": 4.0, "rmse": 2.0, "r2": 0.8}, {"mse": 5.0, "rmse": 5**0.5, "r2": 0.75}
    else:
        scores = {"accuracy": 0.96, "cross_entropy": 0.2}, {"accuracy": 0.96, "cross_entropy": 0.2 + difference}
    models = [
        {"name": "constant", "label": "most frequent class", "scores": {"accuracy": 0.96, loss: 9.0}},
        {
            "name": "linear",
            "label": "logistic regression",
            "scores": scores[1],
            "difference": difference,
            "low": low,
            "high": high,
        },
        {"name": "boosting", "label": "gradient boosting", "failure": "too few rows"},
        {"name": "ensemble", "label": "ensemble of 10", "scores": scores[0]},
    ]
    content = {"split": "test", "rows": 250, "loss": "cross_entropy", "models": models, **changes}
    return ModelComparison.model_validate(content)


@pytest.mark.parametrize(
    ("numbers", "start", "words"),
    [
        ((0.1, 0.05, 0.15), "The ensemble beats", "−33.3 % (95 % interval −50.0 to −16.7 %)"),
        ((-0.1, -0.15, -0.05), "A baseline is better: logistic", "+100.0 % (95 % interval +50.0 to +150.0 %)"),
        ((0.01, -0.05, 0.07), "The ensemble and the best baseline", "−4.8 % (95 % interval −33.3 to +23.8 %)"),
        ((-0.01, -0.07, 0.05), "The ensemble and the best baseline", "+5.3 % (95 % interval −26.3 to +36.8 %)"),
    ],
)
def test_the_headline_starts_with_the_winner(numbers: tuple[float, float, float], start: str, words: str) -> None:
    found = comparison_headline(_comparison(*numbers))
    assert found is not None
    assert found.sentence.startswith(start)
    assert found.sentence.endswith(f": {words}.")
    assert found.detail == (
        "Cross entropy of the ensemble against that of logistic regression on 250 test rows; lower is better. "
        "Accuracy is 96.0 % for both."
    )


def test_the_differences_to_baselines_are_drawn() -> None:
    [spec] = comparison_figures(_comparison(0.1, 0.05, 0.15))
    figure = draw(spec)
    assert holds(figure, [-0.15, -0.05], [0, 0])
    assert holds(figure, -0.1, 0)


def test_an_accuracy_that_the_most_frequent_class_has_too(tmp_path: Path) -> None:
    comparison = _comparison(0.1, 0.05, 0.15, classes=CLASSES).model_dump(mode="json")
    spec = FitSpec(task="classification", arrays=False, overrides={"comparison": comparison})
    results = read_results(write_fit(tmp_path / "fit", spec))
    constant, missed = model_findings(results, results.arms[0])
    assert constant.text == (
        "Always predicting the most frequent class is correct for 96.0 % of the rows, the ensemble for 96.0 %."
    )
    assert missed.text.startswith("No row of yes is classified correctly.")


def test_tables() -> None:
    importances = [{"name": "age", "mean": 0.5, "std": 0.1}]
    targets = [{"name": "y", "scores": {"r2": 0.9}, "residuals": {"0.25": -1.0, "0.75": 1.5}}]
    tables = {"confusion": [[240, 0], [10, 0]], "importances": importances, "targets": targets}
    comparison = _comparison(0.1, 0.05, 0.15, classes=CLASSES, **tables)
    found = [model_table(comparison), *detail_tables(comparison)]
    assert [table.caption for table in found] == [
        "The ensemble and its baselines on 250 test rows",
        "Classes",
        "Confusion matrix",
        "Residuals of the ensemble",
        "Importance of the columns",
    ]
    models, classes, confusion, residuals, columns = (
        [[cell.text for cell in row] for row in table.sections[0].rows] for table in found
    )
    assert models[1] == ["Logistic regression", "96.0 %", "0.3000", "−0.1", "−0.15 to −0.05"]
    assert models[2][1:] == ["–"] * 4
    assert "Not trained: gradient boosting (too few rows)." in found[0].note
    assert classes[1] == ["yes", "40", "10", "0.0 %", "–"]
    assert confusion == [["no", "240", "0"], ["yes", "10", "0"]]
    assert residuals == [["y", "−1 to 1.5", "–"]]  # its scores are in the table of models
    assert columns == [["age", "0.5 ± 0.1"]]


def test_no_headline_without_baselines() -> None:
    content = {"split": "test", "rows": 1, "loss": "mse", "models": [{"name": "ensemble", "label": "ensemble of 2"}]}
    assert comparison_headline(ModelComparison.model_validate(content)) is None
