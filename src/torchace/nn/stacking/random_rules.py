"""Rules for random functions and attention."""

from __future__ import annotations

import math
import types
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from torchace.nn.stacking.mode import (
    CHANNELS,
    FIRST,
    RANDOM,
    Rule,
    Stacked,
    StackingMode,
    pad_axes,
    rule,
    to_channels,
    to_first,
    to_members,
)
from torchace.nn.stacking.tensor_rules import Func, functions


def random_rule(*functions: Any) -> Callable[[Rule], Rule]:
    """Register a rule for functions that draw random numbers."""
    RANDOM.update(functions)
    return rule(*functions)


@random_rule(F.dropout, torch.dropout)
def _dropout(stacking: StackingMode, func: Func, x: Any, p: float = 0.5, *args: Any, **kwargs: Any) -> Any:
    training = args[0] if args else kwargs.get("training", kwargs.get("train", True))
    if not training or p == 0:
        return x
    if isinstance(x, Stacked) and x.layout != FIRST and stacking.rng is None:
        return Stacked(F.dropout(x.data, p), x.layout)
    data = to_members(x, stacking.num_members)
    if stacking.rng is None:
        return Stacked(F.dropout(data, p))
    return Stacked(data * dropout_mask(stacking, data, data.shape, p))


@random_rule(*functions("dropout1d", "dropout2d", "dropout3d"))
def _channel_dropout(
    stacking: StackingMode, func: Func, x: Any, p: float = 0.5, training: bool = True, inplace: bool = False
) -> Any:
    if not training or p == 0:
        return x
    if stacking.rng is None:
        return Stacked(func(to_channels(x, stacking.num_members), p, True), CHANNELS)
    data = to_members(x, stacking.num_members)
    return Stacked(data * dropout_mask(stacking, data, (*data.shape[:3], *[1] * (data.ndim - 3)), p))


def dropout_mask(stacking: StackingMode, like: Tensor, shape: Any, p: float) -> Tensor:
    """Return a mask of 0 and 1 / (1 - p) from the mode's random numbers."""
    assert stacking.rng is not None
    if p >= 1:
        return like.new_zeros(shape)
    return (stacking.rng.uniform(tuple(shape), torch.float32, like.device) >= p).to(like.dtype) / (1 - p)


@random_rule(torch.empty, torch.rand, torch.randn)
def _random_tensor(stacking: StackingMode, func: Func, *args: Any, size: Any = None, **kwargs: Any) -> Any:
    """Create numbers for each member; also for `torch.empty`, which may be filled with random numbers."""
    given = args or (size,)
    shape = (stacking.num_members, *(given[0] if isinstance(given[0], (list, tuple)) else given))
    if func is torch.empty or stacking.rng is None:
        return Stacked(func(shape, **kwargs))
    data = torch.empty(shape, **kwargs)
    uniform = _uniform(stacking, data)
    return Stacked(data.copy_(uniform if func is torch.rand else math.sqrt(2) * torch.erfinv(2 * uniform - 1)))


@random_rule(*functions("empty_like", "rand_like", "randn_like"), Tensor.new_empty)
def _random_like(stacking: StackingMode, func: Func, x: Any, *args: Any, **kwargs: Any) -> Any:
    data = x.data if isinstance(x, Stacked) else x
    if func is Tensor.new_empty:
        sizes = kwargs.pop("size", args[0] if args and not isinstance(args[0], int) else args)
    else:
        sizes = x.shape(stacking.num_members) if isinstance(x, Stacked) else x.shape
    kwargs.pop("memory_format", None)
    make = {"rand_like": torch.rand, "randn_like": torch.randn}.get(func.__name__, torch.empty)
    return _random_tensor(stacking, make, tuple(sizes), **{"dtype": data.dtype, "device": data.device, **kwargs})


def _uniform(stacking: StackingMode, like: Tensor) -> Tensor:
    assert stacking.rng is not None
    dtype = like.dtype if like.dtype in (torch.float32, torch.float64) else torch.float32
    return stacking.rng.uniform(tuple(like.shape), dtype, like.device)


@rule(Tensor.bernoulli_)
def _bernoulli(stacking: StackingMode, func: Func, x: Any, p: Any = 0.5) -> Any:
    stacking.check_own(x)
    data = to_first(x, stacking.num_members)
    p = pad_axes(to_members(p, stacking.num_members), x.ndim) if isinstance(p, Stacked) else p
    data.bernoulli_(p) if stacking.rng is None else data.copy_(_uniform(stacking, data) < p)
    return x


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


# functions written in Python, by whose body the mode computes them
BODIES = {func: _without_overrides(func) for func in (F.multi_head_attention_forward,)}


@rule(*BODIES)
def _follow_body(stacking: StackingMode, func: Func, *args: Any, **kwargs: Any) -> Any:
    with stacking:
        return BODIES[func](*stacking.to_tensors(args), **stacking.to_tensors(kwargs))
