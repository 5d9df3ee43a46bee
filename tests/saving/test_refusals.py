"""Files that are not as they were written, and manifests that say what fits no weights: each refused in a sentence."""

import errno
import hashlib
import json
import math
import os
import pickle
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save as save_safetensors

from tests.support.saved_models import KINDS, one_sentence, reseal, save_example, set_in, state
from torchace.models import mlp
from torchace.nn import Ensemble, branching
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


def to_pipe(file: Path) -> None:
    file.unlink()
    os.mkfifo(file)


def to_pickle(file: Path) -> None:
    file.write_bytes(pickle.dumps({"weight": [1.0]}))


def to_pickle_of_torch(file: Path) -> None:
    torch.save({"weight": torch.zeros(3)}, file)


def nan(file: Path) -> None:
    file.write_text(file.read_text().replace('"diversity": 0.5', '"diversity": NaN'))


def infinity(file: Path) -> None:
    file.write_text(file.read_text().replace('"diversity": 0.5', '"diversity": 1e999'))


def newer(file: Path) -> None:
    file.write_text(file.read_text().replace('"format_version": 1', '"format_version": 2'))


def deep(file: Path) -> None:
    file.write_text('{"format": ' + "[" * 100_000 + "]" * 100_000 + "}")


def many_digits(file: Path) -> None:
    file.write_text(file.read_text().replace('"num_members": 2', '"num_members": ' + "9" * 10_000))


MANIFESTS: dict[str, tuple[Callable[[Path], Any], str]] = {
    "missing": (Path.unlink, "There is no .*manifest.json"),
    "flipped": (lambda file: flip(file, 200), "altered|not the JSON"),
    "truncated": (truncate, "not the JSON"),
    "empty": (lambda file: file.write_bytes(b""), "not the JSON"),
    "a directory": (to_directory, "Is a directory"),
    "a pipe": (to_pipe, "not a regular file"),
    "not UTF-8": (lambda file: file.write_bytes(b"\xff\xfe{}"), "not the JSON"),
    "a list": (lambda file: file.write_text("[]"), "is not a manifest of torchace"),
    "of another tool": (lambda file: file.write_text("{}"), "is not a manifest of torchace"),
    "newer": (newer, "update torchace"),
    "NaN": (nan, "altered"),
    "infinity": (infinity, "altered"),
    "deep": (deep, "not the JSON"),
    "many digits": (many_digits, "not the JSON"),
    "huge": (lambda file: os.truncate(file, 10**10), "more than"),
    "altered": (lambda file: file.write_text(file.read_text().replace("softmax", "sigmoid")), "altered"),
}

WEIGHTS: dict[str, tuple[Callable[[Path], Any], str]] = {
    "missing": (Path.unlink, "There is no .*weights.safetensors"),
    "flipped": (flip, "SHA-256"),
    "flipped in the header": (lambda file: flip(file, 20), "SHA-256"),
    "truncated": (truncate, "SHA-256"),
    "empty": (lambda file: file.write_bytes(b""), "SHA-256"),
    "longer": (lambda file: file.write_bytes(file.read_bytes() + b"\0"), "more than"),
    "a directory": (to_directory, "Is a directory"),
    "a pipe": (to_pipe, "not a regular file"),
    "a pickle": (to_pickle, "SHA-256"),
    "a pickle of torch": (to_pickle_of_torch, "more than|SHA-256"),
    "of another model": (lambda file: file.write_bytes(save_safetensors({"x": torch.zeros(3)})), "SHA-256"),
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
def test_refuses_a_pickle_that_the_manifest_vouches_for(
    make: Callable[[Path], Any], saved: tuple[Path, EnsembleModule]
) -> None:
    file = saved[0] / "weights.safetensors"
    make(file)
    data = file.read_bytes()
    digest = hashlib.sha256(data).hexdigest()
    reseal(saved[0], lambda manifest: manifest.update(weights={"bytes": len(data), "sha256": digest}))
    load_error(saved[0], "not a safetensors file")


def test_refuses_places_without_a_model(tmp_path: Path) -> None:
    load_error(tmp_path / "nothing", "There is no model")
    load_error(tmp_path, "There is no .*manifest.json")
    (tmp_path / "file").write_text("x")
    load_error(tmp_path / "file", "is not a directory")
    load_error(tmp_path / "file" / "model", "There is no model")
    load_error(tmp_path / ("x" * 5000), "There is no model|cannot be read")
    load_error(tmp_path / "nu\0ll", "There is no model|not a path")


@pytest.mark.parametrize("name", ["manifest.json", "weights.safetensors"])
def test_refuses_unreadable_files(
    name: str, saved: tuple[Path, EnsembleModule], monkeypatch: pytest.MonkeyPatch
) -> None:
    real = open

    def without_permission(file: Any, *args: Any, **kwargs: Any) -> Any:
        if str(file).endswith(name):
            raise PermissionError(errno.EACCES, os.strerror(errno.EACCES))
        return real(file, *args, **kwargs)

    monkeypatch.setattr("builtins.open", without_permission)
    load_error(saved[0], r"cannot be read \(Permission denied\)")


def test_spaces_in_the_manifest_do_not_matter(saved: tuple[Path, EnsembleModule]) -> None:
    path, ensemble = saved
    file = path / "manifest.json"
    file.write_text(json.dumps(json.loads(file.read_text()), indent=4))
    assert state(load_model(path)) == state(ensemble)


# -- manifests that say something else, with a SHA-256 that fits ------------------------------------------------------


HUGE = 10**9
ABSURD: dict[str, Callable[[Any], None]] = {
    "K": set_in("num_members", to=HUGE),
    "K of no members": set_in("num_members", to=0),
    "a truth value for K": set_in("num_members", to=True),
    "a text for K": set_in("num_members", to="2"),
    "a number with a point for K": set_in("num_members", to=2.0),
    "another K": set_in("num_members", to=3),
    "kind": set_in("kind", to="virus"),
    "another kind": set_in("kind", to="smoc"),
    "no kind": set_in("kind", to=None),
    "link": set_in("link", to="exp"),
    "diversity": set_in("diversity", to=2.0),
    "a text for diversity": set_in("diversity", to="0.5"),
    "class names": set_in("class_names", to=[1]),
    "member weights": set_in("member_weights", "values", to=[0.5, 0.6]),
    "member weights of huge numbers": set_in("member_weights", "values", to=[1e300, 1.0]),
    "more member weights": set_in("member_weights", "values", to=[0.5, 0.25, 0.25]),
    "a type of member weights": set_in("member_weights", "dtype", to="int8"),
    "size": set_in("weights", "bytes", to=10**18),
    "a negative size": set_in("weights", "bytes", to=-1),
    "a text for the size": set_in("weights", "bytes", to="1"),
    "shape": set_in("tensors", "members.0.fc.weight", "shape", to=[HUGE, HUGE]),
    "dtype": set_in("tensors", "members.0.fc.weight", "dtype", to="float16"),
    "tensors": set_in("tensors", to={}),
    "no architecture": set_in("architecture", to={}),
    "members": set_in("architecture", "members", to=HUGE),
    "a member": set_in("architecture", "members", 0, to=None),
    "code": set_in("architecture", "members", 0, "name", to="os.system"),
    "an argument": set_in("architecture", "members", 0, "device", to="cuda"),
    "inputs": set_in("architecture", "members", 0, "in_features", to=HUGE * HUGE),
    "more inputs than 64 bits count": set_in("architecture", "members", 0, "in_features", to=10**40),
    "width": set_in("architecture", "members", 0, "hidden", to=[HUGE]),
    "layers": set_in("architecture", "members", 0, "hidden", to=[1] * 1_000_000),
    "depth": set_in("architecture", "members", 0, to={"name": "cifar_resnet", "depth": 6 * HUGE + 2}),
    "trunk": set_in("architecture", "trunk", to={"name": "mlp", "in_features": 4, "hidden": [4], "num_classes": 4}),
    "a truth value for the version": set_in("format_version", to=True),
    "another field": set_in("code", to="import os"),
    "a field less": lambda manifest: manifest.pop("extra"),
}


@pytest.mark.parametrize("name", ABSURD)
def test_refuses_a_manifest_without_matching_weights(name: str, saved: tuple[Path, EnsembleModule]) -> None:
    reseal(saved[0], ABSURD[name])
    with pytest.raises(ModelFileError) as caught:
        load_model(saved[0])
    one_sentence(caught.value)


@pytest.mark.parametrize("name", ["K", "layers", "depth"])
def test_does_not_even_try_to_build(
    name: str, saved: tuple[Path, EnsembleModule], monkeypatch: pytest.MonkeyPatch
) -> None:
    built = []
    monkeypatch.setattr("torchace.saving.kinds.build", built.append)
    reseal(saved[0], ABSURD[name])
    with pytest.raises(ModelFileError, match="describes no ensemble that fits its weights"):
        load_model(saved[0])
    assert built == []


@pytest.mark.parametrize("name", ["smoc", "low-rank smoc", "branched", "converted", "stacked"])
@pytest.mark.parametrize(
    "change",
    [
        set_in("num_members", to=HUGE),
        set_in("num_members", to=4),
        set_in("architecture", "rank", to=HUGE),
        set_in("architecture", "at", to="fc"),
        set_in("architecture", "head", to="linear1"),
        set_in("architecture", "in_features", to=HUGE),
        set_in("architecture", to={"name": "mlp", "in_features": 6, "hidden": [HUGE], "num_classes": 5}),
    ],
)
def test_refuses_other_sizes_of_every_kind(name: str, change: Callable[[Any], None], tmp_path: Path) -> None:
    save_model(tmp_path / "model", KINDS[name][1]())
    expected = state(load_model(tmp_path / "model"))
    reseal(tmp_path / "model", change)
    try:
        again = load_model(tmp_path / "model")
    except ModelFileError as error:
        one_sentence(error)
    else:
        # an entry that this kind does not have, or K as it was; nothing else may pass
        assert state(again) == expected


@pytest.mark.parametrize("name", ["branched", "branched resnet", "smoc", "low-rank smoc", "converted"])
def test_no_more_members_are_built_than_there_are_weights_for(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """K as large as there are numbers in the weights: refused after one member was built, not K."""
    save_model(tmp_path / "model", KINDS[name][1]())
    shapes = json.loads((tmp_path / "model" / "manifest.json").read_text())["tensors"].values()
    reseal(tmp_path / "model", set_in("num_members", to=sum(math.prod(tensor["shape"]) for tensor in shapes)))
    built: list[int] = []
    real = branching._SubModel.__init__
    monkeypatch.setattr(branching._SubModel, "__init__", lambda *args: built.append(1) or real(*args))
    with pytest.raises(ModelFileError, match="no ensemble that fits its weights"):
        load_model(tmp_path / "model")
    assert len(built) <= 4  # trunk and member of one, and their copies


def test_weights_that_say_to_be_larger_than_their_tensors_are_not_read(saved: tuple[Path, EnsembleModule]) -> None:
    os.truncate(saved[0] / "weights.safetensors", 1 << 40)
    reseal(saved[0], set_in("weights", "bytes", to=1 << 40))
    load_error(saved[0], "a size that does not match its tensors")


def test_a_description_nested_too_deeply_is_refused(saved: tuple[Path, EnsembleModule]) -> None:
    deep: Any = 1
    for _ in range(200):
        deep = [deep]
    reseal(saved[0], set_in("extra", to={"deep": deep}))
    load_error(saved[0], "not the JSON that was written")
