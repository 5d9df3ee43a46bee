"""Who trains and who tests: proportions, every class in training, and the same rows every time."""

from __future__ import annotations

import numpy as np
import pandas as pd
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from torchace.lab.data import DataError, Partition, partition

LABELS = torch.tensor([0] * 50 + [1] * 30 + [2] * 20)


def everything(parts: Partition) -> list[int]:
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
        parts = partition(targets, seed=3, fractions=fractions)
        assert tuple(map(len, parts)) == sizes
        assert everything(parts) == list(range(100))
        for rows in parts:
            assert rows.dtype == torch.int64
            assert rows.tolist() == sorted(rows.tolist())


def test_classes_are_in_proportion():
    for rows, counts in zip(partition(LABELS, seed=1), ([30, 18, 12], [10, 6, 4], [10, 6, 4]), strict=True):
        assert torch.bincount(LABELS[rows]).tolist() == counts


@pytest.mark.parametrize("targets", [LABELS, LABELS.double()], ids=["classes", "numbers"])
def test_seeds(targets):
    one, again, other = (partition(targets, seed=seed) for seed in (0, 0, 1))
    assert all(torch.equal(left, right) for left, right in zip(one, again, strict=True))
    assert not any(torch.equal(left, right) for left, right in zip(one, other, strict=True))


def test_numbers_are_drawn_at_random():
    """Every row is in every part about as often as the fractions say: 5 standard deviations of a binomial count."""
    targets = torch.zeros(20, dtype=torch.float64)
    counts = np.zeros((3, 20))
    trials = 400
    for seed in range(trials):
        for count, rows in zip(counts, partition(targets, seed=seed), strict=True):
            count[rows.numpy()] += 1
    for count, share in zip(counts, (0.6, 0.2, 0.2), strict=True):
        assert np.abs(count - trials * share).max() < 5 * np.sqrt(trials * share * (1 - share))


def test_the_draws_of_validation_and_test_are_independent():
    """Given that a row is not in the test part, where it stands says nothing of its validation."""
    targets = torch.zeros(40, dtype=torch.float64)
    counts = np.zeros((2, 40))
    for seed in range(400):
        parts = partition(targets, seed=seed)
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
    parts = partition(labels, seed=seed, fractions=fractions)
    assert set(labels[parts.train].tolist()) == set(range(len(counts)))
    assert everything(parts) == list(range(len(labels)))
    # what was planned, but for the rows that went to training
    assert sum(len(rows) for rows in parts[1:]) >= len(labels) - round(fractions[0] * len(labels)) - 2 - len(counts)


@pytest.mark.parametrize("targets", [LABELS, LABELS.double()], ids=["classes", "numbers"])
def test_a_column_decides(targets):
    words = ["train", "Training ", "VALID", "val", "validation", "test"] * 20
    column = pd.Series(words[:100], name="part")
    parts = partition(targets, seed=0, column=column)
    names = [word.strip().lower()[:2] for word in words[:100]]
    for rows, start in zip(parts, ("tr", "va", "te"), strict=True):
        assert rows.tolist() == [row for row, name in enumerate(names) if name == start]


def test_validation_is_cut_from_training():
    column = pd.Series(["train", "test"] * 50)
    parts = partition(LABELS, seed=0, column=column)
    assert parts.test.tolist() == list(range(1, 100, 2))
    assert everything(parts) == list(range(100))
    # a quarter of 25, 15 and 10 rows: 12 rows, shared out by largest remainders
    assert torch.bincount(LABELS[parts.validation]).tolist() == [6, 4, 2]
    other = partition(LABELS, seed=1, column=column)
    assert not torch.equal(parts.validation, other.validation)


def test_a_column_without_test_where_none_is_asked_for():
    parts = partition(LABELS, fractions=(0.8, 0.2, 0.0), column=pd.Series(["train"] * 100))
    assert tuple(map(len, parts)) == (80, 20, 0)


def test_arguments():
    with pytest.raises(TypeError, match="tensor"):
        partition([0, 1])  # type: ignore[arg-type]
    for wrong in (torch.zeros(3, 2), torch.zeros(3, dtype=torch.int32)):
        with pytest.raises(ValueError, match="targets"):
            partition(wrong)
    with pytest.raises(ValueError, match="100 rows"):
        partition(LABELS, column=pd.Series(["train"]))


@given(st.integers(0, 12))
def test_few_rows(count):
    """Two parts of at least one row each, and one to train with, or a sentence."""
    try:
        parts = partition(torch.zeros(count))
    except DataError:
        assert count < 5
    else:
        assert min(map(len, parts)) >= 1
