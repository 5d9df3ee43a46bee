"""What some layers need around a call under `vmap`."""

from __future__ import annotations

import traceback
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
import torch.utils.checkpoint
from torch import nn
from torch.nn.modules.batchnorm import _BatchNorm

from torchace.nn.recomputed import recomputed_names

CHECKPOINT = (
    "activation checkpointing inside a member cannot be computed for all at once; take it out of the member and "
    "checkpoint the ensemble: torch.utils.checkpoint.checkpoint(ensemble, x, use_reentrant=False)"
)


@contextmanager
def prepared(stacked: nn.Module) -> Iterator[None]:
    """Prepares the layers of a stacked module for one call under `vmap`."""
    if torch.compiler.is_compiling():
        yield
        return
    layers = list(stacked.modules())
    with ExitStack() as stack:
        for layer in layers:
            if isinstance(layer, _BatchNorm) and layer.training and layer.momentum is None:
                stack.enter_context(_cumulative_average(layer))
        # inside, checkpoint would otherwise fail in the backward
        disabled = torch._C._autograd._saved_tensors_hooks_get_disabled_error_message()
        if disabled is None and torch.is_grad_enabled():
            torch._C._autograd._saved_tensors_hooks_disable(CHECKPOINT, False)
            stack.callback(torch._C._autograd._saved_tensors_hooks_enable)
        try:
            yield
        except Exception as error:
            files = {frame.f_code.co_filename for frame, _ in traceback.walk_tb(error.__traceback__)}
            inside = torch.utils.checkpoint.__file__ in files and not is_control_flow(error)
            raise (RuntimeError(CHECKPOINT) if inside else error) from error
        finally:
            for layer in layers:  # a tensor of a call under vmap means nothing after it
                for name in recomputed_names(layer):
                    vars(layer)[name] = None


def is_control_flow(error: Exception) -> bool:
    """Whether `checkpoint` around the call stops it here: it has recomputed enough."""
    return type(error).__name__ == "_StopRecomputationError"


@contextmanager
def _cumulative_average(layer: Any) -> Iterator[None]:
    """`momentum=None` as the numbers it stands for, 1/count: `vmap` cannot read a count."""
    if layer.num_batches_tracked is None:
        yield
        return
    counts = layer.num_batches_tracked.unique().tolist()
    if len(counts) > 1:
        raise ValueError(
            f"Expected members that have seen equally many batches for a BatchNorm layer with momentum=None, but got "
            f"{counts[0]} to {counts[-1]}. Call reset_running_stats() of the layer, or use Ensemble(members)."
        )

    def count(layer: Any, _: Any) -> None:  # a layer may be called several times
        counts[0] += 1
        layer.momentum = 1 / counts[0]

    hook = layer.register_forward_pre_hook(count)
    try:
        yield
    finally:
        hook.remove()
        layer.momentum = None
