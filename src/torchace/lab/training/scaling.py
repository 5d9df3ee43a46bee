"""Scales of targets, learned scales of inputs and temperatures, and their place in a trained ensemble's weights."""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np
import torch
import torch.nn.functional as F
from numpy.typing import NDArray
from torch import Tensor, nn

from torchace.lab.data.encoding import mean_and_std
from torchace.nn import Ensemble, StackedEnsemble
from torchace.nn.adapters import AdaptedEnsemble

INPUT_RATE = 6.0  # learning rate of an input's scale, relative to that of the weights
COUPLED_INPUT_RATE = 2.0  # the same for λ > 0: coupled members diverge with fast scales
MAX_TEMPERATURE = 5.0


@dataclass(frozen=True)
class Scaler:
    """Mean and standard deviation of each column, `(M,)` in float64; 1 for the deviation of a constant column."""

    mean: Tensor
    std: Tensor

    @classmethod
    def fit(cls, values: NDArray[np.float64], weight: NDArray[np.float64] | None = None) -> Scaler:
        """Scaler of a matrix `(N, M)` with sample weights `(N,)`."""
        statistics = torch.tensor([mean_and_std(column, weight) for column in values.T], dtype=torch.float64)
        return cls(statistics[:, 0], torch.where(statistics[:, 1] > 0, statistics[:, 1], 1.0))

    def transform(self, values: Tensor) -> Tensor:
        """Standardize values `(N, M)`."""
        return (values - self.mean).div_(self.std)

    def inverse_transform(self, values: Tensor) -> Tensor:
        """Convert standardized values to their units."""
        return values * self.std + self.mean


class ScaledLinear(nn.Linear):
    """A linear layer with a learned factor for each input, which starts at 1.

    The factor is `rate` times a parameter, so that Adam changes it as much faster than the weights. It multiplies the
    weights and not the inputs: members that share an input are then one product.
    """

    rate: Tensor

    def __init__(self, linear: nn.Linear, rate: float) -> None:
        super().__init__(linear.in_features, linear.out_features, device="meta")
        self.weight, self.bias = linear.weight, linear.bias
        self.register_buffer("rate", torch.full((1,), rate, dtype=linear.weight.dtype))
        self.scale = nn.Parameter(torch.full((linear.in_features,), 1 / rate, dtype=linear.weight.dtype))

    def forward(self, x: Tensor) -> Tensor:
        """Return the product."""
        return F.linear(x, self.weight * (self.rate * self.scale), self.bias)

    def plain(self) -> nn.Linear:
        """Return an equal layer without factors."""
        linear = nn.Linear(self.in_features, self.out_features, device="meta")  # draws no random numbers
        linear.weight = nn.Parameter((self.weight * (self.rate * self.scale)).detach())
        linear.bias = self.bias
        return linear


class OutputScale(nn.Module):
    """Multiply outputs `(N, C)` by a scale and add a shift, both `(C,)` or `(1,)`."""

    scale: Tensor
    shift: Tensor

    def __init__(self, scale: Tensor, shift: Tensor) -> None:
        super().__init__()
        self.register_buffer("scale", scale.double())
        self.register_buffer("shift", shift.double())

    def forward(self, x: Tensor) -> Tensor:
        """Scale and shift."""
        return x * self.scale + self.shift


def scale_inputs(network: nn.Sequential, diversity: float = 0.0) -> nn.Sequential:
    """Replace the first layer of an `mlp` by one with a learned scale for each input."""
    name, rate = _first_linear(network), COUPLED_INPUT_RATE if diversity > 0 else INPUT_RATE
    setattr(network, name, ScaledLinear(network.get_submodule(name), rate))  # type: ignore[arg-type]
    return network


def _first_linear(network: nn.Sequential) -> str:
    return next(name for name, layer in network.named_children() if isinstance(layer, nn.Linear))


def fit_temperature(logits: Tensor, target: Tensor, weight: Tensor | None = None) -> float:
    """Temperature that minimizes the ensemble's cross entropy, in [1 / `MAX_TEMPERATURE`, `MAX_TEMPERATURE`].

    It divides the logits `(K, N, C)` of each member; rows of NaN are of members that do not predict the sample.
    `target` is `(N,)`, and `weight` too.
    """
    from scipy.optimize import minimize_scalar  # type: ignore[import-untyped]

    predicts = ~logits[..., 0].isnan()  # (K, N)
    index = target[None, :, None].expand(len(logits), -1, -1)
    share = torch.ones_like(logits[0, :, 0]) if weight is None else weight
    share = share / share.sum()

    def cross_entropy(log_temperature: float) -> float:
        log_q = (logits / math.exp(log_temperature)).log_softmax(2).gather(2, index).squeeze(2)
        hits = log_q.masked_fill(~predicts, -torch.inf).logsumexp(0) - predicts.sum(0).double().log()
        return -float((share * hits).sum())

    bound = math.log(MAX_TEMPERATURE)
    return math.exp(minimize_scalar(cross_entropy, bounds=(-bound, bound), method="bounded").x)


def assemble_ensemble(
    encoder: nn.Module, stacked: StackedEnsemble, targets: Scaler | None = None, temperature: float = 1.0
) -> Ensemble:
    """Ensemble from raw inputs to predictions in the targets' units, on the CPU in float64.

    Learned scales of inputs become part of the first layers of an `mlp`; the inverse scaling of regression targets, or
    the temperature that divides logits, of its last. Other networks are followed by an `OutputScale`.
    """
    scaler = targets or Scaler(*(torch.tensor([v], dtype=torch.float64) for v in (0.0, 1 / temperature)))
    std, mean = scaler.std, scaler.mean
    if isinstance(stacked, AdaptedEnsemble):
        stacked = stacked.cpu().double()
        members = [stacked.merge(k) for k in range(stacked.num_members)]  # with each member's factors in its weights
    else:
        members = [member.cpu().double() for member in stacked.unstack()]
    for place, member in enumerate(members):
        last_name, last = next(reversed(list(member.named_children())), ("", None))
        if not isinstance(member, nn.Sequential) or last_name != "fc" or not isinstance(last, nn.Linear):  # no `mlp`
            members[place] = nn.Sequential(member, OutputScale(std, mean))
            continue
        name = _first_linear(member)
        first = member.get_submodule(name)
        if isinstance(first, ScaledLinear):
            setattr(member, name, first.plain())
        with torch.no_grad():
            last.weight.mul_(std[:, None])
            last.bias.mul_(std).add_(mean)
    ensemble = Ensemble(members, trunk=encoder, link=stacked.link)
    ensemble.requires_grad_(False)
    return ensemble.eval()
