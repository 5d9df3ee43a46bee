"""Argument checks of the losses, conversion to the compute dtype, and helpers shared by this package."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from torchace import _checks
from torchace.kernels import readable_diversity
from torchace.kernels.options import LossOptions
from torchace.kernels.options import compute_dtype as compute_dtype


def along_members(values: Tensor, like: Tensor) -> Tensor:
    """Reshape member values `(K,)` to broadcast against `(K, ...)`."""
    return values.reshape(-1, *[1] * (like.ndim - 1))


def log_mixture(log_terms: Tensor) -> Tensor:
    """`logsumexp` over members of `(K, ...)`; where all terms are -inf, the gradient is 0 instead of NaN."""
    if not torch.is_grad_enabled():
        return log_terms.logsumexp(0)
    all_zero = (log_terms == -torch.inf).all(0)
    return log_terms.masked_fill(all_zero, 0.0).logsumexp(0).masked_fill(all_zero, -torch.inf)


def reduce_samples(losses: Tensor, reduction: str) -> Tensor:
    """Mean or sum over samples, or the losses unchanged."""
    if reduction == "mean":
        return losses.mean()
    return losses.sum() if reduction == "sum" else losses


def member_mean(losses: Tensor, sample_weight: Tensor | None, reduction: str) -> Tensor:
    """Weight losses `(K, N, ...)`, reduce them over each member's elements and sum over members."""
    if sample_weight is None:
        return losses.flatten(1).mean(1).sum() if reduction == "mean" else reduce_samples(losses, reduction)
    weight = _checks.as_sample_weight(sample_weight, losses.shape[0], tuple(losses.shape[1:]), losses)
    # where, not a product: an element of weight 0 may have an infinite loss
    weighted = torch.where(weight == 0, 0.0, losses * weight)
    if reduction != "mean":
        return reduce_samples(weighted, reduction)
    total = weight.expand_as(losses).flatten(1).sum(1)
    return torch.where(total == 0, 0.0, weighted.flatten(1).sum(1) / torch.where(total == 0, 1.0, total)).sum()


def resolve_coupling(
    outputs: Tensor, diversity: float | Tensor, member_weights: Tensor | Sequence[float] | None, mixture: Tensor | None
) -> tuple[float | Tensor, Tensor, Tensor | None]:
    """Return λ, α `(K,)` and the mixture, detached, in the compute dtype, for outputs `(K, N, ...)`."""
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
    """Check the options of `amended_cross_entropy` and return those of one run, with one axis of samples."""
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
            raise ValueError(
                "Expected `detach_others=True` with a `mixture`, but got False. A given mixture is a constant."
            )
        mixture = flatten_samples(mixture.detach().to(like), 1)
    if weight is not None:
        _checks.check_shape(weight, "weight", (logits.shape[2],), "one for each class")
        _checks.check_finite_weights(weight, "weight")
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
    """Move classes last and flatten the sample axes: `(N, C, d1, ...)` as `(1, N·d1·..., C)`."""
    if values.ndim > class_axis + 1:
        values = values.movedim(class_axis, -1).flatten(class_axis - 1, -2)
    return values.unsqueeze(0) if class_axis == 1 else values


def given_tensors(*values: object) -> list[Tensor]:
    """Return the tensors among the arguments; saved, autograd refuses a backward after they change in place."""
    if torch.compiler.is_compiling():  # the compiler checks this itself
        return []
    return [value.detach() for value in values if isinstance(value, Tensor) and not value.is_inference()]


def _resolve_diversity(diversity: float | Tensor, like: Tensor) -> float | Tensor:
    """Return λ, checked: a number, or a constant on the device of `like`."""
    _checks.check_diversity(diversity)
    if not isinstance(diversity, Tensor):
        return float(diversity)
    return readable_diversity(diversity.detach().to(like.dtype), like.device)


def _like(outputs: Tensor) -> Tensor:
    """Return a tensor of the compute dtype, on the outputs' device."""
    dtype = compute_dtype(outputs)
    return outputs if outputs.dtype == dtype else torch.empty((), dtype=dtype, device=outputs.device)
