"""Altered files: each is refused in one sentence."""

import hashlib
import json
import pickle
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from tests.support.saved_models import one_sentence, save_example, state
from torchace._files import with_checksum
from torchace.models import mlp
from torchace.nn import Ensemble
from torchace.nn.base import EnsembleModule
from torchace.saving import ModelFileError, load_model, load_weights, save_model


@pytest.fixture
def saved(tmp_path: Path) -> tuple[Path, EnsembleModule]:
    return tmp_path / "model", save_example(tmp_path / "model")


def flip(file: Path, position: int = -1) -> None:
    data = bytearray(file.read_bytes())
    data[position] ^= 1
    file.write_bytes(data)


def truncate(file: Path) -> None:
    file.write_bytes(file.read_bytes()[:-7])


def to_directory(file: Path) -> None:
    file.unlink()
    file.mkdir()


def to_pickle(file: Path) -> None:
    file.write_bytes(pickle.dumps({"weight": [1.0]}))


def to_pickle_of_torch(file: Path) -> None:
    torch.save({"weight": torch.zeros(3)}, file)


def change_version(file: Path, version: int) -> None:
    file.write_text(file.read_text().replace('"format_version": 2', f'"format_version": {version}'))


def rewrite_manifest(path: Path, **values: Any) -> None:
    """Change values in a manifest, with its checksum."""
    content = json.loads((path / "manifest.json").read_text()) | values
    del content["sha256"]
    (path / "manifest.json").write_text(json.dumps(with_checksum(content)))


MANIFESTS: dict[str, tuple[Callable[[Path], Any], str]] = {
    "missing": (Path.unlink, "There is no model"),
    "flipped": (lambda file: flip(file, 200), "altered|not valid JSON"),
    "truncated": (truncate, "not valid JSON"),
    "empty": (lambda file: file.write_bytes(b""), "not valid JSON"),
    "a directory": (to_directory, "Is a directory"),
    "not UTF-8": (lambda file: file.write_bytes(b"\xff\xfe{}"), "not valid JSON"),
    "a list": (lambda file: file.write_text("[]"), "is not a manifest of torchace"),
    "of another tool": (lambda file: file.write_text("{}"), "is not a manifest of torchace"),
    "newer": (lambda file: change_version(file, 3), "update torchace"),
    "older": (lambda file: change_version(file, 1), "has format 1, but 2 is needed; save or train the model again"),
    "altered": (lambda file: file.write_text(file.read_text().replace("softmax", "sigmoid")), "altered"),
}

WEIGHTS: dict[str, tuple[Callable[[Path], Any], str]] = {
    "missing": (Path.unlink, "weights.safetensors cannot be read"),
    "flipped": (flip, "SHA-256"),
    "truncated": (truncate, "SHA-256"),
    "a directory": (to_directory, "Is a directory"),
    "a pickle": (to_pickle, "SHA-256"),
}


def load_error(path: Path, words: str) -> None:
    for load in (load_model, lambda path: load_weights(Ensemble([mlp(4, 3, 2), mlp(4, (5, 3), 2)]), path)):
        with pytest.raises(ModelFileError, match=words) as caught:
            load(path)
        one_sentence(caught.value)


@pytest.mark.parametrize("name", MANIFESTS)
def test_refuses_manifest(name: str, saved: tuple[Path, EnsembleModule]) -> None:
    damage, words = MANIFESTS[name]
    damage(saved[0] / "manifest.json")
    load_error(saved[0], words)


@pytest.mark.parametrize("name", WEIGHTS)
def test_refuses_weights(name: str, saved: tuple[Path, EnsembleModule]) -> None:
    damage, words = WEIGHTS[name]
    damage(saved[0] / "weights.safetensors")
    load_error(saved[0], words)


@pytest.mark.parametrize("make", [to_pickle, to_pickle_of_torch, lambda file: file.write_bytes(b"\xff" * 100)])
def test_refuses_a_pickle_with_a_matching_checksum(
    make: Callable[[Path], Any], saved: tuple[Path, EnsembleModule]
) -> None:
    file = saved[0] / "weights.safetensors"
    make(file)
    rewrite_manifest(saved[0], weights_sha256=hashlib.sha256(file.read_bytes()).hexdigest())
    load_error(saved[0], "not a valid safetensors file")


@pytest.mark.parametrize("values", [{"link": "logit"}, {"member_weights": [0.9, 0.9]}, {"architecture": {}}])
def test_refuses_invalid_values_with_a_matching_checksum(
    values: dict[str, Any], saved: tuple[Path, EnsembleModule]
) -> None:
    rewrite_manifest(saved[0], **values)
    with pytest.raises(ModelFileError, match="does not fit its weights"):
        load_model(saved[0])


def test_refuses_places_without_a_model(tmp_path: Path) -> None:
    load_error(tmp_path / "nothing", "There is no model")
    load_error(tmp_path, "There is no model")
    (tmp_path / "file").write_text("x")
    load_error(tmp_path / "file", "There is no model")


def test_spaces_in_the_manifest_do_not_matter(saved: tuple[Path, EnsembleModule]) -> None:
    path, ensemble = saved
    file = path / "manifest.json"
    file.write_text(json.dumps(json.loads(file.read_text()), indent=4))
    assert state(load_model(path)) == state(ensemble)


class ExtraState(nn.Linear):
    def get_extra_state(self) -> dict[str, int]:
        return {"calls": 1}

    def set_extra_state(self, state: Any) -> None:
        pass


def test_state_that_is_not_a_tensor_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ModelFileError, match=r"'members.0._extra_state' is not a tensor; only tensors can be saved"):
        save_model(tmp_path / "model", Ensemble([ExtraState(4, 2)]))


def test_weights_are_not_cast_silently(tmp_path: Path) -> None:
    save_model(tmp_path / "model", Ensemble([nn.Linear(4, 2).double()]))
    with pytest.raises(ModelFileError, match=r"float64 in the file and torch.float32 in the module"):
        load_weights(Ensemble([nn.Linear(4, 2)]), tmp_path / "model")


def test_an_empty_directory_is_replaced(tmp_path: Path) -> None:
    save_model(tmp_path, Ensemble([nn.Linear(4, 2)]), diversity=0.25)
    assert load_weights(Ensemble([nn.Linear(4, 2)]), tmp_path)["diversity"] == 0.25
