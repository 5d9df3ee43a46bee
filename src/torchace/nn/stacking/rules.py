"""Rules for functions without weights: elementwise, shapes, reductions, queries."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from torchace.nn.stacking.follow import QUERIES, CannotFollow, Follower, rule, without_rule
from torchace.nn.stacking.values import CHANNELS, FIRST, LAST, Stacked, for_each, to_first, to_members

Func = Callable[..., Any]
Args = tuple[Any, ...]
Kwargs = dict[str, Any]


def named(*names: str) -> list[Any]:
    """The functions of these names in `torch`, `torch.nn.functional` and `Tensor`, also those that work in place."""
    found = []
    for name in names:
        for space in (torch, F, Tensor, torch.special, torch.linalg, torch._C._nn):
            found += [f for f in (getattr(space, name, None), getattr(space, f"{name}_", None)) if callable(f)]
    return found


def getters(*names: str) -> list[Any]:
    """The functions behind properties of tensors."""
    return [getattr(Tensor, name).__get__ for name in names]


def argument(args: Args, kwargs: Kwargs, position: int, name: str, default: Any = None) -> Any:
    """An argument that may be given by position or by name."""
    return args[position] if len(args) > position else kwargs.get(name, default)


# Elementwise functions of one tensor: the layout does not matter.


@rule(
    *named(
        *("relu", "relu6", "leaky_relu", "elu", "selu", "celu", "gelu", "silu", "mish", "tanh", "sigmoid"),
        *("logsigmoid", "softplus", "softsign", "hardswish", "hardtanh", "hardsigmoid", "tanhshrink", "hardshrink"),
        *("softshrink", "threshold", "exp", "expm1", "log", "log1p", "log2", "log10", "sqrt", "rsqrt", "square"),
        *("reciprocal", "neg", "negative", "abs", "absolute", "sign", "sin", "cos", "tan", "asin", "acos", "atan"),
        *("sinh", "cosh", "erf", "erfc", "erfinv", "expit", "floor", "ceil", "round", "trunc", "frac", "nan_to_num"),
        *("logical_not", "bitwise_not", "isfinite", "isnan", "isinf", "positive", "signbit", "sgn", "digamma"),
        *("lgamma", "float", "double", "half", "bfloat16", "long", "int", "bool", "detach", "requires_grad"),
        *("zero", "fill", "deg2rad", "rad2deg", "sinc", "logit"),
    ),
    *(getattr(Tensor, name) for name in ("__neg__", "__invert__", "__abs__", "__pos__", "cuda", "cpu", "type")),
    *getters("data", "real", "imag"),
)
def elementwise(follower: Follower, func: Func, args: Args, kwargs: Kwargs) -> Any:
    x = args[0] if args else kwargs.pop("input")
    if not isinstance(x, Stacked) or any(isinstance(v, (Stacked, Tensor)) for v in (*args[1:], *kwargs.values())):
        return without_rule(follower, func, args, kwargs)
    return Stacked(func(x.data, *args[1:], **kwargs), x.layout)


@rule(Tensor.contiguous, Tensor.clone, torch.clone, Tensor.to)
def converted(follower: Follower, func: Func, args: Args, kwargs: Kwargs) -> Any:
    x, *others = args
    others = [other.data if isinstance(other, Stacked) else other for other in others]  # its type and device
    if not isinstance(x, Stacked):
        return func(x, *others, **kwargs)
    if x.layout == FIRST:
        kwargs = {name: value for name, value in kwargs.items() if name != "memory_format"}  # of a member's axes
    return Stacked(func(x.data, *others, **kwargs), x.layout)


# Functions of several tensors that broadcast.


@rule(
    *named(
        *("add", "sub", "subtract", "rsub", "mul", "multiply", "div", "divide", "true_divide", "floor_divide", "pow"),
        *("remainder", "fmod", "maximum", "minimum", "fmax", "fmin", "where", "eq", "ne", "lt", "le", "gt", "ge"),
        *("logical_and", "logical_or", "logical_xor", "bitwise_and", "bitwise_or", "bitwise_xor", "masked_fill"),
        *("lerp", "addcmul", "addcdiv", "atan2", "clamp", "clip", "clamp_min", "clamp_max", "hypot", "xlogy"),
        *("float_power", "copysign", "isclose", "heaviside", "logaddexp", "copy"),
    ),
    *(
        getattr(Tensor, f"__{prefix}{name}__")
        for name in ("add", "sub", "mul", "truediv", "floordiv", "pow", "mod", "and", "or", "xor")
        for prefix in ("", "r", "i")
        if hasattr(Tensor, f"__{prefix}{name}__")
    ),
    *(getattr(Tensor, f"__{name}__") for name in ("eq", "ne", "lt", "le", "gt", "ge")),
)
def broadcast(follower: Follower, func: Func, args: Args, kwargs: Kwargs) -> Any:
    count = follower.num_members
    values = [*args, *kwargs.values()]
    tensors = [v for v in values if isinstance(v, (Stacked, Tensor))]
    stacked = [v for v in tensors if isinstance(v, Stacked)]
    first = stacked[0]
    if len(tensors) == 1:
        return Stacked(_call(func, args, kwargs, {id(first): first.data}), first.layout)
    if all(isinstance(v, Stacked) and v.layout == LAST and v.data.shape == first.data.shape for v in tensors):
        return Stacked(_call(func, args, kwargs, {id(v): v.data for v in stacked}), LAST)
    in_place = _changes_first(func) and len(args) > 0
    ndim = max(v.ndim for v in tensors)
    if any(v.layout == CHANNELS and v.ndim == ndim for v in stacked):
        # (N, K, C, ...): the member axis in the middle, as views of the channels
        if all(
            isinstance(v, Stacked) and v.layout == CHANNELS and v.data.shape[1] == first.data.shape[1]
            if v.ndim == ndim
            else not isinstance(v, Stacked) and v.ndim < ndim - 1
            for v in tensors
        ):
            return Stacked(_call(func, args, kwargs, {id(v): v.data for v in stacked}), CHANNELS)
        if in_place and (not isinstance(args[0], Stacked) or args[0].layout != CHANNELS):
            return broadcast_first(follower, func, args, kwargs, tensors, ndim, in_place)
        aligned = {}
        for v in tensors:
            if isinstance(v, Stacked) and v.layout == CHANNELS and v.ndim == ndim:
                data = v.data.unflatten(1, (count, -1))
            elif isinstance(v, Stacked):
                data = _padded(to_members(v, count), ndim).movedim(0, 1)
            else:
                data = v.unsqueeze(1) if v.ndim == ndim else v
            aligned[id(v)] = _scalar_like(data, v, tensors)
        result = _call(func, args, kwargs, aligned)
        if in_place:
            return args[0]
        return Stacked(result.flatten(1, 2), CHANNELS)
    return broadcast_first(follower, func, args, kwargs, tensors, ndim, in_place)


def broadcast_first(
    follower: Follower, func: Func, args: Args, kwargs: Kwargs, tensors: list[Any], ndim: int, in_place: bool
) -> Any:
    count = follower.num_members
    firsts = {id(v): to_first(v, count) for v in tensors if isinstance(v, Stacked)}
    if len({len(data) for data in firsts.values()}) > 1:
        firsts = {key: for_each(data, count) for key, data in firsts.items()}
    if in_place and (not isinstance(args[0], Stacked) or len(args[0].data) < max(map(len, firsts.values()))):
        func, in_place = _out_of_place(func), False  # what members share becomes each one's own
    aligned = {id(v): v for v in tensors}
    aligned |= {key: _padded(data, ndim) for key, data in firsts.items()}
    aligned = {id(v): _scalar_like(aligned[id(v)], v, tensors) for v in tensors}
    result = _call(func, args, kwargs, aligned)
    return args[0] if in_place else Stacked(result)


def _call(func: Func, args: Args, kwargs: Kwargs, data: dict[int, Tensor]) -> Any:
    return func(
        *(data.get(id(v), v) for v in args),
        **{name: data.get(id(v), v) for name, v in kwargs.items()},
    )


def _padded(data: Tensor, ndim: int) -> Tensor:
    """`(K, ...)` with axes of length 1 so that a member has `ndim`."""
    missing = ndim + 1 - data.ndim
    return data if missing <= 0 else data.reshape(data.shape[0], *[1] * missing, *data.shape[1:])


def _scalar_like(data: Tensor, value: Any, tensors: list[Any]) -> Tensor:
    """A member's number does not decide the result's type beside a tensor with axes, as PyTorch has it."""
    if not isinstance(value, Stacked) or value.ndim:
        return data
    for other in tensors:
        dtype = other.data.dtype if isinstance(other, Stacked) else other.dtype
        if other.ndim and dtype.is_floating_point >= data.dtype.is_floating_point:
            return data.to(dtype)
    return data


def _changes_first(func: Func) -> bool:
    name = getattr(func, "__name__", "")
    return (name.endswith("_") and not name.endswith("__")) or (name.startswith("__i") and name != "__invert__")


def _out_of_place(func: Func) -> Func:
    """The function that returns what this one writes into its first argument, as `h + y` for `h += y`."""
    name = func.__name__.strip("_").removeprefix("i") if func.__name__.startswith("__i") else func.__name__[:-1]
    name = {"truediv": "div", "floordiv": "floor_divide", "mod": "remainder"}.get(name, name)
    name = f"bitwise_{name}" if name in ("and", "or", "xor") else name
    found = getattr(Tensor, name, None)
    if found is None:
        raise CannotFollow("a member's numbers would be written into a tensor that all members share")
    return found


# Functions that take an axis: a member's axis d is axis d + 1.


def shifted(dim: Any) -> Any:
    """A member's axes counted with the member axis in front."""
    if isinstance(dim, (list, tuple)):
        return [shifted(d) for d in dim]
    return dim + 1 if isinstance(dim, int) and dim >= 0 else dim


def reduction(position: int) -> Callable[..., Any]:
    """A rule for functions that reduce or rearrange along `dim`, which is argument `position`."""

    def compute(follower: Follower, func: Func, args: Args, kwargs: Kwargs) -> Any:
        x = args[0] if args else kwargs.pop("input")
        if not isinstance(x, Stacked) or any(isinstance(v, (Stacked, Tensor)) for v in (*args[1:], *kwargs.values())):
            return without_rule(follower, func, args, kwargs)
        name = "axis" if "axis" in kwargs else "dim"
        dim = argument(args, kwargs, position, name)
        if dim is None:
            return without_rule(follower, func, args, kwargs)
        dims = dim if isinstance(dim, (list, tuple)) else [dim]
        if x.layout == CHANNELS and dims and all(d % x.ndim > 1 for d in dims):
            result = func(x.data, *args[1:], **kwargs)  # axes of space: each channel by itself
            return _each(result, CHANNELS)
        data = to_first(x, follower.num_members)
        if len(args) > position:
            return _each(func(data, *args[1:position], shifted(dim), *args[position + 1 :], **kwargs), FIRST)
        return _each(func(data, *args[1:], **{**kwargs, name: shifted(dim)}), FIRST)

    return compute


def _each(result: Any, layout: str) -> Any:
    if isinstance(result, Tensor):
        return Stacked(result, layout)
    return type(result)([Stacked(part, layout) for part in result])


rule(*named("softmax", "log_softmax", "softmin", "logsumexp", "cumsum", "cumprod", "amax", "amin"))(reduction(1))
rule(*named("max", "min", "argmax", "argmin", "sort", "argsort", "any", "all", "prod", "median", "squeeze"))(
    reduction(1)
)
rule(*named("glu", "flip", "logcumsumexp"))(reduction(1))
rule(*named("norm", "normalize", "vector_norm", "topk"))(reduction(2))


@rule(*named("sum", "mean", "var", "std", "count_nonzero"))
def moments(follower: Follower, func: Func, args: Args, kwargs: Kwargs) -> Any:
    dim = argument(args, kwargs, 1, "dim", kwargs.get("axis"))
    if isinstance(args[0], Stacked) and dim is None and len(args) == 1:
        kwargs = {**kwargs, "dim": list(range(args[0].ndim))}
        if not kwargs["dim"]:
            return without_rule(follower, func, args, {k: v for k, v in kwargs.items() if k != "dim"})
    return reduction(1)(follower, func, args, kwargs)


@rule(*named("chunk", "split", "tensor_split"), torch.functional.split)
def pieces(follower: Follower, func: Func, args: Args, kwargs: Kwargs) -> Any:
    x, sections = (
        args[0],
        argument(args, kwargs, 1, "chunks", kwargs.get("split_size_or_sections", kwargs.get("split_size"))),
    )
    if not isinstance(x, Stacked) or sections is None:
        return without_rule(follower, func, args, kwargs)
    dim = shifted(argument(args, kwargs, 2, "dim", 0))
    return tuple(Stacked(part) for part in func(to_first(x, follower.num_members), sections, dim))


@rule(*named("unbind", "unsqueeze", "select", "narrow", "diff"))
def along(follower: Follower, func: Func, args: Args, kwargs: Kwargs) -> Any:
    if not isinstance(args[0], Stacked) or any(isinstance(v, (Stacked, Tensor)) for v in args[1:]):
        return without_rule(follower, func, args, kwargs)
    dim = shifted(argument(args, kwargs, 1, "dim", 0))
    kwargs.pop("dim", None)
    return _each(func(to_first(args[0], follower.num_members), dim, *args[2:], **kwargs), FIRST)


@rule(*named("roll"))
def roll(follower: Follower, func: Func, args: Args, kwargs: Kwargs) -> Any:
    shifts, dims = argument(args, kwargs, 1, "shifts"), argument(args, kwargs, 2, "dims")
    if dims is None or dims == ():
        return without_rule(follower, func, args, kwargs)
    return Stacked(to_first(args[0], follower.num_members).roll(shifts, shifted(dims)))


@rule(*named("gather"))
def gather(follower: Follower, func: Func, args: Args, kwargs: Kwargs) -> Any:
    x, dim, index = args[0], argument(args, kwargs, 1, "dim"), argument(args, kwargs, 2, "index")
    return Stacked(to_members(x, follower.num_members).gather(shifted(dim), to_members(index, follower.num_members)))


@rule(*named("index_select"))
def index_select(follower: Follower, func: Func, args: Args, kwargs: Kwargs) -> Any:
    x, dim, index = args[0], argument(args, kwargs, 1, "dim"), argument(args, kwargs, 2, "index")
    if not isinstance(x, Stacked) or isinstance(index, Stacked):
        return without_rule(follower, func, args, kwargs)
    return Stacked(to_first(x, follower.num_members).index_select(dim % x.ndim + 1, index))


@rule(*named("transpose", "swapaxes", "swapdims", "movedim", "moveaxis"))
def two_axes(follower: Follower, func: Func, args: Args, kwargs: Kwargs) -> Any:
    x, *dims = args
    dims = [*dims, *kwargs.values()]
    return Stacked(func(to_first(x, follower.num_members), *map(shifted, dims)))


@rule(*named("permute"))
def permute(follower: Follower, func: Func, args: Args, kwargs: Kwargs) -> Any:
    x, dims = args[0], _sizes(args, kwargs, "dims")
    return Stacked(to_first(x, follower.num_members).permute(0, *(d % x.ndim + 1 for d in dims)))


@rule(*getters("T", "mT", "H", "mH"), *named("t", "adjoint"))
def transposed(follower: Follower, func: Func, args: Args, kwargs: Kwargs) -> Any:
    x = args[0]
    if x.ndim != 2 or x.data.is_complex():
        return without_rule(follower, func, args, kwargs)
    return Stacked(to_first(x, follower.num_members).mT)


def _sizes(args: Args, kwargs: Kwargs, name: str) -> list[Any]:
    """Sizes given one by one or as a list."""
    given = list(args[1:]) or [kwargs[name]]
    return list(given[0]) if isinstance(given[0], (list, tuple)) else given


@rule(*named("reshape", "view"))
def reshape(follower: Follower, func: Func, args: Args, kwargs: Kwargs) -> Any:
    x = args[0]
    if kwargs.get("dtype") is not None or (len(args) > 1 and isinstance(args[1], torch.dtype)):
        return without_rule(follower, func, args, kwargs)
    sizes = _sizes(args, kwargs, "shape" if "shape" in kwargs else "size")
    data = to_first(x, follower.num_members)
    return Stacked(data.reshape(data.shape[0], *sizes))


@rule(*named("view_as", "reshape_as", "expand_as"))
def shaped_as(follower: Follower, func: Func, args: Args, kwargs: Kwargs) -> Any:
    x, other = args
    shape = other.shape(follower.num_members) if isinstance(other, Stacked) else other.shape
    if not isinstance(x, Stacked):
        return func(x, other.data.new_empty(shape))
    return (expand if func is Tensor.expand_as else reshape)(follower, func, (x, shape), {})


@rule(*named("type_as"))
def type_as(follower: Follower, func: Func, args: Args, kwargs: Kwargs) -> Any:
    return converted(
        follower, Tensor.to, (args[0], args[1].data.dtype if isinstance(args[1], Stacked) else args[1].dtype), {}
    )


@rule(*named("flatten"))
def flatten(follower: Follower, func: Func, args: Args, kwargs: Kwargs) -> Any:
    start, end = argument(args, kwargs, 1, "start_dim", 0), argument(args, kwargs, 2, "end_dim", -1)
    data = to_first(args[0], follower.num_members)
    return Stacked(data.unsqueeze(1) if args[0].ndim == 0 else data.flatten(shifted(start), shifted(end)))


@rule(*named("unflatten"))
def unflatten(follower: Follower, func: Func, args: Args, kwargs: Kwargs) -> Any:
    dim, sizes = argument(args, kwargs, 1, "dim"), argument(args, kwargs, 2, "sizes")
    return Stacked(to_first(args[0], follower.num_members).unflatten(shifted(dim), sizes))


@rule(*named("expand", "broadcast_to"))
def expand(follower: Follower, func: Func, args: Args, kwargs: Kwargs) -> Any:
    sizes = _sizes(args, kwargs, "size")
    data = _padded(to_first(args[0], follower.num_members), len(sizes))
    return Stacked(data.expand(-1, *sizes))


@rule(*named("repeat", "tile"))
def repeat(follower: Follower, func: Func, args: Args, kwargs: Kwargs) -> Any:
    sizes = _sizes(args, kwargs, "repeats" if "repeats" in kwargs else "dims")
    ndim = max(len(sizes), args[0].ndim)
    data = _padded(to_first(args[0], follower.num_members), ndim)
    return Stacked(data.repeat(1, *[1] * (ndim - len(sizes)), *sizes))


@rule(*named("repeat_interleave"))
def repeat_interleave(follower: Follower, func: Func, args: Args, kwargs: Kwargs) -> Any:
    repeats, dim = argument(args, kwargs, 1, "repeats"), argument(args, kwargs, 2, "dim")
    if not isinstance(args[0], Stacked) or dim is None or isinstance(repeats, Stacked):
        return without_rule(follower, func, args, kwargs)
    return Stacked(to_first(args[0], follower.num_members).repeat_interleave(repeats, shifted(dim)))


@rule(*named("cat", "concat", "concatenate", "stack"))
def joined(follower: Follower, func: Func, args: Args, kwargs: Kwargs) -> Any:
    parts = argument(args, kwargs, 0, "tensors")
    dim = argument(args, kwargs, 1, "dim", kwargs.get("axis", 0))
    count = follower.num_members
    if func is not torch.stack and dim == 1 and all(isinstance(p, Stacked) and p.layout == CHANNELS for p in parts):
        return Stacked(torch.cat([p.data.unflatten(1, (count, -1)) for p in parts], 2).flatten(1, 2), CHANNELS)
    if func is not torch.stack:  # empty vectors are left out, as by torch.cat
        parts = [p for p in parts if isinstance(p, Stacked) or p.shape != (0,)]
    return Stacked(func([to_members(p, count) for p in parts], shifted(dim)))


@rule(Tensor.__getitem__)
def getitem(follower: Follower, func: Func, args: Args, kwargs: Kwargs) -> Any:
    x, index = args
    index = index if isinstance(index, tuple) else (index,)
    arrays = [i for i, part in enumerate(index) if isinstance(part, (Tensor, list, Stacked))]
    if (
        len(index) == 1
        and isinstance(index[0], Stacked)
        and isinstance(x, Stacked)
        and not index[0].data.dtype.is_floating_point
        and index[0].data.dtype != torch.bool
    ):
        data, where = (to_members(v, follower.num_members) for v in (x, index[0]))
        each = torch.arange(follower.num_members, device=data.device).view(-1, *[1] * (where.ndim - 1))
        return Stacked(data[each, where])
    apart = arrays and arrays[-1] - arrays[0] + 1 != len(arrays)  # then the result's axes are in another order
    if not isinstance(x, Stacked) or apart or any(isinstance(part, Stacked) for part in index):
        return without_rule(follower, func, args, kwargs)
    return Stacked(to_first(x, follower.num_members)[(slice(None), *index)])


@rule(Tensor.__setitem__)
def setitem(follower: Follower, func: Func, args: Args, kwargs: Kwargs) -> Any:
    x, index, value = args
    index = index if isinstance(index, tuple) else (index,)
    if not isinstance(x, Stacked) or len(to_first(x, follower.num_members)) != follower.num_members:
        raise CannotFollow("a member's numbers would be written into a tensor that all members share")
    if any(isinstance(part, (Tensor, list, Stacked)) for part in index):
        raise CannotFollow("numbers are written to places given by a tensor")
    place = to_first(x, follower.num_members)[(slice(None), *index)]
    if isinstance(value, Stacked):
        value = _padded(to_members(value, follower.num_members), place.ndim - 1)
    place.copy_(value) if isinstance(value, Tensor) else place.fill_(value)
    return None


@rule(*named("zeros_like", "ones_like", "full_like"), Tensor.new_zeros, Tensor.new_ones, Tensor.new_full)
def constants(follower: Follower, func: Func, args: Args, kwargs: Kwargs) -> Any:
    """Constants, each member's own: a forward may write into them."""
    x = args[0]
    if func.__name__.endswith("_like"):
        return Stacked(func(to_members(x, follower.num_members), *args[1:], **kwargs))
    sizes = args[1] if isinstance(args[1], (list, tuple)) else args[1:]
    rest = args[2:] if isinstance(args[1], (list, tuple)) else ()
    return Stacked(func(x.data, (follower.num_members, *sizes), *rest, **kwargs))


# What a forward asks of a tensor.


@rule(*getters("shape"), Tensor.size)
def shape(follower: Follower, func: Func, args: Args, kwargs: Kwargs) -> Any:
    sizes = args[0].shape(follower.num_members)
    dim = argument(args, kwargs, 1, "dim")
    return sizes if dim is None else sizes[dim]


@rule(*getters("ndim"), Tensor.dim, Tensor.ndimension)
def ndim(follower: Follower, func: Func, args: Args, kwargs: Kwargs) -> Any:
    return args[0].ndim


@rule(Tensor.__len__)
def length(follower: Follower, func: Func, args: Args, kwargs: Kwargs) -> Any:
    return args[0].shape(follower.num_members)[0]


@rule(Tensor.numel, torch.numel, Tensor.nelement)
def numel(follower: Follower, func: Func, args: Args, kwargs: Kwargs) -> Any:
    return args[0].shape(follower.num_members).numel()


@rule(
    *(Tensor.item, Tensor.tolist, Tensor.numpy, Tensor.__bool__, Tensor.__float__, Tensor.__int__, Tensor.__index__),
    *(torch.equal, Tensor.equal, torch.allclose, Tensor.allclose, Tensor.__contains__, torch.is_nonzero),
)
def python_value(follower: Follower, func: Func, args: Args, kwargs: Kwargs) -> Any:
    """A count that all members hold alike, such as that of BatchNorm, may be read; what a member computes may not."""
    if id(args[0].data if isinstance(args[0], Stacked) else args[0]) not in follower.buffers:
        raise CannotFollow("what it does is data-dependent, and members' data differ")
    return without_rule(follower, func, args, kwargs)


def _property(follower: Follower, func: Func, args: Args, kwargs: Kwargs) -> Any:
    return func(args[0].data, *args[1:], **kwargs)


def _register_properties() -> Iterable[Any]:
    for name in ("dtype", "device", "requires_grad", "is_cuda", "layout", "grad_fn", "is_leaf", "is_sparse", "grad"):
        yield getattr(Tensor, name).__get__
    for name in ("is_quantized", "is_mps", "is_meta", "is_nested", "is_xpu", "is_mkldnn", "itemsize", "names"):
        if hasattr(Tensor, name):
            yield getattr(Tensor, name).__get__
    for name in ("is_floating_point", "is_complex", "is_signed", "element_size", "get_device", "is_contiguous"):
        yield from named(name)
    yield from (Tensor.__repr__, Tensor.__hash__, Tensor.register_hook, Tensor.is_inference)


_properties = list(_register_properties())
rule(*_properties)(_property)
QUERIES.update(
    (*_properties, *getters("shape", "ndim"), Tensor.size, Tensor.dim, Tensor.ndimension, Tensor.__len__, Tensor.numel)
)
