"""Value and gradient of the Triton kernels as two operators for `torch.compile`."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from torchace.kernels import ace_gpu
from torchace.kernels.options import LossOptions


def total_loss(logits: Tensor, options: LossOptions) -> Tensor:
    """Loss of logits `(K, N, C)`, a scalar with a first derivative."""
    return _value(logits, *_to_arguments(options))


def _to_arguments(options: LossOptions) -> tuple[Any, ...]:
    """Flatten the options for the operators: λ as a tensor or a number, each in a separate argument."""
    lam, scale = options.diversity, options.scale
    return (
        options.target,
        lam if isinstance(lam, Tensor) else None,
        0.0 if isinstance(lam, Tensor) else float(lam),
        options.alpha,
        options.weight,
        options.mixture,
        scale if isinstance(scale, Tensor) else None,
        options.label_smoothing,
        options.ignore_index,
        options.reduction,
    )


def _to_options(
    target: Tensor,
    diversity: Tensor | None,
    diversity_number: float,
    alpha: Tensor | None,
    weight: Tensor | None,
    mixture: Tensor | None,
    scale: Tensor | None,
    label_smoothing: float,
    ignore_index: int | None,
    reduction: str,
) -> LossOptions:
    lam = diversity_number if diversity is None else diversity
    factor = 1.0 if scale is None else scale
    return LossOptions(target, lam, alpha, weight, mixture, factor, label_smoothing, ignore_index, reduction)


OPTIONS = (
    "Tensor target, Tensor? diversity, float diversity_number, Tensor? alpha, Tensor? weight, Tensor? mixture, "
    "Tensor? scale, float label_smoothing, int? ignore_index, str reduction"
)


@torch.library.custom_op(
    "torchace::amended_cross_entropy", mutates_args=(), schema=f"(Tensor logits, {OPTIONS}) -> Tensor"
)
def _value(logits: Tensor, *arguments: Any) -> Tensor:
    return ace_gpu.value_and_gradient(logits, _to_options(*arguments), want_gradient=False)[0].clone()


@torch.library.custom_op(
    "torchace::amended_cross_entropy_gradient",
    mutates_args=(),
    schema=f"(Tensor upstream, Tensor logits, {OPTIONS}) -> Tensor",
)
def _gradient(upstream: Tensor, logits: Tensor, *arguments: Any) -> Tensor:
    return ace_gpu.scaled_gradient(logits, _to_options(*arguments), upstream)


@_value.register_fake
def _(logits: Tensor, *arguments: Any) -> Tensor:
    return logits.new_empty((), dtype=torch.float64 if logits.dtype == torch.float64 else torch.float32)


@_gradient.register_fake
def _(upstream: Tensor, logits: Tensor, *arguments: Any) -> Tensor:
    return torch.empty_like(logits)


def _save(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    logits, *arguments = inputs
    ctx.save_for_backward(logits, *(part for part in arguments if isinstance(part, Tensor)))
    ctx.numbers = [None if isinstance(part, Tensor) else (part,) for part in arguments]  # a tensor's place: None


def _backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
    logits, *tensors = ctx.saved_tensors
    remaining = iter(tensors)
    arguments = [next(remaining) if number is None else number[0] for number in ctx.numbers]
    return _gradient(grad, logits, *arguments), *(None,) * len(arguments)


_value.register_autograd(_backward, setup_context=_save)
