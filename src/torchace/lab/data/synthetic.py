"""A synthetic table, for experiments of any number of samples without a download."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from torchace._extras import import_extra

MAX_SAMPLES = 20_000
Part = tuple[NDArray[np.float32], NDArray[np.int64]]


def synthetic_table(num_samples: int, num_classes: int = 10, num_test: int = 4000) -> tuple[Part, Part]:
    """Return `(train, test)` of scikit-learn's `make_classification`: 20 columns, 10 of them informative.

    The test samples are the same for every `num_samples`.
    """
    if not 1 <= num_samples <= MAX_SAMPLES:
        raise ValueError(f"Expected `num_samples` to be from 1 to {MAX_SAMPLES:,}, but got {num_samples}.")
    datasets = import_extra("sklearn.datasets", "A synthetic table needs")
    x, y = datasets.make_classification(
        num_test + MAX_SAMPLES, n_informative=10, n_redundant=5, n_classes=num_classes, class_sep=1.5, random_state=0
    )
    x, train = x.astype(np.float32), slice(num_test, num_test + num_samples)
    return (x[train], y[train]), (x[:num_test], y[:num_test])
