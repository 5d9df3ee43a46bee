"""Ensembles as files: weights as safetensors, everything else as JSON; no code in them is run."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping, Sequence
from typing import Any

from torch import Tensor, nn

from torchace import _checks
from torchace import _model_files as files
from torchace._model_files import Json, ModelFileError
from torchace.nn.base import EnsembleModule
from torchace.nn.checkpoints import find_mismatch
from torchace.nn.parallel import MemberParallelEnsemble
from torchace.nn.stacked import StackedEnsemble
from torchace.saving.kinds import describe, rebuild, saved_state, unstack

__all__ = ["ModelFileError", "load_model", "load_weights", "save_model"]


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

    A model or an empty directory at `path` is replaced once the new one is complete; anything else there is an error.
    `load_model` can rebuild unmodified networks of `torchace.models`; other ensembles are saved as weights for
    `load_weights`. Frozen parameters and training mode are not recorded.

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
    if diversity is not None:
        _checks.check_diversity(diversity)
    if isinstance(ensemble, MemberParallelEnsemble):  # all members, written by one rank
        options: Json = {"diversity": diversity, "class_names": class_names, "extra": extra}
        ensemble.on_first_rank(lambda whole: save_model(path, whole, member_weights=member_weights, **options))
        return
    from torchace import __version__  # lazy: a circular import

    alpha = ensemble.member_weights if member_weights is None else member_weights
    if alpha is not None:
        alpha = _checks.as_member_weights(alpha, ensemble.num_members, like=ensemble._like())
    kind, architecture = describe(ensemble)
    manifest: Json = {
        "torchace_version": __version__,
        "kind": kind,
        "architecture": architecture,
        "num_members": ensemble.num_members,
        "link": ensemble.link,
        "diversity": None if diversity is None else float(diversity),
        "member_weights": None if alpha is None else alpha.tolist(),
        "class_names": None if class_names is None else [str(name) for name in class_names],
        "extra": _export_extra(extra),
    }
    state = saved_state(unstack(ensemble))
    if other := [name for name, value in state.items() if not isinstance(value, Tensor)]:
        raise ModelFileError(f"The ensemble's state {other[0]!r} is not a tensor; only tensors can be saved.")
    files.write_model(path, manifest, files.to_safetensors(state))


def load_model(path: str | os.PathLike[str]) -> EnsembleModule:
    """Load an ensemble that `save_model` saved, bit for bit, on the CPU and in evaluation mode.

    Altered files raise an error, and code in files is never run. The manifest (λ, class names, extra, ...) becomes the
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
    manifest = files.read_manifest(path)
    if manifest["architecture"] is None:
        raise ModelFileError(
            f"{path} holds the weights of a custom architecture; build it and use load_weights(module, path)."
        )
    tensors = files.read_weights(path, manifest)
    try:
        plain = rebuild(manifest["kind"], manifest["architecture"], manifest["num_members"], manifest["link"])
        plain.load_state_dict(tensors, assign=True)
        is_stacked = manifest["kind"] == "stacked"
        ensemble = StackedEnsemble(plain.members, link=plain.link) if is_stacked else plain  # type: ignore[arg-type]
        ensemble.set_member_weights(manifest["member_weights"])
    except Exception as error:  # a manifest may describe anything
        problem = f"The description of the ensemble in {path} does not fit its weights"
        raise ModelFileError(f"{problem}; {files.REPAIR}.") from error
    ensemble.manifest = manifest  # type: ignore[assignment]  # nn.Module takes any attribute, its stub does not
    return ensemble.eval()


def load_weights(module: nn.Module, path: str | os.PathLike[str]) -> Json:
    """Load the weights of a model directory into a module of any architecture, and return the manifest.

    Names and shapes must match the module's; for an ensemble, the link too. An ensemble also receives the saved
    `member_weights`.

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
    manifest = files.read_manifest(path)
    tensors = files.read_weights(path, manifest)
    plain = unstack(module)
    own = saved_state(plain)
    problem = find_mismatch(tensors, own)
    if not problem and (cast := [name for name, value in tensors.items() if value.dtype != own[name].dtype]):
        name = cast[0]
        problem = f"{name!r} is {tensors[name].dtype} in the file and {own[name].dtype} in the module; convert it later"
    if not problem and isinstance(plain, EnsembleModule) and plain.link != manifest["link"]:
        problem = f"its link is {manifest['link']!r}, but the module's is {plain.link!r}"
    if problem:
        raise ModelFileError(f"{path} does not fit: {problem}; build the same architecture.")
    plain.load_state_dict(tensors)
    if plain is not module:
        module.load_state_dict(StackedEnsemble(plain.members).state_dict())  # type: ignore[arg-type]
    if isinstance(module, EnsembleModule):
        module.set_member_weights(manifest["member_weights"])
    return manifest


def _export_extra(extra: Mapping[str, Any] | None) -> Json | None:
    if extra is None:
        return None
    try:
        content: Json = json.loads(json.dumps(dict(extra), allow_nan=False))
        same = content == dict(extra)
    except (TypeError, ValueError):
        same = False
    if not same:
        raise ValueError(
            "Expected `extra` of JSON types (str, int, finite float, bool, None, and lists and str-keyed dictionaries "
            "of them), but it would not be loaded unchanged. Convert arrays and tuples to lists."
        )
    return content
