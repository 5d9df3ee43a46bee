"""Adapted members as K separate networks, one after another, with the adapters written into the weights."""

from __future__ import annotations

import copy
from collections.abc import Callable

import torch
from torch import Tensor, nn
from torch.func import functional_call


def multiply(weight: Tensor, r: Tensor, s: Tensor) -> Tensor:
    """W[o, i, ...] · s[o] · r[i]."""
    return torch.einsum("oi...,o,i->oi...", weight, s, r)


def with_low_rank(weight: Tensor, a: Tensor, b: Tensor, alpha: float) -> Tensor:
    """W + alpha / rank · Σ_j b_j a_jᵀ."""
    change = sum(torch.outer(b[:, j], a[j].reshape(-1)) for j in range(len(a)))
    return weight + alpha / len(a) * change.reshape(weight.shape)


class SeparateMembers:
    """K plain networks with one set of shared tensors, from an adapted ensemble of the same architecture.

    Args:
        model: The architecture without adapters.
        tensors: Parameters and buffers of the adapted network by name, own ones `(K, ...)`.
        shared: Names of the tensors without a member axis.
        trained: Names of the trained parameters.
    """

    def __init__(
        self, model: nn.Module, tensors: dict[str, Tensor], shared: set[str], trained: set[str], num_members: int
    ) -> None:
        self.model, self.names = copy.deepcopy(model), list(model.state_dict())
        self.shared = {name: t.detach().clone() for name, t in tensors.items() if name in shared}
        self.own = [
            {name: t[k].detach().clone() for name, t in tensors.items() if name not in shared}
            for k in range(num_members)
        ]
        self.trained = trained
        for tensors in (self.shared, *self.own):
            for name in trained & tensors.keys():
                tensors[name].requires_grad_()

    def state(self, k: int, alpha: float) -> dict[str, Tensor]:
        """Weights of member k, with its adapters inside."""
        held = {**self.shared, **self.own[k]}
        state = {}
        for name in self.names:
            layer, _, last = name.rpartition(".")
            path, weight = f"{layer}.adapter".lstrip("."), held.get(name)
            place = name.removesuffix("weight") + "adapter"  # "in_proj_adapter" for "in_proj_weight"
            if f"{place}.r" in held:
                weight = multiply(weight, held[f"{place}.r"], held[f"{place}.s"])
            if f"{place}.A" in held:
                weight = with_low_rank(weight, held[f"{place}.A"], held[f"{place}.B"], alpha)
            state[name] = held[f"{path}.bias"] if last == "bias" and f"{path}.bias" in held else weight
        return state

    def logits(self, x: Tensor, alpha: float) -> list[Tensor]:
        """Logits of each member; BatchNorm's buffers change in place."""
        return [functional_call(self.model, self.state(k, alpha), (x,)) for k in range(len(self.own))]

    def train(
        self,
        make_optimizer: Callable[[list[Tensor]], torch.optim.Optimizer],
        loss: Callable[[Tensor], Tensor],  # of logits (K, N, C): the sum over members
        x: list[Tensor],
        alpha: float,
    ) -> None:
        """One step a batch: every member's own gradient, and the mean of the members' for shared tensors."""
        own = [held[name] for held in self.own for name in sorted(self.trained & held.keys())]
        shared = [self.shared[name] for name in sorted(self.trained & self.shared.keys())]
        optimizer = make_optimizer([*own, *shared])
        for batch in x:
            optimizer.zero_grad()
            loss(torch.stack(self.logits(batch, alpha))).backward()
            for tensor in shared:
                tensor.grad = None if tensor.grad is None else tensor.grad / len(self.own)
            optimizer.step()
