"""Checks of the losses' options, once, and their conversion to the type to compute in."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from torchace import _checks
from torchace.kernels import readable_diversity
from torchace.kernels.options import LossOptions, compute_dtype


def resolve_coupling(
    outputs: Tensor,
    diversity: float | Tensor,
    member_weights: Tensor | Sequence[float] | None,
    mixture: Tensor | None,
) -> tuple[float | Tensor, Tensor, Tensor | None]:
    """λ, α `(K,)` and the mixture, detached, in the type to compute in, for members' outputs `(K, N, ...)`."""
    like = _like(outputs)
    lam = _resolve_diversity(diversity, like)
    alpha = _checks.as_member_weights(member_weights, outputs.shape[0], like=like, partial=mixture is not None)
    if mixture is not None:
        _checks.check_mixture(mixture, outputs)
        mixture = mixture.detach().to(like)
    return lam, alpha, mixture


def resolve_options(
    logits: Tensor,
    target: Tensor,
    diversity: float | Tensor,
    *,
    member_weights: Tensor | Sequence[float] | None,
    sample_weight: Tensor | None,
    weight: Tensor | None,
    ignore_index: int,
    label_smoothing: float,
    mixture: Tensor | None = None,
    detach_others: bool = True,
    reduction: str,
) -> LossOptions:
    """Options of `amended_cross_entropy` for one run, with one axis of samples."""
    _checks.check_logits(logits)
    _checks.check_reduction(reduction)
    _checks.check_fraction(label_smoothing, "label_smoothing")
    _checks.check_int(ignore_index, "ignore_index")
    _checks.check_target(target, logits, ignore_index=ignore_index)
    like, num_members = _like(logits), logits.shape[0]
    lam = _resolve_diversity(diversity, like)
    alpha: Tensor | None = None
    if member_weights is not None:  # else no tensor of them is made: on a GPU that is a kernel of its own
        alpha = _checks.as_member_weights(member_weights, num_members, like=like, partial=mixture is not None)
    if mixture is not None:
        _checks.check_mixture(mixture, logits)
        if not detach_others:
            raise ValueError("Expected `detach_others=True` with a `mixture`, which is a constant computed elsewhere.")
        mixture = flatten_samples(mixture.detach().to(like), 1)
    if weight is not None:
        _checks.check_class_weight(weight, logits.shape[2])
        weight = weight.detach().to(like)
    scale: float | Tensor = 1.0
    if sample_weight is not None:
        samples = (logits.shape[1], *logits.shape[3:])
        scale = _checks.as_sample_weight(sample_weight, num_members, samples, like)
        scale = scale.reshape(1, *scale.shape[: scale.ndim - len(samples)], -1)
    return LossOptions(
        flatten_samples(target.to(like), 1) if target.is_floating_point() else target.reshape(1, -1),
        lam,
        alpha,
        weight,
        mixture,
        scale,
        float(label_smoothing),
        ignore_index,
        reduction,
        detach_others,
    )


def flatten_samples(values: Tensor, class_axis: int) -> Tensor:
    """Values with classes last and one axis of samples: `(N, C, d1, ...)` as `(1, N·d1·..., C)`."""
    if values.ndim > class_axis + 1:
        values = values.movedim(class_axis, -1).flatten(class_axis - 1, -2)
    return values.unsqueeze(0) if class_axis == 1 else values


def given_tensors(*values: object) -> list[Tensor]:
    """The tensors among some arguments: autograd refuses a backward after one of them was changed in place."""
    if torch.compiler.is_compiling():  # the compiler checks this itself
        return []
    return [value.detach() for value in values if isinstance(value, Tensor) and not value.is_inference()]


def _resolve_diversity(diversity: float | Tensor, like: Tensor) -> float | Tensor:
    """λ, checked: a number, or a constant on the device of `like`."""
    _checks.check_diversity(diversity)
    if not isinstance(diversity, Tensor):
        return float(diversity)
    return readable_diversity(diversity.detach().to(like.dtype), like.device)


def _like(outputs: Tensor) -> Tensor:
    """A tensor of the type to compute in, on the outputs' device."""
    dtype = compute_dtype(outputs)
    return outputs if outputs.dtype == dtype else torch.empty((), dtype=dtype, device=outputs.device)
