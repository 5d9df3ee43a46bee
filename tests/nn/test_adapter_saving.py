"""Adapters as files: written and read without peft; altered files and adapters of other models are one sentence."""

from __future__ import annotations

import json
import shutil
import struct
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import torchace as ace
from torchace import ModelFileError, adapt, load_adapters

K = 3


def mlp() -> nn.Module:
    return nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 6), nn.ReLU(), nn.Linear(6, 3))


def convolutional() -> nn.Module:
    return nn.Sequential(
        nn.Conv2d(1, 8, 3, stride=2, padding=1), nn.BatchNorm2d(8), nn.ReLU(), nn.Flatten(), nn.Linear(8 * 9, 3)
    )


NETWORKS = {"mlp": (mlp, (5, 4)), "convolutional": (convolutional, (5, 1, 6, 6))}


def train_members(model: nn.Module, x: Tensor, **options: Any) -> ace.nn.AdaptedEnsemble:
    """Members after two steps, so that no adapter is zero and BatchNorm statistics differ; of low rank by default."""
    options = {"adapter": "low_rank", "freeze": True} | options
    size = {"rank": 2, "alpha": 5.0} if options["adapter"] == "low_rank" else {}
    ensemble = adapt(model, K, **size | options)
    optimizer = torch.optim.SGD([p for p in ensemble.parameters() if p.requires_grad], lr=0.3)
    for _ in range(2):
        optimizer.zero_grad()
        ace.amended_cross_entropy(ensemble(x), torch.arange(len(x)) % 3, 0.3).backward()
        optimizer.step()
    return ensemble.eval()


@pytest.fixture(params=list(NETWORKS))
def case(request: pytest.FixtureRequest) -> tuple[nn.Module, Tensor]:
    make, shape = NETWORKS[request.param]
    torch.manual_seed(0)
    return make().double(), torch.randn(shape, dtype=torch.float64)


@pytest.fixture
def saved(tmp_path: Path) -> tuple[nn.Module, list[Path]]:
    torch.manual_seed(0)
    model = mlp()
    return model, train_members(model, torch.randn(5, 4)).save_adapters(tmp_path / "adapters")


def test_saved_adapters_load_as_the_same_ensemble(case: tuple[nn.Module, Tensor], tmp_path: Path) -> None:
    model, x = case
    ensemble = train_members(model, x)
    folders = ensemble.save_adapters(tmp_path)
    assert [folder.name for folder in folders] == ["member_0", "member_1", "member_2"]
    again = load_adapters(model, folders).eval()
    assert torch.equal(again(x), ensemble(x))
    # members may come in any order, and some may stay away
    swapped = load_adapters(model, [folders[2], folders[0]]).eval()
    torch.testing.assert_close(swapped(x), ensemble(x)[[2, 0]], rtol=0, atol=1e-12)  # float64, sums in another order


def test_loaded_adapters_are_trained_further_as_before(tmp_path: Path) -> None:
    torch.manual_seed(0)
    model, x, y = mlp().double(), torch.randn(5, 4, dtype=torch.float64), torch.arange(5) % 3
    ensemble = train_members(model, x)
    again = load_adapters(model, ensemble.save_adapters(tmp_path))
    for module in (ensemble, again):
        optimizer = torch.optim.Adam([p for p in module.parameters() if p.requires_grad])
        for _ in range(3):
            optimizer.zero_grad()
            ace.amended_cross_entropy(module(x), y, 0.5).backward()
            optimizer.step()
    assert torch.equal(again(x), ensemble(x))
    assert {n for n, p in again.named_parameters() if p.requires_grad} == {
        n for n, p in ensemble.named_parameters() if p.requires_grad
    }


def test_model_directories_and_adapters_may_follow_each_other(tmp_path: Path) -> None:
    torch.manual_seed(0)
    model, x = ace.models.mlp(4, 8, 3), torch.randn(5, 4)
    ensemble = train_members(model, x)
    loaded = load_adapters(model, ensemble.save_adapters(tmp_path / "first"))
    ace.save_model(tmp_path / "model", loaded)
    again = load_adapters(model, ace.load_model(tmp_path / "model").save_adapters(tmp_path / "second"))
    assert torch.equal(again.eval()(x), ensemble(x))


@pytest.mark.parametrize("adapter", ["low_rank", "multiplicative"])
def test_a_merged_member_is_a_plain_model(case: tuple[nn.Module, Tensor], adapter: str) -> None:
    model, x = case
    ensemble = train_members(model, x, adapter=adapter, freeze=False)
    names = list(model.state_dict())
    for k in range(K):
        plain = ensemble.merge(k).eval()
        assert list(plain.state_dict()) == names
        torch.testing.assert_close(plain(x), ensemble(x)[k], rtol=0, atol=1e-12)  # float64: W(x∘r) and (W∘r)x
        model.load_state_dict(plain.state_dict())
        assert not any(module._forward_hooks or module._forward_pre_hooks for module in plain.modules())
    assert ensemble(x).shape[0] == K


@pytest.mark.parametrize("index", [3, -1, 1.0, True])
def test_merge_needs_a_member(index: Any) -> None:
    with pytest.raises((TypeError, ValueError), match="`member`"):
        adapt(mlp(), K).merge(index)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"adapter": "multiplicative", "freeze": True}, "Expected adapter='low_rank' for files of peft"),
        ({"adapter": "low_rank", "rank": 2}, "Expected a frozen model, as files of peft hold no shared weights"),
    ],
)
def test_other_ensembles_are_not_saved_for_peft(options: dict[str, Any], message: str, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=message):
        adapt(mlp(), K, **options).save_adapters(tmp_path)
    assert not list(tmp_path.iterdir())


# -- adapters of another model, altered files --------------------------------------------------------------------------


def edit(folder: Path, **values: Any) -> None:
    file = folder / "adapter_config.json"
    file.write_text(json.dumps({**json.loads(file.read_text()), **values}))


def flip(folder: Path, place: int = -1) -> None:
    file = folder / "adapter_model.safetensors"
    data = bytearray(file.read_bytes())
    data[place] ^= 64
    file.write_bytes(data)


def strip_checksum(folder: Path) -> None:
    """As peft writes it."""
    from safetensors.torch import load_file, save_file

    file = folder / "adapter_model.safetensors"
    save_file(load_file(file), file, {"format": "pt"})


ALTERED = {
    "a bit": (flip, "was altered after it was written"),
    "alpha": (lambda folder: edit(folder, lora_alpha=9), "was altered after it was written"),
    "DoRA": (lambda folder: edit(folder, use_dora=True), "use_dora=True, which cannot be loaded"),
    "rsLoRA": (lambda folder: edit(folder, use_rslora=True), "use_rslora=True, which cannot be loaded"),
    "ranks": (lambda folder: edit(folder, rank_pattern={"0": 4}), "rank_pattern=.* cannot be loaded"),
    "biases": (lambda folder: edit(folder, bias="all"), "bias='all', which cannot be loaded"),
    "another kind": (lambda folder: edit(folder, peft_type="IA3"), "Expected an adapter of type LORA"),
    "no rank": (lambda folder: edit(folder, r=None), "r=None and lora_alpha=5.0, not numbers"),
    "alpha of text": (lambda folder: edit(folder, lora_alpha="5"), "r=2 and lora_alpha='5', not numbers"),
    "no configuration": (lambda folder: (folder / "adapter_config.json").unlink(), "cannot be read"),
    "no JSON": (lambda folder: (folder / "adapter_config.json").write_text("{"), "cannot be read"),
    "a list": (lambda folder: (folder / "adapter_config.json").write_text("[]"), "Expected an adapter of type LORA"),
    "no weights": (lambda folder: (folder / "adapter_model.safetensors").unlink(), "cannot be read"),
    "cut": (
        lambda folder: (folder / "adapter_model.safetensors").write_bytes(b"\x08\0\0\0\0\0\0\0{}"),
        "cannot be read",
    ),
}  # fmt: skip


@pytest.mark.parametrize("kind", list(ALTERED))
def test_altered_files_are_refused(kind: str, saved: tuple[nn.Module, list[Path]]) -> None:
    model, folders = saved
    alter, message = ALTERED[kind]
    alter(folders[1])
    with pytest.raises(ModelFileError, match=message) as caught:
        load_adapters(model, folders)
    assert len(str(caught.value).splitlines()) == 1


def test_a_pickle_is_never_read(saved: tuple[nn.Module, list[Path]]) -> None:
    model, folders = saved
    (folders[0] / "adapter_model.safetensors").rename(folders[0] / "adapter_model.bin")
    with pytest.raises(ModelFileError, match="pickles are never read"):
        load_adapters(model, folders)


def test_files_of_peft_have_no_checksum_but_are_checked(saved: tuple[nn.Module, list[Path]]) -> None:
    model, folders = saved
    before = load_adapters(model, folders).eval()(torch.ones(2, 4))
    for folder in folders:
        strip_checksum(folder)
    assert torch.equal(load_adapters(model, folders).eval()(torch.ones(2, 4)), before)
    for folder in folders:
        edit(folder, lora_alpha=float("nan"))
    with pytest.raises(ModelFileError, match=r"`alpha` in \[0, 1e9\], but got nan"):
        load_adapters(model, folders)
    data = (folders[0] / "adapter_model.safetensors").read_bytes()
    (folders[0] / "adapter_model.safetensors").write_bytes(data[:-4] + struct.pack("<f", float("nan")))
    with pytest.raises(ModelFileError, match="not finite"):
        load_adapters(model, folders)


def test_adapters_of_another_model_are_refused(saved: tuple[nn.Module, list[Path]], tmp_path: Path) -> None:
    model, folders = saved
    with pytest.raises(ModelFileError, match="was trained on a model with other weights"):
        load_adapters(mlp(), folders)
    load_adapters(model.double(), folders)  # another precision is the same model
    model.float()
    wide = nn.Sequential(nn.Linear(4, 9), nn.ReLU(), nn.Linear(9, 6), nn.ReLU(), nn.Linear(6, 3))
    four = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 6), nn.ReLU(), nn.Linear(6, 4))
    for other_model in (wide, nn.Linear(4, 3), four):
        with pytest.raises(ModelFileError, match=r"does not fit the model .* give the model on which it was trained"):
            load_adapters(other_model, folders)
    other = adapt(model, 1, adapter="low_rank", rank=3, freeze=True).save_adapters(tmp_path / "other")
    with pytest.raises(ModelFileError, match="another rank or alpha"):
        load_adapters(model, [folders[0], *other])
    fewer = adapt(model, 1, adapter="low_rank", rank=2, alpha=5.0, layers=["0"], freeze=True)
    with pytest.raises(ModelFileError, match=r"is not in both .* adapt the same layers"):
        load_adapters(model, [folders[0], *fewer.save_adapters(tmp_path / "fewer")])
    classes = adapt(nn.Sequential(*model[:4], four[4]), 1, adapter="low_rank", rank=2, alpha=5.0, freeze=True)
    with pytest.raises(ModelFileError, match=r"'4.bias' is not in both .* with the same shape; adapt the same layers"):
        load_adapters(model, [folders[0], *classes.save_adapters(tmp_path / "classes")])


def test_arguments(saved: tuple[nn.Module, list[Path]], tmp_path: Path) -> None:
    model, folders = saved
    with pytest.raises(TypeError, match="Expected `folders` to be a list"):
        load_adapters(model, folders[0])  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="Expected at least one folder"):
        load_adapters(model, [])
    with pytest.raises(ModelFileError, match=r"adapter_config\.json cannot be read"):
        load_adapters(model, [tmp_path / "nothing"])
    shutil.rmtree(folders[0])
    folders[0].write_text("a file")
    with pytest.raises(ModelFileError, match="cannot be read"):
        load_adapters(model, folders)
