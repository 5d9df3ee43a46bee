"""Splits: every class in proportion, every class in training, and the same rows every time."""

from __future__ import annotations

import numpy as np
import pandas as pd
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from torchace.lab.data import DataError, Split
from torchace.lab.data.splits import SplitIndices, stratified_split, train_val_test_split


def make_split(labels: list[int]) -> Split:
    return Split(torch.arange(len(labels)), torch.tensor(labels))


@settings(max_examples=100, deadline=None)
@given(labels=st.lists(st.integers(0, 4), min_size=2, max_size=60), seed=st.integers(0, 5), data=st.data())
def test_parts_are_in_proportion(labels, seed, data):
    split = make_split(labels)
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
    split = make_split([i % 3 for i in range(90)])
    first, again, other = (stratified_split(split, 0.2, seed=seed)[1].x.tolist() for seed in (0, 0, 1))
    assert first == again
    assert first != other
    assert len(first) == 18


def test_every_sample_is_about_equally_often_taken():
    split = make_split([0] * 20 + [1] * 10)
    counts = sum(torch.bincount(stratified_split(split, 6, seed=seed)[1].x, minlength=30) for seed in range(1000))
    assert int(counts.sum()) == 6000
    # binomial: mean 200, standard deviation 12.6; five of these
    assert float((counts - 200).abs().max()) < 5 * 12.6


@pytest.mark.parametrize(
    ("size", "error"),
    [(0, ValueError), (10, ValueError), (-1, ValueError), (1.0, ValueError), (0.0, ValueError), (0.01, ValueError)],
)
def test_invalid_sizes(size, error):
    with pytest.raises(error, match="Expected"):
        stratified_split(make_split([0, 1] * 5), size, seed=0)


@pytest.mark.parametrize(
    ("x", "y", "error"),
    [
        (torch.zeros(3, 2), torch.zeros(4, dtype=torch.int64), ValueError),
        (torch.tensor(1.0), torch.zeros(1, dtype=torch.int64), ValueError),
        (torch.zeros(3, 2), torch.zeros(3, dtype=torch.int32), TypeError),
    ],
)
def test_splits_that_do_not_fit(x, y, error):
    with pytest.raises(error, match="Expected"):
        Split(x, y)


def test_moving_to_the_same_device_copies_nothing():
    split = make_split([0, 1])
    assert split.to("cpu") is split


# -- training, validation and test ------------------------------------------------------------------------------------

LABELS = torch.tensor([0] * 50 + [1] * 30 + [2] * 20)


def everything(parts: SplitIndices) -> list[int]:
    return sorted(torch.cat(list(parts)).tolist())


@pytest.mark.parametrize(
    "targets", [LABELS, torch.linspace(0, 1, 100, dtype=torch.float64)], ids=["classes", "numbers"]
)
def test_fractions(targets):
    for fractions, sizes in (
        ((0.6, 0.2, 0.2), (60, 20, 20)),
        ((0.7, 0.3, 0.0), (70, 30, 0)),
        ((0.5, 0.4, 0.1), (50, 40, 10)),
    ):
        parts = train_val_test_split(targets, seed=3, fractions=fractions)
        assert tuple(map(len, parts)) == sizes
        assert everything(parts) == list(range(100))
        for rows in parts:
            assert rows.dtype == torch.int64
            assert rows.tolist() == sorted(rows.tolist())


def test_classes_are_in_proportion():
    for rows, counts in zip(train_val_test_split(LABELS, seed=1), ([30, 18, 12], [10, 6, 4], [10, 6, 4]), strict=True):
        assert torch.bincount(LABELS[rows]).tolist() == counts


@pytest.mark.parametrize("targets", [LABELS, LABELS.double()], ids=["classes", "numbers"])
def test_seeds(targets):
    one, again, other = (train_val_test_split(targets, seed=seed) for seed in (0, 0, 1))
    assert all(torch.equal(left, right) for left, right in zip(one, again, strict=True))
    assert not any(torch.equal(left, right) for left, right in zip(one, other, strict=True))


def test_numbers_are_drawn_at_random():
    """Every row is in every part about as often as the fractions say: 5 standard deviations of a binomial count."""
    targets = torch.zeros(20, dtype=torch.float64)
    counts = np.zeros((3, 20))
    trials = 400
    for seed in range(trials):
        for count, rows in zip(counts, train_val_test_split(targets, seed=seed), strict=True):
            count[rows.numpy()] += 1
    for count, share in zip(counts, (0.6, 0.2, 0.2), strict=True):
        assert np.abs(count - trials * share).max() < 5 * np.sqrt(trials * share * (1 - share))


def test_the_draws_of_validation_and_test_are_independent():
    """Given that a row is not in the test part, where it stands says nothing of its validation."""
    targets = torch.zeros(40, dtype=torch.float64)
    counts = np.zeros((2, 40))
    for seed in range(400):
        parts = train_val_test_split(targets, seed=seed)
        for count, rows in zip(counts, parts[1:], strict=True):
            count[rows.numpy()] += 1
    assert abs(np.corrcoef(counts)[0, 1]) < 5 / np.sqrt(40)  # five standard deviations of a correlation of 40 pairs


@settings(deadline=None)
@given(st.lists(st.integers(2, 12), min_size=2, max_size=8), st.integers(0, 2**32), st.data())
def test_every_class_is_trained(counts, seed, data):
    """Of two rows at least one, however they are shared out."""
    labels = torch.cat([torch.full((count,), label) for label, count in enumerate(counts)])
    labels = labels[torch.randperm(len(labels), generator=torch.Generator().manual_seed(seed))]
    fractions = data.draw(st.sampled_from([(0.6, 0.2, 0.2), (0.2, 0.4, 0.4), (0.34, 0.33, 0.33)]))
    parts = train_val_test_split(labels, seed=seed, fractions=fractions)
    assert set(labels[parts.train].tolist()) == set(range(len(counts)))
    assert everything(parts) == list(range(len(labels)))
    # what was planned, but for the rows that went to training
    assert sum(len(rows) for rows in parts[1:]) >= len(labels) - round(fractions[0] * len(labels)) - 2 - len(counts)


@pytest.mark.parametrize("targets", [LABELS, LABELS.double()], ids=["classes", "numbers"])
def test_parts_given_by_a_column(targets):
    words = ["train", "Training ", "VALID", "val", "validation", "test"] * 20
    column = pd.Series(words[:100], name="part")
    parts = train_val_test_split(targets, seed=0, column=column)
    names = [word.strip().lower()[:2] for word in words[:100]]
    for rows, start in zip(parts, ("tr", "va", "te"), strict=True):
        assert rows.tolist() == [row for row, name in enumerate(names) if name == start]


def test_validation_is_cut_from_training():
    column = pd.Series(["train", "test"] * 50)
    parts = train_val_test_split(LABELS, seed=0, column=column)
    assert parts.test.tolist() == list(range(1, 100, 2))
    assert everything(parts) == list(range(100))
    # a quarter of 25, 15 and 10 rows: 12 rows, shared out by largest remainders
    assert torch.bincount(LABELS[parts.validation]).tolist() == [6, 4, 2]
    other = train_val_test_split(LABELS, seed=1, column=column)
    assert not torch.equal(parts.validation, other.validation)


def test_a_column_without_test_where_none_is_asked_for():
    parts = train_val_test_split(LABELS, fractions=(0.8, 0.2, 0.0), column=pd.Series(["train"] * 100))
    assert tuple(map(len, parts)) == (80, 20, 0)


@given(st.integers(0, 12))
def test_few_rows(count):
    """Two parts of at least one row each, and one to train with, or a sentence."""
    try:
        parts = train_val_test_split(torch.zeros(count))
    except DataError:
        assert count < 5
    else:
        assert min(map(len, parts)) >= 1
