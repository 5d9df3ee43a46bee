"""Sweeps in this process: trained runs, stored files, errors."""

import errno
import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.lab.sweeps.small_sweeps import leftovers, poison, run, small, stored_files
from torchace import _files as files
from torchace.lab.schema.results import GroupPlan, RunKey, RunResult
from torchace.lab.store import RunStore, RunStoreError
from torchace.lab.sweeps.callbacks import Callback
from torchace.lab.sweeps.config import ConfigError, load_experiment
from torchace.lab.sweeps.executor import Plan
from torchace.lab.sweeps.sweep import Sweep
from torchace.lab.training.checkpoint import CheckpointError
from torchace.lab.training.loop import Interrupted, Progress


class Heard(Callback):
    def __init__(self) -> None:
        self.jobs: list[str] = []
        self.counts: list[int] = []

    def on_plan(self, done: int, total: int) -> None:
        self.counts += [done, total]

    def on_group_start(self, job: GroupPlan) -> None:
        self.jobs.append(job.id)

    def on_group_step(self, job: GroupPlan, progress: Progress) -> None:
        assert progress.step <= progress.steps

    def on_group_end(self, job: GroupPlan, done: int) -> None:
        self.counts.append(done)


def run_recorded(directory: Path, **sections: Any) -> Heard:
    callback = Heard()
    Sweep(small(**sections), directory).run(callback)
    return callback


def after(count: int) -> Callable[[], bool]:
    """Says yes when asked for the last of so many times."""
    asked = iter([False] * (count - 1) + [True])
    return lambda: next(asked)


def test_every_run_is_written_down_once(tmp_path: Path) -> None:
    callback = run_recorded(tmp_path)
    assert callback.jobs == ["main-0"]
    assert callback.counts == [0, 4, 4]
    store = stored_files(tmp_path)
    names = [f"main-l{diversity}-s{seed}" for diversity in ("0", "0.5") for seed in (0, 1)]
    assert {name for name in store if "main" in name} == {
        *(f"runs/{name}.json" for name in names),
        *(f"{name}.safetensors" for name in names),
    }
    assert leftovers(tmp_path) == []
    one = store["runs/main-l0.5-s1.json"]
    assert (one["status"], one["steps"], one["job"], one["seed"], one["diversity"]) == (
        "finished",
        12,
        "main-0",
        1,
        0.5,
    )
    assert len(one["weights_sha256"]) == 64
    assert one["metrics"]["validation"] is None
    assert [e["step"] for e in one["history"]] == [4, 8, 12]
    files_before = {path: path.stat().st_mtime_ns for path in tmp_path.glob("runs/*")}
    assert run_recorded(tmp_path).counts == [4, 4]  # nothing to do
    assert {path: path.stat().st_mtime_ns for path in tmp_path.glob("runs/*")} == files_before


def test_a_validation_part_is_scored(tmp_path: Path) -> None:
    run(tmp_path, data={"validation": 0.25})
    store = stored_files(tmp_path)
    assert store["experiment.json"]["data"]["train"] == 150
    assert store["experiment.json"]["data"]["validation"] == 50
    scores = store["runs/main-l0-s0.json"]["metrics"]
    assert scores["validation"].keys() == scores["test"].keys()
    assert scores["validation"]["accuracy"] * 50 == pytest.approx(
        round(scores["validation"]["accuracy"] * 50), abs=1e-4
    )


def test_one_member_has_no_disagreement(tmp_path: Path) -> None:
    assert run(tmp_path, model={"num_members": 1}, sweep={"diversities": [0.0], "seeds": [0]}) == {}
    assert stored_files(tmp_path)["runs/main-l0-s0.json"]["status"] == "finished"


@pytest.mark.parametrize(
    ("kind", "model"),
    [
        ("shared", {"kind": "smoc"}),
        ("shared", {"kind": "branch", "at": "fc"}),
        ("exchanged", {}),
        ("exchanged", {"kind": "smoc"}),
        ("separate", {}),
    ],
)
def test_all_kinds_of_batches_and_models(kind: str, model: dict[str, Any], tmp_path: Path) -> None:
    diversities = [0.0] if kind == "separate" else [0.0, 0.5]
    failures = run(tmp_path, model=model, train={"batches": kind, "steps": 3}, sweep={"diversities": diversities})
    assert failures == {}
    assert stored_files(tmp_path)["runs/main-l0-s0.json"]["batches"] == kind


def test_groups_have_the_requested_size(tmp_path: Path) -> None:
    assert run_recorded(tmp_path, sweep={"group_size": 3}).jobs == ["main-0", "main-1"]
    assert [len(job.runs) for job in RunStore(tmp_path).groups()] == [3, 1]


def test_large_networks_are_trained_one_by_one_on_a_cpu(tmp_path: Path) -> None:
    model = {"kind": "smoc", "network": "resnet", "depth": 8, "width": 2}
    assert run_recorded(tmp_path, model=model, train={"steps": 2}).jobs == [f"main-{i}" for i in range(4)]


@pytest.mark.parametrize("model", [{"kind": "smoc"}, {"kind": "branch", "at": "fc"}, {"dropout": 0.2}], ids=str)
def test_small_networks_of_any_kind_are_trained_together(tmp_path: Path, model: dict[str, Any]) -> None:
    assert run_recorded(tmp_path, model=model, train={"steps": 2}).jobs == ["main-0"]


def test_arms_share_their_data(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from torchace.lab.sweeps import loaded_data as prepared

    loaded = []
    real = prepared.load
    monkeypatch.setattr(prepared, "load", lambda name: loaded.append(name) or real(name))
    arms = [{"name": "a"}, {"name": "b", "train": {"batches": "exchanged"}}, {"name": "c", "data": {"limit": 100}}]
    assert run_recorded(tmp_path, arms=arms, train={"steps": 2}).jobs == ["a-0", "b-0", "c-0"]
    assert loaded == ["digits", "digits"]


# -- extending a run directory ----------------------------------------------------------------------------------------


def test_more_seeds_train_only_the_new_ones(tmp_path: Path) -> None:
    run(tmp_path)
    before = {path: path.read_bytes() for path in tmp_path.glob("runs/*")}
    callback = run_recorded(tmp_path, sweep={"seeds": [0, 1, 2]})
    assert (callback.jobs, callback.counts) == (["main-1"], [4, 6, 6])
    assert {path: path.read_bytes() for path in before} == before
    experiment = stored_files(tmp_path)["experiment.json"]
    assert experiment["seeds"] == [0, 1, 2]


def test_another_diversity_trains_only_the_new_one_and_the_old_ones_stay(tmp_path: Path) -> None:
    run(tmp_path)
    callback = run_recorded(tmp_path, sweep={"diversities": [0.9]})
    assert (callback.jobs, callback.counts) == (["main-1"], [0, 2, 2])
    assert stored_files(tmp_path)["experiment.json"]["arms"][0]["diversities"] == [0.0, 0.5, 0.9]
    assert len(list(tmp_path.glob("runs/*.json"))) == 6


def test_a_new_seed_gives_the_same_result_as_in_a_separate_sweep(tmp_path: Path) -> None:
    run(tmp_path / "a")
    run(tmp_path / "a", sweep={"seeds": [2]})
    run(tmp_path / "b", sweep={"seeds": [2]})
    for name in ("runs/main-l0-s2.json", "runs/main-l0.5-s2.json"):
        ours, theirs = stored_files(tmp_path / "a")[name], stored_files(tmp_path / "b")[name]
        assert {**ours, "job": None} == {**theirs, "job": None}


def test_an_unfinished_group_is_trained_whole_even_if_fewer_runs_are_requested(tmp_path: Path) -> None:
    run(tmp_path / "a")
    with pytest.raises(Interrupted):
        run(tmp_path / "b", after(6))
    callback = run_recorded(tmp_path / "b", sweep={"seeds": [0]})
    assert (callback.jobs, callback.counts) == (["main-0"], [0, 4, 4])
    ours, theirs = stored_files(tmp_path / "a"), stored_files(tmp_path / "b")
    assert {name: value for name, value in ours.items() if "runs" in name} == {
        name: value for name, value in theirs.items() if "runs" in name
    }


def test_an_unfinished_group_without_requested_runs_is_not_trained(tmp_path: Path) -> None:
    with pytest.raises(Interrupted):
        run(tmp_path, after(18), sweep={"group_size": 2})  # six steps into the second of two jobs, λ = 0.5
    assert run_recorded(tmp_path, sweep={"group_size": 2, "diversities": [0.0]}).jobs == []
    assert [path.name for path in (tmp_path / "checkpoints").iterdir()] == ["main-1"]
    assert run_recorded(tmp_path, sweep={"group_size": 2}).jobs == ["main-1"]
    assert leftovers(tmp_path) == []


@pytest.mark.parametrize(
    ("sections", "key"),
    [
        ({"train": {"steps": 13}}, "train.steps = 12, but now it is 13"),
        ({"train": {"learning_rate": 0.02}}, "train.learning_rate"),
        ({"model": {"hidden": [4, 4]}}, "model.hidden"),
        ({"data": {"limit": 201}}, "data.limit"),
        ({"data": {"normalize": "standard"}}, "data.normalize"),
        ({"name": "other"}, "name = 'small'"),
        ({"arms": [{"name": "main"}]}, "arms.main.baseline"),
    ],
)
def test_another_configuration_is_refused(sections: dict[str, Any], key: str, tmp_path: Path) -> None:
    run(tmp_path)
    before = stored_files(tmp_path)
    with pytest.raises(RunStoreError, match=key):
        run(tmp_path, **sections)
    assert stored_files(tmp_path) == before


def test_titles_and_checkpoint_settings_may_change(tmp_path: Path) -> None:
    arms = [{"name": "a", "label": "one"}]
    run(tmp_path, arms=arms)
    arms[0]["label"] = "two"
    callback = run_recorded(
        tmp_path, arms=arms, title="T", description="D", checkpoint={"steps": 3}, paper={"table": "1"}
    )
    assert callback.jobs == []
    assert stored_files(tmp_path)["experiment.json"]["title"] == "T"


@pytest.mark.parametrize("text", ["{", '{"format": 1, "config": 3}', '{"format": 9}'])
def test_a_damaged_experiment_is_one_sentence(text: str, tmp_path: Path) -> None:
    run(tmp_path)
    (tmp_path / "experiment.json").write_text(text)
    with pytest.raises(RunStoreError, match=r"experiment.json") as caught:
        run(tmp_path)
    assert "\n" not in str(caught.value)


# -- interruptions ----------------------------------------------------------------------------------------------------


def test_interrupted_anywhere_and_resumed(tmp_path: Path) -> None:
    sections: dict[str, Any] = {"sweep": {"group_size": 2}, "train": {"steps": 6}, "data": {"validation": 0.2}}
    run(tmp_path / "a", **sections)
    interruptions = 0
    for _ in range(20):
        try:
            run(tmp_path / "b", after(3), **sections)
        except Interrupted:
            interruptions += 1
    assert interruptions == 5  # two steps at a time, twelve in all
    assert stored_files(tmp_path / "a") == stored_files(tmp_path / "b")
    assert leftovers(tmp_path / "b") == []


def test_many_runs_are_looked_up_in_linear_time(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    looks = 0
    is_finished = RunStore.is_finished

    def counted(self: RunStore, run: RunKey) -> bool:
        nonlocal looks
        looks += 1
        return is_finished(self, run)

    def skip(plan: Plan, group: GroupPlan, *args: Any) -> None:
        for one in group.runs:
            content: dict[str, Any] = {"run": one.id, "arm": one.arm, "diversity": one.diversity, "seed": one.seed}
            plan.store.write_result(RunResult(status="finished", seconds=1.0, **content), {})

    monkeypatch.setattr(RunStore, "is_finished", counted)
    monkeypatch.setattr("torchace.lab.sweeps.executor.train_group", skip)
    runs = 200
    experiment = load_experiment("digits", ["sweep.diversities=[0]", "sweep.group_size=1"], seeds=range(runs))
    assert Sweep(experiment, tmp_path).run() == {}
    assert looks <= 4 * runs
    assert json.loads((tmp_path / "experiment.json").read_text())["seconds"] == runs


def test_seconds_include_earlier_attempts(tmp_path: Path) -> None:
    with pytest.raises(Interrupted):
        run(tmp_path, after(6))
    spent = json.loads(next(tmp_path.glob("checkpoints/*/manifest.json")).read_text())["progress"]["seconds"]
    run(tmp_path)
    experiment = json.loads((tmp_path / "experiment.json").read_text())
    runs = [json.loads(path.read_text())["seconds"] for path in tmp_path.glob("runs/*.json")]
    assert sum(runs) > spent
    assert experiment["seconds"] == pytest.approx(sum(runs))


def test_a_deleted_result_is_computed_again(tmp_path: Path) -> None:
    run(tmp_path)
    before = stored_files(tmp_path)
    (tmp_path / "runs" / "main-l0.5-s1.json").unlink()
    callback = run_recorded(tmp_path)
    assert (callback.jobs, callback.counts) == (["main-0"], [3, 4, 4])
    assert stored_files(tmp_path) == before


def test_a_damaged_checkpoint_is_one_sentence_and_the_results_stay(tmp_path: Path) -> None:
    run(tmp_path / "a", sweep={"group_size": 2})
    with pytest.raises(Interrupted):
        run(tmp_path / "b", after(18), sweep={"group_size": 2})
    state = next((tmp_path / "b").glob("checkpoints/main-1/state-*"))
    state.write_bytes(state.read_bytes()[:-1] + b"?")
    with pytest.raises(CheckpointError, match=r"main-1 is damaged .* Remove that folder to restart its runs"):
        run(tmp_path / "b", sweep={"group_size": 2})
    for file in state.parent.iterdir():
        file.unlink()
    state.parent.rmdir()  # as it says
    run(tmp_path / "b", sweep={"group_size": 2})
    assert stored_files(tmp_path / "a") == stored_files(tmp_path / "b")


class Restarts(Callback):
    def __init__(self) -> None:
        self.jobs: list[str] = []

    def on_group_restart(self, job: GroupPlan) -> None:
        self.jobs.append(job.id)


@pytest.mark.parametrize(
    ("before", "now"),
    [
        ({"sweep": {"diversities": [0.9], "group_size": 1}}, {"sweep": {"diversities": [0.0, 0.9], "group_size": 1}}),
        ({"sweep": {"diversities": [0.5, 0.9]}}, {"sweep": {"diversities": [0.5]}}),
        ({"train": {"learning_rate": 0.02}}, {}),
    ],
)
def test_checkpoints_of_other_runs_are_not_used(before: dict[str, Any], now: dict[str, Any], tmp_path: Path) -> None:
    """As after the advice to remove a damaged `jobs.json`, or with a folder from another sweep."""
    with pytest.raises(Interrupted):
        run(tmp_path / "theirs", after(8), **before)
    run(tmp_path / "expected", **now)
    (tmp_path / "theirs" / "jobs.json").unlink()
    (tmp_path / "theirs" / "experiment.json").write_bytes((tmp_path / "expected" / "experiment.json").read_bytes())
    callback = Restarts()
    Sweep(small(**now), tmp_path / "theirs").run(callback)
    assert callback.jobs == ["main-0"]
    assert stored_files(tmp_path / "theirs") == stored_files(tmp_path / "expected")
    assert leftovers(tmp_path / "theirs") == []


def test_runs_resume_without_the_plan_file(tmp_path: Path) -> None:
    with pytest.raises(Interrupted):
        run(tmp_path, after(8))
    (tmp_path / "jobs.json").unlink()
    callback = Restarts()
    asked = 0

    def stop() -> bool:
        nonlocal asked
        asked += 1
        return False

    Sweep(small(), tmp_path).run(callback, stop)
    assert (callback.jobs, asked) == ([], 5)  # of 12 steps, 7 were made


@pytest.mark.parametrize("call", [2, 14, 33])
def test_a_full_disk_at_any_moment(call: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    sections: dict[str, Any] = {"sweep": {"group_size": 2}, "train": {"steps": 3}, "checkpoint": {"steps": 1}}
    run(tmp_path / "a", **sections)
    real, calls = os.fsync, 0

    def full(descriptor: int) -> None:
        nonlocal calls
        calls += 1
        if calls >= call:  # and it stays full
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        real(descriptor)

    with monkeypatch.context() as patch:
        patch.setattr(files.os, "fsync", full)
        with pytest.raises(OSError, match="No space left on device"):
            run(tmp_path / "b", **sections)
    run(tmp_path / "b", **sections)
    assert stored_files(tmp_path / "a") == stored_files(tmp_path / "b")
    assert leftovers(tmp_path / "b") == []


# -- failures ---------------------------------------------------------------------------------------------------------


def test_a_failed_run_leaves_the_others_bit_identical(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run(tmp_path / "a")
    poison(monkeypatch, 0.5, 1, member=1)
    failures = run(tmp_path / "b")
    assert [(r.diversity, r.seed, f.member, f.step) for r, f in failures.items()] == [(0.5, 1, 1, 0)]
    ours, theirs = stored_files(tmp_path / "a"), stored_files(tmp_path / "b")
    failed = theirs.pop("runs/main-l0.5-s1.json")
    assert (failed["status"], failed["metrics"], failed["weights_sha256"]) == ("failed", None, None)
    assert failed["history"][0]["train_cross_entropy"] is None
    del ours["runs/main-l0.5-s1.json"], ours["main-l0.5-s1.safetensors"]
    assert ours == theirs


def test_a_failed_run_is_not_tried_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    poison(monkeypatch, 0.5, 1, member=0)
    first = run(tmp_path)
    callback = Heard()
    assert Sweep(small(), tmp_path).run(callback) == first
    assert callback.jobs == []


def test_a_failure_survives_an_interruption(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    poison(monkeypatch, 0.5, 0, member=1)
    expected = run(tmp_path / "a")
    for _ in range(3):
        with pytest.raises(Interrupted):
            run(tmp_path / "b", after(4))
    assert run(tmp_path / "b") == expected
    assert stored_files(tmp_path / "a") == stored_files(tmp_path / "b")


def test_weights_that_overflow_in_the_last_step_are_a_failure(tmp_path: Path) -> None:
    train = {"steps": 1, "optimizer": "sgd", "learning_rate": 1e38, "momentum": 0.0}
    failures = run(tmp_path, train=train)
    assert {f.step for f in failures.values()} == {1}
    assert len(failures) == 4
    assert all(f.member is not None for f in failures.values())


# -- invalid experiments ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("sections", "words"),
    [
        ({"data": {"limit": 5000}}, "data.limit: expected at most 1297, the training samples of digits, but got 5000"),
        ({"data": {"limit": 10, "validation": 0.01}}, "data.validation"),
        ({"model": {"kind": "branch", "at": "nowhere"}}, "nowhere"),
        ({"model": {"kind": "smoc", "rank": 50}}, "rank"),
    ],
)
def test_incompatible_settings_are_refused_before_anything_is_written(
    sections: dict[str, Any], words: str, tmp_path: Path
) -> None:
    with pytest.raises((ConfigError, ValueError), match=words):
        run(tmp_path / "out", **sections)
    assert list(tmp_path.iterdir()) == []
