"""Map-style Datasets: in memory or read while training, in one order and with seeded random numbers."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor
from torch.utils.data import Dataset, TensorDataset

from torchace.lab.data import Batches, DataError
from torchace.lab.data.map_datasets import StreamedBatches, StreamedSplit
from torchace.lab.data.own_data import DataOptions, make_dataset
from torchace.lab.data.splits import input_tensors, random_split

COUNT = 23
X = torch.randn(COUNT, 2, generator=torch.Generator().manual_seed(0))
Y = torch.arange(COUNT) % 3


class Rows(Dataset[Any]):
    """Rows of X, through a function."""

    def __init__(self, change: Callable[[int, Tensor], Any] = lambda i, x: x) -> None:
        self.change, self.length = change, COUNT

    def __len__(self) -> int:
        return self.length

    def __getitem__(self, index: int) -> Any:
        return self.change(index, X[index]), int(Y[index])


def add_noise(index: int, x: Tensor) -> Tensor:
    return x + torch.randn(2) + np.random.normal() + random.random()  # noqa: NPY002


def batches(dataset: Dataset[Any], **options: Any) -> Batches:
    split = make_dataset(dataset, dataset, DataOptions(**options)).train
    return (StreamedBatches if isinstance(split, StreamedSplit) else Batches)(split, 5, dtype=torch.float64)


def same(one: Any, other: Any) -> bool:
    return all(torch.equal(a, b) for a, b in zip(input_tensors(one), input_tensors(other), strict=True))


@pytest.mark.parametrize(
    "change",
    [
        lambda i, x: x,
        lambda i, x: x.numpy(),
        lambda i, x: {"a": x, "ids": torch.tensor([i, i + 1]), "n": float(i)},
        lambda i, x: {"input_ids": [i, i + 1], "mask": [True, False]},
        lambda i, x: (x, np.int64(i)),
        lambda i, x: (x * 100).to(torch.uint8),
    ],
    ids=["tensor", "array", "dict", "dict of lists", "tuple", "pixels"],
)
def test_a_dataset_read_while_training_gives_the_batches_of_one_in_memory(change: Any) -> None:
    memory, streamed = batches(Rows(change)), batches(Rows(change), stream=True)
    assert [type(streamed), type(memory)] == [StreamedBatches, Batches]
    for epoch, step in [(0, 0), (0, 1), (0, 3), (1, 2), (1, 3), (0, 2)]:
        for seeds, streams in [([3, 8], 0), ([3], [2])]:
            ours = streamed.batch_many(seeds, epoch, step, streams=streams)
            theirs = memory.batch_many(seeds, epoch, step, streams=streams)
            assert same(ours, theirs)
    for ours, theirs in zip(streamed.split.chunks(9), memory.split.chunks(9), strict=True):
        assert same(ours, theirs)


def test_random_items_depend_on_seed_epoch_and_index_alone() -> None:
    streamed = batches(Rows(add_noise))
    assert isinstance(streamed, StreamedBatches)  # found to be random, although it fits into memory
    state = torch.get_rng_state(), np.random.get_state()[2], random.getstate()  # noqa: NPY002
    x, _ = streamed.batch_many([3, 8], 1, 2)
    assert torch.equal(torch.get_rng_state(), state[0])
    assert (np.random.get_state()[2], random.getstate()) == state[1:]  # noqa: NPY002
    torch.rand(7)
    alone, _ = batches(Rows(add_noise)).batch_many([8], 1, 2)  # another group of runs, resumed in the middle
    assert torch.equal(x[1], alone[0])
    plain, _ = batches(Rows()).batch_many([8], 1, 2)
    assert not torch.isclose(alone, plain).any()
    noise = {}
    for epoch in (0, 1):
        order = torch.cat([batches(Rows()).batch_many([8], epoch, step)[0][0] for step in range(4)])
        drawn = torch.cat([streamed.batch_many([8], epoch, step)[0][0] for step in range(4)])
        noise[epoch] = {tuple(row.tolist()): value for row, value in zip(order, drawn - order, strict=True)}
    common = noise[0].keys() & noise[1].keys()
    assert len(common) > 10
    assert not any(torch.isclose(noise[0][key], noise[1][key]).any() for key in common)


@pytest.mark.extended
def test_workers_read_the_same_batches() -> None:
    alone, workers = batches(Rows(add_noise)), batches(Rows(add_noise), num_workers=2)
    for epoch, step in [(0, 0), (0, 1), (1, 3)]:
        assert same(alone.batch_many([3, 8], epoch, step), workers.batch_many([3, 8], epoch, step))
    with pytest.raises(DataError, match=r"^Item 7 has tensors of shape \[\(1,\), \(\)\], but item \d+ has"):
        batches(Rows(lambda i, x: x if i != 7 else x[:1]), stream=True, num_workers=2)


GENERATOR = np.random.default_rng(0)


@pytest.mark.parametrize(
    ("dataset", "message"),
    [
        (Rows(lambda i, x: x + GENERATOR.normal()), "returns different values each time, from its own generator"),
        (Rows(lambda i, x: x[: 1 + (i < 9)]), r"Item 9 has tensors of shape \[\(1,\), \(\)\], but item 0 has"),
        (Rows(lambda i, x: 1 / (5 - i)), r"Item 5 of the training Dataset cannot be read \(ZeroDivisionError"),
        (Rows(lambda i, x: "text"), "The training Dataset returns str; return tensors, arrays or numbers"),
        (Rows(lambda i, x: x / (i != 4)), "The training data has NaN or Inf in sample 4; replace such values"),
        ([1, 2, 3], "Expected .* for the training data, but got 3 values"),
        (iter(()), "The training data is .*iterator; give .*, or a map-style Dataset"),
        (torch.utils.data.DataLoader(Rows()), "The training data is DataLoader; give .*a map-style Dataset"),
        (torch.utils.data.Subset(Rows(), []), "The training data has no samples"),
        (X, "The training data is Tensor; give"),
    ],
)
def test_datasets_that_cannot_be_used_are_refused_in_one_sentence(dataset: Any, message: str) -> None:
    with pytest.raises(DataError, match=message) as error:
        make_dataset(dataset, TensorDataset(X, Y), DataOptions())
    assert "\n" not in str(error.value)


@pytest.mark.parametrize(
    ("label", "message"), [(7, "has label 7 in sample 6, outside 0 to 2"), (-1, "has label -1 in sample 6")]
)
def test_labels_are_checked_while_a_dataset_is_read(label: int, message: str) -> None:
    class Changed(Rows):
        classes = ("a", "b", "c")

        def __getitem__(self, index: int) -> Any:
            return X[index], label if index == 6 else int(Y[index])

    dataset = Changed()
    data = make_dataset(dataset, TensorDataset(X, Y), DataOptions(stream=True))
    assert data.class_names == ("a", "b", "c")
    streamed = StreamedBatches(data.train, 5)
    with pytest.raises(DataError, match=message):
        [streamed.batch_many([0], *divmod(step, 4)) for step in range(8)]


def test_known_labels_stratify_the_validation_part_without_reading() -> None:
    class Known(Rows):
        targets = Y.tolist()

    data = make_dataset(Known(add_noise), TensorDataset(X, Y), DataOptions())
    train, validation = random_split(data.train, 6, seed=0)
    assert torch.bincount(validation.y).tolist() == [2, 2, 2]
    assert sorted([*train.indices.tolist(), *validation.indices.tolist()]) == list(range(COUNT))
    unknown = make_dataset(Rows(add_noise), TensorDataset(X, Y), DataOptions(num_classes=3))
    assert len(random_split(unknown.train, 6, seed=0)[1]) == 6
    for targets in (Y.tolist() * 2, ["a"] * COUNT):  # of other items, and names
        Known.targets = targets
        assert make_dataset(Known(add_noise), TensorDataset(X, Y), DataOptions(num_classes=3)).train.y is None
