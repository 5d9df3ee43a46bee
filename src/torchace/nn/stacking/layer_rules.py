"""Rules for layers: products, convolutions, pooling, normalization, embeddings."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from torchace.nn.stacking.mode import (
    CHANNELS,
    FIRST,
    LAST,
    Stacked,
    StackingMode,
    expand_groups,
    pad_axes,
    rule,
    to_channels,
    to_first,
    to_members,
)
from torchace.nn.stacking.tensor_rules import Func, functions


def _has_own_weights(stacking: StackingMode, *weights: Any) -> bool:
    """Whether each weight is None or has an entry for each member."""
    for weight in weights:
        if weight is not None and (type(weight) is not Stacked or len(weight.data) != stacking.num_members):
            return False
    return True


def _flatten(weight: Any) -> Tensor | None:
    """Return a view `(K·C,)` of `(K, C)`; a view, because running statistics are updated in place."""
    return None if weight is None else weight.data.view(-1)


def _expand(stacking: StackingMode, weight: Any, *others: Any) -> list[Any]:
    """Return weights with an entry for each member if the first one has entries for members or groups of them."""
    if not isinstance(weight, Stacked) or _has_own_weights(stacking, weight, *others):
        return [weight, *others]
    members = [v if v is None else to_members(v, stacking.num_members).contiguous() for v in (weight, *others)]
    return [v if v is None else Stacked(v) for v in members]


def _share_weights(stacking: StackingMode, func: Func, input: Any, weight: Any, bias: Any, **options: Any) -> Any:
    """Compute a layer whose weight all members share: once for a plain input, else with members in the batch."""
    count = stacking.num_members
    if isinstance(weight, Stacked) or input.ndim < 2:
        return NotImplemented
    own = bias if isinstance(bias, Stacked) else None
    args = (weight, None if own is not None else bias)
    if not isinstance(input, Stacked):
        out = Stacked(func(input, *args, **options)[None])
    elif input.layout == CHANNELS:
        out = func(input.data.unflatten(1, (count, -1)).flatten(0, 1), *args, **options)
        out = Stacked(out.unflatten(0, (-1, count)).flatten(1, 2), CHANNELS)
    else:
        x = to_first(input, count)
        out = Stacked(func(x.flatten(0, 1), *args, **options).unflatten(0, x.shape[:2]))
    if own is None:
        return out
    channels = own.data.view(len(own.data), -1, *[1] * (0 if func is F.linear else out.ndim - 2))
    return Stacked(to_members(out, count) + pad_axes(to_members(Stacked(channels), count), out.ndim))


def _group_linear(stacking: StackingMode, input: Any, weight: Stacked, bias: Any) -> Stacked:
    """Compute linear layers whose weight, `(G, C, D)`, the members of a group share."""
    w = weight.data
    x = to_first(input, stacking.num_members) if isinstance(input, Stacked) else input[None]
    x = expand_groups(x, len(w)) if len(x) < len(w) else x
    out = (x.reshape(len(w), -1, x.shape[-1]) @ w.mT).view(*x.shape[:-1], w.shape[1])
    if bias is None:
        return Stacked(out)
    b = bias.data if isinstance(bias, Stacked) else bias[None]
    entries = max(len(out), len(b))
    return Stacked(expand_groups(out, entries) + pad_axes(expand_groups(b, entries), out.ndim - 1))


# Products


@rule(F.linear)
def _linear(stacking: StackingMode, func: Func, input: Any, weight: Any, bias: Any = None) -> Any:
    """Compute one product for all members, with the batch last, so that weights keep their layout."""
    count = stacking.num_members
    if isinstance(weight, Stacked) and len(weight.data) < count:
        return _group_linear(stacking, input, weight, bias)
    weight, bias = _expand(stacking, weight, bias)
    if not isinstance(weight, Stacked):
        return _share_weights(stacking, func, input, weight, bias)
    w, b = weight.data, None if bias is None else bias.data
    if input.ndim > 2 and not isinstance(input, Stacked):  # one wide layer
        out = F.linear(input, w.flatten(0, 1), None if b is None else b.reshape(-1))
        return Stacked(out.unflatten(-1, (count, -1)).movedim(-2, 0))
    if input.ndim == 2:
        out_features, in_features = w.shape[1:]
        if not isinstance(input, Stacked):  # one wide layer
            rows, h = w.reshape(-1, in_features), input.mT
            out = rows @ h if b is None else torch.addmm(b.reshape(-1, 1), rows, h)
        else:
            h = input.data if input.layout == LAST else to_first(input, count).mT  # (G, in, N)
            rows = w.reshape(h.shape[0], -1, in_features)  # the members of a group are rows of one matrix
            out = rows @ h if b is None else torch.baddbmm(b.reshape(h.shape[0], -1, 1), rows, h)
        return Stacked(out.view(count, out_features, h.shape[-1]), LAST)
    x = to_members(input, count)
    rows = x.reshape(count, -1, x.shape[-1])
    out = rows @ w.mT if b is None else torch.baddbmm(b.unsqueeze(1), rows, w.mT)
    return Stacked(out.view(count, *x.shape[1:-1], out.shape[-1]))


@rule(*functions("matmul", "bmm", "mm", "mv"), Tensor.__matmul__, Tensor.__rmatmul__)
def _matmul(stacking: StackingMode, func: Func, input: Any, other: Any = None, **kwargs: Any) -> Any:
    other = next(iter(kwargs.values())) if other is None else other  # mat2, vec
    if func is Tensor.__rmatmul__:
        input, other = other, input
    ndim = max(input.ndim, other.ndim)
    if min(input.ndim, other.ndim) < 2:
        return NotImplemented
    count = stacking.num_members
    return Stacked(
        torch.matmul(*(pad_axes(to_members(v, count), ndim) if isinstance(v, Stacked) else v for v in (input, other)))
    )


@rule(*functions("addmm"))
def _addmm(stacking: StackingMode, func: Func, input: Any, mat1: Any, mat2: Any, **scales: Any) -> Any:
    if isinstance(mat1, Stacked) and not isinstance(input, Stacked) and not isinstance(mat2, Stacked):
        x = to_first(mat1, stacking.num_members)
        if input.ndim == 1:  # a linear layer that all members share
            return Stacked(torch.addmm(input, x.flatten(0, 1), mat2, **scales).unflatten(0, x.shape[:2]))
    values = [to_members(value, stacking.num_members) for value in (input, mat1, mat2)]
    return Stacked(torch.baddbmm(pad_axes(values[0], 2), *values[1:], **scales))


# Convolutions and pooling: members among the channels


@rule(F.conv1d, F.conv2d, F.conv3d)
def _convolution(
    stacking: StackingMode, func: Func, input: Any, weight: Any, bias: Any = None, *args: Any, **options: Any
) -> Any:
    count = stacking.num_members
    options |= zip(("stride", "padding", "dilation", "groups"), args, strict=False)
    groups = options.setdefault("groups", 1)
    if input.ndim != weight.ndim:
        return NotImplemented
    weight, bias = _expand(stacking, weight, bias)
    if not isinstance(weight, Stacked):
        return _share_weights(stacking, func, input, weight, bias, **options)
    x, sources = input, 1  # a plain input: one wide layer
    if isinstance(input, Stacked) or groups > 1:
        shares = isinstance(input, Stacked) and input.layout == FIRST and groups == 1
        sources = len(input.data) if shares else count
        x = to_channels(input, sources)
    options["groups"] = sources * groups
    out = func(x, weight.data.flatten(0, 1), _flatten(bias), **options)
    stacking.largest = max(stacking.largest, out.numel() // count)
    return Stacked(out, CHANNELS)


POOLING = ("max_pool", "avg_pool", "adaptive_avg_pool", "adaptive_max_pool")


@rule(*functions(*(f"{name}{d}d" for name in POOLING for d in (1, 2, 3))))
def _pooling(stacking: StackingMode, func: Func, x: Any, *args: Any, **kwargs: Any) -> Any:
    spatial = int(func.__name__.rstrip("_").removesuffix("d")[-1])
    if not isinstance(x, Stacked) or x.ndim != spatial + 2 or kwargs.get("return_indices"):
        return NotImplemented
    return Stacked(func(to_channels(x, stacking.num_members), *args, **kwargs), CHANNELS)


@rule(F.pad, torch._C._nn.pad)
def _pad(stacking: StackingMode, func: Func, input: Any, pad: Any, mode: str = "constant", value: Any = None) -> Any:
    if input.layout == CHANNELS and len(pad) // 2 <= input.ndim - 2:
        return Stacked(F.pad(input.data, pad, mode, value), CHANNELS)
    if mode != "constant":
        return NotImplemented
    return Stacked(F.pad(to_first(input, stacking.num_members), pad, mode, value))


# Normalization


@rule(F.batch_norm, F.instance_norm)
def _channel_norm(
    stacking: StackingMode,
    func: Func,
    input: Any,
    running_mean: Any = None,
    running_var: Any = None,
    weight: Any = None,
    bias: Any = None,
    *args: Any,
    **kwargs: Any,
) -> Any:
    """Normalize with members among the channels: each channel of each member has its own statistics."""
    tensors = (running_mean, running_var, weight, bias)
    if not _has_own_weights(stacking, *tensors):
        return NotImplemented
    x = to_channels(input, stacking.num_members)
    return Stacked(func(x, *map(_flatten, tensors), *args, **kwargs), CHANNELS)


@rule(F.group_norm)
def _group_norm(
    stacking: StackingMode,
    func: Func,
    input: Any,
    num_groups: int,
    weight: Any = None,
    bias: Any = None,
    eps: float = 1e-5,
) -> Any:
    count = stacking.num_members
    if not isinstance(weight, Stacked) and not isinstance(bias, Stacked):
        return _share_weights(stacking, lambda x, w, b: F.group_norm(x, num_groups, w, b, eps), input, weight, bias)
    weight, bias = _expand(stacking, weight, bias)
    x = to_channels(input, count)
    return Stacked(F.group_norm(x, count * num_groups, _flatten(weight), _flatten(bias), eps), CHANNELS)


@rule(F.layer_norm)
def _layer_norm(
    stacking: StackingMode, func: Func, input: Any, shape: Any, weight: Any = None, bias: Any = None, eps: Any = 1e-5
) -> Any:
    count = stacking.num_members
    x = to_first(input, count) if isinstance(input, Stacked) else input
    rows = x.reshape(-1, *shape)  # contiguous: torch.compile expects wrong strides of the gradient of others
    if not isinstance(weight, Stacked) and not isinstance(bias, Stacked):
        options = {"weight": weight} if bias is None else {"weight": weight, "bias": bias}
        return Stacked(func(rows, shape, **options, eps=eps).view(x.shape))
    out = func(rows, shape, eps=eps).view(x.shape)  # without weights: once for all members where the input is plain
    out = to_members(Stacked(out), count) if isinstance(input, Stacked) else out
    w, b = (pad_axes(to_members(v, count), input.ndim) if isinstance(v, Stacked) else v for v in (weight, bias))
    if w is not None:
        return Stacked(out * w if b is None else torch.addcmul(b, out, w))
    return Stacked(out + b)


@rule(F.rms_norm)
def _rms_norm(stacking: StackingMode, func: Func, input: Any, shape: Any, weight: Any = None, eps: Any = None) -> Any:
    return _layer_norm(stacking, func, input, shape, weight, None, eps)


# Embeddings


@rule(F.embedding)
def _embedding(
    stacking: StackingMode,
    func: Func,
    input: Any,
    weight: Any,
    padding_idx: Any = None,
    max_norm: Any = None,
    norm_type: float = 2.0,
    scale_grad_by_freq: bool = False,
    sparse: bool = False,
) -> Any:
    if not isinstance(weight, Stacked) or max_norm is not None or scale_grad_by_freq:
        return NotImplemented
    own = isinstance(input, Stacked) and len(to_first(input, stacking.num_members)) > len(weight.data)
    count, rows = stacking.num_members if own else len(weight.data), weight.data.shape[1]
    weight = Stacked(expand_groups(weight.data, count))
    index = expand_groups(to_first(input, count), count) if isinstance(input, Stacked) else to_members(input, count)
    offset = (torch.arange(count, device=index.device) * rows).view(-1, *[1] * (index.ndim - 1))
    out = F.embedding(index + offset, weight.data.flatten(0, 1), sparse=sparse)
    if padding_idx is not None:  # that row has no gradient
        out = torch.where((index == padding_idx % rows).unsqueeze(-1), out.detach(), out)
    return Stacked(out)
