"""Permutation of the columns of a table."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from numpy.typing import NDArray
from torch import Tensor


def permutation_increases(
    loss: Callable[[Tensor], float],
    raw: Tensor,
    names: Sequence[str],
    order: Callable[[int, int], Tensor | NDArray[Any]],
    repeats: int,
) -> dict[str, list[float]]:
    """Increases of the loss of a raw matrix `(N, F)` if the columns of a name are permuted, by name.

    `order(place, repeat)` returns a permutation `(N,)` for the name at `place`. All parts of a date have one name.
    """
    before, increases = loss(raw), dict[str, list[float]]()
    for place, name in enumerate(dict.fromkeys(names)):
        columns = [index for index, other in enumerate(names) if other == name]
        increases[name] = []
        for repeat in range(repeats):
            altered = raw.clone()
            altered[:, columns] = raw[order(place, repeat)][:, columns]
            increases[name].append(loss(altered) - before)
    return increases
