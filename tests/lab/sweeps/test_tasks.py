"""Sweeps of own data: multi-label, regression, early stopping, metrics and optimizers, against plain PyTorch."""

from __future__ import annotations

import json
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
import torchmetrics
from sklearn.metrics import accuracy_score, f1_score, hamming_loss, log_loss, r2_score
from torch import Tensor, nn

import torchace as ace
from tests.lab.sweeps.small_sweeps import train_alone
from torchace.lab.report.results import read_results
from torchace.lab.report.tables import detail_table
from torchace.lab.sweeps.config import ConfigError, load_experiment, parse_experiment
from torchace.lab.sweeps.sweep import Sweep
from torchace.lab.training.loop import Interrupted

FEATURES, LABELS = 5, 4
SMALL: dict[str, Any] = {
    "num_members": 2,
    "diversities": [0.0, 0.6],
    "seeds": [1, 4],
    "epochs": 3,
    "batch_size": 20,
    "learning_rate": 0.02,
    "precision": "float64",
}
LOSSES = {"multilabel": ace.binary_amended_cross_entropy, "regression": ace.negative_correlation}
# float64: nine steps in another order of operations
WITHIN = 1e-10


def network(features: int = FEATURES, outputs: int = LABELS) -> nn.Module:
    return nn.Sequential(nn.Linear(features, 8), nn.Tanh(), nn.Linear(8, outputs))


def labeled(count: int, seed: int) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(count, FEATURES, generator=generator, dtype=torch.float64)
    noise = torch.randn(count, LABELS, generator=generator, dtype=torch.float64)
    return x, ((x[:, :LABELS] + 0.3 * noise) > 0).int()


TRAIN, TEST = labeled(60, 0), labeled(50, 1)


def assert_equal_members(result: ace.SweepResult, diversity: float, seed: int, members: list[nn.Module]) -> None:
    ensemble: Any = result.ensemble(diversity, seed)
    for k, member in enumerate(members):
        for name, value in member.state_dict().items():
            torch.testing.assert_close(ensemble[k].state_dict()[name], value, rtol=0, atol=WITHIN)


def test_multilabel_runs_equal_plain_training_and_their_scores_those_of_sklearn() -> None:
    result = ace.sweep(network, TRAIN, TEST, task="multilabel", **SMALL)
    frame = result.to_frame().set_index(["diversity", "seed"])
    x, y = TEST
    for diversity in SMALL["diversities"]:
        for seed in SMALL["seeds"]:
            make = partial(torch.optim.Adam, lr=0.02)
            members = train_alone(network, *TRAIN, LOSSES["multilabel"], diversity, seed, 9, 20, make)
            assert_equal_members(result, diversity, seed, members)
            row, q = frame.loc[(diversity, seed)], torch.stack([m(x).sigmoid() for m in members]).detach().mean(0)
            flat = y.flatten().numpy()
            expected = {
                "accuracy": 1 - hamming_loss(y, q > 0.5),
                "cross_entropy": log_loss(flat, q.flatten().numpy()),
                "exact_match": accuracy_score(y, q > 0.5),
                "macro_f1": f1_score(y, q > 0.5, average="macro"),
                "brier": 2 * (q - y).square().mean().item(),  # over both classes of a label
                "member_accuracy": np.mean([1 - hamming_loss(y, m(x) > 0) for m in members]),
            }
            for key, value in expected.items():
                assert row[key] == pytest.approx(value, abs=1e-6), key  # scores are kept in float32
    assert result.ensemble(0.6, 1).link == "sigmoid"


def table(count: int, seed: int) -> Any:
    """A DataFrame with numbers, a category and missing values."""
    import pandas as pd

    rng = np.random.default_rng(seed)
    frame = pd.DataFrame({"size": rng.normal(50, 10, count), "age": rng.normal(0, 1, count)})
    frame["color"] = rng.choice(["red", "green", "blue"], count)
    frame["price"] = (frame["size"] - 50) / 10 + (frame["color"] == "red") + 0.1 * rng.normal(size=count)
    frame.loc[3, "age"] = None
    return frame


def test_regression_on_a_data_frame_equals_plain_training_on_its_encoded_columns() -> None:
    train, test = table(60, 0), table(50, 1)
    columns = {"features": 6, "outputs": 1}  # size, age, age missing, three colors
    result = ace.sweep(network, train, test, task="regression", target="price", arguments=columns, **SMALL)
    encoded = []
    for frame in (train, test):
        mean, std = train[["size", "age"]].mean(), train[["size", "age"]].std(ddof=0)
        numbers = ((frame[["size", "age"]] - mean) / std).fillna(0)
        dummies = [frame["color"] == name for name in ("blue", "green", "red")]
        encoded.append(torch.tensor(np.column_stack([numbers, frame["age"].isna(), *dummies]).astype(float)))
    y, y_test = (torch.tensor(frame[["price"]].to_numpy()) for frame in (train, test))
    frame = result.to_frame().set_index(["diversity", "seed"])
    for diversity in SMALL["diversities"]:
        make, loss = partial(torch.optim.Adam, lr=0.02), LOSSES["regression"]
        members = train_alone(partial(network, **columns), encoded[0], y, loss, diversity, 4, 9, 20, make)
        assert_equal_members(result, diversity, 4, members)
        predictions = torch.stack([member(encoded[1]) for member in members]).detach()
        row = frame.loc[(diversity, 4)]
        assert row["r2"] == pytest.approx(r2_score(y_test, predictions.mean(0)), abs=1e-8)
        assert row["mse"] == pytest.approx(F.mse_loss(predictions.mean(0), y_test).item(), abs=1e-8)
        assert row["spread"] == pytest.approx(predictions.std(0, correction=0).mean().item(), abs=1e-8)


def test_a_regressor_may_return_one_number_a_sample() -> None:
    x, y = TRAIN[0], TRAIN[0].sum(1)
    frames = []
    for end in ([], [nn.Flatten(0)]):
        factory = lambda end=end: nn.Sequential(nn.Linear(FEATURES, 1), *end)  # noqa: E731
        result = ace.sweep(factory, (x, y), (x, y), task="regression", **SMALL)
        frames.append(result.to_frame())
    assert result.ensemble(0.6, 4).predict(x).shape == (len(x),)
    assert frames[0]["mse"].tolist() == pytest.approx(frames[1]["mse"].tolist(), abs=WITHIN)


def test_early_stopping_keeps_the_best_epoch_of_each_run(tmp_path: Path) -> None:
    x, y = TRAIN
    noisy = (x, torch.where(torch.arange(60)[:, None] % 3 == 0, 1 - y, y))  # overfits
    options: dict[str, Any] = SMALL | {"epochs": 60, "learning_rate": 0.02, "batch_size": 10}
    result = ace.sweep(
        network, noisy, TEST, task="multilabel", validation=0.3, patience=3, out=tmp_path / "sweep", **options
    )
    best = set()
    for file in sorted((tmp_path / "sweep" / "runs").glob("*.json")):
        run = json.loads(file.read_text())
        curve = [epoch["validation_cross_entropy"] for epoch in run["history"]]
        best.add(run["best_epoch"])
        assert run["best_epoch"] == 1 + int(np.argmin(curve))
        assert len(curve) == run["best_epoch"] + 3 < 60
        assert run["steps"] == 4 * len(curve)  # 42 samples in batches of 10
        found = run["metrics"]["validation"]["cross_entropy"]
        assert found == pytest.approx(min(curve), abs=1e-6)  # of the weights that were kept, in float32
    assert len(best) > 1
    alone = ace.sweep(network, noisy, TEST, task="multilabel", validation=0.3, patience=3, group_size=1, **options)
    one, other = result.to_frame(), alone.to_frame()
    np.testing.assert_allclose(one["cross_entropy"], other["cross_entropy"], atol=1e-6)


def quadratic(logits: Tensor, target: Tensor) -> Tensor:
    return (logits.sigmoid().mean(0) - target).square().mean()


def fails_on_confident(logits: Tensor, target: Tensor) -> float:
    if logits.std() < 0.9:  # trained networks: random logits of the trial have 1
        raise RuntimeError("not now")
    return 1.0


def test_user_metrics_are_reported_with_the_others() -> None:
    auroc = torchmetrics.classification.MultilabelAUROC(LABELS)
    result = ace.sweep(network, TRAIN, TEST, task="multilabel", validation=0.2, metrics=[quadratic, auroc], **SMALL)
    row = result.to_frame().iloc[0]
    q = result.ensemble(0.0, 1)(TEST[0]).detach().sigmoid().mean(0)
    assert row["quadratic"] == pytest.approx((q - TEST[1]).square().mean().item(), abs=1e-6)
    assert row["multilabel_auroc"] == pytest.approx(auroc(q, TEST[1]).item(), abs=1e-6)
    assert 0 < row["validation_quadratic"] < 1
    headings = [column.label for column in detail_table(read_results(result.directory)).columns]
    assert {"Macro F1", "Quadratic", "Multilabel auroc"} <= set(headings)


@pytest.mark.extended
@pytest.mark.parametrize("task", ["multilabel", "regression"])
def test_reports_show_the_tasks_metrics(task: str) -> None:
    result = ace.sweep(network, TRAIN, TEST, task=task, metrics=[quadratic], **SMALL)
    page = result.report().read_text()
    assert "Quadratic" in page
    assert ("Macro F1" if task == "multilabel" else "R²") in page
    assert "5 of float64" in page


def test_a_metric_that_fails_after_training_leaves_the_run_intact() -> None:
    with pytest.warns(UserWarning, match="The metric 'fails_on_confident' failed with RuntimeError: not now"):
        result = ace.sweep(network, TRAIN, TEST, task="multilabel", metrics=fails_on_confident, **SMALL | {"epochs": 1})
    frame = result.to_frame()
    assert set(frame["status"]) == {"finished"}
    assert "fails_on_confident" not in frame or frame["fails_on_confident"].isna().all()


def test_a_metric_without_a_number_is_noticed() -> None:
    with pytest.warns(UserWarning, match="The metric 'lambda' is nan; results do not include it"):
        ace.sweep(network, TRAIN, TEST, task="multilabel", metrics=lambda logits, target: float("nan"), **SMALL)


class Steps(torch.optim.Optimizer):
    """SGD whose step size falls with a count kept as a Python number."""

    def __init__(self, params: Any, lr: float, power: float = 0.5) -> None:
        super().__init__(params, {"lr": lr, "power": power})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for group in self.param_groups:
            for p in group["params"]:
                state = self.state[p]
                state["count"] = state.get("count", 0) + 1
                p -= group["lr"] * state["count"] ** -group["power"] * p.grad


ace.allow_optimizer(Steps)


@pytest.mark.parametrize(
    ("given", "make"),
    [
        ({"optimizer": torch.optim.RMSprop, "weight_decay": 0.1}, partial(torch.optim.RMSprop, weight_decay=0.1)),
        ({"optimizer": "torch.optim:Adagrad", "optimizer_arguments": {"lr_decay": 0.1}}, None),
        ({"optimizer": Steps, "optimizer_arguments": {"power": 0.25}}, partial(Steps, power=0.25)),
        ({"optimizer": lambda params: torch.optim.SGD(params, lr=0.02)}, torch.optim.SGD),
        ({"optimizer": "adamw", "optimizer_arguments": {"betas": [0.5, 0.9]}}, None),
    ],
    ids=["class", "name", "own", "function", "built-in"],
)
def test_optimizers_by_class_or_function_equal_plain_training(given: dict[str, Any], make: Any) -> None:
    if make is None:
        make = partial(torch.optim.Adagrad, lr_decay=0.1)
    if given["optimizer"] == "adamw":
        make = partial(torch.optim.AdamW, betas=(0.5, 0.9), weight_decay=0.0)
    result = ace.sweep(network, TRAIN, TEST, task="multilabel", **SMALL | {"seeds": [1]}, **given)
    members = train_alone(network, *TRAIN, LOSSES["multilabel"], 0.6, 1, 9, 20, partial(make, lr=0.02))
    assert_equal_members(result, 0.6, 1, members)


def load(count: int = 60) -> tuple[Any, Any]:
    return labeled(count, 0), TEST


def load_three() -> tuple[Any, Any, Any]:
    return labeled(60, 0), labeled(20, 2), TEST


def test_an_own_optimizer_resumes_bit_for_bit(tmp_path: Path) -> None:
    name = f"{__name__}:"
    content = {
        "name": "resumed",
        "data": {"factory": f"{name}load", "arguments": {"count": 60}, "task": "multilabel", "validation": 0.2},
        "model": {"factory": f"{name}network", "num_members": 2},
        "train": {"epochs": 4, "batch_size": 12, "optimizer": f"{name}Steps", "patience": 2},
        "sweep": {"diversities": [0.0, 0.5], "seeds": [0]},
        "checkpoint": {"steps": 4, "seconds": None},
    }
    Sweep(parse_experiment(content), tmp_path / "whole").run()
    asked = iter(range(100))
    for limit in (5, 15):
        with pytest.raises(Interrupted):
            Sweep(parse_experiment(content), tmp_path / "parts").run(stop=lambda limit=limit: next(asked) > limit)
    Sweep(parse_experiment(content), tmp_path / "parts").run()
    runs = [sorted((tmp_path / part / "runs").glob("*.json")) for part in ("whole", "parts")]
    assert len(runs[0]) == 2
    for one, other in zip(*runs, strict=True):
        first, second = (json.loads(file.read_text()) for file in (one, other))
        assert first["weights_sha256"] == second["weights_sha256"]
        assert first["history"] == second["history"]


TOML = """
name = "own"
[data]
{data}
task = "{task}"
validation = 0.2
[model]
factory = "torch.nn:Linear"
arguments = {{ in_features = {features}, out_features = {outputs} }}
num_members = 2
[train]
epochs = 1
batch_size = 8
metrics = ["torch.nn.functional:l1_loss"]
[sweep]
diversities = [0.0]
seeds = [0]
"""


@pytest.mark.parametrize(
    "kind", ["npz", "npz parts", "csv", "parquet", "two files", "three files", "factory", "three parts"]
)
def test_toml_files_name_data_of_every_kind(kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    task, features, outputs = "regression", 4, 1
    frame, data = table(60, 0)[["size", "color", "price"]], 'file = "mine.csv"\ntarget = "price"'
    if kind in ("npz", "npz parts"):
        x, y = TRAIN[0].numpy(), TRAIN[1].numpy()
        data, task, features, outputs = 'file = "mine.npz"', "multilabel", FEATURES, LABELS
        if kind == "npz":
            np.savez("mine.npz", x=x, labels=y)
            data += '\ntarget = "labels"'
        else:
            np.savez("mine.npz", x_train=x[:40], y_train=y[:40], x_test=x[40:], y_test=y[40:])
    elif kind == "csv":
        frame.to_csv("mine.csv", index=False)
    elif kind == "parquet":
        frame.to_parquet("mine.parquet")
        data = data.replace("csv", "parquet")
    elif kind == "two files":
        frame[:40].to_csv("mine.csv", index=False)
        frame[40:].to_csv("other.csv", index=False)
        data += '\ntest_file = "other.csv"'
    elif kind == "three files":
        for part, name in ((frame[:30], "mine"), (frame[30:40], "third"), (frame[40:], "other")):
            part.to_csv(f"{name}.csv", index=False)
        data += '\ntest_file = "other.csv"\nvalidation_file = "third.csv"'
    else:
        function = "load" if kind == "factory" else "load_three"
        data, task, features, outputs = f'factory = "{__name__}:{function}"', "multilabel", FEATURES, LABELS
    (tmp_path / "own.toml").write_text(
        TOML.format(data=data, task=task, features=features, outputs=outputs).replace(
            "torch.nn.functional:l1_loss", f"{__name__}:quadratic"
        )
    )
    if kind.startswith("three"):
        with pytest.raises(ConfigError, match=r"data.validation: expected no fraction, because .* has validation data"):
            Sweep(load_experiment("own.toml"), tmp_path / "out").run()
        own = tmp_path / "own.toml"
        own.write_text(own.read_text().replace("validation = 0.2", ""))
    assert not Sweep(load_experiment("own.toml"), tmp_path / "out").run()
    result = json.loads((tmp_path / "out" / "experiment.json").read_text())
    sizes = {"npz parts": (32, 8, 20), "two files": (32, 8, 20), "factory": (48, 12, 50)}
    sizes |= {"three files": (30, 10, 20), "three parts": (60, 20, 50)}
    assert tuple(result["data"][part] for part in ("train", "validation", "test")) == sizes.get(kind, (38, 10, 12))
    run = json.loads((tmp_path / "out" / "runs" / "main-l0-s0.json").read_text())
    assert ("macro_f1" if task == "multilabel" else "r2") in run["metrics"]["test"]
    assert "quadratic" in run["metrics"]["validation"]


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"optimizer": torch.optim.Adafactor}, "optimizer: Expected an elementwise optimizer .* but got Adafactor"),
        ({"optimizer": lambda params: 3}, "optimizer: Expected .* to return an optimizer, but it returned int."),
        ({"optimizer": torch.optim.SGD, "optimizer_arguments": {"lrate": 1}}, "optimizer: SGD failed with TypeError"),
        ({"metrics": lambda logits: 0}, r"positional argument.* function of logits \(K, N, C\) and target"),
        ({"metrics": lambda logits, target: logits}, "metrics: The metric 'lambda' failed with"),
        ({"metrics": torchmetrics.MeanMetric}, "metrics: expected a function or a metric object, but got the class"),
        ({"transform": lambda x: x + torch.rand(1)}, "The transform draws random numbers on test data"),
        ({"task": "regression", "label_smoothing": 0.1}, "`label_smoothing` needs classes"),
    ],
)
def test_bad_settings_are_refused_before_anything_is_written(
    change: dict[str, Any], message: str, tmp_path: Path
) -> None:
    with pytest.raises(ValueError, match=message) as error:
        ace.sweep(network, TRAIN, TEST, out=tmp_path / "out", **{"task": "multilabel", **SMALL, **change})
    assert "\n" not in str(error.value)
    assert not (tmp_path / "out").exists()


class Named(torch.utils.data.Dataset[Any]):
    """Items with named inputs, one of them token ids."""

    def __len__(self) -> int:
        return 60

    def __getitem__(self, index: int) -> dict[str, Any]:
        x, y = TRAIN
        return {"x": x[index].float(), "ids": (x[index] > 0).long(), "labels": y[index]}


class Embedded(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embedding, self.head = nn.Embedding(2, 3), nn.Linear(3 + FEATURES, LABELS)

    def forward(self, ids: Tensor, x: Tensor) -> Tensor:
        return self.head(torch.cat([self.embedding(ids).mean(-2), x], -1))


def shift(inputs: dict[str, Tensor], training: bool) -> dict[str, Tensor]:
    return {**inputs, "x": inputs["x"] + 0.1}


@pytest.mark.parametrize(
    "device",
    [
        "cpu",
        pytest.param("cuda", marks=pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")),
    ],
)
def test_named_inputs_and_token_ids_of_a_dataset(device: str) -> None:
    """In memory or read while training, bit for bit; on a GPU as on the CPU, to the rounding of float64."""
    options: dict[str, Any] = {**SMALL, "task": "multilabel", "validation": 0.2}
    frames = [
        ace.sweep(Embedded, Named(), Named(), transform=shift, stream=stream, device=place, **options).to_frame()
        for stream, place in ((False, device), (True, device), (True, "cpu"))
    ]
    scores = [frame.drop(columns=["seconds", "status"]).astype(float).to_numpy() for frame in frames]
    assert np.array_equal(scores[0], scores[1])
    np.testing.assert_allclose(scores[0], scores[2], atol=1e-6)  # scores are kept in float32
