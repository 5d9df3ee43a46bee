"""Which optimizers may train stacked parameters: those that treat every number alike.

A stacked parameter `(K, ...)` holds K members. An optimizer that looks at a parameter's shape or norm (Muon, Adafactor,
LAMB, L-BFGS) would mix them, often without any error. Each optimizer is tried once, before its first step on a stacked
parameter: a toy parameter with a member axis must move as its members do alone.
"""

from __future__ import annotations

import weakref
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.optim.optimizer import register_optimizer_step_pre_hook

_ensembles: weakref.WeakSet[nn.Module] = weakref.WeakSet()
_checked: weakref.WeakKeyDictionary[Optimizer, int] = weakref.WeakKeyDictionary()  # with how many groups
_hooked = False


def watch_optimizers(ensemble: nn.Module) -> None:
    """From now on an optimizer's first step on one of this module's parameters checks the optimizer."""
    global _hooked
    _ensembles.add(ensemble)
    if not _hooked:
        register_optimizer_step_pre_hook(_before_step)
        _hooked = True


def _before_step(optimizer: Optimizer, args: Any, kwargs: Any) -> None:
    if _checked.get(optimizer) == len(optimizer.param_groups):
        return
    stacked = {id(parameter) for ensemble in _ensembles for parameter in ensemble.parameters()}
    if any(id(parameter) in stacked for group in optimizer.param_groups for parameter in group["params"]):
        check_elementwise(optimizer)
    _checked[optimizer] = len(optimizer.param_groups)


def check_elementwise(optimizer: Optimizer) -> None:
    """Refuse an optimizer that does not treat every number of a parameter alike.

    Example:
        >>> check_elementwise(torch.optim.Adam([torch.zeros(1, requires_grad=True)]))
    """
    kind = type(optimizer)
    device = next(parameter.device for group in optimizer.param_groups for parameter in group["params"])
    options = {name: value for name, value in optimizer.defaults.items() if name != "params"}
    start = torch.linspace(-1, 1, 24, dtype=torch.float64, device=device).reshape(2, 3, 4)
    for toy in (start, start[:, :, 0]):  # matrices, and biases, which a member axis turns into matrices
        try:
            together = _moved(kind, options, [toy])[0]
            alone = torch.stack(_moved(kind, options, list(toy)))
        except ValueError as error:
            raise _refusal(kind, str(error)) from error
        except (TypeError, RuntimeError):
            # It takes arguments that its defaults do not tell: what it does cannot be tried. L-BFGS is known.
            if kind.__name__ == "LBFGS":
                raise _refusal(kind, "it searches along one line for all parameters") from None
            return
        if not torch.allclose(together, alone, rtol=1e-9, atol=1e-12):
            raise _refusal(kind, "it moved a stacked toy parameter otherwise than its members alone")


def _moved(kind: type[Optimizer], options: dict[str, Any], starts: list[Tensor]) -> list[Tensor]:
    """Where three steps with fixed gradients take the parameters."""
    parameters = [nn.Parameter(start.clone()) for start in starts]
    optimizer = kind(parameters, **options)
    for step in range(3):
        for parameter, start in zip(parameters, starts, strict=True):
            parameter.grad = torch.sin(3 * start + step) * (1 + start.square())
        optimizer.step()
    return [parameter.detach() for parameter in parameters]


def _refusal(kind: type[Optimizer], why: str) -> ValueError:
    return ValueError(
        f"Expected an optimizer that treats every number alike for a StackedEnsemble, but got {kind.__name__} ({why}), "
        "which would mix the members. Use SGD, Adam or AdamW, or Ensemble(members) with this optimizer."
    )
