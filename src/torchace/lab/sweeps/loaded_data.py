"""A data set as an arm asks for it: limited, split, on the device."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

import torch
from torch import Tensor

from torchace.lab.data import Batches, CropFlip, Dataset, Split, chunks, load
from torchace.lab.schema.experiment import Arm, DataSection
from torchace.lab.sweeps.config import ConfigError

EVALUATION_CHUNK = 2000


@dataclass(frozen=True)
class LoadedData:
    """A data set, and what of it is trained on, held out and shown."""

    dataset: Dataset
    section: DataSection
    validation: Split | None
    device: str

    @classmethod
    def load(cls, section: DataSection, device: str) -> LoadedData:
        """Loads a data set. What does not fit it is an error that names the key."""
        dataset, validation = load(section.name), None
        if section.limit is not None:
            if section.limit > len(dataset.train):
                raise ConfigError(
                    f"data.limit: {section.name} has {len(dataset.train)} training samples, but got {section.limit}."
                )
            dataset = dataset.limit(section.limit)
        if section.validation:
            held_out = round(section.validation * len(dataset.train))
            if not 0 < held_out < len(dataset.train):
                raise ConfigError(
                    f"data.validation: {section.validation:g} of {len(dataset.train)} training samples leaves "
                    "nothing to hold out or nothing to train on."
                )
            train, validation = dataset.validation_split(held_out, seed=0)
            dataset = replace(dataset, train=train)
        return cls(dataset, section, validation, device)

    @cached_property
    def images(self) -> Tensor:
        """The test images as uint8, for people to look at."""
        pixels = self.dataset.test.x
        if self.dataset.max_value != 255:
            pixels = (pixels.float() * (255 / self.dataset.max_value)).round().clamp(0, 255).to(torch.uint8)
        return pixels.to(self.device)

    def described(self) -> dict[str, Any]:
        """The data set in a result file."""
        channels, *size = self.dataset.image_shape
        return {
            "name": self.dataset.name,
            "train": len(self.dataset.train),
            "validation": 0 if self.validation is None else len(self.validation),
            "test": len(self.dataset.test),
            "classes": list(self.dataset.class_names),
            "image_shape": [*size] if channels == 1 else [*size, channels],
            "schema": None,
        }

    def check_batch_size(self, arm: Arm) -> None:
        available = len(self.dataset.train)
        if arm.train.batch_size > available:
            raise ConfigError(
                f"train.batch_size: there are {available} training samples, but got {arm.train.batch_size}."
            )

    def batches(self, arm: Arm) -> Batches:
        """What an arm is trained on."""
        return Batches(
            self.dataset.train,
            arm.train.batch_size,
            device=self.device,
            augment=CropFlip() if self.section.augment else None,
            **self._form(arm),
        )

    def chunks(self, arm: Arm, split: Split) -> Iterable[tuple[Tensor, Tensor]]:
        """A split as an arm's network takes it, in order."""
        return chunks(split, EVALUATION_CHUNK, device=self.device, **self._form(arm))

    def _form(self, arm: Arm) -> dict[str, Any]:
        return {
            "normalize": self.dataset.normalization(self.section.normalize),
            "dtype": torch.float64 if arm.train.precision == "float64" else torch.float32,
        }
