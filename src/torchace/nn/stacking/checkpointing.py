"""Activation checkpointing inside a member, which cannot be computed for all members at once.

Its backward runs the member's forward again, without what computes it for all members.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
import torch.utils.checkpoint
from torch.utils.checkpoint import CheckpointFunction

CHECKPOINT = (
    "activation checkpointing inside a member cannot be computed for all at once; take it out of the member and "
    "checkpoint the ensemble: torch.utils.checkpoint.checkpoint(ensemble, x, use_reentrant=False)"
)


@contextmanager
def refuse_checkpointing() -> Iterator[None]:
    """Inside, `checkpoint` raises an error at once, not in the backward."""
    if not torch.is_grad_enabled():
        yield
        return
    hooks = torch._C._autograd
    enabled = hooks._saved_tensors_hooks_get_disabled_error_message() is None
    apply = CheckpointFunction.apply
    if enabled:
        hooks._saved_tensors_hooks_disable(CHECKPOINT, False)
    CheckpointFunction.apply = _refused  # type: ignore[method-assign]
    try:
        yield
    finally:
        CheckpointFunction.apply = apply  # type: ignore[method-assign]
        if enabled:
            hooks._saved_tensors_hooks_enable()


def _refused(*_: Any) -> Any:
    raise RuntimeError(CHECKPOINT)


def is_control_flow(error: Exception) -> bool:
    """Whether `checkpoint` around the call stops it here: it has recomputed enough."""
    return type(error).__name__ == "_StopRecomputationError"
