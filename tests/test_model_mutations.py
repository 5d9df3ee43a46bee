"""Random mutations of model directories: what loads is what was saved, and nothing else is raised."""

import copy
import json
import random
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.support.saved_models import KINDS, bits, one_sentence, state
from torchace import _model_files as files
from torchace._model_kinds import plain_form
from torchace.models import mlp
from torchace.nn import Ensemble
from torchace.saving import ModelFileError, load_model, save_model


def mutate_bytes(data: bytes, rng: random.Random) -> bytes:
    changed = bytearray(data)
    i, j = rng.randrange(len(data)), rng.randrange(len(data))
    n = rng.randint(1, 9)
    match rng.randrange(8):
        case 0:
            changed[i] ^= 1 << rng.randrange(8)
        case 1:
            changed[i] = rng.randrange(256)
        case 2:
            del changed[i:]
        case 3:
            del changed[i : i + n]
        case 4:
            changed[i:i] = rng.randbytes(n)
        case 5:
            changed[i], changed[j] = changed[j], changed[i]
        case 6:
            changed[i : i + n], changed[j : j + n] = changed[j : j + n], changed[i : i + n]
        case _:
            changed[i:i] = changed[j : j + n]
    return bytes(changed)


VALUES = [
    None,
    True,
    False,
    0,
    1,
    -1,
    2,
    10**9,
    10**30,
    0.5,
    -0.0,
    1e308,
    "",
    "mlp",
    "fc",
    "float64",
    [],
    [1],
    {},
    {"name": 1},
]


def mutate_json(content: Any, rng: random.Random) -> Any:
    """One change somewhere: another value, a key less or more, an element less or twice, two elements exchanged."""
    content = copy.deepcopy(content)
    places = [content]
    while True:
        inner = [
            v
            for v in (places[-1].values() if isinstance(places[-1], dict) else places[-1])
            if isinstance(v, dict | list)
        ]
        inner = [v for v in inner if v]
        if not inner or rng.random() < 0.3:
            break
        places.append(rng.choice(inner))
    place = places[-1]
    keys = list(place) if isinstance(place, dict) else list(range(len(place)))
    key, other = rng.choice(keys), rng.choice(keys)
    match rng.randrange(5):
        case 0 | 1:
            place[key] = rng.choice(VALUES)
        case 2:
            del place[key]
        case 3:
            place[key], place[other] = place[other], place[key]
        case _:
            if isinstance(place, dict):
                place[f"{key}x"] = place[key]
            else:
                place.append(place[key])
    return content


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
def test_mutations_by_someone_who_knows_the_format(name: str, tmp_path: Path) -> None:
    """300 of each, with a SHA-256 that fits: refused, or an ensemble of these very weights."""
    torch.manual_seed(0)
    path = tmp_path / "model"
    save_model(path, KINDS[name][1](), diversity=0.5)
    original = (path / "manifest.json").read_bytes()
    values = sorted(bits(t)[2] for t in plain_form(load_model(path)).state_dict().values())
    rng = random.Random(f"forgeries of {name}")
    for _ in range(300):
        manifest = mutate_json(json.loads(original), rng)
        manifest["sha256"] = files.seal(manifest)
        (path / "manifest.json").write_text(json.dumps(manifest))
        try:
            again = load_model(path)
        except ModelFileError as error:
            one_sentence(error)
        else:
            assert sorted(bits(t)[2] for t in plain_form(again).state_dict().values()) == values


def test_the_two_files_belong_together(tmp_path: Path) -> None:
    for name in ("a", "b"):
        save_model(tmp_path / name, Ensemble([mlp(4, 3, 2)]))
    shutil.copy(tmp_path / "a" / "weights.safetensors", tmp_path / "b" / "weights.safetensors")
    with pytest.raises(ModelFileError, match="SHA-256"):
        load_model(tmp_path / "b")
