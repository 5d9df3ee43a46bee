"""Members of one architecture, computed at once."""

from __future__ import annotations

import operator
from collections.abc import Iterable, Iterator
from typing import Any

import torch
from torch import Tensor, nn
from torch.func import functional_call, vmap

from torchace import _checks
from torchace.nn.architecture import check_layers, check_one_architecture, not_vectorisable
from torchace.nn.base import BATCHES, EnsembleModule, check_own_batches, check_shared_parameters, listed
from torchace.nn.chain import Chain
from torchace.nn.optimizers import watch_optimizers
from torchace.nn.recomputed import copy_module, recompute
from torchace.nn.vectorised import is_control_flow, prepared


class StackedEnsemble(EnsembleModule):
    """Members of one architecture, computed at once instead of one after another.

    Every parameter and buffer becomes one tensor with the member axis first, `(K, ...)`, held in `stacked` under the
    names it has in a member: any optimizer that treats every number alike trains it as it would train the members. A
    chain of linear layers and activations is computed as batched matrix products, anything else by `torch.func.vmap`.
    BatchNorm statistics and dropout masks are each member's own.

    Args:
        members: Modules of one architecture, in one mode (training or evaluation). They are copied.
        link: `"softmax"`, `"sigmoid"` for binary and multi-label outputs, `"identity"` for regression.

    Example:
        >>> ensemble = StackedEnsemble(nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 3)) for _ in range(10))
        >>> ensemble(torch.zeros(5, 4)).shape
        torch.Size([10, 5, 3])
        >>> ensemble(torch.zeros(10, 5, 4), batches="separate").shape
        torch.Size([10, 5, 3])
        >>> ensemble.stacked[0].weight.shape, ensemble.unstack()[0][0].weight.shape
        (torch.Size([10, 8, 4]), torch.Size([8, 4]))
    """

    def __init__(self, members: Iterable[nn.Module], link: str = "softmax") -> None:
        members = listed(members)
        check_layers(members)
        check_one_architecture(members)
        check_shared_parameters(members)
        super().__init__(len(members), link)
        self.stacked = _stack(members)
        self.training = members[0].training  # layers keep the mode they have in the members
        watch_optimizers(self)

    def __setstate__(self, state: dict[str, Any]) -> None:  # a copy is watched too
        super().__setstate__(state)  # type: ignore[no-untyped-call]
        watch_optimizers(self)

    def forward(self, *args: Any, batches: str = "shared", **kwargs: Any) -> Tensor:
        """The members' logits, `(K, N, C, ...)`.

        Args:
            *args: What a member takes.
            batches: `"shared"`: all members see one input. `"separate"`: one batch a member, `(K, N, ...)`.
                `"grouped"`: `(G, N, ...)` where G divides K; the first K/G members see the first batch, and so on.
            **kwargs: What a member takes; shared by all members.
        """
        _checks.check_choice(batches, "batches", (*BATCHES, "grouped"))
        own = batches != "shared"
        if batches == "separate":
            for x in args:
                check_own_batches(x, self.num_members)
        if batches == "grouped":
            for x in args:
                if x.ndim < 2 or not x.shape[0] or self.num_members % x.shape[0]:
                    raise ValueError(
                        f"Expected an input (G, N, ...) where G divides {self.num_members} for batches='grouped', "
                        f"but got {tuple(x.shape)}."
                    )
        if torch.is_grad_enabled():
            _check_backward_hooks(self.stacked)
        chain = Chain.of(self.stacked)
        if chain is not None and (len(args) != 1 or kwargs or not chain.takes(args[0], own=own)):
            chain = None
        if batches == "grouped" and chain is None:
            args = tuple(x.repeat_interleave(self.num_members // x.shape[0], 0) for x in args)
        try:
            output = self._vectorised(args, kwargs, own=own) if chain is None else chain(args[0], own=own)
        except Exception as error:
            if torch.compiler.is_compiling() or is_control_flow(error):
                raise
            raise self._explained(error, args, kwargs, own=own) from error
        if not isinstance(output, Tensor):
            raise TypeError(
                f"Members returned {type(output).__name__}, but members must return one tensor of logits. "
                "Wrap them in a module that returns the logits."
            )
        return output

    def _vectorised(self, args: tuple[Any, ...], kwargs: dict[str, Any], *, own: bool) -> Any:
        parameters, buffers = _slots(self.stacked, "parameters"), _slots(self.stacked, "buffers")

        def member(parameters: dict[str, Tensor], buffers: dict[str, Tensor], *args: Any) -> Any:
            state = {**parameters, **buffers}
            output = functional_call(self.stacked, state, args, kwargs, tie_weights=False)
            for name, before in buffers.items():
                if state[name] is not before:  # functional_call leaves there what the module holds after the call
                    raise _Reassigned(name)
            return output

        in_dims = (0, 0, *[0 if own else None] * len(args))
        # randomness: dropout masks are each member's own
        with prepared(self.stacked):
            return vmap(member, in_dims=in_dims, randomness="different")(parameters, buffers, *args)

    def _explained(self, error: Exception, args: tuple[Any, ...], kwargs: dict[str, Any], *, own: bool) -> Exception:
        """Why computing the members at once failed: the first member's own error, or the layer that cannot be."""
        if isinstance(error, _Reassigned):
            layer, _, buffer = error.name.rpartition(".")
            return not_vectorisable(
                self.stacked, layer, f"it replaces its buffer {buffer!r} instead of changing it in place"
            )
        try:
            self[0](*(x[0] if own else x for x in args), **kwargs)
        except Exception as alone:
            return alone  # nothing to do with computing members at once
        running: list[str] = []
        hooks = []
        for name, module in self.stacked.named_modules():
            hooks.append(module.register_forward_pre_hook(lambda *_, name=name: running.append(name)))
            hooks.append(module.register_forward_hook(lambda *_: running.pop() and None))
        try:
            self._vectorised(args, kwargs, own=own)
        except Exception:
            return not_vectorisable(self.stacked, running[-1] if running else "", str(error).split("\n")[0].rstrip("."))
        finally:
            for hook in hooks:
                hook.remove()
        return error

    def unstack(self) -> list[nn.Module]:
        """The members as plain modules, copies with parameters of their own."""
        return [self[k] for k in range(self.num_members)]

    def parameter_groups(self, weight_decay: float) -> list[dict[str, Any]]:
        """Groups for an optimizer: weight decay for matrices and kernels, none for biases and normalisation.

        A stacked bias is a matrix `(K, C)` to a rule that counts axes; this one counts the axes a member has.

        Example:
            >>> ensemble = StackedEnsemble([nn.Linear(4, 3), nn.Linear(4, 3)])
            >>> optimizer = torch.optim.AdamW(ensemble.parameter_groups(weight_decay=0.01), lr=1e-3)
            >>> [(group["weight_decay"], len(group["params"])) for group in optimizer.param_groups]
            [(0.01, 1), (0.0, 1)]
        """
        parameters = [p for p in self.parameters() if p.requires_grad]
        groups = [
            {"params": [p for p in parameters if p.ndim - 1 >= 2], "weight_decay": weight_decay},
            {"params": [p for p in parameters if p.ndim - 1 < 2], "weight_decay": 0.0},
        ]
        return [group for group in groups if group["params"]]

    @torch.no_grad()
    def clip_grad_norm_(self, max_norm: float) -> Tensor:
        """Scales each member's gradient to a norm of at most `max_norm`, as `clip_grad_norm_` would that member alone.

        Returns:
            The members' norms before, `(K,)`.
        """
        gradients = [p.grad for p in self.parameters() if p.grad is not None]
        if not gradients:
            return torch.zeros(self.num_members)
        # reshape, not flatten: a member's parameter may be one number
        norms = torch.stack([torch.linalg.vector_norm(grad.reshape(len(self), -1), dim=1) for grad in gradients])
        total = torch.linalg.vector_norm(norms, dim=0)  # (K,)
        factor = (max_norm / (total + 1e-6)).clamp(max=1.0)  # 1e-6: as torch.nn.utils.clip_grad_norm_
        for grad in gradients:
            grad.mul_(factor.reshape(-1, *[1] * (grad.ndim - 1)).to(grad))
        return total

    def __len__(self) -> int:
        return self.num_members

    def __iter__(self) -> Iterator[nn.Module]:
        return iter(self.unstack())

    def __getitem__(self, index: int) -> nn.Module:
        """Member `index` as a plain module, a copy."""
        k = range(self.num_members)[operator.index(index)]
        parts: dict[int, Any] = {}
        for p in self.stacked.parameters():
            parts[id(p)] = nn.Parameter(p.detach()[k].clone(), requires_grad=p.requires_grad)
        for b in self.stacked.buffers():
            parts[id(b)] = b.detach()[k].clone()
        return recompute(copy_module(self.stacked, parts))


def _slots(module: nn.Module, kind: str) -> dict[str, Tensor]:
    """Parameters or buffers by name, each place where one is held once.

    Tied ones have several places. A layer that is there under several names has one: `functional_call`, told of the
    others, leaves its own tensors in the module for good (torch 2.13).
    """
    return {
        f"{prefix}.{name}".lstrip("."): tensor
        for prefix, layer in module.named_modules()
        for name, tensor in getattr(layer, f"named_{kind}")(recurse=False, remove_duplicate=False)
    }


class _Reassigned(Exception):
    def __init__(self, name: str) -> None:
        super().__init__(name)
        self.name = name


def _stack(members: list[nn.Module]) -> nn.Module:
    """A copy of the first member whose parameters and buffers are those of all members, `(K, ...)`."""
    parts: dict[int, Any] = {}
    for first, *others in zip(*(member.parameters() for member in members), strict=True):
        together = torch.stack([first.detach(), *(other.detach() for other in others)])
        parts[id(first)] = nn.Parameter(together, requires_grad=first.requires_grad)
    for first, *others in zip(*(member.buffers() for member in members), strict=True):
        parts[id(first)] = torch.stack([first, *others])
    return copy_module(members[0], parts)


def _check_backward_hooks(stacked: nn.Module) -> None:
    for name, layer in stacked.named_modules():
        if layer._backward_hooks or layer._backward_pre_hooks:
            raise not_vectorisable(stacked, name, "its backward hooks would never be called")
