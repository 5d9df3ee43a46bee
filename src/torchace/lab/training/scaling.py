"""Standardisation of inputs and targets, learnt from training samples alone, and its inverse in a trained ensemble."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor, nn

from torchace.lab.data import Split
from torchace.models.encoder import TableEncoder
from torchace.nn import Ensemble, StackedEnsemble


@dataclass(frozen=True)
class Scaler:
    """Mean and standard deviation of each column, `(D,)` in float64; the deviation of a constant column is 1."""

    mean: Tensor
    std: Tensor

    @classmethod
    def fit(cls, values: Tensor, weight: Tensor | None = None) -> Scaler:
        """Return the scaler of a matrix `(N, D)` with sample weights `(N,)`.

        Example:
            >>> Scaler.fit(torch.tensor([[1.0, 5.0], [3.0, 5.0]]))
            Scaler(mean=tensor([2., 5.], dtype=torch.float64), std=tensor([1., 1.], dtype=torch.float64))
        """
        share = torch.ones(len(values), dtype=torch.float64) if weight is None else weight.double()
        share = (share / share.sum())[:, None]
        scratch = share * values  # reused below: a large table is in memory twice, not five times
        mean = scratch.sum(0)
        std = torch.sub(values, mean, out=scratch).square_().mul_(share).sum(0).sqrt()
        highest, lowest = values.amax(0), values.amin(0)
        constant = highest == lowest  # not by std: rounding leaves some of a constant column
        if not ((std > 0) & std.isfinite() | constant).all():  # squares of numbers beyond 1e154 or below 1e-162
            torch.sub(values, mean, out=scratch)
            unit = torch.maximum(highest - mean, mean - lowest)
            unit = torch.where(unit > 0, unit, 1.0)
            std = scratch.div_(unit).square_().mul_(share).sum(0).sqrt_().mul_(unit)
        return cls(mean, torch.where(constant | (std == 0), 1.0, std))

    def transform(self, values: Tensor) -> Tensor:
        return (values - self.mean).div_(self.std)

    def inverse_transform(self, values: Tensor) -> Tensor:
        return values * self.std + self.mean

    def encoder(self) -> TableEncoder:
        """The module that transforms, to be saved with a model."""
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
    """Scalers of a split's inputs and, for regression, of its targets."""

    inputs: Scaler
    targets: Scaler | None

    @classmethod
    def fit(cls, train: Split) -> SplitScaler:
        """Learn from training samples: `x` `(N, D)`; `y` class indices, or numbers `(N, M)`."""
        targets = Scaler.fit(train.y, train.weight) if train.y.is_floating_point() else None
        return cls(Scaler.fit(train.x, train.weight), targets)

    def transform(self, split: Split, dtype: torch.dtype, device: torch.device | str = "cpu") -> Split:
        y = split.y if self.targets is None else self.targets.transform(split.y).to(dtype)
        weight = None if split.weight is None else split.weight.to(dtype)
        return Split(self.inputs.transform(split.x).to(dtype), y, weight).to(device)


def assemble_ensemble(encoder: nn.Module, stacked: StackedEnsemble, targets: Scaler | None) -> Ensemble:
    """Return an ensemble from raw inputs to predictions in the targets' own units, on the CPU in float64.

    Args:
        encoder: Maps raw inputs to the members' inputs.
        stacked: The trained members.
        targets: The scaler of the targets of a regression; its inverse is folded into the members' last layers.
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
