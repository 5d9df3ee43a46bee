"""Refuses optimizers that would mix the members of a stacked parameter.

A stacked parameter `(K, ...)` holds K members. An optimizer that uses a parameter's shape or norm (Muon, Adafactor,
LAMB, L-BFGS) mixes them, often without any error. So an optimizer is checked before its first step on a stacked
parameter. Those of torch and timm that are known to be elementwise pass. Any other is tried on stacked toy parameters,
which must move as their members do alone (`optimizer_trial`).
"""

from __future__ import annotations

import weakref
from collections.abc import Iterator
from typing import Any

from torch import nn
from torch.optim import Optimizer
from torch.optim.optimizer import register_optimizer_step_pre_hook

from torchace.nn.optimizer_trial import find_mixing

# Elementwise with every option but MIXING_OPTIONS. By name: timm need not be installed, and a subclass may override
# `step`.
ELEMENTWISE = {
    *("torch.optim.adadelta.Adadelta", "torch.optim.adagrad.Adagrad", "torch.optim.adam.Adam"),
    *("torch.optim.adamax.Adamax", "torch.optim.adamw.AdamW", "torch.optim.asgd.ASGD", "torch.optim.nadam.NAdam"),
    *("torch.optim.radam.RAdam", "torch.optim.rmsprop.RMSprop", "torch.optim.rprop.Rprop", "torch.optim.sgd.SGD"),
    *("timm.optim.adabelief.AdaBelief", "timm.optim.adamw.AdamWLegacy", "timm.optim.adan.Adan"),
    *("timm.optim.adopt.Adopt", "timm.optim.laprop.LaProp", "timm.optim.lion.Lion", "timm.optim.madgrad.MADGRAD"),
    *("timm.optim.nadam.NAdamLegacy", "timm.optim.nadamw.NAdamW", "timm.optim.radam.RAdamLegacy"),
    *("timm.optim.rmsprop_tf.RMSpropTF", "timm.optim.sgdw.SGDW"),
}
MIXING_OPTIONS = ("caution",)  # timm's: divides a step by the share of a parameter's numbers that moves

# Elementwise wrappers, and the attribute that holds the wrapped optimizer.
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
    """Check optimizers before their first step on stacked parameters of this module.

    Args:
        module: The module.
        names: The names of its stacked parameters; all unless given.
    """
    global _hooked
    _watched[module] = names
    if not _hooked:
        register_optimizer_step_pre_hook(_before_step)
        _hooked = True


def stacked_parameters(root: nn.Module | None = None) -> Iterator[nn.Parameter]:
    """Iterate over the parameters with a member axis, of a module and its submodules or of all modules."""
    for module, names in list(_watched.items()) if root is None else [(m, _watched.get(m, ())) for m in root.modules()]:
        for name, parameter in module.named_parameters():
            if names is None or name in names:
                yield parameter


def allow_optimizer(kind: type[Optimizer]) -> None:
    """Let optimizers of this class train stacked parameters without a check.

    For optimizers that treat every number of a parameter alike but cannot be tried, or that draw random numbers. An
    optimizer that uses a parameter's norm or shape mixes the members.

    Args:
        kind: The class; its subclasses are not allowed with it.

    Example:
        >>> class Noisy(torch.optim.SGD):
        ...     "SGD with noise on every number: stacked members and members alone draw other noise."
        >>> allow_optimizer(Noisy)
    """
    given: Any = kind
    if not (isinstance(given, type) and issubclass(given, Optimizer)):
        got = f"an object of class {type(given).__name__}" if isinstance(given, Optimizer) else repr(given)
        raise TypeError(f"Expected a class of optimizers, but got {got}. Write allow_optimizer(type(optimizer)).")
    _allowed.add(kind)


def _before_step(optimizer: Optimizer, args: Any, kwargs: Any) -> None:
    if _trying or _checked.get(optimizer) == len(optimizer.param_groups):
        return
    stacked = {id(parameter) for parameter in stacked_parameters()}
    if any(id(parameter) in stacked for group in optimizer.param_groups for parameter in group["params"]):
        check_elementwise(optimizer, stacked)
    _checked[optimizer] = len(optimizer.param_groups)


def check_elementwise(optimizer: Optimizer, stacked: set[int] | None = None) -> None:
    """Refuse an optimizer that does not treat every number of a parameter alike.

    Args:
        optimizer: The optimizer to check.
        stacked: The `id` of each stacked parameter; all parameters of the optimizer unless given.

    Example:
        >>> check_elementwise(torch.optim.Adam([torch.zeros(1, requires_grad=True)]))
    """
    global _trying
    while _full_name(optimizer) in WRAPPERS:
        optimizer = getattr(optimizer, WRAPPERS[_full_name(optimizer)])
    if type(optimizer) in _allowed or is_known(optimizer):
        return
    _trying = True  # the copy of an optimizer that holds its network is not checked in turn
    try:
        why = find_mixing(optimizer, stacked)
    finally:
        _trying = False
    if why is not None:
        kind = type(optimizer).__name__
        raise ValueError(
            f"Expected an optimizer that treats every number alike for stacked members, but got {kind} ({why}), which "
            "may mix the members. Use SGD, Adam or AdamW, or Ensemble(members) with this optimizer. If it does treat "
            f"every number alike: torchace.allow_optimizer({kind})."
        )


def is_known(optimizer: Optimizer) -> bool:
    """Whether an optimizer is on the list of elementwise ones, with options under which it is elementwise."""
    mixing = any(group.get(option) for group in optimizer.param_groups for option in MIXING_OPTIONS)
    return _full_name(optimizer) in ELEMENTWISE and not mixing


def _full_name(optimizer: Optimizer) -> str:
    return f"{type(optimizer).__module__}.{type(optimizer).__qualname__}"
