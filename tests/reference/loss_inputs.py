"""Random inputs for the losses: Hypothesis draws shapes, options and a seed, the seed draws the numbers."""

from __future__ import annotations

import itertools
from dataclasses import dataclass, field, replace
from typing import Any

import pytest
import torch
from hypothesis import strategies as st
from torch import Tensor
from torch.testing import assert_close

from tests.reference import losses as reference
from torchace.functional import amended_cross_entropy

CLOSE = {"rtol": 1e-12, "atol": 1e-12}
# Unit roundoff: the largest relative error of one rounding in float32.
U32 = 2.0**-24


@dataclass
class Case:
    """Arguments of a loss: `loss(case.outputs, case.target, case.diversity, **case.options)`."""

    outputs: Tensor  # float64
    target: Tensor
    diversity: float
    options: dict[str, Any] = field(default_factory=dict)
    upstream: Tensor | None = None  # (K, N, ...), for reduction="none"

    @property
    def args(self) -> tuple[Tensor, Tensor, float]:
        return self.outputs, self.target, self.diversity

    def to(self, dtype: torch.dtype) -> Case:
        """The same case with its numbers rounded to another type."""

        def round_logits(value: Any) -> Any:
            return value.to(dtype) if isinstance(value, Tensor) and value.is_floating_point() else value

        options = {name: round_logits(value) for name, value in self.options.items()}
        return replace(self, outputs=round_logits(self.outputs), target=round_logits(self.target), options=options)


def value_and_gradient(loss: Any, case: Case) -> tuple[Tensor, Tensor]:
    """The loss, and its gradient in the outputs by a plain backward; `upstream` weighs losses that were not reduced."""
    outputs = case.outputs.detach().clone().requires_grad_()
    value = loss(outputs, case.target, case.diversity, **case.options)
    total = value if case.upstream is None else (value * case.upstream).sum()
    total.backward()
    assert outputs.grad is not None
    return value.detach(), outputs.grad


def under_func(loss: Any, case: Case) -> tuple[Tensor, Tensor]:
    """The same by way of torch.func, which never takes the closed form."""

    def scalar(outputs: Tensor) -> tuple[Tensor, Tensor]:
        value = loss(outputs, case.target, case.diversity, **case.options)
        return (value if case.upstream is None else (value * case.upstream).sum()), value

    gradient, (_, value) = torch.func.grad_and_value(scalar, has_aux=True)(case.outputs)
    return value, gradient


def check_case(loss: Any, case: Case, rounding_bounds: Any) -> None:
    """A loss and its gradient in float64, and in float32 within its bounds, against the slow reference of its name."""
    slow = getattr(reference, loss.__name__)
    exact = slow(*case.args, **case.options)
    closed, by_autograd = exact.gradient(case.upstream), exact.autograd_gradient(case.upstream)
    assert_close(closed, by_autograd, **CLOSE)
    value, gradient = value_and_gradient(loss, case)
    assert_close(value, exact.value(), equal_nan=True, **CLOSE)
    assert_close(gradient, closed, **CLOSE)
    case = case.to(torch.float32)
    # α rounded to float32 no longer sums to 1 exactly; the reference takes the same α
    exact = slow(*case.args, **case.options)
    value, gradient = value_and_gradient(loss, case)
    assert value.dtype == gradient.dtype == torch.float32
    of_value, of_gradient = rounding_bounds(case, exact)
    assert_close(value.double(), exact.value(), rtol=0, atol=of_value, equal_nan=True)
    assert_close(gradient.double(), exact.gradient(case.upstream), rtol=0, atol=of_gradient)


def diversities() -> st.SearchStrategy[float]:
    return st.sampled_from([0.0, 1.0, 0.5]) | st.floats(0, 1)


def member_weights(kind: str, num_members: int, generator: torch.Generator) -> Tensor | None:
    if kind == "uniform":
        return None
    if kind == "one":  # α = 1 for a single member
        alpha = torch.zeros(num_members, dtype=torch.float64)
        alpha[int(torch.randint(num_members, (), generator=generator))] = 1.0
        return alpha
    alpha = torch.rand(num_members, generator=generator, dtype=torch.float64) + 0.05
    if kind == "zero" and num_members > 1:
        alpha[int(torch.randint(num_members, (), generator=generator))] = 0.0
    return alpha / alpha.sum()


def _sample_weight(kind: str, shape: tuple[int, ...], num_members: int, generator: torch.Generator) -> Tensor | None:
    if kind == "none":
        return None
    shape = (num_members, *shape) if kind.startswith("own") else shape
    weight = torch.rand(shape, generator=generator, dtype=torch.float64) * 2
    if kind.endswith("zeros"):  # bagging: some samples do not count, some members may have none at all
        weight = weight * (torch.rand(shape, generator=generator) < 0.5)
    return weight


ALPHAS = st.sampled_from(["uniform", "random", "zero", "one"])
SAMPLE_WEIGHTS = st.sampled_from(["none", "none", "shared", "shared zeros", "own", "own zeros"])
REDUCTIONS = st.sampled_from(["mean", "sum", "none"])
INDEX_DTYPES = st.sampled_from([torch.int64, torch.int32, torch.int16, torch.int8, torch.uint8])


@st.composite
def ace_cases(draw: st.DrawFn, torch_options: bool = False) -> Case:
    """A case of `amended_cross_entropy`; with `torch_options`, of the options that `F.cross_entropy` has as well."""
    num_members, num_samples = draw(st.integers(1, 4)), draw(st.integers(1, 3))
    num_classes = draw(st.integers(1, 4))
    rest = draw(st.sampled_from([(), (), (2,), (2, 1)]))
    g = torch.Generator().manual_seed(draw(st.integers(0, 2**16)))
    diversity = draw(diversities())
    reduction = draw(REDUCTIONS)
    samples = (num_samples, *rest)
    logits = 2 * torch.randn(num_members, num_samples, num_classes, *rest, generator=g, dtype=torch.float64)

    options: dict[str, Any] = {"reduction": reduction}
    if draw(st.booleans()):
        options["label_smoothing"] = draw(st.sampled_from([0.1, 1.0, 0.37]))
    if draw(st.booleans()):
        options["weight"] = torch.rand(num_classes, generator=g, dtype=torch.float64) * 3 + 0.1
    if draw(st.booleans()):
        target = torch.randn(num_samples, num_classes, *rest, generator=g, dtype=torch.float64).softmax(1)
    else:
        dtype = draw(INDEX_DTYPES)
        ignored = draw(st.sampled_from(["nothing", "some", "a class"]))
        target = torch.randint(num_classes, samples, generator=g)
        if ignored == "some" and dtype is not torch.uint8:
            target = target.masked_fill(torch.rand(samples, generator=g) < 0.4, -100)
        elif ignored == "a class":
            options["ignore_index"] = int(torch.randint(num_classes, (), generator=g))
        target = target.to(dtype)
    if not torch_options:
        _add_options(draw, options, logits, samples, g, lambda z: z.softmax(2))
    return Case(logits, target, diversity, options, _upstream(reduction, (num_members, *samples), g))


def _add_options(
    draw: st.DrawFn, options: dict[str, Any], outputs: Tensor, samples: tuple[int, ...], g: torch.Generator, link: Any
) -> None:
    """Weights of members and samples, or a mixture with two members more, elsewhere."""
    alpha = member_weights(draw(ALPHAS), len(outputs), g)
    weight = _sample_weight(draw(SAMPLE_WEIGHTS), samples, len(outputs), g)
    options |= {} if alpha is None else {"member_weights": alpha}
    options |= {} if weight is None else {"sample_weight": weight}
    if draw(st.integers(0, 3)) == 0:
        elsewhere = torch.randn(2, *outputs.shape[1:], generator=g, dtype=torch.float64)
        everywhere = torch.rand(len(outputs) + 2, generator=g, dtype=torch.float64)
        everywhere = everywhere / everywhere.sum()
        options["member_weights"] = everywhere[: len(outputs)]
        options["mixture"] = torch.tensordot(everywhere, link(torch.cat([outputs, elsewhere])), 1)


def _upstream(reduction: str, shape: tuple[int, ...], g: torch.Generator) -> Tensor | None:
    return torch.randn(shape, generator=g, dtype=torch.float64) if reduction == "none" else None


@st.composite
def element_cases(draw: st.DrawFn, loss: str) -> Case:
    """A case of `binary_amended_cross_entropy` or `negative_correlation`: no class axis."""
    num_members, num_samples = draw(st.integers(1, 4)), draw(st.integers(1, 3))
    rest = draw(st.sampled_from([(), (3,), (1, 2)]))
    g = torch.Generator().manual_seed(draw(st.integers(0, 2**16)))
    diversity = draw(diversities())
    reduction = draw(REDUCTIONS)
    samples = (num_samples, *rest)
    outputs = 2 * torch.randn(num_members, *samples, generator=g, dtype=torch.float64)
    options: dict[str, Any] = {"reduction": reduction}
    if loss == "ncl":
        target = 2 * torch.randn(samples, generator=g, dtype=torch.float64)
    elif draw(st.booleans()):
        target = torch.rand(samples, generator=g, dtype=torch.float64)
    else:
        target = torch.randint(2, samples, generator=g).to(
            draw(st.sampled_from([torch.float64, torch.int64, torch.bool]))
        )
    if loss == "binary" and draw(st.booleans()):
        shape = draw(st.sampled_from([(), (1,), samples, samples[-1:]]))
        options["pos_weight"] = torch.rand(shape, generator=g, dtype=torch.float64) * 3 + 0.1
    _add_options(draw, options, outputs, samples, g, torch.sigmoid if loss == "binary" else lambda values: values)
    return Case(outputs, target, diversity, options, _upstream(reduction, (num_members, *samples), g))


@st.composite
def logits_cases(draw: st.DrawFn) -> tuple[Tensor, Tensor, Tensor | None]:
    """Logits `(K, N, C, ...)`, class indices and member weights, for the scores."""
    num_members, num_samples, num_classes = (draw(st.integers(1, 4)) for _ in range(3))
    rest = draw(st.sampled_from([(), (), (2,), (2, 1)]))
    g = torch.Generator().manual_seed(draw(st.integers(0, 2**16)))
    logits = 2 * torch.randn(num_members, num_samples, num_classes, *rest, generator=g, dtype=torch.float64)
    target = torch.randint(num_classes, (num_samples, *rest), generator=g)
    return logits, target, member_weights(draw(ALPHAS), num_members, g)


def check_changed_options(outputs: Tensor, reduction: str) -> None:
    """Asserts that a first or second derivative is refused after an option, of any type, was changed in place."""
    num_members, num_samples, num_classes = outputs.shape
    shapes = {
        "target": (num_samples,),
        "member_weights": (num_members,),
        "sample_weight": (num_samples,),
        "sample_weight of each member": (num_members, num_samples),
        "weight": (num_classes,),
        "mixture": (num_samples, num_classes),
    }
    for name, dtype, second in itertools.product(shapes, (torch.float32, torch.float64), (False, True)):
        values = {"target": 0, "member_weights": 1 / num_members, "mixture": 1 / num_classes}
        option = torch.full(shapes[name], values.get(name, 1), device=outputs.device)
        option = option.long() if name == "target" else option.to(dtype)
        given = {name.split()[0]: option}
        target = given.pop("target", torch.zeros(num_samples, dtype=torch.long, device=outputs.device))
        logits = outputs.clone().requires_grad_()
        loss = amended_cross_entropy(logits, target, 0.5, reduction=reduction, **given)
        option.fill_(2)
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            torch.autograd.grad(loss, logits, create_graph=second)
