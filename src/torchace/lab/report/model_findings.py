"""What the model that a fit kept is worth, in sentences."""

from __future__ import annotations

import math

import numpy as np

from torchace.lab.report import formats
from torchace.lab.report.arrays import Predicted, honesty, predicted_rows
from torchace.lab.report.phrases import Finding, at
from torchace.lab.report.results import Arm, Results, Run

NORMAL = 1.959964  # 95 % of a normal distribution lie within so many standard deviations


def kept_run(results: Results) -> Run | None:
    """The run of the kept model, None where there is none or it did not finish."""
    return next((run for run in results.runs if results.model and run.arm == results.model.name and run.finished), None)


def model_headline(results: Results, arm: Arm) -> str:
    """The kept model in one sentence: how well it predicts what it never saw.

    Args:
        results: A run directory.
        arm: The arm of the model.

    Returns:
        The sentence, empty where the model was not scored on test data.
    """
    run = kept_run(results)
    test = run.metrics["test"] if run else {}
    rows = formats.count(results.data.test, "row")
    built = f"{formats.count(arm.num_members, 'member')}, {at(run.diversity)}" if run else ""
    if "accuracy" in test:
        return f"Right on {_percent(test['accuracy'])} of {rows} it never saw ({built})."
    if "r2" in test:
        if test["r2"] <= 0:
            r2 = results.metrics["r2"].value(test["r2"])
            return f"No better on {rows} it never saw than the mean of the target (R² {r2}; {built})."
        return f"Explains {_percent(test['r2'])} of the target's variance in {rows} it never saw ({built})."
    return ""


def about_model(results: Results, arm: Arm) -> list[Finding]:
    """What there is to say of the kept model.

    Args:
        results: A run directory.
        arm: The arm of the model.

    Returns:
        Its scores with what chance in the test rows leaves open, its members, and how far to trust its uncertainty.
    """
    run = kept_run(results)
    if run is None:
        return [Finding("No model", "The training of the model did not finish.", warning=True)]
    if not run.metrics["test"]:
        return [Finding("Not tested", "There are no scores of the model on test data.", warning=True)]
    rows = predicted_rows([results.arrays(run)])
    scored = _regression(results, run, rows) if results.task.name == "regression" else _classification(results, run)
    found: list[Finding | None] = [scored]
    if arm.num_members > 1:
        found += [_members(results, arm, run), _uncertainty(rows)]
    return [finding for finding in found if finding]


def _classification(results: Results, run: Run) -> Finding:
    test = run.metrics["test"]
    accuracy = results.metrics["accuracy"]
    text = f"Accuracy {accuracy.value(test['accuracy'])}"
    if results.data.test:
        low, high = wilson(test["accuracy"], results.data.test)
        text += f" (95 % interval for this many rows: {accuracy.number(low)} to {accuracy.number(high)})"
    text += f", cross entropy {results.metrics['cross_entropy'].value(test['cross_entropy'])}."
    if "calibration_error" in test:
        text += f" Confidence and accuracy lie {100 * test['calibration_error']:.1f} points apart on average."
    return Finding("On the test set", text)


def _regression(results: Results, run: Run, rows: Predicted | None) -> Finding:
    test, metrics = run.metrics["test"], results.metrics
    text = f"RMSE {metrics['rmse'].value(test['rmse'])}"
    if rows is not None and len(rows.error) >= 30:
        squares = np.square(rows.error)
        half = NORMAL * float(squares.std(ddof=1)) / math.sqrt(len(squares))
        low, high = (math.sqrt(max(0.0, test["mse"] + side * half)) for side in (-1, 1))
        text += f" (95 % interval for this many rows: {metrics['rmse'].number(low)} to {metrics['rmse'].value(high)})"
    if "mae" in test:
        text += f", MAE {metrics['mae'].value(test['mae'])}"
    text += ", in the target's units"
    r2 = f"; R² {metrics['r2'].value(test['r2'])}" if "r2" in test else ""
    return Finding("On the test set", f"{text}{r2}.")


def _members(results: Results, arm: Arm, run: Run) -> Finding | None:
    """What averaging is worth, and how far the members differ."""
    test, error = run.metrics["test"], results.metrics[results.task.error]
    spread, key = results.metrics[results.task.spread], f"member_{results.task.error}"
    if key not in test or spread.key not in test:
        return None
    alone = f"One member alone has {'an' if error.key == 'error' else 'a'} {error.noun} of {error.value(test[key])}"
    text = f"{alone} on average, all {arm.num_members} together {error.value(test[error.key])}."
    if spread.key == "disagreement":
        return Finding("Members", f"{text} Two of them differ on {spread.value(test[spread.key])} of the test rows.")
    return Finding("Members", f"{text} Their predictions spread by {spread.value(test[spread.key])} around the mean.")


def _uncertainty(rows: Predicted | None) -> Finding | None:
    """Whether the members' spread tells where the errors are, and whether it is as large as they are."""
    thirds = honesty(rows, 3) if rows is not None else None
    if rows is None or thirds is None or len(thirds.error) < 3 or not thirds.error[0]:
        return None
    ratio = float(thirds.error[2] / thirds.error[0])
    if ratio >= 1.2:
        text = (
            "The spread tells where to be careful: in the third of the test rows on which the members differ most, "
            f"the error is {ratio:.1f} times that in the third on which they differ least."
        )
    else:
        text = (
            "The spread does not tell where the errors are: in the third of the test rows on which the members differ "
            f"most, the error is {ratio:.1f} times that in the third on which they differ least."
        )
    share = math.sqrt(float(np.mean(np.square(rows.spread)) / np.mean(np.square(rows.error))))
    size = f"{share:.2g} times the error"
    if share < 0.8:
        text += f" As an error bar it is too short ({size}): it misses what all members get wrong together."
    elif share <= 1.25:
        text += f" It is about as large as the error ({size})."
    else:
        text += f" As an error bar it is too long ({size})."
    return Finding("Uncertainty", text, warning=ratio < 1.2)


def wilson(share: float, n: int) -> tuple[float, float]:
    """Wilson's 95 % interval of a share that was counted in n cases.

    Example:
        >>> low, high = wilson(0.9, 100)
        >>> round(low, 4), round(high, 4)
        (0.8256, 0.9448)
    """
    square = NORMAL**2 / n
    share = min(1.0, max(0.0, share))
    half = NORMAL * math.sqrt(share * (1 - share) / n + square / (4 * n))
    return (share + square / 2 - half) / (1 + square), (share + square / 2 + half) / (1 + square)


def _percent(share: float) -> str:
    return f"{formats.number(100 * share, 1)} %"
