"""Argument checks.

Shapes, types and Python numbers are always checked; tensor values only on the CPU, outside `torch.compile` and
`torch.func` transforms, so that nothing is read back from a device.
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


def is_compiling() -> bool:
    """Whether `torch.compile` traces, or runs a node of its graph on tensors without values."""
    # before torch 2.13, `torch.compiler.is_compiling()` is False inside a function of `allow_in_graph`
    return torch.compiler.is_compiling() or torch._C._get_dispatch_mode(torch._C._TorchDispatchModeKey.FAKE) is not None


def is_eager() -> bool:
    """Whether neither `torch.compile` nor a `torch.func` transform is active."""
    # as torch.autograd.Function.apply; torch 2.13 has no public function
    return not is_compiling() and not torch._C._are_functorch_transforms_active()


def can_compare() -> bool:
    """Whether values can be read and compared: no compilation, transform, trace or CUDA graph capture is active."""
    captured = torch.cuda.is_available() and torch.cuda.is_current_stream_capturing()
    return is_eager() and not torch._C._get_tracing_state() and not captured


def can_read(tensor: Tensor) -> bool:
    """Whether the values of a tensor may be checked: a plain CPU tensor in eager mode."""
    plain = type(tensor) is Tensor or type(tensor) is torch.nn.Parameter  # not a fake, distributed or wrapped one
    return plain and tensor.device.type == "cpu" and is_eager()


def shape_of(tensor: Tensor) -> tuple[int, ...]:
    return tuple(tensor.shape)


def check_choice(value: object, name: str, choices: Sequence[object]) -> None:
    if value not in choices:
        listed = ", ".join(repr(choice) for choice in choices)
        raise ValueError(f"Expected `{name}` to be one of {listed}, but got {value!r}.")


def check_reduction(reduction: object) -> None:
    check_choice(reduction, "reduction", REDUCTIONS)


def check_int(value: object, name: str) -> None:
    if isinstance(value, bool) or not isinstance(value, int):
        raise TypeError(f"Expected `{name}` to be an int, but got {type(value).__name__}.")


def check_count(value: int, name: str, *, least: int = 1) -> None:
    """Check an integer of at least `least`."""
    check_int(value, name)
    if value < least:
        raise ValueError(f"Expected `{name}` to be at least {least}, but got {value}.")


def check_fraction(
    value: object,
    name: str,
    *,
    largest: float = 1.0,
    kind: str = "a number in [0, 1]",
    interval: str = "[0, 1]",
    hint: str = "",
) -> None:
    """Check a Python number in [0, largest]."""
    if isinstance(value, bool) or not isinstance(value, Real):
        raise TypeError(f"Expected `{name}` to be {kind}, but got {type(value).__name__}.")
    if not 0.0 <= float(value) <= largest:  # NaN fails both comparisons
        raise ValueError(f"Expected `{name}` in {interval}, but got {value}.{hint}")


def check_diversity(diversity: float | Tensor) -> None:
    """Check λ, a number or a 0-dimensional tensor, in [0, 1]."""
    kind = "a number or a 0-dimensional tensor"
    if isinstance(diversity, Tensor):
        if diversity.ndim != 0:
            raise ValueError(
                f"Expected `diversity` to be {kind}, but got shape {shape_of(diversity)}. "
                "For several values at once, use torch.func.vmap over them."
            )
        if not can_read(diversity):
            return
        diversity = diversity.item()
    hint = " For the paper's gamma, use diversity_from_gamma(gamma, num_members)."
    check_fraction(diversity, "diversity", kind=kind, hint=hint)


def check_gamma(gamma: float, largest: float, loss: str) -> None:
    interval = f"[0, {largest:.6g}] for this number of members and loss={loss!r}"
    hint = " Larger values would mean diversity above 1."
    # a gamma computed as gamma_from_diversity(1.0, K) may exceed the bound by rounding
    check_fraction(gamma, "gamma", largest=largest * (1 + 1e-12), kind="a number", interval=interval, hint=hint)


def check_tensor(value: object, name: str) -> None:
    if not isinstance(value, Tensor):
        raise TypeError(f"Expected `{name}` to be a tensor, but got {type(value).__name__}. Use torch.as_tensor(...).")


def check_real(tensor: Tensor, name: str) -> None:
    if tensor.is_complex():
        raise TypeError(f"Expected a real `{name}`, but got {tensor.dtype}.")


def check_module(model: object) -> None:
    if not isinstance(model, torch.nn.Module):
        raise TypeError(f"Expected `model` to be a module, but got {type(model).__name__}.")


def check_floating(tensor: Tensor, name: str) -> None:
    if not tensor.is_floating_point():
        raise TypeError(
            f"Expected `{name}` of a floating-point type, but got {tensor.dtype}. Convert it: {name}.float()."
        )


def check_shape(tensor: Tensor, name: str, shape: tuple[int, ...], description: str) -> None:
    check_tensor(tensor, name)
    if shape_of(tensor) != shape:
        raise ValueError(f"Expected `{name}` of shape {shape}, {description}, but got {shape_of(tensor)}.")


def check_logits(logits: Tensor, name: str = "logits") -> None:
    """Check members' logits `(K, N, C, ...)`."""
    check_members_first(logits, name, axes="(K, N, C, ...)", least=3)
    if logits.shape[2] == 0:
        raise ValueError(f"Expected `{name}` with at least one class, but got {shape_of(logits)}.")


def check_members_first(values: Tensor, name: str, *, axes: str = "(K, N, ...)", least: int = 2) -> None:
    """Check members' outputs of at least `least` axes, the member axis first."""
    check_tensor(values, name)
    if values.ndim < least:
        hint = f" For one model, add the axis: {name}[None]." if values.ndim == least - 1 else ""
        raise ValueError(
            f"Expected `{name}` of shape {axes} with the member axis first, but got {shape_of(values)}.{hint}"
        )
    check_floating(values, name)
    if values.shape[0] == 0:
        raise ValueError(f"Expected `{name}` with at least one member, but got {shape_of(values)}.")


def check_finite(values: Tensor, name: str = "logits") -> None:
    """Refuse NaN and Inf in members' outputs `(K, ...)`."""
    if not can_read(values) or bool(torch.isfinite(values).all()):
        return
    bad = (~torch.isfinite(values)).flatten(1).any(1).nonzero().flatten().tolist()
    raise ValueError(nonfinite_message(bad, name))


def nonfinite_message(members: Sequence[int], name: str = "logits") -> str:
    who = f"member {members[0]}" if len(members) == 1 else "members " + ", ".join(map(str, members))
    return f"Expected finite `{name}`, but those of {who} hold NaN or Inf. Look for a diverged training run."


def check_probs(probs: Tensor) -> None:
    """Check an ensemble's probabilities `(N, C, ...)`."""
    check_tensor(probs, "probs")
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


def member_weights_tensor(member_weights: Tensor | Sequence[float]) -> Tensor:
    """Convert weights to a floating-point tensor, without checking them."""
    if isinstance(member_weights, Tensor):
        check_real(member_weights, "member_weights")
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
    """Return α as a detached tensor `(K,)` of `like`'s device and type; uniform for None.

    With `partial`, the weights are those of some members of an ensemble and may sum to less than 1.
    """
    if member_weights is None:
        return torch.full((num_members,), 1.0 / num_members, dtype=like.dtype, device=like.device)
    alpha = member_weights_tensor(member_weights).detach()
    check_shape(alpha, "member_weights", (num_members,), "one for each member")
    if can_read(alpha):
        values = alpha.tolist()
        if not all(value >= 0 for value in values):
            raise ValueError(f"Expected non-negative `member_weights`, but got {values}.")
        total = math.fsum(values)
        # K weights, each rounded once (half an ulp of at most 1), plus the error of a hand-typed sum
        slack = 1e-6 + num_members * torch.finfo(alpha.dtype).eps
        if total > 1 + slack or (not partial and total < 1 - slack):
            raise ValueError(
                f"Expected `member_weights` that sum to {'at most 1' if partial else '1'}, but they sum to "
                f"{total:.6g}. Divide them by their sum: member_weights / member_weights.sum()."
            )
    return alpha.to(dtype=like.dtype, device=like.device)


def as_sample_weight(sample_weight: Tensor, num_members: int, samples: tuple[int, ...], like: Tensor) -> Tensor:
    """Return sample weights as a detached tensor of `like`'s device and type, with all axes of the samples `(N, ...)`.

    Given weights are `(N, ...)` or `(N,)`, with K first where members have their own.
    """
    check_tensor(sample_weight, "sample_weight")
    check_real(sample_weight, "sample_weight")
    given = shape_of(sample_weight)
    rest = [1] * (len(samples) - 1)
    if given == samples or given == (num_members, *samples):
        weight = sample_weight
    elif given == samples[:1]:
        weight = sample_weight.reshape(*given, *rest).expand(samples)
    elif given == (num_members, samples[0]):
        weight = sample_weight.reshape(*given, *rest).expand(num_members, *samples)
    else:
        raise ValueError(
            f"Expected `sample_weight` of shape {samples} (shared by all members) or {(num_members, *samples)} "
            f"(each member's own), but got {given}."
        )
    if can_read(sample_weight) and not bool((sample_weight >= 0).all()):
        raise ValueError("Expected non-negative `sample_weight`, but some weights are negative or NaN.")
    check_finite_weights(sample_weight, "sample_weight")
    return weight.detach().to(dtype=like.dtype, device=like.device)


def check_finite_weights(weight: Tensor, name: str) -> None:
    """Refuse NaN and Inf, which would make every member's loss NaN."""
    if can_read(weight) and not bool(torch.isfinite(weight).all()):
        raise ValueError(f"Expected finite `{name}`, but some weights are NaN or Inf.")


def check_mixture(mixture: Tensor, like: Tensor) -> None:
    """Check Σ_j α^j q^j, given for members' outputs `like`."""
    check_shape(mixture, "mixture", shape_of(like)[1:], "the members' shape without the member axis")


def check_broadcasts(value: Tensor, name: str, like: Tensor) -> None:
    """Check that a tensor broadcasts to the shape of another without enlarging it."""
    check_tensor(value, name)
    pairs = zip(reversed(value.shape), reversed(like.shape), strict=False)
    if value.ndim > like.ndim or any(ours not in (1, theirs) for ours, theirs in pairs):
        raise ValueError(
            f"Expected `{name}` that broadcasts to the target's shape {shape_of(like)}, but got {shape_of(value)}."
        )


def check_target(target: Tensor, logits: Tensor, *, ignore_index: int | None = -100) -> bool:
    """Check the target of logits `(K, N, C, ...)`; return whether it holds class probabilities, not indices.

    With `ignore_index=None` every sample counts.
    """
    check_tensor(target, "target")
    indices, probs, given = (logits.shape[1], *logits.shape[3:]), shape_of(logits)[1:], shape_of(target)
    floating = target.is_floating_point()
    if not floating and target.dtype not in INDEX_DTYPES:
        raise TypeError(
            "Expected `target` of an integer type (class indices) or floating-point type (class probabilities), but "
            f"got {target.dtype}."
        )
    if given not in (indices, probs):
        raise ValueError(
            f"Expected `target` of shape {indices} (class indices) or {probs} (class probabilities) for `logits` "
            f"{shape_of(logits)}, but got {given}. The target has no member axis: all members share it."
        )
    if given != (probs if floating else indices):
        kind, fix = (
            ("class indices of an integer", "long") if floating else ("probabilities of a floating-point", "float")
        )
        raise TypeError(
            f"Expected {kind} type in `target` of shape {given}, but got {target.dtype}. Convert it: target.{fix}()."
        )
    if not floating:
        _check_class_indices(target, logits.shape[2], ignore_index)
        return False
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


def check_class_indices(target: Tensor, logits: Tensor, *, ignore_index: int | None = -100) -> None:
    """Check a target of class indices; see `check_target`."""
    if check_target(target, logits, ignore_index=ignore_index):
        raise TypeError("Expected class indices in `target`, but got class probabilities. Use target.argmax(1).")


def check_class_names(class_names: Sequence[str] | None) -> None:
    """Check a sequence of strings, or None."""
    if class_names is not None and (
        isinstance(class_names, str) or not all(isinstance(name, str) for name in class_names)
    ):
        raise TypeError(
            "Expected `class_names` to be a sequence of strings. Convert them: [str(name) for name in ...]."
        )


def _check_class_indices(target: Tensor, num_classes: int, ignore_index: int | None) -> None:
    if not can_read(target) or not target.numel():
        return
    low, high = (int(bound) for bound in torch.aminmax(target))
    if low >= 0 and high < num_classes:
        return
    index = target.long()  # comparisons in a narrow type wrap around
    outside = (index < 0) | (index >= num_classes)
    allowed = f"[0, {num_classes - 1}]"
    if ignore_index is not None:
        outside &= index != ignore_index
        allowed += f" or ignore_index={ignore_index}"
    if bool(outside.any()):
        raise ValueError(f"Expected class indices in {allowed}, but got {int(index[outside][0])}.")


def check_same_shape(target: Tensor, like: Tensor, name: str) -> None:
    """Check the target `(N, ...)` of binary logits or predictions `(K, N, ...)`."""
    check_tensor(target, "target")
    if target.shape != like.shape[1:]:
        raise ValueError(
            f"Expected `target` of shape {shape_of(like)[1:]} to match `{name}` {shape_of(like)}, "
            f"but got {shape_of(target)}. The target has no member axis: all members share it."
        )
    check_real(target, "target")


def check_binary_target(target: Tensor) -> None:
    if can_read(target) and not bool(((target >= 0) & (target <= 1)).all()):
        raise ValueError("Expected `target` in [0, 1], the probability of each output, but some values are outside.")
