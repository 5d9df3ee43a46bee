"""One interface to the amended cross entropy's backends: `composite` (autograd), `closed_form` (CPU), `ace_gpu`."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.autograd import forward_ad

from torchace import _checks
from torchace.kernels import closed_form, composite
from torchace.kernels.closed_form import LossResult
from torchace.kernels.options import LossOptions, compute_dtype, fold_mean, runs_kernels

__all__ = [
    "LossOptions",
    "LossResult",
    "composite",
    "member_terms",
    "readable_diversity",
    "total_loss",
    "value_and_gradient",
]

MAX_MEMBERS = 1024  # of the Triton kernels
STEP_ON_GPU = "triton"  # backend of training steps on a GPU: "triton" or "closed_form"


def total_loss(logits: Tensor, options: LossOptions, constants: Sequence[Tensor] = ()) -> Tensor:
    """Differentiable loss of logits `(K, N, C)` of one run, summed over members and samples.

    Autograd refuses a backward after an in-place change of one of the `constants`, the tensors behind the options.
    """
    if fits_gpu(logits, options):
        from torchace.kernels import ace_gpu

        if isinstance(options.scale, Tensor):
            options, _ = fold_mean(options, compute_dtype(logits))
        if torch.compiler.is_compiling():
            from torchace.kernels import ace_op_gpu

            return ace_op_gpu.total_loss(logits, options)
        return _apply(logits, options, ace_gpu, constants)
    if not fits_cpu(logits, options):
        return composite.total_loss(logits.unsqueeze(0), options)
    if isinstance(options.diversity, Tensor):
        # A number from here on: changing the tensor before the backward does not change this loss.
        options = options.replace(diversity=float(options.diversity))
    return _apply(logits, options, closed_form, constants)


def member_terms(logits: Tensor, options: LossOptions) -> LossResult:
    """Losses `(R, K)`, scores `(R, N)` and the gradient in detached logits `(R, K, N, C)`, without device syncs.

    The options must be a sum over samples, with class indices in range.
    """
    if STEP_ON_GPU == "triton" and fits_gpu(logits, options):
        from torchace.kernels import ace_gpu

        if ace_gpu.fits_member_terms(logits):
            return ace_gpu.member_terms(logits, options)
    return closed_form.compute(logits, options, want_scores=True)


def value_and_gradient(
    logits: Tensor, options: LossOptions, *, want_gradient: bool = True
) -> tuple[Tensor, Tensor | None]:
    """Loss, a scalar, and its gradient in logits `(K, N, C)`, without autograd."""
    if fits_gpu(logits, options):
        from torchace.kernels import ace_gpu

        return ace_gpu.value_and_gradient(logits, options, want_gradient=want_gradient)
    return closed_form.value_and_gradient(logits, options, want_gradient=want_gradient)


def fits_cpu(logits: Tensor, options: LossOptions) -> bool:
    """Whether `closed_form` applies: plain CPU tensors, no derivative other than the first in the logits."""
    return (
        _checks.can_read(logits)
        and options.detach_others
        and logits.numel() > 0
        and not options.target.requires_grad
        and forward_ad.unpack_dual(logits).tangent is None
    )


def fits_gpu(logits: Tensor, options: LossOptions) -> bool:
    """Whether the Triton kernels apply: a plain CUDA tensor without transforms, compiled or not."""
    return (
        logits.device.type == "cuda"
        and options.target.device == logits.device
        and options.detach_others
        and not isinstance(options.label_smoothing, Tensor)
        and logits.dtype in (torch.float32, torch.bfloat16, torch.float16)
        and logits.numel() > 0
        and logits.shape[-3] <= MAX_MEMBERS
        and not options.target.requires_grad
        and (type(logits) is Tensor or type(logits) is torch.nn.Parameter)
        # seen by torch.compile too, which would lose an operator's own gradient under a transform
        and not torch._C._are_functorch_transforms_active()
        and (torch.compiler.is_compiling() or forward_ad.unpack_dual(logits).tangent is None)
        and runs_kernels(logits.device)
    )


def readable_diversity(diversity: Tensor, device: torch.device) -> float | Tensor:
    """λ on the kernel's device, or as a number."""
    if diversity.device == device:
        return diversity
    return float(diversity) if _checks.can_read(diversity) else diversity.to(device)  # a graph cannot read


def _apply(logits: Tensor, options: LossOptions, backend: Any, constants: Sequence[Tensor]) -> Tensor:
    if not torch.is_grad_enabled():  # a Function's forward cannot tell, and would compute a gradient
        logits = logits.detach()
    return AmendedCrossEntropy.apply(logits, options, backend, constants)  # type: ignore[no-untyped-call]


class AmendedCrossEntropy(torch.autograd.Function):
    """Compute value and gradient in the forward; the backward scales the gradient."""

    @staticmethod
    def forward(ctx: Any, logits: Tensor, options: LossOptions, backend: Any, constants: Sequence[Tensor]) -> Tensor:
        ctx.options, ctx.backend = options, backend
        early = ctx.needs_input_grad[0] and backend.is_gradient_kept(logits)
        value, ctx.gradient = backend.value_and_gradient(logits, options, want_gradient=early)
        # The constants: autograd then refuses a backward after an in-place change of them, as it does for torch's
        # losses. λ may change: a schedule does that, and the old value is in the gradient already.
        ctx.save_for_backward(logits, *constants)
        ctx.version = _version(options.diversity)
        return value

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, None, None, None]:
        logits, *_ = ctx.saved_tensors
        grad, options, backend = grads[0], ctx.options, ctx.backend
        recompute = torch.is_grad_enabled() or ctx.gradient is None
        if recompute and _version(options.diversity) != ctx.version:
            raise RuntimeError("Expected `diversity` as it was in the forward, but it was changed in place.")
        if torch.is_grad_enabled():  # create_graph=True: differentiate the composite
            loss = composite.total_loss(logits.unsqueeze(0), options)
            (gradient,) = torch.autograd.grad(loss, logits, grad, create_graph=True)
            return gradient, None, None, None
        gradient, ctx.gradient = ctx.gradient, None  # handed over: autograd need not copy it
        if _is_batched(grad):  # several at once, for a Jacobian
            if gradient is None:
                _, gradient = backend.value_and_gradient(logits, options, want_gradient=True)
            return (gradient * grad).to(logits.dtype), None, None, None
        if gradient is None:  # a second backward of a retained graph
            return backend.scaled_gradient(logits, options, grad), None, None, None
        return backend.scale_gradient(gradient, grad).to(logits.dtype), None, None, None


def _is_batched(grad: Tensor) -> bool:
    """Whether the gradient comes from `torch.autograd.grad(is_grads_batched=True)`: it has no own memory."""
    try:
        grad.data_ptr()
    except RuntimeError:
        return True
    return False


def _version(diversity: float | Tensor) -> int | None:
    """Number of in-place changes; None for inference tensors, which do not count them."""
    return diversity._version if isinstance(diversity, Tensor) and not diversity.is_inference() else None
