"""Random mutations of model directories: what loads is what was saved, and nothing else is raised."""

import json
import random
import shutil
from pathlib import Path

import pytest
import torch

from tests.fuzzing.changes import mutate_bytes, mutate_json
from tests.support.saved_models import KINDS, bits, one_sentence, state
from torchace import _model_files as files
from torchace.models import mlp
from torchace.nn import Ensemble
from torchace.saving import ModelFileError, load_model, save_model
from torchace.saving.kinds import unstack

pytestmark = pytest.mark.extended

SUBJECTS = ["different members", "low-rank smoc", "stacked", "branched", "converted"]


@pytest.mark.parametrize("name", SUBJECTS)
def test_mutations(name: str, tmp_path: Path) -> None:
    """600 random mutations of each of five models: whatever loads is what was saved."""
    torch.manual_seed(0)
    ensemble = KINDS[name][1]()
    ensemble.set_member_weights([1.0] + [0.0] * (ensemble.num_members - 1))
    path = tmp_path / "model"
    save_model(path, ensemble, diversity=0.5, class_names=list("abcde"), extra={"note": "x", "list": [1, 2.5]})
    original = {file: (path / file).read_bytes() for file in ("manifest.json", "weights.safetensors")}
    expected = load_model(path)
    content = json.loads(original["manifest.json"])
    rng = random.Random(f"mutations of {name}")
    refusals = 0
    for i in range(600):
        file = ("manifest.json", "weights.safetensors", "JSON")[i % 3]
        if file == "JSON":
            file, data = "manifest.json", json.dumps(mutate_json(content, rng)).encode()
        else:
            data = mutate_bytes(original[file], rng)
        (path / file).write_bytes(data)
        try:
            again = load_model(path)
        except ModelFileError as error:
            one_sentence(error)
            refusals += 1
        else:
            assert again.manifest == expected.manifest
            assert json.dumps(again.manifest, sort_keys=True) == json.dumps(expected.manifest, sort_keys=True)
            assert state(again) == state(expected)
            assert torch.equal(again.member_weights, expected.member_weights)
        (path / file).write_bytes(original[file])
    assert refusals > 500  # the others changed spaces, or nothing
    assert state(load_model(path)) == state(expected)


@pytest.mark.parametrize("name", SUBJECTS)
def test_mutations_with_valid_checksums(name: str, tmp_path: Path) -> None:
    """300 of each, with a SHA-256 that fits: refused, or an ensemble of these very weights."""
    torch.manual_seed(0)
    path = tmp_path / "model"
    save_model(path, KINDS[name][1](), diversity=0.5)
    original = (path / "manifest.json").read_bytes()
    values = sorted(bits(t)[2] for t in unstack(load_model(path)).state_dict().values())
    rng = random.Random(f"forgeries of {name}")
    for _ in range(300):
        manifest = mutate_json(json.loads(original), rng)
        manifest["sha256"] = files.manifest_digest(manifest)
        (path / "manifest.json").write_text(json.dumps(manifest))
        try:
            again = load_model(path)
        except ModelFileError as error:
            one_sentence(error)
        else:
            assert sorted(bits(t)[2] for t in unstack(again).state_dict().values()) == values


def test_the_two_files_belong_together(tmp_path: Path) -> None:
    for name in ("a", "b"):
        save_model(tmp_path / name, Ensemble([mlp(4, 3, 2)]))
    shutil.copy(tmp_path / "a" / "weights.safetensors", tmp_path / "b" / "weights.safetensors")
    with pytest.raises(ModelFileError, match="SHA-256"):
        load_model(tmp_path / "b")
