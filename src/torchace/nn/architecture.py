"""Checks that members can be stacked: one architecture, differing in parameters and buffers only."""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np
from torch import Tensor, nn

from torchace.nn.fingerprint import FingerprintError, fingerprint, registered_names
from torchace.nn.members import check_modules
from torchace.nn.stacked_state import recomputed_names

# Kinds of hooks, with the attributes that hold their flags by hook number, which differs between layers.
HOOKS: dict[str, tuple[str, ...]] = {
    "_forward_hooks": ("_forward_hooks_with_kwargs", "_forward_hooks_always_called"),
    "_forward_pre_hooks": ("_forward_pre_hooks_with_kwargs",),
    **dict.fromkeys(("_backward_hooks", "_backward_pre_hooks", "_state_dict_hooks", "_state_dict_pre_hooks"), ()),
    **dict.fromkeys(("_load_state_dict_pre_hooks", "_load_state_dict_post_hooks"), ()),
}
# compared separately, or (the last) not copied
REGISTERED = ("_parameters", "_buffers", "_modules", "_compiled_call_impl")
ADVICE = "Use Ensemble(members) for members that differ"


def check_layers(members: list[nn.Module]) -> None:
    """Refuse layers that are known to fail when computed for all members at once."""
    check_modules(dict(enumerate(members)))
    for member in members:
        for name, parameter in member.named_parameters():
            if parameter._backward_hooks or getattr(parameter, "_post_accumulate_grad_hooks", None):
                why = f"the hooks of its parameter {name!r} would never be called"
                raise not_stackable(member, name.rpartition(".")[0], why)
    member = members[0]
    for name, layer in member.named_modules():
        if isinstance(layer, nn.Embedding) and layer.sparse:
            raise not_stackable(member, name, "sparse gradients have no batched form")
        if any(isinstance(p, nn.UninitializedParameter) for p in layer.parameters(recurse=False)):
            raise not_stackable(member, name, "its parameters are not initialized yet; run it once before")


def not_stackable(root: nn.Module, name: str, why: str) -> ValueError:
    """Return the error for a layer that cannot be computed for all members at once."""
    layer = root.get_submodule(name)
    where = f"layer {name!r} ({type(layer).__name__})" if name else f"the member ({type(layer).__name__})"
    return ValueError(
        f"Expected members that can be computed at once, but {where} cannot: {why}. "
        "Use Ensemble(members), which computes members one after another."
    )


def check_one_architecture(members: list[nn.Module]) -> None:
    """Refuse members that differ in anything but the values of parameters and buffers."""
    names = registered_names(members[0])
    first = {name: _Layer(layer, _plain_state(layer), names, {}) for name, layer in members[0].named_modules()}
    for k, member in enumerate(members[1:] or members, min(1, len(members) - 1)):  # one member: with itself
        layers = dict(member.named_modules())
        if list(layers) != list(first):
            raise _different(f"member {k} has other layers than member 0. {ADVICE}")
        names = registered_names(member)
        for name, layer in layers.items():
            place = f"layer {name!r}" if name else "the whole"
            _check_layer(k, place, _Layer(layer, _plain_state(layer), names, {}), first[name])
        for kind in ("parameters", "buffers"):
            ours, theirs = (
                [(name, _describe(tensor)) for name, tensor in getattr(m, f"named_{kind}")()]
                for m in (member, members[0])
            )
            for (name, here), (other_name, there) in zip(ours, theirs, strict=False):
                if (name, here) != (other_name, there):
                    raise _different(
                        f"{name!r} is {here} in member {k} and {other_name!r} is {there} in member 0. {ADVICE}"
                    )
            if len(ours) != len(theirs):
                raise _different(f"member {k} has {len(ours)} {kind} and member 0 has {len(theirs)}. {ADVICE}")


def _different(how: str) -> ValueError:
    return ValueError(f"Expected members of one architecture, but {how}.")


class _Layer(NamedTuple):
    """A layer of a member with its unregistered attributes and their fingerprints, computed when needed."""

    module: nn.Module
    state: dict[str, Any]
    names: dict[int, str]
    found: dict[str, bytes]

    def fingerprint(self, attribute: str) -> bytes:
        if attribute not in self.found:
            value = type(self.module) if attribute == "__class__" else self.state[attribute]
            self.found[attribute] = fingerprint(value, self.names)
        return self.found[attribute]


def _check_layer(k: int, place: str, layer: _Layer, first: _Layer) -> None:
    """Refuse a layer of member `k` whose class, settings or hooks differ from those in member 0."""
    attribute = "__class__"
    settings = [one.module.extra_repr() for one in (layer, first)]
    try:
        same = type(layer.module) is type(first.module) or layer.fingerprint(attribute) == first.fingerprint(attribute)
        if not same or settings[0] != settings[1]:
            ours, theirs = (f"{type(o.module).__name__}({s})" for o, s in zip((layer, first), settings, strict=True))
            raise _different(f"{place} is {ours} in member {k} and {theirs} in member 0. {ADVICE}")
        for attribute in dict.fromkeys([*layer.state, *first.state]):
            values = [one.state[attribute] for one in (layer, first) if attribute in one.state]
            if len(values) < 2 or layer.fingerprint(attribute) != first.fingerprint(attribute):
                ours, theirs = (_quote(one.state, attribute) for one in (layer, first))
                buffer = f", or register the numbers that differ as a buffer: register_buffer({attribute!r}, tensor)"
                advice = ADVICE + (buffer if any(map(_is_numeric, values)) else "")
                raise _different(f"{attribute!r} of {place} is {ours} in member {k} and {theirs} in member 0. {advice}")
    except FingerprintError as error:
        raise _different(
            f"{attribute!r} of {place} in member {k} holds {error}. Use Ensemble(members), which does not copy members"
        ) from error


def _plain_state(layer: nn.Module) -> dict[str, Any]:
    """Return a layer's unregistered attributes; hooks in order, without their numbers."""
    flags = {flag for names in HOOKS.values() for flag in names}
    excluded = {*REGISTERED, *flags, *recomputed_names(layer)}
    if isinstance(layer, nn.RNNBase):
        excluded |= {"_flat_weights", "_flat_weight_refs"}  # duplicates of its parameters
    state = {name: value for name, value in vars(layer).items() if name not in excluded}
    for name, flag_names in HOOKS.items():
        flagged = [vars(layer).get(flag, {}) for flag in flag_names]
        state[name] = [
            (hook, *(number in numbers for numbers in flagged))
            for number, hook in state.get(name, {}).items()
            if not recomputed_names(layer, [hook])  # depends on parameters and buffers alone
        ]
    return state


def _is_numeric(value: Any) -> bool:
    """Whether a value could be a buffer: numbers in a tensor, array, list or dictionary."""
    if isinstance(value, dict):
        return any(map(_is_numeric, value.values()))
    if isinstance(value, (list, tuple, range, set)):
        return all(isinstance(item, (int, float)) or _is_numeric(item) for item in value)
    return isinstance(value, (Tensor, np.ndarray))


def _quote(state: dict[str, Any], attribute: str) -> str:
    text = " ".join(repr(state[attribute]).split()) if attribute in state else "missing"
    return text if len(text) <= 80 else f"{text[:77]}..."


def _describe(tensor: Tensor) -> str:
    frozen = isinstance(tensor, nn.Parameter) and not tensor.requires_grad
    return f"{tuple(tensor.shape)} {tensor.dtype} on {tensor.device}{', frozen' if frozen else ''}"
