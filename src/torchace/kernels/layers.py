"""What the kernels of residual networks take: the layers of R runs, each tensor with the run axis first."""

from __future__ import annotations

from typing import NamedTuple

from torch import Tensor


class Norm(NamedTuple):
    """Batch norms: parameters and running statistics, `(R, C)` each."""

    weight: Tensor
    bias: Tensor
    running_mean: Tensor
    running_var: Tensor
    momentum: float
    eps: float


class Layer(NamedTuple):
    """Convolutions without bias, `(R, C', C, size, size)`, and the batch norms after them."""

    weight: Tensor
    norm: Norm

    @property
    def trained(self) -> tuple[Tensor, Tensor, Tensor]:
        return self.weight, self.norm.weight, self.norm.bias
