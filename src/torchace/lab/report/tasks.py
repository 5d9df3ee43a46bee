"""The two tasks: what their numbers are called, and which of them are shown where."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass

from torchace.lab.report.formats import METRICS, REGRESSION, Metric


@dataclass(frozen=True)
class Task:
    """What a report says of one task; all fields but `name`, `metrics` and the texts are keys of `metrics`.

    `loss` is what λ is judged by, `score` a second score beside it, `spread` how far the members differ, `alone` the
    loss of one member. `required` must be there wherever a run was scored.
    """

    name: str
    metrics: Mapping[str, Metric]
    required: tuple[str, ...]
    loss: str
    score: str
    spread: str
    alone: str
    ensemble: tuple[str, ...]
    member: tuple[str, ...]
    details: Mapping[str, tuple[str, ...]]
    details_title: str
    details_note: str
    spread_note: str
    differences: tuple[str, ...]
    curves: tuple[str, ...]
    diversity: tuple[str, ...]
    error: str
    readings: Mapping[str, str]
    uncertainty: str

    def member_error(self, value: float) -> float:
        """One entry of a run's `members`, as a value of `error`."""
        return math.sqrt(value) if self.error == "rmse" else 1 - value


CLASSIFICATION = Task(
    name="classification",
    metrics=METRICS,
    required=("accuracy", "cross_entropy"),
    loss="cross_entropy",
    score="error",
    spread="disagreement",
    alone="member_cross_entropy",
    ensemble=("accuracy", "cross_entropy"),
    member=("member_accuracy", "member_cross_entropy"),
    details={
        "Ensemble": ("brier", "calibration_error"),
        "One member": ("member_brier", "member_calibration_error"),
        "Diversity": ("disagreement", "mutual_information", "ambiguity"),
    },
    details_title="Calibration and diversity",
    details_note="Mutual information: the entropy of the ensemble's prediction less its members' mean entropy, in "
    "nats. Ambiguity: how far the ensemble's cross entropy lies below its members' mean.",
    spread_note="Disagreement: the share of test cases on which two members differ.",
    differences=("error", "cross_entropy", "disagreement"),
    curves=("error", "cross_entropy"),
    diversity=("disagreement", "mutual_information", "ambiguity"),
    error="error",
    readings={
        "error": "Lower is better.",
        "cross_entropy": "Lower is better.",
        "disagreement": "The share of test cases on which two members predict different classes.",
        "mutual_information": "How much of the ensemble's uncertainty is its members' difference, in nats.",
        "ambiguity": "How far the ensemble's cross entropy lies below its members' mean.",
    },
    uncertainty="Diversity and calibration",
)

REGRESSION_TASK = Task(
    name="regression",
    metrics=REGRESSION,
    required=("mse",),
    loss="mse",
    score="mae",
    spread="spread",
    alone="member_mse",
    ensemble=("r2", "rmse", "mae"),
    member=("member_rmse",),
    details={
        "Ensemble": ("mse",),
        "One member": ("member_mse",),
        "Diversity": ("spread", "ambiguity", "averaged"),
    },
    details_title="Squared error and diversity",
    details_note="Ambiguity: how far the ensemble's squared error lies below its members' mean. Averaged away: the "
    "same as a share of the members' squared error.",
    spread_note="R²: the share of the target's variance that is explained. RMSE, MAE and spread are in the target's "
    "units. Spread: the standard deviation of the members' predictions, its mean over the test rows.",
    differences=("mse", "mae", "spread"),
    curves=("rmse", "mae"),
    diversity=("spread", "ambiguity", "averaged"),
    error="rmse",
    readings={
        "rmse": "In the target's units. Lower is better.",
        "mae": "In the target's units. Lower is better.",
        "spread": "The standard deviation of the members' predictions, its mean over the test rows.",
        "ambiguity": "How far the ensemble's squared error lies below its members' mean.",
        "averaged": "The share of the members' squared error that is gone once they are averaged.",
    },
    uncertainty="Diversity and uncertainty",
)

TASKS = {task.name: task for task in (CLASSIFICATION, REGRESSION_TASK)}


def with_derived(numbers: Mapping[str, float]) -> dict[str, float]:
    """A split's numbers, and those that follow from them: errors, roots, and what averaging removes.

    Example:
        >>> with_derived({"mse": 4.0, "member_mse": 5.0, "ambiguity": 1.0})
        {'mse': 4.0, 'member_mse': 5.0, 'ambiguity': 1.0, 'rmse': 2.0, 'member_rmse': 2.23606797749979, 'averaged': 0.2}
    """
    found = dict(numbers)
    for key in ("accuracy", "member_accuracy"):
        if key in numbers:
            found[key.replace("accuracy", "error")] = 1 - numbers[key]
    for key in ("mse", "member_mse"):
        if numbers.get(key, -1.0) >= 0:
            found[key.replace("mse", "rmse")] = math.sqrt(numbers[key])
    if numbers.get("member_mse", 0.0) > 0 and "ambiguity" in numbers:
        found["averaged"] = numbers["ambiguity"] / numbers["member_mse"]
    return found
