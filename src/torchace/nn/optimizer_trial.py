"""Trial of an optimizer: stacked toy parameters must move as their members do alone."""

from __future__ import annotations

import copy
import inspect
import itertools
import random
import warnings
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

STEPS = 12
MEMBERS = 3  # number of a toy's members that are trained alone
MIN_RATE = 1e-3  # a schedule may start at 0, which would move nothing
# Maximum difference from members alone, relative to their displacement. timm's elementwise optimizers differ by less
# than 1e-13 in float64, mixing ones by 5e-3 or more.
TOLERANCE = {torch.float64: 1e-6, torch.float32: 1e-3}


class Toy(NamedTuple):
    """A stacked parameter to try an optimizer on."""

    start: Tensor  # (K, ...)
    noise: Tensor  # (STEPS, K, ...)
    scale_free: bool  # whether the loss does not depend on the weights' scale, as before a norm

    def member(self, k: int) -> Toy:
        """Return member `k` alone."""
        return Toy(self.start[k], self.noise[:, k], self.scale_free)

    def gradient(self, weights: Tensor, step: int) -> Tensor:
        """Return noise with a constant direction, scaled by a function of the weights; orthogonal if `scale_free`."""
        gradient = self.noise[step] * (1 + weights.sin() / 2)
        if self.scale_free:
            gradient -= weights * (gradient * weights).sum(-1, keepdim=True) / weights.square().sum(-1, keepdim=True)
        return gradient


@torch._disable_dynamo  # type: ignore[attr-defined]  # imports the compiler at the first call, not now
def find_mixing(optimizer: Optimizer, stacked: set[int] | None = None) -> str | None:
    """Describe how an optimizer mixes stacked members; None where toy members move as they do alone.

    `stacked`: ids of the stacked parameters, by default all. An optimizer of the same class and options is tried.
    """
    held = [[p for p in group["params"] if stacked is None or id(p) in stacked] for group in optimizer.param_groups]
    axes = [{p.ndim for p in parameters} for parameters in held]
    device = next(p.device for parameters in held for p in parameters)
    first_error = None
    python_state = random.getstate()
    try:
        with (
            warnings.catch_warnings(),
            torch.random.fork_rng([device] if device.type == "cuda" else []),
            torch.compiler.set_stance("force_eager"),  # some optimizers compile their step for every shape
        ):
            warnings.simplefilter("ignore")
            for dtype in TOLERANCE:  # float32: where the optimizer or device does not support float64
                try:
                    return _compare(optimizer, axes, dtype, device)
                except Exception as error:
                    first_error = first_error or error
    finally:
        random.setstate(python_state)
    return f"trying it on toy parameters failed with {_one_line(first_error)}"


def _compare(optimizer: Optimizer, axes: list[set[int]], dtype: torch.dtype, device: torch.device) -> str | None:
    """Compare stacked toys with members alone; `axes`: numbers of axes of each group's stacked parameters."""
    moved = False
    # small toys with few axes first: large ones may take minutes
    for large, ndim in itertools.product((False, True), sorted(set().union(*axes))):
        toys = [make_toys(ndim, large, dtype, device) if ndim in each else [] for each in axes]
        stacked_ends = _train(optimizer, toys)
        for k in range(MEMBERS):
            members = [[toy.member(k) for toy in group] for group in toys]
            try:
                ends = _train(optimizer, members)
            except Exception as error:
                return f"it accepts a stacked toy parameter but not a member alone: {_one_line(error)}"
            for toy, stacked_end, end in zip(itertools.chain(*members), stacked_ends, ends, strict=True):
                displacement = (end - toy.start).abs().max().item()
                difference = (end - stacked_end[k]).abs().max().item()
                if not difference <= TOLERANCE[dtype] * displacement:  # also where one is not finite
                    share = difference / displacement if displacement else float("inf")
                    return f"toy members moved differently when stacked, by {share:.1g} of their displacement"
                moved |= displacement > 0
    return None if moved else f"it did not move toy parameters in {STEPS} steps"


def _train(optimizer: Optimizer, toys: list[list[Toy]]) -> list[Tensor]:
    """Return the toy parameters of each group after all steps of an optimizer of the same class and options."""
    parameters = [[nn.Parameter(toy.start.clone()) for toy in group] for group in toys]
    groups = [
        {**_copy_options(group), "params": held}
        for group, held in zip(optimizer.param_groups, parameters, strict=True)
        if held
    ]
    accepted = inspect.signature(type(optimizer)).parameters
    options = {name: value for name, value in _copy_options(optimizer.defaults).items() if name in accepted}
    trial = type(optimizer)(groups, **options)
    flat = list(itertools.chain(*parameters))
    for step in range(STEPS):
        for parameter, toy in zip(flat, itertools.chain(*toys), strict=True):
            parameter.grad = toy.gradient(parameter.detach(), step)
        trial.step()
    return [parameter.detach() for parameter in flat]


def make_toys(ndim: int, large: bool, dtype: torch.dtype, device: torch.device) -> list[Toy]:
    """Return scalar and small members with `ndim` axes, or large ones, which optimizers factorize or quantize."""
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
        scale_free = len(toys) == 2 and ndim > 1  # the second small toy
        toys.append(Toy(start.to(device, dtype), noise.to(device, dtype), scale_free))
    return toys


def _copy_options(group: dict[str, Any]) -> dict[str, Any]:
    options = {name: copy.deepcopy(value) for name, value in group.items() if name != "params"}
    rate = options.get("lr")
    if isinstance(rate, Tensor):
        options["lr"] = rate.clamp(min=MIN_RATE)
    elif isinstance(rate, (int, float)):
        options["lr"] = max(rate, MIN_RATE)
    return options


def _one_line(error: Exception | None) -> str:
    lines = str(error).splitlines()
    return f"{type(error).__name__}: {lines[0]}" if lines else type(error).__name__
