"""The data set of an arm: limited, split, on a device."""

from __future__ import annotations

import warnings
from collections.abc import Iterable
from dataclasses import dataclass, replace
from functools import cached_property, partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor

from torchace._files import error_reason
from torchace.lab.data import Batches, CropFlip, Dataset, chunks, load
from torchace.lab.data.batches import BatchTransform
from torchace.lab.data.map_datasets import StreamedBatches, StreamedSplit
from torchace.lab.data.own_data import DataOptions, make_dataset, read_data_file
from torchace.lab.data.splits import (
    Inputs,
    find_missing_classes,
    input_tensors,
    map_inputs,
    random_split,
    random_subset,
)
from torchace.lab.schema.experiment import Arm, DataSection
from torchace.lab.schema.reading import GIVEN
from torchace.lab.schema.results import DataSummary
from torchace.lab.sweeps.config import Components, ConfigError
from torchace.lab.sweeps.fingerprint import object_name, tensor_digest
from torchace.lab.training.evaluate import ValidationSet

EVALUATION_CHUNK = 2000
HASHED_ITEMS = 64  # of a Dataset that is read while training


@dataclass(frozen=True)
class LoadedData:
    """A data set with a validation split."""

    dataset: Dataset
    section: DataSection
    validation: Any  # like the training data, or None
    device: str
    transform: BatchTransform | None = None

    @classmethod
    def load(cls, section: DataSection, device: str, components: Components | None = None) -> LoadedData:
        """Load the data of a section."""
        components = components or Components()
        dataset = _load_dataset(section, device, components)
        validation = dataset.validation
        if section.limit is not None:
            if section.limit > len(dataset.train):
                raise ConfigError(
                    f"data.limit: expected at most {len(dataset.train)}, the training samples of {dataset.name}, "
                    f"but got {section.limit}."
                )
            # files may be sorted; image sets are shuffled, and results with their first images are published
            if section.name != GIVEN and section.file is None and section.factory is None:
                train = dataset.train.take(slice(section.limit))
            else:
                train = random_subset(dataset.train, section.limit, seed=0)
            dataset = replace(dataset, train=train)
        if section.validation:
            if validation is not None:
                raise ConfigError(
                    f"data.validation: expected no fraction, because {dataset.name} has validation data, but got "
                    f"{section.validation:g}."
                )
            available = len(dataset.train)
            size = round(section.validation * available)
            if not 0 < size < available:
                raise ConfigError(
                    f"data.validation: expected a fraction that leaves samples to validate and to train on, but got "
                    f"{section.validation:g} of {available} training samples."
                )
            train, validation = random_split(dataset.train, size, seed=0)
            dataset = replace(dataset, train=train)
        if dataset.task == "classification":
            notes = find_missing_classes(dataset.train.y, dataset.test.y, dataset.class_names)
            dataset = replace(dataset, notes=tuple(notes))
            for note in notes:
                warnings.warn(note, stacklevel=2)
        transform = None if components.transform is None else BatchTransform(components.transform)
        return cls(dataset, section, validation, device, transform)

    @cached_property
    def images(self) -> Tensor | None:
        """Test images as uint8, for the report; None for other samples."""
        pixels, scale = self.dataset.test.x, self.dataset.max_value
        if self.dataset.image_shape is None or isinstance(self.dataset.test, StreamedSplit):
            return None
        if scale is None and (pixels.min() < 0 or pixels.max() > 1):  # normalized already
            return None
        return (pixels.float() * (255 / (scale or 1))).round().clamp(0, 255).to(self.device, torch.uint8)

    def summary(self) -> DataSummary:
        """Return the description for result files."""
        shape = None
        if self.dataset.image_shape is not None:
            channels, *size = self.dataset.image_shape
            shape = tuple(size) if channels == 1 else (*size, channels)
        return DataSummary(
            name=self.dataset.name,
            train=len(self.dataset.train),
            validation=0 if self.validation is None else len(self.validation),
            test=len(self.dataset.test),
            classes=tuple(self.dataset.class_names),
            image_shape=shape,
            inputs=_describe_inputs(self.dataset.train.x),
            notes=self.dataset.notes,
        )

    def example(self, arm: Arm) -> tuple[Any, Tensor]:
        """Return a few training samples as the network receives them, on the CPU, with their targets."""
        x, y = next(iter(self.chunks(arm, self.dataset.train.take(slice(0, 4)))))
        return map_inputs(Tensor.cpu, x), y.cpu()

    def test_targets(self) -> Tensor:
        """Return the targets of the test data, or of its first samples if it is read while training."""
        test = self.dataset.test
        return next(test.chunks(EVALUATION_CHUNK))[1] if isinstance(test, StreamedSplit) else test.y

    def fingerprint(self) -> dict[str, Any]:
        """Return shapes, types and a hash of the data, for the run directory."""
        digests = {}
        for name in ("train", "test", "validation"):
            split = getattr(self.dataset, name)
            if split is None:
                continue
            if isinstance(split, StreamedSplit):  # a sample: reading all of it may take long
                rows = torch.linspace(0, len(split) - 1, min(len(split), HASHED_ITEMS)).long()
                x, y = next(split.take(rows).chunks(HASHED_ITEMS))
                digests[name] = tensor_digest([torch.tensor(len(split)), *input_tensors(x), y])
            else:
                digests[name] = tensor_digest([*input_tensors(split.x), split.y])
        return digests

    def batches(self, arm: Arm) -> Batches:
        """Return the training batches of an arm."""
        kind = StreamedBatches if isinstance(self.dataset.train, StreamedSplit) else Batches
        return kind(
            self.dataset.train,
            min(arm.train.batch_size, len(self.dataset.train)),
            device=self.device,
            augment=CropFlip() if self.section.augment else None,
            **self._format(arm),
        )

    def chunks(self, arm: Arm, split: Any, size: int = EVALUATION_CHUNK) -> Iterable[tuple[Inputs, Tensor]]:
        """Return a split in order, in chunks."""
        return chunks(split, size, device=self.device, **self._format(arm))

    def validation_set(self, arm: Arm) -> ValidationSet | None:
        """Return the samples for early stopping of an arm."""
        if arm.train.patience is None or self.validation is None:
            return None
        split = SimpleNamespace(weight=self.validation.weight, chunks=partial(self.chunks, arm, self.validation))
        return ValidationSet(split, arm.train.patience)

    def _format(self, arm: Arm) -> dict[str, Any]:
        dtype = torch.float64 if arm.train.precision == "float64" else torch.float32
        normalize = self.dataset.normalization(self.section.normalize)
        return {"normalize": normalize, "transform": self.transform, "dtype": dtype}


def _load_dataset(section: DataSection, device: str, components: Components) -> Dataset:
    """Load built-in data, a file, the data of a function, or the data given."""
    if section.name != GIVEN and section.file is None and components.data is None:
        return load(section.name)
    options = DataOptions(
        section.task, section.target, section.num_classes, device, section.stream, section.num_workers
    )
    if section.file is not None:
        train, test, validation = read_data_file(
            section.file,
            target=section.target,
            test_file=section.test_file,
            test=section.test,
            task=section.task,
            validation_file=section.validation_file,
        )
        return make_dataset(train, test, options, Path(section.file).name, validation)
    given, name = components.data, "own data"
    if callable(given) and not hasattr(given, "__getitem__"):
        name = object_name(given).partition(":")[2]
        try:
            given = given(**section.arguments)
        except Exception as error:  # the user's code may raise anything
            reason = f"{type(error).__name__}: {error_reason(error)}"
            raise ConfigError(f"data.factory: {name} failed with {reason}.") from error
    if not isinstance(given, tuple | list) or len(given) not in (2, 3):
        raise ConfigError(
            f"data.factory: expected {name} to return (train, test) or (train, validation, test), but it returned "
            f"{type(given).__name__}{f' of {len(given)}' if isinstance(given, tuple | list) else ''}."
        )
    train, *validation, test = given
    return make_dataset(train, test, options, name, *validation)


def _describe_inputs(x: Inputs) -> tuple[str, ...]:
    """Describe the samples of each input, such as "tokens: 128 of int64"."""
    names = [f"{name}: " for name in x] if isinstance(x, dict) else [""] * len(input_tensors(x))
    sizes = [" × ".join(map(str, t.shape[1:])) or "1" for t in input_tensors(x)]
    types = [str(t.dtype).removeprefix("torch.") for t in input_tensors(x)]
    return tuple(f"{name}{size} of {kind}" for name, size, kind in zip(names, sizes, types, strict=True))
