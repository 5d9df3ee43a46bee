"""A fit of a table: it resumes after a kill at any point, and its directory is complete or missing."""

from __future__ import annotations

import errno
import json
import os
import shutil
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest
import torch
from hypothesis import given, settings
from safetensors.torch import load_file

from tests.any_table import AnyTable, any_table
from tests.lab.cli.command_line import folder_contents, houses, pets, write_table
from tests.lab.tables.small_fits import done, is_complete, job, read_untimed, weights_digest
from torchace.lab.data import DataError
from torchace.lab.data.folds import assign_folds, number_blocks
from torchace.lab.data.tables import read_table
from torchace.lab.store import RunStore, RunStoreError
from torchace.lab.tables.fit import TableFit
from torchace.lab.tables.model import TableModel
from torchace.lab.tables.training import TrainingError
from torchace.lab.training.loop import Interrupted, Progress
from torchace.lab.tuning.grid_search import GridSearch
from torchace.lab.tuning.search import SearchCallback, SearchStage

Kind = tuple[str, Callable[..., Any], str]
KINDS = [("pets.csv", pets, "pet"), ("houses.csv", houses, "price")]


@pytest.fixture
def data(tmp_path: Path) -> Path:
    return write_table(pets(), tmp_path / "pets.csv")


# -- output of a fit --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("name", "make", "target"), KINDS)
@pytest.mark.parametrize("precision", ["float64", "float32"])
def test_a_models_scores_equal_its_record(
    name: str, make: Callable[..., Any], target: str, precision: str, tmp_path: Path
) -> None:
    """The scores were computed before the scaling was folded into the weights, and before they were saved."""
    fit = job(write_table(make(80), tmp_path / name), target, tmp_path / "out", epochs=4, precision=precision)
    model, table = done(fit), fit.table
    assert is_complete(fit.out)
    assert folder_contents(tmp_path).keys() >= {name, "out"}
    assert not fit.work.exists()
    for part, rows in (("validation", table.rows["validation"]), ("test", table.rows["test"])):
        scores = model.evaluate(make(80).iloc[rows.numpy()]).metrics
        assert scores.keys() == model.record["scores"][part].keys()
        for key, value in scores.items():
            # rounding in float64, for numbers of at most 1e10
            assert value == pytest.approx(model.record["scores"][part][key], rel=1e-9, abs=1e-12), key


@pytest.mark.parametrize(("name", "make", "target"), KINDS)
def test_members_leave_out_folds_of_training_and_validation_rows(
    name: str, make: Callable[..., Any], target: str, tmp_path: Path
) -> None:
    """Validation scores are those of the members that left a row out; those of the test rows, of the saved model."""
    options = {"num_members": 5, "patience": 3, "epochs": 6, "diversity": 0.0}
    fit = job(write_table(make(300), tmp_path / name), target, tmp_path / "out", **options)
    model, table = done(fit), fit.table
    assert model.record["folds"] == 5
    assert model.record["temperature"] != 1 if target == "pet" else model.record["temperature"] == 1
    frame = make(300).iloc[table.rows["test"].numpy()]
    metric = "cross_entropy" if target == "pet" else "mse"
    scores = model.evaluate(frame).metrics
    assert scores[metric] == pytest.approx(model.record["scores"]["test"][metric], rel=1e-9)
    samples = torch.cat([table.train.x, table.validation.x])
    folds = assign_folds(number_blocks(samples), torch.cat([table.train.y, table.validation.y]), seed=fit.seed)
    folds = folds[len(table.train) :]
    frame = make(300).iloc[table.rows["validation"].numpy()]
    own = model.logits(frame)[folds, torch.arange(len(frame))]  # member k leaves out fold k
    y = model.encoding.schema.targets(frame)
    if target == "pet":
        expected = torch.nn.functional.cross_entropy(own, y)
    else:
        expected = (own.squeeze(1) - y).square().mean()
    assert model.record["scores"]["validation"][metric] == pytest.approx(float(expected), rel=1e-6)


@pytest.mark.parametrize(("num_members", "folds"), [(2, None), (5, 5)])
def test_a_weighted_training_stops_on_a_weighted_score(num_members: int, folds: int | None, tmp_path: Path) -> None:
    """The unweighted score gets worse from the first epoch on, since the weights move all rows toward one class."""
    draw = np.random.default_rng(0)
    x = draw.normal(size=400)
    frame = pd.DataFrame({"x": x, "y": np.where(x + 1.5 * draw.normal(size=400) > 0, "p", "n")})
    options = {"num_members": num_members, "hidden": (32,), "patience": 2, "epochs": 12, "class_weight": {"p": 7.0}}
    model = done(job(write_table(frame, tmp_path / "t.csv"), "y", tmp_path / "out", 0.0, **options))
    assert model.record["folds"] == folds
    assert model.record["best_epoch"] > 6
    assert model.predict(frame)["probability_p"].corr(frame["x"]) > 0.7


def test_result_files(data: Path, tmp_path: Path) -> None:
    fit = job(data, "pet", tmp_path / "out", epochs=5, patience=2, drop=("born",))
    model = done(fit)
    assert model.diversity == 0.5
    assert model.record["fit"] == fit.request()
    assert model.record["search"] is None
    assert model.record["rows"] == {"train": 36, "validation": 12, "test": 12}
    assert 1 <= model.record["best_epoch"] <= 5
    experiment = json.loads((tmp_path / "out" / "experiment.json").read_text())
    assert experiment["task"] == "classification"
    assert experiment["data"]["schema"]["target"]["name"] == "pet"
    assert [arm["role"] for arm in experiment["arms"]] == ["model"]
    assert experiment["arms"][0]["parameters"] == sum(p.numel() for p in model.ensemble.parameters())
    result = json.loads(next((tmp_path / "out" / "runs").glob("*.json")).read_text())
    assert result["metrics"]["test"] == model.record["scores"]["test"]
    assert [entry["epoch"] for entry in result["history"]] == list(range(1, len(result["history"]) + 1))


def test_contested_rows_are_those_of_the_file(tmp_path: Path) -> None:
    frame = pets(100)
    fit = job(write_table(frame, tmp_path / "pets.csv"), "pet", tmp_path / "out", num_members=5)
    model = done(fit)
    arrays = load_file(next((fit.out / "runs").glob("*.safetensors")))
    assert len(arrays["disputed_row"]) > 3
    rows = frame.iloc[arrays["disputed_row"].numpy() - 1]
    assert model.encoding.schema.targets(rows).equal(arrays["disputed_target"])
    assert model.logits(rows).argmax(2).T.equal(arrays["disputed_votes"])


def test_no_test_rows_no_test_findings(data: Path, tmp_path: Path) -> None:
    model = done(job(data, "pet", tmp_path / "out", None, test=0.0))
    assert list(model.record["scores"]) == ["validation"]
    assert model.record["search"]["gain"] is None or model.record["search"]["gain"]["split"] == "validation"
    result = json.loads(next((tmp_path / "out" / "runs").glob("*.json")).read_text())
    assert result["metrics"]["test"] is None


@pytest.mark.parametrize(
    ("kind", "options"),
    [
        (0, {"num_members": 1, "hidden": ()}),
        (1, {"hidden": (4, 3, 2), "batches": "exchanged", "batch_size": 7, "diversity": 1.0}),
        (0, {"batch_size": 1, "patience": 1, "diversity": 0.0}),
        (1, {"seed": 2**40}),
        (1, {"diversity": None, "num_members": 1}),
    ],
    ids=str,
)
def test_plans_of_every_kind(kind: int, options: dict[str, Any], tmp_path: Path) -> None:
    name, make, target = KINDS[kind]
    fit = job(write_table(make(), tmp_path / name), target, tmp_path / "out", **options)
    predicted = done(fit).predict(make())
    assert predicted.select_dtypes("number").notna().all(axis=None)


def test_the_same_table_in_any_file_gives_the_same_model(tmp_path: Path) -> None:
    _, make, target = KINDS[0]
    hashes = set()
    for suffix in (".csv", ".parquet", ".npz"):
        out = tmp_path / suffix[1:]
        done(job(write_table(make(), tmp_path / f"table{suffix}"), target, out, epochs=3))
        hashes.add(weights_digest(out))
    assert len(hashes) == 1


@pytest.mark.usefixtures("always_searched")
@pytest.mark.parametrize(("name", "make", "target", "diversity"), [(*KINDS[0], None), (*KINDS[1], 0.5)])
def test_test_rows_affect_only_the_scores(
    diversity: float | None, name: str, make: Callable[..., Any], target: str, tmp_path: Path
) -> None:
    part = np.array(["train", "train", "train", "validation", "test"])[np.arange(60) % 5]
    kept, other = make(part=part), make(part=part)
    tested = part == "test"
    column = "age" if target == "pet" else "area"
    other.loc[tested, column] = 1e6
    other.loc[tested, target] = np.roll(other.loc[tested, target].to_numpy(), 3)
    models = [
        done(job(write_table(frame, tmp_path / name), target, tmp_path / f"out{i}", diversity, split_column="part"))
        for i, frame in enumerate((kept, other))
    ]
    assert models[0].diversity == models[1].diversity
    assert models[0].encoding == models[1].encoding
    assert weights_digest(tmp_path / "out0") == weights_digest(tmp_path / "out1")
    assert models[0].record["scores"]["validation"] == models[1].record["scores"]["validation"]
    assert models[0].record["scores"]["test"] != models[1].record["scores"]["test"]


@pytest.mark.usefixtures("always_searched")
def test_a_given_diversity_is_not_searched(data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def searched(*args: Any, **options: Any) -> None:
        raise AssertionError("searched")

    monkeypatch.setattr(GridSearch, "run", searched)
    model = done(job(data, "pet", tmp_path / "out", 0.3))
    assert (model.diversity, model.record["search"]) == (0.3, None)
    with pytest.raises(AssertionError, match="searched"):
        done(job(data, "pet", tmp_path / "other", None))


@pytest.mark.usefixtures("always_searched")
def test_a_searched_diversity_is_the_one_that_is_trained(data: Path, tmp_path: Path) -> None:
    searched = job(data, "pet", tmp_path / "out", None, epochs=3)
    model = done(searched)
    assert model.diversity == model.record["search"]["chosen"]
    assert searched.seed not in model.record["search"]["seeds"]
    given_ = job(data, "pet", tmp_path / "given", model.diversity, epochs=3)
    done(given_)
    assert weights_digest(tmp_path / "out") == weights_digest(tmp_path / "given")


@pytest.mark.usefixtures("always_searched")
def test_a_recorder_receives_all_events(data: Path, tmp_path: Path) -> None:
    class Recorder(SearchCallback):
        def __init__(self) -> None:
            self.stages: list[tuple[int, str, float]] = []
            self.steps: list[Progress] = []

        def on_search(self, stage: SearchStage, fraction: float) -> None:
            self.stages.append((stage.number, stage.purpose, fraction))

        def on_step(self, progress: Progress) -> None:
            self.steps.append(progress)

    recorder, fit = Recorder(), job(data, "pet", tmp_path / "out", None, epochs=3)
    with fit.lock():
        fit.train(recorder)
    finished = dict.fromkeys(stage[:2] for stage in recorder.stages if stage[2] == 1.0)
    assert next(iter(finished)) == (1, "search")
    assert recorder.steps[-1].step == recorder.steps[-1].steps


# -- interruptions ----------------------------------------------------------------------------------------------------


class StopAfter:
    """Says yes when it has been asked so many times."""

    def __init__(self, times: int) -> None:
        self.left = times

    def __call__(self) -> bool:
        self.left -= 1
        return self.left < 0


@pytest.mark.usefixtures("always_searched")
@pytest.mark.parametrize(("name", "make", "target", "diversity"), [(*KINDS[0], None), (*KINDS[1], 0.5)])
def test_repeated_interruptions_do_not_change_the_result(
    diversity: float | None, name: str, make: Callable[..., Any], target: str, tmp_path: Path
) -> None:
    path = write_table(make(), tmp_path / name)
    options: dict[str, Any] = {"epochs": 5, "batch_size": 12, "patience": 2}
    for out in ("out", "stopped"):
        fit = job(path, target, tmp_path / out / "model", diversity, **options)
        stops = 0
        while out == "stopped" and not (fit.work / "model").exists():
            with fit.lock():
                try:
                    fit.train(stop=StopAfter(7))
                except Interrupted:
                    stops += 1
            assert not fit.out.exists()
        done(fit)
        assert is_complete(fit.out)
        assert stops > 0 or out == "out"
    assert read_untimed(tmp_path / "out" / "model") == read_untimed(tmp_path / "stopped" / "model")


def _refusal(work: Callable[[], object], *kinds: type[Exception]) -> str | None:
    """Return the message of an expected error, or None."""
    try:
        work()
    except kinds as error:
        return str(error)
    return None


class Killed(BaseException):
    """Simulates a killed process, except that `finally` blocks run."""


def exit_at_call(monkeypatch: pytest.MonkeyPatch, module: Any, name: str, call: int, after: bool) -> None:
    """The process ends right before or after a certain call."""
    real, calls = getattr(module, name), 0

    def wrapped(*args: Any, **options: Any) -> Any:
        nonlocal calls
        calls += 1
        if calls == call and not after:
            raise Killed
        result = real(*args, **options)
        if calls == call:
            raise Killed
        return result

    monkeypatch.setattr(module, name, wrapped)


@pytest.mark.extended
@pytest.mark.parametrize("after", [False, True], ids=["before", "after"])
@pytest.mark.parametrize(("module", "name"), [(os, "rename"), (os, "replace"), (shutil, "rmtree")])
def test_killed_at_every_file_operation(module: Any, name: str, after: bool, data: Path, tmp_path: Path) -> None:
    expected = job(data, "pet", tmp_path / "uninterrupted" / "out")
    done(expected)
    deaths = 0
    for call in range(1, 30):
        fit = job(data, "pet", tmp_path / str(call) / "out")
        with pytest.MonkeyPatch.context() as patch:
            exit_at_call(patch, module, name, call, after)
            try:
                done(fit)
            except Killed:
                deaths += 1
        died = deaths == call
        assert is_complete(fit.out) or died
        if not fit.is_finished():
            done(fit)
        fit.remove_work()
        assert is_complete(fit.out)
        assert read_untimed(fit.out) == read_untimed(expected.out)
        assert [path.name for path in fit.out.parent.iterdir()] == ["out"]
        if not died:
            break
    assert deaths == call - 1 > 0


def test_partial_files_of_a_killed_process_are_removed(data: Path, tmp_path: Path) -> None:
    fit = job(data, "pet", tmp_path / "out")
    with fit.lock():
        fit.train()
    (fit.model / "runs" / ".model.json.1.partial").write_text("{")
    (fit.model / "report").mkdir()
    (fit.model / "report" / ".index.html.x1y2").write_text("<")
    done(fit)
    assert is_complete(fit.out)
    assert [path.name for path in tmp_path.iterdir() if path.name != data.name] == ["out"]


def test_a_process_that_died_at_its_very_start(data: Path, tmp_path: Path) -> None:
    fit = job(data, "pet", tmp_path / "out")
    fit.work.mkdir()
    (fit.work / "lock").write_text("123")
    (fit.work / ".fit.json.123.partial").write_text('{"requ')
    done(fit)
    assert is_complete(fit.out)


@pytest.mark.usefixtures("always_searched")
def test_a_full_disk_keeps_finished_work(data: Path, tmp_path: Path) -> None:
    fit = job(data, "pet", tmp_path / "out", None)
    for room in range(2, 60, 6):
        with pytest.MonkeyPatch.context() as patch:
            calls, real = 0, os.fsync

            def full(descriptor: int, room: int = room, real: Any = real) -> None:
                nonlocal calls
                calls += 1
                if calls > room:
                    raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
                real(descriptor)

            patch.setattr(os, "fsync", full)
            refused = _refusal(lambda: done(fit), OSError, ValueError)
        if refused is None or fit.is_finished():
            break
        assert "No space left" in refused
    assert is_complete(fit.out)
    uninterrupted = job(data, "pet", tmp_path / "uninterrupted" / "out", None)
    done(uninterrupted)
    assert read_untimed(fit.out) == read_untimed(uninterrupted.out)


# -- paths ------------------------------------------------------------------------------------------------------------


def test_a_finished_model_is_recognized(data: Path, tmp_path: Path) -> None:
    fit = job(data, "pet", tmp_path / "out")
    assert not fit.is_finished()
    done(fit)
    assert fit.is_finished()
    assert job(data, "pet", tmp_path / "out").is_finished()


@pytest.mark.parametrize(
    "other", [{"diversity": 0.4}, {"diversity": None}, {"epochs": 2}, {"hidden": (5,)}, {"seed": 1}, {"drop": ("age",)}]
)
def test_other_settings_are_refused(other: dict[str, Any], data: Path, tmp_path: Path) -> None:
    fit = job(data, "pet", tmp_path / "out")
    done(fit)
    (name,) = other
    with pytest.raises(RunStoreError, match=rf"out holds another model \({name} was .* and is now .*\)\. Replace it"):
        job(data, "pet", tmp_path / "out", **other).is_finished()
    unfinished = job(data, "pet", tmp_path / "unfinished")
    with unfinished.lock():
        pass
    before = folder_contents(tmp_path)
    with pytest.raises(RunStoreError, match=rf"unfinished\.work holds another unfinished fit \({name} was"):
        done(job(data, "pet", tmp_path / "unfinished", **other))
    assert folder_contents(tmp_path) == before


def test_other_data_under_the_same_name_are_refused(data: Path, tmp_path: Path) -> None:
    done(job(data, "pet", tmp_path / "out"))
    write_table(pets(seed=1), data)
    with pytest.raises(RunStoreError, match=r"holds another model \(the data file has changed\)"):
        job(data, "pet", tmp_path / "out").is_finished()


def test_two_at_once_are_refused(data: Path, tmp_path: Path) -> None:
    fit = job(data, "pet", tmp_path / "out")
    with fit.lock(), pytest.raises(RunStoreError, match=f"Process {os.getpid()} is using .*out.work"):
        done(job(data, "pet", tmp_path / "out"))


@pytest.mark.parametrize("name", ["thesis.tex", "search"])
def test_foreign_working_directory_is_not_touched(name: str, data: Path, tmp_path: Path) -> None:
    fit = job(data, "pet", tmp_path / "out")
    (fit.work / name).mkdir(parents=True)
    (fit.work / name / "notes").write_text("!")
    before = folder_contents(tmp_path)
    with pytest.raises(
        RunStoreError, match=f"out.work, the working directory of this fit, already holds other files .'{name}'"
    ):
        done(fit)
    fit.remove_work()
    assert folder_contents(tmp_path) == before


def test_another_fits_working_directory_is_not_cleared(data: Path, tmp_path: Path) -> None:
    with job(data, "pet", tmp_path / "out", epochs=2).lock():
        pass
    before = folder_contents(tmp_path)
    job(data, "pet", tmp_path / "out").remove_work()
    assert folder_contents(tmp_path) == before


@pytest.mark.parametrize("content", ["", "[]"])
def test_a_damaged_record_of_the_request_is_refused(content: str, data: Path, tmp_path: Path) -> None:
    fit = job(data, "pet", tmp_path / "out")
    fit.work.mkdir()
    (fit.work / "fit.json").write_text(content)
    with pytest.raises(RunStoreError, match=r"is damaged|was not written by"):
        done(fit)


def test_an_empty_directory_is_taken(data: Path, tmp_path: Path) -> None:
    (tmp_path / "out").mkdir()
    done(job(data, "pet", tmp_path / "out"))
    assert is_complete(tmp_path / "out")


def test_a_link_is_refused_at_once(data: Path, tmp_path: Path) -> None:
    """A directory cannot be renamed to a link in the end."""
    (tmp_path / "empty").mkdir()
    (tmp_path / "out").symlink_to("empty")
    with pytest.raises(RunStoreError, match="out already holds other files"):
        job(data, "pet", tmp_path / "out").is_finished()


def test_a_file_system_that_cannot_be_written(data: Path, tmp_path: Path) -> None:
    """A read-only mount stops root too."""
    disk = tmp_path / "disk"
    disk.mkdir()
    command = ["mount", "-t", "tmpfs", "-o", "ro", "tmpfs", str(disk)]
    if subprocess.run(command, capture_output=True, check=False).returncode:
        pytest.skip("needs the right to mount")
    try:
        with pytest.raises(RunStoreError, match=r"Cannot write to .*disk/out\.work: Read-only file system"):
            done(job(data, "pet", disk / "out"))
    finally:
        subprocess.run(["umount", "-l", str(disk)], check=True)


@pytest.mark.parametrize("diversity", [0.5, None])
def test_a_training_that_fails_is_one_sentence(diversity: float | None, data: Path, tmp_path: Path) -> None:
    fit = job(data, "pet", tmp_path / "out", diversity, learning_rate=1e300, epochs=3)
    for _ in range(2):  # it stays so
        with pytest.raises(TrainingError, match=r"^Training \(λ=\S+, seed 0.*\) ended at step .*\. Try a sm"):
            done(fit)
        assert not fit.out.exists()


def test_a_damaged_checkpoint_is_one_sentence(data: Path, tmp_path: Path) -> None:
    fit = job(data, "pet", tmp_path / "out", epochs=5)
    with fit.lock(), pytest.raises(Interrupted):
        fit.train(stop=StopAfter(2))
    state = next((fit.work / "checkpoints" / "model-0.5").glob("state-*"))
    state.write_bytes(state.read_bytes()[:-1])
    with pytest.raises(ValueError, match=r"The checkpoint in .*model-0.5 is damaged .* Remove that folder"):
        done(fit)


def test_only_its_own_lock_is_needed(data: Path, tmp_path: Path) -> None:
    """Fits in one folder do not disturb each other."""
    one, other = (job(data, "pet", tmp_path / name) for name in ("one", "other"))
    with RunStore(one.work).lock():
        done(other)
    assert is_complete(other.out)


# -- any table --------------------------------------------------------------------------------------------------------


@pytest.mark.extended
@given(any_table())
@settings(max_examples=440)
def test_any_table_is_fitted_or_refused_in_one_sentence(
    tmp_path_factory: pytest.TempPathFactory, table: AnyTable
) -> None:
    folder = tmp_path_factory.mktemp("any")
    try:
        path = table.write(folder)
        before = folder_contents(folder)
        out = folder / "out"
        sentence = _refusal(lambda: done(job(path, table.target, out, task=table.task)), DataError, TrainingError)
        if sentence is not None:
            assert "\n" not in sentence
            assert sentence.endswith(".")
            assert len(sentence) < 700
            assert folder_contents(folder) == before or sentence.startswith("Training (")
            return
        fit = job(path, table.target, out, task=table.task)
        assert is_complete(out)
        assert fit.is_finished()
        _check_predictions(TableModel.load(out), fit, read_table(path))
    finally:
        shutil.rmtree(folder)


def _check_predictions(model: TableModel, fit: TableFit, frame: Any) -> None:
    predicted, scores = model.predict(frame), model.evaluate(frame).metrics
    assert len(predicted) == len(frame)
    if model.is_classifier:
        probs = predicted[[name for name in predicted if name.startswith("probability_")]].to_numpy()
        assert (probs >= 0).all()
        np.testing.assert_allclose(probs.sum(1), 1, rtol=0, atol=1e-12)
        classes = fit.table.schema.target.classes
        assert predicted["prediction"].tolist() == [classes[code] for code in probs.argmax(1)]
        assert 0 <= scores["accuracy"] <= 1
    else:
        assert np.isfinite(predicted.to_numpy()).all()
        assert scores["mse"] >= 0
    again = TableModel.load(fit.out).predict(frame)
    assert again.equals(predicted)
    assert torch.equal(
        fit.table.encoding.encoder()(model.encoding.matrix(frame))[fit.table.rows["test"]], fit.table.test.x
    )
