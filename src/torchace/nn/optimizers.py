"""Checks of optimizers before their first step on stacked parameters `(K, ...)`.

An optimizer that uses a parameter's shape or norm (Muon, Adafactor, LAMB, L-BFGS) would mix the members, so only known
elementwise optimizers pass.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterator
from typing import Any

from torch import nn
from torch.optim import Optimizer
from torch.optim.optimizer import register_optimizer_step_pre_hook

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


def watch_optimizers(module: nn.Module, names: tuple[str, ...] | None = None) -> None:
    """Check optimizers before their first step on this module's stacked parameters, by default all."""
    _watched[module] = names


def stacked_parameters(root: nn.Module | None = None) -> Iterator[nn.Parameter]:
    """Iterate over the stacked parameters of a module and its submodules, or of all modules."""
    for module, names in list(_watched.items()) if root is None else [(m, _watched.get(m, ())) for m in root.modules()]:
        for name, parameter in module.named_parameters():
            if names is None or name in names:
                yield parameter


def allow_optimizer(kind: type[Optimizer]) -> None:
    """Allow optimizers of this class on stacked parameters.

    Known elementwise optimizers of torch and timm are allowed. An optimizer that uses a parameter's norm or shape mixes
    the members.

    Args:
        kind: The class; subclasses are not included.

    Example:
        >>> class SignSGD(torch.optim.SGD):
        ...     "Steps by the sign of each gradient: elementwise."
        >>> allow_optimizer(SignSGD)
    """
    given: Any = kind
    if not (isinstance(given, type) and issubclass(given, Optimizer)):
        raise TypeError(f"Expected an optimizer class, but got {given!r}. Use allow_optimizer(type(optimizer)).")
    _allowed.add(kind)


def _before_step(optimizer: Optimizer, args: Any, kwargs: Any) -> None:
    if _checked.get(optimizer) == len(optimizer.param_groups):
        return
    stacked = {id(parameter) for parameter in stacked_parameters()}
    if any(id(parameter) in stacked for group in optimizer.param_groups for parameter in group["params"]):
        check_elementwise(optimizer)
    _checked[optimizer] = len(optimizer.param_groups)


register_optimizer_step_pre_hook(_before_step)


def check_elementwise(optimizer: Optimizer) -> None:
    """Refuse an optimizer that is neither known as elementwise nor allowed."""
    while _full_name(optimizer) in WRAPPERS:
        optimizer = getattr(optimizer, WRAPPERS[_full_name(optimizer)])
    mixing = any(group.get(option) for group in optimizer.param_groups for option in MIXING_OPTIONS)
    if type(optimizer) in _allowed or (_full_name(optimizer) in ELEMENTWISE and not mixing):
        return
    kind = type(optimizer).__name__
    raise ValueError(
        f"Expected an elementwise optimizer for stacked members, but got {kind}, which may mix the members. Use SGD, "
        "Adam or AdamW, or Ensemble(members) with this optimizer. If it updates each number on its own: "
        f"torchace.allow_optimizer({kind})."
    )


def _full_name(optimizer: Optimizer) -> str:
    return f"{type(optimizer).__module__}.{type(optimizer).__qualname__}"
