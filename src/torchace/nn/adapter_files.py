"""Low-rank adapters as files in the format of peft: one folder for each member, written and read without peft."""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

import torch
from safetensors import safe_open
from safetensors.torch import save as save_safetensors
from torch import Tensor, nn

from torchace._files import StrPath, error_reason, read_json, write_atomic
from torchace._model_files import ModelFileError, to_safetensors
from torchace.nn.adapter_layers import Adapter, LowRankAdapter, is_conv1d, layer_shape, merge_member
from torchace.nn.stacked_state import all_shared_names, shared_names

CONFIG, WEIGHTS, PREFIX = "adapter_config.json", "adapter_model.safetensors", "base_model.model."
MARK = "torchace"  # key of our checksums in the metadata of the weights
FACTORS = {"A": ".lora_A.weight", "B": ".lora_B.weight"}
PEFT_LAYERS = ("base_layer", "lora_dropout", "lora_A", "lora_B", "lora_embedding_A", "lora_magnitude_vector")
# options of LoRA that compute something else
VARIANTS = (
    *("use_dora", "use_rslora", "use_qalora", "use_bdlora", "lora_bias", "rank_pattern", "alpha_pattern"),
    *("layer_replication", "target_parameters", "trainable_token_indices", "alora_invocation_tokens"),
    *("arrow_config", "kasa_config", "monteclora_config", "velora_config"),
)
# `init_lora_weights` that leave the model's weights unchanged
UNCHANGED = (True, False, None, "gaussian", "orthogonal", "eva", "mica")


class AdapterFile(NamedTuple):
    """One member's adapter: its factors and own tensors under the names of the model."""

    folder: StrPath
    rank: int
    alpha: float
    tensors: dict[str, Tensor]
    base: str | None  # `fingerprint` of the model that it was trained on, in our own files


def save_members(stacked: nn.Module, adapters: Mapping[str, Adapter], num_members: int, folder: StrPath) -> list[Path]:
    """Write `folder/member_0`, ...; see `AdaptedEnsemble.save_adapters`."""
    shared, layers = set(all_shared_names(stacked)), dict(stacked.named_modules())
    trained = [name for name, p in stacked.named_parameters() if name in shared and p.requires_grad]
    if trained:
        raise ValueError(
            f"Expected a frozen model, as files of peft hold no shared weights, but {trained[0]!r} is trained. "
            "Use adapt(..., freeze=True), or save_model."
        )
    for name, adapter in adapters.items():
        if not isinstance(adapter, LowRankAdapter) or name not in layers or layer_shape(layers[name]) is None:
            raise ValueError(
                "Expected adapter='low_rank' for files of peft, on layers other than nn.MultiheadAttention, but "
                f"{name!r} has another. Use save_model."
            )
    own = _own_modules(layers)
    adapters = {name: adapter for name, adapter in adapters.items() if not _is_inside(name, own)}
    if not adapters:
        raise ValueError("Expected an adapter outside the head, but there is none. Name more layers with `layers`.")
    first: Any = next(iter(adapters.values()))
    config = {
        "peft_type": "LORA",
        "r": first.rank,
        "lora_alpha": first.alpha,
        "bias": "none",
        "inference_mode": True,
        "target_modules": "|".join(re.escape(name) for name in adapters),
        "modules_to_save": [_name_for_peft(name) for name in own] or None,
        "fan_in_fan_out": any(is_conv1d(layers[name]) for name in adapters),
        "base_model_name_or_path": getattr(getattr(stacked, "config", None), "_name_or_path", None) or None,
        "task_type": None,
    }
    saved = {f"{name}.{key}" for name in own for key in layers[name].state_dict()}
    base = fingerprint(stacked, saved)
    folders = [Path(folder) / f"member_{k}" for k in range(num_members)]
    for k, path in enumerate(folders):
        tensors: dict[str, Tensor] = {}
        for name, adapter in adapters.items():
            kernel = [1] * len(adapter.shape.kernel)  # of a convolution: B is one with kernels of size 1
            tensors[name + FACTORS["A"]] = adapter.A[k]  # type: ignore[index]
            tensors[name + FACTORS["B"]] = adapter.B[k].view(*adapter.B.shape[1:], *kernel)  # type: ignore
        for name in own:
            state = merge_member(layers[name], k).state_dict()
            tensors |= {f"{name}.{key}": value for key, value in state.items()}
        _write(path, config, {PREFIX + name: tensor for name, tensor in tensors.items()}, base)
    return folders


def _own_modules(layers: dict[str, nn.Module]) -> list[str]:
    """Return the modules that peft saves besides adapters: layers with own tensors, and names with the same ends."""
    own = []
    for name, layer in layers.items():
        tensors = [*layer._parameters.items(), *layer._buffers.items()]
        is_shared = all(tensor is None or key in shared_names(layer) for key, tensor in tensors)
        if not is_shared and not isinstance(layer, Adapter):
            own.append(name)
    found = [name for name in layers if name.endswith(tuple(own))]  # peft compares the ends of names
    return [name for name in found if not _is_inside(name, [outer for outer in found if outer != name])]


def _name_for_peft(name: str) -> str:
    """Return a name with that of its owner in peft, if it is the end of a name inside peft's layers."""
    return f"model.{name}" if any(inner.endswith(name) for inner in PEFT_LAYERS) else name


def _is_inside(name: str, modules: list[str]) -> bool:
    return any(f"{name}.".startswith(f"{module}.") for module in modules)


def _write(folder: Path, config: dict[str, Any], tensors: dict[str, Tensor], base: str) -> None:
    """Write one adapter; the configuration last, so that a partial folder does not load."""
    plain = {name: tensor.detach().cpu().contiguous().clone() for name, tensor in tensors.items()}
    mark = {"sha256": _digest(plain, config), "base": base}
    try:
        write_atomic(folder / WEIGHTS, save_safetensors(plain, {"format": "pt", MARK: json.dumps(mark)}))
        write_atomic(folder / CONFIG, (json.dumps(config, indent=2, sort_keys=True) + "\n").encode())
    except OSError as error:
        raise ModelFileError(
            f"The adapter could not be saved as {folder} ({error.strerror}); fix the cause, or choose another folder."
        ) from error


def read_adapter(folder: StrPath, model: nn.Module) -> AdapterFile:
    """Read an adapter of peft, with all its tensors on the CPU."""
    config = _read_config(Path(folder))
    file = Path(folder) / WEIGHTS
    try:
        with safe_open(file, "pt") as stream:
            saved = {name: stream.get_tensor(name) for name in stream.keys()}  # noqa: SIM118
            mark = dict(json.loads((stream.metadata() or {}).get(MARK, "{}")))
    except Exception as error:  # of the system, of safetensors, and of torch for shapes and types
        raise ModelFileError(
            f"{file} cannot be read ({error_reason(error)}); save the adapter as safetensors: pickles are never read."
        ) from error
    if mark and mark.get("sha256") != _digest(saved, config):
        raise ModelFileError(f"{folder} was altered after it was written; copy or save the adapter again.")
    tensors: dict[str, Tensor] = {}
    weights = dict(model.named_parameters(remove_duplicate=False))
    for key, tensor in saved.items():
        name = key.removeprefix(PREFIX)
        if not tensor.isfinite().all():
            raise ModelFileError(f"{file} has values in {key!r} that are not finite; save the adapter again.")
        if ".lora_embedding_" in name:
            raise ModelFileError(f"{folder} adapts an embedding, which cannot be loaded; train the adapter without it.")
        shared = weights.get(name.replace(".base_layer.", "."))
        if ".base_layer." in name and shared is not None and torch.equal(tensor, shared.detach().cpu()):
            continue  # peft saves the model's own embeddings and output layers beside their adapters
        tensors[name] = tensor
    return AdapterFile(folder, config["r"], float(config["lora_alpha"]), tensors, mark.get("base"))


def _read_config(folder: Path) -> dict[str, Any]:
    try:
        config = read_json(folder / CONFIG)
    except (OSError, ValueError) as error:
        raise ModelFileError(
            f"{folder / CONFIG} cannot be read ({error_reason(error)}); give a folder that save_adapters or peft's "
            "save_pretrained wrote."
        ) from error
    if not isinstance(config, dict) or config.get("peft_type") != "LORA":
        raise ModelFileError(f"Expected an adapter of type LORA in {folder}, but got another; train one with LoRA.")
    refused = {name: config[name] for name in VARIANTS if config.get(name)}
    if config.get("bias", "none") != "none":
        refused["bias"] = config["bias"]
    if (start := config.get("init_lora_weights", True)) not in UNCHANGED:  # it changes the model's weights
        refused["init_lora_weights"] = start
    for name, value in refused.items():
        raise ModelFileError(
            f"{folder} was trained with {name}={value!r}, which cannot be loaded; train the adapter without it."
        )
    rank, alpha = config.get("r"), config.get("lora_alpha")
    if type(rank) is not int or not isinstance(alpha, int | float):
        raise ModelFileError(f"{folder / CONFIG} has r={rank!r} and lora_alpha={alpha!r}, not numbers; save it again.")
    return config


def fingerprint(stacked: nn.Module, excluded: set[str], count: int = 16) -> str:
    """Return the type and a SHA-256 of names, shapes and a few values of the shared parameters."""
    shared, digest, dtype = set(all_shared_names(stacked)) - excluded, hashlib.sha256(), ""
    for name, tensor in stacked.named_parameters():
        if name in shared:
            dtype = dtype or str(tensor.dtype).removeprefix("torch.")
            values = tensor.detach().flatten()
            some = values[:: max(1, len(values) // count)][:count].cpu().double()
            digest.update(json.dumps([name, list(tensor.shape)]).encode() + some.numpy().tobytes())
    return f"{dtype}:{digest.hexdigest()}"


def _digest(tensors: Mapping[str, Tensor], config: Mapping[str, Any]) -> str:
    """Return the SHA-256 of tensors, rank and alpha."""
    scale = json.dumps([config["r"], float(config["lora_alpha"])]).encode()
    return hashlib.sha256(scale + to_safetensors(tensors)).hexdigest()
