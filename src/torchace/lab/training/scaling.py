"""Standardisation of inputs and targets, and its inverse in a trained ensemble."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor, nn

from torchace.lab.data import Split
from torchace.models.encoder import TableEncoder
from torchace.nn import Ensemble, StackedEnsemble


@dataclass(frozen=True)
class Scaler:
    """Mean and standard deviation of each column, `(D,)` in float64; 1 for the deviation of a constant column."""

    mean: Tensor
    std: Tensor

    @classmethod
    def fit(cls, values: Tensor, weight: Tensor | None = None) -> Scaler:
        """Scaler of a matrix `(N, D)` with sample weights `(N,)`."""
        share = torch.ones(len(values), dtype=torch.float64) if weight is None else weight.double()
        share = (share / share.sum())[:, None]
        scratch = share * values  # reused below to save memory
        mean = scratch.sum(0)
        std = torch.sub(values, mean, out=scratch).square_().mul_(share).sum(0).sqrt()
        highest, lowest = values.amax(0), values.amin(0)
        constant = highest == lowest  # std is not exactly 0 after rounding
        if not ((std > 0) & std.isfinite() | constant).all():  # squares over- or underflow
            torch.sub(values, mean, out=scratch)
            unit = torch.maximum(highest - mean, mean - lowest)
            unit = torch.where(unit > 0, unit, 1.0)
            std = scratch.div_(unit).square_().mul_(share).sum(0).sqrt_().mul_(unit)
        return cls(mean, torch.where(constant | (std == 0), 1.0, std))

    def transform(self, values: Tensor) -> Tensor:
        """Standardise values `(N, D)`."""
        return (values - self.mean).div_(self.std)

    def inverse_transform(self, values: Tensor) -> Tensor:
        """Convert standardised values to their units."""
        return values * self.std + self.mean

    def encoder(self) -> TableEncoder:
        """Module that transforms, saved with a model."""
        columns = list(range(len(self.mean)))
        return TableEncoder.from_values(
            num_columns=len(columns),
            mean=self.mean.tolist(),
            std=self.std.tolist(),
            number_columns=columns,
            indicator_columns=[],
            code_columns=[],
            codes=[],
        ).double()


@dataclass(frozen=True)
class SplitScaler:
    """Scalers of inputs and, for regression, of targets."""

    inputs: Scaler
    targets: Scaler | None

    @classmethod
    def fit(cls, train: Split) -> SplitScaler:
        """Learn from training samples: `x` `(N, D)`; `y` class indices, or numbers `(N, M)`."""
        targets = Scaler.fit(train.y, train.weight) if train.y.is_floating_point() else None
        return cls(Scaler.fit(train.x, train.weight), targets)

    def transform(self, split: Split, dtype: torch.dtype, device: torch.device | str = "cpu") -> Split:
        """Standardise a split, in `dtype` on `device`."""
        y = split.y if self.targets is None else self.targets.transform(split.y).to(dtype)
        weight = None if split.weight is None else split.weight.to(dtype)
        return Split(self.inputs.transform(split.x).to(dtype), y, weight).to(device)


def assemble_ensemble(encoder: nn.Module, stacked: StackedEnsemble, targets: Scaler | None) -> Ensemble:
    """Ensemble from raw inputs to predictions in the targets' units, on the CPU in float64.

    The inverse scaling of regression targets is folded into the members' last layers.
    """
    members = [member.cpu().double() for member in stacked.unstack()]
    if targets is not None:
        with torch.no_grad():
            for member in members:
                last = member.get_submodule("fc")
                last.weight.mul_(targets.std[:, None])  # type: ignore[operator]
                last.bias.mul_(targets.std).add_(targets.mean)  # type: ignore[operator]
    ensemble = Ensemble(members, trunk=encoder, link=stacked.link)
    ensemble.requires_grad_(False)
    return ensemble.eval()
