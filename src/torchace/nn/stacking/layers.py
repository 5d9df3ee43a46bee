"""Rules for layers: products, convolutions, normalisation, pooling, embeddings, attention, random layers."""

from __future__ import annotations

import math
import types
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from torchace.nn.stacking.follow import RANDOM, CannotFollow, Follower, rule, without_rule
from torchace.nn.stacking.rules import Args, Func, Kwargs, argument, named
from torchace.nn.stacking.values import CHANNELS, FIRST, LAST, Stacked, for_each, to_channels, to_first, to_members


def signature(*names: str, **defaults: Any) -> Callable[[Callable[..., Any]], Any]:
    """Turn a rule with named arguments into one that takes them by position or by name.

    An argument without a default must be given. `compute` is called with the follower and all arguments; where it
    returns `NotImplemented` the function is computed without a rule.
    """
    order = [*names, *defaults]

    def decorate(compute: Callable[..., Any]) -> Any:
        def called(follower: Follower, func: Func, args: Args, kwargs: Kwargs) -> Any:
            given = {**defaults, **dict(zip(order, args, strict=False)), **kwargs}
            unknown = len(args) > len(order) or given.keys() - set(order)
            result = NotImplemented if unknown else compute(follower, func, **given)
            return without_rule(follower, func, args, kwargs) if result is NotImplemented else result

        return called

    return decorate


def _flat(value: Any) -> Tensor | None:
    """`(K·C,)` of a member's `(C,)`; a view, since running statistics are changed in place."""
    return None if value is None else value.data.view(-1)


def _are_stacked(follower: Follower, *values: Any) -> bool:
    """Whether the weights are there for each member, or not at all."""
    return all(v is None or (isinstance(v, Stacked) and v.data.shape[0] == follower.num_members) for v in values)


# Products


@rule(F.linear)
def linear(follower: Follower, func: Func, args: Args, kwargs: Kwargs) -> Any:
    """One product for all members, on vectors with the batch last: every weight keeps the layout of a member's."""
    count = follower.num_members
    input, weight, bias = (argument(args, kwargs, i, name) for i, name in enumerate(("input", "weight", "bias")))
    if not _are_stacked(follower, weight, bias):
        return without_rule(follower, func, args, kwargs)
    w, b = weight.data, None if bias is None else bias.data
    if input.ndim == 2:
        out_features, in_features = w.shape[1:]
        if not isinstance(input, Stacked):  # one wide layer
            rows, h = w.reshape(-1, in_features), input.mT
            out = rows @ h if b is None else torch.addmm(b.reshape(-1, 1), rows, h)
            return Stacked(out.view(count, out_features, h.shape[-1]), LAST)
        h = input.data if input.layout == LAST else to_first(input, count).mT  # (G, in, N)
        groups = h.shape[0]  # the members of a group are rows of one matrix
        rows = w.reshape(groups, -1, in_features)
        out = rows @ h if b is None else torch.baddbmm(b.reshape(groups, -1, 1), rows, h)
        return Stacked(out.view(count, out_features, h.shape[-1]), LAST)
    x = to_members(input, count)
    rows = x.reshape(count, -1, x.shape[-1])
    out = rows @ w.mT if b is None else torch.baddbmm(b.unsqueeze(1), rows, w.mT)
    return Stacked(out.view(count, *x.shape[1:-1], -1))


@rule(*named("matmul", "bmm", "mm", "mv"), Tensor.__matmul__, Tensor.__rmatmul__)
@signature("input", "other")
def matmul(follower: Follower, func: Func, input: Any, other: Any) -> Any:
    if func is Tensor.__rmatmul__:
        input, other = other, input
    if min(input.ndim, other.ndim) < 2:
        return NotImplemented
    if not isinstance(input, Stacked) and input.ndim == 2 and other.ndim == 2:
        return Stacked(torch.matmul(input, to_first(other, follower.num_members)))
    ndim = max(input.ndim, other.ndim)
    a, b = (_batched(follower, value, ndim) for value in (input, other))
    return Stacked(torch.matmul(a, b))


def _batched(follower: Follower, value: Any, ndim: int) -> Tensor:
    """An operand whose leading axes broadcast against `(K, ...)`."""
    if not isinstance(value, Stacked):
        return value
    data = to_members(value, follower.num_members)
    return data.reshape(data.shape[0], *[1] * (ndim - value.ndim), *data.shape[1:])


@rule(*named("addmm", "baddbmm", "addbmm"))
@signature("input", "mat1", "mat2", beta=1, alpha=1, batch1=None, batch2=None)
def addmm(follower: Follower, func: Func, **given: Any) -> Any:
    if getattr(func, "__name__", "").startswith("addbmm"):
        return NotImplemented
    count = follower.num_members
    a, b, plus = given["mat1"], given["mat2"], given["input"]
    if a.ndim == 2:
        a, b = to_members(a, count), to_members(b, count)
        plus = to_members(plus, count)
        plus = plus.reshape(count, *[1] * (3 - plus.ndim), *plus.shape[1:])
        return Stacked(torch.baddbmm(plus, a, b, beta=given["beta"], alpha=given["alpha"]))
    return NotImplemented


@rule(torch.einsum)
def einsum(follower: Follower, func: Func, args: Args, kwargs: Kwargs) -> Any:
    equation, *operands = args
    if len(operands) == 1 and isinstance(operands[0], (list, tuple)):
        operands = list(operands[0])
    if not isinstance(equation, str) or "->" not in equation:
        return without_rule(follower, func, args, kwargs)
    member = next(letter for letter in "KABCDEFGHIJLMNOPQRSTUVWXYZ" if letter not in equation)
    inputs, output = equation.replace(" ", "").split("->")
    subscripts = [
        member + part if isinstance(value, Stacked) else part
        for part, value in zip(inputs.split(","), operands, strict=True)
    ]
    data = [to_members(v, follower.num_members) if isinstance(v, Stacked) else v for v in operands]
    return Stacked(torch.einsum(f"{','.join(subscripts)}->{member}{output}", *data))


# Convolutions and pooling: members among the channels


@rule(F.conv1d, F.conv2d, F.conv3d)
@signature("input", "weight", bias=None, stride=1, padding=0, dilation=1, groups=1)
def convolution(
    follower: Follower,
    func: Func,
    input: Any,
    weight: Any,
    bias: Any,
    stride: Any,
    padding: Any,
    dilation: Any,
    groups: int,
) -> Any:
    count = follower.num_members
    if not _are_stacked(follower, weight, bias) or input.ndim != weight.ndim:
        return NotImplemented
    if not isinstance(input, Stacked) and groups == 1:  # one wide layer
        x, sources = input, 1
    elif isinstance(input, Stacked) and input.layout == FIRST and groups == 1:
        sources = len(input.data)
        x = to_channels(input, sources)
    else:
        x, sources = to_channels(input, count), count
    b = None if bias is None else bias.data.flatten()
    out = func(x, weight.data.flatten(0, 1), b, stride, padding, dilation, sources * groups)
    follower.largest = max(follower.largest, out.numel() // count)
    return Stacked(out, CHANNELS)


@rule(F.conv_transpose1d, F.conv_transpose2d, F.conv_transpose3d)
@signature("input", "weight", bias=None, stride=1, padding=0, output_padding=0, groups=1, dilation=1)
def transposed_convolution(follower: Follower, func: Func, **given: Any) -> Any:
    count = follower.num_members
    weight, bias = given["weight"], given["bias"]
    if not _are_stacked(follower, weight, bias) or given["input"].ndim != weight.ndim:
        return NotImplemented
    b = None if bias is None else bias.data.flatten()
    options = [given[name] for name in ("stride", "padding", "output_padding")]
    x = to_channels(given["input"], count)
    out = func(x, weight.data.flatten(0, 1), b, *options, count * given["groups"], given["dilation"])
    return Stacked(out, CHANNELS)


def _by_channel(*names: str) -> list[Any]:
    return [f for name in names for d in (1, 2, 3) for f in named(f"{name}{d}d")]


@rule(*_by_channel("max_pool", "avg_pool", "adaptive_avg_pool", "adaptive_max_pool", "lp_pool"))
def pooling(follower: Follower, func: Func, args: Args, kwargs: Kwargs) -> Any:
    x = args[0] if args else kwargs.pop("input")
    axes = int(func.__name__.rstrip("_").removesuffix("d")[-1])
    if not isinstance(x, Stacked) or x.ndim != axes + 2 or kwargs.get("return_indices"):
        return without_rule(follower, func, args or (x,), kwargs)
    return Stacked(func(to_channels(x, follower.num_members), *args[1:], **kwargs), CHANNELS)


@rule(F.interpolate, F.upsample)
def resize(follower: Follower, func: Func, args: Args, kwargs: Kwargs) -> Any:
    x = args[0] if args else kwargs.pop("input")
    return Stacked(func(to_channels(x, follower.num_members), *args[1:], **kwargs), CHANNELS)


@rule(F.pad, torch._C._nn.pad)
@signature("input", "pad", mode="constant", value=None)
def pad(follower: Follower, func: Func, input: Any, pad: Any, mode: str, value: Any) -> Any:
    if input.layout == CHANNELS and len(pad) // 2 <= input.ndim - 2:
        return Stacked(F.pad(input.data, pad, mode, value), CHANNELS)
    if mode != "constant":
        return NotImplemented
    return Stacked(F.pad(to_first(input, follower.num_members), pad, mode, value))


@rule(*named("pixel_shuffle", "pixel_unshuffle"))
def pixels(follower: Follower, func: Func, args: Args, kwargs: Kwargs) -> Any:
    return Stacked(func(to_first(args[0], follower.num_members), *args[1:], **kwargs))


# Normalisation


@rule(F.batch_norm, torch.batch_norm, F.instance_norm)
def by_channel_norm(follower: Follower, func: Func, args: Args, kwargs: Kwargs) -> Any:
    """Each channel of each member has its own statistics anyway."""
    tensors = ("running_mean", "running_var", "weight", "bias")
    if func is torch.batch_norm:
        return without_rule(follower, func, args, kwargs)
    given = {**dict(zip(("input", *tensors), args, strict=False)), **kwargs}
    x = given.pop("input")
    weights = {name: given.pop(name, None) for name in tensors}
    if not _are_stacked(follower, *weights.values()) or (
        not isinstance(x, Stacked) and all(v is None for v in weights.values())
    ):
        return without_rule(follower, func, args, kwargs)
    flat = {name: _flat(value) for name, value in weights.items()}
    return Stacked(func(to_channels(x, follower.num_members), *flat.values(), *args[5:], **given), CHANNELS)


@rule(F.group_norm)
@signature("input", "num_groups", weight=None, bias=None, eps=1e-5)
def group_norm(follower: Follower, func: Func, input: Any, num_groups: int, weight: Any, bias: Any, eps: float) -> Any:
    count = follower.num_members
    if not _are_stacked(follower, weight, bias):
        return NotImplemented
    w, b = (None if value is None else value.data.flatten() for value in (weight, bias))
    return Stacked(F.group_norm(to_channels(input, count), count * num_groups, w, b, eps), CHANNELS)


@rule(F.layer_norm, F.rms_norm)
def layer_norm(follower: Follower, func: Func, args: Args, kwargs: Kwargs) -> Any:
    names = ("input", "normalized_shape", "weight") + (("bias", "eps") if func is F.layer_norm else ("eps",))
    given = {**dict(zip(names, args, strict=False)), **kwargs}
    x, weight, bias = given["input"], given.pop("weight", None), given.pop("bias", None)
    given["input"] = to_first(x, follower.num_members) if isinstance(x, Stacked) else x
    out = func(**given)  # without weights: the same for all members where the input is
    if weight is None and bias is None:
        return Stacked(out) if isinstance(x, Stacked) else out
    out = to_members(Stacked(out), follower.num_members) if isinstance(x, Stacked) else out
    w, b = (_affine(follower, value, x.ndim) for value in (weight, bias))
    if w is not None:
        return Stacked(out * w if b is None else torch.addcmul(b, out, w))
    return Stacked(out if b is None else out + b)


def _affine(follower: Follower, value: Any, ndim: int) -> Tensor | None:
    """Weights over the last axes, `(K, 1, ..., C)`."""
    if not isinstance(value, Stacked):
        return value
    data = for_each(value.data, follower.num_members)
    return data.reshape(data.shape[0], *[1] * (ndim - value.ndim), *data.shape[1:])


@rule(F.prelu, torch.prelu)
@signature("input", "weight")
def prelu(follower: Follower, func: Func, input: Any, weight: Any) -> Any:
    if not isinstance(input, Stacked) or not _are_stacked(follower, weight) or input.ndim < 2:
        return NotImplemented
    channels = input.shape(follower.num_members)[1]
    w = for_each(weight.data, follower.num_members).expand(-1, channels).reshape(-1)
    return Stacked(F.prelu(to_channels(input, follower.num_members), w), CHANNELS)


# Embeddings and attention


@rule(F.embedding)
@signature("input", "weight", padding_idx=None, max_norm=None, norm_type=2.0, scale_grad_by_freq=False, sparse=False)
def embedding(follower: Follower, func: Func, input: Any, weight: Any, padding_idx: Any, **options: Any) -> Any:
    count = follower.num_members
    if not _are_stacked(follower, weight) or options["max_norm"] is not None or options["scale_grad_by_freq"]:
        return NotImplemented
    rows = weight.data.shape[1]
    index = to_members(input, count)
    offset = (torch.arange(count, device=index.device) * rows).view(-1, *[1] * (index.ndim - 1))
    out = F.embedding(index + offset, weight.data.flatten(0, 1), sparse=options["sparse"])
    if padding_idx is not None:  # that row has no gradient
        padding = (index == padding_idx % rows).unsqueeze(-1)
        out = torch.where(padding, out.detach(), out)
    return Stacked(out)


@rule(F.scaled_dot_product_attention)
@signature("query", "key", "value", attn_mask=None, dropout_p=0.0, is_causal=False, scale=None, enable_gqa=False)
def attention(follower: Follower, func: Func, dropout_p: float, attn_mask: Any, **given: Any) -> Any:
    """Members folded into the batch."""
    count = follower.num_members
    query, key, value = (given.pop(name) for name in ("query", "key", "value"))
    if query.ndim < 3 and not (dropout_p > 0 and follower.draws is not None):
        return NotImplemented
    q, k, v = (to_members(part, count) for part in (query, key, value))
    if attn_mask is not None:
        ndim = attn_mask.ndim
        if ndim < query.ndim and not isinstance(attn_mask, Stacked):
            mask = attn_mask
        else:
            mask = to_members(attn_mask, count)
            mask = mask.reshape(count, *[1] * (query.ndim - ndim), *mask.shape[1:])
            if mask.shape[1] == 1 and q.shape[1] > 1:
                mask = mask.expand(-1, q.shape[1], *[-1] * (mask.ndim - 2))
            mask = mask.flatten(0, 1)
    else:
        mask = None
    if dropout_p > 0 and follower.draws is not None:
        return Stacked(_attention_with_keys(follower, q, k, v, mask, dropout_p, **given))
    out = func(*(part.flatten(0, 1) for part in (q, k, v)), attn_mask=mask, dropout_p=dropout_p, **given)
    return Stacked(out.unflatten(0, (count, -1)))


def _attention_with_keys(
    follower: Follower,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    mask: Tensor | None,
    p: float,
    is_causal: bool,
    scale: float | None,
    enable_gqa: bool,
) -> Tensor:
    """Attention whose dropout is drawn from the follower's numbers; written out, since PyTorch's draws by itself."""
    if enable_gqa:
        k, v = (part.repeat_interleave(q.shape[-3] // part.shape[-3], -3) for part in (k, v))
    logits = q @ k.mT * (1 / math.sqrt(q.shape[-1]) if scale is None else scale)
    if is_causal:
        mask = torch.ones(logits.shape[-2:], dtype=torch.bool, device=q.device).tril()
    if mask is not None:
        mask = mask.unflatten(0, (len(q), -1)) if mask.ndim == q.ndim - 1 else mask
        logits = logits.masked_fill(~mask, -torch.inf) if mask.dtype == torch.bool else logits + mask
    weights = logits.softmax(-1)
    return (weights * _keep(follower, weights, weights.shape, p)) @ v


@rule(F.multi_head_attention_forward)
def composite(follower: Follower, func: Func, args: Args, kwargs: Kwargs) -> Any:
    """A function that PyTorch writes in Python: its body is followed like a member's forward."""
    args, kwargs = follower.lower_all(args), follower.lower_all(kwargs)
    with follower:
        return _bodies[func](*args, **kwargs)


def _body(func: Any) -> Any:
    """A function without its own test for overrides, which would end here again."""
    no = lambda *_: False  # noqa: E731
    names = ("has_torch_function", "has_torch_function_unary", "has_torch_function_variadic")
    body = types.FunctionType(
        func.__code__, {**func.__globals__, **dict.fromkeys(names, no)}, func.__name__, func.__defaults__
    )
    body.__kwdefaults__ = func.__kwdefaults__
    return body


_bodies = {F.multi_head_attention_forward: _body(F.multi_head_attention_forward)}


# Random layers: each member draws for itself


@rule(F.dropout, torch.dropout)
def dropout(follower: Follower, func: Func, args: Args, kwargs: Kwargs) -> Any:
    x = args[0] if args else kwargs["input"]
    p = argument(args, kwargs, 1, "p", 0.5)
    if not argument(args, kwargs, 2, "training", kwargs.get("train", True)) or p == 0:
        return x
    if isinstance(x, Stacked) and x.layout != FIRST and follower.draws is None:
        return Stacked(F.dropout(x.data, p), x.layout)
    data = to_members(x, follower.num_members)
    if follower.draws is None:
        return Stacked(F.dropout(data, p))
    return Stacked(data * _keep(follower, data, data.shape, p))


@rule(*_by_channel("dropout"), F.feature_alpha_dropout, F.alpha_dropout)
def channel_dropout(follower: Follower, func: Func, args: Args, kwargs: Kwargs) -> Any:
    x = args[0] if args else kwargs["input"]
    p = argument(args, kwargs, 1, "p", 0.5)
    if not argument(args, kwargs, 2, "training", func not in (F.alpha_dropout, F.feature_alpha_dropout)) or p == 0:
        return x
    if follower.draws is None:
        return Stacked(func(to_channels(x, follower.num_members), p, True), CHANNELS)
    data = to_members(x, follower.num_members)
    shape = data.shape if func is F.alpha_dropout else (*data.shape[:3], *[1] * (data.ndim - 3))
    keep = _keep(follower, data, shape, p)
    if func not in (F.alpha_dropout, F.feature_alpha_dropout):
        return Stacked(data * keep)
    low = -1.7580993408473766  # what SELU tends to; mean and variance stay
    scale = 0.0 if p >= 1 else (1 - p + low**2 * p * (1 - p)) ** -0.5
    return Stacked(scale * (torch.where(keep > 0, data, low) - low * p))


def _keep(follower: Follower, like: Tensor, shape: Any, p: float) -> Tensor:
    assert follower.draws is not None
    if p >= 1:
        return like.new_zeros(shape)
    return (follower.draws.uniform(tuple(shape), torch.float32, like.device) >= p).to(like.dtype) / (1 - p)


@rule(*named("empty_like", "rand_like", "randn_like"), Tensor.new_empty)
def made_like(follower: Follower, func: Func, args: Args, kwargs: Kwargs) -> Any:
    x = args[0]
    sizes = x.shape(follower.num_members) if isinstance(x, Stacked) else x.shape
    if func is Tensor.new_empty:
        sizes = argument(args, kwargs, 1, "size") if not isinstance(args[1], int) else args[1:]
    data = x.data if isinstance(x, Stacked) else x
    options = {"dtype": data.dtype, "device": data.device, **{k: v for k, v in kwargs.items() if k != "size"}}
    options.pop("memory_format", None)
    make: dict[str, Func] = {"rand_like": torch.rand, "randn_like": torch.randn}
    return made(follower, make.get(func.__name__, torch.empty), (tuple(sizes),), options)


@rule(torch.empty, torch.rand, torch.randn)
def made(follower: Follower, func: Func, args: Args, kwargs: Kwargs) -> Any:
    """Numbers made in a forward are each member's own: `torch.empty` is to be filled, as by `bernoulli_`."""
    given = args or (kwargs.pop("size"),)
    sizes = given[0] if isinstance(given[0], (list, tuple)) else given
    shape = (follower.num_members, *sizes)
    if func is torch.empty or follower.draws is None:
        return Stacked(func(shape, **kwargs))
    data = torch.empty(shape, **kwargs)
    return Stacked(
        _filled(follower, data, lambda u: u if func is torch.rand else math.sqrt(2) * torch.erfinv(2 * u - 1))
    )


def _filled(follower: Follower, data: Tensor, transform: Callable[[Tensor], Tensor]) -> Tensor:
    assert follower.draws is not None
    dtype = data.dtype if data.dtype in (torch.float32, torch.float64) else torch.float32
    return data.copy_(transform(follower.draws.uniform(tuple(data.shape), dtype, data.device)))


@rule(Tensor.bernoulli_, Tensor.uniform_, Tensor.normal_)
def filled(follower: Follower, func: Func, args: Args, kwargs: Kwargs) -> Any:
    x, *given = args
    if not isinstance(x, Stacked) or len(x.data) != follower.num_members:
        raise CannotFollow("random numbers would be written into a tensor that all members share")
    if follower.draws is None or x.layout == CHANNELS:
        func(x.data, *given, **kwargs)
    elif func is Tensor.bernoulli_:
        p = argument(args, kwargs, 1, "p", 0.5)
        _filled(follower, x.data, lambda u: u < (p.data if isinstance(p, Stacked) else p))
    elif func is Tensor.uniform_:
        low, high = argument(args, kwargs, 1, "from", 0.0), argument(args, kwargs, 2, "to", 1.0)
        _filled(follower, x.data, lambda u: low + (high - low) * u)
    else:
        mean, std = argument(args, kwargs, 1, "mean", 0.0), argument(args, kwargs, 2, "std", 1.0)
        _filled(follower, x.data, lambda u: mean + std * math.sqrt(2) * torch.erfinv(2 * u - 1))
    return x


@rule(torch.bernoulli, Tensor.bernoulli)
def bernoulli(follower: Follower, func: Func, args: Args, kwargs: Kwargs) -> Any:
    if len(args) > 1 or kwargs:
        return without_rule(follower, func, args, kwargs)
    data = to_members(args[0], follower.num_members)
    if follower.draws is None:
        return Stacked(torch.bernoulli(data))
    return Stacked(_filled(follower, torch.empty_like(data, memory_format=torch.contiguous_format), lambda u: u < data))


RANDOM.update((F.dropout, torch.dropout, *_by_channel("dropout"), F.alpha_dropout, F.feature_alpha_dropout))
RANDOM.update((torch.empty, torch.rand, torch.randn, *named("rand_like", "randn_like", "empty_like"), Tensor.new_empty))
RANDOM.update((torch.bernoulli, Tensor.bernoulli))
