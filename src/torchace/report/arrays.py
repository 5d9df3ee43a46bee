"""The arrays of a run: read, checked, and summed up over seeds."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from torchace.report._fields import ReportError

Array = NDArray[Any]


class Reliability(NamedTuple):
    """What a reliability diagram shows, one entry a bin that holds samples."""

    confidence: Array
    accuracy: Array
    share: Array


class Disputed(NamedTuple):
    """A test image the members dispute, its `position` in the test set, and (class, number of members) by votes."""

    position: int
    target: int
    votes: tuple[tuple[int, int], ...]
    image: Array


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
    matrix = arrays.get("disagreement_matrix")
    images = arrays.get("disputed_images")
    return (
        all(arrays[key].ndim in allowed for key, allowed in axes.items() if key in arrays)
        and (not bins or (len(bins) == 3 and len(set(bins)) == 1 and len(bins[0]) == 1))
        and (matrix is None or matrix.shape[0] == matrix.shape[1])
        and (len(disputed) <= 1)
        and (images is None or (images.dtype == np.uint8 and (images.ndim == 3 or images.shape[-1] == 3)))
        and all(np.isfinite(value).all() for value in arrays.values() if value.dtype.kind == "f")
    )


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


def disputed_images(arrays: Mapping[str, Array], most: int = 12) -> list[Disputed]:
    """The disputed test images of one run, in the order they were written.

    Args:
        arrays: The run's arrays.
        most: At most so many.

    Returns:
        An empty list where the run has no images.
    """
    keys = ("disputed_index", "disputed_target", "disputed_votes", "disputed_images")
    if any(key not in arrays for key in keys):
        return []
    found = []
    for position, target, votes, image in zip(*(arrays[key][:most] for key in keys), strict=True):
        classes, counts = np.unique(votes, return_counts=True)
        ranked = sorted(zip(classes.tolist(), counts.tolist(), strict=True), key=lambda pair: (-pair[1], pair[0]))
        found.append(Disputed(int(position), int(target), tuple((int(c), int(n)) for c, n in ranked), image))
    return found
