"""Low-rank adapters as files in the format of peft: one folder for each member, read without peft."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

import torch
from safetensors.torch import load as load_safetensors
from safetensors.torch import save as save_safetensors
from torch import Tensor, nn

from torchace._files import JSON_BYTES, StrPath, error_reason, parse_json, read_bounded, read_json, write_atomic
from torchace._model_files import ModelFileError, to_json

CONFIG, WEIGHTS, PREFIX = "adapter_config.json", "adapter_model.safetensors", "base_model.model."
# `init_lora_weights` that leave the model's weights unchanged
UNCHANGED = (True, False, None, "gaussian", "orthogonal", "eva", "mica")
FACTORS = {"A": "lora_A.weight", "B": "lora_B.weight"}
MARK = "torchace"  # key of our checksums in the metadata of the weights
# Options of LoRA that compute something else, and their value where they are off
PLAIN_OPTIONS: dict[str, Any] = {
    "use_dora": False,
    "use_rslora": False,
    "bias": "none",
    "lora_bias": False,
    "rank_pattern": {},
    "alpha_pattern": {},
    "layer_replication": None,
    "target_parameters": None,
    "trainable_token_indices": None,
    "use_qalora": False,
    "use_bdlora": None,
    "alora_invocation_tokens": None,
    "arrow_config": None,
    "kasa_config": None,
    "monteclora_config": None,
    "velora_config": None,
}


class AdapterFile(NamedTuple):
    """One member's adapter: factors and own tensors under the names of the model's layers."""

    folder: Path
    rank: int
    alpha: float
    factors: dict[str, dict[str, Tensor]]  # layer → "A" and "B", as peft shapes them
    own: dict[str, Tensor]  # of the head and other layers that are not shared
    base: str | None  # `fingerprint` of the model that it was trained on


def write_adapter(folder: Path, config: Mapping[str, Any], tensors: Mapping[str, Tensor], base: str) -> None:
    """Write one adapter; the configuration last, so that a partial folder does not load."""
    config = {"peft_type": "LORA", "base_model_name_or_path": None, "inference_mode": True, "bias": "none", **config}
    plain = {PREFIX + name: t.detach().cpu().contiguous().clone() for name, t in tensors.items()}
    mark = {"sha256": _digest(plain, config), "base": base}
    data = save_safetensors(plain, {"format": "pt", MARK: to_json(mark)})
    try:
        write_atomic(folder / WEIGHTS, data)
        write_atomic(folder / CONFIG, (json.dumps(config, indent=2, sort_keys=True) + "\n").encode())
    except OSError as error:
        raise ModelFileError(
            f"The adapter could not be saved as {folder} ({error.strerror}); fix the cause, or choose another folder."
        ) from error


def read_adapter(folder: StrPath, model: nn.Module) -> AdapterFile:
    """Read an adapter of peft, with all its tensors on the CPU."""
    folder = Path(folder)
    config = _read_config(folder)
    tensors, mark = _read_weights(folder, 16 * sum(p.numel() for p in model.parameters()) + JSON_BYTES)
    if mark and mark.get("sha256") != _digest(tensors, config):
        raise ModelFileError(f"{folder} was altered after it was written; copy the adapter again or save it anew.")
    factors: dict[str, dict[str, Tensor]] = {}
    own: dict[str, Tensor] = {}
    weights = dict(model.named_parameters(remove_duplicate=False))
    for key, tensor in tensors.items():
        name = key.removeprefix(PREFIX)
        if ".lora_embedding_" in name:
            raise ModelFileError(f"{folder} adapts an embedding, which cannot be loaded; train the adapter without it.")
        shared = weights.get(name.replace(".base_layer.", "."))
        if ".base_layer." in name and shared is not None and torch.equal(tensor, shared.detach().cpu()):
            continue  # peft saves the model's own embeddings and output layers beside their adapters
        kind = next((kind for kind, suffix in FACTORS.items() if name.endswith(f".{suffix}")), None)
        if kind is None:
            own[name] = tensor
        else:
            factors.setdefault(name.removesuffix(f".{FACTORS[kind]}"), {})[kind] = tensor
    if not factors or any(len(pair) < 2 for pair in factors.values()):
        raise ModelFileError(f"{folder / WEIGHTS} has no complete pairs of lora_A and lora_B; save the adapter anew.")
    return AdapterFile(folder, config["r"], float(config["lora_alpha"]), factors, own, (mark or {}).get("base"))


def _read_config(folder: Path) -> dict[str, Any]:
    file = folder / CONFIG
    try:
        config = read_json(file)
    except FileNotFoundError as error:
        raise ModelFileError(
            f"There is no {CONFIG} in {folder}; give the folder that save_adapters or peft's save_pretrained wrote."
        ) from error
    except (OSError, ValueError) as error:
        raise ModelFileError(f"{file} cannot be read ({error_reason(error)}); save the adapter anew.") from error
    if not isinstance(config, dict) or config.get("peft_type") != "LORA":
        kind = config.get("peft_type") if isinstance(config, dict) else None
        raise ModelFileError(f"Expected an adapter of type LORA in {folder}, but got {kind!r}; train one with LoRA.")
    for name, plain in PLAIN_OPTIONS.items():
        if (value := config.get(name, plain)) != plain and value:
            raise ModelFileError(
                f"{folder} was trained with {name}={value!r}, which cannot be loaded; train the adapter without it."
            )
    if (start := config.get("init_lora_weights", True)) not in UNCHANGED:
        raise ModelFileError(
            f"{folder} was trained with init_lora_weights={start!r}, which changes the model's weights; convert it "
            "with peft's save_pretrained(..., path_initial_model_for_weight_conversion=...)."
        )
    rank, alpha = config.get("r"), config.get("lora_alpha")
    if type(rank) is not int or rank < 1 or not isinstance(alpha, int | float) or not 0 < alpha < float("inf"):
        raise ModelFileError(f"{file} has r={rank!r} and lora_alpha={alpha!r}, which are not valid; save it anew.")
    return config


def _read_weights(folder: Path, limit: int) -> tuple[dict[str, Tensor], dict[str, Any] | None]:
    """Return the tensors, and our checksums where this library wrote the file."""
    file = folder / WEIGHTS
    try:
        data = read_bounded(file, limit)
        tensors = {name: tensor.clone() for name, tensor in load_safetensors(data).items()}
        header = parse_json(data[8 : 8 + int.from_bytes(data[:8], "little")])
        mark = header.get("__metadata__", {}).get(MARK)
        mark = None if mark is None else dict(parse_json(mark.encode()))
    except FileNotFoundError as error:
        advice = "save the adapter anew"
        if (folder / "adapter_model.bin").exists():
            advice = "adapter_model.bin is a pickle, which is never read; save it with safe_serialization=True"
        raise ModelFileError(f"There is no {WEIGHTS} in {folder}; {advice}.") from error
    except OSError as error:
        raise ModelFileError(f"{file} cannot be read ({error.strerror}); check its permissions and size.") from error
    except Exception as error:  # of safetensors, and of torch for shapes and types
        raise ModelFileError(f"{file} is not a safetensors file that can be read; save the adapter anew.") from error
    if bad := next((name for name, t in tensors.items() if t.is_floating_point() and not t.isfinite().all()), None):
        raise ModelFileError(f"{file} has values in {bad!r} that are not finite; save the adapter anew.")
    return tensors, mark


def _digest(tensors: Mapping[str, Tensor], config: Mapping[str, Any]) -> str:
    """Return the SHA-256 of tensors with names, shapes and types, rank and alpha."""
    digest = hashlib.sha256(to_json([config["r"], float(config["lora_alpha"])]).encode())
    for name, tensor in sorted(tensors.items()):
        digest.update(to_json([name, str(tensor.dtype), list(tensor.shape)]).encode())
        digest.update(tensor.contiguous().flatten().view(torch.uint8).numpy().tobytes())
    return digest.hexdigest()
