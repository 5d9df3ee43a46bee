"""The command line: output, exit codes and one-sentence errors."""

import errno
import io
import json
import os
import re
import resource
import signal
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import typer
from rich.console import Console

import torchace
from tests.lab.cli.command_line import Invoke, Outcome, assert_one_sentence
from tests.lab.sweeps.small_sweeps import command, leftovers, poison, stored_files
from torchace import _files as files
from torchace.lab.cli import app as cli
from torchace.lab.cli.progress import SweepProgress
from torchace.lab.data import DataError, load
from torchace.lab.schema.results import GroupPlan, RunKey
from torchace.lab.store import RunStore
from torchace.lab.sweeps.config import builtin_names
from torchace.lab.training.loop import Interrupted, Progress

REAL_DATA = os.environ.get("TORCHACE_DATA", "")
SMALL = """
[data]
limit = 200
[model]
hidden = [4]
num_members = 2
[train]
steps = 12
batch_size = 50
learning_rate = 0.01
[sweep]
diversities = [0.0, 0.5]
seeds = [0, 1]
"""


@pytest.fixture(autouse=True)
def _here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """In an empty folder, without the user's data, cache and network."""
    monkeypatch.delenv("TORCHACE_DATA", raising=False)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    work = tmp_path / "work"
    work.mkdir()
    monkeypatch.chdir(work)

    def refuse(*args: object, **options: object) -> None:
        raise AssertionError("a test that should not have tried to download")

    monkeypatch.setattr("pooch.retrieve", refuse)


@pytest.fixture
def small(tmp_path: Path) -> Path:
    path = tmp_path / "small.toml"
    path.write_text(SMALL)
    return path


# -- valid commands ---------------------------------------------------------------------------------------------------


def test_a_sweep_is_run_and_reported(invoke: Invoke, small: Path) -> None:
    outcome = invoke("run", small)
    assert outcome.code == 0
    assert outcome.err == ""
    directory = Path("runs") / "small"
    assert (directory / "report" / "index.html").read_text().startswith("<!doctype html>")
    assert "main λ=0, 0.5, 2 seeds: 4 of 4 runs are finished." in outcome.out
    assert outcome.out.count("±") > 4
    assert "…" not in outcome.out  # nothing was cut to fit a screen that is not there
    assert outcome.out.splitlines()[-1] == f"Report: {directory / 'report' / 'index.html'}"
    assert "\x1b" not in outcome.out
    assert "bold" not in outcome.out  # there is none in a file
    assert leftovers(directory) == []

    page = directory / "report" / "index.html"
    page.unlink()
    again = invoke("report", directory)
    assert again.code == 0
    assert page.exists()
    assert again.out.splitlines() == outcome.out.splitlines()[1:]
    assert invoke("report", directory, "--out", "page").out.splitlines()[-1] == "Report: page/index.html"
    assert Path("page/index.html").read_bytes() == page.read_bytes()


@pytest.mark.usefixtures("no_report")
def test_more_seeds_go_on_where_the_last_command_ended(invoke: Invoke, small: Path) -> None:
    assert invoke("run", small, "--out", "out").code == 0
    outcome = invoke("run", small, "--out", "out", "--seeds", 3)
    assert outcome.out.splitlines()[:2] == [
        "4 of 6 runs are already finished.",
        "main λ=0, 0.5, seed 2: 6 of 6 runs are finished.",
    ]
    assert invoke("run", small, "--out", "out", "--seeds", 3).out.startswith("6 of 6 runs are already finished.")


@pytest.mark.usefixtures("no_report")
def test_overrides_and_device(invoke: Invoke, small: Path) -> None:
    options = ("--set", "train.steps=3", "--set", "sweep.diversities=[0.25]", "--seeds", 1, "--device", "cpu")
    assert invoke("run", small, "--out", "out", *options).code == 0
    store = stored_files(Path("out"))
    assert list(store)[2:] == ["runs/main-l0.25-s0.json", "main-l0.25-s0.safetensors"]
    assert store["runs/main-l0.25-s0.json"]["steps"] == 3


def test_brackets_in_names_are_printed(invoke: Invoke, small: Path) -> None:
    name = "out [bold] dir"
    assert invoke("run", small, "--out", name).out.splitlines()[-1] == f"Report: {name}/report/index.html"
    refused = invoke("run", small, "--out", name, "--set", "train.steps=[/red]")
    assert "'[/red]'" in refused.err


def test_progress_in_a_terminal() -> None:
    screen = io.StringIO()
    job = GroupPlan("main-0", (RunKey("main", 0.0, 0), RunKey("main", 0.5, 0)))
    with SweepProgress(Console(file=screen, force_terminal=True, width=100)) as progress:
        progress.on_plan(1, 3)
        progress.on_group_start(job)
        progress.on_group_step(job, Progress(5, 12, [2.5, None, 1.5]))  # one of three has failed
        progress.bars.refresh()
        progress.on_group_end(job, 3)
    shown = re.sub(r"\x1b\[[0-9;?]*[A-Za-z]", "", screen.getvalue())
    assert "1 of 3 runs are already finished." in shown
    assert re.search(r"runs +[━╺╸]+ 1/3", shown)
    assert re.search(r"main λ=0, 0.5, seed 0 [━╺╸]+ +5/12 cross entropy 2.0000", shown)
    assert "3 of 3 runs are finished." not in shown  # that is for files


@pytest.mark.usefixtures("no_report")
def test_signals_are_given_back(invoke: Invoke, small: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    before = [signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)]
    assert invoke("run", small).code == 0
    assert [signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)] == before


@pytest.mark.usefixtures("no_report")
def test_interrupted_in_this_process(invoke: Invoke, small: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fit(*args: Any, stop: Any, **options: Any) -> None:
        assert not stop()
        signal.raise_signal(signal.SIGTERM)
        assert stop()
        raise Interrupted

    with monkeypatch.context() as patch:
        patch.setattr("torchace.lab.sweeps.executor.fit", fit)
        outcome = invoke("run", small, "--out", "a [long] name")
    assert outcome == (3, "", "Interrupted. Everything so far is in a [long] name; repeat the command to resume.\n")
    assert invoke("run", small, "--out", "a [long] name").code == 0


def test_interrupted_while_the_report_is_drawn(invoke: Invoke, small: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def drawing(directory: Path, out: Path | None) -> Path:
        signal.raise_signal(signal.SIGINT)
        raise AssertionError("went on")

    before = [signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)]
    monkeypatch.setattr("torchace.lab.report.write_report", drawing)
    outcome = invoke("run", small, "--out", "my runs")
    assert outcome.code == 3
    assert outcome.err == "Interrupted. Finished work is saved; repeat the command to resume.\n"
    assert len(list(Path("my runs/runs").glob("*.json"))) == 4
    assert invoke("report", "my runs").code == 3
    assert [signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)] == before


def test_version_and_help(invoke: Invoke) -> None:
    assert invoke("--version") == (0, f"torchace {torchace.__version__}\n", "")
    assert "--set" in invoke("run", "--help").out
    outcome = invoke()
    assert outcome.out == invoke("--help").out
    named = re.findall(r"^ +torchace (\w+)", outcome.out, re.MULTILINE)  # the tour leads from a table to experiments
    assert named == ["fit", "show", "predict", "run", "run", "run"]
    assert max(map(len, outcome.out.splitlines())) <= 100


def test_the_help_of_a_command_has_an_example_that_it_accepts() -> None:
    command = typer.main.get_command(cli.app)
    for name, example in cli.EXAMPLES.items():
        part = command.commands[name]
        assert f"Example: torchace {example}\n" in part.get_help(
            part.context_class(part, info_name=name, terminal_width=100)
        )
        with part.make_context(name, example.split()[1:]) as context:  # wrong options are errors here
            assert example.startswith(f"{name} ")
            assert context.params


def test_shell_completion() -> None:
    words = {"_TORCHACE_COMPLETE": "complete_bash", "COMP_WORDS": "torchace ev", "COMP_CWORD": "1"}
    code = "import sys; sys.argv = ['torchace']; from torchace.lab.cli import main; main()"
    done = subprocess.run(
        [sys.executable, "-c", code], env={**os.environ, **words}, capture_output=True, text=True, check=False
    )
    assert (done.stdout.split(), done.stderr) == (["evaluate"], "")


def test_info(invoke: Invoke) -> None:
    outcome = invoke("info")
    assert outcome.code == 0
    lines = outcome.out.splitlines()
    assert [line.split()[0] for line in lines if not line.startswith("  ")] == [
        *("torchace", "python", "torch", "numpy", "safetensors", "torchmetrics", "scikit-learn"),
        *("processor", "experiments"),
    ]
    assert [line.split()[0] for line in lines if line.startswith("  ")] == builtin_names()
    assert "  digits         Digits: the effect of λ on small members" in lines


def test_as_a_module() -> None:
    process = command("--version")
    out, err = process.communicate(timeout=120)
    assert (process.returncode, out, err) == (0, f"torchace {torchace.__version__}\n", "")


@pytest.mark.extended
def test_a_terminal_without_greek_letters(small: Path) -> None:
    process = command("run", str(small), "--seeds", "1", env={"PYTHONIOENCODING": "ascii"})
    out, err = process.communicate(timeout=120)
    assert (process.returncode, err) == (0, "")
    assert "main ?=0, 0.5, seed 0" in out


# -- experiments on real data -----------------------------------------------------------------------------------------


def use_real(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The real data set with a hundred test images, where it is at hand."""
    if not REAL_DATA:
        pytest.skip("TORCHACE_DATA is not set")
    monkeypatch.setenv("TORCHACE_DATA", REAL_DATA)
    try:
        dataset = load(name, download=False)
    except DataError as error:
        pytest.skip(str(error))
    few = replace(dataset, test=dataset.test.take(torch.arange(100)))
    monkeypatch.setattr("torchace.lab.sweeps.loaded_data.load", lambda wanted: {name: few}[wanted])


@pytest.mark.extended
@pytest.mark.usefixtures("no_report")
@pytest.mark.parametrize(("name", "runs"), [("table1", 13), ("small_members", 7)])
def test_mnist_experiments(name: str, runs: int, invoke: Invoke, monkeypatch: pytest.MonkeyPatch) -> None:
    use_real("mnist", monkeypatch)
    outcome = invoke("run", name, "--set", "data.limit=1000", "--set", "train.steps=2", "--seeds", 1)
    assert (outcome.code, outcome.err) == (0, "")
    assert f"{runs} of {runs} runs are finished." in outcome.out


@pytest.mark.extended
@pytest.mark.usefixtures("no_report")
@pytest.mark.parametrize(("name", "runs"), [("table2", 8), ("table2_control", 2), ("branched", 12)])
def test_cifar_experiments(name: str, runs: int, invoke: Invoke, monkeypatch: pytest.MonkeyPatch) -> None:
    use_real("cifar10", monkeypatch)
    settings = ("data.limit=64", "train.steps=2", "train.batch_size=16", "model.depth=8", "model.width=2")
    outcome = invoke("run", name, *(part for setting in settings for part in ("--set", setting)), "--seeds", 1)
    assert (outcome.code, outcome.err) == (0, "")
    assert f"{runs} of {runs} runs are finished." in outcome.out


# -- failed runs ------------------------------------------------------------------------------------------------------


def test_failed_runs_are_named_and_reported(invoke: Invoke, small: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    poison(monkeypatch, 0.5, 1, member=1)
    outcome = invoke("run", small)
    assert outcome.code == 4
    assert outcome.err == "Run λ=0.5, seed 1 (main) failed at step 0, member 1: NaN or Inf in loss or gradient.\n"
    assert "Report: " in outcome.out
    page = (Path("runs") / "small" / "report" / "index.html").read_text()
    assert "NaN or Inf in loss or gradient" in page
    assert invoke("run", small).code == 4  # it stays so


def test_a_sweep_of_failures_has_a_report_too(invoke: Invoke, small: Path) -> None:
    settings = ("train.optimizer=sgd", "train.learning_rate=1e30")
    outcome = invoke("run", small, *(part for setting in settings for part in ("--set", setting)))
    assert outcome.code == 4
    assert len(outcome.err.splitlines()) == 4
    assert (Path("runs") / "small" / "report" / "index.html").exists()


# -- errors -----------------------------------------------------------------------------------------------------------


def assert_refused(outcome: Outcome, *words: str, code: int = 1) -> None:
    """One sentence on standard error, nothing on standard output, nothing written."""
    assert_one_sentence(outcome, *words)
    assert (outcome.code, outcome.out) == (code, "")
    assert list(Path().iterdir()) == []


SETTINGS = {
    # unknown keys, at every level
    "dta.name='digits'": "there is no key 'dta'. Did you mean 'data'?",
    "data.nam='digits'": "there is no key 'data.nam'. Did you mean 'data.name'?",
    "epochs=5": "There is no key 'epochs'. Did you mean 'train.epochs'?",
    "train.lr=3": "there is no key 'train.lr'. Known keys: epochs,",
    "paper={table='1', rows=[{num_members=1, acuracy=1}]}": "acuracy'. Did you mean 'paper.rows.0.accuracy'?",
    "arms=[{name='a', lable='x'}]": "there is no key 'arms.0.lable'. Did you mean 'arms.0.label'?",
    "arms=[{name='a'}, {name='b', train={epoch=1}}]": "'arms.1.train.epoch'. Did you mean 'arms.1.train.epochs'?",
    # wrong types
    "data=3": "expected data to be a section, but got 3",
    "arms={name='a'}": "expected arms to be a list, but got a section",
    "arms=[{label='a'}]": "expected a value for arms.0.name",
    "name=3": "expected name to be text",
    "data.limit=10.0": "expected data.limit to be a whole number, but got 10.0",
    "data.augment=1": "expected data.augment to be true or false, but got 1",
    "model.hidden=4": "expected model.hidden to be a list, but got 4",
    "model.hidden=['4']": "expected model.hidden.0 to be a whole number, but got '4'",
    "model.num_members=true": "expected model.num_members to be a whole number, but got True",
    "train.epochs=": "expected train.epochs to be a whole number, but got ''",
    "train.learning_rate='fast'": "expected train.learning_rate to be a number, but got 'fast'",
    "sweep.diversities=0.5": "expected sweep.diversities to be a list, but got 0.5",
    "paper.note='x'": "expected a value for paper.table",
    # out of range
    "data.limit=1298": "data.limit: expected at most 1297, the training samples of digits, but got 1298",
    "data.validation=1.0": "expected data.validation to be less than 1, but got 1.0",
    "data.validation=0.001": "data.validation: expected a fraction that leaves samples to validate",
    f"train.steps=1{'0' * 30}": "expected train.steps to be less than 2147483648",
    "train.learning_rate=0": "expected train.learning_rate to be more than 0, but got 0",
    f"train.learning_rate=1{'0' * 400}": "expected train.learning_rate to be a number",
    "sweep.diversities=[1.1]": "expected sweep.diversities.0 to be at most 1, but got 1.1",
    # NaN and Inf
    "sweep.diversities=[nan]": "expected sweep.diversities.0 to be a finite number, but got nan",
    # nothing, and everything twice
    "sweep.diversities=[]": "expected sweep.diversities to be a list with at least one value, but got []",
    "sweep.diversities=[0, 0.5, 0]": "sweep.diversities: expected every value once, but got 0 twice",
    "arms=[{name='a'}, {name='a'}]": "expected distinct names of arms, but got 'a' twice",
    # words that are none
    "data.name=mnits": "expected data.name to be 'digits', 'mnist', 'fashion_mnist' or 'cifar10', but got 'mnits'",
    "model.kind=Smoc": "expected model.kind to be 'separate', 'smoc', 'branch' or 'adapters', but got 'Smoc'",
    f"name='{'a' * 41}'": "expected name to be at most 40 characters",
    "arms=[{name='../x'}]": "expected arms.0.name to be lowercase letters, digits and underscores",
    # what does not go together
    "train={epochs=1, steps=1}": "train: expected `epochs` or `steps`, but got both",
    "train={batch_size=50}": "expected `epochs` or `steps`, but got neither",
    "train.batches=separate": "λ > 0 needs members that see each other's predictions",
    "arms=[{name='a', train={batches='separate'}}]": "arms.0: λ > 0 needs members",
    "train.schedule=step": "train: schedule = 'step' needs `milestones`",
    "train.milestones=[5]": "train: `milestones` need schedule = 'step'",
    "train={steps=9, schedule='step', milestones=[5, 3]}": "train: expected ascending `milestones`, but got [5, 3]",
    "train.warmup_learning_rate=0.1": "train: `warmup_learning_rate` needs `warmup_steps`",
    "train.nesterov=true": "train: nesterov = true needs optimizer = 'sgd'",
    "train={steps=9, optimizer='sgd', momentum=0, nesterov=true}": "a momentum above 0",
    "train={steps=9, batches='exchanged', detach_others=false}": "train: batches = 'exchanged' needs",
    "model={network='resnet', depth=21}": "model: expected a ResNet depth of 6n + 2 (20, 32, 44, 56, 110), but got 21",
    "model={network='resnet', dropout=0.1}": "model: a CIFAR ResNet has no dropout",
    "model={kind='branch'}": "model: a branched MLP needs `at`",
    "model={kind='branch', at='linear9'}": "'linear9'",
    "model={kind='branch', at='fc', head_scale=0.5}": "model: `head_scale` needs kind",
    "model={rank=2}": "model: `rank` needs kind = 'smoc' or kind = 'adapters', but got kind = 'separate'",
    "model={kind='smoc', rank=11}": "rank",
    # what is no setting
    "": "Expected --set section.key=value, but got ''",
    "train.epochs": "Expected --set section.key=value, but got 'train.epochs'",
    "train.steps.more=5": "'steps' in 'train.steps.more=5' is not a section",
    "sweep.diversities=[0, 0.5": "expected sweep.diversities to be a list, but got '[0, 0.5'",
}


@pytest.mark.parametrize("setting", SETTINGS)
def test_an_invalid_setting_is_reported_in_one_sentence(setting: str, invoke: Invoke, small: Path) -> None:
    assert_refused(invoke("run", small, "--out", "out", "--set", setting), SETTINGS[setting])


FILES: dict[str, tuple[bytes, str]] = {
    "no TOML": (b"what is this", "is not valid TOML: Expected '=' after a key"),
    "JSON": (b'{"train": {"epochs": 1}}', "is not valid TOML"),
    "binary": (bytes(range(256)), "it is not UTF-8 text"),
    "UTF-16": ("[train]\nepochs = 1".encode("utf-16"), "it is not UTF-8 text"),
    "empty": (b"", "expected `epochs` or `steps`, but got neither"),
    "long number": (b"a = " + b"1" * 5000, "is not valid TOML"),
    "markup": (b"[train]\nepochs = '[bold]x[/bold]'", "but got '[bold]x[/bold]'"),
    "long value": (b"[train]\nepochs = '" + b"x" * 10_000 + b"'", "xxx..."),
    "line break": (b'[train]\nepochs = "a\\nb"', r"but got 'a\nb'"),
    "line break in a key": (b'"a\\nb" = 1', r"there is no key 'a\nb'"),
}


@pytest.mark.parametrize("name", FILES)
def test_an_invalid_file_is_reported_in_one_sentence(name: str, invoke: Invoke, tmp_path: Path) -> None:
    content, words = FILES[name]
    file = tmp_path / "wrong.toml"
    file.write_bytes(content)
    assert_refused(invoke("run", file, "--out", "out"), words, str(file))


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["run", "digit"], "but got 'digit'. Did you mean 'digits'?"),
        (["run", "imagenet"], "Expected one of the experiments branched, demo, digits,"),
        (["run", ""], "Cannot read the experiment"),
        (["run", "missing.toml"], "Cannot read the experiment missing.toml: No such file or directory"),
        (["run", "x" * 300], "File name too long"),
        (["run", "--device", "meta"], "Cannot use the device 'meta': torchace trains on cpu and cuda"),
        (["run", "--device", "cuda:99"], "Cannot use the device 'cuda:99'"),
        (["run", "--out", "/dev/null/out"], "Cannot write to /dev/null/out: Not a directory. Choose another --out."),
        (["run", "--out", "x" * 300], "File name too long"),
        (["report", "nowhere"], "Found no experiment.json in nowhere"),
        (["report", "/dev/null"], "experiment.json"),
    ],
)
def test_wrong_arguments_are_one_sentence(arguments: list[str], words: str, invoke: Invoke) -> None:
    assert_refused(invoke(*arguments), words)


def test_a_folder_is_no_experiment(invoke: Invoke, tmp_path: Path) -> None:
    assert_refused(invoke("run", tmp_path), f"Cannot read the experiment {tmp_path}: Is a directory")


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["run", "--seeds", "0"], "'--seeds'"),
        (["run", "--seeds", "many"], "'--seeds'"),
        (["run", "--epochs", "3"], "--epochs"),
        (["run", "digits", "table1"], "table1"),
        (["run", "--set"], "--set"),
        (["train"], "'train'"),
        (["report"], "DIRECTORY"),
        (["--frobnicate"], "--frobnicate"),
    ],
)
def test_wrong_usage_is_one_sentence_and_exit_code_2(arguments: list[str], words: str, invoke: Invoke) -> None:
    assert_refused(invoke(*arguments), words, code=2)


def test_missing_data_is_one_sentence(invoke: Invoke, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TORCHACE_DATA", "nowhere")
    assert_refused(invoke("run", "table1"), "nowhere, named by the environment variable TORCHACE_DATA, is not a folder")


@pytest.mark.usefixtures("no_report")
def test_not_enough_memory_is_one_sentence(invoke: Invoke, small: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fit(*args: Any, **options: Any) -> None:
        raise RuntimeError("[enforce fail] DefaultCPUAllocator: can't allocate memory\n: you tried to allocate 9 bytes")

    monkeypatch.setattr("torchace.lab.sweeps.executor.fit", fit)
    outcome = invoke("run", small, "--out", "out")
    assert (outcome.code, outcome.err.count("\n")) == (1, 1)
    assert "Not enough memory. Finished work is saved" in outcome.err


def test_a_bug_is_a_traceback(invoke: Invoke, small: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fit(*args: Any, **options: Any) -> None:
        raise RuntimeError("an unexpected error")

    monkeypatch.setattr("torchace.lab.sweeps.executor.fit", fit)
    monkeypatch.setattr(sys, "argv", ["torchace", "run", str(small)])
    with pytest.raises(RuntimeError, match="an unexpected error"):
        cli.main()


@pytest.mark.usefixtures("no_report")
@pytest.mark.parametrize("setting", ["train.steps=13", "model.hidden=[5]", "data.limit=150", "name=other"])
def test_another_configuration_in_the_same_place_is_refused(setting: str, invoke: Invoke, small: Path) -> None:
    invoke("run", small, "--out", "out")
    before = stored_files(Path("out"))
    outcome = invoke("run", small, "--out", "out", "--set", setting)
    assert outcome.code == 1
    assert outcome.err.startswith(f"Error: out holds runs with {setting.split('=')[0]} = ")
    assert "Choose another --out" in outcome.err
    assert stored_files(Path("out")) == before


@pytest.mark.usefixtures("no_report")
def test_a_result_that_was_changed_is_one_sentence(invoke: Invoke, small: Path) -> None:
    invoke("run", small, "--out", "a")
    file = Path("a/runs/main-l0.5-s1.json")
    content = json.loads(file.read_text())
    content["metrics"]["test"]["accuracy"] = 0.999
    file.write_text(json.dumps(content))
    outcome = invoke("run", small, "--out", "a")
    assert (outcome.code, outcome.err.count("\n")) == (1, 1)
    assert "main-l0.5-s1.json was changed after it was written" in outcome.err
    outcome = invoke("report", "a")
    assert outcome.err.splitlines() == [
        "Skipped: runs/main-l0.5-s1.json was changed after it was written: its SHA-256 differs. "
        "Delete the files of this run to train it again."
    ]
    file.unlink()  # as it says
    outcome = invoke("run", small, "--out", "a")
    assert (outcome.code, outcome.err) == (0, "")


def test_no_resume_refuses_a_directory_with_runs(invoke: Invoke, small: Path) -> None:
    assert invoke("run", small, "--out", "out", "--no-resume").code == 0
    outcome = invoke("run", small, "--out", "out", "--no-resume")
    assert outcome.code == 1
    assert outcome.err == ("Error: out already holds runs. Remove --no-resume to resume, or choose another --out.\n")


@pytest.mark.usefixtures("no_report")
def test_a_directory_in_use_is_refused(invoke: Invoke, small: Path) -> None:
    with RunStore(Path("out")).lock():
        outcome = invoke("run", small, "--out", "out")
    assert outcome.code == 1
    assert outcome.err == (f"Error: Process {os.getpid()} is using out. Wait for it, or choose another --out.\n")
    assert [path.name for path in Path("out").iterdir()] == ["lock"]


@pytest.mark.parametrize("name", ["report/index.html", "metrics.csv", "runs/mine.json"])
def test_foreign_files_are_not_overwritten(invoke: Invoke, small: Path, name: str) -> None:
    file = Path("mine") / name
    file.parent.mkdir(parents=True)
    file.write_text("my thesis")
    outcome = invoke("run", small, "--out", "mine")
    first = name.split("/")[0]
    assert (outcome.code, outcome.out) == (1, "")
    assert outcome.err == f"Error: mine already holds other files ('{first}'). Choose another --out.\n"
    assert [path.name for path in Path("mine").iterdir()] == [first]
    assert file.read_text() == "my thesis"


@pytest.mark.usefixtures("no_report")
def test_a_run_directory_may_contain_other_files(invoke: Invoke, small: Path) -> None:
    Path("mine").mkdir()
    Path("mine/notes.txt").write_text("mine")
    assert invoke("run", small, "--out", "mine").code == 0
    assert Path("mine/notes.txt").read_text() == "mine"


# -- missing extras ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "module", ["typer", "matplotlib", *(pytest.param(m, marks=pytest.mark.extended) for m in ("pydantic", "sklearn"))]
)
def test_a_missing_extra_is_one_sentence(module: str, small: Path) -> None:
    code = (
        f"import sys; sys.modules[{module!r}] = None; sys.argv = ['torchace', 'run', {str(small)!r}]; "
        "import torchace.lab.cli.app; torchace.lab.cli.app.main()"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False, timeout=120)
    assert done.returncode == 1
    assert done.stderr.count("\n") == 1, done.stderr
    assert "pip install" in done.stderr
    assert "torchace[tool]" in done.stderr
    assert {"sklearn": "scikit-learn"}.get(module, module) in done.stderr
    assert not Path("runs").exists()


# -- full disks -------------------------------------------------------------------------------------------------------


@pytest.mark.usefixtures("no_report")
def test_a_full_disk_is_one_sentence(invoke: Invoke, small: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    invoke("run", small, "--out", "a")
    calls, real_fsync = 0, os.fsync

    def full(descriptor: int) -> None:
        nonlocal calls
        calls += 1
        if calls > 12:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        real_fsync(descriptor)

    command_line = ("run", small, "--set", "checkpoint.steps=1", "--out", "b")
    with monkeypatch.context() as patch:
        patch.setattr(files.os, "fsync", full)
        outcome = invoke(*command_line)
    assert outcome.code == 1
    assert outcome.err.count("\n") == 1
    assert outcome.err.startswith("Error: Cannot use b/checkpoints/main-0/")
    assert "No space left on device. Finished work is saved. Free some space and repeat the command." in outcome.err
    assert invoke(*command_line).code == 0
    ours, theirs = stored_files(Path("a")), stored_files(Path("b"))
    ours["experiment.json"]["config"]["checkpoint"] = theirs["experiment.json"]["config"]["checkpoint"]
    assert ours == theirs


@pytest.mark.extended
def test_a_limit_on_files_in_another_process(small: Path) -> None:
    """The system refuses files above 20 kB, as a full disk would, while checkpoints need more."""
    settings = ("--set", "model.hidden=[64]", "--set", "checkpoint.steps=1", "--out", "out")

    def limit() -> None:
        resource.setrlimit(resource.RLIMIT_FSIZE, (20_000, resource.RLIM_INFINITY))

    process = command("run", str(small), *settings, preexec_fn=limit)
    _, err = process.communicate(timeout=120)
    assert process.returncode == 1
    assert err.count("\n") == 1
    assert "File too large. Finished work is saved. Free some space and repeat the command." in err
    assert not list(Path("out").rglob("*.partial"))
