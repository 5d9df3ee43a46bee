"""Amended Cross Entropy: each member's cross entropy with the label, minus λ times its cross entropy with the others.

One formula, three ways to compute it. The composite below is plain PyTorch and right under every transform
(`torch.func`, `torch.compile`, forward mode, double backward). On the CPU in plain Python, `kernels.ace_cpu` computes
value and closed-form gradient together in cache-sized pieces; on a GPU, compiled or not, `kernels.ace_gpu` does in one
launch. For anything else they leave it to the composite.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd import forward_ad

from torchace import _checks
from torchace.functional._members import along_members, compute_dtype
from torchace.kernels import ace_cpu
from torchace.kernels.available import runs_kernels
from torchace.kernels.terms import Terms

MOST_MEMBERS = 1024  # that the GPU's kernel takes


def amended_cross_entropy(
    logits: Tensor,
    target: Tensor,
    diversity: float | Tensor,
    *,
    member_weights: Tensor | Sequence[float] | None = None,
    sample_weight: Tensor | None = None,
    weight: Tensor | None = None,
    ignore_index: int = -100,
    label_smoothing: float = 0.0,
    mixture: Tensor | None = None,
    detach_others: bool = True,
    reduction: str = "mean",
) -> Tensor:
    r"""The Amended Cross Entropy of K members, summed over members.

    $$e^k = H(p, q^k) - \lambda \sum_{j \ne k} \alpha^j H(q^j, q^k), \qquad
    \frac{\partial e^k}{\partial z^k} = (1 - \lambda)(q^k - p) + \lambda(\bar q - p)$$

    The other members are constants: no gradient flows into $q^j$. With λ=0 or K=1 it is
    `torch.nn.functional.cross_entropy` for every option, summed over members. The value is unbounded below and not a
    score: watch the ensemble's cross entropy instead.

    Args:
        logits: Members' logits, `(K, N, C)` or `(K, N, C, d1, ...)`.
        target: Class indices `(N, ...)`, or class probabilities `(N, C, ...)`. All members share it.
        diversity: λ in [0, 1], a number or a 0-dimensional tensor (which does not recompile when it changes).
        member_weights: The paper's α, `(K,)`; uniform unless given.
        sample_weight: `(N, ...)` for all members or `(K, N, ...)` for each; multiplies a sample's whole loss. The mean
            divides by the weights' sum, member by member; a member whose weights sum to 0 adds nothing.
        weight: Class weights, `(C,)`. A sample's diversity term is scaled by its own weight.
        ignore_index: Class index that does not count.
        label_smoothing: Share of the target that is spread evenly over the classes, in [0, 1].
        mixture: $\sum_j \alpha^j q^j$ computed elsewhere, `(N, C, ...)`; `member_weights` are then those of the members
            at hand and need not sum to 1.
        detach_others: False lets gradients flow into the other members; for ablation alone, it wrecks training.
        reduction: `"mean"` or `"sum"` over samples, then summed over members; `"none"` returns `(K, N, ...)`.

    Returns:
        A scalar, or `(K, N, ...)`; in float32 for half-precision logits.

    Example:
        >>> logits = torch.tensor([[[2.0, 0.0]], [[0.0, 0.0]]], requires_grad=True)
        >>> loss = amended_cross_entropy(logits, torch.tensor([0]), 0.5)
        >>> loss
        tensor(0.3651, grad_fn=<AceCpuBackward>)
        >>> loss.backward()
        >>> logits.grad
        tensor([[[-0.2144,  0.2144]],
        <BLANKLINE>
                [[-0.4048,  0.4048]]])
    """
    _checks.check_logits(logits)
    _checks.check_diversity(diversity)
    _checks.check_reduction(reduction)
    _checks.check_fraction(label_smoothing, "label_smoothing")
    _checks.check_int(ignore_index, "ignore_index")
    _checks.check_target(target, logits, ignore_index=ignore_index)
    like = _like(logits)
    given = _constants(target, member_weights, sample_weight, weight, mixture)
    alpha = None
    if member_weights is not None:
        alpha = _checks.as_member_weights(member_weights, logits.shape[0], like=like, partial=mixture is not None)
    if weight is not None:
        _checks.check_class_weight(weight, logits.shape[2])
        weight = weight.detach().to(like)
    if mixture is not None:
        _checks.check_mixture(mixture, logits)
        if not detach_others:
            raise ValueError("Expected `detach_others=True` with a `mixture`, which is a constant computed elsewhere.")
        mixture = mixture.detach().to(like)
    if isinstance(diversity, Tensor):
        diversity = diversity.detach().to(like.dtype)
    if sample_weight is not None:
        samples = (logits.shape[1], *logits.shape[3:])
        sample_weight = _checks.as_sample_weight(sample_weight, logits.shape[0], samples, like)
    options = _Options(
        diversity, alpha, sample_weight, weight, ignore_index, float(label_smoothing), mixture, detach_others, reduction
    )
    if _fits_gpu(logits, target, options):
        return _on_gpu(logits, target, options, given)
    if reduction == "none":
        return member_losses(_resolved(logits, target, options)[0], logits)
    if not _fits_cpu(logits, target, options):
        return _composite(target, options, logits)
    terms, empty = _resolved(logits, target, options)
    # a number from here on: whoever changes the tensor before the backward does not change this loss
    terms = replace(terms, diversity=float(terms.diversity))
    loss = ace_cpu.loss(logits, terms, partial(_total, terms), given)
    return loss if empty is None else loss + empty


def _constants(*given: object) -> list[Tensor]:
    """The tensors among the arguments, as they were given: autograd sees whether one was changed in place."""
    if torch.compiler.is_compiling():  # the compiler sees to it itself
        return []
    return [value.detach() for value in given if isinstance(value, Tensor) and not value.is_inference()]


class _Options(NamedTuple):
    """The arguments beside logits and target, checked, in the type to compute in."""

    diversity: float | Tensor
    alpha: Tensor | None
    sample_weight: Tensor | None
    weight: Tensor | None
    ignore_index: int
    label_smoothing: float
    mixture: Tensor | None
    detach_others: bool
    reduction: str


def _like(logits: Tensor) -> Tensor:
    """A tensor of the type to compute in, on the logits' device."""
    return torch.empty((), dtype=compute_dtype(logits), device=logits.device)


def _resolved(logits: Tensor, target: Tensor, options: _Options) -> tuple[Terms, float | Tensor | None]:
    """What the loss is computed from, and what to add so that an empty mean is NaN as in torch."""
    num_members, like, weight = logits.shape[0], _like(logits), options.weight
    # factor: what each sample counts, `(N, ...)` or `(K, N, ...)`; None where all count alike.
    factor = options.sample_weight
    if target.is_floating_point():
        target = target.to(like)
        counted = factor
    else:
        target = target.long()  # before the comparison: -100 wraps around to 156 in uint8
        ignored = target == options.ignore_index
        if not _checks.can_read(target) or bool(ignored.any()):
            target = target.masked_fill(ignored, 0)
            factor = (~ignored).to(like.dtype) if factor is None else factor.masked_fill(ignored, 0)
        # torch's mean divides by the weights of the samples' own classes, label smoothing or not
        counted = factor if weight is None else (weight[target] if factor is None else factor * weight[target])
    samples = (logits.shape[1], *logits.shape[3:])
    scale, empty = _scale(factor, counted, samples, options.reduction, zero_is_zero=options.sample_weight is not None)
    uniform = options.alpha is None
    alpha = like.new_full((num_members,), 1 / num_members) if options.alpha is None else options.alpha
    terms = Terms(
        target,
        options.diversity,
        alpha,
        weight,
        options.label_smoothing,
        options.mixture,
        options.detach_others,
        uniform,
        scale,
    )
    return terms, empty


def member_losses(terms: Terms, logits: Tensor) -> Tensor:
    """The composite: every member's loss on every sample, `(K, N, ...)`, times its scale."""
    log_q = F.log_softmax(logits, 2, dtype=compute_dtype(logits))  # (K, N, C, ...)
    wp = terms.weighted_target(logits.shape[2])  # (N, C, ...), w∘p
    if terms.diversity_is_zero:
        pull = wp.expand_as(log_q)
    else:
        q = (log_q.detach() if terms.detach_others else log_q).exp()
        alpha_q = along_members(terms.alpha, q) * q
        mixture = alpha_q.sum(0) if terms.mixture is None else terms.mixture
        # Σ_{j≠k} α^j q^j: without member k itself, so that a second derivative in z^k is right too
        others = mixture - alpha_q
        pull = wp - terms.diversity * wp.sum(1, keepdim=True) * others
    # A class that nobody believes in adds nothing, even where its log-probability is -inf.
    losses = -torch.where(pull == 0, 0.0, pull * log_q).sum(2)
    if isinstance(terms.scale, float):
        return losses * terms.scale
    # where, not a product: a sample that does not count may have an infinite loss
    return torch.where(terms.scale == 0, 0.0, losses * terms.scale)


def _total(terms: Terms, logits: Tensor) -> Tensor:
    return member_losses(terms, logits).sum()


def _scale(
    factor: Tensor | None, counted: Tensor | None, samples: tuple[int, ...], reduction: str, *, zero_is_zero: bool
) -> tuple[float | Tensor, float | Tensor | None]:
    """What each sample's loss is multiplied by, and what to add so that an empty mean is NaN as in torch."""
    if reduction != "mean":
        return (1.0 if factor is None else factor), None
    if counted is None:
        count = 1
        for size in samples:
            count *= size
        return (1.0 / count, None) if count else (1.0, float("nan"))
    over = tuple(range(counted.ndim - len(samples), counted.ndim))
    denominator = counted.sum(over, keepdim=True)  # (1, ...) or (K, 1, ...)
    numerator = torch.ones_like(denominator).expand(samples) if factor is None else factor
    if zero_is_zero:
        return torch.where(denominator == 0, 0.0, numerator / denominator), None
    scale = torch.where(numerator == 0, 0.0, numerator / denominator)
    return scale, 0.0 / denominator.sum()


def _fits_cpu(logits: Tensor, target: Tensor, options: _Options) -> bool:
    """Whether plain Python runs on plain CPU tensors and only a first derivative in the logits is asked for."""
    return (
        _checks.can_read(logits)
        and options.detach_others
        and logits.numel() > 0
        and not target.requires_grad
        and forward_ad.unpack_dual(logits).tangent is None
    )


def _fits_gpu(logits: Tensor, target: Tensor, options: _Options) -> bool:
    """Whether the kernel can have it: a plain CUDA tensor, compiled or not, that no transform wraps."""
    return (
        logits.device.type == "cuda"
        and target.device == logits.device
        and options.reduction != "none"
        and options.detach_others
        and logits.dtype in (torch.float32, torch.bfloat16, torch.float16)
        and logits.numel() > 0
        and logits.shape[0] <= MOST_MEMBERS
        and not target.requires_grad
        and (type(logits) is Tensor or type(logits) is torch.nn.Parameter)
        # seen by torch.compile too, which would lose an operator's own gradient under a transform
        and not torch._C._are_functorch_transforms_active()
        and (torch.compiler.is_compiling() or forward_ad.unpack_dual(logits).tangent is None)
        and runs_kernels(logits.device)
    )


def _on_gpu(logits: Tensor, target: Tensor, options: _Options, given: list[Tensor]) -> Tensor:
    from torchace.kernels import ace_gpu, ace_gpu_op  # they need Triton

    if logits.ndim > 3:  # more axes of samples: one of all
        logits, target, options = _as_rows(logits, target, options)
    scale = None if options.sample_weight is None else _resolved(logits, target, options)[0].scale
    diversity = _readable(options.diversity, logits.device)
    options = options._replace(diversity=diversity)
    choices = ace_gpu.Options(
        target.to(compute_dtype(logits)) if target.is_floating_point() else target,
        diversity if isinstance(diversity, Tensor) else None,
        0.0 if isinstance(diversity, Tensor) else float(diversity),
        options.alpha,
        options.weight,
        options.mixture,
        scale if isinstance(scale, Tensor) else None,
        options.label_smoothing,
        options.ignore_index,
        options.reduction == "mean",
    )
    return ace_gpu_op.loss(logits, choices, partial(_composite, target, options), given)


def _readable(diversity: float | Tensor, device: torch.device) -> float | Tensor:
    """λ as a kernel reads it: from its device, or as a number."""
    if not isinstance(diversity, Tensor) or diversity.device == device:
        return diversity
    return diversity.to(device) if torch.compiler.is_compiling() else float(diversity)  # a graph cannot read


def _as_rows(logits: Tensor, target: Tensor, options: _Options) -> tuple[Tensor, Tensor, _Options]:
    """`(K, N, C, d1, ...)` as `(K, N·d1·..., C)`, and whatever goes with it."""
    mixture, weight = options.mixture, options.sample_weight
    num_axes = logits.ndim - 2
    if mixture is not None:
        mixture = mixture.movedim(1, -1).flatten(0, -2)
    if weight is not None:
        weight = weight.flatten(weight.ndim - num_axes)
    target = target.movedim(1, -1).flatten(0, -2) if target.is_floating_point() else target.flatten()
    return (
        logits.movedim(2, -1).flatten(1, -2),
        target,
        options._replace(mixture=mixture, sample_weight=weight),
    )


def _composite(target: Tensor, options: _Options, logits: Tensor) -> Tensor:
    terms, empty = _resolved(logits, target, options)
    loss = _total(terms, logits)
    return loss if empty is None else loss + empty
