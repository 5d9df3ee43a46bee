"""Ensembles of trained models: every format of their weights, and errors."""

from __future__ import annotations

import collections
import os
import pickle
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file
from safetensors.torch import save_model as save_safetensors_model
from torch import Tensor, nn

from torchace import fit_member_weights, functional, load_model, save_model
from torchace.metrics import EnsembleMetrics
from torchace.models import mlp
from torchace.nn import Ensemble
from torchace.saving import ModelFileError


def net(width: int = 6) -> nn.Sequential:
    return nn.Sequential(nn.Linear(4, width), nn.BatchNorm1d(width), nn.ReLU(), nn.Linear(width, 3))


def train_model(width: int = 6) -> nn.Sequential:
    """A model whose weights and statistics are no model's first ones."""
    model = net(width)
    model(torch.randn(16, 4))
    return model.eval()


class Wrapper(nn.Module):
    """A checkpoint as trainers write it, with other entries beside the weights."""

    def __init__(self, model: nn.Module, **others: nn.Module) -> None:
        super().__init__()
        self.model = model
        for name, module in others.items():
            self.add_module(name, module)


def eagerly(model: nn.Module) -> nn.Module:
    """A compiled module, whose names have `_orig_mod` in them, without a compiler."""
    return torch.compile(model, backend="eager")


def lightning_checkpoint(state: dict[str, Tensor]) -> dict[str, object]:
    moments = {0: {"step": torch.tensor(1.0), "exp_avg": torch.zeros(2)}}
    return {
        "epoch": 3,
        "pytorch-lightning_version": "2.6.6",
        "state_dict": state,
        "optimizer_states": [{"state": moments, "param_groups": [{"lr": 0.1, "params": [0]}]}],
        "hyper_parameters": {"width": 6},
        "callbacks": {},
    }


WAYS = {
    "safetensors": lambda model, path: save_file(model.state_dict(), path.with_suffix(".safetensors")),
    "state dict": lambda model, path: torch.save(model.state_dict(), path.with_suffix(".pt")),
    "old format": lambda model, path: torch.save(
        model.state_dict(), path.with_suffix(".pth"), _use_new_zipfile_serialization=False
    ),
    "parameters": lambda model, path: torch.save(
        collections.OrderedDict(model.state_dict(keep_vars=True)), path.with_suffix(".pt")
    ),
    "data parallel": lambda model, path: torch.save(nn.DataParallel(model).state_dict(), path.with_suffix(".pth")),
    "compiled": lambda model, path: torch.save(eagerly(model).state_dict(), path.with_suffix(".pt")),
    "compiled part": lambda model, path: torch.save(
        nn.Sequential(eagerly(model[0]), *model[1:]).state_dict(), path.with_suffix(".pt")
    ),
    "lightning": lambda model, path: torch.save(
        lightning_checkpoint(Wrapper(model).state_dict()), path.with_suffix(".ckpt")
    ),
    "lightning, compiled, distributed": lambda model, path: torch.save(
        lightning_checkpoint(Wrapper(eagerly(nn.DataParallel(model))).state_dict()), path.with_suffix(".ckpt")
    ),
    "training loop": lambda model, path: torch.save(
        {"net": model.state_dict(), "epoch": 3, "optimizer": torch.optim.Adam(model.parameters()).state_dict()},
        path.with_suffix(".tar"),
    ),
}


@pytest.mark.parametrize("way", WAYS)
def test_members_are_the_models_that_were_saved(way, tmp_path):
    models = [train_model() for _ in range(3)]
    for k, model in enumerate(models):
        WAYS[way](model, tmp_path / str(k))
    paths = sorted(tmp_path.iterdir())
    assert len(paths) == 3
    ensemble = Ensemble.from_checkpoints(net, paths)
    x = torch.randn(5, 4)
    assert torch.equal(ensemble(x), torch.stack([model(x) for model in models]))
    assert not any(module.training for module in ensemble.members.modules() if module is not ensemble.members)
    for member, model in zip(ensemble, models, strict=True):
        assert all(torch.equal(value, model.state_dict()[name]) for name, value in member.state_dict().items())


def test_evaluate_fit_weights_and_export(tmp_path):
    """Good and bad models get weights fitted on validation data; the ensemble is saved and exported."""
    torch.manual_seed(0)
    x, y = torch.randn(300, 4), torch.randint(3, (300,))
    x[range(300), y] += 3
    paths = []
    for seed, steps in enumerate((60, 0, 60)):
        model = mlp(4, 8, 3)
        optimizer = torch.optim.Adam(model.parameters(), lr=0.05)
        for _ in range(steps):
            optimizer.zero_grad()
            nn.functional.cross_entropy(model(x[:100]), y[:100]).backward()
            optimizer.step()
        paths.append(tmp_path / f"{seed}.safetensors")
        save_file(model.state_dict(), paths[-1])

    ensemble = Ensemble.from_checkpoints(lambda: mlp(4, 8, 3), paths)
    with torch.no_grad():
        held_out, test = ensemble(x[100:200]), ensemble(x[200:])
    alpha = fit_member_weights(held_out.log_softmax(2), y[100:200])
    assert alpha[1] < 0.05  # it was never trained
    scores = {}
    for name, weights in {"uniform": None, "fitted": alpha}.items():
        metrics = EnsembleMetrics(3, 3)
        metrics.update(test, y[200:], member_weights=weights)
        scores[name] = metrics.compute()
    assert scores["fitted"]["cross_entropy"] < scores["uniform"]["cross_entropy"]
    assert scores["fitted"]["accuracy"] > 0.9

    ensemble.set_member_weights(alpha)
    save_model(tmp_path / "model", ensemble)
    again = load_model(tmp_path / "model")
    assert torch.equal(again.predict_proba(x), ensemble.predict_proba(x))
    exported = torch.export.export(ensemble.eval(), (x[:2],), dynamic_shapes=(({0: torch.export.Dim("batch")},),))
    torch.testing.assert_close(
        functional.ensemble_probs(exported.module()(x), member_weights=alpha), ensemble.predict_proba(x)
    )


def test_several_architectures_a_trunk_and_a_link(tmp_path):
    models = [train_model(6), train_model(9)]
    for k, model in enumerate(models):
        torch.save(model.state_dict(), tmp_path / f"{k}.pt")
    trunk = nn.Linear(7, 4).eval()
    ensemble = Ensemble.from_checkpoints(
        [net, lambda: net(9)], [str(tmp_path / "0.pt"), tmp_path / "1.pt"], trunk=trunk, link="sigmoid"
    )
    x = torch.randn(5, 7)
    assert torch.equal(ensemble(x), torch.stack([model(trunk(x)) for model in models]))
    assert ensemble.link == "sigmoid"
    with pytest.raises(ValueError, match="one function for each of 2 checkpoints, but got 1"):
        Ensemble.from_checkpoints([net], [tmp_path / "0.pt", tmp_path / "1.pt"])


def test_subclasses_are_preserved(tmp_path):
    class Mine(Ensemble):
        pass

    torch.save(net().state_dict(), tmp_path / "a.pt")
    assert type(Mine.from_checkpoints(net, [tmp_path / "a.pt"])) is Mine


def test_types_are_the_models_own(tmp_path):
    model = train_model()
    torch.save(
        {name: value.half() for name, value in model.state_dict().items() if value.is_floating_point()},
        tmp_path / "a.pt",
    )
    with pytest.raises(ModelFileError, match=r"a\.pt does not fit Sequential: it has no '1\.num_batches_tracked'"):
        Ensemble.from_checkpoints(net, [tmp_path / "a.pt"])
    torch.save(model.half().state_dict(), tmp_path / "b.pt")
    (member,) = Ensemble.from_checkpoints(net, [tmp_path / "b.pt"])
    assert {value.dtype for value in member.parameters()} == {torch.float32}


def test_tied_weights_are_saved_once(tmp_path):
    class Tied(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.a, self.b = nn.Linear(4, 4), nn.Linear(4, 4)
            self.b.weight = self.a.weight

        def forward(self, x: Tensor) -> Tensor:
            return self.b(self.a(x))

    model = Tied()
    save_safetensors_model(model, str(tmp_path / "a.safetensors"))
    (member,) = Ensemble.from_checkpoints(Tied, [tmp_path / "a.safetensors"])
    assert member.a.weight is member.b.weight
    assert torch.equal(member(torch.ones(1, 4)), model(torch.ones(1, 4)))


def test_modules_with_a_state_of_their_own(tmp_path):
    class Counting(nn.Linear):
        seen = 0

        def get_extra_state(self):
            return {"seen": self.seen}

        def set_extra_state(self, state):
            self.seen = state["seen"]

    model = Counting(4, 3)
    model.seen = 7
    torch.save(model.state_dict(), tmp_path / "a.pt")
    (member,) = Ensemble.from_checkpoints(lambda: Counting(4, 3), [tmp_path / "a.pt"])
    assert member.seen == 7


# -- several state dicts in one file ----------------------------------------------------------------------------------


def test_weights_beside_the_model(tmp_path):
    model, teacher = train_model(), train_model()
    whole = Wrapper(model, teacher=teacher, loss=nn.CrossEntropyLoss(torch.ones(3)))
    torch.save(lightning_checkpoint(whole.state_dict()), tmp_path / "a.ckpt")
    with pytest.raises(
        ModelFileError,
        match=r"a\.ckpt does not fit .*it has no '0\.weight'.* It has 'model\.0\.weight', .*prefix=\.\.\.",
    ):
        Ensemble.from_checkpoints(net, [tmp_path / "a.ckpt"])
    x = torch.randn(5, 4)
    for prefix, expected in {"model.": model, "model": model, "teacher": teacher}.items():
        (member,) = Ensemble.from_checkpoints(net, [tmp_path / "a.ckpt"], prefix=prefix)
        assert torch.equal(member(x), expected(x))
    with pytest.raises(
        ModelFileError, match=r"it has no '0\.weight', which the model has\. It has 'model\.0\.weight', "
    ):
        Ensemble.from_checkpoints(net, [tmp_path / "a.ckpt"], prefix="student")


def test_several_state_dicts(tmp_path):
    model, average = train_model(), train_model()
    torch.save({"state_dict": model.state_dict(), "state_dict_ema": average.state_dict()}, tmp_path / "a.pth")
    with pytest.raises(ModelFileError, match=r"several state dicts, 'state_dict', 'state_dict_ema'; name one"):
        Ensemble.from_checkpoints(net, [tmp_path / "a.pth"])
    (member,) = Ensemble.from_checkpoints(net, [tmp_path / "a.pth"], state_key="state_dict_ema")
    assert torch.equal(member[0].weight, average[0].weight)
    with pytest.raises(ModelFileError, match="no state dict under 'ema'; it has 'state_dict', "):
        Ensemble.from_checkpoints(net, [tmp_path / "a.pth"], state_key="ema")


# -- errors -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (lambda state: state.pop("3.bias"), "it has no '3.bias', which the model has"),
        (lambda state: state.update(more=torch.ones(1)), "it has 'more', which the model does not have"),
        (lambda state: state.update({"3.weight": torch.ones(5, 6)}), "'3.weight' is (5, 6) in the file and (3, 6) in"),
        (lambda state: state.update({"3.bias": torch.ones(3, dtype=torch.long)}), "'3.bias' is torch.int64 in the"),
        (lambda state: state.update({"0.bias": torch.ones(6, dtype=torch.cfloat)}), "'0.bias' is torch.complex64 in"),
    ],
)
@pytest.mark.parametrize(("prefix", "suffix"), [("", "pt"), ("model.", "safetensors")])
def test_a_mismatch_names_the_file_and_the_weight(change, said, prefix, suffix, tmp_path):
    good, bad = tmp_path / f"good.{suffix}", tmp_path / f"bad.{suffix}"
    state = dict(train_model().state_dict())
    save = save_file if suffix == "safetensors" else torch.save
    save({prefix + name: value for name, value in state.items()}, good)
    change(state)
    save({prefix + name: value for name, value in state.items()}, bad)
    with pytest.raises(ModelFileError) as caught:
        Ensemble.from_checkpoints(net, [good, bad])
    message = str(caught.value)
    assert message.startswith(f"{bad} does not fit Sequential: ")
    assert said in message
    assert "\n" not in message


class CodeInPickle:
    def __reduce__(self):
        return (os.mkdir, ("bomb",))


def test_files_that_would_run_code_are_refused(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    torch.save(train_model(), "module.pt")
    torch.save({"state_dict": train_model().state_dict(), "callback": CodeInPickle()}, "bomb.ckpt")
    Path("pickle.pt").write_bytes(pickle.dumps({"weight": CodeInPickle()}))
    with pytest.raises(ModelFileError, match=r"pickle\.pt is not a valid file of torch\.save"):
        Ensemble.from_checkpoints(net, ["pickle.pt"])
    for name in ("module.pt", "bomb.ckpt"):
        with pytest.raises(ModelFileError, match=rf"{name} holds more than tensors, .* Save its weights alone"):
            Ensemble.from_checkpoints(net, [name])
    assert not Path("bomb").exists()


def test_damaged_and_missing_files(tmp_path):
    torch.save(train_model().state_dict(), tmp_path / "a.pt")
    save_file(train_model().state_dict(), tmp_path / "a.safetensors")
    for name in ("a.pt", "a.safetensors"):
        data = (tmp_path / name).read_bytes()
        for end in (0, 5, len(data) // 2, len(data) - 30):
            (tmp_path / name).write_bytes(data[:end])
            with pytest.raises(ModelFileError, match=r"is not a valid .*; copy it again"):
                Ensemble.from_checkpoints(net, [tmp_path / name])
    (tmp_path / "text.pt").write_text("weights of my model", encoding="utf-8")
    with pytest.raises(ModelFileError, match=r"text\.pt is not a valid file of torch\.save"):
        Ensemble.from_checkpoints(net, [tmp_path / "text.pt"])
    with pytest.raises(ModelFileError, match="There is no checkpoint file at"):
        Ensemble.from_checkpoints(net, [tmp_path / "none.pt"])
    torch.save(torch.ones(3), tmp_path / "tensor.pt")
    with pytest.raises(ModelFileError, match="contains a Tensor, not a state dict"):
        Ensemble.from_checkpoints(net, [tmp_path / "tensor.pt"])
    torch.save({"epoch": 3, "lr": 0.1}, tmp_path / "empty.pt")
    with pytest.raises(ModelFileError, match="has no state dict; it has 'epoch', 'lr'"):
        Ensemble.from_checkpoints(net, [tmp_path / "empty.pt"])


def test_argument_errors(tmp_path):
    torch.save(net().state_dict(), tmp_path / "a.pt")
    with pytest.raises(TypeError, match="Expected a list of paths, but got one"):
        Ensemble.from_checkpoints(net, tmp_path / "a.pt")
    with pytest.raises(TypeError, match="Expected a list of paths, but got one"):
        Ensemble.from_checkpoints(net, str(tmp_path / "a.pt"))
    with pytest.raises(ValueError, match="at least one member"):
        Ensemble.from_checkpoints(net, [])
    for wrong in (net(), lambda: 3, "resnet"):
        with pytest.raises(TypeError, match="a function that returns a model"):
            Ensemble.from_checkpoints(wrong, [tmp_path / "a.pt"])
