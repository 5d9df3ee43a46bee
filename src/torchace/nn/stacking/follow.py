"""Follows the forward of one member and computes every call for all members at once.

A `Follower` is a torch function mode: it sees every call of PyTorch that the forward makes, on tensors that carry a
mark where they hold all members (`values`). A call on plain tensors alone is made once for all members. Otherwise the
call's rule computes it; a function without a rule runs under `vmap`, and one that `vmap` cannot do runs member by
member. Python itself runs as always, so modes, branches on shapes and counters are the module's own.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.func import vmap
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_flatten, tree_unflatten

from torchace.nn.stacking.random import Draws
from torchace.nn.stacking.values import CHANNELS, FIRST, LAST, Stacked, to_members

Rule = Callable[["Follower", Callable[..., Any], tuple[Any, ...], dict[str, Any]], Any]
RULES: dict[Any, Rule] = {}
_MARK = "_torchace_members"


class CannotFollow(Exception):
    """The forward does something that has no meaning for all members at once."""


class Node(NamedTuple):
    """One call of a member's forward, and how it is computed for all members."""

    layer: str
    function: str
    how: str  # "batched", "once", "vmap" or "loop"


def rule(*functions: Any) -> Callable[[Rule], Rule]:
    """Register how some functions are computed for all members."""

    def register(compute: Rule) -> Rule:
        for function in functions:
            RULES[function] = compute
        return compute

    return register


class Follower(TorchFunctionMode):
    """Computes the calls of a member's forward for `num_members` members.

    Args:
        num_members: K.
        token: Marks made by followers with the same token are understood.
        draws: Where random numbers come from; PyTorch's generator unless given.
        record: Is filled with a `Node` for each call.
    """

    def __init__(
        self, num_members: int, token: int, draws: Draws | None = None, record: list[Node] | None = None
    ) -> None:
        super().__init__()
        self.num_members, self.draws, self.record = num_members, draws, record
        self.marks = {layout: (token, layout) for layout in (FIRST, CHANNELS, LAST)}
        self.token = token
        self.buffers: set[int] = set()  # ids of the members' buffers
        self.layer = ""  # the running layer's name, where somebody keeps it up to date
        self.largest = 0  # elements of the largest convolution's output, of one member

    def mark(self, data: Tensor, layout: str = FIRST) -> Tensor:
        """Mark a tensor as holding all members."""
        setattr(data, _MARK, self.marks[layout])
        return data

    def unmark(self, data: Tensor) -> None:
        """Take a mark away."""
        setattr(data, _MARK, None)

    def value_of(self, tensor: Any) -> Any:
        """Return a marked tensor as `Stacked`, anything else as it is."""
        found = getattr(tensor, _MARK, None)
        return tensor if found is None or found[0] != self.token else Stacked(tensor, found[1])

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: Sequence[Any] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        found = False

        def lift(value: Any) -> Any:
            nonlocal found
            if isinstance(value, Tensor):
                mark = getattr(value, _MARK, None)
                if mark is not None and mark[0] == self.token:
                    found = True
                    return Stacked(value, mark[1])
            elif type(value) in (list, tuple):
                return type(value)([lift(item) for item in value])
            return value

        lifted = tuple([lift(value) for value in args])
        options = {name: lift(value) for name, value in kwargs.items()} if kwargs else {}
        compute = RULES.get(func)
        if compute is None and name_of(func) in DRAWING:
            raise CannotFollow(f"{name_of(func)!r} draws random numbers that cannot be drawn for each member")
        if not found and func not in RANDOM:
            self.note(func, "once")
            return func(*args, **(kwargs or {}))
        if compute is None:
            return self.lower(without_rule(self, func, lifted, options))
        self.note(func, "batched")
        return self.lower(compute(self, func, lifted, options))

    def lower(self, value: Any) -> Any:
        """Return what the forward sees of a rule's result: marked tensors instead of `Stacked`."""
        if isinstance(value, Stacked):
            return self.mark(value.data, value.layout)
        if isinstance(value, (list, tuple)) and any(isinstance(item, Stacked) for item in value):
            return type(value)([self.lower(item) for item in value])
        return value

    def lower_all(self, values: Any) -> Any:
        """`lower` for the arguments of a call."""
        if isinstance(values, dict):
            return {name: self.lower_all(value) for name, value in values.items()}
        if type(values) in (list, tuple):
            return type(values)([self.lower_all(value) for value in values])
        return self.lower(values)

    def note(self, func: Callable[..., Any], how: str) -> None:
        """Record how a function is computed."""
        if self.record is not None and func not in QUERIES:
            self.record.append(Node(self.layer, name_of(func), how))


RANDOM: set[Any] = set()  # functions that draw random numbers: each member its own, on plain tensors too
DRAWING = {  # names of all functions that draw random numbers
    *("bernoulli", "cauchy", "exponential", "geometric", "gumbel_softmax", "log_normal", "multinomial", "normal"),
    *("poisson", "randint", "randint_like", "randperm", "random", "rrelu", "uniform"),
}
QUERIES: set[Any] = set()  # functions that compute nothing


def name_of(func: Callable[..., Any]) -> str:
    """The name of one of PyTorch's functions."""
    name = getattr(func, "__name__", "") or type(func).__name__
    if name == "__get__":  # a property of tensors
        return str(getattr(getattr(func, "__self__", None), "__name__", name))
    return name.removeprefix("_").rstrip("_") if not name.startswith("__") else name.strip("_")


def without_rule(follower: Follower, func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Compute one function for all members by `vmap`, or member by member where `vmap` cannot."""
    leaves, spec = tree_flatten((args, kwargs), is_leaf=lambda value: isinstance(value, Stacked))
    places = [i for i, leaf in enumerate(leaves) if isinstance(leaf, Stacked)]
    data = [to_members(leaves[i], follower.num_members) for i in places]

    def one_member(*parts: Tensor) -> Any:
        filled = list(leaves)
        for place, part in zip(places, parts, strict=True):
            filled[place] = part
        args, kwargs = tree_unflatten(filled, spec)
        return func(*args, **kwargs)

    result = None
    if func not in UNMAPPABLE:
        try:
            result = vmap(one_member, randomness="different")(*data)
            follower.note(func, "vmap")
            results, spec = tree_flatten(result)
            return tree_unflatten([Stacked(r) if isinstance(r, Tensor) else r for r in results], spec)
        except Exception:
            pass
    follower.note(func, "loop")
    each = [tree_flatten(one_member(*parts)) for parts in zip(*data, strict=True)]
    together = []
    for values in zip(*(flat for flat, _ in each), strict=True):
        if isinstance(values[0], Tensor):
            together.append(Stacked(torch.stack(values)))
        elif all(value == values[0] for value in values):
            together.append(values[0])
        else:
            raise CannotFollow(f"members differ in what {name_of(func)!r} returns, which their code depends on")
    return tree_unflatten(together, each[0][1])


UNMAPPABLE: set[Any] = {torch._VF.lstm, torch._VF.gru, torch._VF.rnn_tanh, torch._VF.rnn_relu}
