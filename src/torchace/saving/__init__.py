"""Ensembles as files: weights as safetensors, everything else as JSON; no code in them is run."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from torchace import _checks
from torchace import _model_files as files
from torchace._model_files import Json, ModelFileError
from torchace.nn.base import EnsembleModule
from torchace.nn.parallel import MemberParallelEnsemble
from torchace.nn.stacked import StackedEnsemble
from torchace.saving.kinds import KINDS, describe, rebuild, saved_state, unstack

__all__ = ["ModelFileError", "load_model", "load_weights", "save_model"]

WEIGHT_DTYPES = {
    str(t).removeprefix("torch."): t for t in (torch.float64, torch.float32, torch.float16, torch.bfloat16)
}


def save_model(
    path: str | os.PathLike[str],
    ensemble: EnsembleModule,
    *,
    diversity: float | Tensor | None = None,
    member_weights: Tensor | Sequence[float] | None = None,
    class_names: Sequence[str] | None = None,
    extra: Mapping[str, Any] | None = None,
) -> None:
    """Save an ensemble as a directory of `weights.safetensors` and `manifest.json`.

    The write is atomic. A model at `path` is replaced; anything else there is an error. `load_model` can rebuild
    unmodified networks of `torchace.models`; other ensembles are saved as weights for `load_weights`. Frozen
    parameters and training mode are not recorded.

    Args:
        path: The directory.
        ensemble: The ensemble to save.
        diversity: λ, recorded in the manifest.
        member_weights: α, `(K,)`; the ensemble's own if None.
        class_names: A name for each class.
        extra: Further data, as JSON types.

    Raises:
        ModelFileError: The directory cannot be written; its previous content is unchanged.

    Example:
        >>> import tempfile
        >>> from torchace.models import mlp
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     save_model(f"{folder}/model", ace.Ensemble([mlp(4, 8, 2), mlp(4, 16, 2)]), diversity=0.5)
        ...     sorted(os.listdir(f"{folder}/model"))
        ['manifest.json', 'weights.safetensors']
    """
    if not isinstance(ensemble, EnsembleModule):
        raise TypeError(
            f"Expected `ensemble` to be an ensemble module, but got {type(ensemble).__name__}. "
            "Wrap models in Ensemble([...]); for a compiled or distributed ensemble, pass the module inside."
        )
    _checks.check_class_names(class_names)
    if isinstance(ensemble, MemberParallelEnsemble):  # all members, written by one rank
        options: Json = {"diversity": diversity, "class_names": class_names, "extra": extra}
        ensemble.on_first_rank(lambda whole: save_model(path, whole, member_weights=member_weights, **options))
        return
    from torchace import __version__  # lazy: a circular import

    plain = unstack(ensemble)
    kind, architecture = describe(ensemble, plain)
    state = saved_state(plain)
    if other := [name for name, value in state.items() if not isinstance(value, Tensor)]:
        raise ModelFileError(f"The ensemble's state {other[0]!r} is not a tensor; only tensors can be saved.")
    manifest: Json = {
        "format": files.FORMAT,
        "format_version": files.FORMAT_VERSION,
        "torchace_version": __version__,
        "kind": kind,
        "architecture": architecture,
        "num_members": ensemble.num_members,
        "link": ensemble.link,
        "diversity": _export_diversity(diversity),
        "member_weights": _export_member_weights(ensemble, member_weights),
        "class_names": None if class_names is None else [str(name) for name in class_names],
        "extra": _export_extra(extra),
        "tensors": {name: files.describe_tensor(tensor) for name, tensor in state.items()},
    }
    try:
        weights = files.to_safetensors(state)
    except Exception as error:  # such as a type that the format lacks
        raise ModelFileError("The ensemble has a tensor that safetensors cannot hold; convert it first.") from error
    files.write_model(files.resolve_path(path), manifest, weights)


def load_model(path: str | os.PathLike[str]) -> EnsembleModule:
    """Load an ensemble that `save_model` saved, bit for bit, on the CPU and in evaluation mode.

    Altered files are refused, and no code in them is run. The manifest (λ, class names, extra, ...) becomes the
    ensemble's attribute `manifest`, a dictionary.

    Args:
        path: The directory.

    Raises:
        ModelFileError: The model is damaged, altered, incomplete, of a newer format, or made of networks outside
            `torchace.models` (then build it and use `load_weights`).

    Example:
        >>> import tempfile
        >>> from torchace.models import mlp
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     save_model(f"{folder}/model", ace.SMOC(mlp(4, 8, None), 8, 2, num_members=5), class_names=["no", "yes"])
        ...     ensemble = load_model(f"{folder}/model")
        >>> ensemble.predict_proba(torch.zeros(3, 4)).shape, ensemble.manifest["class_names"]
        (torch.Size([3, 2]), ['no', 'yes'])
    """
    where = files.find_model(path)
    manifest = files.read_manifest(where)
    if manifest["architecture"] is None:
        raise ModelFileError(
            f"{where} holds the weights of a custom architecture; build it and use load_weights(module, path)."
        )
    tensors = files.read_weights(where, manifest)
    try:
        kind = KINDS[manifest["kind"]]
        shapes = {name: tuple(tensor.shape) for name, tensor in tensors.items()}
        plain = rebuild(kind, manifest["architecture"], manifest["num_members"], manifest["link"], shapes)
        plain.load_state_dict(tensors, assign=True)
        ensemble = kind.finish(plain)
    except Exception as error:  # a manifest may describe anything
        raise ModelFileError(f"{where} describes no ensemble that fits its weights; {files.REPAIR}.") from error
    ensemble.member_weights = _import_member_weights(manifest, where)
    ensemble.manifest = manifest  # type: ignore[assignment]  # nn.Module takes any attribute, its stub does not
    return ensemble.eval()


def load_weights(module: nn.Module, path: str | os.PathLike[str]) -> Json:
    """Load the weights of a model directory into a module of any architecture, and return the manifest.

    Names, shapes and types must match the module's; for an ensemble, K and the link too. An ensemble also receives the
    saved `member_weights`.

    Args:
        module: Module that receives the weights; it keeps its device and mode.
        path: The directory.

    Raises:
        ModelFileError: The model is damaged or does not match the module, which is unchanged.

    Example:
        >>> import tempfile
        >>> saved, fresh = ace.Ensemble([nn.Linear(4, 2)]), ace.Ensemble([nn.Linear(4, 2)])
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     save_model(f"{folder}/model", saved, diversity=0.3)
        ...     manifest = load_weights(fresh, f"{folder}/model")
        >>> torch.equal(fresh[0].weight, saved[0].weight), manifest["diversity"]
        (True, 0.3)
    """
    if not isinstance(module, nn.Module):
        raise TypeError(f"Expected `module` to be a module, but got {type(module).__name__}.")
    where = files.find_model(path)
    manifest = files.read_manifest(where)
    tensors = files.read_weights(where, manifest)
    member_weights = _import_member_weights(manifest, where)
    plain = unstack(module)
    _check_fit(plain, manifest, where)
    plain.load_state_dict(tensors)
    if plain is not module:
        module.load_state_dict(StackedEnsemble(plain.members).state_dict())  # type: ignore[arg-type]
    if isinstance(module, EnsembleModule):
        device = next((p.device for p in module.parameters()), None)
        module.member_weights = None if member_weights is None else member_weights.to(device)
    return manifest


def _export_diversity(diversity: float | Tensor | None) -> float | None:
    if diversity is None:
        return None
    if isinstance(diversity, Tensor) and diversity.ndim == 0:
        diversity = diversity.item()
    _checks.check_diversity(diversity)
    return float(diversity)


def _export_member_weights(ensemble: EnsembleModule, given: Tensor | Sequence[float] | None) -> Json | None:
    alpha = ensemble.member_weights if given is None else given
    if alpha is None:
        return None
    alpha = alpha.detach().cpu() if isinstance(alpha, Tensor) else torch.as_tensor(alpha, dtype=torch.float64)
    dtype = alpha.dtype
    if not isinstance(given, Tensor | None) or dtype not in WEIGHT_DTYPES.values():
        dtype = ensemble._like().dtype  # as set_member_weights
    alpha = _checks.as_member_weights(alpha, ensemble.num_members, like=torch.empty((), dtype=dtype))
    return {"dtype": files.describe_tensor(alpha)["dtype"], "values": alpha.tolist()}


def _import_member_weights(manifest: Json, where: Path) -> Tensor | None:
    saved = manifest["member_weights"]
    if saved is None:
        return None
    try:
        alpha = torch.tensor(saved["values"], dtype=WEIGHT_DTYPES[saved["dtype"]])
        return _checks.as_member_weights(alpha, manifest["num_members"], like=alpha)
    except (KeyError, TypeError, ValueError, RuntimeError) as error:
        raise ModelFileError(f"{where} has invalid member_weights; {files.REPAIR}.") from error


def _export_extra(extra: Mapping[str, Any] | None) -> Json | None:
    if extra is None:
        return None
    if not isinstance(extra, Mapping):
        raise TypeError(f"Expected `extra` to be a mapping, but got {type(extra).__name__}.")
    try:
        content: Json = json.loads(files.to_json(dict(extra)))
        same = content == dict(extra)
    except (TypeError, ValueError, RecursionError):
        same = False
    if not same:
        raise ValueError(
            "Expected `extra` of JSON types (str, int, finite float, bool, None, and lists and str-keyed dictionaries "
            "of them), but it would not be loaded unchanged. Convert arrays and tuples to lists."
        )
    return content


def _check_fit(module: nn.Module, manifest: Json, where: Path) -> None:
    """Check that a module has the names, shapes and types of the listed weights, K and the link."""
    saved = manifest["tensors"]
    own = {n: files.describe_tensor(t) if isinstance(t, Tensor) else None for n, t in saved_state(module).items()}
    for name in sorted(own.keys() ^ saved.keys()):
        holder, other = ("module", "model") if name in own else ("model", "module")
        raise ModelFileError(
            f"{where} does not fit: the {holder} has {name!r}, the {other} does not; build the same architecture."
        )
    for name in own:
        if own[name] != saved[name]:
            raise ModelFileError(
                f"{where} does not fit: {name!r} is {_show_tensor(saved[name])} in the model, but "
                f"{_show_tensor(own[name])} in the module; build the same and convert types after loading."
            )
    if isinstance(module, EnsembleModule):
        for name, value in {"num_members": module.num_members, "link": module.link}.items():
            if manifest[name] != value:
                raise ModelFileError(
                    f"{where} does not fit: {name} is {manifest[name]!r} in the model and {value!r} in the module; "
                    "build the same ensemble."
                )


def _show_tensor(description: Json | None) -> str:
    return "not a tensor" if description is None else f"{description['dtype']} {tuple(description['shape'])}"
