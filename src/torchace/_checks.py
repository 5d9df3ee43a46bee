"""Every argument error of the library, and the rule for when a tensor's values may be looked at.

Each check raises one sentence: what was expected, what came, what to do. Shapes, types and Python numbers are always
checked; a tensor's values only where reading them is free and possible: on the CPU, outside `torch.compile` and
outside `torch.func` transforms. Nothing here ever reads back from another device.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from numbers import Real

import torch
from torch import Tensor

REDUCTIONS = ("mean", "sum", "none")
LINKS = ("softmax", "sigmoid", "identity")
INDEX_DTYPES = (torch.int64, torch.int32, torch.int16, torch.int8, torch.uint8)


def is_eager() -> bool:
    """Whether plain Python runs: neither `torch.compile` nor a `torch.func` transform is active."""
    # The same private switch that torch.autograd.Function.apply reads; there is no public one in torch 2.13.
    return not torch.compiler.is_compiling() and not torch._C._are_functorch_transforms_active()


def can_read(tensor: Tensor) -> bool:
    """Whether the values of a tensor may be checked: a plain CPU tensor in plain Python."""
    plain = type(tensor) is Tensor or type(tensor) is torch.nn.Parameter  # not a fake, distributed or wrapped one
    return plain and tensor.device.type == "cpu" and is_eager()


def shape_of(tensor: Tensor) -> tuple[int, ...]:
    return tuple(tensor.shape)


def check_tensor(value: object, name: str) -> None:
    if not isinstance(value, Tensor):
        raise TypeError(f"Expected `{name}` to be a tensor, but got {type(value).__name__}. Use torch.as_tensor(...).")


def check_choice(value: object, name: str, choices: Sequence[str]) -> None:
    if value not in choices:
        listed = ", ".join(repr(choice) for choice in choices)
        raise ValueError(f"Expected `{name}` to be one of {listed}, but got {value!r}.")


def check_reduction(reduction: object) -> None:
    check_choice(reduction, "reduction", REDUCTIONS)


def check_count(value: object, name: str, *, least: int = 1) -> None:
    """A whole number of at least `least`."""
    if isinstance(value, bool) or not isinstance(value, int):
        raise TypeError(f"Expected `{name}` to be an int, but got {type(value).__name__}.")
    if value < least:
        raise ValueError(f"Expected `{name}` to be at least {least}, but got {value}.")


def check_fraction(value: object, name: str) -> None:
    """A Python number in [0, 1]."""
    if isinstance(value, bool) or not isinstance(value, Real):
        raise TypeError(f"Expected `{name}` to be a number in [0, 1], but got {type(value).__name__}.")
    if not 0.0 <= float(value) <= 1.0:
        raise ValueError(f"Expected `{name}` in [0, 1], but got {value}.")


def check_floating(tensor: Tensor, name: str) -> None:
    if not tensor.is_floating_point():
        raise TypeError(
            f"Expected `{name}` of a floating-point type, but got {tensor.dtype}. Convert it: {name}.float()."
        )


def check_logits(logits: object, name: str = "logits") -> None:
    """Members' logits `(K, N, C, ...)`."""
    check_tensor(logits, name)
    assert isinstance(logits, Tensor)
    if logits.ndim < 3:
        hint = f" For one model, add the axis: {name}[None]." if logits.ndim == 2 else ""
        raise ValueError(
            f"Expected `{name}` of shape (K, N, C, ...) with the member axis first, but got {shape_of(logits)}.{hint}"
        )
    check_floating(logits, name)
    if logits.shape[0] == 0 or logits.shape[2] == 0:
        raise ValueError(f"Expected `{name}` with at least one member and one class, but got {shape_of(logits)}.")


def check_members_first(values: object, name: str) -> None:
    """Members' outputs `(K, N, ...)` without a class axis: binary logits, predictions."""
    check_tensor(values, name)
    assert isinstance(values, Tensor)
    if values.ndim < 2:
        raise ValueError(
            f"Expected `{name}` of shape (K, N, ...) with the member axis first, but got {shape_of(values)}. "
            f"For one model, add the axis: {name}[None]."
        )
    check_floating(values, name)
    if values.shape[0] == 0:
        raise ValueError(f"Expected `{name}` with at least one member, but got {shape_of(values)}.")


def check_finite(values: Tensor, name: str = "logits") -> None:
    """Refuse NaN and Inf in members' outputs `(K, ...)`, naming the first member that has one."""
    if not can_read(values) or bool(torch.isfinite(values).all()):
        return
    bad = (~torch.isfinite(values)).flatten(1).any(1).nonzero().flatten().tolist()
    raise ValueError(nonfinite_message(bad, name))


def nonfinite_message(members: Sequence[int], name: str = "logits") -> str:
    who = f"member {members[0]}" if len(members) == 1 else "members " + ", ".join(map(str, members))
    return f"Expected finite `{name}`, but those of {who} hold NaN or Inf. Look for a diverged training run."


def check_diversity(diversity: object) -> None:
    """λ, a number or a 0-dimensional tensor, in [0, 1]."""
    if isinstance(diversity, Tensor):
        if diversity.ndim != 0:
            raise ValueError(
                f"Expected `diversity` to be a number or a 0-dimensional tensor, but got shape {shape_of(diversity)}. "
                "For several values at once, use torch.func.vmap over them."
            )
        if not can_read(diversity):
            return
        diversity = diversity.item()
    if isinstance(diversity, bool) or not isinstance(diversity, Real):
        raise TypeError(
            f"Expected `diversity` to be a number or a 0-dimensional tensor, but got {type(diversity).__name__}."
        )
    if not 0.0 <= float(diversity) <= 1.0:  # NaN fails both comparisons
        raise ValueError(
            f"Expected `diversity` in [0, 1], but got {diversity}. "
            "For the paper's gamma, use diversity_from_gamma(gamma, num_members)."
        )


def check_gamma(gamma: object, largest: float, loss: str) -> None:
    if isinstance(gamma, bool) or not isinstance(gamma, Real):
        raise TypeError(f"Expected `gamma` to be a number, but got {type(gamma).__name__}.")
    # a gamma computed as gamma_from_diversity(1.0, K) may exceed the bound by rounding
    if not 0.0 <= float(gamma) <= largest * (1 + 1e-12):
        raise ValueError(
            f"Expected `gamma` in [0, {largest:.6g}] for this number of members and loss={loss!r}, but got {gamma}. "
            "Larger values would mean diversity above 1."
        )


def _weights_tensor(member_weights: Tensor | Sequence[float]) -> Tensor:
    """Weights given as numbers, as a tensor."""
    if isinstance(member_weights, Tensor):
        return member_weights if member_weights.is_floating_point() else member_weights.double()
    try:
        return torch.as_tensor(member_weights, dtype=torch.float64, device="cpu")
    except (TypeError, ValueError, RuntimeError) as error:
        raise TypeError(
            f"Expected `member_weights` to be a tensor or a list of numbers, but got {member_weights!r}."
        ) from error


def as_member_weights(
    member_weights: Tensor | Sequence[float] | None, num_members: int, *, like: Tensor, partial: bool = False
) -> Tensor:
    """α as a detached tensor `(K,)` of `like`'s device and type; uniform for None.

    Args:
        partial: The weights are those of some members of a larger ensemble and need not sum to 1.
    """
    if member_weights is None:
        return torch.full((num_members,), 1.0 / num_members, dtype=like.dtype, device=like.device)
    member_weights = _weights_tensor(member_weights)
    if shape_of(member_weights) != (num_members,):
        raise ValueError(
            f"Expected `member_weights` of shape ({num_members},), one for each member, "
            f"but got {shape_of(member_weights)}."
        )
    member_weights = member_weights.detach()
    if can_read(member_weights):
        values = member_weights.tolist()
        if not all(value >= 0 for value in values):
            raise ValueError(f"Expected non-negative `member_weights`, but got {values}.")
        total = math.fsum(values)
        # Each weight was rounded once (half an ulp of at most 1); K of them, plus what a hand-typed sum leaves.
        eps = torch.finfo(member_weights.dtype).eps if member_weights.is_floating_point() else 0.0
        slack = 1e-6 + num_members * eps
        if total > 1 + slack or (not partial and total < 1 - slack):
            what = "at most 1" if partial else "1"
            raise ValueError(
                f"Expected `member_weights` that sum to {what}, but they sum to {total:.6g}. "
                "Divide them by their sum: member_weights / member_weights.sum()."
            )
    return member_weights.to(dtype=like.dtype, device=like.device)


def check_ignore_index(ignore_index: object) -> None:
    if isinstance(ignore_index, bool) or not isinstance(ignore_index, int):
        raise TypeError(f"Expected `ignore_index` to be an int, but got {type(ignore_index).__name__}.")


def check_target(target: object, logits: Tensor, *, ignore_index: int | None = -100) -> bool:
    """The target of logits `(K, N, C, ...)`; returns whether it holds class probabilities (not indices).

    Class indices are integers `(N, ...)`, probabilities floating-point `(N, C, ...)`. With `ignore_index=None` every
    sample counts.
    """
    check_tensor(target, "target")
    assert isinstance(target, Tensor)
    indices = (logits.shape[1], *logits.shape[3:])
    probs = shape_of(logits)[1:]
    if target.is_floating_point():
        if shape_of(target) != probs:
            if shape_of(target) == indices:
                raise TypeError(
                    f"Expected class indices of an integer type, but got `target` of type {target.dtype} and shape "
                    f"{shape_of(target)}. Convert it: target.long()."
                )
            raise ValueError(
                f"Expected class probabilities of shape {probs} to match `logits` {shape_of(logits)}, "
                f"but got `target` of shape {shape_of(target)}."
            )
        if can_read(target) and not bool((target >= 0).all()):
            raise ValueError(
                "Expected class probabilities in `target`, but some are negative or NaN. "
                "If they are logits, use target.softmax(1)."
            )
        if ignore_index is not None and ignore_index >= 0:
            raise ValueError(
                f"Expected class indices with ignore_index={ignore_index}, but got class probabilities. "
                "Mask samples with `sample_weight` instead."
            )
        return True
    if target.dtype not in INDEX_DTYPES:
        raise TypeError(
            f"Expected `target` of an integer type (class indices) or floating-point type (class probabilities), "
            f"but got {target.dtype}."
        )
    if shape_of(target) != indices:
        if shape_of(target) == probs:
            raise TypeError(
                f"Expected class probabilities of a floating-point type, but got `target` of type {target.dtype} and "
                f"shape {shape_of(target)}. Convert them: target.float(); or give class indices of shape {indices}."
            )
        raise ValueError(
            f"Expected `target` of shape {indices} (class indices) or {probs} (class probabilities) for `logits` "
            f"{shape_of(logits)}, but got {shape_of(target)}. The target has no member axis: all members share it."
        )
    if can_read(target) and target.numel():
        low, high = (int(bound) for bound in torch.aminmax(target))
        if low < 0 or high >= logits.shape[2]:
            index = target.long()  # comparisons in a narrow type wrap around
            outside = (index < 0) | (index >= logits.shape[2])
            also = ""
            if ignore_index is not None:
                outside &= index != ignore_index
                also = f" or ignore_index={ignore_index}"
            if bool(outside.any()):
                raise ValueError(
                    f"Expected class indices in [0, {logits.shape[2] - 1}]{also}, but got {int(index[outside][0])}."
                )
    return False


def check_same_shape(target: object, like: Tensor, name: str) -> None:
    """The target of binary logits or predictions `(K, N, ...)`: the same shape without the member axis."""
    check_tensor(target, "target")
    assert isinstance(target, Tensor)
    if target.shape != like.shape[1:]:
        raise ValueError(
            f"Expected `target` of shape {shape_of(like)[1:]} to match `{name}` {shape_of(like)}, "
            f"but got {shape_of(target)}. The target has no member axis: all members share it."
        )
    if target.is_complex():
        raise TypeError(f"Expected a real `target`, but got {target.dtype}.")


def check_binary_target(target: Tensor) -> None:
    if can_read(target) and not bool(((target >= 0) & (target <= 1)).all()):
        raise ValueError("Expected `target` in [0, 1], the probability of each output, but some values are outside.")


def as_sample_weight(sample_weight: object, num_members: int, samples: tuple[int, ...], like: Tensor) -> Tensor:
    """Sample weights as a detached tensor that broadcasts against `(K, *samples)`, its own axes kept.

    Args:
        samples: The shape of one member's samples, `(N, ...)`.

    Returns:
        `(*samples)` for weights that all members share, `(K, *samples)` for weights of each member's own.
    """
    check_tensor(sample_weight, "sample_weight")
    assert isinstance(sample_weight, Tensor)
    given = shape_of(sample_weight)
    rest = len(samples) - 1
    if given == samples or given == (num_members, *samples):
        weight = sample_weight
    elif given == samples[:1]:
        weight = sample_weight.reshape(*given, *[1] * rest).expand(samples)
    elif given == (num_members, samples[0]):
        weight = sample_weight.reshape(*given, *[1] * rest).expand(num_members, *samples)
    else:
        raise ValueError(
            f"Expected `sample_weight` of shape {samples} (shared by all members) or {(num_members, *samples)} "
            f"(each member's own), but got {given}."
        )
    if can_read(sample_weight) and not bool((sample_weight >= 0).all()):
        raise ValueError("Expected non-negative `sample_weight`, but some weights are negative or NaN.")
    return weight.detach().to(dtype=like.dtype, device=like.device)


def check_class_weight(weight: object, num_classes: int) -> None:
    check_tensor(weight, "weight")
    assert isinstance(weight, Tensor)
    if shape_of(weight) != (num_classes,):
        raise ValueError(
            f"Expected `weight` of shape ({num_classes},), one for each class, but got {shape_of(weight)}."
        )


def check_mixture(mixture: object, like: Tensor) -> None:
    """Σ_j α^j q^j computed elsewhere: the members' shape without the member axis."""
    check_tensor(mixture, "mixture")
    assert isinstance(mixture, Tensor)
    if mixture.shape != like.shape[1:]:
        raise ValueError(
            f"Expected `mixture` of shape {shape_of(like)[1:]}, the members' shape without the member axis, "
            f"but got {shape_of(mixture)}."
        )


def check_probs(probs: object) -> None:
    """An ensemble's probabilities `(N, C, ...)`."""
    check_tensor(probs, "probs")
    assert isinstance(probs, Tensor)
    if probs.ndim < 2:
        raise ValueError(f"Expected `probs` of shape (N, C, ...), but got {shape_of(probs)}.")
    check_floating(probs, "probs")
    if not can_read(probs):
        return
    if not bool(torch.isfinite(probs).all()):
        raise ValueError("Expected finite `probs`, but some are NaN or Inf.")
    total = probs.sum(1)
    # Half precision rounds each of C probabilities; 1e-3 lets sums of float32 and rounded files pass.
    slack = 1e-3 + probs.shape[1] * torch.finfo(probs.dtype).eps
    if bool((probs < 0).any()) or bool(((total - 1).abs() > slack).any()):
        raise ValueError(
            "Expected probabilities that are non-negative and sum to 1 over axis 1. "
            "For logits, use ensemble_probs(logits) first."
        )


def check_broadcasts(value: object, name: str, like: Tensor) -> None:
    """A tensor that broadcasts to the shape of another without enlarging it."""
    check_tensor(value, name)
    assert isinstance(value, Tensor)
    pairs = zip(reversed(value.shape), reversed(like.shape), strict=False)
    if value.ndim > like.ndim or any(ours not in (1, theirs) for ours, theirs in pairs):
        raise ValueError(
            f"Expected `{name}` that broadcasts to the target's shape {shape_of(like)}, but got {shape_of(value)}."
        )
