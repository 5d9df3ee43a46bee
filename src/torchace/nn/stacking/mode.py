"""A torch function mode that computes every PyTorch call of one member's forward for all members.

Calls on plain tensors run once. Calls on marked tensors, which hold all members, run by the function's rule, else under
`vmap`, else member by member.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.func import vmap
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_flatten, tree_unflatten

FIRST = "first"  # (K, ...), or (G, ...) where G divides K and the first K/G members share the first entry, and so on
CHANNELS = "channels"  # (N, K·C, ...), for grouped convolutions
LAST = "last"  # (K, D, N) for vectors (N, D), the output of linear layers


class Stacked:
    """A tensor of all members; plain tensors are the same for all members and have a member's shape."""

    __slots__ = ("data", "layout")

    def __init__(self, data: Tensor, layout: str = FIRST) -> None:
        self.data, self.layout = data, layout

    @property
    def ndim(self) -> int:
        """Number of a member's axes."""
        return self.data.ndim - (self.layout != CHANNELS)

    def shape(self, num_members: int) -> torch.Size:
        """Return a member's shape."""
        shape = self.data.shape
        if self.layout == FIRST:
            return shape[1:]
        if self.layout == LAST:
            return torch.Size((shape[2], shape[1]))
        return torch.Size((shape[0], shape[1] // num_members, *shape[2:]))


def to_first(value: Stacked, num_members: int) -> Tensor:
    """Return a view `(G, ...)`."""
    if value.layout == FIRST:
        return value.data
    if value.layout == LAST:
        return value.data.mT
    return value.data.unflatten(1, (num_members, -1)).movedim(1, 0)


def expand_groups(data: Tensor, num_members: int) -> Tensor:
    """Repeat `(G, ...)` to `(K, ...)`."""
    return data if data.shape[0] == num_members else data.repeat_interleave(num_members // data.shape[0], 0)


def to_members(value: Any, num_members: int) -> Tensor:
    """Return a stacked or plain tensor as `(K, ...)`; plain ones are expanded without a copy."""
    if isinstance(value, Stacked):
        return expand_groups(to_first(value, num_members), num_members)
    return value.expand(num_members, *value.shape)


def to_channels(value: Any, num_members: int) -> Tensor:
    """Return a stacked or plain tensor with member shape `(N, C, ...)` as `(N, K·C, ...)`."""
    if isinstance(value, Stacked) and value.layout == CHANNELS:
        return value.data
    data = to_members(value, num_members)
    merged = data.movedim(0, 1).flatten(1, 2)
    if data.ndim == 5 and data[0].is_contiguous(memory_format=torch.channels_last) and not data[0].is_contiguous():
        merged = merged.contiguous(memory_format=torch.channels_last)
    return merged


def pad_axes(data: Tensor, ndim: int) -> Tensor:
    """Insert axes, `(K, 1, ..., *shape)`, up to `ndim` axes of a member."""
    missing = ndim + 1 - data.ndim
    return data if missing <= 0 else data.reshape(data.shape[0], *[1] * missing, *data.shape[1:])


class ConstantRNG:
    """Constant 0.5, to compare two computations of a network with random layers."""

    def uniform(self, shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> Tensor:
        """Return a tensor of 0.5."""
        return torch.full(shape, 0.5, dtype=dtype, device=device)


class MemberRNG:
    """Random numbers as a function of (seed, step, call, member, position), for K = R·M members.

    Shapes: seeds `(R,)`, members of each run `(M,)`, step `()`, a tensor that CUDA graphs read at every replay.
    """

    def __init__(self, seeds: Tensor, members: Tensor, step: Tensor, part: slice = slice(None)) -> None:
        self.tensors, self.part, self.calls = (seeds, members, step), part, 0
        self._keys: tuple[Tensor, Tensor] | None = None

    def __getitem__(self, part: slice) -> MemberRNG:
        """Return the generator of some of the members."""
        return MemberRNG(*self.tensors, part)

    @contextmanager
    def member_seeds(self) -> Iterator[list[int]]:
        """Yield a seed for each member, a function of (seed, step, member); restore PyTorch's generator afterwards."""
        device = self.tensors[0].device
        key, index = self._member_keys()
        with torch.random.fork_rng(devices=[device] if device.type == "cuda" else []):
            yield _mix(_mix(key) + index * 0x85EBCA6B).tolist()

    def _member_keys(self) -> tuple[Tensor, Tensor]:
        """Return keys of seed and step, and the members' numbers, `(K,)` each."""
        if self._keys is None:
            seeds, members, step = self.tensors
            key = _mix(_mix(_mix(seeds) + (seeds >> 32)) + step).repeat_interleave(len(members))
            self._keys = key[self.part], members.repeat(len(seeds))[self.part]
        return self._keys

    def uniform(self, shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> Tensor:
        """Return numbers in [0, 1) of shape `(K, ...)`."""
        self.calls += 1
        key, index = self._member_keys()
        key = _mix(_mix(key + self.calls * 0x9E3779B9) + index * 0x85EBCA6B).view(-1, 1)  # (K, 1)
        position = torch.arange(math.prod(shape[1:]), device=device)
        bits = _mix(_mix(position + key) ^ _mix(key + 0x27D4EB2F))
        return ((bits >> 8).to(dtype) * 2.0**-24).view(shape)


_BITS = 0xFFFFFFFF


def _mix(x: Tensor) -> Tensor:
    """Hash 32 bits, stored in int64: every input bit changes about half of the output bits."""
    x = x & _BITS
    x = ((x ^ (x >> 16)) * 0x45D9F3B) & _BITS
    x = ((x ^ (x >> 16)) * 0x45D9F3B) & _BITS
    return x ^ (x >> 16)


# (mode, function, *args, **kwargs), stacked tensors as `Stacked`; returns `NotImplemented` where unsupported
Rule = Callable[..., Any]
RULES: dict[Any, Rule] = {}
RANDOM: set[Any] = set()  # functions that draw random numbers; their rules apply to plain tensors too
QUERIES: set[Any] = set()  # functions that compute nothing; hidden in `explain`
RANDOM_NAMES = {  # names of all functions that draw random numbers
    *("alpha_dropout", "bernoulli", "cauchy", "exponential", "feature_alpha_dropout", "geometric", "gumbel_softmax"),
    *("log_normal", "multinomial", "normal", "poisson", "randint", "randint_like", "randperm", "random", "rrelu"),
    *("uniform",),
}
# without a batching rule
WITHOUT_VMAP = {
    getattr(torch._VF, f"{kind}{end}") for kind in ("lstm", "gru", "rnn_tanh", "rnn_relu") for end in ("", "_cell")
}
MARK = "_torchace_members"


class StackingError(ValueError):
    """The forward contains a call that cannot be computed for all members at once; `reason` is half a sentence."""

    def __init__(self, reason: str) -> None:
        super().__init__(
            f"Expected a forward that can be computed for all members at once, but {reason}. Use Ensemble(members), or "
            "call the ensemble before torch.compile and torch.func: it then computes members one by one."
        )
        self.reason = reason


class DataDependence(TorchDispatchMode):
    """Notice operations whose result has a shape, or is a Python number, that depends on the values of tensors."""

    tags = frozenset({torch.Tag.dynamic_output_shape, torch.Tag.data_dependent_output})
    any = False

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.any |= not self.tags.isdisjoint(func.tags)
        return func(*args, **(kwargs or {}))


class Node(NamedTuple):
    """One call of a member's forward and how it is computed for all members."""

    layer: str
    function: str
    how: str  # "batched", "once", "vmap" or "loop"


def rule(*functions: Any) -> Callable[[Rule], Rule]:
    """Register the rule of some functions."""

    def register(compute: Rule) -> Rule:
        RULES.update(dict.fromkeys(functions, compute))
        return compute

    return register


class StackingMode(TorchFunctionMode):
    """Compute the calls of a member's forward for `num_members` members.

    `token` identifies the ensemble: marks of other ensembles are ignored. `rng` replaces PyTorch's generator.
    `record` receives a `Node` per call.
    """

    def __init__(
        self, num_members: int, token: int, rng: ConstantRNG | MemberRNG | None = None, record: list[Node] | None = None
    ) -> None:
        super().__init__()
        self.num_members, self.token, self.rng, self.record = num_members, token, rng, record
        self.marks = {layout: (token, layout) for layout in (FIRST, CHANNELS, LAST)}
        self.buffers: set[int] = set()  # ids of the members' buffers
        self.layer = ""  # name of the running layer, set by `track_layers`
        self.largest = 0  # elements of the largest convolution's output, of one member

    def mark(self, data: Tensor, layout: str = FIRST) -> Tensor:
        """Mark a tensor as holding all members."""
        setattr(data, MARK, self.marks[layout])
        return data

    def to_stacked(self, value: Any) -> Any:
        """Return a marked tensor as `Stacked`, also within lists and tuples, and other values unchanged."""
        if isinstance(value, Tensor):
            mark = getattr(value, MARK, None)
            return Stacked(value, mark[1]) if mark is not None and mark[0] == self.token else value
        if type(value) in (list, tuple):
            return type(value)([self.to_stacked(item) for item in value])
        return value

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: Sequence[Any] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        inputs = [self.to_stacked(value) for value in args]
        options = {name: self.to_stacked(value) for name, value in kwargs.items()} if kwargs else {}
        if not inputs and "input" in options:
            inputs.append(options.pop("input"))
        compute = RULES.get(func)
        random = compute is None and function_name(func) in RANDOM_NAMES
        if random or (options and options.get("generator") is not None):
            raise StackingError(f"{function_name(func)!r} draws random numbers, which has no form for each member")
        if func not in RANDOM and not _any_stacked(inputs) and not _any_stacked(options.values()):
            self.note(func, "once")
            return func(*args, **(kwargs or {}))
        result = NotImplemented if compute is None else compute(self, func, *inputs, **options)
        if result is NotImplemented:
            return self.to_tensors(self.compute_without_rule(func, inputs, options))
        self.note(func, "batched")
        return self.to_tensors(result)

    def to_tensors(self, value: Any) -> Any:
        """Return marked tensors in place of `Stacked`, also within containers."""
        if type(value) is Stacked:
            return self.mark(value.data, value.layout)
        if isinstance(value, dict):
            return {name: self.to_tensors(item) for name, item in value.items()}
        if isinstance(value, (list, tuple)) and _any_stacked(value):
            return type(value)([self.to_tensors(item) for item in value])
        return value

    def note(self, func: Callable[..., Any], how: str) -> None:
        """Record how a function is computed."""
        if self.record is not None and func not in QUERIES:
            self.record.append(Node(self.layer, function_name(func), how))

    def check_own(self, value: Any) -> None:
        """Refuse to write into a tensor that members share."""
        if not isinstance(value, Stacked) or len(to_first(value, self.num_members)) < self.num_members:
            raise StackingError("a member's values would be written into a tensor that all members share")

    def compute_without_rule(self, func: Callable[..., Any], args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
        """Compute one function for all members by `vmap`, or member by member where `vmap` fails."""
        if is_in_place(func):
            self.check_own(args[0])
        leaves, spec = tree_flatten((list(args), kwargs), is_leaf=lambda value: isinstance(value, Stacked))
        places = [i for i, leaf in enumerate(leaves) if isinstance(leaf, Stacked)]
        data = [to_members(leaves[i], self.num_members) for i in places]

        def compute_member(*parts: Tensor) -> Any:
            filled = list(leaves)
            for place, part in zip(places, parts, strict=True):
                filled[place] = part
            member_args, member_kwargs = tree_unflatten(filled, spec)
            return func(*member_args, **member_kwargs)

        if func not in WITHOUT_VMAP and not torch.compiler.is_exporting():  # which fails for some batching rules
            try:
                results, result_spec = tree_flatten(vmap(compute_member, randomness="different")(*data))
                self.note(func, "vmap")
                return tree_unflatten([Stacked(r) if isinstance(r, Tensor) else r for r in results], result_spec)
            except Exception:
                pass
        self.note(func, "loop")
        found = DataDependence()  # type: ignore[no-untyped-call]
        with found if self.record is not None else nullcontext():  # the comparison decides for all later calls
            members = [tree_flatten(compute_member(*parts)) for parts in zip(*data, strict=True)]
        combined = []
        for values in zip(*(flat for flat, _ in members), strict=True):
            if isinstance(values[0], Tensor):
                if found.any:  # equal shapes now may differ at the next call
                    raise StackingError(f"the shape that {function_name(func)!r} returns depends on a member's data")
                combined.append(Stacked(torch.stack(values)))
            elif all(value == values[0] for value in values):
                combined.append(values[0])
            else:
                raise StackingError(f"{function_name(func)!r} returns Python values that differ between members")
        return tree_unflatten(combined, members[0][1])


def _any_stacked(values: Iterable[Any]) -> bool:
    for value in values:  # a loop: this runs at every call of a forward
        kind = type(value)
        if kind is Stacked or ((kind is list or kind is tuple) and _any_stacked(value)):
            return True
    return False


def is_in_place(func: Callable[..., Any]) -> bool:
    """Whether a function changes its first argument."""
    name = getattr(func, "__name__", "")
    return (name.endswith("_") and not name.endswith("__")) or (name.startswith("__i") and name != "__invert__")


def function_name(func: Callable[..., Any]) -> str:
    """Return the name of a PyTorch function."""
    name = getattr(func, "__name__", "") or type(func).__name__
    if name == "__get__":  # a property of tensors
        return str(getattr(getattr(func, "__self__", None), "__name__", name))
    return name.removeprefix("_").rstrip("_") if not name.startswith("__") else name.strip("_")
