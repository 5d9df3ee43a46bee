"""Checks of optimizers before their first step on stacked parameters `(K, ...)`.

An optimizer that uses a parameter's shape or norm (Muon, Adafactor, LAMB, L-BFGS) would mix the members. Known
elementwise optimizers pass; others are tried on toy parameters (`optimizer_trial`).
"""

from __future__ import annotations

import copy
import inspect
import itertools
import random
import warnings
import weakref
from collections.abc import Iterator
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.optim.optimizer import register_optimizer_step_pre_hook

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


# Elementwise except for MIXING_OPTIONS. By name: timm may be missing, and a subclass may override `step`.
ELEMENTWISE = {
    *("torch.optim.adadelta.Adadelta", "torch.optim.adagrad.Adagrad", "torch.optim.adam.Adam"),
    *("torch.optim.adamax.Adamax", "torch.optim.adamw.AdamW", "torch.optim.asgd.ASGD", "torch.optim.nadam.NAdam"),
    *("torch.optim.radam.RAdam", "torch.optim.rmsprop.RMSprop", "torch.optim.rprop.Rprop", "torch.optim.sgd.SGD"),
    *("timm.optim.adabelief.AdaBelief", "timm.optim.adamw.AdamWLegacy", "timm.optim.adan.Adan"),
    *("timm.optim.adopt.Adopt", "timm.optim.laprop.LaProp", "timm.optim.lion.Lion", "timm.optim.madgrad.MADGRAD"),
    *("timm.optim.nadam.NAdamLegacy", "timm.optim.nadamw.NAdamW", "timm.optim.radam.RAdamLegacy"),
    *("timm.optim.rmsprop_tf.RMSpropTF", "timm.optim.sgdw.SGDW"),
}
MIXING_OPTIONS = ("caution",)  # of timm: divides a step by the share of a parameter's elements that move

# Elementwise wrappers, with the attribute of the wrapped optimizer.
WRAPPERS = {
    "timm.optim.lookahead.Lookahead": "_base_optimizer",
    "torch.distributed.optim.post_localSGD_optimizer.PostLocalSGDOptimizer": "optim",
    "torch.distributed.optim.zero_redundancy_optimizer.ZeroRedundancyOptimizer": "optim",
}

_watched: weakref.WeakKeyDictionary[nn.Module, tuple[str, ...] | None] = weakref.WeakKeyDictionary()
_checked: weakref.WeakKeyDictionary[Optimizer, int] = weakref.WeakKeyDictionary()  # number of groups when checked
_allowed: set[type[Optimizer]] = set()
_hooked = False
_trying = False


def watch_optimizers(module: nn.Module, names: tuple[str, ...] | None = None) -> None:
    """Check optimizers before their first step on this module's stacked parameters, by default all."""
    global _hooked
    _watched[module] = names
    if not _hooked:
        register_optimizer_step_pre_hook(_before_step)
        _hooked = True


def stacked_parameters(root: nn.Module | None = None) -> Iterator[nn.Parameter]:
    """Iterate over the stacked parameters of a module and its submodules, or of all modules."""
    for module, names in list(_watched.items()) if root is None else [(m, _watched.get(m, ())) for m in root.modules()]:
        for name, parameter in module.named_parameters():
            if names is None or name in names:
                yield parameter


def allow_optimizer(kind: type[Optimizer]) -> None:
    """Allow optimizers of this class on stacked parameters without a check.

    For elementwise optimizers that fail the check, for example because they draw random numbers. An optimizer that uses
    a parameter's norm or shape mixes the members.

    Args:
        kind: The class; subclasses are not included.

    Example:
        >>> class Noisy(torch.optim.SGD):
        ...     "SGD with noise on every number: stacked members and members alone draw other noise."
        >>> allow_optimizer(Noisy)
    """
    given: Any = kind
    if not (isinstance(given, type) and issubclass(given, Optimizer)):
        got = f"an object of class {type(given).__name__}" if isinstance(given, Optimizer) else repr(given)
        raise TypeError(f"Expected an optimizer class, but got {got}. Use allow_optimizer(type(optimizer)).")
    _allowed.add(kind)


def _before_step(optimizer: Optimizer, args: Any, kwargs: Any) -> None:
    if _trying or _checked.get(optimizer) == len(optimizer.param_groups):
        return
    stacked = {id(parameter) for parameter in stacked_parameters()}
    if any(id(parameter) in stacked for group in optimizer.param_groups for parameter in group["params"]):
        check_elementwise(optimizer, stacked)
    _checked[optimizer] = len(optimizer.param_groups)


def check_elementwise(optimizer: Optimizer, stacked: set[int] | None = None) -> None:
    """Refuse an optimizer that is not elementwise; `stacked`: ids of the stacked parameters, by default all."""
    global _trying
    while _full_name(optimizer) in WRAPPERS:
        optimizer = getattr(optimizer, WRAPPERS[_full_name(optimizer)])
    if type(optimizer) in _allowed or is_known(optimizer):
        return
    _trying = True  # copies of the optimizer are not checked
    try:
        why = find_mixing(optimizer, stacked)
    finally:
        _trying = False
    if why is not None:
        kind = type(optimizer).__name__
        raise ValueError(
            f"Expected an elementwise optimizer for stacked members, but got {kind} ({why}), which may mix the members."
            " Use SGD, Adam or AdamW, or Ensemble(members) with this optimizer. If it is elementwise: "
            f"torchace.allow_optimizer({kind})."
        )


def is_known(optimizer: Optimizer) -> bool:
    """Whether an optimizer is in `ELEMENTWISE` and has no mixing options."""
    mixing = any(group.get(option) for group in optimizer.param_groups for option in MIXING_OPTIONS)
    return _full_name(optimizer) in ELEMENTWISE and not mixing


def _full_name(optimizer: Optimizer) -> str:
    return f"{type(optimizer).__module__}.{type(optimizer).__qualname__}"
