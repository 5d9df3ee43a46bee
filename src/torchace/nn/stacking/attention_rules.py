"""Rules for attention."""

from __future__ import annotations

import math
import types
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from torchace.nn.stacking.mode import Rule, StackingMode, rule
from torchace.nn.stacking.random_rules import dropout_mask
from torchace.nn.stacking.tensor_rules import Func
from torchace.nn.stacking.values import Stacked, pad_axes, to_members


@rule(F.scaled_dot_product_attention)
def _attention(
    stacking: StackingMode,
    func: Func,
    query: Any,
    key: Any,
    value: Any,
    attn_mask: Any = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> Any:
    """Fold members into the batch."""
    count = stacking.num_members
    with_rng = dropout_p > 0 and stacking.rng is not None
    if query.ndim < 3 and not with_rng:
        return NotImplemented
    q, k, v = (to_members(part, count) for part in (query, key, value))
    mask = attn_mask
    if isinstance(mask, Stacked) or (mask is not None and mask.ndim == query.ndim):
        mask = pad_axes(to_members(mask, count), query.ndim)
        mask = mask.expand(-1, q.shape[1], *[-1] * (mask.ndim - 2)) if mask.shape[1] == 1 else mask
        mask = mask.flatten(0, 1)
    if with_rng:
        return Stacked(_attention_with_rng(stacking, q, k, v, mask, dropout_p, is_causal, scale, enable_gqa))
    options = {"is_causal": is_causal, "scale": scale, "enable_gqa": enable_gqa}
    out = func(*(part.flatten(0, 1) for part in (q, k, v)), attn_mask=mask, dropout_p=dropout_p, **options)
    return Stacked(out.unflatten(0, (count, -1)))


def _attention_with_rng(
    stacking: StackingMode, q: Tensor, k: Tensor, v: Tensor, mask: Any, p: float, causal: bool, scale: Any, gqa: bool
) -> Tensor:
    """Compute attention with dropout from the mode's random numbers."""
    if gqa:
        k, v = (part.repeat_interleave(q.shape[-3] // part.shape[-3], -3) for part in (k, v))
    logits = q @ k.mT * (1 / math.sqrt(q.shape[-1]) if scale is None else scale)
    if causal:
        mask = torch.ones(logits.shape[-2:], dtype=torch.bool, device=q.device).tril()
    if mask is not None:
        mask = mask.unflatten(0, (len(q), -1)) if mask.ndim == q.ndim - 1 else mask
        logits = logits.masked_fill(~mask, -torch.inf) if mask.dtype == torch.bool else logits + mask
    weights = logits.softmax(-1)
    return (weights * dropout_mask(stacking, weights, weights.shape, p)) @ v


def _without_overrides(func: Any) -> Any:
    """Return a copy of a function of `torch.nn.functional` that does not dispatch to torch function modes."""
    names = ("has_torch_function", "has_torch_function_unary", "has_torch_function_variadic")
    scope = {**func.__globals__, **dict.fromkeys(names, lambda *_: False)}
    body = types.FunctionType(func.__code__, scope, func.__name__, func.__defaults__)
    body.__kwdefaults__ = func.__kwdefaults__
    return body


def _follow_body(func: Any) -> Rule:
    """Return a rule that follows the body of a PyTorch function written in Python."""
    body = _without_overrides(func)

    def compute(stacking: StackingMode, func: Func, *args: Any, **kwargs: Any) -> Any:
        with stacking:
            return body(*stacking.to_tensors(args), **stacking.to_tensors(kwargs))

    return compute


rule(F.multi_head_attention_forward)(_follow_body(F.multi_head_attention_forward))
