"""Chunks are bounded in bytes for wide inputs, wide layers and many classes."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from torchace.lab.training.run_group import CHUNK_BYTES, CHUNK_ROWS, chunk_rows, collect_chunks
from torchace.nn import SMOC, StackedLinear


@pytest.mark.parametrize("members", [1, 10, 1000])
@pytest.mark.parametrize(("inputs", "hidden", "classes"), [(4, 8, 2000), (30_000, 8, 3), (4, 50_000, 2), (8, 8, 8)])
def test_a_chunk_is_bounded_by_bytes_whatever_is_wide(members: int, inputs: int, hidden: int, classes: int) -> None:
    widest = max(inputs, hidden, classes)
    with torch.device("meta"):
        separate = nn.Sequential(nn.Linear(inputs, hidden), nn.ReLU(), nn.Linear(hidden, classes))
        stacked = nn.Sequential(StackedLinear(inputs, hidden, 3), StackedLinear(hidden, classes, 3))
        smoc = SMOC(nn.Linear(inputs, hidden), hidden, classes, 3)
    for network in (separate, stacked, smoc):
        rows = chunk_rows(network, members)
        assert rows == 1 or rows * members * widest * 8 <= CHUNK_BYTES
        assert rows == CHUNK_ROWS or (rows + 1) * members * widest * 8 > CHUNK_BYTES
        assert chunk_rows(network, members, itemsize=4) == max(
            1, min(CHUNK_ROWS, CHUNK_BYTES // (4 * members * widest))
        )


def test_results_of_chunks_are_in_order() -> None:
    logits = torch.arange(40.0).view(2, 10, 2)
    mean, top = collect_chunks(logits.split(3, 1), 10, lambda z: z.mean(0), lambda z: z.argmax(2).T)
    assert mean.equal(logits.mean(0))
    assert top.equal(logits.argmax(2).T)
