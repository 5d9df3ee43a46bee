"""Trackers show what the result files have."""

from __future__ import annotations

import json
import struct
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pandas as pd
import pytest

from tests.lab.cli.command_line import Invoke
from tests.lab.sweeps.small_sweeps import small
from torchace.lab.sweeps.callbacks import TRACKERS, make_callbacks
from torchace.lab.sweeps.sweep import Sweep
from torchace.lab.training.loop import Interrupted


def sweep(directory: Path, *trackers: str, stop: Callable[[], bool] = lambda: False) -> None:
    experiment = small(train={"steps": 12})
    Sweep(experiment, directory).run(make_callbacks(trackers, directory, experiment), stop)


def interrupt_and_resume(directory: Path, tracker: str) -> None:
    asked = iter([False] * 8 + [True])  # after two of three epochs; the checkpoint is written there
    with pytest.raises(Interrupted):
        sweep(directory, tracker, stop=lambda: next(asked))
    sweep(directory, tracker)


def expected_values(directory: Path) -> dict[tuple[str, int, str], float]:
    """Values by run, step and metric, from the result files."""
    found = {}
    for file in (directory / "runs").glob("*.json"):
        result = json.loads(file.read_text())
        for entry in result["history"]:
            found[result["run"], entry["step"], "train/cross_entropy"] = entry["train_cross_entropy"]
        for name, value in result["metrics"]["test"].items():
            if isinstance(value, float):
                found[result["run"], result["steps"], f"test/{name}"] = value
    assert len({run for run, *_ in found}) == 4
    return found


def test_csv_has_every_metric_once(tmp_path: Path) -> None:
    interrupt_and_resume(tmp_path, "csv")
    frame = pd.read_csv(tmp_path / "metrics.csv")
    assert not frame.duplicated(["run", "step", "metric"]).any()
    rows = zip(frame["run"], frame["step"], frame["metric"], frame["value"], strict=True)
    assert {(run, step, metric): value for run, step, metric, value in rows} == expected_values(tmp_path)
    assert set(frame["diversity"]) == {0.0, 0.5}
    assert set(frame["seed"]) == {0, 1}
    whole = (tmp_path / "metrics.csv").read_text()
    (tmp_path / "metrics.csv").write_text(whole[:-5])  # of a killed process
    experiment = small()
    tracker = TRACKERS["csv"](tmp_path, experiment)
    run = experiment.complete_arms()[0].runs([0])[0]
    tracker.log(run, 99, {"test/accuracy": 0.5})  # type: ignore[attr-defined]
    lines = (tmp_path / "metrics.csv").read_text().splitlines()
    assert lines[:-1] == whole.splitlines()[:-1]
    assert lines[-1] == "main-l0-s0,main,0.0,0,,,,99,test/accuracy,0.5"


@pytest.mark.extended
def test_tensorboard(tmp_path: Path) -> None:
    pytest.importorskip("tensorboard")
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    interrupt_and_resume(tmp_path, "tensorboard")
    found = {}
    for folder in (tmp_path / "tensorboard").iterdir():
        board = EventAccumulator(str(folder))
        board.Reload()
        for name in board.Tags()["scalars"]:
            if "running" not in name:
                found |= {(folder.name, entry.step, name): entry.value for entry in board.Scalars(name)}
    assert found == pytest.approx(expected_values(tmp_path), rel=1e-6)  # float32


@pytest.mark.extended
@pytest.mark.filterwarnings("default")
def test_mlflow(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    mlflow = pytest.importorskip("mlflow")
    monkeypatch.delenv("MLFLOW_TRACKING_URI", raising=False)
    interrupt_and_resume(tmp_path, "mlflow")
    client = mlflow.MlflowClient(f"sqlite:///{tmp_path / 'mlflow.db'}")
    runs = client.search_runs([client.get_experiment_by_name("small").experiment_id])
    assert len(runs) == 4  # a resumed run is one run
    found = {}
    for run in runs:
        assert run.info.status == "FINISHED"
        assert run.data.params["train.learning_rate"] == "0.01"
        assert run.data.params["diversity"] in ("0.0", "0.5")
        for name in run.data.metrics:
            for entry in client.get_metric_history(run.info.run_id, name):
                found[run.info.run_name, entry.step, name] = entry.value
    assert found == expected_values(tmp_path)


def leveldb_records(log: bytes) -> Iterator[bytes]:
    """Records of a LevelDB log: blocks of 32 KiB (the first has W&B's 7 bytes), chunks with checksum, length, type."""
    place, record = 0, b""
    while place < len(log):
        if (left := 32768 - (place + 7) % 32768) < 7:
            place += left
        length, kind = struct.unpack("<HB", log[place + 4 : place + 7])
        record += log[place + 7 : place + 7 + length]
        place += 7 + length
        if kind in (1, 4):  # whole, or the last part
            yield record
            record = b""


@pytest.mark.extended
@pytest.mark.filterwarnings("default")
def test_wandb_offline(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("wandb")
    from wandb.proto import wandb_internal_pb2

    monkeypatch.setenv("WANDB_MODE", "offline")
    sweep(tmp_path, "wandb")
    found: dict[tuple[str, int, str], float] = {}
    for file in (tmp_path / "wandb").glob("offline-run-*/*.wandb"):
        name = ""
        for data in leveldb_records(file.read_bytes()[7:]):  # after the magic number
            record = wandb_internal_pb2.Record()
            record.ParseFromString(data)
            if record.HasField("run"):
                name = record.run.display_name
            if record.HasField("history"):
                for item in record.history.item:
                    key = item.key or "/".join(item.nested_key)
                    if not key.startswith("_"):
                        found[name, record.history.step.num, key] = json.loads(item.value_json)
    assert found == expected_values(tmp_path)


@pytest.mark.parametrize("name", ["tensorboard", "mlflow", "wandb"])
def test_a_missing_package_is_one_sentence(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    for module in (name, f"torch.utils.{name}"):
        monkeypatch.setitem(sys.modules, module, None)
    with pytest.raises(ImportError, match=rf"pip install 'torchace\[{name}\]'"):
        make_callbacks([name], tmp_path, small())
    assert not list(tmp_path.iterdir())


def test_an_unknown_tracker_is_refused_before_training(tmp_path: Path, invoke: Invoke) -> None:
    code, _, err = invoke("run", "--out", tmp_path / "runs", "--tracker", "excel")
    assert code == 1
    assert f"one of the trackers {', '.join(TRACKERS)}, but got 'excel'." in err
    assert not (tmp_path / "runs").exists()
