"""Numbers, intervals and tables of result pages, for the scripts here that write them."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from torchace._statistics import MeanEstimate, mean_over_seeds

RESULTS = Path(__file__).parents[1] / "docs" / "results"
ALPHA = 0.05
Values = Mapping[int, float]  # by seed


def read_json(name: str) -> dict[str, Any] | None:
    """Return the content of docs/results/NAME.json, if it is there."""
    file = RESULTS / f"{name}.json"
    return dict(json.loads(file.read_text("utf-8"))) if file.exists() else None


def signed(value: float, digits: int) -> str:
    """Format a difference with its sign."""
    return f"{value:+.{digits}f}".replace("-", "−")


def mean_and_sd(values: Values | Sequence[float], digits: int, factor: float = 1.0) -> str:
    """Format the mean and standard deviation over seeds."""
    found = factor * np.array(list(values.values() if isinstance(values, Mapping) else values))
    return f"{found.mean():.{digits}f} ± {found.std(ddof=1):.{digits}f}" if len(found) > 1 else f"{found[0]:.{digits}f}"


def difference(values: Values, reference: Values) -> MeanEstimate | None:
    """Return the mean paired difference over common seeds."""
    return mean_over_seeds([values[seed] - reference[seed] for seed in sorted(values.keys() & reference.keys())])


def interval_text(estimate: MeanEstimate, digits: int, *, factor: float = 1.0, tests: int = 1) -> str:
    """Format a difference with its interval, in bold if the interval excludes zero."""
    low, high = (factor * end for end in estimate.interval(ALPHA / tests))
    text = f"{signed(factor * estimate.mean, digits)} [{signed(low, digits)}, {signed(high, digits)}]"
    return f"**{text}**" if low > 0 or high < 0 else text


def is_significant(estimate: MeanEstimate, tests: int = 1) -> bool:
    """Whether the interval excludes zero."""
    low, high = estimate.interval(ALPHA / tests)
    return low > 0 or high < 0


def fold(title: str, text: str) -> str:
    """Return a text that a click on its title shows."""
    return f"<details markdown>\n<summary>{title}</summary>\n\n{text}\n\n</details>"


def setup_text(*files: dict[str, Any]) -> str:
    """Describe training and hardware of files written by `image_sweeps.Sweeps`."""
    settings, place = files[0]["settings"], files[0]["environment"]
    seconds = sum(file["environment"]["seconds_in_all"] for file in files)
    commits = " and ".join(dict.fromkeys(file["environment"]["commit"] for file in files))
    return (
        f"45,000 images for training, batches of {settings['batch_size']}, SGD with momentum 0.9, learning rate "
        f"{settings['learning_rate']:g} with a cosine schedule, weight decay {settings['weight_decay']:g}, random "
        f"crops and flips, bf16. {place.get('gpu', 'CPU')}, torch {place['torch']}, commit {commits}, "
        f"{seconds:.0f} s in all."
    )
