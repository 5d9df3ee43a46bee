"""SMOC and its heads: K linear classifiers on one feature vector."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any, ClassVar

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from torchace import _checks
from torchace.functional import average_gradients
from torchace.nn.base import BATCHES, EnsembleModule, average_shared_gradients, check_own_batches, separate_features
from torchace.nn.optimizers import watch_optimizers


class MemberHeads(nn.Module):
    """Base class of K linear layers from D to C features."""

    stacked_names: ClassVar[tuple[str, ...]]  # of the parameters with a member axis
    _compute: Callable[..., Tensor]

    def __init__(self, in_features: int, out_features: int, num_members: int) -> None:
        super().__init__()
        sizes = {"in_features": in_features, "out_features": out_features, "num_members": num_members}
        for name, size in sizes.items():
            _checks.check_count(size, name)
        self.in_features, self.out_features, self.num_members = in_features, out_features, num_members
        watch_optimizers(self, self.stacked_names)

    def __setstate__(self, state: dict[str, Any]) -> None:  # for copies
        super().__setstate__(state)  # type: ignore[no-untyped-call]
        watch_optimizers(self, self.stacked_names)

    def forward(self, x: Tensor, batches: str = "shared") -> Tensor:
        """Map `(..., D)` to `(K, ..., C)`; with `batches="separate"` the input is `(K, ..., D)`."""
        if not isinstance(x, Tensor) or x.shape[-1:] != (self.in_features,):  # a reshape would regroup numbers
            got = tuple(x.shape) if isinstance(x, Tensor) else type(x).__name__
            raise ValueError(
                f"Expected features of shape (..., {self.in_features}), one tensor, for heads with "
                f"in_features={self.in_features}, but got {got}."
            )
        _checks.check_choice(batches, "batches", BATCHES)
        if batches == "separate":
            check_own_batches([x], self.num_members)
        return self._compute(x, separate=batches == "separate")

    def flat(self, x: Tensor) -> Tensor:
        """Return all members' outputs on one axis, `(..., K·C)`."""
        return self(x).movedim(0, -2).flatten(-2)

    def extra_repr(self) -> str:
        """Return the sizes."""
        names = ("in_features", "out_features", "num_members", *(["rank"] if hasattr(self, "rank") else []))
        return ", ".join(f"{name}={getattr(self, name)}" for name in names) + f", bias={self.bias is not None}"


class StackedLinear(MemberHeads):
    """K linear layers computed as one matrix product.

    Weights are drawn in the order of K `nn.Linear` layers created one after another: the same seed gives the same ones.

    Args:
        in_features: D.
        out_features: C.
        num_members: K.
        bias: Whether the layers have biases.
        device: Device of the parameters.
        dtype: Type of the parameters.

    Attributes:
        weight: `(K, C, D)`.
        bias: `(K, C)`.

    Example:
        >>> StackedLinear(4, 3, num_members=2)(torch.zeros(5, 4)).shape
        torch.Size([2, 5, 3])
    """

    stacked_names = ("weight", "bias")

    def __init__(
        self,
        in_features: int,
        out_features: int,
        num_members: int,
        bias: bool = True,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__(in_features, out_features, num_members)
        self.weight = nn.Parameter(torch.empty(num_members, out_features, in_features, device=device, dtype=dtype))
        self.bias = nn.Parameter(torch.empty(num_members, out_features, device=device, dtype=dtype)) if bias else None
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Draw new weights, as K `nn.Linear` layers would."""
        if self.weight.is_meta:
            return
        bound = 1 / math.sqrt(self.in_features)  # equals nn.Linear's kaiming_uniform_(a=√5)
        for k in range(self.num_members):
            nn.init.kaiming_uniform_(self.weight[k], a=math.sqrt(5))
            if self.bias is not None:
                nn.init.uniform_(self.bias[k], -bound, bound)

    def _compute(self, x: Tensor, *, separate: bool) -> Tensor:
        if not separate:
            return self.flat(x).unflatten(-1, (self.num_members, self.out_features)).movedim(-2, 0)
        rows, weight = x.reshape(self.num_members, -1, x.shape[-1]), self.weight.mT  # (K, M, D), (K, D, C)
        out = rows @ weight if self.bias is None else torch.baddbmm(self.bias[:, None], rows, weight)
        return out.reshape(*x.shape[:-1], self.out_features)

    def flat(self, x: Tensor) -> Tensor:
        """Return all members' outputs on one axis, `(..., K·C)`."""
        return F.linear(x, self.weight.flatten(0, 1), None if self.bias is None else self.bias.flatten())


class LowRankStackedLinear(MemberHeads):
    r"""K linear layers that share one matrix and differ by a matrix of low rank.

    $$W^k = W + U^k V^k, \qquad U^k \in \mathbb{R}^{C \times r},\; V^k \in \mathbb{R}^{r \times D}$$

    It has K·r·(C+D) parameters more than one `nn.Linear`; `StackedLinear` has (K-1)·C·D more. The initial entries of
    $W^k$ have the variance of `nn.Linear`'s, half of it from W. W receives the mean of the members' gradients.

    Args:
        in_features: D.
        out_features: C.
        num_members: K.
        rank: r, at most min(C, D).
        bias: Whether there is a bias, which the members share.
        device: Device of the parameters.
        dtype: Type of the parameters.

    Example:
        >>> LowRankStackedLinear(64, 1000, num_members=5, rank=4)(torch.zeros(2, 64)).shape
        torch.Size([5, 2, 1000])
    """

    stacked_names = ("left", "right")

    def __init__(
        self,
        in_features: int,
        out_features: int,
        num_members: int,
        rank: int,
        bias: bool = True,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__(in_features, out_features, num_members)
        _checks.check_count(rank, "rank")
        if rank > min(in_features, out_features):
            raise ValueError(
                f"Expected `rank` of at most {min(in_features, out_features)}, the smaller side of the matrix, "
                f"but got {rank}. A full-rank difference is StackedLinear."
            )
        self.rank = rank
        kind: dict[str, Any] = {"device": device, "dtype": dtype}
        self.weight = nn.Parameter(torch.empty(out_features, in_features, **kind))  # W
        self.bias = nn.Parameter(torch.empty(out_features, **kind)) if bias else None
        self.left = nn.Parameter(torch.empty(num_members, out_features, rank, **kind))  # U
        self.right = nn.Parameter(torch.empty(num_members, rank, in_features, **kind))  # V
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Draw new weights."""
        # nn.Linear draws from uniform(-b, b), b = 1/√D, variance b²/3. Here W has half of it, and the r products
        # in an entry of U V the other half: variance of V b²/3, of U 1/(2r).
        bound = 1 / math.sqrt(self.in_features)
        nn.init.uniform_(self.weight, -bound / math.sqrt(2), bound / math.sqrt(2))
        nn.init.uniform_(self.right, -bound, bound)
        nn.init.uniform_(self.left, -math.sqrt(1.5 / self.rank), math.sqrt(1.5 / self.rank))
        if self.bias is not None:
            nn.init.uniform_(self.bias, -bound, bound)

    def _compute(self, x: Tensor, *, separate: bool) -> Tensor:
        if separate:
            inner = x.reshape(self.num_members, -1, x.shape[-1]) @ self.right.mT  # (K, M, r)
        else:
            inner = F.linear(x.reshape(-1, self.in_features), self.right.flatten(0, 1))  # (M, K·r)
            inner = inner.unflatten(-1, (self.num_members, self.rank)).movedim(-2, 0)
        weight = average_gradients(self.weight, self.num_members)
        bias = None if self.bias is None else average_gradients(self.bias, self.num_members)
        shared = F.linear(x, weight, bias)  # (..., C), or (K, ..., C)
        samples = x.shape[1:-1] if separate else x.shape[:-1]
        return shared + (inner @ self.left.mT).reshape(self.num_members, *samples, self.out_features)


def make_head(
    in_features: int, out_features: int, num_members: int, rank: int | None, **kwargs: Any
) -> StackedLinear | LowRankStackedLinear:
    """Return K heads, of full rank or, if a rank is given, with one shared matrix."""
    if rank is None:
        return StackedLinear(in_features, out_features, num_members, **kwargs)
    return LowRankStackedLinear(in_features, out_features, num_members, rank, **kwargs)


class SMOC(EnsembleModule):
    """Stacked Mixture Of Classifiers: one trunk, K linear classifiers on its features (the paper's Algorithm 2).

    The trunk is computed once, forward and backward, and receives the mean of the classifiers' gradients.
    Linear heads that see the same features converge to each other for every λ < 1: check their `disagreement`.
    Members of `branch` differ in more layers.

    Args:
        trunk: Maps an input to features `(N, D)`.
        in_features: D.
        num_classes: C.
        num_members: K.
        rank: Rank of the matrix by which members differ (`LowRankStackedLinear`); full rank if None.
        link: `"softmax"`, `"sigmoid"` for binary and multi-label outputs, `"identity"` for regression.

    Example:
        >>> smoc = SMOC(nn.Sequential(nn.Linear(4, 8), nn.ReLU()), 8, num_classes=3, num_members=10)
        >>> smoc(torch.zeros(5, 4)).shape
        torch.Size([10, 5, 3])
    """

    def __init__(
        self,
        trunk: nn.Module,
        in_features: int,
        num_classes: int,
        num_members: int,
        rank: int | None = None,
        link: str = "softmax",
    ) -> None:
        super().__init__(num_members, link)
        self.trunk = trunk
        self.head = make_head(in_features, num_classes, num_members, rank)

    @classmethod
    def from_parts(cls, trunk: nn.Module, head: StackedLinear | LowRankStackedLinear, link: str = "softmax") -> SMOC:
        """Return an SMOC with an existing trunk and heads."""
        smoc = cls.__new__(cls)
        EnsembleModule.__init__(smoc, head.num_members, link)
        smoc.trunk, smoc.head = trunk, head
        return smoc

    def forward(self, *args: Any, batches: str = "shared", **kwargs: Any) -> Tensor:
        """Return the members' logits, `(K, N, C)`.

        Args:
            *args: Input of the trunk.
            batches: `"shared"`: one input for all members. `"separate"`: one batch for each member, `(K, N, ...)`.
            **kwargs: Input of the trunk.
        """
        _checks.check_choice(batches, "batches", BATCHES)
        if batches == "shared":
            return self.head(average_shared_gradients(self.trunk(*args, **kwargs), self.num_members))
        return self.head(separate_features(self.trunk, args, self.num_members, **kwargs), batches="separate")
