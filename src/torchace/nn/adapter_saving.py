"""Save low-rank members as adapters of peft, load such adapters as one ensemble, merge a member into a plain model."""

from __future__ import annotations

import hashlib
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from torchace._files import StrPath
from torchace._model_files import ModelFileError, to_json
from torchace.nn.adapter_files import FACTORS, AdapterFile, read_adapter, write_adapter
from torchace.nn.adapter_layers import ADAPTER, Adapter, LowRankAdapter, is_conv1d, layer_shape
from torchace.nn.adapters import AdaptedEnsemble, adapt
from torchace.nn.stacked_state import SHARED, all_shared_names, shared_names, take_members

HEADS = ("classifier", "score")  # modules that peft saves as a whole for classifiers
PEFT_LAYERS = ("base_layer", "lora_dropout", "lora_A", "lora_B", "lora_embedding_A", "lora_magnitude_vector")
TASKS = {
    "ForSequenceClassification": "SEQ_CLS",
    "ForTokenClassification": "TOKEN_CLS",
    "ForCausalLM": "CAUSAL_LM",
    "LMHeadModel": "CAUSAL_LM",
}


def save_adapters(ensemble: AdaptedEnsemble, folder: StrPath) -> list[Path]:
    """Write `folder/member_0`, ...; see `AdaptedEnsemble.save_adapters`."""
    _check_kind(ensemble)
    stacked = ensemble.stacked
    task = next((task for end, task in TASKS.items() if type(stacked).__name__.endswith(end)), None)
    own = _own_modules(stacked, HEADS if task in ("SEQ_CLS", "TOKEN_CLS") else ())
    adapters: dict[str, Any] = {
        name: adapter
        for name, adapter in ensemble.adapters.items()
        if not any(f"{name}.".startswith(f"{module}.") for module in own)
    }
    if not adapters:
        raise ValueError("Expected an adapter outside the head, but there is none. Name more layers with `layers`.")
    config = {
        "r": ensemble.options["rank"],
        "lora_alpha": ensemble.options["alpha"],
        "target_modules": _target_modules(stacked, list(adapters)),
        "modules_to_save": [_name_for_peft(name) for name in own] or None,
        "fan_in_fan_out": any(is_conv1d(stacked.get_submodule(name)) for name in adapters),
        "base_model_name_or_path": getattr(getattr(stacked, "config", None), "_name_or_path", None) or None,
        "task_type": task,
    }
    saved = {f"{name}.{key}" for name in own for key in stacked.get_submodule(name).state_dict()}
    base = _fingerprint(stacked, saved)
    folders = [Path(folder) / f"member_{k}" for k in range(ensemble.num_members)]
    for k, path in enumerate(folders):
        tensors: dict[str, Tensor] = {}
        for name, adapter in adapters.items():
            kernel = [1] * len(adapter.shape.kernel)  # of a convolution: B is one with kernels of size 1
            tensors[f"{name}.{FACTORS['A']}"] = adapter.A[k]
            tensors[f"{name}.{FACTORS['B']}"] = adapter.B[k].view(*adapter.B.shape[1:], *kernel)
        for name in own:
            state = merge_member(stacked.get_submodule(name), k).state_dict()
            tensors |= {f"{name}.{key}": value for key, value in state.items()}
        write_adapter(path, config, tensors, base)
    return folders


def load_adapters(model: nn.Module, folders: Sequence[StrPath], *, link: str = "softmax") -> AdaptedEnsemble:
    """Make one ensemble of low-rank adapters in the format of peft, computed in one pass.

    The adapters belong to `model`, have one rank, one alpha and the same layers, and each may have its own head or
    other own layers (peft's `modules_to_save`). The model is copied and frozen; adapters and own layers can be trained
    further. DoRA, rsLoRA and other variants of LoRA are refused. peft is not needed.

    Args:
        model: The model on which the adapters were trained, with the weights it had then.
        folders: A folder for each member, as written by `AdaptedEnsemble.save_adapters` or peft's `save_pretrained`.
        link: `"softmax"`, `"sigmoid"` for binary and multi-label outputs, `"identity"` for regression.

    Raises:
        ModelFileError: A folder has no such adapter, it was altered, or it does not fit the model or the others.

    Example:
        >>> import tempfile
        >>> model = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 3))
        >>> ensemble = ace.adapt(model, 5, adapter="low_rank", rank=2, freeze=True)
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     again = load_adapters(model, ensemble.save_adapters(folder))
        >>> torch.equal(again(torch.ones(6, 4)), ensemble(torch.ones(6, 4)))
        True
    """
    if not isinstance(model, nn.Module):
        raise TypeError(f"Expected `model` to be a module, but got {type(model).__name__}.")
    if isinstance(folders, str | Path):
        raise TypeError(f"Expected `folders` to be a list with a folder for each member, but got {str(folders)!r}.")
    files = [read_adapter(folder, model) for folder in folders]
    if not files:
        raise ValueError("Expected at least one folder, but got none.")
    for file in files:
        _check_fit(file, files[0], model)
    first = files[0]
    options: dict[str, Any] = {"adapter": "low_rank", "rank": first.rank, "alpha": first.alpha}
    ensemble = adapt(model, len(files), layers=sorted(first.factors), freeze=True, head="shared", link=link, **options)
    with torch.no_grad():
        for name, adapter in ensemble.adapters.items():
            for kind in FACTORS:
                factor = getattr(adapter, kind)
                factor.copy_(torch.stack([file.factors[name][kind] for file in files]).view_as(factor))
    for name in first.own:
        _set_own(ensemble.stacked, name, torch.stack([file.own[name] for file in files]))
    if f"{ensemble.head}.weight" in first.own:
        ensemble.options["head"] = ensemble.head
    base = _fingerprint(ensemble.stacked, set(first.own))
    for file in files:
        dtype = base.partition(":")[0]
        if file.base is not None and file.base.startswith(f"{dtype}:") and file.base != base:
            raise ModelFileError(f"{file.folder} was trained on a model with other weights; give that model.")
    return ensemble


def merge_member(stacked: nn.Module, member: int) -> nn.Module:
    """Return one member as a plain module, with the adapters merged into its weights."""
    plain = take_members(stacked, member)
    for layer in list(plain.modules()):
        for name, adapter in list(layer._modules.items()):
            if not isinstance(adapter, Adapter):
                continue
            weight = name.replace(ADAPTER, "weight")
            layer._parameters[weight] = nn.Parameter(adapter(layer.get_parameter(weight).detach()).detach())
            if getattr(adapter, "bias", None) is not None:
                layer.bias = nn.Parameter(adapter.bias.detach())  # type: ignore[operator]
            del layer._modules[name]
            for module in plain.modules():
                adapter.detach(module)
    return plain.requires_grad_(True)


def _check_kind(ensemble: AdaptedEnsemble) -> None:
    """Refuse ensembles other than low-rank adapters on frozen weights."""
    kind = ensemble.options["adapter"]
    if kind != "low_rank":
        raise ValueError(f"Expected adapter='low_rank' for files of peft, but got {kind!r}. Use save_model.")
    shared = set(all_shared_names(ensemble.stacked))
    trained = [name for name, p in ensemble.stacked.named_parameters() if name in shared and p.requires_grad]
    if trained:
        raise ValueError(
            f"Expected a frozen model, as files of peft hold no shared weights, but {trained[0]!r} is trained. "
            "Use adapt(..., freeze=True), or save_model."
        )
    for name in ensemble.adapters:
        if layer_shape(_find_module(ensemble.stacked, name)) is None:
            raise ValueError(
                f"Expected adapters of layers that peft adapts too, but {name!r} is a weight inside "
                "nn.MultiheadAttention. Leave it out of `layers`, or use save_model."
            )


def _find_module(model: nn.Module, name: str) -> nn.Module:
    """Return a layer by name; an empty module if there is none."""
    try:
        return model.get_submodule(name)
    except AttributeError:
        return nn.Module()


def _own_modules(stacked: nn.Module, heads: tuple[str, ...]) -> list[str]:
    """Return the modules that peft saves besides adapters: `heads`, layers with own tensors, names with their ends."""
    own: set[str] = set(heads)
    for name, layer in stacked.named_modules():
        shared = shared_names(layer)
        tensors = [*layer._parameters.items(), *layer._buffers.items()]
        if isinstance(layer, Adapter) or all(tensor is None or key in shared for key, tensor in tensors):
            continue
        parts = name.split(".")
        head = next((i for i, part in enumerate(parts) if part in HEADS), len(parts) - 1)
        own.add(".".join(parts[: head + 1]))
    # peft compares the ends of names: with "classifier" it saves "pre_classifier" too, and adapts no layer in it
    found = [name for name, _ in stacked.named_modules() if name.endswith(tuple(own))]
    return [name for name in found if not any(name.startswith(f"{outer}.") for outer in found)]


def _name_for_peft(name: str) -> str:
    """Return a name with that of its owner in peft, if it is the end of a name inside peft's layers."""
    return f"model.{name}" if any(inner.endswith(name) for inner in PEFT_LAYERS) else name


def _target_modules(model: nn.Module, targets: list[str]) -> list[str] | str:
    """Return the adapted layers for peft; a regular expression where others have names with the same end."""
    ends = tuple(f".{name}" for name in targets)
    others = [name for name, _ in model.named_modules() if name.endswith(ends) and name not in targets]
    return "|".join(re.escape(name) for name in targets) if others else targets


def _check_fit(file: AdapterFile, first: AdapterFile, model: nn.Module) -> None:
    """Refuse an adapter that does not fit the model, or is unlike the first one."""
    for what in ("rank", "alpha"):
        if getattr(file, what) != getattr(first, what):
            raise ModelFileError(
                f"Expected adapters of one {what}, but {first.folder} has {getattr(first, what):g} and {file.folder} "
                f"has {getattr(file, what):g}; train them alike."
            )
    for what, mine, others in (("adapters", file.factors, first.factors), ("own tensors", file.own, first.own)):
        if name := next(iter(sorted(mine.keys() ^ others.keys())), None):
            raise ModelFileError(
                f"Expected {what} of the same layers, but {name!r} is not in both {first.folder} and {file.folder}; "
                "train them alike."
            )
    for name, pair in sorted(file.factors.items()):
        shape = layer_shape(_find_module(model, name))
        if shape is None:
            raise ModelFileError(
                f"{file.folder} adapts the layer {name!r}, which {type(model).__name__} does not have; give the model "
                "on which it was trained."
            )
        adapter = LowRankAdapter(shape, 1, file.rank, file.alpha, device="meta")
        kernel = [1] * len(shape.kernel)
        for kind, expected in (("A", adapter.A.shape[1:]), ("B", (*adapter.B.shape[1:], *kernel))):
            if pair[kind].shape != expected:
                raise _other_model(file, f"{name}.{FACTORS[kind]}", pair[kind], expected)
    state = model.state_dict()
    for name, tensor in file.own.items():
        if name not in state:
            raise ModelFileError(
                f"{file.folder} holds {name!r}, which {type(model).__name__} does not have; give the model on which it "
                "was trained."
            )
        if tensor.shape != state[name].shape:
            raise _other_model(file, name, tensor, state[name].shape)


def _other_model(file: AdapterFile, name: str, tensor: Tensor, expected: Sequence[int]) -> ModelFileError:
    return ModelFileError(
        f"{file.folder} does not fit the model: {name!r} has shape {tuple(tensor.shape)}, but the model needs "
        f"{tuple(expected)}; give the model on which it was trained."
    )


def _set_own(stacked: nn.Module, name: str, values: Tensor) -> None:
    """Replace a shared tensor by the members' own values, `(K, ...)`."""
    path, _, field = name.rpartition(".")
    layer = stacked.get_submodule(path)
    held: dict[str, Any] = layer._parameters if field in layer._parameters else layer._buffers
    old = held[field]
    values = values.to(device=old.device, dtype=old.dtype)
    held[field] = nn.Parameter(values, values.is_floating_point()) if isinstance(old, nn.Parameter) else values
    vars(layer)[SHARED] = tuple(shared for shared in shared_names(layer) if shared != field)


def _fingerprint(stacked: nn.Module, excluded: set[str], count: int = 16) -> str:
    """Return the type and a SHA-256 of names, shapes and a few values of the shared parameters."""
    shared, digest, dtype = set(all_shared_names(stacked)) - excluded, hashlib.sha256(), ""
    for name, tensor in stacked.named_parameters():
        if name in shared:
            dtype = dtype or str(tensor.dtype).removeprefix("torch.")
            values = tensor.detach().flatten()
            some = values[:: max(1, len(values) // count)][:count].cpu().double()
            digest.update(to_json([name, list(tensor.shape)]).encode() + some.numpy().tobytes())
    return f"{dtype}:{digest.hexdigest()}"
