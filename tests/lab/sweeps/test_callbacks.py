"""What a sweep tells other programs."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from torchace.lab.cli.app import main
from torchace.lab.sweeps.callbacks import EventLog

SMALL = ["--set", "train.epochs=2", "--set", "model.hidden=[4]", "--set", "sweep.diversities=[0, 0.5]", "--seeds", "2"]


def run(directory: Path, monkeypatch: pytest.MonkeyPatch, *options: str) -> int:
    monkeypatch.setattr("sys.argv", ["torchace", "run", "digits", "--out", str(directory), *SMALL, *options])
    with pytest.raises(SystemExit) as ended:
        main()
    return int(ended.value.code or 0)


def events(directory: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (directory / "log.jsonl").read_text("utf-8").splitlines()]


def test_every_sweep_has_a_log(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert run(tmp_path / "runs", monkeypatch) == 0
    found = events(tmp_path / "runs")
    names = [event["event"] for event in found]
    assert names[:2] == ["planned", "started"]
    assert names[-1] == "finished"
    assert names.count("run") == 4
    assert all("time" in event for event in found)
    for event in found:
        if event["event"] == "run":
            result = json.loads((tmp_path / "runs" / "runs" / f"{event['run']}.json").read_text())
            assert event["test"] == result["metrics"]["test"]
            assert event["status"] == "finished"
    assert run(tmp_path / "runs", monkeypatch) == 0  # nothing to do: said, and appended
    assert events(tmp_path / "runs")[: len(found)] == found
    assert events(tmp_path / "runs")[-1] == {**events(tmp_path / "runs")[-1], "event": "planned", "done": 4, "total": 4}


@pytest.mark.parametrize("torn", ['{"time": "2026-0', '{"ti', "x" * 200_000, ""])
def test_half_a_line_of_a_killed_process_is_removed(tmp_path: Path, torn: str) -> None:
    log = tmp_path / "log.jsonl"
    EventLog(tmp_path).on_plan(0, 4)
    before = log.read_text("utf-8")
    log.write_text(before + torn, "utf-8")
    again = EventLog(tmp_path)
    again.on_plan(1, 4)
    again.on_plan(2, 4)
    assert log.read_text("utf-8").startswith(before)
    assert [event["done"] for event in events(tmp_path)] == [0, 1, 2]
    log.write_text(torn, "utf-8")  # no whole line at all
    EventLog(tmp_path).on_plan(3, 4)
    assert [event["done"] for event in events(tmp_path)] == [3]


@pytest.mark.extended
def test_tensorboard_shows_training_and_scores(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("tensorboard")
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    assert run(tmp_path / "runs", monkeypatch, "--tensorboard") == 0
    results = sorted((tmp_path / "runs" / "runs").glob("*.json"))
    assert len(results) == 4
    for file in results:
        result = json.loads(file.read_text())
        board = EventAccumulator(str(tmp_path / "runs" / "tensorboard" / file.stem))
        board.Reload()
        (test,) = board.Scalars("test/cross_entropy")
        assert test.value == pytest.approx(result["metrics"]["test"]["cross_entropy"], rel=1e-6)  # float32
        epochs = [(entry.step, entry.value) for entry in board.Scalars("train/cross_entropy")]
        expected = [
            (entry["step"], pytest.approx(entry["train_cross_entropy"], rel=1e-6)) for entry in result["history"]
        ]
        assert epochs == expected


def test_without_tensorboard_it_is_one_sentence(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    import builtins

    real = builtins.__import__

    def missing(name: str, *args: Any, **kwargs: Any) -> Any:
        if name.startswith(("tensorboard", "torch.utils.tensorboard")):
            raise ImportError(name)
        return real(name, *args, **kwargs)

    monkeypatch.setattr(builtins, "__import__", missing)
    assert run(tmp_path / "runs", monkeypatch, "--tensorboard") == 1
    assert "pip install 'torchace[tensorboard]'" in capsys.readouterr().err
