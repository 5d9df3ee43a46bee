"""A learning rate and a weight decay for each member of a stacked ensemble."""

from __future__ import annotations

import weakref
from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.optim import SGD, Adam, AdamW, NAdam, Optimizer, RAdam, RMSprop

from torchace.nn.optimizers import stacked_parameters

# A step's displacement is proportional to the learning rate.
PROPORTIONAL = (SGD, Adam, AdamW, NAdam, RAdam, RMSprop)

_set: weakref.WeakKeyDictionary[Optimizer, _MemberRates] = weakref.WeakKeyDictionary()


def set_member_rates(
    optimizer: Optimizer,
    ensemble: nn.Module,
    *,
    learning_rate: Sequence[float] | None = None,
    weight_decay: Sequence[float] | None = None,
) -> None:
    """Set each member's learning rate and weight decay in a stacked ensemble.

    Every member trains as it would alone with its values. The rates apply at the group's current `lr` (`initial_lr`
    with a scheduler) and are scaled with it: a scheduler that halves `lr` halves every rate. A rate of 0 freezes a
    member. Weight decay applies to groups with a `weight_decay` other than 0, or to all groups where all have 0, so
    that biases can be excluded (`StackedEnsemble.parameter_groups`). Parameters without a member axis, such as a shared
    trunk, keep the group's values.

    The values are not part of the optimizer's `state_dict`: call this function again after loading it. Each call
    replaces earlier values; without values it removes them.

    Args:
        optimizer: `SGD`, `Adam`, `AdamW`, `NAdam`, `RAdam` or `RMSprop` of torch, with any options; a fused one
            without `GradScaler`.
        ensemble: A `StackedEnsemble`, or a module with stacked heads (`SMOC`, `stack_classifiers`).
        learning_rate: K rates; None for the groups' `lr`.
        weight_decay: K values; None for the groups' `weight_decay`.

    Example:
        >>> ensemble = StackedEnsemble([nn.Linear(4, 3) for _ in range(3)])
        >>> optimizer = torch.optim.AdamW(ensemble.parameters(), lr=1e-3)
        >>> set_member_rates(optimizer, ensemble, learning_rate=[1e-2, 1e-3, 0.0], weight_decay=[0.0, 0.01, 0.1])
        >>> before = ensemble.stacked.weight.detach().clone()
        >>> ensemble(torch.ones(5, 4)).square().sum().backward()
        >>> optimizer.step()
        >>> (ensemble.stacked.weight - before).abs().amax((1, 2))
        tensor([0.0100, 0.0010, 0.0000], grad_fn=<AmaxBackward0>)
    """
    if type(optimizer) not in PROPORTIONAL:
        raise TypeError(
            f"Expected SGD, Adam, AdamW, NAdam, RAdam or RMSprop of torch.optim for rates per member, but got "
            f"{type(optimizer).__name__}, whose steps may not be proportional to the learning rate. "
            "Use one of these, or Ensemble(members) with one parameter group per member."
        )
    stacked = {id(p): p.shape[0] for p in stacked_parameters(ensemble)}
    if not any(id(p) in stacked for group in optimizer.param_groups for p in group["params"]):
        raise ValueError(
            "Expected an optimizer that holds stacked parameters of the ensemble, but this "
            f"{type(optimizer).__name__} holds none of {type(ensemble).__name__}. For members with separate "
            "parameters, give the optimizer one group per member."
        )
    before = _set.get(optimizer)
    if before is not None and not before.stacked & stacked.keys():
        raise ValueError(
            "Expected an optimizer without member rates, but got one with rates for another ensemble. Use one "
            "optimizer per ensemble."
        )
    num_members = max(stacked.values())
    rates = _check_values(learning_rate, "learning_rate", num_members)
    decays = _check_values(weight_decay, "weight_decay", num_members)
    if rates is not None and not max(rates) > 0:
        raise ValueError(f"Expected a `learning_rate` above 0 for at least one member, but got {rates}.")
    if before is not None:
        for handle in _set.pop(optimizer).handles:
            handle.remove()
    if rates is not None or decays is not None:
        _set[optimizer] = _MemberRates(optimizer, set(stacked), rates, decays)


def _check_values(values: Sequence[float] | None, name: str, num_members: int) -> list[float] | None:
    if values is None:
        return None
    numbers = [float(value) for value in values] if isinstance(values, Iterable) else []
    if len(numbers) != num_members or not all(0 <= value < float("inf") for value in numbers):
        raise ValueError(f"Expected {num_members} finite values of at least 0 in `{name}`, but got {values}.")
    return numbers


class _GroupPlan(NamedTuple):
    """Changes to the step of one parameter group."""

    boost: float  # factor on the group's learning rate for the optimizer's step
    shares: list[float] | None  # each member's share of that step; None: the whole step
    decays: bool  # whether the members' weight decay applies


class _MemberRates:
    """Hooks around an optimizer's step: step with the largest rate, then scale each member's displacement."""

    def __init__(self, optimizer: Optimizer, stacked: set[int], rates: Any, decays: Any) -> None:
        self.stacked, self.decays = stacked, decays
        self.plans = _make_plans(optimizer, stacked, rates, decays is not None)
        self.constants: dict[Any, Tensor] = {}
        # during a step: groups' options, gradients without decay, parameters before the step with their shares
        self.options: list[tuple[dict[str, Any], dict[str, Any]]] = []
        self.gradients: list[tuple[Tensor, Tensor]] = []
        self.starts: list[tuple[Tensor, Tensor, Tensor | float]] = []
        self.handles = [
            optimizer.register_step_pre_hook(self.before_step),
            optimizer.register_step_post_hook(self.after_step),
        ]

    def before_step(self, optimizer: Optimizer, args: Any, kwargs: Any) -> tuple[Any, Any] | None:
        closure = kwargs.get("closure", args[1] if len(args) > 1 else None)
        if closure is None:
            self.prepare(optimizer)
            return None

        def closure_and_prepare() -> Any:  # the closure computes the gradients
            loss = closure()
            self.prepare(optimizer)
            return loss

        return args[:1], {**kwargs, "closure": closure_and_prepare}

    @torch.no_grad()
    def prepare(self, optimizer: Optimizer) -> None:
        """Apply the members' weight decay, and set the groups to the largest rate and no decay."""
        if getattr(optimizer, "found_inf", None) is not None:  # a fused optimizer scales gradients itself
            raise ValueError("Expected a step without GradScaler for rates per member. Use fused=False.")
        self.restore_options()  # after a step that failed
        self.gradients, self.starts = [], []
        for group, plan in zip(optimizer.param_groups, self.plans, strict=False):  # groups added later have no plan
            if plan is None:
                continue
            rate, decay = group["lr"], group["weight_decay"]
            for p in group["params"]:
                if p.grad is None:
                    continue
                is_stacked = id(p) in self.stacked
                share = self.constant(plan.shares, p) if is_stacked and plan.shares else 1 / plan.boost
                if plan.decays:
                    own = self.constant(self.decays, p) if is_stacked and self.decays else decay
                    if group.get("decoupled_weight_decay"):
                        p.mul_(1 - rate * plan.boost * share * own)
                    else:
                        self.gradients.append((p, p.grad))
                        sign = -1 if group["maximize"] else 1  # torch negates the gradient before it adds decay
                        p.grad = (p.grad + sign * own * p).to(p.dtype)
                if plan.shares is not None:
                    self.starts.append((p, p.clone(), share))
            self.options.append((group, {"lr": rate, "weight_decay": decay}))
            group["lr"] = rate * plan.boost
            if plan.decays:
                group["weight_decay"] = 0.0

    @torch.no_grad()
    def after_step(self, optimizer: Optimizer, args: Any, kwargs: Any) -> None:
        """Scale the displacements, and restore gradients and groups."""
        self.restore_options()
        for p, start, share in self.starts:
            dtype = torch.promote_types(p.dtype, torch.float32)
            p.copy_(torch.lerp(start.to(dtype), p.to(dtype), share))  # exact where the share is 0 or 1
        for p, gradient in self.gradients:
            p.grad = gradient
        self.gradients, self.starts = [], []

    def restore_options(self) -> None:
        for group, options in self.options:
            group.update(options)
        self.options = []

    def constant(self, values: list[float], p: Tensor) -> Tensor:
        """Return one number per member, cached, shaped to broadcast against a parameter."""
        key = (tuple(values), p.ndim, p.dtype, p.device)
        if key not in self.constants:
            dtype = torch.promote_types(p.dtype, torch.float32)
            self.constants[key] = torch.tensor(values, dtype=dtype, device=p.device).reshape(-1, *[1] * (p.ndim - 1))
        return self.constants[key]


def _make_plans(optimizer: Optimizer, stacked: set[int], rates: Any, with_decay: bool) -> list[_GroupPlan | None]:
    """Return one plan for each parameter group; None for groups without stacked parameters."""
    is_stacked = [[id(p) in stacked for p in group["params"]] for group in optimizer.param_groups]
    groups = [group for group, each in zip(optimizer.param_groups, is_stacked, strict=True) if any(each)]
    present = [float(group.get("initial_lr", group["lr"])) for group in groups]
    if rates is not None and (len(set(present)) > 1 or not present[0] > 0):
        raise ValueError(
            "Expected one learning rate above 0 in all parameter groups that hold stacked parameters, because the "
            f"members' rates follow it, but got {present}. Build the optimizer with one `lr`."
        )
    all_zero = not any(group["weight_decay"] for group in groups)
    plans: list[_GroupPlan | None] = []
    for group, each in zip(optimizer.param_groups, is_stacked, strict=True):
        if not any(each):
            plans.append(None)
            continue
        boost, shares = 1.0, None
        if rates is not None:
            # the group's largest rate: scaling a small displacement up would lose digits
            largest = max(rates) if all(each) else max(*rates, present[0])
            boost, shares = largest / present[0], [rate / largest for rate in rates]
        plans.append(_GroupPlan(boost, shares, with_decay and (all_zero or bool(group["weight_decay"]))))
    return plans
