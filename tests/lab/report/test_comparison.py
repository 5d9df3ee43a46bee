from __future__ import annotations

from typing import Any

import pytest

from torchace.lab.report.comparison import comparison_findings, comparison_headline, comparison_tables
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
        ((0.1, 0.05, 0.15), "The ensemble beats", "lower by 0.1000 (95 % interval 0.0500 to 0.1500) on 250 test rows."),
        ((-0.1, -0.15, -0.05), "A baseline is better: logistic", "lower by 0.1000 (95 % interval 0.0500 to 0.1500)"),
        ((0.01, -0.05, 0.07), "The ensemble is not better", "lower by 0.0100 (95 % interval −0.0500 to 0.0700)"),
        ((-0.01, -0.07, 0.05), "The ensemble is not better", "higher by 0.0100 (95 % interval −0.0500 to 0.0700)"),
    ],
)
def test_the_headline_starts_with_the_winner(numbers: tuple[float, float, float], start: str, words: str) -> None:
    sentence = comparison_headline(_comparison(*numbers))
    assert sentence.startswith(start)
    assert words in sentence
    assert sentence.endswith("Accuracy is 96.0 % for the ensemble, 96.0 % for logistic regression.")


def test_squared_errors_are_compared_in_percent() -> None:
    sentence = comparison_headline(_comparison(1.0, 0.5, 1.5, loss="mse"))
    assert "mean squared error is lower by 20.0 % (95 % interval 10.0 to 30.0 %)" in sentence
    lost = comparison_headline(_comparison(-1.0, -1.5, -0.5, loss="mse"))
    assert lost.startswith("A baseline is better")
    assert "lower by 25.0 % (95 % interval 12.5 to 37.5 %)" in lost


def test_an_accuracy_that_the_most_frequent_class_has_too() -> None:
    constant, missed = comparison_findings(_comparison(0.1, 0.05, 0.15, classes=CLASSES))
    assert constant.text == "Always predicting “no” is correct for 96.0 % of the rows, the ensemble for 96.0 %."
    assert constant.warning
    assert missed.text.startswith("No row of yes is classified correctly.")


def test_tables() -> None:
    importances = [{"name": "age", "mean": 0.5, "std": 0.1}]
    found = comparison_tables(
        _comparison(0.1, 0.05, 0.15, classes=CLASSES, confusion=[[240, 0], [10, 0]], importances=importances)
    )
    assert [table.caption for table in found] == [
        "The ensemble and its baselines on 250 test rows",
        "Classes",
        "Confusion matrix",
        "Importance of the columns",
    ]
    models, classes, confusion, columns = (
        [[cell.text for cell in row] for row in table.sections[0].rows] for table in found
    )
    assert models[1] == ["Logistic regression", "96.0 %", "0.3000", "+0.1", "+0.05 to +0.15"]
    assert models[2][1:] == ["–"] * 4
    assert "Not trained: gradient boosting (too few rows)." in found[0].note
    assert classes[1] == ["yes", "40", "10", "0.0 %", "–"]
    assert confusion == [["no", "240", "0"], ["yes", "10", "0"]]
    assert columns == [["age", "0.5 ± 0.1"]]


def test_no_headline_without_baselines() -> None:
    content = {"split": "test", "rows": 1, "loss": "mse", "models": [{"name": "ensemble", "label": "ensemble of 2"}]}
    assert comparison_headline(ModelComparison.model_validate(content)) == ""
