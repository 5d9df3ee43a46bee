"""What every ensemble module has in common: K members, a link, and predictions."""

from __future__ import annotations

import copy
import dataclasses
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from enum import Enum
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from torchace import _checks
from torchace.functional import average_gradients, ensemble_log_probs, ensemble_probs

BATCHES = ("shared", "separate")
# what may be among a trunk's outputs beside tensors: types that carry no gradient
CONSTANTS = (str, bytes, int, float, complex, range, slice, Enum, np.ndarray, np.generic, torch.dtype, torch.device)


class EnsembleModule(nn.Module):
    """A module that maps an input to the members' logits `(K, N, C, ...)`.

    Its predictions are the members' probabilities averaged, computed in evaluation mode and without gradients,
    whatever mode the module is in. `member_weights` (the paper's α) are uniform until set.
    """

    member_weights: Tensor | None

    def __init__(self, num_members: int, link: str = "softmax") -> None:
        super().__init__()
        _checks.check_count(num_members, "num_members")
        _checks.check_choice(link, "link", _checks.LINKS)
        self.num_members = num_members
        self.link = link
        self.register_buffer("member_weights", None, persistent=False)

    def _apply(self, fn: Any, recurse: bool = True) -> Any:
        moved = super()._apply
        return apply_keeping_dtype(self, ("member_weights",), lambda: moved(fn, recurse))  # type: ignore[no-untyped-call]

    def extra_repr(self) -> str:
        return f"num_members={self.num_members}, link={self.link!r}"

    def set_member_weights(self, member_weights: Tensor | Sequence[float] | None) -> None:
        """Weights the members from now on in every prediction; None for uniform weights.

        `save_model` keeps them. `state_dict()` does not: it is the same with and without them.
        """
        if member_weights is None:
            self.member_weights = None
            return
        like = next((p for p in self.parameters() if p.is_floating_point()), torch.empty(()))
        like = torch.empty(
            (), dtype=torch.float64 if like.dtype == torch.float64 else torch.float32, device=like.device
        )
        self.member_weights = _checks.as_member_weights(member_weights, self.num_members, like=like)

    def predict_log_proba(self, *args: Any, member_weights: Tensor | None = None, **kwargs: Any) -> Tensor:
        """The logarithm of the ensemble's probabilities, `(N, C, ...)`, for the input that `forward` takes."""
        self._refuse_identity("predict_log_proba")
        weights = self.member_weights if member_weights is None else member_weights
        with self._evaluating():
            # rounding may leave 1 + 4e-16 of a sum of shares, which others refuse as a probability
            return ensemble_log_probs(self(*args, **kwargs), member_weights=weights, link=self.link).clamp_(max=0)

    def predict_proba(self, *args: Any, member_weights: Tensor | None = None, **kwargs: Any) -> Tensor:
        """The ensemble's probabilities, `(N, C, ...)`, for the input that `forward` takes."""
        self._refuse_identity("predict_proba")
        return self.predict_log_proba(*args, member_weights=member_weights, **kwargs).exp()

    def predict(self, *args: Any, member_weights: Tensor | None = None, **kwargs: Any) -> Tensor:
        """The ensemble's answer: class indices `(N, ...)`; 0 or 1 an output for sigmoid; the mean for regression."""
        if self.link == "softmax":
            return self.predict_log_proba(*args, member_weights=member_weights, **kwargs).argmax(1)
        if self.link == "sigmoid":
            return (self.predict_proba(*args, member_weights=member_weights, **kwargs) > 0.5).long()
        weights = self.member_weights if member_weights is None else member_weights
        with self._evaluating():
            return ensemble_probs(self(*args, **kwargs), member_weights=weights, link="identity")

    def _refuse_identity(self, method: str) -> None:
        if self.link == "identity":
            raise ValueError(f"An ensemble with link='identity' has no probabilities for {method}; use predict.")

    @contextmanager
    def _evaluating(self) -> Iterator[None]:
        training = {module: module.training for module in self.modules()}
        self.eval()
        try:
            with torch.no_grad():
                yield
        finally:
            for module, mode in training.items():
                module.training = mode


def apply_keeping_dtype(module: nn.Module, names: Sequence[str], apply: Callable[[], Any]) -> Any:
    """Lets `.to(...)` move buffers but not round them: weights of members stay as they were given."""
    before = {name: getattr(module, name) for name in names}
    result = apply()
    for name, value in before.items():
        moved = getattr(module, name)
        if value is not None and torch.finfo(moved.dtype).eps > torch.finfo(value.dtype).eps:
            setattr(module, name, value.to(moved.device))
    return result


def average_shared_gradients(values: Any, num_members: int) -> Any:
    """`average_gradients` for every floating-point tensor in what a trunk returns.

    That is a tensor, or a tuple, list, dict or dataclass of such; what is made of it is of the same type. Anything else
    must be of a type that carries no gradient: a gradient that this function does not see would be K times too large.
    """
    if isinstance(values, Tensor):
        return average_gradients(values, num_members) if values.is_floating_point() else values
    if isinstance(values, dict):
        shared = copy.copy(values)  # not a plain dict: transformers' outputs are more
        for key, value in values.items():
            shared[key] = average_shared_gradients(value, num_members)
        return shared
    if isinstance(values, (tuple, list)):
        averaged = [average_shared_gradients(value, num_members) for value in values]
        return type(values)(*averaged) if hasattr(values, "_fields") else type(values)(averaged)  # a named tuple
    if dataclasses.is_dataclass(values) and not isinstance(values, type):
        made = copy.copy(values)
        for field in dataclasses.fields(values):  # object's: a frozen one refuses its own
            object.__setattr__(made, field.name, average_shared_gradients(getattr(values, field.name), num_members))
        return made
    if values is None or isinstance(values, CONSTANTS):
        return values
    raise TypeError(
        "Expected the trunk to return a tensor, or a tuple, list, dict or dataclass of tensors, numbers, strings and "
        f"None, but got {type(values).__name__}: its gradients could not be averaged over the members. "
        "Wrap the trunk in a module that returns the tensors that the members need."
    )


def check_shared_parameters(members: Sequence[nn.Module], trunk: nn.Module | None = None) -> bool:
    """Refuse a trained parameter that several members, or the trunk and a member, hold.

    Returns:
        Whether anything else is shared: frozen parameters or buffers.
    """
    shared = shared_tensors(members, trunk)
    for name, tensor in shared.items():
        if tensor.requires_grad:
            raise ValueError(
                f"Expected members with parameters of their own, but {name} is trained. For a shared part, "
                "which gets the mean of the members' gradients, use Ensemble(members, trunk=...) or "
                "branch(model, num_members, at=...). For separate members, give each its own copy (copy.deepcopy). "
                "Frozen parameters (requires_grad=False) may be shared."
            )
    return bool(shared)


def shared_tensors(members: Sequence[nn.Module], trunk: nn.Module | None = None) -> dict[str, Tensor]:
    """The parameters and buffers that several members, or the trunk and a member, hold, by where they are."""
    owners: dict[Any, str] = {}
    shared = {}
    parts = {f"member {k}": member for k, member in enumerate(members)}
    for part, module in ({"the trunk": trunk, **parts} if trunk is not None else parts).items():
        named = {name: (_identity(t), t) for name, t in [*module.named_parameters(), *module.named_buffers()]}
        for name, (identity, tensor) in named.items():
            if identity in owners:
                shared[f"{name!r} of {part}, the same tensor in {owners[identity]},"] = tensor
        owners.update({identity: part for identity, _ in named.values()})
    return shared


def _identity(tensor: Tensor) -> Any:
    """What two tensors have in common if they are one: their memory, as far as they have any."""
    plain = type(tensor) in (Tensor, nn.Parameter) and not tensor.is_meta and tensor.numel()
    return (tensor.device, tensor.data_ptr()) if plain else id(tensor)


def as_list(members: Iterable[nn.Module]) -> list[nn.Module]:
    """The members as a list, at least one."""
    if not isinstance(members, Iterable):
        raise TypeError(f"Expected a list of members, but got one {type(members).__name__}. Write [member].")
    found = list(members)
    if not found:
        raise ValueError("Expected at least one member, but got none.")
    return found


def tensor_versions(values: Sequence[Any]) -> list[int]:
    """How often the tensors among some arguments were changed in place."""
    if torch.compiler.is_compiling():
        return []
    return [value._version for value in values if isinstance(value, Tensor) and not value.is_inference()]


def check_unchanged(values: Sequence[Any], before: list[int], member: int) -> None:
    """Refuse a member that changed what the next members are to see."""
    if tensor_versions(values) != before:
        raise ValueError(
            f"Member {member} changed its input in place, which the next members would see. Use layers that do not "
            "(inplace=False), or give it a copy."
        )


def stack_outputs(outputs: Sequence[Any]) -> Tensor:
    """Members' outputs, one tensor each, as `(K, ...)`; an error that names the member that differs."""
    for k, output in enumerate(outputs):
        if not isinstance(output, Tensor):
            raise TypeError(
                f"Member {k} returned {type(output).__name__}, but members must return one tensor of logits. "
                "Wrap it in a module that returns the logits."
            )
        if output.shape != outputs[0].shape:
            raise ValueError(
                f"Member {k} returned shape {tuple(output.shape)}, but member 0 returned {tuple(outputs[0].shape)}. "
                "All members must predict the same classes."
            )
    return torch.stack(tuple(outputs))


def check_own_batches(x: Tensor, num_members: int) -> None:
    """An input `(K, N, ...)` with one batch a member."""
    if x.ndim < 2 or x.shape[0] != num_members:
        raise ValueError(
            f"Expected an input of shape ({num_members}, N, ...) with one batch a member for batches='separate', "
            f"but got {tuple(x.shape)}."
        )
