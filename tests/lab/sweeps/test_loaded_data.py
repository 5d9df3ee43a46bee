"""Limits of the training data: random samples of files and own data, the first samples of image sets."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch

from torchace.lab.data import load
from torchace.lab.schema.experiment import DataSection
from torchace.lab.sweeps.config import Components
from torchace.lab.sweeps.loaded_data import LoadedData


@pytest.mark.parametrize("suffix", [".csv", ".npz"])
def test_a_limit_of_a_sorted_file_has_all_its_classes(tmp_path: Path, suffix: str) -> None:
    """Class by class in the file: its first rows would have one class, and the test data the others."""
    path, y = tmp_path / f"sorted{suffix}", np.repeat([0, 1, 2, 3], 100)
    x = np.random.default_rng(0).normal(size=(400, 2))
    if suffix == ".npz":
        np.savez(path, x=x, y=y)
    else:
        np.savetxt(path, np.column_stack([x, y]), delimiter=",", header="a,b,y", comments="", fmt=["%f", "%f", "%d"])
    limited = {}
    for limit in (40, 80):
        data = LoadedData.load(DataSection(file=str(path), target="y", limit=limit), "cpu").dataset
        assert data.train.y.bincount(minlength=4).min() >= 3
        assert len(data.train) == limit
        limited[limit] = {tuple(row) for row in data.train.x.tolist()}
    assert limited[40] < limited[80]
    again = LoadedData.load(DataSection(file=str(path), target="y", limit=40), "cpu").dataset
    assert {tuple(row) for row in again.train.x.tolist()} == limited[40]


def test_a_limit_of_an_image_set_has_its_first_images() -> None:
    data = LoadedData.load(DataSection(name="digits", limit=50), "cpu").dataset
    assert torch.equal(data.train.x, load("digits").train.x[:50])


@pytest.mark.parametrize(
    ("train", "test", "options", "message"),
    [
        ([0, 1, 2], [0, 1, 1], {}, "The test data has no sample of the class '2';"),
        ([0, 2, 2], [0, 1, 2], {}, "The training data has no sample of the class '1';"),
        ([0, 0, 0, 1, 2], [0, 1, 2], {"validation": 0.6}, "The training data has no sample of the class '1';"),
        ([0, 0, 1, 0, 2], [0, 1, 2], {"limit": 4}, "The training data has no sample of the class '1';"),
    ],
    ids=["test", "training", "taken for validation", "left out by the limit"],
)
def test_a_class_without_samples_is_noted(
    train: list[int], test: list[int], options: dict[str, float], message: str
) -> None:
    parts = tuple((torch.eye(len(y), 6), torch.tensor(y)) for y in (train, test))
    with pytest.warns(UserWarning, match=message):
        data = LoadedData.load(DataSection(name="given", **options), "cpu", Components(data=parts))
    assert data.summary().notes[0].startswith(message)
