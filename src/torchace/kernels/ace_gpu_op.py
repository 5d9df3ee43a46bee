"""The amended cross entropy of `ace_gpu` as autograd and the compiler see it.

In plain Python the gradient is computed with the value and waits for the backward, which multiplies it by one number: a
kernel that reads the number and, where it is 1, nothing else. Where that will not do, the backward computes it from the
logits: in float16, which would underflow before a loss scale is applied, and under `torch.compile`, where value and
gradient are an operator each.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from torchace.kernels import ace_gpu
from torchace.kernels.ace_gpu import Options


def loss(
    logits: Tensor, options: Options, composite: Callable[[Tensor], Tensor], given: Sequence[Tensor] = ()
) -> Tensor:
    """The summed loss, a scalar.

    Args:
        logits: `(K, N, C)`.
        options: Everything else.
        composite: The same loss in plain PyTorch, for second derivatives.
        given: What the options were made of. A backward after one of them was changed in place is refused.
    """
    if torch.compiler.is_compiling():
        return _value(logits, *options)
    if not torch.is_grad_enabled():  # a Function's forward does not know, and would compute a gradient for nobody
        logits = logits.detach()
    return AceGpu.apply(logits, options, composite, given)  # type: ignore[no-untyped-call]


class AceGpu(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, logits: Tensor, options: Options, composite: Callable[[Tensor], Tensor], given: Sequence[Tensor]
    ) -> Tensor:
        ctx.composite, ctx.options = composite, options
        early = ctx.needs_input_grad[0] and logits.dtype != torch.float16
        value, ctx.gradient = ace_gpu.value_and_gradient(logits, options, want_gradient=early)
        # The rest: autograd then refuses a backward after an in-place change of them, as it does for torch's losses.
        # λ may change: a schedule does that, and what it was is in the gradient already.
        ctx.save_for_backward(logits, *given)
        ctx.version = _version(options.diversity)
        return value

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, None, None, None]:
        logits, *_ = ctx.saved_tensors
        grad = grads[0]
        again = torch.is_grad_enabled() or ctx.gradient is None  # whatever was computed is not enough
        if again and _version(ctx.options.diversity) != ctx.version:
            raise RuntimeError("Expected `diversity` as it was in the forward, but it was changed in place.")
        if torch.is_grad_enabled():  # create_graph=True: differentiate what this gradient was derived from
            (gradient,) = torch.autograd.grad(ctx.composite(logits), logits, grad, create_graph=True)
            return gradient, None, None, None
        if _is_batched(grad):  # several at once, for a Jacobian
            own = ctx.gradient
            if own is None:
                own = ace_gpu.value_and_gradient(logits, ctx.options, want_gradient=True)[1]
            return own * grad, None, None, None
        gradient, ctx.gradient = ctx.gradient, None  # given away: whoever receives it need not copy it
        if gradient is None:
            return ace_gpu.value_and_gradient(logits, ctx.options, want_gradient=True, by=grad)[1], None, None, None
        return ace_gpu.multiplied(gradient, grad), None, None, None


def _is_batched(grad: Tensor) -> bool:
    """Whether it is one of `torch.autograd.grad(is_grads_batched=True)`, which has no memory of its own."""
    try:
        grad.data_ptr()
    except RuntimeError:
        return True
    return False


def _version(diversity: Tensor | None) -> int | None:
    """How often it was changed in place; inference tensors do not count."""
    return None if diversity is None or diversity.is_inference() else diversity._version


@torch.library.custom_op("torchace::amended_cross_entropy", mutates_args=())
def _value(
    logits: Tensor,
    target: Tensor,
    diversity: Tensor | None,
    number: float,
    alpha: Tensor | None,
    weight: Tensor | None,
    mixture: Tensor | None,
    scale: Tensor | None,
    label_smoothing: float,
    ignore_index: int,
    mean: bool,
) -> Tensor:
    options = Options(target, diversity, number, alpha, weight, mixture, scale, label_smoothing, ignore_index, mean)
    return ace_gpu.value_and_gradient(logits, options, want_gradient=False)[0].clone()


@torch.library.custom_op("torchace::amended_cross_entropy_gradient", mutates_args=())
def _gradient(
    by: Tensor,
    logits: Tensor,
    target: Tensor,
    diversity: Tensor | None,
    number: float,
    alpha: Tensor | None,
    weight: Tensor | None,
    mixture: Tensor | None,
    scale: Tensor | None,
    label_smoothing: float,
    ignore_index: int,
    mean: bool,
) -> Tensor:
    options = Options(target, diversity, number, alpha, weight, mixture, scale, label_smoothing, ignore_index, mean)
    gradient = ace_gpu.value_and_gradient(logits, options, want_gradient=True, by=by)[1]
    assert gradient is not None
    return gradient


@_value.register_fake
def _(logits: Tensor, *options: Any) -> Tensor:
    return logits.new_empty((), dtype=torch.float64 if logits.dtype == torch.float64 else torch.float32)


@_gradient.register_fake
def _(by: Tensor, logits: Tensor, *options: Any) -> Tensor:
    return torch.empty_like(logits)


def _keep(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    logits, *options = inputs
    ctx.save_for_backward(logits, *(part for part in options if isinstance(part, Tensor)))
    ctx.numbers = [None if isinstance(part, Tensor) else (part,) for part in options]  # a tensor's place: None


def _pull(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
    logits, *tensors = ctx.saved_tensors
    remaining = iter(tensors)
    options = [next(remaining) if number is None else number[0] for number in ctx.numbers]
    return _gradient(grad, logits, *options), *(None,) * len(options)


_value.register_autograd(_pull, setup_context=_keep)
