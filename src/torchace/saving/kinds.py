"""Kinds of ensembles, their descriptions as JSON, and how to rebuild them."""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from torchace import _checks
from torchace._model_files import Json, to_json
from torchace.models import build, count_layers
from torchace.nn.adapters import AdaptedEnsemble, adapt
from torchace.nn.base import EnsembleModule
from torchace.nn.branching import branch
from torchace.nn.conversion import StackedClassifiers, stack_classifiers
from torchace.nn.ensemble import Ensemble
from torchace.nn.heads import SMOC
from torchace.nn.stacked import StackedEnsemble

Shapes = dict[str, tuple[int, ...]]


@dataclass(frozen=True)
class Kind:
    """One kind of ensemble: `describe` it as JSON (None outside `torchace.models`) and `rebuild` it from that and K.

    `finish` converts the ensemble after its weights are loaded; with `copies`, one description is that of all members.
    """

    type: type[EnsembleModule]
    describe: Callable[[Any], Json | None]
    rebuild: Callable[[Json, int], EnsembleModule]
    finish: Callable[[Any], EnsembleModule] = lambda ensemble: ensemble
    copies: bool = False


def _architecture(network: object) -> Json | None:
    return getattr(network, "architecture", None)


def _describe_members(ensemble: Ensemble) -> Json | None:
    members, trunk = [_architecture(member) for member in ensemble.members], _architecture(ensemble.trunk)
    described = None not in members and (ensemble.trunk is None or trunk is not None)
    return {"members": members, "trunk": trunk} if described else None


def _rebuild_members(spec: Json, num_members: int) -> Ensemble:
    trunk = None if spec["trunk"] is None else build(spec["trunk"])
    return Ensemble([build(member) for member in spec["members"]], trunk)


def _describe_smoc(smoc: SMOC) -> Json | None:
    trunk, head = _architecture(smoc.trunk), smoc.head
    sizes = {"in_features": head.in_features, "num_classes": head.out_features, "rank": getattr(head, "rank", None)}
    return None if trunk is None else {"trunk": trunk, **sizes}


def _describe_converted(ensemble: StackedClassifiers) -> Json | None:
    host = _architecture(ensemble.host)  # of the model before its head was replaced
    rank = getattr(ensemble.host.get_submodule(f"{ensemble.head}.stacked"), "rank", None)
    return None if host is None else {"host": host, "head": ensemble.head, "rank": rank}


KINDS: dict[str, Kind] = {
    "branched": Kind(  # first: an Ensemble too
        Ensemble,
        lambda ensemble: getattr(ensemble, "branched", None),
        lambda spec, count: branch(build(spec["architecture"]), count, at=spec["at"]),
        copies=True,
    ),
    "ensemble": Kind(Ensemble, _describe_members, _rebuild_members),
    "stacked": Kind(
        StackedEnsemble, _describe_members, _rebuild_members, lambda e: StackedEnsemble(list(e), link=e.link)
    ),
    "smoc": Kind(
        SMOC,
        _describe_smoc,
        lambda spec, count: SMOC(build(spec["trunk"]), spec["in_features"], spec["num_classes"], count, spec["rank"]),
    ),
    "adapted": Kind(
        AdaptedEnsemble,
        lambda e: None if (host := _architecture(e.stacked)) is None else {"host": host, **e.options},
        lambda spec, count: adapt(
            build(spec["host"]), count, trained=True, **{k: v for k, v in spec.items() if k != "host"}
        ),
    ),
    "converted": Kind(
        StackedClassifiers,
        _describe_converted,
        lambda spec, count: stack_classifiers(build(spec["host"]), count, head=spec["head"], rank=spec["rank"]),
    ),
}


def unstack(module: nn.Module) -> nn.Module:
    """Return the module whose parameter names are saved: a stacked ensemble unstacked, others unchanged."""
    if isinstance(module, StackedEnsemble) and not module.shares_weights:
        return Ensemble(module.unstack(), link=module.link)
    return module


def describe(ensemble: EnsembleModule, plain: nn.Module) -> tuple[str | None, Json | None]:
    """Return kind and architecture if rebuilding from them gives an equal ensemble, else None twice."""
    if len(list(plain.named_parameters(remove_duplicate=False))) != len(list(plain.parameters())):
        return None, None
    for name, kind in KINDS.items():
        spec = kind.describe(plain) if type(ensemble) is kind.type else None
        if spec is None:
            continue
        try:
            spec = json.loads(to_json(spec))
            rebuilt = rebuild(kind, spec, ensemble.num_members, ensemble.link, _shapes(plain))
        except Exception:  # cannot be rebuilt
            continue
        if _structure(rebuilt) == _structure(plain):
            return name, spec
    return None, None


def rebuild(kind: Kind, spec: Json, num_members: int, link: str, shapes: Shapes) -> EnsembleModule:
    """Build the described ensemble on the meta device, where it takes no memory and draws no random numbers."""
    # A layer has at least one tensor and a member one value, so the weights file bounds the objects to build.
    layers = sum(count_layers(network) for network in _networks(spec))
    if layers > len(shapes) or num_members > sum(math.prod(shape) for shape in shapes.values()):
        raise ValueError("More layers or members than there are weights.")
    _checks.check_choice(link, "link", _checks.LINKS)
    with torch.device("meta"):
        if kind.copies:  # build one before K copies
            one = len(kind.rebuild(spec, 1).get_submodule("members.0").state_dict())
            if one * num_members > len(shapes):
                raise ValueError("More members than there are weights.")
        ensemble = kind.rebuild(spec, num_members)
    ensemble.link = link
    if ensemble.num_members != num_members or _shapes(ensemble) != shapes:
        raise ValueError("Other members or tensors than there are weights.")
    return ensemble


def saved_state(module: nn.Module) -> dict[str, Any]:
    """Return the state dict without member weights, which are in the manifest."""
    state = module.state_dict()
    if isinstance(module, EnsembleModule):
        state.pop("member_weights", None)
    return state


def _networks(spec: Any) -> Iterator[Json]:
    """Iterate over the descriptions of single networks in that of an ensemble."""
    if isinstance(spec, dict) and "name" in spec:
        yield spec
    elif isinstance(spec, (dict, list)):
        for value in spec.values() if isinstance(spec, dict) else spec:
            yield from _networks(value)


def _shapes(module: nn.Module) -> Shapes:
    return {name: tuple(tensor.shape) for name, tensor in saved_state(module).items()}


def _structure(module: nn.Module) -> list[tuple[object, ...]]:
    """Return the names, types and options of a module's parts, and the code of traced ones."""
    return [
        (name, type(part).__module__, type(part).__qualname__, part.extra_repr(), getattr(part, "code", None))
        for name, part in module.named_modules(remove_duplicate=False)
    ]
