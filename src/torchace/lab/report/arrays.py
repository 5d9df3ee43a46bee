"""Arrays of runs: read, check, summarize over seeds."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from torchace._files import ARRAYS_BYTES, read_bounded
from torchace.lab.schema.reading import ResultFileError
from torchace.lab.schema.values import LARGEST

Array = NDArray[Any]

ROWS = ("predicted", "observed", "spread")  # of a regression, one entry a test row
SAMPLES = {"cross_entropy": "sample_cross_entropy", "error": "sample_error"}  # of a classification
AXES = {
    "disagreement_matrix": (2,),
    "residual_correlation": (2,),
    "disputed_votes": (2,),
    "disputed_images": (3, 4),
    **dict.fromkeys(("disputed_target", "disputed_index", "disputed_row", *ROWS, *SAMPLES.values()), (1,)),
}


class Reliability(NamedTuple):
    """Confidence, accuracy and share of cases of each non-empty bin."""

    confidence: Array
    accuracy: Array
    share: Array


class ContestedCase(NamedTuple):
    """A test case on which members disagree."""

    position: int  # in the test set
    target: int
    votes: tuple[tuple[int, int], ...]  # (class, number of members)
    image: Array | None = None
    row: int | None = None  # in the user's file, from 1


class Predictions(NamedTuple):
    """Test rows of a regression, `(N,)` each: prediction, observed value, members' spread."""

    predicted: Array
    observed: Array
    spread: Array

    @property
    def error(self) -> Array:
        """Prediction minus observed value."""
        difference: Array = self.predicted - self.observed
        return difference


class ErrorVsSpread(NamedTuple):
    """Root mean squares of spread and error of groups of rows, by ascending spread."""

    spread: Array
    error: Array


def read_arrays(path: Path, sha256: str | None = None) -> dict[str, Array]:
    """Read a run's safetensors file; empty if it is missing and no checksum is given."""
    from safetensors import SafetensorError
    from safetensors.numpy import load

    name = f"runs/{path.name}"
    if sha256 is None and not path.exists():
        return {}
    try:
        data = read_bounded(path, ARRAYS_BYTES)
        if sha256 not in (None, hashlib.sha256(data).hexdigest()):
            raise ResultFileError(f"{name} was changed after it was written: its SHA-256 differs.")
        arrays: dict[str, Array] = load(data)
    except OSError as error:
        raise ResultFileError(f"Could not read {name}: {error.strerror}.") from None
    except ResultFileError:
        raise
    except (SafetensorError, KeyError, TypeError, ValueError, AttributeError):
        raise ResultFileError(f"Expected arrays in {name}, but the file is damaged or has another format.") from None
    if not _consistent(arrays):
        raise ResultFileError(f"The arrays in {name} have inconsistent shapes or values.")
    return arrays


def _consistent(arrays: Mapping[str, Array]) -> bool:
    bins = [value.shape for key, value in arrays.items() if key.startswith("reliability_")]
    contested = {value.shape[:1] for key, value in arrays.items() if key.startswith("disputed_")}
    matrices = [arrays[key] for key in ("disagreement_matrix", "residual_correlation") if key in arrays]
    rows = [arrays[key].shape for key in ROWS if key in arrays]
    images = arrays.get("disputed_images")
    return (
        all(arrays[key].ndim in allowed for key, allowed in AXES.items() if key in arrays)
        and (not bins or (len(bins) == 3 and len(set(bins)) == 1 and len(bins[0]) == 1))
        and all(matrix.shape[0] == matrix.shape[1] for matrix in matrices)
        and (not rows or (len(rows) == len(ROWS) and len(set(rows)) == 1 and bool((arrays["spread"] >= 0).all())))
        and (len(contested) <= 1)
        and (images is None or (images.dtype == np.uint8 and (images.ndim == 3 or images.shape[-1] == 3)))
        and all(_is_bounded(key, value) for key, value in arrays.items() if value.dtype.kind == "f")
    )


def _is_bounded(key: str, values: Array) -> bool:
    """Whether all numbers are within bounds; undefined correlations may be NaN."""
    bounded: Array = np.abs(values.astype(np.float64)) < LARGEST
    if key == "residual_correlation":
        bounded |= np.isnan(values)
    return bool(bounded.all())


def sample_scores(arrays: Mapping[str, Array], metric: str) -> Array | None:
    """Return a metric on each test sample, `(N,)` in float64; None if not recorded."""
    if SAMPLES.get(metric) in arrays:
        return np.asarray(arrays[SAMPLES[metric]], dtype=np.float64)
    rows = join_predictions([arrays]) if metric in ("mse", "mae") else None
    if rows is None:
        return None
    return np.square(rows.error) if metric == "mse" else np.abs(rows.error)


def reliability(runs: Iterable[Mapping[str, Array]]) -> Reliability | None:
    """Return the reliability over the samples of all runs; None if no run recorded it."""
    keys = ("reliability_count", "reliability_confidence", "reliability_correct")
    recorded = [arrays for arrays in runs if keys[0] in arrays]
    recorded = [arrays for arrays in recorded if arrays[keys[0]].shape == recorded[0][keys[0]].shape]
    if not recorded:
        return None
    count, confidence, correct = (np.asarray([a[key] for a in recorded], dtype=np.float64).sum(0) for key in keys)
    filled = count > 0
    if not filled.any():
        return None
    return Reliability(confidence[filled] / count[filled], correct[filled] / count[filled], count[filled] / count.sum())


def contested_cases(arrays: Mapping[str, Array], most: int = 12) -> list[ContestedCase]:
    """Return up to `most` contested test cases of one run."""
    keys = ("disputed_index", "disputed_target", "disputed_votes")
    if any(key not in arrays for key in keys):
        return []
    found = []
    for i, (position, target, votes) in enumerate(zip(*(arrays[key][:most] for key in keys), strict=True)):
        classes, counts = np.unique(votes, return_counts=True)
        ranked = sorted(zip(classes.tolist(), counts.tolist(), strict=True), key=lambda pair: (-pair[1], pair[0]))
        image = arrays["disputed_images"][i] if "disputed_images" in arrays else None
        row = int(arrays["disputed_row"][i]) if "disputed_row" in arrays else None
        found.append(ContestedCase(int(position), int(target), tuple((int(c), int(n)) for c, n in ranked), image, row))
    return found


def join_predictions(runs: Iterable[Mapping[str, Array]]) -> Predictions | None:
    """Concatenate the test rows of all runs in float64; None if no run recorded them."""
    recorded = [arrays for arrays in runs if ROWS[0] in arrays and arrays[ROWS[0]].size]
    if not recorded:
        return None
    return Predictions(*(np.concatenate([a[key] for a in recorded]).astype(np.float64) for key in ROWS))


def error_vs_spread(rows: Predictions, groups: int = 10) -> ErrorVsSpread | None:
    """Return spread and error in up to `groups` groups of at least ten rows; None for fewer than two groups."""
    groups = min(groups, len(rows.spread) // 10)
    if groups < 2 or not rows.spread.any():
        return None
    parts = np.array_split(np.argsort(rows.spread, kind="stable"), groups)
    spread, error = (
        np.array([np.sqrt(np.mean(np.square(values[part]))) for part in parts]) for values in (rows.spread, rows.error)
    )
    return ErrorVsSpread(spread, error)
