"""The data set of an arm: limited, split, on a device."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

import torch
from torch import Tensor

from torchace.lab.data import Batches, CropFlip, Dataset, Split, chunks, load
from torchace.lab.data.inputs import input_tensors, map_inputs
from torchace.lab.schema.experiment import GIVEN, Arm, DataSection
from torchace.lab.schema.results import DataSummary
from torchace.lab.sweeps.components import Components, tensor_digest
from torchace.lab.sweeps.config import ConfigError

EVALUATION_CHUNK = 2000


@dataclass(frozen=True)
class LoadedData:
    """A data set with a validation split."""

    dataset: Dataset
    section: DataSection
    validation: Split | None
    device: str

    @classmethod
    def load(cls, section: DataSection, device: str, components: Components | None = None) -> LoadedData:
        """Load the data set of a section."""
        given = None if components is None else components.data
        given = given(**section.arguments) if callable(given) else given
        dataset, validation = load(section.name) if given is None else _given_dataset(given), None
        if section.limit is not None:
            if section.limit > len(dataset.train):
                raise ConfigError(
                    f"data.limit: expected at most {len(dataset.train)}, the training samples of {section.name}, "
                    f"but got {section.limit}."
                )
            dataset = dataset.limit(section.limit)
        if section.validation:
            size = round(section.validation * len(dataset.train))
            if not 0 < size < len(dataset.train):
                raise ConfigError(
                    f"data.validation: expected a fraction that leaves samples to validate and to train on, but got "
                    f"{section.validation:g} of {len(dataset.train)} training samples."
                )
            train, validation = dataset.validation_split(size, seed=0)
            dataset = replace(dataset, train=train)
        return cls(dataset, section, validation, device)

    @cached_property
    def images(self) -> Tensor:
        """Test images as uint8, for the report."""
        pixels = self.dataset.test.x
        if self.dataset.max_value != 255:
            pixels = (pixels.float() * (255 / self.dataset.max_value)).round().clamp(0, 255).to(torch.uint8)
        return pixels.to(self.device)

    def summary(self) -> DataSummary:
        """Return the description for result files."""
        channels, *size = self.dataset.image_shape
        return DataSummary(
            name=self.dataset.name,
            train=len(self.dataset.train),
            validation=0 if self.validation is None else len(self.validation),
            test=len(self.dataset.test),
            classes=tuple(self.dataset.class_names),
            image_shape=tuple(size) if channels == 1 else (*size, channels),
        )

    @property
    def num_outputs(self) -> int:
        """Outputs of a member: classes, or targets of a sample."""
        return self.section.num_classes or self.dataset.num_classes

    def example(self, arm: Arm) -> tuple[Any, Tensor]:
        """Return a few training samples as the network receives them, on the CPU, with their targets."""
        x, y = next(iter(self.chunks(arm, self.dataset.train.take(slice(0, 4)))))
        return map_inputs(Tensor.cpu, x), y.cpu()

    def fingerprint(self) -> dict[str, Any]:
        """Return shapes, types and a hash of the data, for the run directory."""
        splits = {"train": self.dataset.train, "test": self.dataset.test}
        return {name: tensor_digest([*input_tensors(split.x), split.y]) for name, split in splits.items()}

    def check_batch_size(self, arm: Arm) -> None:
        """Refuse batches larger than the training set."""
        available = len(self.dataset.train)
        if arm.train.batch_size > available:
            raise ConfigError(
                f"train.batch_size: expected at most {available}, the training samples, but got {arm.train.batch_size}."
            )

    def batches(self, arm: Arm) -> Batches:
        """Return the training batches of an arm."""
        augment = CropFlip() if self.section.augment else None
        size = arm.train.batch_size
        return Batches(self.dataset.train, size, device=self.device, augment=augment, **self._format(arm))

    def chunks(self, arm: Arm, split: Split) -> Iterable[tuple[Tensor, Tensor]]:
        """Return a split in order, in chunks."""
        return chunks(split, EVALUATION_CHUNK, device=self.device, **self._format(arm))

    def _format(self, arm: Arm) -> dict[str, Any]:
        dtype = torch.float64 if arm.train.precision == "float64" else torch.float32
        if self.section.name == GIVEN:
            return {"dtype": dtype}
        return {"normalize": self.dataset.normalization(self.section.normalize), "dtype": dtype}


def _given_dataset(data: Any) -> Dataset:
    (x, y), (test_x, test_y) = data
    train, test = Split(torch.as_tensor(x), torch.as_tensor(y)), Split(torch.as_tensor(test_x), torch.as_tensor(test_y))
    classes = tuple(str(label) for label in range(int(max(train.y.max(), test.y.max())) + 1))
    return Dataset("data", train, test, classes, (1, 1, 1), 255, (0.0,), (1.0,))
