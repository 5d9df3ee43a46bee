"""The commands for tables: output, files and one-sentence errors."""

from __future__ import annotations

import dataclasses
import html
import inspect
import json
import os
import re
import shlex
import shutil
import signal
import sys
import tempfile
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
import pandas as pd
import pytest
import torch
from hypothesis import HealthCheck, given, settings

from tests.any_table import AnyTable, any_table
from tests.lab.cli.command_line import (
    TINY,
    Invoke,
    assert_one_sentence,
    fake_report,
    folder_contents,
    houses,
    pets,
    write_table,
)
from torchace.lab.cli import table_commands
from torchace.lab.store import RunStore, write_record
from torchace.lab.tables import training
from torchace.lab.tables.fit import TableFit
from torchace.lab.tables.model import TableModel
from torchace.lab.tables.table import TableSettings, load_table
from torchace.lab.training.loop import Interrupted
from torchace.lab.training.members import MemberPlan
from torchace.models import mlp
from torchace.nn import Ensemble
from torchace.saving import save_model
from torchace.sklearn import ACEClassifier, NCLRegressor


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty folder to work in, with two tables."""
    folder = tmp_path / "work"
    folder.mkdir()
    monkeypatch.chdir(folder)
    write_table(pets(), folder / "pets.csv")
    write_table(houses(), folder / "houses.csv")
    return folder


def fitted(data: Path, target: str, out: Path, **settings: Any) -> Path:
    """A model, as the command makes it, but for the report."""
    wanted = TableSettings((target,), **settings)
    table = load_table(data, wanted)
    plan = MemberPlan(table.task, num_members=2, hidden=(4,), epochs=1)
    job = TableFit(table, plan, 0.5, out, baselines=False)
    with job.lock():
        job.train()
        fake_report(job.model)
        job.publish()
    return out


# -- errors: one sentence, no output ----------------------------------------------------------------------------------


def text(frame: pd.DataFrame) -> str:
    return frame.to_csv(index=False)


def change_cell(frame: pd.DataFrame, column: str, row: int, value: object) -> pd.DataFrame:
    """A table with another value in one row, counted from 1."""
    frame = frame.astype({column: object})
    frame.loc[row - 1, column] = value
    return frame


ROWS = pets(24)
TABLES: dict[str, str | bytes] = {
    "good.csv": text(ROWS),
    "text_in_age.csv": text(change_cell(ROWS, "age", 11, "young")),
    "unseen.csv": text(change_cell(ROWS, "pet", 13, "axolotl")),
    "no_fur.csv": text(ROWS.drop(columns="fur")),
    "empty.csv": "",
    "split.csv": text(ROWS.assign(part=["train", "validation", "test"] * 8, wrong=["train", "tset"] * 12)),
    "a_file": "in the way",
}


@pytest.fixture(scope="module")
def bad_place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Everything that is wrong, in one folder; no test may change it."""
    folder = tmp_path_factory.mktemp("bad")
    for name, content in TABLES.items():
        (folder / name).write_bytes(content.encode() if isinstance(content, str) else content)
    (folder / "folder.csv").mkdir()
    os.mkfifo(folder / "pipe.csv")
    fitted(folder / "good.csv", "pet", folder / "model")
    fitted(write_table(houses(24), folder / "houses.csv"), "price", folder / "regressor")
    save_model(folder / "plain", Ensemble([mlp(3, 4, 2)]))
    save_model(folder / "claims", Ensemble([mlp(3, 4, 2)]), extra={"encoding": {"version": 1}})
    shutil.copytree(folder / "model", folder / "flipped")
    weights = bytearray((folder / "flipped" / "weights.safetensors").read_bytes())
    weights[-3] ^= 1
    (folder / "flipped" / "weights.safetensors").write_bytes(weights)
    (folder / "occupied").mkdir()
    (folder / "occupied" / "thesis.tex").write_text("years of work")
    (folder / "mine.work").mkdir()
    (folder / "mine.work" / "thesis.tex").write_text("years of work")
    (folder / "dangling").symlink_to("nowhere")
    return folder


FIT = ("fit", "good.csv", "--target", "pet")
TUNE = ("tune", "good.csv", "--target", "pet")


def fit_args(data: str, *more: str, target: str = "pet") -> tuple[str, ...]:
    return ("fit", data, "--target", target, *more)


REFUSED: dict[str, tuple[tuple[str, ...], tuple[str, ...]]] = {
    # the table
    "unknown target": (fit_args("good.csv", target="pat"), ("'pat'", "did you mean 'pet'?", "'age'")),
    "no target": (("fit", "good.csv"), ("--target",)),
    "a target twice": (fit_args("houses.csv", "--target", "price", target="price"), ("'price'", "twice")),
    "a second target of texts": (fit_args("good.csv", "--target", "fur", target="age"), ("'fur'", "numbers")),
    "several targets as classes": (
        fit_args("houses.csv", "--target", "area", "--task", "classification", target="price"),
        ("Several targets", "regression"),
    ),
    "text among numbers": (fit_args("text_in_age.csv", "--number", "age"), ("'age'", "row 11", "'young'")),
    "dropped column unknown": (fit_args("good.csv", "--drop", "color"), ("'color'",)),
    "number and category": (fit_args("good.csv", "--number", "age", "--category", "age"), ("'age'",)),
    # the parts
    "split column unknown": (fit_args("split.csv", "--split-column", "prat"), ("'prat'", "'part'")),
    "shares of everything": ((*FIT, "--validation", "0.9", "--test", "0.2"), ("--validation", "0.9", "0.2")),
    # the file
    "empty file": (fit_args("empty.csv"), ("empty.csv", "has no columns")),
    "missing file": (fit_args("god.csv"), ("god.csv", "did you mean 'good.csv'?")),
    "file name too long": (fit_args("x" * 300 + ".csv"), ("File name too long",)),
    # options
    "λ above 1": ((*FIT, "--diversity", "1.4"), ("--diversity", "1.4", "[0, 1]")),
    "λ a word": ((*FIT, "--diversity", "much"), ("--diversity", "'much'", "auto")),
    "unknown task": ((*FIT, "--task", "clustering"), ("--task", "'clustering'", "classification")),
    "no members": ((*FIT, "--num-members", "0"), ("--num-members",)),
    "hidden 0": ((*FIT, "--hidden", "0"), ("--hidden", "but got 0")),
    "hidden words": ((*FIT, "--hidden", "a,b"), ("--hidden", "'a,b'")),
    "learning rate infinite": ((*FIT, "--learning-rate", "inf"), ("--learning-rate", "inf")),
    "separate batches": ((*FIT, "--batches", "separate", "--diversity", "0.5"), ("λ > 0", "'separate'", "exchanged")),
    "a number of kinds of members": ((*FIT, "--members", "5"), ("--num-members 5",)),
    "unknown members": ((*FIT, "--members", "twin"), ("--members", "'twin'", "'shared'")),
    "half precision": ((*FIT, "--precision", "half"), ("--precision", "'half'", "float32")),
    "seed beyond bounds": ((*FIT, "--seed", "9" * 20), ("--seed",)),
    "unknown device": ((*FIT, "--device", "tpu"), ("'tpu'",)),
    "a GPU that is not there": ((*FIT, "--device", "cuda:99"), ("'cuda:99'",)),
    "unknown option": ((*FIT, "--lambda", "0.5"), ("--lambda",)),
    "no file": (("fit", "--target", "pet"), ("DATA",)),
    # where the model goes
    "out is a file": ((*FIT, "--out", "a_file"), ("a_file",)),
    "out in a file": ((*FIT, *TINY, "--out", "a_file/model"), ("a_file/model",)),
    "output directory without write permission": ((*FIT, *TINY, "--out", "/proc/model"), ("/proc/model",)),
    "out too long": ((*FIT, *TINY, "--out", "x" * 300), ("File name too long",)),
    "out holds something else": ((*FIT, *TINY, "--out", "occupied"), ("occupied", "other files")),
    "out holds another model": ((*FIT, *TINY, "--out", "regressor"), ("another model", "target was", "--overwrite")),
    "out is a dangling link": ((*FIT, *TINY, "--out", "dangling"), ("dangling",)),
    "out is here": ((*FIT, *TINY, "--out", "."), ("'.'",)),
    "working directory of another fit": ((*FIT, *TINY, "--out", "mine"), ("mine.work", "other files")),
    # tune
    "tune: storage without trials": ((*TUNE, "--storage", "sqlite:///s.db"), ("--storage", "--trials")),
    "tune: storage of no driver": ((*TUNE, "--trials", "1", "--storage", "foo://bar"), ("foo://bar",)),
    "tune: storage nowhere": ((*TUNE, "--trials", "1", "--storage", "sqlite:////proc/x/s.db"), ("/proc/x/s.db",)),
    "tune: too many seeds": ((*TUNE, "--seeds", "501"), ("500", "501")),
    "tune: out is a file": ((*TUNE, "--out", "a_file"), ("a_file",)),
    "tune: out holds something else": ((*TUNE, "--out", "occupied"), ("occupied", "other files")),
    # evaluate
    "evaluate: no model": (("evaluate", "nowhere", "good.csv"), ("nowhere",)),
    "evaluate: a class never seen": (("evaluate", "model", "unseen.csv"), ("'axolotl'", "Row 13", "'cat'")),
    "evaluate: out is the data": (("evaluate", "model", "good.csv", "--out", "good.csv"), ("good.csv",)),
    "evaluate: out in the model": (
        ("evaluate", "model", "good.csv", "--out", "model/manifest.json"),
        ("model/manifest.json",),
    ),
    # predict
    "predict: no model": (("predict", "nowhere", "good.csv", "--out", "p.csv"), ("nowhere",)),
    "predict: no out": (("predict", "model", "good.csv"), ("--out",)),
    "predict: no column": (("predict", "model", "no_fur.csv", "--out", "p.csv"), ("'fur'",)),
    "predict: unknown suffix": (("predict", "model", "good.csv", "--out", "p.xlsx"), ("p.xlsx", ".parquet")),
    "predict: out is the data": (("predict", "model", "good.csv", "--out", "good.csv"), ("good.csv",)),
    "predict: out is the data, by a detour": (
        ("predict", "model", "good.csv", "--out", "folder.csv/../good.csv"),
        ("good.csv",),
    ),
    "predict: out is a folder": (("predict", "model", "good.csv", "--out", "folder.csv"), ("folder.csv",)),
    "predict: out nowhere": (("predict", "model", "good.csv", "--out", "/proc/p.csv"), ("/proc/p.csv",)),
    "predict: keep unknown": (
        ("predict", "model", "good.csv", "--out", "p.csv", "--keep", "aeg"),
        ("'aeg'", "did you mean 'age'?"),
    ),
    # models
    "show: no model": (("show", "nowhere"), ("nowhere",)),
    "show: a model of no table": (("show", "plain"), ("plain", "Expected a model of a table")),
    "show: a model that claims a table": (("show", "claims"), ("claims",)),
    "show: a flipped bit": (("show", "flipped"), ("flipped", "SHA-256")),
    "export: no file": (("export", "model"), ("--onnx",)),
    "export: nowhere": (("export", "model", "--onnx", "/proc/m.onnx"), ("/proc/m.onnx",)),
    "export: over the weights": (("export", "model", "--onnx", "model/weights.safetensors"), ("weights.safetensors",)),
}


@pytest.mark.usefixtures("no_report")
@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=pytest.mark.extended) if name == "export: nowhere" else name for name in REFUSED]
)
def test_invalid_input_is_reported_in_one_sentence_and_nothing_is_written(
    name: str, bad_place: Path, invoke: Invoke, monkeypatch: pytest.MonkeyPatch
) -> None:
    arguments, words = REFUSED[name]
    monkeypatch.chdir(bad_place)
    before = folder_contents(bad_place)
    outcome = invoke(*arguments)
    assert_one_sentence(outcome, *words)
    assert outcome.out == "" or "--out" in arguments[3:]  # scores that cannot be written are printed all the same
    assert folder_contents(bad_place) == before


@pytest.mark.parametrize("package", ["matplotlib", "jinja2", "pandas", "pyarrow", "optuna"])
def test_a_missing_package_is_reported_before_training(
    package: str, bad_place: Path, invoke: Invoke, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(bad_place)
    before = folder_contents(bad_place)
    command = (*TUNE, "--trials", 1) if package == "optuna" else FIT
    for module in [name for name in sys.modules if name.split(".")[0] == package]:
        monkeypatch.delitem(sys.modules, module)
    for module in ("tuning.optuna_search", "tuning.storage") if package == "optuna" else ():
        monkeypatch.delitem(sys.modules, f"torchace.lab.{module}", raising=False)
    monkeypatch.setitem(sys.modules, package, None)
    options = TINY[2:-1] if package == "optuna" else TINY[2:]  # a search has no baselines
    assert_one_sentence(invoke(*command, *options), package, "pip install")
    assert folder_contents(bad_place) == before


def test_an_export_without_its_packages(bad_place: Path, invoke: Invoke, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(bad_place)
    monkeypatch.setitem(sys.modules, "onnx", None)
    outcome = invoke("export", "model", "--onnx", "m.onnx")
    assert_one_sentence(outcome, "needs onnx", "torchace[onnx]")
    assert not Path("m.onnx").exists()


# -- fit --------------------------------------------------------------------------------------------------------------


@pytest.mark.usefixtures("always_searched")
def test_a_fit_with_a_search_and_a_report(here: Path, invoke: Invoke) -> None:
    outcome = invoke(
        "fit", "pets.csv", "--target", "pet", "--num-members", 3, "--hidden", 4, "--epochs", 4, "--diversity", "auto"
    )
    assert (outcome.code, outcome.err) == (0, "")
    model = json.loads(Path("models/pets/manifest.json").read_text())
    search = model["extra"]["search"]
    lines = outcome.out.splitlines()
    assert [line.split()[:2] for line in lines[:6]] == [
        ["Column", "Read"],
        ["pet", "target:"],
        ["age", "number"],
        ["born", "number"],
        ["fur", "category"],
        ["chipped", "category"],
    ]
    assert lines[6].startswith("The search for λ will take at most about ")
    lines = lines[7:]
    assert lines[0] == "models/pets: classification of 'pet' from 4 columns."
    assert "Classes: cat, cow, dog." in lines
    assert "Numbers: age, born." in lines
    assert "Categories: fur, chipped." in lines
    assert f"λ={search['chosen']:g}." in lines[4]
    assert search["sentence"] in lines
    assert lines[-1] == "Report: models/pets/report/index.html"
    assert re.search(r"cross entropy +\d\.\d{4} +\d\.\d{4}", outcome.out)
    page = Path("models/pets/report/index.html").read_text()
    assert page.startswith("<!doctype html>")
    assert [line for line in lines if line.startswith(("Logistic regression", "Gradient boosting", "Most frequent"))]
    assert sum(line.startswith("Difference: cross entropy of the ensemble minus") for line in lines) == 1
    assert any("best baseline" in line or "A baseline is better" in line for line in lines)
    for words in (
        "pet, from pets.csv",
        search["sentence"],
        "Confusion matrix",
        "Importance of the columns",
        "none at all",
        "Row of the file",
    ):
        assert words in html.unescape(page).replace("\u00a0", " "), words
    assert "could not be read" not in page
    assert "Not tested" not in page
    assert sorted(path.name for path in here.iterdir()) == ["houses.csv", "models", "pets.csv"]
    assert os.listdir("models") == ["pets"]


@pytest.mark.parametrize("test", ["0.2", "0"])
def test_a_regression_with_a_given_diversity_and_a_report(test: str, here: Path, invoke: Invoke) -> None:
    outcome = invoke(
        "fit", "houses.csv", "--target", "price", *TINY, "--diversity", "0.3", "--out", "m", "--test", test
    )
    assert (outcome.code, outcome.err) == (0, "")
    assert "regression of 'price' from 2 columns" in outcome.out
    assert "λ=0.3." in outcome.out
    assert "R²" in outcome.out
    assert json.loads(Path("m/manifest.json").read_text())["extra"]["search"] is None
    page = Path("m/report/index.html").read_text()
    assert ("Not tested" in page) == (test == "0")
    assert "could not be read" not in page


@pytest.mark.usefixtures("no_report")
def test_a_repeated_command_reports_the_existing_model(here: Path, invoke: Invoke) -> None:
    command = ("fit", "pets.csv", "--target", "pet", *TINY)
    first = invoke(*command)
    before = folder_contents(here)
    Path("models/pets.work").mkdir()  # of a process that was killed right after it put the model in place
    again = invoke(*command)
    assert (again.code, again.err) == (0, "")
    described = first.out.splitlines()
    described = described[described.index("models/pets: classification of 'pet' from 4 columns.") :]
    assert again.out.splitlines() == ["models/pets already holds this model.", *described]
    assert again.out.splitlines()[-1] == "Report: models/pets/report/index.html"
    assert folder_contents(here) == before
    Path("models/pets.work").mkdir()
    Path("models/pets.work/thesis.tex").write_text("years of work")  # the user's own
    assert invoke(*command).code == 0
    assert Path("models/pets.work/thesis.tex").exists()


@pytest.mark.usefixtures("no_report")
def test_a_second_fit_at_the_same_time_is_refused(here: Path, invoke: Invoke) -> None:
    with RunStore(Path("m.work")).lock():
        refused = invoke("fit", "pets.csv", "--target", "pet", *TINY, "--out", "m")
    assert_one_sentence(refused, f"Process {os.getpid()} is using m.work")
    assert os.listdir("m.work") == ["lock"]


@pytest.mark.usefixtures("no_report", "always_searched")
def test_an_interrupted_command_resumes_when_repeated(
    here: Path, invoke: Invoke, monkeypatch: pytest.MonkeyPatch
) -> None:
    command = ("fit", "pets.csv", "--target", "pet", *TINY, "--diversity", "auto")
    search = "torchace.lab.tuning.grid_search.train_members"
    monkeypatch.setattr("torchace.lab.tuning.grid_search.GridSearch._is_promising", lambda *_: True)
    real, groups, steps = training.train_members, list[Any](), list[Any]()

    def send_sigterm(*args: Any, **options: Any) -> Any:
        groups.append(options["diversities"])
        if len(groups) == 2:
            signal.raise_signal(signal.SIGTERM)
        return real(*args, **options)

    def record_steps(*args: Any, **options: Any) -> Any:
        if options["diversities"] == [0.0]:
            options["on_progress"] = steps.append
        return real(*args, **options)

    handlers = [signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGINT)]
    with monkeypatch.context() as patch:
        patch.setattr(search, send_sigterm)
        outcome = invoke(*command)
    sentence = "Interrupted. Everything so far is in models/pets.work; repeat the command to resume.\n"
    assert (outcome.code, outcome.err) == (3, sentence)
    assert [signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGINT)] == handlers
    assert not Path("models/pets").exists()
    with monkeypatch.context() as patch:
        patch.setattr(search, send_sigterm)
        patch.setattr(training, "train_members", record_steps)
        assert invoke(*command).code == 0
    # the model with λ=0 and the first group of the search were not trained again
    assert groups[0] == [0.0, 0.3]
    assert groups.count([0.0, 0.3]) == 1
    assert len(steps) == 0
    assert os.listdir("models") == ["pets"]


def test_interrupted_while_the_report_is_drawn(here: Path, invoke: Invoke, monkeypatch: pytest.MonkeyPatch) -> None:
    def drawing(directory: Path) -> Path:
        signal.raise_signal(signal.SIGINT)
        raise AssertionError("went on")

    command = ("fit", "pets.csv", "--target", "pet", *TINY)
    monkeypatch.setattr("torchace.lab.report.write_report", drawing)
    sentence = "Interrupted. Everything so far is in models/pets.work; repeat the command to resume.\n"
    outcome = invoke(*command)
    assert (outcome.code, outcome.err) == (3, sentence)
    monkeypatch.setattr("torchace.lab.report.write_report", fake_report)
    monkeypatch.setattr(training, "train_members", lambda *args, **options: pytest.fail("trained again"))
    assert invoke(*command).code == 0
    assert os.listdir("models") == ["pets"]


ESCAPES = "\x1b[2J\x1b]0;title\x07\x9b31m\r\u202e\u2066"


def test_files_cannot_command_the_terminal(here: Path, invoke: Invoke) -> None:
    frame = pets(40)
    frame[f"age{ESCAPES}"] = frame["age"] + 1
    frame["pet"] = np.array([f"cat{ESCAPES}", "dog"])[np.arange(40) % 2]
    frame = frame.rename(columns={"pet": f"pet{ESCAPES}"})
    write_table(frame, Path("odd.parquet"))
    model = TableModel.load(fitted(Path("odd.parquet"), f"pet{ESCAPES}", Path("m")))
    shutil.rmtree("m")
    replace(model, record={**model.record, "search": {"sentence": f"λ is good.{ESCAPES}"}}).save(Path("m"))
    shutil.copy("odd.parquet", f"b{ESCAPES}.parquet")
    write_table(frame.drop(columns=[f"age{ESCAPES}"]), Path("less.parquet"))
    outcomes = [
        invoke("show", "m"),
        invoke("evaluate", "m", f"b{ESCAPES}.parquet"),
        invoke("predict", "m", "less.parquet", "--out", "p.csv"),
        invoke("show", f"nothing{ESCAPES}"),
        invoke("fit", "odd.parquet", "--target", f"nothing{ESCAPES}"),
    ]
    assert [outcome.code for outcome in outcomes] == [0, 0, 1, 1, 1]
    for outcome in outcomes:
        assert not {"\x1b", "\x07", "\x9b", "\r", "\u202e", "\u2066"} & set(outcome.out + outcome.err), outcome
    assert "λ is good.\\x1b[2J" in outcomes[0].out


@pytest.mark.usefixtures("no_report")
def test_a_training_that_fails_is_one_sentence(here: Path, invoke: Invoke) -> None:
    refused = invoke("fit", "pets.csv", "--target", "pet", *TINY, "--learning-rate", "1e300", "--epochs", 3)
    assert_one_sentence(refused, "λ=0.5, seed 0", "smaller learning rate")
    assert not Path("models/pets").exists()


@pytest.mark.parametrize(("command", "module"), [("fit", "tables.training"), ("tune", "tuning.grid_search")])
@pytest.mark.usefixtures("no_report")
def test_not_enough_memory_is_one_sentence(
    here: Path, invoke: Invoke, monkeypatch: pytest.MonkeyPatch, command: str, module: str
) -> None:
    def greedy(*args: Any, **options: Any) -> None:
        raise torch.OutOfMemoryError("CUDA out of memory")

    monkeypatch.setattr(f"torchace.lab.{module}.train_members", greedy)
    refused = invoke(command, "pets.csv", "--target", "pet")
    assert_one_sentence(refused, "Not enough memory. Finished work is saved. Try fewer or smaller members")


@pytest.mark.usefixtures("no_report")
def test_notes_are_printed(here: Path, invoke: Invoke) -> None:
    frame = pets(name=[f"name {i}" for i in range(60)], pet=np.arange(60) % 2)
    write_table(frame, Path("noted.csv"))
    lines = invoke("fit", "noted.csv", "--target", "pet", *TINY).out.splitlines()
    assert lines[6].split()[:5] == ["name", "left", "out", "free", "text:"]
    assert lines[7].startswith("The target 'pet' has 2 different whole numbers, which are treated as classes")


@pytest.mark.usefixtures("no_report")
def test_a_model_is_replaced_only_on_request(here: Path, invoke: Invoke) -> None:
    command = ("fit", "pets.csv", "--target", "pet", *TINY, "--out", "m")
    invoke(*command)
    assert_one_sentence(invoke(*command, "--seed", 7), "m holds another model (seed was 0 and is now 7)", "--overwrite")
    before = json.loads(Path("m/manifest.json").read_text())["extra"]["fit"]
    assert invoke(*command, "--seed", 7, "--overwrite").code == 0
    after = json.loads(Path("m/manifest.json").read_text())["extra"]["fit"]
    assert (before["table"]["seed"], after["table"]["seed"]) == (0, 7)
    Path("m.work").mkdir()
    write_record(Path("m.work/fit.json"), {"request": {"seed": 3}})
    assert_one_sentence(invoke(*command, "--out", "m"), "m holds another model")
    assert invoke(*command, "--overwrite").code == 0
    assert not Path("m.work").exists()
    Path("letters").mkdir()
    Path("letters/thesis.tex").write_text("years of work")
    assert_one_sentence(invoke(*command, "--out", "letters", "--overwrite"), "letters already holds other files")
    assert Path("letters/thesis.tex").exists()


@pytest.mark.usefixtures("no_report")
def test_rows_without_a_target_and_unseen_categories_are_counted(here: Path, invoke: Invoke) -> None:
    frame = pets(80)
    frame["pet"] = frame["pet"].where(np.arange(80) % 8 > 0, None)
    write_table(frame, Path("gaps.csv"))
    command = ("fit", "gaps.csv", "--target", "pet", *TINY, "--out", "m")
    assert_one_sentence(invoke(*command), "'pet'", "row 1", "9 more rows", "--skip-missing-target")
    outcome = invoke(*command, "--skip-missing-target", "--class-weight", "cat=3")
    assert "10 of 80 rows have no target and are skipped." in outcome.out.splitlines()
    assert_one_sentence(
        invoke(*command[:-1], "n", "--skip-missing-target", "--class-weight", "bird=3"), "'bird'", "'cat'"
    )
    assert_one_sentence(invoke(*command, "--class-weight", "cat=-1"), "--class-weight", "'cat=-1'")
    assert_one_sentence(invoke("evaluate", "m", "gaps.csv"), "'pet'", "row 1", "--skip-missing-target")
    lines = invoke("evaluate", "m", "gaps.csv", "--skip-missing-target", "--out", "s.json").out.splitlines()
    assert lines[0] == "10 of 80 rows have no target and are skipped."
    assert json.loads(Path("s.json").read_text())["rows"] == 70
    write_table(pets(20, fur=["curly", "long"] * 10), Path("new.csv"))
    lines = invoke("predict", "m", "new.csv", "--out", "p.csv").out.splitlines()
    assert lines == [
        "10 of 20 rows have a category in 'fur' that training did not have, or had too rarely.",
        "20 predictions written to p.csv.",
    ]


@pytest.mark.usefixtures("no_report")
@pytest.mark.parametrize("name", [".csv", "..pets.csv", "my.pets.v2.csv", "[bold].csv", ":cat:.csv", "a b.csv"])
def test_files_of_any_name(name: str, here: Path, invoke: Invoke) -> None:
    write_table(pets(), Path(name))
    assert invoke("fit", name, "--target", "pet", *TINY).code == 0
    (made,) = Path("models").iterdir()
    assert made.name == {".csv": "csv", "..pets.csv": "pets", "my.pets.v2.csv": "my"}.get(name, name[:-4])
    shown = invoke("evaluate", made, name)
    assert (shown.code, shown.err) == (0, "")
    assert shown.out.splitlines()[0].strip() == name
    predicted = invoke("predict", made, name, "--out", f"out{name}" if name[0] != "." else "out.csv")
    assert predicted.out.endswith(f"out{name if name[0] != '.' else '.csv'}.\n")


# -- evaluate, predict, show ------------------------------------------------------------------------------------------


ODD = ["[bold]", "[/red]", ":cat:", "a\nb", "\x1b[31mred", "λ", "-x", "=1+1", '"', "a,b"]


@pytest.mark.usefixtures("no_report")
def test_unusual_names_are_printed_unchanged(here: Path, invoke: Invoke) -> None:
    frame = pets(40)
    for place, name in enumerate(ODD):
        frame[name] = frame["born"] + place if place % 2 else np.roll(frame["fur"], place + 1)
    frame["pet"] = np.array(["[red]", ":dog:"])[np.arange(40) % 2]
    frame = frame.rename(columns={"pet": "[target]"})
    write_table(frame, Path("odd.csv"))
    for outcome in (
        invoke("fit", "odd.csv", "--target", "[target]", *TINY, "--out", "m"),
        invoke("evaluate", "m", "odd.csv"),
        invoke("predict", "m", "odd.csv", "--out", "p.csv", "--keep", "[/red]", "--keep", "-x"),
        shown := invoke("show", "m"),
    ):
        assert (outcome.code, outcome.err) == (0, "")
        assert "\x1b" not in outcome.out
    assert "of '[target]' from" in shown.out
    assert "Classes: :dog:, [red]." in shown.out
    for name in ODD:
        assert (name if name.isprintable() else repr(name)) in shown.out
    assert pd.read_csv("p.csv").columns[:3].tolist() == ["[/red]", "-x", "prediction"]
    assert_one_sentence(invoke("predict", "m", "pets.csv", "--out", "q.csv"), "'[bold]'")


def test_many_names_are_not_all_shown(here: Path, invoke: Invoke) -> None:
    frame = houses(60)
    for place in range(30):
        frame[f"column {place}"] = frame["area"] * place + place
    fitted(write_table(frame, Path("wide.csv")), "price", Path("m"))
    assert re.search(r"^Numbers: area, column 1, .* column 19 and 10 more\.$", invoke("show", "m").out, re.MULTILINE)


def test_scores_are_printed_and_written(here: Path, invoke: Invoke) -> None:
    fitted(Path("pets.csv"), "pet", Path("m"))
    outcome = invoke("evaluate", "m", "pets.csv", "--out", "new/scores.json")
    scores = TableModel.load("m").evaluate(pets()).metrics
    for words, key in (("accuracy", "accuracy"), ("cross entropy", "cross_entropy"), ("Brier score", "brier")):
        assert re.search(rf"^{words} +{scores[key]:.4f}$", outcome.out, re.MULTILINE)
    content = json.loads(Path("new/scores.json").read_text())
    assert content == {"model": "m", "data": "pets.csv", "rows": 60, "scores": scores}


@pytest.mark.usefixtures("no_report")
def test_scores_of_training_rows_are_announced(here: Path, invoke: Invoke) -> None:
    assert invoke("fit", "pets.csv", "--target", "pet", *TINY).code == 0
    frame = pd.read_csv("pets.csv")
    frame.sample(frac=0.5, random_state=0).to_csv("half.csv", index=False)
    frame.assign(age=np.arange(len(frame)) + 0.123).to_csv("new.csv", index=False)
    found = {name: invoke("evaluate", "models/pets", f"{name}.csv").out for name in ("pets", "half", "new")}
    assert "pets.csv contains all of the rows that the model was trained on. These scores are too" in found["pets"]
    share = re.search(r"half.csv contains about (\d+) % of the rows that the model was trained on", found["half"])
    assert share is not None
    assert 40 <= int(share[1]) <= 60
    assert "trained on" not in found["new"]


def test_scores_that_are_no_numbers_are_null(here: Path, invoke: Invoke) -> None:
    """One row has no R², and JSON no NaN."""
    fitted(Path("houses.csv"), "price", Path("m"))
    write_table(houses(1), Path("one.csv"))
    assert invoke("evaluate", "m", "one.csv", "--out", "s.json").code == 0

    def refuse(word: str) -> None:
        raise AssertionError(f"{word} is not JSON")

    assert json.loads(Path("s.json").read_text(), parse_constant=refuse)["scores"]["r2"] is None


@pytest.mark.parametrize("suffix", [".csv", ".parquet"])
def test_predictions_are_those_of_python(suffix: str, here: Path, invoke: Invoke) -> None:
    model = fitted(Path("pets.csv"), "pet", Path("m"))
    data = write_table(pets(30, seed=4), Path("new.parquet"))
    outcome = invoke("predict", "m", data, "--out", f"p{suffix}")
    assert outcome == (0, f"30 predictions written to p{suffix}.\n", "")
    found = (pd.read_csv if suffix == ".csv" else pd.read_parquet)(f"p{suffix}")
    expected = TableModel.load(model).predict(pets(30, seed=4))
    assert found["prediction"].tolist() == expected["prediction"].tolist()
    np.testing.assert_allclose(found.iloc[:, 1:], expected.iloc[:, 1:], rtol=0, atol=1e-13)


def test_interrupted_predictions_leave_no_output(here: Path, invoke: Invoke, monkeypatch: pytest.MonkeyPatch) -> None:
    fitted(Path("pets.csv"), "pet", Path("m"))
    real = TableModel.predict

    def send_sigterm(self: TableModel, frame: Any) -> Any:
        signal.raise_signal(signal.SIGTERM)
        return real(self, frame)

    before = folder_contents(here)
    monkeypatch.setattr(TableModel, "predict", send_sigterm)
    outcome = invoke("predict", "m", "pets.csv", "--out", "p.csv")
    assert outcome == (3, "", "Interrupted. Nothing was written.\n")
    assert folder_contents(here) == before


@pytest.mark.usefixtures("no_report")
def test_several_targets_from_fit_to_predictions(here: Path, invoke: Invoke) -> None:
    frame = houses(80)
    frame["rent"] = frame["price"] / 1000 + frame["area"]
    write_table(frame, Path("two.csv"))
    outcome = invoke("fit", "two.csv", "--target", "price", "--target", "rent", *TINY, "--out", "m")
    assert (outcome.code, outcome.err) == (0, "")
    assert "regression of 'price' and 'rent'" in outcome.out
    assert invoke("predict", "m", "two.csv", "--out", "p.csv").code == 0
    found = pd.read_csv("p.csv")
    assert list(found) == ["prediction_price", "spread_price", "prediction_rent", "spread_rent"]
    assert invoke("evaluate", "m", "two.csv", "--out", "s.json").code == 0
    scores = json.loads(Path("s.json").read_text())["scores"]
    for name in ("price", "rent"):
        rmse = np.sqrt(((found[f"prediction_{name}"] - frame[name]) ** 2).mean())
        assert scores[name]["rmse"] == pytest.approx(rmse)


@pytest.mark.parametrize("kind", ["classifier", "regressor", "two targets"])
def test_an_estimators_model_is_taken_too(kind: str, here: Path, invoke: Invoke) -> None:
    """The command line reads models that estimators saved."""
    X = pets(60)[["born", "chipped"]].astype(float)
    if kind == "classifier":
        estimator: Any = ACEClassifier(num_members=2, hidden=(4,), epochs=2).fit(X, pets()["pet"])
    else:
        y = X["born"] if kind == "regressor" else X
        estimator = NCLRegressor(num_members=2, hidden=(4,), epochs=2).fit(X, y)
    estimator.save("m")
    write_table(X, Path("x.csv"))
    assert invoke("predict", "m", "x.csv", "--out", "p.csv").code == 0
    found = pd.read_csv("p.csv").filter(like="prediction").squeeze(axis=1)
    if kind == "classifier":
        assert found.tolist() == estimator.predict(X).tolist()
    else:
        np.testing.assert_allclose(found, estimator.predict(X), rtol=1e-12)
    shown = invoke("show", "m")
    assert (shown.code, shown.err) == (0, "")
    assert "Numbers: born, chipped." in shown.out


# -- tune -------------------------------------------------------------------------------------------------------------

FAST = ("--num-members", "2", "--hidden", "4", "--epochs", "2")


def test_a_search_for_lambda(here: Path, invoke: Invoke) -> None:
    command = ("tune", "pets.csv", "--target", "pet", *FAST, "--seeds", 2)
    outcome = invoke(*command)
    assert (outcome.code, outcome.err) == (0, "")
    found = json.loads(Path("runs/tune-pets/tune.json").read_text())
    lines = outcome.out.splitlines()
    assert lines[0].split() == ["λ", "validation", "cross", "entropy", "seeds", "failed"]
    (chosen,) = [line for line in lines if "← chosen" in line]
    assert float(chosen.split()[0]) == found["chosen"]
    assert lines[-2:] == [found["sentence"], "Written to runs/tune-pets/tune.json."]
    again = invoke(*command)
    assert again == outcome
    assert_one_sentence(invoke(*command, "--epochs", 3), "runs/tune-pets/search", "epochs = 2", "--out")


def test_a_search_of_all_hyperparameters(here: Path, invoke: Invoke) -> None:
    """The printed `fit` command can be run for any column names."""
    frame = pets().rename(columns={"pet": "the pet's kind", "fur": "--fur"})
    write_table(frame, Path("my pets.csv"))
    options = [
        "--drop",
        "--fur",
        "--category",
        "chipped",
        "--test",
        "0.25",
        "--epochs",
        "2",
        "--seed",
        "3",
        "--patience",
        "0",
    ]
    outcome = invoke("tune", "my pets.csv", "--target", "the pet's kind", "--trials", 2, *options)
    assert (outcome.code, outcome.err) == (0, "")
    found = json.loads(Path("runs/tune-my pets/tune.json").read_text())
    assert [trial["state"] for trial in found["trials"]] == ["complete", "complete"]
    lines = outcome.out.splitlines()
    assert lines[:2] == [f"Trial {i}: {_best(found, i)}." for i in range(2)]
    assert "…" not in outcome.out
    assert "2 complete" in outcome.out
    words = shlex.split(next(line for line in lines if line.startswith("Train with the best hyperparameters: "))[37:])
    assert words[:3] == ["torchace", "fit", "my pets.csv"]
    given = dict(zip(words[3::2], words[4::2], strict=True))
    assert given["--target"] == "the pet's kind"
    assert given["--drop"] == "--fur"
    assert given["--category"] == "chipped"
    assert (given["--test"], given["--epochs"], given["--seed"], given["--patience"]) == ("0.25", "2", "3", "0")
    assert float(given["--diversity"]) == pytest.approx(found["best"]["diversity"], rel=1e-3)
    assert "--validation" not in given
    assert "--device" not in given


def _best(found: dict[str, Any], number: int) -> str:
    values = [trial["value"] for trial in found["trials"]]
    return f"{values[number]:.4g}, best {min(values[: number + 1]):.4g}"


@pytest.mark.usefixtures("no_report")
def test_the_command_to_train_with_works(here: Path, invoke: Invoke) -> None:
    outcome = invoke(
        *("tune", "pets.csv", "--target", "pet", "--trials", 1, "--epochs", 1, "--out", "t"),
        *("--no-early-stopping", "--skip-missing-target"),
    )
    words = shlex.split(re.search(r"^Train with .*: torchace (.*)$", outcome.out, re.MULTILINE)[1])
    assert invoke(*words).code == 0


def test_an_interrupted_search_does_not_print_the_password(
    here: Path, invoke: Invoke, monkeypatch: pytest.MonkeyPatch
) -> None:
    def stopped(*args: Any, **options: Any) -> None:
        raise Interrupted

    monkeypatch.setattr("torchace.lab.tuning.optuna_search.OptunaSearch.run", stopped)
    storage = "postgresql+psycopg://me:secret@host/db"
    outcome = invoke("tune", "pets.csv", "--target", "pet", "--trials", 2, "--storage", storage)
    assert outcome == (3, "", "Interrupted. Everything so far is in the storage; repeat the command to resume.\n")


def test_trials_that_all_fail_are_one_sentence(here: Path, invoke: Invoke, monkeypatch: pytest.MonkeyPatch) -> None:
    def fails(*args: Any, **options: Any) -> None:
        raise MemoryError

    monkeypatch.setattr("torchace.lab.tuning.optuna_search.train_members", fails)
    outcome = invoke("tune", "pets.csv", "--target", "pet", "--trials", 2, *FAST)
    assert_one_sentence(outcome, "No trial was completed")
    assert "2 failed" in outcome.out


# -- any table --------------------------------------------------------------------------------------------------------


@given(any_table())
@pytest.mark.extended
@settings(max_examples=60, suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow])
@pytest.mark.usefixtures("no_report")
def test_any_table_is_fitted_or_refused_in_one_sentence(here: Path, invoke: Invoke, table: AnyTable) -> None:
    with tempfile.TemporaryDirectory(dir=here) as name:
        folder = Path(name)
        path = table.write(folder)
        before, model = folder_contents(folder), folder / "model"
        task = () if table.task is None else ("--task", table.task)
        outcome = invoke("fit", path, "--target", table.target, *TINY, *task, "--out", model)
        if outcome.code:
            assert_one_sentence(outcome)
            assert folder_contents(folder) == before
            return
        assert outcome.err == ""
        assert invoke("evaluate", model, path) == (0, mock.ANY, "")
        assert invoke("predict", model, path, "--out", folder / "p.csv") == (0, mock.ANY, "")
        assert invoke("show", model) == (0, mock.ANY, "")
        assert len(pd.read_csv(folder / "p.csv")) == len(table.columns[0])


# -- names ------------------------------------------------------------------------------------------------------------


def test_options_have_the_names_and_defaults_of_the_estimators() -> None:
    options = inspect.signature(table_commands.fit).parameters
    given_otherwise = {
        "network": "the command line has no functions",
        "callbacks": "the command line has no functions",
        "verbose": "there is a bar",
        "n_jobs": "OMP_NUM_THREADS",
        "validation_fraction": "validation",
        "random_state": "seed",
    }
    estimator = {field.name: field.default for field in dataclasses.fields(ACEClassifier)}
    for name in estimator.keys() - given_otherwise.keys():
        default = options[name].default
        if name == "hidden":
            default = tuple(map(int, default.split(",")))
        elif name == "early_stopping":
            default = "auto" if default else False
        assert default == estimator[name], name
    assert options["validation"].default == estimator["validation_fraction"]


@pytest.mark.usefixtures("no_report")
def test_names_of_the_estimators_are_understood(here: Path, invoke: Invoke) -> None:
    names = ("--validation-fraction", "0.3", "--random-state", "3", "--members", "shared", "--schedule", "cosine")
    outcome = invoke("fit", "pets.csv", "--target", "pet", *TINY, *names, "--no-early-stopping")
    assert (outcome.code, outcome.err) == (0, "")
    record = json.loads(Path("models/pets/manifest.json").read_text())["extra"]["fit"]
    assert (record["table"]["seed"], record["table"]["validation"]) == (3, 0.3)
    plan = record["plan"]
    assert (plan["members"], plan["schedule"], plan["patience"]) == ("shared", "cosine", None)
    assert invoke("predict", "models/pets", "pets.csv", "--out", "p.csv").code == 0
