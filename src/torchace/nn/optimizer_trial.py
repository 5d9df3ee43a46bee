"""A trial of an optimizer: do stacked toy parameters move as their members do alone?"""

from __future__ import annotations

import copy
import inspect
import itertools
import random
import warnings
from collections import OrderedDict, defaultdict
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

STEPS = 12
MEMBERS = 3  # of a toy's members, so many are trained alone
LEAST_RATE = 1e-3  # a schedule may start at 0, which would move nothing
# Largest difference from members alone, in units of their displacement. Rounding makes less
# than 1e-13 (float64) for timm's elementwise optimizers; the one that mixes least on these toys does so by 5e-3.
TOLERANCE = {torch.float64: 1e-6, torch.float32: 1e-3}


class Toy(NamedTuple):
    """A stacked parameter to try an optimizer on."""

    start: Tensor  # (K, ...)
    noise: Tensor  # (STEPS, K, ...)
    scale_free: bool  # whether the loss does not depend on the weights' scale, as before a norm

    def member(self, k: int) -> Toy:
        return Toy(self.start[k], self.noise[:, k], self.scale_free)

    def gradient(self, weights: Tensor, step: int) -> Tensor:
        """The gradient at a step: noise that keeps a direction, and depends on the weights.

        Some optimizers move the weights, ask for gradients there and move them back. Others take part of a step away
        where the gradient is orthogonal to the weights.
        """
        gradient = self.noise[step] * (1 + weights.sin() / 2)
        if self.scale_free:
            gradient -= weights * (gradient * weights).sum(-1, keepdim=True) / weights.square().sum(-1, keepdim=True)
        return gradient


Toys = list[list[Toy]]  # for each parameter group
Groups = list[tuple[dict[str, Any], list[nn.Parameter]]]  # an optimizer's groups and the toys in their place


@torch._disable_dynamo  # type: ignore[attr-defined]  # imports the compiler at the first call, not now
def find_mixing(optimizer: Optimizer, stacked: set[int] | None = None) -> str | None:
    """Why an optimizer may not train stacked parameters; None where members move as they do alone.

    A copy of the optimizer, with the options of its own groups, trains toy parameters that have as many axes as the
    stacked parameters of each group. Further copies train some of the toys' members alone.

    Args:
        optimizer: The optimizer; neither it nor its parameters are changed.
        stacked: The `id` of each stacked parameter; all parameters unless given.
    """
    groups, axes = [], []
    for group in optimizer.param_groups:
        held = [p for p in group["params"] if stacked is None or id(p) in stacked]
        if held:
            groups.append(group)
            axes.append({p.ndim for p in held})
            device = held[0].device
    failures = []
    python_state = random.getstate()
    try:
        with (
            warnings.catch_warnings(),
            torch.random.fork_rng([device] if device.type == "cuda" else []),
            torch.compiler.set_stance("force_eager"),  # some optimizers compile their step for every shape
        ):
            warnings.simplefilter("ignore")
            # float32: where the optimizer or the device does not take float64
            for dtype, make, with_closure in itertools.product(TOLERANCE, (_copy, _rebuild), (False, True)):
                trial = _Trial(optimizer, groups, make, with_closure)
                try:
                    return trial.run(axes, dtype, device)
                except Exception as error:
                    failures.append(error)
    finally:
        random.setstate(python_state)
    return f"trying it on toy parameters failed with {_one_line(failures[0])}"


class _Trial(NamedTuple):
    optimizer: Optimizer
    groups: list[dict[str, Any]]  # those of its groups that are tried
    make: Callable[[Optimizer, Groups], Optimizer]
    with_closure: bool

    def run(self, axes: list[set[int]], dtype: torch.dtype, device: torch.device) -> str | None:
        """Why the optimizer counts as mixing; None where it does not.

        Args:
            axes: How many axes the stacked parameters of each group have.
            dtype: The toys' type.
            device: The toys' device.
        """
        moved = False
        # small ones with few axes first: an optimizer that mixes may take minutes for others
        for large, ndim in itertools.product((False, True), sorted(set().union(*axes))):
            toys = [make_toys(ndim, large, dtype, device) if ndim in each else [] for each in axes]
            together = self.train(toys)
            for k in range(MEMBERS):
                members = [[toy.member(k) for toy in group] for group in toys]
                try:
                    alone = self.train(members)
                except Exception as error:
                    return f"it takes a stacked toy parameter but not a member alone: {_one_line(error)}"
                for toy, stack, end in zip(itertools.chain(*members), together, alone, strict=True):
                    displacement = (end - toy.start).abs().max().item()
                    difference = (end - stack[k]).abs().max().item()
                    if not difference <= TOLERANCE[dtype] * displacement:  # false where one is not finite
                        share = difference / displacement if displacement else float("inf")
                        return f"toy members moved otherwise stacked than alone, by {share:.1g} of their displacement"
                    moved |= displacement > 0
        return None if moved else f"it did not move toy parameters in {STEPS} steps"

    def train(self, toys: Toys) -> list[Tensor]:
        """Where the steps of such an optimizer take toy parameters."""
        parameters = [[nn.Parameter(toy.start.clone()) for toy in group] for group in toys]
        with_toys = [(group, held) for group, held in zip(self.groups, parameters, strict=True) if held]
        optimizer = self.make(self.optimizer, with_toys)
        flat = list(itertools.chain(*parameters))
        for step in range(STEPS):

            def closure(step: int = step) -> Tensor:
                for parameter, toy in zip(flat, itertools.chain(*toys), strict=True):
                    parameter.grad = toy.gradient(parameter.detach(), step)
                return torch.zeros((), device=flat[0].device)

            closure()
            # the class's: schedulers replace an optimizer's own `step` by one that is bound to it
            type(optimizer).step(optimizer, *([closure] if self.with_closure else []))  # type: ignore[arg-type]
        return [parameter.detach() for parameter in flat]


def make_toys(ndim: int, large: bool, dtype: torch.dtype, device: torch.device) -> list[Toy]:
    """Stacked parameters with `ndim` axes, with members of one number and small ones, or with large ones.

    Large ones have sides from which optimizers factorise (128) and more numbers than they quantise in one block. The
    gradients keep a direction, as in training, and their scale differs between members and between steps.
    """
    ones = (1,) * (ndim - 1)
    small = (6, *(8, 12, *(3,) * ndim)[: ndim - 1])
    shapes = [(130 if ndim == 2 else 6, *(130, 150, *ones)[: ndim - 1])] if large else [(6, *ones), small, small]
    toys: list[Toy] = []
    generator = torch.Generator().manual_seed(0)
    for shape in shapes:
        members = torch.arange(shape[0], device="cpu").reshape(-1, *ones)
        steps = torch.arange(STEPS, device="cpu").reshape(-1, 1, *ones)
        start, direction = torch.randn(2, *shape, generator=generator, dtype=torch.float64, device="cpu")
        noise = torch.randn(STEPS, *shape, generator=generator, dtype=torch.float64, device="cpu") + direction
        noise *= 10.0 ** ((members % 3 - 1) + 1.5 * torch.sin(2.0 * steps + members))
        start *= 3.0 ** (members % 3 - 1)
        scale_free = len(toys) == 2 and ndim > 1  # the second small one; the last axis is a member's own
        toys.append(Toy(start.to(device, dtype), noise.to(device, dtype), scale_free))
    return toys


def _copy(optimizer: Optimizer, groups: Groups) -> Optimizer:
    """An optimizer with all attributes of another but its state, on other parameters; no constructor is called.

    Whatever else refers to the parameters and groups, an optimizer within a wrapper for example, gets the new ones.
    """
    memo: dict[int, Any] = {}  # deepcopy takes what is in its memo as the copy
    for group in optimizer.param_groups:
        for p in group["params"]:
            memo[id(p)] = nn.Parameter(torch.zeros((), device=p.device))  # of parameters that are not tried
    for group, toys in groups:
        for i, p in enumerate(group["params"]):
            memo[id(p)] = toys[i % len(toys)]
    memo[id(optimizer.param_groups)] = []
    for group, toys in groups:
        memo[id(group)] = {**_options(group, memo), "params": toys}
        memo[id(optimizer.param_groups)].append(memo[id(group)])
    return _copy_attributes(optimizer, memo)


def _copy_attributes(optimizer: Optimizer, memo: dict[int, Any]) -> Optimizer:
    made = memo[id(optimizer)] = object.__new__(type(optimizer))
    memo[id(optimizer.state)] = defaultdict(dict)
    for name, value in vars(optimizer).items():
        if name in ("_optimizer_step_pre_hooks", "_optimizer_step_post_hooks"):
            vars(made)[name] = OrderedDict()  # they would act on the user's parameters
        elif isinstance(value, Optimizer) and id(value) not in memo:  # its deepcopy would lose attributes
            vars(made)[name] = _copy_attributes(value, memo)
        elif name != "step":
            vars(made)[name] = copy.deepcopy(value, memo)
    return made


def _rebuild(optimizer: Optimizer, groups: Groups) -> Optimizer:
    """An optimizer of the same class and options by its constructor: where that makes a state that steps need."""
    accepted = inspect.signature(type(optimizer)).parameters
    options = {name: value for name, value in _options(optimizer.defaults, {}).items() if name in accepted}
    new_groups = [{**_options(group, {}), "params": toys} for group, toys in groups]
    return type(optimizer)(new_groups, **options)


def _options(group: dict[str, Any], memo: dict[int, Any]) -> dict[str, Any]:
    """A copy of a group's options."""
    options = {name: copy.deepcopy(value, memo) for name, value in group.items() if name != "params"}
    rate = options.get("lr")
    if isinstance(rate, Tensor):
        options["lr"] = rate.clamp(min=LEAST_RATE)
    elif isinstance(rate, (int, float)):
        options["lr"] = max(rate, LEAST_RATE)
    return options


def _one_line(error: Exception) -> str:
    lines = str(error).splitlines()
    return f"{type(error).__name__}: {lines[0]}" if lines else type(error).__name__
