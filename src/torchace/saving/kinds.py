"""Ensembles as plain data: what each kind is made of, and how it is made again.

A new kind is one more entry in `KINDS`.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from torchace import _checks
from torchace._model_files import Json, dumped
from torchace.models import build, count_layers
from torchace.nn.base import EnsembleModule
from torchace.nn.branching import branch
from torchace.nn.conversion import StackedClassifiers, stack_classifiers
from torchace.nn.ensemble import Ensemble
from torchace.nn.heads import SMOC
from torchace.nn.stacked import StackedEnsemble

Shapes = dict[str, tuple[int, ...]]


@dataclass(frozen=True)
class Kind:
    """How one kind of ensemble becomes plain data, and an ensemble again.

    Attributes:
        type: The class of the ensembles.
        describe: Its architecture as JSON can hold it; None if it was not made from `torchace.models`.
        rebuild: A fresh ensemble from that architecture and K, whose weights have the names they are saved by.
        finish: What that ensemble becomes once it has its weights.
        copies: Whether one description stands for all members, each of which is built from it.
    """

    type: type[EnsembleModule]
    describe: Callable[[Any], Json | None]
    rebuild: Callable[[Json, int], EnsembleModule]
    finish: Callable[[Any], EnsembleModule] = lambda ensemble: ensemble
    copies: bool = False


def _describe_members(ensemble: Ensemble) -> Json | None:
    members = [getattr(member, "architecture", None) for member in ensemble.members]
    trunk = getattr(ensemble.trunk, "architecture", None)
    described = None not in members and (ensemble.trunk is None or trunk is not None)
    return {"members": members, "trunk": trunk} if described else None


def _rebuild_members(spec: Json, num_members: int) -> Ensemble:
    trunk = None if spec["trunk"] is None else build(spec["trunk"])
    return Ensemble([build(member) for member in spec["members"]], trunk)


def _describe_smoc(smoc: SMOC) -> Json | None:
    trunk, head = getattr(smoc.trunk, "architecture", None), smoc.head
    sizes = {"in_features": head.in_features, "num_classes": head.out_features, "rank": getattr(head, "rank", None)}
    return {"trunk": trunk, **sizes} if trunk is not None else None


def _describe_converted(ensemble: StackedClassifiers) -> Json | None:
    host = getattr(ensemble.host, "architecture", None)  # of the model before its head was replaced
    rank = getattr(ensemble.host.get_submodule(f"{ensemble.head}.stacked"), "rank", None)
    return {"host": host, "head": ensemble.head, "rank": rank} if host is not None else None


KINDS: dict[str, Kind] = {
    "branched": Kind(  # an Ensemble too, so it comes first
        Ensemble,
        lambda ensemble: getattr(ensemble, "branched", None),
        lambda spec, num_members: branch(build(spec["architecture"]), num_members, at=spec["at"]),
        copies=True,
    ),
    "ensemble": Kind(Ensemble, _describe_members, _rebuild_members),
    "stacked": Kind(
        StackedEnsemble,
        _describe_members,
        _rebuild_members,
        finish=lambda ensemble: StackedEnsemble(list(ensemble), link=ensemble.link),
    ),
    "smoc": Kind(
        SMOC,
        _describe_smoc,
        lambda spec, num_members: SMOC(
            build(spec["trunk"]), spec["in_features"], spec["num_classes"], num_members, rank=spec["rank"]
        ),
    ),
    "converted": Kind(
        StackedClassifiers,
        _describe_converted,
        lambda spec, num_members: stack_classifiers(
            build(spec["host"]), num_members, head=spec["head"], rank=spec["rank"]
        ),
    ),
}


def plain_form(module: nn.Module) -> nn.Module:
    """The module whose names the weights are saved by: for a stacked ensemble, the same one unstacked."""
    return Ensemble(module.unstack(), link=module.link) if isinstance(module, StackedEnsemble) else module


def restack(plain: nn.Module, module: nn.Module) -> None:
    """Gives a module the weights of its plain form."""
    if isinstance(module, StackedEnsemble):
        module.load_state_dict(StackedEnsemble(plain.members).state_dict())  # type: ignore[arg-type]


def described(ensemble: EnsembleModule, plain: nn.Module) -> tuple[str | None, Json | None]:
    """Kind and architecture, where rebuilding from them gives this very ensemble; otherwise neither.

    A network that was changed after it was made (another activation, a replaced layer), or that shares parameters with
    another, is not what its description says.
    """
    if len(list(plain.named_parameters(remove_duplicate=False))) != len(list(plain.parameters())):
        return None, None
    for name, kind in KINDS.items():
        spec = kind.describe(plain) if type(ensemble) is kind.type else None
        if spec is None:
            continue
        try:
            spec = json.loads(dumped(spec))
            again = rebuilt(kind, spec, ensemble.num_members, ensemble.link, shapes_of(plain))
        except Exception:  # whatever cannot be rebuilt is not described
            continue
        if _structure(again) == _structure(plain):
            return name, spec
    return None, None


def rebuilt(kind: Kind, spec: Json, num_members: int, link: str, shapes: Shapes) -> EnsembleModule:
    """The described ensemble on the meta device, where it takes no memory and draws no random numbers."""
    # Every layer has a tensor of its own and every member a number: what a description can make Python build is bounded
    # by what the weights file really holds, and K = 10**9 is not even tried.
    layers = sum(count_layers(network) for network in _networks(spec))
    if layers > len(shapes) or num_members > sum(math.prod(shape) for shape in shapes.values()):
        raise ValueError("More layers or members than there are weights.")
    _checks.check_choice(link, "link", _checks.LINKS)
    with torch.device("meta"):
        if kind.copies:  # one of them first: K copies take as many tensors as there must be
            one = len(kind.rebuild(spec, 1).get_submodule("members.0").state_dict())
            if one * num_members > len(shapes):
                raise ValueError("More members than there are weights.")
        ensemble = kind.rebuild(spec, num_members)
    ensemble.link = link
    if ensemble.num_members != num_members or shapes_of(ensemble) != shapes:
        raise ValueError("Other members or tensors than there are weights.")
    return ensemble


def _networks(spec: Any) -> Iterator[Json]:
    """The descriptions of single networks in that of an ensemble."""
    if isinstance(spec, dict) and "name" in spec:
        yield spec
    elif isinstance(spec, (dict, list)):
        for value in spec.values() if isinstance(spec, dict) else spec:
            yield from _networks(value)


def shapes_of(module: nn.Module) -> Shapes:
    return {name: tuple(tensor.shape) for name, tensor in saved_state(module).items()}


def saved_state(module: nn.Module) -> dict[str, Any]:
    """Return the state dict without the member weights, which are in the manifest."""
    state = module.state_dict()
    if isinstance(module, EnsembleModule):
        state.pop("member_weights", None)
    return state


def _structure(module: nn.Module) -> list[tuple[object, ...]]:
    """What a module consists of, weights aside: names, types, options, and the code of traced parts."""
    return [
        (name, type(part).__module__, type(part).__qualname__, part.extra_repr(), getattr(part, "code", None))
        for name, part in module.named_modules(remove_duplicate=False)
    ]
