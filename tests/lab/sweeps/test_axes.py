"""Sweeps over learning rate, weight decay and label smoothing."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from tests.lab.sweeps.small_sweeps import run, small
from torchace.lab.schema.results import RunKey, RunResult
from torchace.lab.store import RunStore, RunStoreError
from torchace.lab.sweeps.api import sweep
from torchace.lab.sweeps.config import ConfigError

RATES = {"learning_rate": [0.01, 0.03], "label_smoothing": [0.0, 0.1], "precision": "float64"}


def stored_runs(directory: Path) -> dict[str, RunResult]:
    files = (directory / "runs").glob("*.json")
    return {file.stem: RunResult.model_validate(json.loads(file.read_text())) for file in files}


def test_runs_of_all_axes_are_one_group_and_equal_those_alone(tmp_path: Path) -> None:
    run(tmp_path / "grid", train=RATES)
    store = RunStore(tmp_path / "grid")
    (group,) = store.groups()
    assert len(group.runs) == 16
    found = stored_runs(tmp_path / "grid")
    assert set(found) == {key.id for key in group.runs}
    assert "main-l0.5-s1-lr0.03-ls0.1" in found
    for key in group.runs:
        assert found[key.id].key == key
        assert key.settings == {"learning_rate": key.learning_rate, "label_smoothing": key.label_smoothing}
    assert len({result.weights_sha256 for result in found.values()}) == 16
    for rate, smoothing in ((0.01, 0.1), (0.03, 0.0)):
        folder = tmp_path / f"{rate}-{smoothing}"
        run(folder, train={**RATES, "learning_rate": rate, "label_smoothing": smoothing})
        for name, alone in stored_runs(folder).items():
            ours = found[f"{name}-lr{rate:g}-ls{smoothing:g}"]
            assert ours.scores["test"] == pytest.approx(alone.scores["test"], abs=1e-9)  # rounding, float64
            assert alone.key.settings == {}


def test_more_values_are_added_and_a_number_is_not_a_list(tmp_path: Path) -> None:
    run(tmp_path, train={"weight_decay": [0.0]})
    before = stored_runs(tmp_path)
    assert set(before) == {f"main-l{lam}-s{seed}-wd0" for lam in ("0", "0.5") for seed in (0, 1)}
    run(tmp_path, train={"weight_decay": [0.1, 0.0]})
    after = stored_runs(tmp_path)
    assert len(after) == 8
    assert {name: after[name] for name in before} == before
    (arm,) = RunStore(tmp_path).experiment().arms  # type: ignore[union-attr]
    assert arm.axes == {"weight_decay": (0.0, 0.1)}
    with pytest.raises(RunStoreError, match=r"train\.weight_decay = \[0\.1, 0\.0\], but now it is 0\.0"):
        run(tmp_path, train={"weight_decay": 0.0})


@pytest.mark.parametrize("values", [[], [0.1, 0.1], [0.1, -1.0], ["a"]])
def test_wrong_values_are_refused(values: list[float]) -> None:
    with pytest.raises(ConfigError, match=r"learning_rate"):
        small(train={"learning_rate": values})


def test_files_without_axes_are_those_of_earlier_versions(tmp_path: Path) -> None:
    assert RunKey("main", 0.5, 1).id == "main-l0.5-s1"
    assert RunKey("main", 0.5, 1, 1e-05).id == "main-l0.5-s1-lr1e-05"
    run(tmp_path)
    for file in [tmp_path / "jobs.json", *(tmp_path / "runs").glob("*.json")]:  # as earlier versions wrote them
        content = json.loads(file.read_text())
        for entry in [content, *(key for group in content.get("jobs", ()) for key in group["runs"])]:
            for name in ("learning_rate", "weight_decay", "label_smoothing", "sha256"):
                entry.pop(name, None)
        file.write_text(json.dumps(content))
    assert run(tmp_path) == {}
    assert len(stored_runs(tmp_path)) == 4


def rmsprop(parameters: Any, lr: float) -> torch.optim.Optimizer:
    return torch.optim.RMSprop(parameters, lr=2 * lr, alpha=0.9)


@pytest.mark.parametrize("optimizer", [torch.optim.RMSprop, rmsprop, "torch.optim:NAdam"])
def test_own_optimizers_and_early_stopping(optimizer: Any, tmp_path: Path) -> None:
    generator = torch.Generator().manual_seed(0)
    x, y = torch.randn(80, 4, generator=generator), torch.randint(3, (80,), generator=generator)
    options: dict[str, Any] = {
        "num_members": 2,
        "diversities": [0.4],
        "seeds": 1,
        "epochs": 3,
        "batch_size": 20,
        "optimizer": optimizer,
        "validation": 0.25,
        "patience": 2,
        "precision": "float64",
        "weight_decay": 0.1 if optimizer is not rmsprop else 0.0,
    }
    data = ((x[:60], y[:60]), (x[60:], y[60:]))
    together = sweep(lambda: nn.Linear(4, 3), *data, learning_rate=[0.01, 0.1], **options).to_frame()
    for rate in (0.01, 0.1):
        alone = sweep(lambda: nn.Linear(4, 3), *data, learning_rate=rate, **options).to_frame()
        ours = together[together.learning_rate == rate]
        assert ours.cross_entropy.tolist() == pytest.approx(alone.cross_entropy.tolist(), abs=1e-9)
    assert together.cross_entropy.nunique() == 2
    if optimizer is rmsprop:
        options["optimizer"] = lambda parameters: torch.optim.Adam(parameters, 0.1)
        with pytest.raises(ValueError, match=r"learning_rate need an optimizer with the argument `lr`"):
            sweep(lambda: nn.Linear(4, 3), *data, learning_rate=[0.01, 0.1], **options)
