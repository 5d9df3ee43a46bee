"""Which members can be stacked: those of one architecture, which differ in parameters and buffers alone."""

from __future__ import annotations

from typing import Any

import numpy as np
from torch import Tensor, nn

from torchace.nn.comparison import NotComparable, NotStackable, StateComparison
from torchace.nn.recomputed import recomputed_names

# Of each hook: what else is known about it, under its number, which differs between layers.
HOOKS: dict[str, tuple[str, ...]] = {
    "_forward_hooks": ("_forward_hooks_with_kwargs", "_forward_hooks_always_called"),
    "_forward_pre_hooks": ("_forward_pre_hooks_with_kwargs",),
    "_backward_hooks": (),
    "_backward_pre_hooks": (),
    "_state_dict_hooks": (),
    "_state_dict_pre_hooks": (),
    "_load_state_dict_pre_hooks": (),
    "_load_state_dict_post_hooks": (),
}
# compared by themselves, or (the last) not copied
REGISTERED = ("_parameters", "_buffers", "_modules", "_compiled_call_impl")
ADVICE = "Use Ensemble(members) for members that differ"


def check_layers(members: list[nn.Module]) -> None:
    """Refuse at once what is known not to work under `vmap`."""
    for k, member in enumerate(members):
        if not isinstance(member, nn.Module):
            raise TypeError(f"Expected members to be modules, but member {k} is {type(member).__name__}.")
        for name, parameter in member.named_parameters():
            if parameter._backward_hooks or getattr(parameter, "_post_accumulate_grad_hooks", None):
                raise not_vectorisable(
                    member, name.rpartition(".")[0], f"the hooks of its parameter {name!r} would never be called"
                )
    member = members[0]
    for name, layer in member.named_modules():
        if isinstance(layer, nn.Embedding) and layer.sparse:
            raise not_vectorisable(member, name, "sparse gradients have no batched form")
        if any(isinstance(p, nn.UninitializedParameter) for p in layer.parameters(recurse=False)):
            raise not_vectorisable(member, name, "its parameters are not initialised yet; run it once before")
        old_style = any("spectral_norm" in type(hook).__module__ for hook in layer._forward_pre_hooks.values())
        if old_style or type(layer).__name__ == "_SpectralNorm":
            owner = name.split(".parametrizations.")[0]
            raise not_vectorisable(member, owner, "spectral normalisation changes its buffers as vmap cannot follow")


def check_one_architecture(members: list[nn.Module]) -> None:
    """Refuse members that differ in anything but the values of parameters and buffers."""
    first = {name: (layer, _plain_state(layer)) for name, layer in members[0].named_modules()}
    for k, member in enumerate(members[1:] or members, min(1, len(members) - 1)):  # one member: with itself
        layers = dict(member.named_modules())
        if list(layers) != list(first):
            raise ValueError(
                f"Expected members of one architecture, but member {k} has other layers than member 0. {ADVICE}."
            )
        comparison = StateComparison(member, members[0])
        for name, layer in layers.items():
            _check_layer(comparison, k, name, layer, *first[name])
        for kind in ("parameters", "buffers"):
            ours = [(n, _described(t)) for n, t in getattr(member, f"named_{kind}")()]
            theirs = [(n, _described(t)) for n, t in getattr(members[0], f"named_{kind}")()]
            for (name, here), (other_name, there) in zip(ours, theirs, strict=False):
                if (name, here) != (other_name, there):
                    raise ValueError(
                        f"Expected members of one architecture, but {name!r} is {here} in member {k} and "
                        f"{other_name!r} is {there} in member 0. {ADVICE}."
                    )
            if len(ours) != len(theirs):
                raise ValueError(
                    f"Expected members of one architecture, but member {k} has {len(ours)} {kind} and member 0 has "
                    f"{len(theirs)}. {ADVICE}."
                )


def not_vectorisable(root: nn.Module, name: str, why: str) -> ValueError:
    """The error for a layer that `vmap` cannot compute."""
    layer = root.get_submodule(name)
    where = f"layer {name!r} ({type(layer).__name__})" if name else f"the member ({type(layer).__name__})"
    return ValueError(
        f"Expected members that can be computed at once, but {where} cannot: {why}. "
        "Use Ensemble(members), which computes them one after another."
    )


def _check_layer(
    comparison: StateComparison, k: int, name: str, layer: nn.Module, first: nn.Module, expected: dict[str, Any]
) -> None:
    """Refuse a layer of member `k` that is not what it is in member 0: its class, settings and hooks."""
    state = _plain_state(layer)
    attribute = "__class__"
    try:
        same = comparison.same_type(type(layer), type(first))
        if not same or layer.extra_repr() != first.extra_repr():
            raise ValueError(
                f"Expected members of one architecture, but {_named(name)} is {_one_line(layer)} in member {k} and "
                f"{_one_line(first)} in member 0. {ADVICE}."
            )
        for attribute in dict.fromkeys([*state, *expected]):
            missing = [n for n, held in ((k, state), (0, expected)) if attribute not in held]
            if missing or not comparison.equal(state[attribute], expected[attribute]):
                one, other = (_shown(held, attribute) for held in (state, expected))
                values = [held[attribute] for held in (state, expected) if attribute in held]
                advice = f", or register the numbers that differ as a buffer: register_buffer({attribute!r}, tensor)"
                raise ValueError(
                    f"Expected members of one architecture, but {attribute!r} of {_named(name)} is {one} in member {k} "
                    f"and {other} in member 0. {ADVICE}{advice if any(map(_is_numbers, values)) else ''}."
                )
    except (NotComparable, NotStackable) as error:
        raise ValueError(
            f"Expected members of one architecture, but {attribute!r} of {_named(name)} in member {k} holds {error}. "
            "Use Ensemble(members), which leaves members as they are."
        ) from error


def _plain_state(layer: nn.Module) -> dict[str, Any]:
    """What a layer holds beside registered layers, parameters and buffers; hooks in order, without their numbers."""
    extras = {extra for names in HOOKS.values() for extra in names}
    left_out = {*REGISTERED, *extras, *recomputed_names(layer)}
    if isinstance(layer, nn.RNNBase):
        left_out |= {"_flat_weights", "_flat_weight_refs"}  # its parameters once more
    state = {name: value for name, value in vars(layer).items() if name not in left_out}
    for name, known in HOOKS.items():
        hooks = state.get(name, {})
        flags = [vars(layer).get(extra, {}) for extra in known]
        state[name] = [
            (hook, *(number in flag for flag in flags))
            for number, hook in hooks.items()
            if not recomputed_names(layer, [hook])  # which depends on parameters and buffers alone
        ]
    return state


def _is_numbers(value: Any) -> bool:
    """Whether a value could be a buffer: numbers, alone in a tensor, array or list."""
    if isinstance(value, dict):
        return any(map(_is_numbers, value.values()))
    if isinstance(value, (list, tuple, range, set)):
        return all(isinstance(item, (int, float)) or _is_numbers(item) for item in value)
    return isinstance(value, (Tensor, np.ndarray))


def _shown(state: dict[str, Any], attribute: str) -> str:
    if attribute not in state:
        return "missing"
    text = " ".join(repr(state[attribute]).split())
    return text if len(text) <= 80 else f"{text[:77]}..."


def _described(tensor: Tensor) -> str:
    frozen = isinstance(tensor, nn.Parameter) and not tensor.requires_grad
    return f"{tuple(tensor.shape)} {tensor.dtype} on {tensor.device}{', frozen' if frozen else ''}"


def _named(name: str) -> str:
    return f"layer {name!r}" if name else "the whole"


def _one_line(layer: nn.Module) -> str:
    return f"{type(layer).__name__}({layer.extra_repr()})"
