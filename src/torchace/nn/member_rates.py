"""A learning rate and a weight decay for each member of a stacked ensemble."""

from __future__ import annotations

import weakref
from collections.abc import Sequence
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
    """Give each member of a stacked ensemble a learning rate and a weight decay of its own.

    Every member moves as it would alone with its own values. The rates are those at the group's present `lr` (its
    `initial_lr` where a scheduler has set one) and change with it: a scheduler that halves the group's `lr` halves
    every member's rate. A rate of 0 freezes a member. Weight decay applies to the groups whose own `weight_decay` is
    not 0, so that biases stay without it (`StackedEnsemble.parameter_groups`); to all groups where all have 0.
    Parameters without a member axis, such as a shared trunk, keep the group's own values.

    An optimizer's `state_dict` does not hold the members' values: call this function again after loading it. Each call
    replaces the values set before; without values it removes them.

    Args:
        optimizer: `SGD`, `Adam`, `AdamW`, `NAdam`, `RAdam` or `RMSprop` of torch, with any of their options; without
            a `GradScaler` for its fused form.
        ensemble: A `StackedEnsemble`, or a module with stacked heads (`SMOC`, `stack_classifiers`).
        learning_rate: K rates; None for the groups' own.
        weight_decay: K values; None for the groups' own.

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
            f"Expected SGD, Adam, AdamW, NAdam, RAdam or RMSprop of torch.optim for rates by member, but got "
            f"{type(optimizer).__name__}, whose steps are not known to be proportional to the learning rate. "
            "Use one of these, or Ensemble(members) with one parameter group a member."
        )
    stacked = {id(p): p.shape[0] for p in stacked_parameters(ensemble)}
    if not any(id(p) in stacked for group in optimizer.param_groups for p in group["params"]):
        raise ValueError(
            "Expected an optimizer that holds stacked parameters of the ensemble, but this "
            f"{type(optimizer).__name__} holds none of {type(ensemble).__name__}. For members with parameters of their "
            "own, give the optimizer one group a member."
        )
    before = _set.get(optimizer)
    if before is not None and before.ensemble() not in (None, ensemble):
        raise ValueError(
            "The optimizer has rates for the members of another ensemble. Use one optimizer an ensemble, or remove "
            "them first: set_member_rates(optimizer, other_ensemble)."
        )
    num_members = max(stacked.values())
    rates = _check_values(learning_rate, "learning_rate", num_members)
    decays = _check_values(weight_decay, "weight_decay", num_members)
    if rates is not None and not max(rates) > 0:
        raise ValueError(f"Expected a `learning_rate` above 0 for at least one member, but got {rates}.")
    if before is not None:
        _set.pop(optimizer).remove()
    if rates is not None or decays is not None:
        _set[optimizer] = _MemberRates(optimizer, ensemble, set(stacked), rates, decays)


def _check_values(values: Sequence[float] | None, name: str, num_members: int) -> list[float] | None:
    if values is None:
        return None
    if isinstance(values, (str, dict)) or not hasattr(values, "__iter__"):
        raise TypeError(f"Expected `{name}` as a list of {num_members} numbers, one a member, but got {values!r}.")
    numbers = [float(value) for value in values]
    if len(numbers) != num_members:
        raise ValueError(f"Expected `{name}` with {num_members} values, one a member, but got {len(numbers)}.")
    if not all(0 <= value < float("inf") for value in numbers):
        raise ValueError(f"Expected `{name}` of at least 0 and finite, but got {numbers}.")
    return numbers


class _GroupPlan(NamedTuple):
    """Changes to the step of one parameter group."""

    boost: float  # factor on the group's learning rate for the optimizer's step
    shares: list[float] | None  # each member's share of that step; None: the whole step
    decays: bool  # whether the members' weight decay applies


class _MemberRates:
    """Hooks around an optimizer's step: it steps with the largest rate, then each member's displacement is scaled."""

    def __init__(self, optimizer: Optimizer, ensemble: nn.Module, stacked: set[int], rates: Any, decays: Any) -> None:
        self.ensemble = weakref.ref(ensemble)
        self.stacked, self.decays = stacked, decays
        self.plans = _make_plans(optimizer, stacked, rates, decays is not None)
        self.constants: dict[Any, Tensor] = {}
        # during a step: the groups' options, the gradients without decay, and the parameters before with their shares
        self.options: list[tuple[dict[str, Any], dict[str, Any]]] = []
        self.gradients: list[tuple[Tensor, Tensor]] = []
        self.starts: list[tuple[Tensor, Tensor, Tensor | float]] = []
        self.handles = [
            optimizer.register_step_pre_hook(self.before_step),
            optimizer.register_step_post_hook(self.after_step),
        ]

    def remove(self) -> None:
        for handle in self.handles:
            handle.remove()

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
        if getattr(optimizer, "found_inf", None) is not None:
            raise ValueError(
                "Expected a step without GradScaler for rates by member, because a fused optimizer scales gradients "
                "itself. Build the optimizer with fused=False, or train in bfloat16, which needs no scaling."
            )
        self.restore_options()  # after a step that failed
        self.gradients, self.starts = [], []
        for group, plan in zip(optimizer.param_groups, self.plans, strict=False):  # others were added later
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
        """Return one number for each member, in the shape that multiplies a parameter; cached."""
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
            # the largest rate of the group: scaling a small displacement up would lose digits
            largest = max(rates) if all(each) else max(*rates, present[0])
            boost, shares = largest / present[0], [rate / largest for rate in rates]
        plans.append(_GroupPlan(boost, shares, with_decay and (all_zero or bool(group["weight_decay"]))))
    return plans
