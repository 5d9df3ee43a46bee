"""From raw numbers to what members are trained on, and back: learnt from training samples alone, weights included."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor, nn

from torchace.lab.data import Split
from torchace.nn import Ensemble, StackedEnsemble


@dataclass(frozen=True)
class Moments:
    """Mean and standard deviation of each column; 1 for columns that do not vary."""

    mean: Tensor  # (D,)
    std: Tensor  # (D,)

    @classmethod
    def of(cls, values: Tensor, weight: Tensor | None) -> Moments:
        """Of a matrix `(N, D)`, in float64; a sample counts by its weight.

        Example:
            >>> Moments.of(torch.tensor([[1.0, 5.0], [3.0, 5.0]]), None)
            Moments(mean=tensor([2., 5.], dtype=torch.float64), std=tensor([1., 1.], dtype=torch.float64))
        """
        share = torch.ones(len(values), dtype=torch.float64) if weight is None else weight.double()
        share = (share / share.sum())[:, None]
        scratch = share * values  # one for everything: a large table is in memory twice, not five times
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

    def scaled(self, values: Tensor) -> Tensor:
        """Values in units of these columns, in float64."""
        return (values - self.mean).div_(self.std)


@dataclass(frozen=True)
class Scaling:
    """How raw vectors, and the targets of a regression, become numbers of about 1."""

    inputs: Moments
    targets: Moments | None

    @classmethod
    def of(cls, train: Split) -> Scaling:
        """Learnt from training samples: `x` `(N, D)`; `y` class indices, or numbers `(N, M)`."""
        targets = Moments.of(train.y, train.weight) if train.y.is_floating_point() else None
        return cls(Moments.of(train.x, train.weight), targets)

    def scaled(self, split: Split, dtype: torch.dtype, device: torch.device | str = "cpu") -> Split:
        """A raw split as members are trained on it."""
        y = split.y if self.targets is None else self.targets.scaled(split.y).to(dtype)
        weight = None if split.weight is None else split.weight.to(dtype)
        return Split(self.inputs.scaled(split.x).to(dtype), y, weight).to(device)


def finished_ensemble(stacked: StackedEnsemble, encoder: nn.Module, targets: Moments | None) -> Ensemble:
    """A trained ensemble that takes raw inputs and answers in the targets' own units, on the CPU in float64.

    Args:
        stacked: The members, trained on encoded inputs.
        encoder: From raw inputs to what the members were trained on.
        targets: What the targets of a regression were scaled by: folded into the members' last layers.
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
