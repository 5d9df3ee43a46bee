"""Rules for functions without weights: elementwise, broadcasting, axes, shapes, indexing, queries."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from torchace.nn.stacking.mode import (
    CHANNELS,
    FIRST,
    LAST,
    QUERIES,
    Rule,
    Stacked,
    StackingError,
    StackingMode,
    expand_groups,
    is_in_place,
    pad_axes,
    rule,
    to_first,
    to_members,
)

Func = Callable[..., Any]


def functions(*names: str) -> list[Any]:
    """Return the functions with these names in `torch`, `torch.nn.functional` and `Tensor`, also in-place ones."""
    spaces = (torch, F, Tensor, torch.special, torch.linalg, torch._C._nn)
    found = [getattr(space, f"{name}{end}", None) for name in names for space in spaces for end in ("", "_")]
    return [f for f in found if callable(f)]


def getters(*names: str) -> list[Any]:
    """Return the getters of tensor properties."""
    return [getattr(Tensor, name).__get__ for name in names]


def operators(*names: str) -> list[Any]:
    """Return operator methods of tensors."""
    return [getattr(Tensor, f"__{name}__") for name in names if hasattr(Tensor, f"__{name}__")]


def _is_tensor(value: Any) -> bool:
    return isinstance(value, (Stacked, Tensor))


# Elementwise functions of one tensor, in any layout


@rule(
    *functions(
        *("relu", "relu6", "leaky_relu", "elu", "selu", "gelu", "silu", "mish", "tanh", "sigmoid", "logsigmoid"),
        *("softplus", "hardswish", "hardtanh", "hardsigmoid", "exp", "log", "log1p", "sqrt", "rsqrt", "square"),
        *("reciprocal", "neg", "abs", "sign", "sin", "cos", "erf", "floor", "round", "nan_to_num", "logical_not"),
        *("bitwise_not", "isfinite", "isnan", "float", "double", "half", "bfloat16", "long", "int", "bool", "detach"),
        *("requires_grad", "zero", "fill"),
    ),
    *operators("neg", "invert", "abs"),
    *(Tensor.cuda, Tensor.cpu, Tensor.type),
    *getters("data"),
)
def _elementwise(stacking: StackingMode, func: Func, x: Any, *args: Any, **kwargs: Any) -> Any:
    if not isinstance(x, Stacked) or any(map(_is_tensor, (*args, *kwargs.values()))):
        return NotImplemented
    return Stacked(func(x.data, *args, **kwargs), x.layout)


@rule(Tensor.contiguous, Tensor.clone, torch.clone, Tensor.to, Tensor.type_as)
def _convert(stacking: StackingMode, func: Func, x: Any, *args: Any, **kwargs: Any) -> Any:
    args = tuple(other.data if isinstance(other, Stacked) else other for other in args)  # for its type and device
    if not isinstance(x, Stacked):
        return func(x, *args, **kwargs)
    if x.layout == FIRST:
        kwargs.pop("memory_format", None)  # of a member's axes
    return Stacked(func(x.data, *args, **kwargs), x.layout)


# Functions of several tensors that broadcast


@rule(
    *functions(
        *("add", "sub", "rsub", "mul", "div", "true_divide", "floor_divide", "pow", "remainder", "maximum", "minimum"),
        *("where", "eq", "ne", "lt", "le", "gt", "ge", "logical_and", "logical_or", "bitwise_and", "bitwise_or"),
        *("masked_fill", "lerp", "addcmul", "addcdiv", "clamp", "clip", "clamp_min", "clamp_max", "copy"),
    ),
    *operators(
        *(f"{p}{n}" for p in ("", "r", "i") for n in ("add", "sub", "mul", "truediv", "floordiv", "pow", "mod")),
        *(f"{p}{n}" for p in ("", "r", "i") for n in ("and", "or", "xor")),
        *("eq", "ne", "lt", "le", "gt", "ge"),
    ),
)
def _broadcast(stacking: StackingMode, func: Func, *args: Any, **kwargs: Any) -> Any:
    count = stacking.num_members
    tensors = [v for v in (*args, *kwargs.values()) if _is_tensor(v)]
    ndim = max(v.ndim for v in tensors)
    if ndim and any(isinstance(v, Stacked) and not v.ndim for v in tensors):
        dtype = functools.reduce(torch.promote_types, [v.data.dtype for v in tensors if v.ndim])
        cast = {id(v): _promote_like_scalar(v, dtype) for v in tensors}
        args = tuple(cast.get(id(v), v) for v in args)
        kwargs = {name: cast.get(id(v), v) for name, v in kwargs.items()}
        tensors = list(cast.values())
    stacked = [v for v in tensors if isinstance(v, Stacked)]
    first = next((v for v in stacked if v.layout != FIRST), stacked[0])
    in_place = is_in_place(func)
    if len(tensors) == 1:
        return Stacked(_call(func, args, kwargs, {id(first): first.data}), first.layout)
    if first.layout != FIRST:
        fitting = {id(v): d for v in tensors if (d := _align(v, first, ndim)) is not None}
        if len(fitting) == len({id(v) for v in tensors}) and not (in_place and args[0] is not first):
            return Stacked(_call(func, args, kwargs, fitting), first.layout)
    data = {id(v): to_first(v, count) for v in stacked}
    entries = {key: len(d) for key, d in data.items()}
    if in_place and entries.get(id(args[0]), 0) < max(entries.values()):
        stacking.check_own(args[0])
    if len(set(entries.values())) > 1:
        data = {key: expand_groups(d, count) for key, d in data.items()}
    aligned = {id(v): pad_axes(data[id(v)], ndim) for v in stacked}
    result = _call(func, args, kwargs, aligned)
    return args[0] if in_place else Stacked(result)


def _align(value: Any, first: Stacked, ndim: int) -> Tensor | None:
    """Return the data of a value that broadcasts against those of `first`, which is not in layout `FIRST`."""
    if not isinstance(value, Stacked):
        return value if value.ndim == 0 or (first.layout == CHANNELS and value.ndim < ndim - 1) else None
    if value.layout == first.layout:
        return value.data if value.ndim == ndim and value.data.shape[1] == first.data.shape[1] else None
    # a number for each channel or feature, (K, C, 1, ...)
    data, sizes = value.data, first.data.shape
    if value.layout != FIRST or value.ndim != max(ndim - 1, 1) or any(size != 1 for size in data.shape[2:]):
        return None
    if first.layout == LAST:
        return data.unsqueeze(2) if data.shape[:2] == sizes[:2] else None
    return data.reshape(1, -1, *data.shape[2:]) if data.shape[:2].numel() == sizes[1] else None


def _promote_like_scalar(value: Any, dtype: torch.dtype) -> Any:
    """Cast a member's number as type promotion does beside a tensor with axes and this type."""
    if not isinstance(value, Stacked) or value.ndim:
        return value
    promoted = torch.result_type(torch.empty(1, dtype=dtype), torch.empty((), dtype=value.data.dtype))
    return Stacked(value.data.to(promoted))


def _call(func: Func, args: Any, kwargs: dict[str, Any], data: dict[int, Tensor]) -> Any:
    return func(*(data.get(id(v), v) for v in args), **{name: data.get(id(v), v) for name, v in kwargs.items()})


# Functions along axes: a member's axis d is axis d + 1 of the stacked tensor


def shift(dim: Any) -> Any:
    """Convert a member's axis to that of the stacked tensor."""
    if isinstance(dim, (list, tuple)):
        return [shift(d) for d in dim]
    return dim + 1 if isinstance(dim, int) and dim >= 0 else dim


def axis_rule(*axes: tuple[int, str, Any]) -> Rule:
    """Return a rule for functions of one tensor along axes, given as (position, name, default or `"all"`)."""

    def compute(stacking: StackingMode, func: Func, *given: Any, **kwargs: Any) -> Any:
        x, args = given[0], list(given)
        if not isinstance(x, Stacked) or not x.ndim or any(map(_is_tensor, (*args[1:], *kwargs.values()))):
            return NotImplemented
        dims = []
        for position, argument, default in axes:
            name = "axis" if "axis" in kwargs else argument
            dim = args[position] if len(args) > position else kwargs.get(name, default)
            dim = list(range(x.ndim)) if dim == "all" else dim
            if dim is None or dim == () or isinstance(dim, bool):
                return NotImplemented
            dims.append((position, name, dim))
        flat = [d for _, _, dim in dims for d in (dim if isinstance(dim, (list, tuple)) else [dim])]
        spatial = x.layout == CHANNELS and all(d % x.ndim > 1 for d in flat)  # then axes keep their place
        for position, name, dim in dims:
            if len(args) > position:
                args[position] = dim if spatial else shift(dim)
            else:
                kwargs[name] = dim if spatial else shift(dim)
        layout = CHANNELS if spatial else FIRST
        result = func(x.data if spatial else to_first(x, stacking.num_members), *args[1:], **kwargs)
        if isinstance(result, Tensor):
            return Stacked(result, layout)
        return type(result)([Stacked(part, layout) for part in result])

    return compute


rule(
    *functions("softmax", "log_softmax", "logsumexp", "cumsum", "amax", "amin", "max", "min", "argmax", "argmin"),
    *functions("any", "all", "squeeze", "glu", "unflatten"),
)(axis_rule((1, "dim", None)))
rule(*functions("sum", "mean", "var", "std"))(axis_rule((1, "dim", "all")))
rule(*functions("unbind", "unsqueeze", "select", "narrow"))(axis_rule((1, "dim", 0)))
rule(*functions("norm", "normalize", "vector_norm"))(axis_rule((2, "dim", None)))
rule(*functions("chunk", "split"), torch.functional.split)(axis_rule((2, "dim", 0)))
rule(*functions("roll"))(axis_rule((2, "dims", None)))
rule(*functions("flatten"))(axis_rule((1, "start_dim", 0), (2, "end_dim", -1)))
rule(*functions("transpose", "swapaxes", "movedim"))(axis_rule((1, "dim0", None), (2, "dim1", None)))


@rule(*functions("permute"))
def _permute(stacking: StackingMode, func: Func, x: Any, *args: Any, **kwargs: Any) -> Any:
    return Stacked(to_first(x, stacking.num_members).permute(0, *(d % x.ndim + 1 for d in _sizes(args, kwargs))))


@rule(*getters("T", "mT"), *functions("t"))
def _matrix_transpose(stacking: StackingMode, func: Func, x: Any, *_: Any) -> Any:
    return Stacked(to_first(x, stacking.num_members).mT) if x.ndim == 2 else NotImplemented


@rule(*functions("gather"))
def _gather(stacking: StackingMode, func: Func, x: Any, dim: int, index: Any, **kwargs: Any) -> Any:
    count = stacking.num_members
    return Stacked(torch.gather(to_members(x, count), shift(dim), to_members(index, count), **kwargs))


# Shapes


def _sizes(args: tuple[Any, ...], kwargs: dict[str, Any]) -> list[Any]:
    """Return sizes or axes passed separately, as a list, or by name."""
    given = args or tuple(kwargs.values())
    return list(given[0]) if isinstance(given[0], (list, tuple)) else list(given)


@rule(*functions("reshape", "view"))
def _reshape(stacking: StackingMode, func: Func, x: Any, *args: Any, **kwargs: Any) -> Any:
    if any(isinstance(v, torch.dtype) for v in (*args, *kwargs.values())):
        return NotImplemented
    data = to_first(x, stacking.num_members)
    return Stacked(data.reshape(data.shape[0], *_sizes(args, kwargs)))


@rule(*functions("expand", "broadcast_to"))
def _expand(stacking: StackingMode, func: Func, x: Any, *args: Any, **kwargs: Any) -> Any:
    sizes = _sizes(args, kwargs)
    return Stacked(pad_axes(to_first(x, stacking.num_members), len(sizes)).expand(-1, *sizes))


@rule(*functions("cat", "concat", "stack"))
def _concatenate(stacking: StackingMode, func: Func, tensors: Any, dim: int = 0, *, axis: int | None = None) -> Any:
    dim = dim if axis is None else axis
    count = stacking.num_members
    if func is not torch.stack:
        if dim == 1 and all(isinstance(v, Stacked) and v.layout == CHANNELS for v in tensors):
            return Stacked(torch.cat([v.data.unflatten(1, (count, -1)) for v in tensors], 2).flatten(1, 2), CHANNELS)
        tensors = [v for v in tensors if isinstance(v, Stacked) or v.shape != (0,)]  # torch.cat skips empty vectors
    return Stacked(func([to_members(v, count) for v in tensors], shift(dim)))


# Indexing and constants


@rule(Tensor.__getitem__)
def _getitem(stacking: StackingMode, func: Func, x: Any, index: Any) -> Any:
    index = index if isinstance(index, tuple) else (index,)
    if not isinstance(x, Stacked):
        return NotImplemented
    stacked = [part for part in index if isinstance(part, Stacked)]
    if stacked:
        dtype = stacked[0].data.dtype
        if len(index) > 1 or dtype.is_floating_point or dtype == torch.bool:
            return NotImplemented
        data, where = (to_members(v, stacking.num_members) for v in (x, stacked[0]))
        return Stacked(data[torch.arange(len(data), device=data.device).view(-1, *[1] * (where.ndim - 1)), where])
    arrays = [i for i, part in enumerate(index) if isinstance(part, (Tensor, list))]
    if arrays and arrays[-1] - arrays[0] + 1 != len(arrays):  # then the result's axes are in another order
        return NotImplemented
    return Stacked(to_first(x, stacking.num_members)[(slice(None), *index)])


@rule(Tensor.__setitem__)
def _setitem(stacking: StackingMode, func: Func, x: Any, index: Any, value: Any) -> None:
    index = index if isinstance(index, tuple) else (index,)
    stacking.check_own(x)
    if any(isinstance(part, (Tensor, list, Stacked)) for part in index):
        raise StackingError("values are written to positions given by a tensor")
    place = to_first(x, stacking.num_members)[(slice(None), *index)]
    if isinstance(value, Stacked):
        value = pad_axes(to_members(value, stacking.num_members), place.ndim - 1)
    place.copy_(value) if isinstance(value, Tensor) else place.fill_(value)


@rule(*functions("zeros_like", "ones_like", "full_like"))
def _constant_like(stacking: StackingMode, func: Func, x: Any, *args: Any, **kwargs: Any) -> Any:
    return Stacked(func(to_members(x, stacking.num_members), *args, **kwargs))  # a forward may write into them


@rule(Tensor.new_zeros, Tensor.new_ones, Tensor.new_full)
def _new_constant(stacking: StackingMode, func: Func, x: Any, *args: Any, **kwargs: Any) -> Any:
    sizes, rest = (args[0], args[1:]) if isinstance(args[0], (list, tuple)) else (args, ())
    return Stacked(func(x.data, (stacking.num_members, *sizes), *rest, **kwargs))


# Queries


def query(*functions: Any) -> Callable[[Rule], Rule]:
    """Register a rule for functions that compute nothing."""
    QUERIES.update(functions)
    return rule(*functions)


@query(*getters("shape"), Tensor.size)
def _shape(stacking: StackingMode, func: Func, x: Any, dim: Any = None) -> Any:
    sizes = x.shape(stacking.num_members)
    return sizes if not isinstance(dim, int) else sizes[dim]


query(*getters("ndim"), Tensor.dim)(lambda stacking, func, x, *_: x.ndim)
query(Tensor.__len__)(lambda stacking, func, x: x.shape(stacking.num_members)[0])
query(Tensor.numel, torch.numel)(lambda stacking, func, x: x.shape(stacking.num_members).numel())


@rule(
    *(Tensor.item, Tensor.tolist, Tensor.numpy, Tensor.__bool__, Tensor.__float__, Tensor.__int__, Tensor.__index__),
    *(torch.equal, Tensor.equal, torch.allclose, Tensor.allclose, Tensor.__contains__, torch.is_nonzero),
)
def _python_value(stacking: StackingMode, func: Func, x: Any, *args: Any, **kwargs: Any) -> Any:
    """Allow to read a count that is equal in all members, a buffer as in BatchNorm; refuse all other values."""
    data = x.data if isinstance(x, Stacked) else x
    if id(data) not in stacking.buffers or data.is_floating_point():
        raise StackingError("its control flow is data-dependent, and members' data differ")
    return NotImplemented


@query(
    *getters("dtype", "device", "requires_grad", "is_cuda", "layout", "grad_fn", "is_leaf", "is_sparse", "grad"),
    *getters("is_quantized", "is_mps", "is_meta", "is_nested", "is_xpu", "is_mkldnn", "itemsize"),
    *functions("is_floating_point", "is_complex", "is_signed", "element_size", "get_device", "is_contiguous"),
    *(Tensor.__repr__, Tensor.__hash__, Tensor.register_hook, Tensor.is_inference),
)
def _tensor_property(stacking: StackingMode, func: Func, x: Any, *args: Any, **kwargs: Any) -> Any:
    return func(x.data, *args, **kwargs)
