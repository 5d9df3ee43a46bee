"""Comparison of unregistered attributes of two members: equal, different, or an error."""

from __future__ import annotations

import collections
import functools
import operator
import random
import re
import types
from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import nn

from torchace.nn.architecture import Comparison, NotSharedError


@dataclass
class Options:
    scale: float
    columns: Any


@dataclass(eq=False)
class Plain:
    scale: float


class Config:
    """An object that says itself what it equals."""

    def __init__(self, width: int, note: str = "") -> None:
        self.width, self.note = width, note

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Config) and self.width == other.width

    __hash__ = None  # type: ignore[assignment]


class Slotted:
    __slots__ = ("value",)

    def __init__(self, value: int) -> None:
        self.value = value


def scaled_by(scale: float) -> Any:
    return lambda x: x * scale


def dynamic_class(power: int) -> type:
    class Layer:
        def forward(self, x: int) -> int:
            return x**power

    return Layer


def dynamic_attributes(scale: int) -> type:
    class Layer:
        factor = scale
        power = property(lambda self: scale)
        root = staticmethod(lambda x: x**scale)

    return Layer


def make_seeded(seed: int) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def cyclic(value: int) -> list[Any]:
    items: list[Any] = [value]
    items.append(items)
    return items


CLASS_ATTRIBUTES = ("factor", "power", "root")

# created for each member; equal for equal arguments, different for 1 and 2
MAKERS: dict[str, Any] = {
    "number": lambda v: v,
    "word": str,
    "list": lambda v: [0, [v]],
    "tuple": lambda v: (0, v),
    "dict": lambda v: {"a": {"b": v}},
    "dict in order": lambda v: {1: 0, 2: 0} if v == 1 else {2: 0, 1: 0},
    "default dict": lambda v: collections.defaultdict(list, a=v),
    "default of a dict": lambda v: collections.defaultdict((list, int)[v - 1]),
    "deque": lambda v: collections.deque([v]),
    "set": lambda v: {v, "a", (1, 2)},
    "range": range,
    "slice": lambda v: slice(v, None),
    "array": lambda v: np.array([np.nan, v]),
    "array of objects": lambda v: np.array([[v], None], dtype=object),
    "numpy number": np.float32,
    "tensor": lambda v: torch.tensor([torch.nan, v]),
    "missing in a tensor": lambda v: torch.tensor([(torch.nan, 0.0)[v - 1]]),
    "limit of a tensor": lambda v: torch.tensor([(torch.inf, torch.finfo().max)[v - 1]]),
    "index tensor": lambda v: torch.arange(v, v + 3),
    "frozen module in a list": lambda v: [nn.Linear(v, 1, bias=False).requires_grad_(False).apply(ones)],
    "activation in a list": lambda v: [nn.LeakyReLU(v)],
    "function": lambda v: (F.relu, F.gelu)[v - 1],
    "operation": lambda v: (torch.relu, torch.tanh)[v - 1],
    "operator": lambda v: (torch.ops.aten.relu.default, torch.ops.aten.tanh.default)[v - 1],
    "closure": scaled_by,
    "lambda's default": lambda v: lambda x, by=v: x * by,
    "lambda's constant": lambda v: (lambda x: x + 1, lambda x: x + 2)[v - 1],
    "partial": lambda v: functools.partial(F.leaky_relu, negative_slope=v),
    "bound method": lambda v: [v].index,
    "method of an object": lambda v: Config(v).__eq__,
    "item getter": operator.itemgetter,
    "class": lambda v: (nn.ReLU, nn.Tanh)[v - 1],
    "class of its own": dynamic_class,
    **{f"{n} of a class": lambda v, n=n: type("C", (), {n: vars(dynamic_attributes(v))[n]}) for n in CLASS_ATTRIBUTES},
    "dataclass": lambda v: Options(v, torch.arange(v)),
    "dataclass without eq": Plain,
    "object with eq": Config,
    "slots": Slotted,
    "namespace": lambda v: types.SimpleNamespace(v=[v]),
    "pattern": lambda v: re.compile(f"a{v}"),
    "torch generator": make_seeded,
    "numpy generator": np.random.default_rng,
    "python generator of random numbers": random.Random,
    "type": lambda v: (torch.float32, torch.float64)[v - 1],
    "cycle": cyclic,
}


def ones(layer: nn.Module) -> None:
    for parameter in layer.parameters():
        nn.init.ones_(parameter)


def compare(a: Any, b: Any) -> bool:
    return Comparison(nn.Identity(), nn.Identity()).equal(a, b)


@pytest.mark.parametrize("kind", MAKERS)
def test_values(kind: str) -> None:
    make = MAKERS[kind]
    assert compare(make(1), make(1))
    assert not compare(make(1), make(2))


def test_types_are_part_of_a_value() -> None:
    assert not compare(1, 1.0)
    assert not compare([1], (1,))
    assert not compare(True, 1)
    assert not compare(None, 0)
    assert not compare(torch.ones(2), torch.ones(2).double())
    assert not compare(torch.ones(2), torch.ones(3))
    assert not compare(np.ones(2), torch.ones(2))


def test_layers_are_compared_by_name() -> None:
    one, other = (nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2)) for _ in range(2))

    def equal(a: Any, b: Any) -> bool:
        return Comparison(one, other).equal(a, b)

    assert equal([one[0]], [other[0]])
    assert not equal([one[0]], [other[1]])
    assert equal(one[0].weight, other[0].weight)
    assert equal(one.forward, other.forward)
    assert equal(functools.partial(print, one[0]), functools.partial(print, other[0]))


def test_values_that_cannot_be_compared() -> None:
    for make in (lambda: (i for i in range(3)), __import__("threading").Lock):
        with pytest.raises(TypeError):
            compare([make()], [make()])


def test_values_that_cannot_be_stacked() -> None:
    """Trained tensors that nothing registers, and functions that would keep using the first member."""
    for make in (lambda: [nn.Linear(2, 2)], lambda: torch.ones(2, requires_grad=True)):
        shared = make()
        for pair in ((make(), make()), (shared, shared)):
            with pytest.raises(NotSharedError, match="trained tensor that is not a registered parameter"):
                compare(*pair)
    one = nn.Linear(2, 2)
    with pytest.raises(NotSharedError, match="a function that holds a layer of the member itself"):
        Comparison(one, one).equal(scaled_by(one), scaled_by(one))  # type: ignore[arg-type]
