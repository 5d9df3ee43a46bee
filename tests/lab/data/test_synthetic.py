"""The synthetic table."""

from __future__ import annotations

import numpy as np
import pytest

from torchace.lab.data.synthetic import synthetic_table


def test_tables_of_any_size_have_the_same_test_samples() -> None:
    (many_x, many_y), (test_x, test_y) = synthetic_table(600, num_classes=4, num_test=300)
    (few_x, few_y), (same_x, same_y) = synthetic_table(50, num_classes=4, num_test=300)
    assert (many_x.shape, test_x.shape, many_x.dtype) == ((600, 20), (300, 20), np.float32)
    pairs = ((test_x, same_x), (test_y, same_y), (many_x[:50], few_x), (many_y[:50], few_y))
    assert all(np.array_equal(one, other) for one, other in pairs)
    assert set(test_y) == set(range(4))
    assert not {row.tobytes() for row in many_x} & {row.tobytes() for row in test_x}


@pytest.mark.parametrize("num_samples", [0, -5, 20_001])
def test_a_table_cannot_have_every_size(num_samples: int) -> None:
    with pytest.raises(ValueError, match=f"Expected `num_samples` to be from 1 to 20,000, but got {num_samples}"):
        synthetic_table(num_samples)
