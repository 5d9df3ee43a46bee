"""Resolved options of the amended cross entropy, shared by all backends, and where Triton kernels run."""

from __future__ import annotations

import importlib.util
import math
from dataclasses import dataclass, fields
from functools import cache
from typing import Any

import torch
from torch import Tensor

from torchace import _checks

TRITON = importlib.util.find_spec("triton") is not None and torch.version.hip is None
OLDEST = (8, 0)  # least compute capability


def runs_kernels(device: torch.device) -> bool:
    """Whether Triton is installed and supports this NVIDIA GPU, which `torch.compile` cannot query."""
    return device.type == "cuda" and TRITON and (torch.compiler.is_compiling() or _is_new(device))


@cache
def _is_new(device: torch.device) -> bool:
    return torch.cuda.get_device_capability(device) >= OLDEST


@dataclass(eq=False)  # a dataclass: torch.compile traces its methods in every supported version
class LossOptions:
    """Options of the loss of logits `(R, K, N, C)`; axes of size 1 are broadcast.

    Floating-point tensors have the compute dtype. Only probabilities in `target` may receive a gradient.
    """

    target: Tensor  # class indices (R, N), or probabilities (R, N, C)
    diversity: float | Tensor  # λ: a number for all runs, or (R,)
    alpha: Tensor | None = None  # (K,); None: 1/K
    weight: Tensor | None = None  # class weights, (C,)
    mixture: Tensor | None = None  # Σ_j α^j q^j computed elsewhere, (R, N, C)
    scale: float | Tensor = 1.0  # factor of a sample's loss: a number, (R, N) or (R, K, N)
    label_smoothing: float | Tensor = 0.0  # a number for all runs, or (R,)
    ignore_index: int | None = None
    reduction: str = "sum"  # over samples
    detach_others: bool = True

    @property
    def has_probabilities(self) -> bool:
        """Whether the target holds class probabilities."""
        return self.target.is_floating_point()

    @property
    def diversity_is_zero(self) -> bool:
        """Whether λ is known to be zero without reading a tensor."""
        return not isinstance(self.diversity, Tensor) and self.diversity == 0

    @property
    def has_smoothing(self) -> bool:
        """Whether label smoothing may be above zero, without reading a tensor."""
        return isinstance(self.label_smoothing, Tensor) or self.label_smoothing != 0

    def smoothing(self, ndim: int) -> float | Tensor:
        """Return the label smoothing, broadcast against a tensor of `ndim` axes whose first is that of the runs."""
        smoothing = self.label_smoothing
        return smoothing.view(-1, *[1] * (ndim - 1)) if isinstance(smoothing, Tensor) else smoothing

    def replace(self, **changes: Any) -> LossOptions:
        """Return a copy with other values."""
        return LossOptions(**{**{name: getattr(self, name) for name in FIELDS}, **changes})

    def samples(self, part: slice) -> LossOptions:
        """Return the options of some samples."""
        scale = self.scale
        if isinstance(scale, Tensor) and scale.shape[-1] > 1:
            scale = scale[..., part]
        mixture = None if self.mixture is None else self.mixture[:, part]
        return self.replace(target=self.target[:, part], scale=scale, mixture=mixture)

    def weighted_target(self, num_classes: int, dtype: torch.dtype) -> Tensor:
        """Weighted target w∘p after label smoothing, `(R, N, C)`."""
        p = self.target
        if not self.has_probabilities:
            p = (p.unsqueeze(2) == torch.arange(num_classes, device=p.device)).to(dtype)
        if self.has_smoothing:
            smoothing = self.smoothing(3)
            p = p * (1 - smoothing) + smoothing / num_classes
        return p if self.weight is None else p * self.weight


FIELDS = tuple(field.name for field in fields(LossOptions))


def compute_dtype(tensor: Tensor) -> torch.dtype:
    """Dtype to compute in: float32 for half precision, else the tensor's dtype."""
    return torch.float32 if tensor.dtype in (torch.float16, torch.bfloat16) else tensor.dtype


def fold_mean(options: LossOptions, dtype: torch.dtype) -> tuple[LossOptions, float | Tensor | None]:
    """Move `ignore_index` and a mean over samples into `scale`, so that the loss is a plain sum.

    Also return a term to add to the loss, or None: it makes a mean over no samples NaN, as in torch.
    """
    target, factor, weight = options.target, options.scale, options.weight
    if options.ignore_index is not None and not options.has_probabilities:
        target = target.long()  # before the comparison: -100 wraps around to 156 in uint8
        ignored = target == options.ignore_index
        if not _checks.can_read(target) or bool(ignored.any()):
            target = target.masked_fill(ignored, 0)
            if isinstance(factor, Tensor):
                factor = factor.masked_fill(ignored if factor.ndim == 2 else ignored.unsqueeze(1), 0)
            else:
                factor = (~ignored).to(dtype)
    folded = options.replace(target=target, scale=factor, ignore_index=None, reduction="sum")
    if options.reduction != "mean":
        return folded, None
    counted = factor
    if weight is not None and not options.has_probabilities:
        # torch's mean divides by the weights of the target classes, also with label smoothing
        counted = weight[target] if not isinstance(factor, Tensor) or factor.ndim == 2 else weight[target].unsqueeze(1)
        counted = counted * factor
    if not isinstance(counted, Tensor):
        count = target.shape[0] * target.shape[1]
        return (folded.replace(scale=1.0 / count), None) if count else (folded, math.nan)
    total = counted.sum(-1, keepdim=True)  # (R, 1) or (R, K, 1)
    if isinstance(options.scale, Tensor):  # a member whose own sample weights sum to 0 adds nothing
        return folded.replace(scale=torch.where(total == 0, 0.0, factor / total)), None
    if not isinstance(factor, Tensor):
        factor = torch.ones_like(counted)
    return folded.replace(scale=torch.where(factor == 0, 0.0, factor / total)), 0.0 / total.sum()
