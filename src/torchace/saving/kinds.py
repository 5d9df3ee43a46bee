"""Descriptions of ensembles of `torchace.models` as JSON, and how to rebuild them."""

from __future__ import annotations

import json
from typing import Any

import torch
from torch import nn

from torchace import _checks
from torchace._model_files import Json
from torchace.models import build
from torchace.nn.adapters import AdaptedEnsemble, adapt
from torchace.nn.base import EnsembleModule
from torchace.nn.branching import branch
from torchace.nn.conversion import StackedClassifiers, stack_classifiers
from torchace.nn.ensemble import Ensemble
from torchace.nn.heads import SMOC
from torchace.nn.stacked import StackedEnsemble


def unstack(module: nn.Module) -> nn.Module:
    """Return the module whose parameter names are saved: a stacked ensemble unstacked, others unchanged."""
    if isinstance(module, StackedEnsemble) and not module.shares_weights:
        return Ensemble(module.unstack(), link=module.link)
    return module


def describe(ensemble: EnsembleModule) -> tuple[str | None, Json | None]:
    """Return kind and architecture if rebuilding from them gives an equal ensemble, else None twice."""
    plain = unstack(ensemble)
    for kind, spec in _candidates(ensemble, plain).items():
        try:
            spec = json.loads(json.dumps(spec))
            rebuilt = rebuild(kind, spec, ensemble.num_members, ensemble.link)
        except Exception:  # a network outside `torchace.models`
            continue
        if _structure(rebuilt) == _structure(plain):
            return kind, spec
    return None, None


def _candidates(ensemble: Any, plain: Any) -> dict[str, Json]:
    """Return possible descriptions by kind; in those that do not apply, an architecture is None."""
    kind = type(ensemble)
    if kind is Ensemble or kind is StackedEnsemble:
        trunk = None if plain.trunk is None else _architecture(plain.trunk)
        members = {"members": [_architecture(member) for member in plain.members], "trunk": trunk}
        if kind is StackedEnsemble:
            return {"stacked": members}
        branched = getattr(ensemble, "branched", None)
        return ({} if branched is None else {"branched": branched}) | {"ensemble": members}
    if kind is SMOC:
        head = ensemble.head
        sizes = {"in_features": head.in_features, "num_classes": head.out_features, "rank": getattr(head, "rank", None)}
        return {"smoc": {"trunk": _architecture(ensemble.trunk), **sizes}}
    if kind is AdaptedEnsemble:
        return {"adapted": {"host": _architecture(ensemble.stacked), **ensemble.options}}
    if kind is StackedClassifiers:  # the architecture is that of the model before its head was replaced
        rank = getattr(ensemble.host.get_submodule(f"{ensemble.head}.stacked"), "rank", None)
        return {"converted": {"host": _architecture(ensemble.host), "head": ensemble.head, "rank": rank}}
    return {}


def _architecture(network: nn.Module) -> Any:
    return getattr(network, "architecture", {})


def rebuild(kind: str, spec: Json, num_members: int, link: str) -> EnsembleModule:
    """Build the described ensemble on the meta device, where it takes no memory and draws no random numbers."""
    options = dict(spec)
    _checks.check_choice(link, "link", _checks.LINKS)
    with torch.device("meta"):
        if kind in ("ensemble", "stacked"):
            trunk = None if spec["trunk"] is None else build(spec["trunk"])
            ensemble: EnsembleModule = Ensemble([build(member) for member in spec["members"]], trunk)
        elif kind == "branched":
            ensemble = branch(build(options.pop("architecture")), num_members, **options)
        elif kind == "smoc":
            ensemble = SMOC(build(options.pop("trunk")), num_members=num_members, **options)
        elif kind == "adapted":
            ensemble = adapt(build(options.pop("host")), num_members, trained=True, **options)
        else:
            _checks.check_choice(kind, "kind", ("converted",))
            ensemble = stack_classifiers(build(options.pop("host")), num_members, **options)
    ensemble.link = link
    return ensemble


def saved_state(module: nn.Module) -> dict[str, Any]:
    """Return the state dict without member weights, which are in the manifest."""
    state = module.state_dict()
    if isinstance(module, EnsembleModule):
        state.pop("member_weights", None)
    return state


def _structure(module: nn.Module) -> list[tuple[object, ...]]:
    """Return the names, types and options of a module's parts, the code of traced ones, and the tensors' shapes."""
    parts = [
        (name, type(part).__module__, type(part).__qualname__, part.extra_repr(), getattr(part, "code", None))
        for name, part in module.named_modules(remove_duplicate=False)
    ]
    shapes = [(name, tuple(tensor.shape)) for name, tensor in saved_state(module).items()]
    untied = [(name,) for name, _ in module.named_parameters()]
    return [*parts, *shapes, *untied]
