"""The Lightning module and the schedule of λ, with the real Trainer."""

from __future__ import annotations

import csv
import json
import logging
import subprocess
import sys
from functools import partial
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

from tests.support.scripts import load_script
from torchace import functional
from torchace.metrics import EnsembleMetrics
from torchace.models import mlp
from torchace.nn import (
    AmendedCrossEntropyLoss,
    BinaryAmendedCrossEntropyLoss,
    Ensemble,
    NegativeCorrelationLoss,
    StackedEnsemble,
)

pytest.importorskip("lightning")
from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.callbacks import EarlyStopping, ModelCheckpoint
from lightning.pytorch.loggers import CSVLogger, TensorBoardLogger

from torchace.lightning import ACEModule, DiversitySchedule

pytestmark = [
    pytest.mark.extended,
    # Lightning's advice on speed and habits, and a name of torch's that it still uses
    pytest.mark.filterwarnings("ignore::lightning.fabric.utilities.warnings.PossibleUserWarning"),
    pytest.mark.filterwarnings("ignore:.*LeafSpec:FutureWarning"),
]
logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)

SGD = partial(torch.optim.SGD, lr=0.1)


def trainer(folder: Path, **options) -> Trainer:
    quiet = {"enable_progress_bar": False, "enable_model_summary": False, "logger": False, "accelerator": "cpu"}
    return Trainer(default_root_dir=folder, **{**quiet, "enable_checkpointing": False, **options})


def loader(*tensors: Tensor, batch_size: int = 8, shuffle: bool = False) -> DataLoader:
    return DataLoader(TensorDataset(*tensors), batch_size=batch_size, shuffle=shuffle)


def classification(n: int = 24, seed: int = 0, **kwargs) -> DataLoader:
    g = torch.Generator().manual_seed(seed)
    return loader(torch.randn(n, 4, generator=g), torch.randint(3, (n,), generator=g), **kwargs)


def make_stacked(num_members: int = 3, **kwargs) -> StackedEnsemble:
    return StackedEnsemble([mlp(4, 8, 3) for _ in range(num_members)], **kwargs)


# -- training step ----------------------------------------------------------------------------------------------------


def test_the_step_is_plain_pytorch(tmp_path):
    """Two epochs of Trainer.fit against a loop."""
    torch.manual_seed(0)
    ensemble = make_stacked()
    start = {name: value.clone() for name, value in ensemble.state_dict().items()}
    trainer(tmp_path, max_epochs=2).fit(ACEModule(ensemble, AmendedCrossEntropyLoss(0.7), SGD), classification())
    plain = make_stacked()
    plain.load_state_dict(start)
    optimizer = SGD(plain.parameters())
    for _ in range(2):
        for x, y in classification():
            optimizer.zero_grad()
            functional.amended_cross_entropy(plain(x), y, 0.7).backward()
            optimizer.step()
    for ours, theirs in zip(ensemble.parameters(), plain.parameters(), strict=True):
        assert torch.equal(ours, theirs)


# -- logging ----------------------------------------------------------------------------------------------------------


def test_scores_are_those_of_the_whole_split(tmp_path):
    torch.manual_seed(0)
    ensemble = make_stacked()
    module = ACEModule(ensemble, AmendedCrossEntropyLoss(0.5), SGD)
    fit = trainer(tmp_path, max_epochs=2)
    val = classification(21, seed=1)
    fit.fit(module, classification(), val)
    metrics = EnsembleMetrics(3, 3)
    metrics.update(ensemble(val.dataset.tensors[0]), val.dataset.tensors[1])
    expected = metrics.compute()
    logged = {name.removeprefix("val_"): v for name, v in fit.callback_metrics.items() if name.startswith("val_")}
    for k, accuracy in enumerate(expected.pop("members")):
        torch.testing.assert_close(logged.pop(f"member_accuracy_{k}"), accuracy)
    assert logged.keys() == expected.keys()
    for name, value in expected.items():
        torch.testing.assert_close(logged[name], value, rtol=1e-6, atol=1e-6)  # float32 sums in another order
    assert {"train_accuracy", "train_disagreement", "train_loss", "diversity"} <= fit.callback_metrics.keys()
    scores = dict(fit.callback_metrics)
    (tested,) = fit.test(module, loader(*val.dataset.tensors, batch_size=5), verbose=False)  # batches do not matter
    assert tested["test_accuracy"] == pytest.approx(scores["val_accuracy"].item(), abs=1e-6)


def test_scores_of_sigmoid_outputs(tmp_path):
    torch.manual_seed(0)
    ensemble = Ensemble([nn.Linear(4, 2) for _ in range(3)], link="sigmoid")
    module = ACEModule(ensemble, BinaryAmendedCrossEntropyLoss(0.3), SGD)
    x, y = torch.randn(20, 4), torch.randint(2, (20, 2)).float()
    fit = trainer(tmp_path, max_epochs=1)
    fit.fit(module, loader(x, y), loader(x, y, batch_size=7))
    probs = ensemble.predict_proba(x)
    truth = torch.where(y == 1, probs, 1 - probs)
    assert fit.callback_metrics["val_cross_entropy"] == pytest.approx(float(-truth.log().mean()), rel=1e-5)
    assert fit.callback_metrics["val_accuracy"] == pytest.approx(float((truth > 0.5).float().mean()), abs=1e-6)
    torch.testing.assert_close(torch.cat(fit.predict(module, loader(x))), probs)


def test_scores_of_regression(tmp_path):
    torch.manual_seed(0)
    ensemble = Ensemble([nn.Linear(4, 1) for _ in range(3)], link="identity")
    loss = NegativeCorrelationLoss(0.5, member_weights=[0.5, 0.25, 0.25])
    module = ACEModule(ensemble, loss, SGD)
    x, y = torch.randn(20, 4), torch.randn(20, 1)
    fit = trainer(tmp_path, max_epochs=1)
    fit.fit(module, loader(x, y), loader(x, y, batch_size=7))
    with torch.no_grad():
        f = ensemble(x).double()
    mean = 0.5 * f[0] + 0.25 * f[1] + 0.25 * f[2]  # the loss's weights became the ensemble's
    scores = fit.callback_metrics
    assert scores["val_mean_squared_error"] == pytest.approx(float(((mean - y) ** 2).mean()), rel=1e-5)
    assert scores["val_member_mean_squared_error_1"] == pytest.approx(float(((f[1] - y) ** 2).mean()), rel=1e-5)
    members = [float(scores[f"val_member_mean_squared_error_{k}"]) for k in range(3)]
    split = 0.5 * members[0] + 0.25 * members[1] + 0.25 * members[2] - float(scores["val_mean_squared_error"])
    assert scores["val_ambiguity"] == pytest.approx(split, rel=1e-4)  # Krogh and Vedelsby: a difference of float32
    torch.testing.assert_close(torch.cat(fit.predict(module, loader(x))).double(), mean, rtol=1e-6, atol=1e-6)


def test_soft_targets_and_ignored_classes(tmp_path):
    ensemble = make_stacked()
    x = torch.randn(16, 4)
    fit = trainer(tmp_path, max_epochs=1)
    soft = loader(x, torch.rand(16, 3).softmax(1))
    fit.fit(ACEModule(ensemble, AmendedCrossEntropyLoss(0.5), SGD), soft, soft)
    assert 0 <= fit.callback_metrics["val_accuracy"] <= 1
    y = torch.randint(3, (16,))
    some = y.clone()
    some[4:] = 7
    module = ACEModule(ensemble, AmendedCrossEntropyLoss(0.5, ignore_index=7), SGD)
    (ignored,) = fit.validate(module, loader(x, some), verbose=False)
    (alone,) = fit.validate(module, loader(x[:4], y[:4]), verbose=False)
    assert ignored == pytest.approx(alone, rel=1e-6)


def test_half_precision(tmp_path):
    module = ACEModule(make_stacked(), AmendedCrossEntropyLoss(0.5), SGD)
    fit = trainer(tmp_path, max_epochs=1, precision="bf16-mixed")
    fit.fit(module, classification(), classification(seed=1))
    assert fit.callback_metrics["train_loss"].dtype is torch.float32
    assert 0 < fit.callback_metrics["val_cross_entropy"] < 10
    assert torch.cat(fit.predict(module, classification())).dtype is torch.float32


def test_several_validation_loaders(tmp_path):
    module = ACEModule(make_stacked(), AmendedCrossEntropyLoss(0.5), SGD)
    fit = trainer(tmp_path, max_epochs=1)
    first, second = classification(16, seed=1), classification(16, seed=2)
    fit.fit(module, classification(), [first, second])
    logged = dict(fit.callback_metrics)
    assert logged["val_cross_entropy"] != logged["val_1_cross_entropy"]
    (alone,) = fit.validate(module, second, verbose=False)
    assert alone["val_cross_entropy"] == pytest.approx(float(logged["val_1_cross_entropy"]), rel=1e-6)
    assert not [name for name in alone if name.startswith("val_1_")]  # of another validation: not logged again


def test_dictionaries_and_several_inputs(tmp_path):
    class Sum(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear = nn.Linear(4, 3)

        def forward(self, a: Tensor, b: Tensor) -> Tensor:
            return self.linear(a + b)

    ensemble = Ensemble([Sum(), Sum()])
    module = ACEModule(ensemble, AmendedCrossEntropyLoss(0.5), SGD)
    a, b, y = torch.randn(8, 4), torch.randn(8, 4), torch.randint(3, (8,))
    rows = [{"a": a[i], "b": b[i], "labels": y[i]} for i in range(8)]
    fit = trainer(tmp_path)
    (named,) = fit.validate(module, DataLoader(rows, 3), verbose=False)
    (placed,) = fit.validate(module, loader(a, b, y), verbose=False)
    assert named == pytest.approx(placed, rel=1e-6)
    without = [{"a": row["a"], "b": row["b"]} for row in rows]
    torch.testing.assert_close(torch.cat(fit.predict(module, DataLoader(without, 3))), ensemble.predict_proba(a, b))
    with pytest.raises(ValueError, match="found no target"):
        fit.validate(module, DataLoader(without, 3), verbose=False)
    with pytest.raises(TypeError, match=r"Override ACEModule.split_batch"):
        module.split_batch(3)


def test_loggers(tmp_path):
    loggers = [CSVLogger(tmp_path, name="csv"), TensorBoardLogger(tmp_path, name="board")]
    module = ACEModule(make_stacked(), AmendedCrossEntropyLoss(0.5), SGD, hyperparameters={"width": 8})
    schedule = DiversitySchedule(0.6, warmup=2)
    trainer(tmp_path, max_epochs=3, logger=loggers, log_every_n_steps=1, callbacks=[schedule]).fit(
        module, classification(), classification(seed=1)
    )
    with open(Path(loggers[0].log_dir) / "metrics.csv", encoding="utf-8") as file:
        rows = list(csv.DictReader(file))
    assert [float(row["diversity"]) for row in rows if row["diversity"]] == pytest.approx(
        [0] * 3 + [0.3] * 3 + [0.6] * 3
    )
    for name in ("val_accuracy", "train_ambiguity", "val_member_accuracy_2"):
        assert len([row for row in rows if row[name]]) == 3
    hparams = (Path(loggers[0].log_dir) / "hparams.yaml").read_text(encoding="utf-8")
    assert "width: 8" in hparams
    assert "num_members: 3" in hparams
    assert list(Path(loggers[1].log_dir).glob("events.out.tfevents.*"))


# -- checkpoints ------------------------------------------------------------------------------------------------------


def test_checkpoints_hold_the_weights_and_lambda(tmp_path):
    torch.manual_seed(0)
    module = ACEModule(make_stacked(), AmendedCrossEntropyLoss(0.3), SGD)
    fit = trainer(tmp_path, max_epochs=1)
    fit.fit(module, classification())
    module.loss.diversity = 0.85
    module.ensemble.set_member_weights([0.5, 0.3, 0.2])
    fit.save_checkpoint(tmp_path / "a.ckpt")
    for loss in (AmendedCrossEntropyLoss(0.0), AmendedCrossEntropyLoss(torch.tensor(0.0))):
        held = loss.diversity
        loaded = ACEModule.load_from_checkpoint(
            tmp_path / "a.ckpt", ensemble=make_stacked(), loss=loss, optimizer_factory=SGD, weights_only=True
        )
        assert float(loss.diversity) == pytest.approx(0.85)
        assert not isinstance(held, Tensor) or loss.diversity is held
        x = torch.randn(5, 4)
        assert torch.equal(loaded.ensemble.predict_proba(x), module.ensemble.predict_proba(x))
        assert loaded.hparams["num_members"] == 3


def test_early_stopping_and_best_checkpoint(tmp_path):
    torch.manual_seed(0)
    best = ModelCheckpoint(tmp_path, monitor="val_cross_entropy", mode="min", save_top_k=1)
    stop = EarlyStopping("val_cross_entropy", patience=2, mode="min")
    module = ACEModule(make_stacked(), AmendedCrossEntropyLoss(0.9), partial(torch.optim.Adam, lr=0.1))
    fit = trainer(tmp_path, max_epochs=60, callbacks=[best, stop], enable_checkpointing=True)
    fit.fit(module, classification(), classification(seed=1))  # labels are random: validation gets worse soon
    assert fit.current_epoch < 60
    assert stop.stopped_epoch > 0
    loaded = ACEModule.load_from_checkpoint(
        best.best_model_path, ensemble=make_stacked(), loss=AmendedCrossEntropyLoss(0.0), optimizer_factory=SGD
    )
    (scores,) = fit.validate(loaded, classification(seed=1), verbose=False)
    assert scores["val_cross_entropy"] == pytest.approx(float(best.best_model_score), rel=1e-6)


def test_a_resumed_training_continues_from_its_checkpoint(tmp_path):
    """Four epochs at once, and two and two: the same weights, with λ rising all the while."""

    def run(epochs: int, ckpt: Path | None = None) -> ACEModule:
        torch.manual_seed(0)
        module = ACEModule(
            make_stacked(),
            AmendedCrossEntropyLoss(0.0),
            partial(torch.optim.Adam, lr=0.05),
            scheduler_factory=lambda optimizer: torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.5),
        )
        schedule = DiversitySchedule(0.9, start=0.1, warmup=9, interval="step")
        fit = trainer(tmp_path, max_epochs=epochs, callbacks=[schedule])
        fit.fit(module, classification(), ckpt_path=ckpt, weights_only=True)
        fit.save_checkpoint(tmp_path / f"{epochs}.ckpt")
        return module

    whole = run(4)
    run(2)
    resumed = run(4, tmp_path / "2.ckpt")
    assert resumed.loss.diversity == whole.loss.diversity == 0.9
    for ours, theirs in zip(resumed.parameters(), whole.parameters(), strict=True):
        assert torch.equal(ours, theirs)


# -- the schedule -----------------------------------------------------------------------------------------------------


class Seen(DiversitySchedule):
    def on_train_batch_end(self, trainer, pl_module, *rest) -> None:
        self.__dict__.setdefault("values", []).append(float(pl_module.loss.diversity))


@pytest.mark.parametrize("held", ["number", "tensor"])
@pytest.mark.parametrize(
    ("schedule", "expected"),
    [
        (Seen(0.4), [0.4] * 6),
        (Seen(0.4, warmup=2), [0.0] * 3 + [0.2] * 3),
        (Seen(0.4, start=0.8, warmup=4, interval="step"), [0.8, 0.7, 0.6, 0.5, 0.4, 0.4]),
        (Seen(lambda epoch: epoch / 4), [0.0] * 3 + [0.25] * 3),
        (Seen(lambda step: 1 - step / 8, interval="step"), [1 - step / 8 for step in range(6)]),
    ],
)
def test_schedules(schedule, expected, held, tmp_path):
    schedule.values = []
    loss = AmendedCrossEntropyLoss(torch.tensor(0.5) if held == "tensor" else 0.5)
    fit = trainer(tmp_path, max_epochs=2, callbacks=[schedule])
    fit.fit(ACEModule(make_stacked(), loss, SGD), classification())
    assert schedule.values == pytest.approx(expected, abs=1e-7)


def test_a_schedule_for_a_module_of_ones_own(tmp_path):
    class Own(LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.ensemble, self.loss = make_stacked(), AmendedCrossEntropyLoss(0.0)

        def training_step(self, batch, batch_idx):
            return self.loss(self.ensemble(batch[0]), batch[1])

        def configure_optimizers(self):
            return SGD(self.parameters())

    own = Own()
    fit = trainer(tmp_path, max_epochs=1, callbacks=[DiversitySchedule(0.7)])
    fit.fit(own, classification())
    assert own.loss.diversity == 0.7
    assert fit.callback_metrics["diversity"] == pytest.approx(0.7)
    del own.loss
    with pytest.raises(ValueError, match="Expected Own to hold one of the library's losses"):
        trainer(tmp_path, max_epochs=1, callbacks=[DiversitySchedule(0.7)]).fit(own, classification())


def test_schedule_errors(tmp_path):
    with pytest.raises(ValueError, match=r"`diversity` in \[0, 1\]"):
        DiversitySchedule(1.2)
    with pytest.raises(ValueError, match="`interval` to be one of"):
        DiversitySchedule(0.5, interval="batch")
    with pytest.raises(ValueError, match="no `warmup` or `start` with a function"):
        DiversitySchedule(lambda epoch: 0.5, warmup=3)
    with pytest.raises(ValueError, match="Give warmup="):
        DiversitySchedule(0.5, start=0.2)
    fit = trainer(tmp_path, max_epochs=1, callbacks=[DiversitySchedule(lambda epoch: 2.0)])
    with pytest.raises(ValueError, match=r"`diversity` in \[0, 1\], but got 2.0"):
        fit.fit(ACEModule(make_stacked(), AmendedCrossEntropyLoss(0.5), SGD), classification())


# -- arguments --------------------------------------------------------------------------------------------------------


def test_argument_errors():
    ensemble, loss = make_stacked(), AmendedCrossEntropyLoss(0.5)
    with pytest.raises(TypeError, match="Expected an ensemble module, but got Linear"):
        ACEModule(nn.Linear(4, 3), loss, SGD)
    with pytest.raises(TypeError, match=r"`loss` to be one of AmendedCrossEntropyLoss, .* got CrossEntropyLoss"):
        ACEModule(ensemble, nn.CrossEntropyLoss(), SGD)
    with pytest.raises(ValueError, match="link='sigmoid' for BinaryAmendedCrossEntropyLoss, but got link='softmax'"):
        ACEModule(ensemble, BinaryAmendedCrossEntropyLoss(0.5), SGD)
    with pytest.raises(ValueError, match="reduction='mean' or 'sum'"):
        ACEModule(ensemble, AmendedCrossEntropyLoss(0.5, reduction="none"), SGD)
    with pytest.raises(ValueError, match="`scheduler_interval` to be one of"):
        ACEModule(ensemble, loss, SGD, scheduler_interval="hour")


def test_schedulers_of_every_kind(tmp_path):
    def fitted(**kwargs) -> float:
        module = ACEModule(make_stacked(), AmendedCrossEntropyLoss(0.5), SGD, **kwargs)
        fit = trainer(tmp_path, max_epochs=2)
        fit.fit(module, classification(), classification(seed=1))
        return fit.optimizers[0].param_groups[0]["lr"]

    schedulers = torch.optim.lr_scheduler
    halved = partial(schedulers.ExponentialLR, gamma=0.5)
    assert fitted(scheduler_factory=halved) == pytest.approx(0.1 / 4)
    assert fitted(scheduler_factory=halved, scheduler_interval="step") == pytest.approx(0.1 / 64)
    own = {"interval": "step", "frequency": 1}
    assert fitted(scheduler_factory=lambda o: {"scheduler": halved(o), **own}) == pytest.approx(0.1 / 64)
    # any validation is worse than a threshold that asks for the impossible
    plateau = partial(schedulers.ReduceLROnPlateau, patience=0, threshold=2.0, threshold_mode="rel", factor=0.5)
    assert fitted(scheduler_factory=plateau) == pytest.approx(0.1 / 4)


def run(code: str, *args: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run([sys.executable, "-c", code, *args], capture_output=True, text=True, check=False)


def test_a_missing_package_is_one_sentence():
    code = """
import sys
sys.modules["lightning"] = sys.modules["pytorch_lightning"] = None
try:
    import torchace.lightning
except ImportError as error:
    print(error)
"""
    done = run(code)
    assert done.stdout.strip() == "torchace.lightning needs Lightning: pip install 'torchace[lightning]'.", done.stderr


def test_the_package_imported_first_is_used(tmp_path):
    code = """
import copy, sys, warnings
warnings.simplefilter("ignore")
import pytorch_lightning, torch, torchace as ace
from torch.utils.data import DataLoader, TensorDataset
from torchace.lightning import ACEModule
assert issubclass(ACEModule, pytorch_lightning.LightningModule)
member = ace.mlp(4, 8, 3)
ensemble = ace.Ensemble([member, copy.deepcopy(member)])
module = ACEModule(ensemble, ace.AmendedCrossEntropyLoss(0.5), torch.optim.Adam)
data = DataLoader(TensorDataset(torch.randn(8, 4), torch.randint(3, (8,))), 8)
trainer = pytorch_lightning.Trainer(
    max_epochs=1, logger=False, enable_checkpointing=False, enable_progress_bar=False, accelerator="cpu"
)
trainer.fit(module, data, data)
print(float(trainer.callback_metrics["val_disagreement"]))
"""
    done = run(code)
    assert done.returncode == 0, done.stderr
    assert done.stdout.split()[-1] == "0.0"  # equal members


def test_the_example():
    scores = load_script("examples/lightning_digits.py").main(epochs=10)
    assert scores["test_accuracy"] > 0.9
    assert scores["test_cross_entropy"] < scores["test_member_cross_entropy"]


def test_checkpoints_of_single_models_become_an_ensemble(tmp_path):
    """Checkpoints of a Lightning module with a model and a weighted loss."""

    class Single(LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.model, self.loss = mlp(4, 8, 3), nn.CrossEntropyLoss()
            self.save_hyperparameters({"lr": 0.1})

        def training_step(self, batch, batch_idx):
            return self.loss(self.model(batch[0]), batch[1])

        def configure_optimizers(self):
            return torch.optim.Adam(self.parameters())

    models = []
    for seed in range(3):
        torch.manual_seed(seed)
        single = Single()
        fit = trainer(tmp_path, max_epochs=1)
        fit.fit(single, classification())
        fit.save_checkpoint(tmp_path / f"{seed}.ckpt")
        models.append(single.model)
    ensemble = Ensemble.from_checkpoints(lambda: mlp(4, 8, 3), sorted(tmp_path.glob("*.ckpt")))
    x = torch.randn(5, 4)
    assert torch.equal(ensemble(x), torch.stack([model(x) for model in models]))


# -- several processes ------------------------------------------------------------------------------------------------

DISTRIBUTED = """
import json, os, sys, warnings
from functools import partial
warnings.simplefilter("ignore")
import torch, torchace as ace
from lightning.pytorch import Trainer
from lightning.pytorch.callbacks import ModelCheckpoint
from torch.utils.data import DataLoader, TensorDataset
from torchace.lightning import ACEModule, DiversitySchedule

folder = sys.argv[1]
data = torch.load(folder + "/data.pt", weights_only=True)
ensemble = ace.StackedEnsemble([ace.mlp(4, 8, 3) for _ in range(3)]).double()
ensemble.load_state_dict(data["weights"])
module = ACEModule(ensemble, ace.AmendedCrossEntropyLoss(0.0), partial(torch.optim.SGD, lr=1.0)).double()
loader = DataLoader(TensorDataset(data["x"], data["y"]), 4)
best = ModelCheckpoint(folder, "best", monitor="val_cross_entropy")
trainer = Trainer(
    accelerator="cpu", devices=2, strategy="ddp", max_epochs=1, logger=False, enable_progress_bar=False,
    enable_model_summary=False, num_sanity_val_steps=0, callbacks=[DiversitySchedule(0.7), best],
)
trainer.fit(module, loader, loader)
if trainer.is_global_zero:
    scores = {name: float(value) for name, value in trainer.callback_metrics.items()}
    torch.save(ensemble.state_dict(), folder + "/stepped.pt")
    with open(folder + "/scores.json", "w") as file:
        json.dump(scores, file)
"""


def test_two_processes_step_as_one(tmp_path):
    """DDP over two processes with half of the batch each, against the gradient of line 2 on all of it."""
    torch.manual_seed(0)
    ensemble = make_stacked().double()
    x, y = torch.randn(8, 4, dtype=torch.float64), torch.randint(3, (8,))
    torch.save({"x": x, "y": y, "weights": ensemble.state_dict()}, tmp_path / "data.pt")
    script = tmp_path / "distributed.py"
    script.write_text(DISTRIBUTED, encoding="utf-8")
    done = subprocess.run(
        [sys.executable, str(script), str(tmp_path)], capture_output=True, text=True, check=False, timeout=300
    )
    assert done.returncode == 0, done.stderr
    logits = ensemble(x)
    q, p = logits.detach().softmax(2), nn.functional.one_hot(y, 3).double()
    logits.backward((0.3 * (q - p) + 0.7 * (q.mean(0) - p)) / 8)
    stepped = torch.load(tmp_path / "stepped.pt", weights_only=True)
    for name, parameter in ensemble.named_parameters():
        # float64: the two halves are added in another order
        torch.testing.assert_close(stepped[name], parameter.detach() - parameter.grad, rtol=0, atol=1e-12)

    ensemble.load_state_dict(stepped)
    metrics = EnsembleMetrics(3, 3)
    metrics.update(ensemble(x), y)
    scores = json.loads((tmp_path / "scores.json").read_text(encoding="utf-8"))
    for name, value in metrics.compute().items():
        if name != "members":
            assert scores[f"val_{name}"] == pytest.approx(float(value), abs=1e-6), name  # reported in float32
    assert (tmp_path / "best.ckpt").is_file()
