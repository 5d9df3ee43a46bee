"""The arrays of a run: read, checked, and summed up over seeds."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from torchace._files import ARRAYS_BYTES, check_regular, read_bounded
from torchace.lab.report._fields import LARGEST, Fields, ReportError

Array = NDArray[Any]

SAMPLES = ("sample_cross_entropy", "sample_error")
"""The arrays of a classification that have one entry a test sample."""

ROWS = ("predicted", "observed", "spread")
"""The arrays of a regression that have one entry a test row."""


class Reliability(NamedTuple):
    """What a reliability diagram shows, one entry a bin that holds samples."""

    confidence: Array
    accuracy: Array
    share: Array


class Disputed(NamedTuple):
    """A test case the members dispute, its `position` in the test set, and (class, number of members) by votes.

    `row` is its number in a user's file, counted from 1; `image` what it looks like; None where the run has neither.
    """

    position: int
    target: int
    votes: tuple[tuple[int, int], ...]
    image: Array | None = None
    row: int | None = None


class Predicted(NamedTuple):
    """Test rows of a regression, `(N,)` each: the ensemble's prediction, the truth, the members' spread."""

    predicted: Array
    observed: Array
    spread: Array

    @property
    def error(self) -> Array:
        """Prediction less truth."""
        difference: Array = self.predicted - self.observed
        return difference


class Honesty(NamedTuple):
    """Rows in groups of equal size, ordered by spread: root mean squares of spread and of error, one entry a group."""

    spread: Array
    error: Array


def check_arrays(run: Fields, path: Path) -> None:
    """Refuse arrays that are not those that were written with the run."""
    if (stated := run.value.get("arrays_sha256")) is None:
        return
    try:
        found = hashlib.sha256(read_bounded(path, ARRAYS_BYTES)).hexdigest()
    except OSError as error:
        raise ReportError(f"Could not read runs/{path.name}: {error.strerror}.") from None
    if found != stated:
        raise ReportError(f"runs/{path.name} was changed after it was written: its SHA-256 is another one.")


def read_arrays(path: Path) -> dict[str, Array]:
    """Reads a run's arrays.

    Args:
        path: A safetensors file in `runs/`.

    Returns:
        Arrays by name.

    Raises:
        ReportError: The file is damaged, or its arrays do not fit together.
    """
    from safetensors import SafetensorError
    from safetensors.numpy import load_file

    where = f"runs/{path.name}"
    try:
        check_regular(path)
        arrays: dict[str, Array] = load_file(path)
    except (SafetensorError, OSError, KeyError, TypeError, ValueError, AttributeError):
        raise ReportError(f"Expected arrays in {where}, but the file is damaged or something else.") from None
    if not _fit(arrays):
        raise ReportError(f"The arrays in {where} do not fit together.")
    return arrays


def _fit(arrays: Mapping[str, Array]) -> bool:
    bins = [value.shape for key, value in arrays.items() if key.startswith("reliability_")]
    disputed = {value.shape[:1] for key, value in arrays.items() if key.startswith("disputed_")}
    axes = {"disagreement_matrix": (2,), "disputed_votes": (2,), "disputed_target": (1,), "disputed_images": (3, 4)}
    axes |= {
        "disputed_index": (1,),
        "disputed_row": (1,),
        "residual_correlation": (2,),
        **dict.fromkeys((*ROWS, *SAMPLES), (1,)),
    }
    matrices = [arrays[key] for key in ("disagreement_matrix", "residual_correlation") if key in arrays]
    rows = [arrays[key].shape for key in ROWS if key in arrays]
    images = arrays.get("disputed_images")
    return (
        all(arrays[key].ndim in allowed for key, allowed in axes.items() if key in arrays)
        and (not bins or (len(bins) == 3 and len(set(bins)) == 1 and len(bins[0]) == 1))
        and all(matrix.shape[0] == matrix.shape[1] for matrix in matrices)
        and (not rows or (len(rows) == len(ROWS) and len(set(rows)) == 1 and bool((arrays["spread"] >= 0).all())))
        and (len(disputed) <= 1)
        and (images is None or (images.dtype == np.uint8 and (images.ndim == 3 or images.shape[-1] == 3)))
        and all(_plausible(key, value) for key, value in arrays.items() if value.dtype.kind == "f")
    )


def _plausible(key: str, values: Array) -> bool:
    """Finite, and not so large that squares overflow; a correlation that is not defined may be NaN."""
    plausible: Array = np.abs(values.astype(np.float64)) < LARGEST
    if key == "residual_correlation":
        plausible |= np.isnan(values)
    return bool(plausible.all())


def sample_scores(arrays: Mapping[str, Array], metric: str) -> Array | None:
    """A metric on every test sample that a run recorded, `(N,)` in float64; None where it recorded none."""
    key = {"cross_entropy": "sample_cross_entropy", "error": "sample_error"}.get(metric, "predicted")
    if key not in arrays or (key == "predicted" and metric not in ("mse", "mae")):
        return None
    if key != "predicted":
        return np.asarray(arrays[key], dtype=np.float64)
    error = np.asarray(arrays["predicted"], dtype=np.float64) - np.asarray(arrays["observed"], dtype=np.float64)
    return np.square(error) if metric == "mse" else np.abs(error)


def reliability(runs: Iterable[Mapping[str, Array]]) -> Reliability | None:
    """Confidence and accuracy of each bin, the runs' samples taken together.

    Args:
        runs: The arrays of each run.

    Returns:
        The bins that hold samples, or None where no run recorded any.

    Example:
        >>> run = {"reliability_count": np.array([0.0, 4.0]), "reliability_confidence": np.array([0.0, 3.6]),
        ...        "reliability_correct": np.array([0.0, 3.0])}
        >>> reliability([run, run]).accuracy.tolist()
        [0.75]
    """
    keys = ("reliability_count", "reliability_confidence", "reliability_correct")
    recorded = [arrays for arrays in runs if keys[0] in arrays]
    recorded = [arrays for arrays in recorded if arrays[keys[0]].shape == recorded[0][keys[0]].shape]
    if not recorded:
        return None
    count, confidence, correct = (sum(np.asarray(a[key], dtype=np.float64) for a in recorded) for key in keys)
    count = np.asarray(count)
    filled = count > 0
    if not filled.any():
        return None
    count = count[filled]
    return Reliability(np.asarray(confidence)[filled] / count, np.asarray(correct)[filled] / count, count / count.sum())


def disputed_cases(arrays: Mapping[str, Array], most: int = 12) -> list[Disputed]:
    """The disputed test cases of one run, in the order they were written.

    Args:
        arrays: The run's arrays.
        most: At most so many.

    Returns:
        An empty list where the run recorded none.
    """
    keys = ("disputed_index", "disputed_target", "disputed_votes")
    if any(key not in arrays for key in keys):
        return []
    found = []
    for i, (position, target, votes) in enumerate(zip(*(arrays[key][:most] for key in keys), strict=True)):
        classes, counts = np.unique(votes, return_counts=True)
        ranked = sorted(zip(classes.tolist(), counts.tolist(), strict=True), key=lambda pair: (-pair[1], pair[0]))
        image = arrays["disputed_images"][i] if "disputed_images" in arrays else None
        row = int(arrays["disputed_row"][i]) if "disputed_row" in arrays else None
        found.append(Disputed(int(position), int(target), tuple((int(c), int(n)) for c, n in ranked), image, row))
    return found


def disputed_images(arrays: Mapping[str, Array], most: int = 12) -> list[Disputed]:
    """The disputed test cases of one run that are images."""
    return [case for case in disputed_cases(arrays, most) if case.image is not None]


def predicted_rows(runs: Iterable[Mapping[str, Array]]) -> Predicted | None:
    """The test rows of all runs together.

    Args:
        runs: The arrays of each run.

    Returns:
        The rows in float64, or None where no run recorded any.
    """
    recorded = [arrays for arrays in runs if ROWS[0] in arrays and arrays[ROWS[0]].size]
    if not recorded:
        return None
    return Predicted(*(np.concatenate([np.asarray(a[key], dtype=np.float64) for a in recorded]) for key in ROWS))


def honesty(rows: Predicted, groups: int = 10) -> Honesty | None:
    """Whether the error grows with the members' spread, group by group.

    Args:
        rows: Test rows.
        groups: At most so many groups, of ten rows or more each.

    Returns:
        The groups, or None where there are too few rows for two, or no spread at all.

    Example:
        >>> spread = np.repeat([1.0, 2.0], 10)
        >>> found = honesty(Predicted(3 * spread, np.zeros(20), spread))
        >>> found.spread.tolist(), found.error.tolist()
        ([1.0, 2.0], [3.0, 6.0])
    """
    groups = min(groups, len(rows.spread) // 10)
    if groups < 2 or not rows.spread.any():
        return None
    parts = np.array_split(np.argsort(rows.spread, kind="stable"), groups)
    spread = np.array([_root_mean_square(rows.spread[part]) for part in parts])
    error = np.array([_root_mean_square(rows.error[part]) for part in parts])
    return Honesty(spread, error)


def _root_mean_square(values: Array) -> float:
    return float(np.sqrt(np.mean(np.square(values))))
