"""Base class of all ensemble modules."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from torchace import _checks
from torchace.functional import ensemble_log_probs, ensemble_probs


class EnsembleModule(nn.Module):
    """Base class of modules that map an input to the members' logits `(K, N, C, ...)`.

    Predictions are computed in evaluation mode and without gradients, in either mode of the module.
    `member_weights` (the paper's α) are uniform unless set.
    """

    _version = 2  # of the state dict; 1 had no member weights
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

    def _load_from_state_dict(
        self, state_dict: dict[str, Any], prefix: str, local_metadata: dict[str, Any], *args: Any
    ) -> None:
        key = f"{prefix}member_weights"
        if key in state_dict:
            if self.member_weights is None:
                self.set_member_weights([1 / self.num_members] * self.num_members)
        elif local_metadata.get("version", 1) > 1:  # uniform weights
            self.member_weights = None
        elif self.member_weights is not None:  # version 1: keep the current weights
            state_dict[key] = self.member_weights
        super()._load_from_state_dict(state_dict, prefix, local_metadata, *args)

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
