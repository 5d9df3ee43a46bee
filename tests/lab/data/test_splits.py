"""Taking samples with every class in proportion."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from torchace.lab.data import Split, stratified_split


def numbered(labels: list[int]) -> Split:
    return Split(torch.arange(len(labels)), torch.tensor(labels))


@settings(max_examples=100, deadline=None)
@given(labels=st.lists(st.integers(0, 4), min_size=2, max_size=60), seed=st.integers(0, 5), data=st.data())
def test_parts_are_in_proportion(labels, seed, data):
    split = numbered(labels)
    count = data.draw(st.integers(1, len(labels) - 1))
    rest, taken = stratified_split(split, count, seed=seed)
    assert (len(rest), len(taken)) == (len(labels) - count, count)
    assert sorted(rest.x.tolist() + taken.x.tolist()) == list(range(len(labels)))  # nothing lost, nothing twice
    for part in (rest, taken):
        assert part.x.tolist() == sorted(part.x.tolist())
        assert part.y.tolist() == [labels[place] for place in part.x.tolist()]
    for label in set(labels):
        share = labels.count(label) * count / len(labels)
        assert abs(taken.y.tolist().count(label) - share) < 1  # rounded up or down, no more


def test_a_function_of_the_seed():
    split = numbered([i % 3 for i in range(90)])
    first, again, other = (stratified_split(split, 0.2, seed=seed)[1].x.tolist() for seed in (0, 0, 1))
    assert first == again
    assert first != other
    assert len(first) == 18


def test_every_sample_is_about_equally_often_taken():
    split = numbered([0] * 20 + [1] * 10)
    counts = sum(torch.bincount(stratified_split(split, 6, seed=seed)[1].x, minlength=30) for seed in range(1000))
    assert int(counts.sum()) == 6000
    # binomial: mean 200, standard deviation 12.6; five of these
    assert float((counts - 200).abs().max()) < 5 * 12.6


@pytest.mark.parametrize(
    ("size", "error"),
    [
        (0, ValueError),
        (10, ValueError),
        (-1, ValueError),
        (1.0, ValueError),
        (0.0, ValueError),
        (0.01, ValueError),
        (float("nan"), ValueError),
        (True, TypeError),
        ("3", TypeError),
    ],
)
def test_sizes_that_cannot_be(size, error):
    with pytest.raises(error, match="Expected"):
        stratified_split(numbered([0, 1] * 5), size, seed=0)


def test_targets_without_classes_cannot_be_stratified():
    with pytest.raises(ValueError, match="class indices"):
        stratified_split(Split(torch.zeros(4, 2), torch.zeros(4)), 2, seed=0)
    with pytest.raises(ValueError, match="class indices"):
        stratified_split(numbered([0, -1, 1, 1]), 2, seed=0)


@pytest.mark.parametrize(
    ("x", "y", "error"),
    [
        (torch.zeros(3, 2), torch.zeros(4, dtype=torch.int64), ValueError),
        (torch.tensor(1.0), torch.zeros(1, dtype=torch.int64), ValueError),
        (torch.zeros(3, 2), torch.zeros(3, dtype=torch.int32), TypeError),
        ([[1.0]], torch.zeros(1, dtype=torch.int64), TypeError),
    ],
)
def test_splits_that_do_not_fit(x, y, error):
    with pytest.raises(error, match="Expected"):
        Split(x, y)


def test_moving_to_where_it_is_copies_nothing():
    split = numbered([0, 1])
    assert split.to("cpu") is split
