"""Value and gradient of the Triton kernels as two operators for `torch.compile`."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from torchace.kernels import ace_gpu
from torchace.kernels.options import LossOptions

# λ as a tensor or as a number, each in an argument of its own
OPTIONS = (
    "Tensor target, Tensor? diversity, float diversity_number, Tensor? alpha, Tensor? weight, Tensor? scale, "
    "float label_smoothing, int? ignore_index, str reduction"
)


def total_loss(logits: Tensor, options: LossOptions) -> Tensor:
    """Loss of logits `(K, N, C)`, a scalar with a first derivative."""
    return _value(logits, *_to_arguments(options))


def _to_arguments(options: LossOptions) -> tuple[Any, ...]:
    lam, scale = options.diversity, options.scale
    tensor, number = (lam, 0.0) if isinstance(lam, Tensor) else (None, lam)
    factor = scale if isinstance(scale, Tensor) else None
    rest = (options.label_smoothing, options.ignore_index, options.reduction)
    return options.target, tensor, number, options.alpha, options.weight, factor, *rest


def _to_options(arguments: tuple[Any, ...]) -> LossOptions:
    target, tensor, number, alpha, weight, scale, smoothing, ignore_index, reduction = arguments
    return LossOptions(
        target,
        number if tensor is None else tensor,
        alpha,
        weight,
        scale=1.0 if scale is None else scale,
        label_smoothing=smoothing,
        ignore_index=ignore_index,
        reduction=reduction,
    )


@torch.library.custom_op(
    "torchace::amended_cross_entropy", mutates_args=(), schema=f"(Tensor logits, {OPTIONS}) -> Tensor"
)
def _value(logits: Tensor, *arguments: Any) -> Tensor:
    return ace_gpu.value_and_gradient(logits, _to_options(arguments), want_gradient=False)[0].clone()


@torch.library.custom_op(
    "torchace::amended_cross_entropy_gradient",
    mutates_args=(),
    schema=f"(Tensor upstream, Tensor logits, {OPTIONS}) -> Tensor",
)
def _gradient(upstream: Tensor, logits: Tensor, *arguments: Any) -> Tensor:
    return ace_gpu.scaled_gradient(logits, _to_options(arguments), upstream)


@_value.register_fake
def _(logits: Tensor, *arguments: Any) -> Tensor:
    return logits.new_empty((), dtype=torch.float64 if logits.dtype == torch.float64 else torch.float32)


@_gradient.register_fake
def _(upstream: Tensor, logits: Tensor, *arguments: Any) -> Tensor:
    return torch.empty_like(logits)


def _save(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    ctx.save_for_backward(*(part for part in inputs if isinstance(part, Tensor)))
    ctx.numbers = [None if isinstance(part, Tensor) else (part,) for part in inputs]  # a tensor's place: None


def _backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
    tensors = iter(ctx.saved_tensors)
    inputs = [next(tensors) if number is None else number[0] for number in ctx.numbers]
    return _gradient(grad, *inputs), *(None,) * (len(inputs) - 1)


_value.register_autograd(_backward, setup_context=_save)
