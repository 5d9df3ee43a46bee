"""Base class of all ensemble modules; checks of members and their outputs, gradients of shared parts."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from enum import Enum
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves, tree_map

from torchace import _checks
from torchace.functional import average_gradients, ensemble_log_probs, ensemble_probs

BATCHES = ("shared", "separate")
# types without gradient that a trunk may return
CONSTANTS = (str, bytes, int, float, complex, range, slice, Enum, np.ndarray, np.generic, torch.dtype, torch.device)


def as_list(members: Iterable[nn.Module]) -> list[nn.Module]:
    """Return a non-empty list of members."""
    if not isinstance(members, Iterable) or isinstance(members, nn.Sequential):
        raise TypeError(f"Expected a list of members, but got one {type(members).__name__}. Write [member].")
    members = list(members)
    if not members:
        raise ValueError("Expected at least one member, but got none.")
    return members


def check_modules(members: dict[int, nn.Module]) -> None:
    """Check that members, by index, are modules."""
    for k, member in members.items():
        if not isinstance(member, nn.Module):
            raise TypeError(f"Expected members to be modules, but member {k} is {type(member).__name__}.")


def average_shared_gradients(values: Any, num_members: int) -> Any:
    """Apply `average_gradients` to every floating-point tensor in a trunk's output, nested or not.

    Other types must carry no gradient: one that this function misses would be K times too large.
    """
    if isinstance(values, Tensor):
        return average_gradients(values, num_members) if values.is_floating_point() else values
    if isinstance(values, dict):
        shared = copy.copy(values)  # keep subclasses such as transformers' outputs
        for key, value in values.items():
            shared[key] = average_shared_gradients(value, num_members)
        return shared
    if isinstance(values, (tuple, list)):
        averaged = [average_shared_gradients(value, num_members) for value in values]
        return type(values)(*averaged) if hasattr(values, "_fields") else type(values)(averaged)  # a named tuple
    if values is None or isinstance(values, CONSTANTS):
        return values
    raise TypeError(
        "Expected the trunk to return a tensor, or a tuple, list or dict of tensors, numbers, strings and "
        f"None, but got {type(values).__name__}: its gradients could not be averaged over the members. "
        "Wrap the trunk in a module that returns the tensors that the members need."
    )


def check_shared_parameters(members: Sequence[nn.Module], trunk: nn.Module | None = None) -> dict[str, Tensor]:
    """Refuse trained parameters in several members or in trunk and member; return other shared tensors by place."""
    owners: dict[int, str] = {}
    shared: dict[str, Tensor] = {}
    parts = {"the trunk": trunk} if trunk is not None else {}
    for part, module in (parts | {f"member {k}": member for k, member in enumerate(members)}).items():
        own: dict[str, Tensor] = {**dict(module.named_parameters()), **dict(module.named_buffers())}
        keys = {name: _memory_key(tensor) for name, tensor in own.items()}
        for name, key in keys.items():
            if key in owners:
                shared[f"{name!r} of {part}, the same tensor in {owners[key]},"] = own[name]
        owners.update(dict.fromkeys(keys.values(), part))
    for name, tensor in shared.items():
        if tensor.requires_grad:
            raise ValueError(
                f"Expected members that share no trained parameter, but {name} is trained. For a shared part, "
                "which receives the mean of the members' gradients, use Ensemble(members, trunk=...) or "
                "branch(model, num_members, at=...). For separate members, give each its own copy (copy.deepcopy). "
                "Frozen parameters (requires_grad=False) may be shared."
            )
    return shared


def _memory_key(tensor: Tensor) -> int:
    return (type(tensor) in (Tensor, nn.Parameter) and tensor.data_ptr()) or id(tensor)


def tensor_versions(values: Iterable[Any]) -> list[int]:
    """Count the in-place changes of each tensor among some values."""
    if _checks.is_compiling():
        return []
    return [value._version for value in values if isinstance(value, Tensor) and not value.is_inference()]


def call_members(members: dict[int, nn.Module], args: Sequence[Any], kwargs: dict[str, Any]) -> Tensor:
    """Call members, by index, on the same input; return their outputs `(K, ...)`."""
    inputs = [*args, *kwargs.values()]
    before = tensor_versions(inputs)
    outputs = []
    for k, member in members.items():
        outputs.append(member(*args, **kwargs))
        if len(outputs) < len(members) and tensor_versions(inputs) != before:
            raise ValueError(
                f"Member {k} changed its input in place, and the next members would see the change. "
                "Use inplace=False, or clone the input in this member."
            )
    return stack_outputs(outputs)


def stack_outputs(outputs: Sequence[Any]) -> Tensor:
    """Stack the members' outputs to `(K, ...)`."""
    outputs = [take_logits(output, f"Member {k}") for k, output in enumerate(outputs)]
    for k, output in enumerate(outputs):
        if output.shape != outputs[0].shape:
            raise ValueError(
                f"Member {k} returned shape {tuple(output.shape)}, but member 0 returned {tuple(outputs[0].shape)}. "
                "All members must predict the same classes."
            )
    return torch.stack(tuple(outputs))


def take_logits(output: Any, source: str) -> Tensor:
    """Return an output that is a tensor, or the `logits` of an object, as transformers' models return."""
    logits = getattr(output, "logits", output)
    if not isinstance(logits, Tensor):
        raise TypeError(
            f"{source} returned {type(output).__name__}, but members must return one tensor of logits, or an object "
            "with `logits`. Wrap it in a module that returns the logits."
        )
    return logits


def tensor_leaves(inputs: Sequence[Any]) -> list[Tensor]:
    """Return the tensors among the inputs, nested or not."""
    leaves = inputs if all(isinstance(x, Tensor) for x in inputs) else tree_leaves(list(inputs))  # the first is fast
    return [x for x in leaves if isinstance(x, Tensor)]


def check_own_batches(inputs: Sequence[Any], num_members: int) -> None:
    """Check inputs `(K, N, ...)` with one batch for each member."""
    leaves = tensor_leaves(inputs)
    if not leaves:  # all members would receive the same input
        got = ", ".join(type(x).__name__ for x in inputs) or "none"
        raise ValueError(
            "Expected a positional input of tensors, alone or in tuples, lists and dicts, for batches='separate', "
            f"but got {got}."
        )
    for x in leaves:
        if x.ndim < 2 or x.shape[0] != num_members:
            raise ValueError(
                f"Expected an input of shape ({num_members}, N, ...) with one batch per member for "
                f"batches='separate', but got {tuple(x.shape)}."
            )


def separate_features(trunk: nn.Module, args: Sequence[Any], num_members: int, **kwargs: Any) -> Tensor:
    """Return the trunk's features `(K, N, ...)` of inputs `(K, N, ...)`, one batch for each member, in one pass."""
    check_own_batches(args, num_members)
    inputs = tree_map(lambda x: x.flatten(0, 1) if isinstance(x, Tensor) else x, tuple(args))
    features = average_shared_gradients(trunk(*inputs, **kwargs), num_members)
    if not isinstance(features, Tensor):
        got = type(features).__name__
        raise TypeError(f"Expected the trunk to return one tensor with batches='separate', but got {got}.")
    return features.unflatten(0, (num_members, len(features) // num_members))


class EnsembleModule(nn.Module):
    """Base class of modules that map an input to the members' logits `(K, N, C, ...)`.

    Predictions are computed in evaluation mode and without gradients, in either mode of the module.
    `member_weights` (the paper's α) are uniform unless set.
    """

    member_weights: Tensor | None

    def __init__(self, num_members: int, link: str = "softmax") -> None:
        super().__init__()
        _checks.check_count(num_members, "num_members")
        _checks.check_choice(link, "link", _checks.LINKS)
        self.num_members = num_members
        self.link = link
        self.register_buffer("member_weights", None)

    def _apply(self, fn: Any, recurse: bool = True) -> Any:
        apply = super()._apply
        return apply_keeping_dtype(self, ("member_weights",), lambda: apply(fn, recurse))  # type: ignore[no-untyped-call]

    def _load_from_state_dict(self, state_dict: dict[str, Any], prefix: str, *args: Any) -> None:
        if f"{prefix}member_weights" not in state_dict:  # uniform weights
            self.member_weights = None
        elif self.member_weights is None:
            self.set_member_weights([1 / self.num_members] * self.num_members)
        super()._load_from_state_dict(state_dict, prefix, *args)

    def extra_repr(self) -> str:
        """Return the number of members and the link."""
        return f"num_members={self.num_members}, link={self.link!r}"

    def set_member_weights(self, member_weights: Tensor | Sequence[float] | None) -> None:
        """Set the members' weights in predictions, `(K,)`; None for uniform ones. `state_dict()` includes them."""
        if member_weights is not None:
            member_weights = _checks.as_member_weights(member_weights, self.num_members, like=self._like())
        self.member_weights = member_weights

    def predict_log_proba(self, *args: Any, member_weights: Tensor | None = None, **kwargs: Any) -> Tensor:
        """Return the ensemble's log-probabilities, `(N, C, ...)`, for the input that `forward` takes."""
        self._check_has_probabilities("predict_log_proba")
        weights = self.member_weights if member_weights is None else member_weights
        with self._evaluation_mode():
            # clamped: rounding may give a probability of 1 + 4e-16
            return ensemble_log_probs(self(*args, **kwargs), member_weights=weights, link=self.link).clamp_(max=0)

    def predict_proba(self, *args: Any, member_weights: Tensor | None = None, **kwargs: Any) -> Tensor:
        """Return the ensemble's probabilities, `(N, C, ...)`, for the input that `forward` takes."""
        self._check_has_probabilities("predict_proba")
        return self.predict_log_proba(*args, member_weights=member_weights, **kwargs).exp()

    def predict(self, *args: Any, member_weights: Tensor | None = None, **kwargs: Any) -> Tensor:
        """Return class indices `(N, ...)`; 0 or 1 for each output of a sigmoid; the members' mean for regression."""
        if self.link == "identity":
            with self._evaluation_mode():
                return self._mixture(self(*args, **kwargs), member_weights)
        probs = self.predict_proba(*args, member_weights=member_weights, **kwargs)
        return probs.argmax(1) if self.link == "softmax" else (probs > 0.5).long()

    def _mixture(self, logits: Tensor, member_weights: Tensor | None) -> Tensor:
        weights = self.member_weights if member_weights is None else member_weights
        return ensemble_probs(logits, member_weights=weights, link=self.link)

    def _like(self) -> Tensor:
        """Return an empty tensor with the device and type for member weights: at least float32."""
        first = next((p for p in self.parameters() if p.is_floating_point()), torch.empty(()))
        dtype = torch.float64 if first.dtype == torch.float64 else torch.float32
        return torch.empty((), dtype=dtype, device=first.device)

    def _check_has_probabilities(self, method: str) -> None:
        if self.link == "identity":
            raise ValueError(f"An ensemble with link='identity' has no probabilities for {method}; use predict.")

    @contextmanager
    def _evaluation_mode(self) -> Iterator[None]:
        training = {module: module.training for module in self.modules()}
        self.eval()
        try:
            with torch.no_grad():
                yield
        finally:
            for module, mode in training.items():
                module.training = mode


def apply_keeping_dtype(module: nn.Module, names: Sequence[str], apply: Callable[[], Any]) -> Any:
    """Call a module's `_apply`, but keep the precision of some buffers: `.half()` must not round member weights."""
    before = {name: getattr(module, name) for name in names}
    result = apply()
    for name, value in before.items():
        moved = getattr(module, name)
        if value is not None and torch.finfo(moved.dtype).eps > torch.finfo(value.dtype).eps:
            setattr(module, name, value.to(moved.device))
    return result


def split_range(count: int, parts: int, index: int) -> range:
    """Return part `index` of `range(count)` split into `parts`, of which the first may be longer by one."""
    least, more = divmod(count, parts)
    start = index * least + min(index, more)
    return range(start, start + least + (index < more))
