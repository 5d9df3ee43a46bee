"""`torchace.sweep` on user networks: equal to plain training loops, resumable, one-sentence errors."""

from __future__ import annotations

import argparse
import copy
import gc
import importlib
import inspect
import json
import linecache
import re
import signal
import sys
from collections.abc import Callable
from fractions import Fraction
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import sklearn.linear_model
import torch
import torchmetrics
from sklearn.datasets import load_digits
from torch import Tensor, nn

import torchace as ace
from tests.lab.report.synthetic_sweeps import ArmSpec, Spec, write
from tests.lab.sweeps.small_sweeps import train_alone
from torchace.lab.data import Split
from torchace.lab.data.splits import random_split
from torchace.lab.report.formats import percentages
from torchace.lab.schema.experiment import DataSection, ModelSection, SweepSection, TrainSection
from torchace.lab.store import RunStore, RunStoreError
from torchace.lab.sweeps.config import Components, ConfigError, load_experiment
from torchace.lab.sweeps.fingerprint import source_digest, tensor_digest
from torchace.lab.sweeps.sweep import Sweep
from torchace.nn.base import EnsembleModule

DIVERSITIES, SEEDS = (0.0, 0.4, 0.8), (3, 0, 7)
DIGITS = load_digits()
X, Y = torch.tensor(DIGITS.images)[:, None] / 16, torch.tensor(DIGITS.target)
TRAIN, TEST = (X[:160], Y[:160]), (X[160:260], Y[160:260])
SMALL: dict[str, Any] = {"num_members": 2, "diversities": [0.0, 0.5], "seeds": 2, "steps": 2, "batch_size": 40}


class CNN(nn.Module):
    """A small convolutional network with BatchNorm."""

    def __init__(self, width: int = 3, classes: int = 10) -> None:
        super().__init__()
        self.features = nn.Sequential(
            nn.Conv2d(1, width, 3), nn.BatchNorm2d(width), nn.ReLU(), nn.MaxPool2d(2), nn.Flatten()
        )
        self.head = nn.Linear(9 * width, classes)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.features(x))


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> ace.SweepResult:
    return ace.sweep(
        CNN, TRAIN, TEST, num_members=2, diversities=DIVERSITIES, seeds=SEEDS, epochs=2, batch_size=40,
        learning_rate=0.01, precision="float64", validation=0.0, out=tmp_path_factory.mktemp("sweep") / "out",
    )  # fmt: skip


def test_one_network_equals_plain_training_of_each_run(trained: ace.SweepResult) -> None:
    assert [len(group.runs) for group in RunStore(trained.directory).groups()] == [9]
    frame = trained.to_frame().set_index(["diversity", "seed"])
    for diversity in DIVERSITIES:
        for seed in SEEDS:
            make = partial(torch.optim.Adam, lr=0.01)
            members = train_alone(CNN, *TRAIN, ace.amended_cross_entropy, diversity, seed, 8, 40, make)
            ensemble: Any = trained.ensemble(diversity, seed)
            with torch.no_grad():
                expected = torch.stack([member(TEST[0]) for member in members])
                got = ensemble(TEST[0])
            # float64 rounding, amplified by 8 steps of Adam where gradients are tiny (a bias before BatchNorm)
            torch.testing.assert_close(got, expected, rtol=1e-7, atol=1e-8)
            cross_entropy = ace.functional.ensemble_log_probs(expected).gather(1, TEST[1][:, None]).mean().neg()
            assert frame.loc[(diversity, seed), "cross_entropy"] == pytest.approx(float(cross_entropy), rel=1e-6)


KINDS: list[dict[str, Any]] = [
    {"kind": "smoc"},
    {"kind": "smoc", "rank": 2, "head": "head"},
    {"kind": "branch", "at": "head"},
    {"kind": "adapters"},
    {"kind": "adapters", "rank": 2, "layers": ["features"], "freeze": True},
]


@pytest.mark.parametrize("kind", KINDS)
def test_runs_of_members_with_shared_layers_equal_each_run_alone(kind: dict[str, Any]) -> None:
    options = SMALL | kind | {"steps": 4, "precision": "float64", "learning_rate": 0.01}
    together, alone = (ace.sweep(CNN, TRAIN, TEST, **options, group_size=size) for size in (None, 1))
    for diversity in (0.0, 0.5):
        a, b = (result.ensemble(diversity, 1).predict_proba(TEST[0]) for result in (together, alone))
        torch.testing.assert_close(a, b, rtol=1e-8, atol=1e-10)
        assert not a.allclose(together.ensemble(diversity, 0).predict_proba(TEST[0]))


def test_a_users_smoc_is_stacked_unchanged() -> None:
    def make() -> EnsembleModule:
        return ace.SMOC(nn.Sequential(nn.Flatten(), nn.Linear(64, 6), nn.ReLU()), 6, 10, num_members=2)

    result = ace.sweep(make, TRAIN, TEST, **SMALL, kind="smoc")
    assert isinstance(result.ensemble(0.5, 0), ace.SMOC)
    with pytest.raises(ValueError, match=r"Expected .*make to return an ensemble of 3 members, but it has 2"):
        ace.sweep(make, TRAIN, TEST, **SMALL | {"num_members": 3}, kind="smoc")
    with pytest.raises(ValueError, match="to return one member, but it returned the ensemble SMOC"):
        ace.sweep(make, TRAIN, TEST, **SMALL)


def test_settings_may_be_numbers_of_numpy_and_torch() -> None:
    def largest(logits: Tensor, target: Tensor) -> Tensor:
        return logits.amax()

    result = ace.sweep(
        lambda: ace.branch(CNN(), 2, at="head"),
        TRAIN,
        TEST,
        **SMALL
        | {"seeds": np.int64(1), "diversities": torch.tensor(0.5), "device": torch.device("cpu"), "kind": "branch"},
        learning_rate=Fraction(1, 100),
        validation=torch.tensor(0.25),
        metrics=largest,
    )
    assert repr(result) == "Sweep of 1 λ and 1 seed, 1 run"
    assert result.table().largest.item() == result.to_frame().largest.item()


def test_frame_table_and_best(trained: ace.SweepResult) -> None:
    frame = trained.to_frame()
    assert frame[["diversity", "seed"]].values.tolist() == [[d, s] for d in DIVERSITIES for s in sorted(SEEDS)]
    needed = {"accuracy", "cross_entropy", "member_accuracy", "disagreement", "status", "seconds", "parameters"}
    assert needed <= set(frame.columns)
    lines = str(trained).split("\ndiversity")[1].splitlines()
    assert max(map(len, lines)) <= 80  # one column for each λ
    table = trained.table()
    assert table.index.tolist() == list(DIVERSITIES)
    means = frame.groupby("diversity")["cross_entropy"].mean()
    torch.testing.assert_close(table["cross_entropy"].tolist(), means.tolist())
    paired = frame.pivot(index="seed", columns="diversity", values="cross_entropy")
    difference = (paired[0.8] - paired[0.0]).mean()
    assert table.loc[0.8, "difference"] == pytest.approx(difference)
    assert table.loc[0.8, "low"] < difference < table.loc[0.8, "high"]
    with pytest.raises(ValueError, match=r"best\(\) needs validation data, .* Use sweep\(\.\.\., validation=0\.2\)"):
        trained.best()


def test_best_is_chosen_on_validation_data() -> None:
    result = ace.sweep(CNN, TRAIN, TEST, **SMALL | {"seeds": 3}, validation=0.25)
    best = result.best()
    frame = result.to_frame()
    assert best.diversity in (0.0, 0.5)
    chosen = frame[frame.diversity == best.diversity]
    assert best.validation_cross_entropy == pytest.approx(chosen["validation_cross_entropy"].mean())
    assert best.cross_entropy == pytest.approx(chosen["cross_entropy"].mean())


def test_best_is_the_lowest_of_the_significantly_better_ones(tmp_path: Path) -> None:
    arm = ArmSpec("main", "", 3, [0, 0.3, 0.9], lambda d: 0.3, lambda d: 0.1)
    directory = write(tmp_path / "run", Spec("a", "a", [arm], seeds=[0, 1, 2], validation=100))
    losses = {0.0: [0.30, 0.31, 0.32], 0.3: [0.28, 0.292, 0.299], 0.9: [0.10, 0.10, 0.50]}  # the last: too much noise
    files = {file: json.loads(file.read_text()) for file in directory.glob("runs/*.json")}
    for file, run in files.items():
        run["metrics"]["validation"]["cross_entropy"] = losses[run["diversity"]][run["seed"]]
        file.write_text(json.dumps(run))
    assert ace.SweepResult(directory).best().diversity == 0.3
    for file, run in files.items():
        file.write_text(json.dumps({**run, "status": "failed", "metrics": None}))
    with pytest.raises(ValueError, match=r"best\(\) needs a finished run, but all runs failed"):
        ace.SweepResult(directory).best()


@pytest.mark.parametrize("form", [tuple, lambda part: torch.utils.data.TensorDataset(*part)], ids=["pair", "Dataset"])
def test_validation_data_may_be_given(form: Callable[..., Any], tmp_path: Path) -> None:
    options = SMALL | {"steps": None, "epochs": 4, "patience": 1, "learning_rate": 0.03}
    drawn = ace.sweep(CNN, TRAIN, TEST, validation=0.25, **options).to_frame()
    train, validation = (form((part.x, part.y)) for part in random_split(Split(*TRAIN), 40, seed=0))
    given = ace.sweep(CNN, train, TEST, validation=validation, out=tmp_path, **options).to_frame()
    assert given.drop(columns="seconds").equals(drawn.drop(columns="seconds"))
    with pytest.raises(RunStoreError, match="another data"):
        ace.sweep(CNN, train, TEST, validation=train, out=tmp_path, **options)


def test_report_plot_and_notebook(trained: ace.SweepResult) -> None:
    table = trained.table()
    best = table.loc[table.cross_entropy[table.index > 0].idxmin()]
    ends = percentages([best.difference, best.low, best.high], table.cross_entropy[0.0])
    effect = "does not change" if best.low <= 0 <= best.high else "lowers" if best.high < 0 else "raises"
    page = trained.report().read_text().replace("\u00a0", " ")
    assert f"λ={best.name:g} {effect} cross entropy" in page
    assert f">{ends[0]} %</p>" in page
    assert f"95 % interval {ends[1]} to {ends[2]} %, corrected for 2 λ" in page
    for row in table.itertuples():  # every λ has its row
        assert f"{row.cross_entropy:.4f} ± {row.cross_entropy_sd:.4f}" in page
    figure = trained.plot()
    assert len(figure.subfigs) == 2
    assert all(part.axes for part in figure.subfigs)
    shown = trained._repr_html_()
    assert "<table" in shown
    assert repr(trained) in shown


def test_one_member_has_no_diversity_and_no_effect_of_it(tmp_path: Path) -> None:
    result = ace.sweep(CNN, TRAIN, TEST, **SMALL | {"num_members": 1}, out=tmp_path)
    assert "difference" not in result.table()  # of rounding errors
    assert "may change" not in str(result)
    text = result.report().with_name("results.md").read_text()
    assert "One member: Accuracy" in text
    assert not any(word in text for word in ("Members: Disagreement", "Each λ against λ=0", "| – |"))
    for file in tmp_path.glob("runs/*"):
        file.unlink()
    assert "## Results" not in result.report().with_name("results.md").read_text()  # no empty table


def test_a_temporary_directory_lives_as_long_as_the_result() -> None:
    result = ace.sweep(CNN, TRAIN, TEST, **SMALL, keep_weights=False)
    directory = result.directory
    assert directory.exists()
    with pytest.raises(RunStoreError, match="they were not kept; use keep_weights=True and another `out`"):
        result.ensemble(0.5, 1)
    with pytest.raises(RunStoreError, match=r"holds no run λ=0\.2, seed 1"):
        result.ensemble(0.2, 1)
    del result
    gc.collect()
    assert not directory.exists()


def test_a_directory_resumes_and_refuses_other_objects(tmp_path: Path) -> None:
    first = ace.sweep(CNN, TRAIN, TEST, **SMALL, out=tmp_path).to_frame()
    files = {file: file.stat().st_mtime_ns for file in tmp_path.glob("runs/*")}
    more = ace.sweep(CNN, TRAIN, TEST, **SMALL | {"seeds": 3}, out=tmp_path).to_frame()
    assert {file: file.stat().st_mtime_ns for file in files} == files  # finished runs are kept
    assert len(more) == 6
    assert more[more.seed < 2].reset_index(drop=True).equals(first)
    with pytest.raises(RunStoreError, match=r"factory = '.*:CNN', but now it is '.*<lambda>'\. Choose another `out`"):
        ace.sweep(lambda: CNN(), TRAIN, TEST, **SMALL, out=tmp_path)
    with pytest.raises(RunStoreError, match="holds runs with another data"):
        ace.sweep(CNN, (TRAIN[0] + 1e-3, TRAIN[1]), TEST, **SMALL, out=tmp_path)
    with pytest.raises(RunStoreError, match=r"data\.validation = 0\.0, but now it is 0\.25"):  # the data differ too
        ace.sweep(CNN, TRAIN, TEST, **SMALL, validation=0.25, out=tmp_path)
    labels = torch.zeros(100_000, dtype=torch.long)  # one corrected label of many
    assert tensor_digest([labels]) != tensor_digest([labels.index_fill(0, torch.tensor(1), 1)])
    with pytest.raises(RunStoreError, match=r"holds runs with train.batch_size = 40, but now it is 20"):
        ace.sweep(CNN, TRAIN, TEST, **SMALL | {"batch_size": 20}, out=tmp_path)


def test_a_changed_function_is_another_one(tmp_path: Path) -> None:
    def sweep_of_width(width: int) -> None:
        ace.sweep(lambda: CNN(width), TRAIN, TEST, **SMALL, out=tmp_path)

    sweep_of_width(3)
    sweep_of_width(3)
    with pytest.raises(RunStoreError, match="holds runs with another factory of members"):
        sweep_of_width(4)


class Maker:
    """A factory with a setting of its own."""

    def __init__(self, width: int) -> None:
        self.width = width

    def __call__(self) -> nn.Module:
        return CNN(self.width)

    def make(self) -> nn.Module:
        return CNN(self.width)


WIDTHS, SCALE, ARGS = [3], torch.ones(1), argparse.Namespace()
CONFIG, FILL = sklearn.linear_model.Ridge(), nn.Linear(1, 1)  # an object and a network of installed packages
CHANGED: dict[str, Callable[[int], Any]] = {
    "object": Maker,
    "method": lambda width: Maker(width).make,
    "lambdas of one line": lambda width: (lambda: CNN(3)) if width == 3 else (lambda: CNN(4)),
    "list": lambda width: WIDTHS.__setitem__(0, width) or (lambda: CNN(WIDTHS[0])),
    "parsed arguments": lambda width: setattr(ARGS, "width", width) or (lambda: CNN(ARGS.width)),
    "enclosed arguments": lambda width: (lambda args: lambda: CNN(args.width))(argparse.Namespace(width=width)),
    "configuration": lambda width: CONFIG.set_params(alpha=width) and (lambda: CNN(int(CONFIG.alpha))),
    "network": lambda width: nn.init.constant_(FILL.weight, width) is None or (lambda: CNN(int(FILL.weight))),
    "tensor": lambda width: SCALE.fill_(width) and (lambda: CNN(int(SCALE))),
}


@pytest.mark.parametrize("kind", CHANGED)
def test_a_function_with_other_values_is_another_one(kind: str, tmp_path: Path) -> None:
    make = CHANGED[kind]
    ace.sweep(make(3), TRAIN, TEST, **SMALL, out=tmp_path)
    ace.sweep(make(3), TRAIN, TEST, **SMALL, out=tmp_path)
    with pytest.raises(RunStoreError, match="holds runs with another factory of members"):
        ace.sweep(make(4), TRAIN, TEST, **SMALL, out=tmp_path)


def test_a_function_of_another_file_of_the_user_is_part_of_the_fingerprint(
    own_code: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    factory = "import blocks\nfrom torch import nn\n\ndef make():\n    return blocks.block()\n"
    block = "from torch import nn\n\ndef block():\n    return nn.Sequential(nn.Flatten(), nn.Linear(64, 10))\n"
    for content in (block, block, block.replace("64, 10)", "64, 10, bias=False)")):
        for name, text in {"blocks": content, "factories": factory}.items():
            (own_code / f"{name}.py").write_text(text)
            sys.modules.pop(name, None)
        if content == block:
            ace.sweep("factories:make", TRAIN, TEST, **SMALL, out=own_code / "out")
            continue
        with pytest.raises(RunStoreError, match="holds runs with another factory of members"):
            ace.sweep("factories:make", TRAIN, TEST, **SMALL, out=own_code / "out")


def test_the_code_of_an_installed_package_is_part_of_the_fingerprint(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (folder := tmp_path / "site-packages").mkdir()
    monkeypatch.syspath_prepend(folder)
    code = """def one(): ...
def two(): ...
KNOWN = {one, two, len}
def activation(): return "ReLU"
class Net:
    def __init__(self): self.last = activation()
def make(): return Net() if KNOWN else None
"""
    digests = []
    for content in (code, code, code.replace("ReLU", "Tanh")):
        (folder / "installed_nets.py").write_text(content)
        linecache.clearcache()
        sys.modules.pop("installed_nets", None)
        importlib.invalidate_caches()
        module = importlib.import_module("installed_nets")
        digests.append((source_digest(module.make), source_digest(module.Net)))
    assert digests[0] == digests[1]  # functions in a set have other addresses
    assert not set(digests[0]) & set(digests[2])


def test_a_metric_object_is_the_same_after_its_use(tmp_path: Path) -> None:
    metric = torchmetrics.classification.MulticlassF1Score(10)
    first = ace.sweep(CNN, TRAIN, TEST, **SMALL, metrics=metric, out=tmp_path).to_frame()
    assert ace.sweep(CNN, TRAIN, TEST, **SMALL, metrics=metric, out=tmp_path).to_frame().equals(first)
    other = torchmetrics.classification.MulticlassF1Score(10, average="weighted")
    with pytest.raises(RunStoreError, match="holds runs with other metrics"):
        ace.sweep(CNN, TRAIN, TEST, **SMALL, metrics=other, out=tmp_path)


def test_ensembles_of_wrong_names_are_refused(tmp_path: Path) -> None:
    result = ace.sweep(lambda: CNN(), TRAIN, TEST, **SMALL, learning_rate=[0.1, 0.2], out=tmp_path)
    with pytest.raises(ValueError, match=r"Expected `arm` to be one of 'main', but got 'other'"):
        result.ensemble(0.5, 1, arm="other", learning_rate=0.1)
    with pytest.raises(RunStoreError, match=r"holds no run λ=0\.5, seed 1, learning rate 0\.3"):
        result.ensemble(0.5, 1, learning_rate=0.3)
    with pytest.raises(ValueError, match="Repeat the call of sweep"):
        ace.SweepResult(tmp_path).ensemble(0.5, 1, learning_rate=0.1)
    changed = ace.SweepResult(tmp_path, Components(member=lambda: CNN(width=5)))
    with pytest.raises(ValueError, match=r"weights of run λ=0\.5, seed 1, .* \(main\) do not fit the network"):
        changed.ensemble(0.5, 1, learning_rate=0.1)
    content = json.loads((tmp_path / "experiment.json").read_text())
    content["config"]["train"]["epoch"] = content["config"]["train"].pop("epochs")  # of another version
    del content["sha256"]
    (tmp_path / "experiment.json").write_text(json.dumps(content))
    with pytest.raises(ConfigError, match=r"experiment\.json: there is no key 'train\.epoch'.*'train\.epochs'\?$"):
        result.ensemble(0.5, 1, learning_rate=0.1)


def test_an_interrupt_saves_a_checkpoint_and_the_next_call_continues(tmp_path: Path) -> None:
    epochs = []

    class Interrupts(ace.lab.Callback):
        def on_group_epoch_end(self, group: Any, progress: Any) -> None:
            epochs.append(progress.epoch)
            if len(epochs) == 3:
                signal.raise_signal(signal.SIGINT)

    options = SMALL | {"steps": None, "epochs": 6}
    before = signal.getsignal(signal.SIGINT)
    with pytest.raises(KeyboardInterrupt):
        ace.sweep(CNN, TRAIN, TEST, **options, callbacks=Interrupts(), out=tmp_path)
    assert signal.getsignal(signal.SIGINT) is before
    resumed = ace.sweep(CNN, TRAIN, TEST, **options, callbacks=Interrupts(), out=tmp_path).to_frame()
    assert epochs == [1, 2, 3, 4, 5, 6]
    assert resumed.cross_entropy.equals(ace.sweep(CNN, TRAIN, TEST, **options).to_frame().cross_entropy)


def test_random_numbers_of_factories_are_seeded() -> None:
    import numpy as np

    def make() -> nn.Module:
        network = CNN()
        nn.init.constant_(network.head.bias, float(np.random.rand()))  # noqa: NPY002
        return network

    state = torch.get_rng_state()
    a, b = (ace.sweep(make, TRAIN, TEST, **SMALL).to_frame() for _ in range(2))
    assert a["cross_entropy"].tolist() == b["cross_entropy"].tolist()
    assert torch.equal(torch.get_rng_state(), state)


def test_a_batch_larger_than_own_data_holds_all_samples() -> None:
    large, exact = (ace.sweep(CNN, TRAIN, TEST, **SMALL | {"batch_size": size}) for size in (1000, 160))
    assert large.to_frame()["cross_entropy"].equals(exact.to_frame()["cross_entropy"])


def test_failed_runs_have_no_metrics() -> None:
    def make() -> nn.Module:
        network = CNN()
        nn.init.constant_(network.head.weight[0], torch.inf)
        return network

    with pytest.warns(UserWarning, match=r"4 runs failed \(NaN or Inf .*\): λ=0 with seed 0, "):
        result = ace.sweep(make, TRAIN, TEST, **SMALL)
    assert result.to_frame()["status"].tolist() == ["failed"] * 4
    assert len(result.table()) == 0
    sentence = "All runs failed. The first one is λ=0 with seed 0: NaN or Inf in loss or gradient."
    assert str(result) == f"Sweep of 2 λ and 2 seeds, 4 runs\n{sentence}"
    assert result._repr_html_().endswith(f"<p>{sentence}</p>")
    assert "Failed runs" in result.report().read_text()
    with pytest.raises(ValueError, match="nothing to plot"):
        result.plot()
    with pytest.raises(RunStoreError, match=r"There are no weights of .*: the run failed"):
        result.ensemble(0.5, 1)


def test_equal_members_are_detected() -> None:
    trained = CNN()
    with pytest.warns(UserWarning, match="start with the same weights"):
        ace.sweep(lambda: copy.deepcopy(trained), TRAIN, TEST, **SMALL)


def test_defaults_are_those_of_toml_files() -> None:
    parameters = inspect.signature(ace.sweep).parameters
    sections = [TrainSection(), ModelSection(), DataSection(), SweepSection()]
    other = {"optimizer", "diversities", "seeds", "name", "metrics", "arguments", "at", "adapter", "layers", "test"}
    for section in sections:
        for key in type(section).model_fields:
            if key in parameters and key not in other:
                assert parameters[key].default == getattr(section, key), key
    assert list(parameters["diversities"].default) == SweepSection().diversities
    assert list(range(parameters["seeds"].default)) == SweepSection().seeds
    assert parameters["optimizer"].default == TrainSection().optimizer


class Odd(CNN):
    calls = 0

    def __init__(self) -> None:
        Odd.calls += 1
        super().__init__(width=3 + Odd.calls % 2)


SHARED = CNN()
BAD: dict[str, tuple[Any, dict[str, Any], str]] = {
    "module": (CNN(), {}, "`member` to be a function that returns a new module, but got CNN"),
    "no module": (lambda: 3, {}, "to return a module .*, but it returned int"),
    "the same": (lambda: SHARED, {}, "to return a new module at every call, but it returned the same one twice"),
    "no parameters": (nn.Flatten, {}, "a module with parameters to train"),
    "lazy": (
        lambda: nn.Sequential(nn.Flatten(), nn.LazyLinear(10)),
        {},
        "has lazy layers without weights. Give their input sizes",
    ),
    "raises": (lambda: nn.Linear(-1, 3), {}, "The function <lambda> failed with RuntimeError: "),
    "architectures": (Odd, {}, "of one architecture.*All calls of Odd must return the same architecture"),
    "outputs": (lambda: CNN(classes=7), {}, r"to return \(N, 10\), .*, but it returned \(4, 7\)"),
    "shape": (lambda: nn.Conv2d(1, 10, 3), {}, r"here \(4, 10\), .*, but it returned \(4, 10, 6, 6\)"),
    "input": (lambda: nn.Linear(3, 10), {}, r"fails on inputs \(4, 1, 8, 8\) float32"),
    "missing": (lambda width: CNN(width), {}, "missing a required argument: 'width'"),
    "unknown": (CNN, {"arguments": {"depth": 3}}, "got an unexpected keyword argument 'depth'"),
    "no function": ("torchace.models:mpl", {}, "no 'mpl' in torchace.models. Did you mean 'mlp'"),
    "keyword": (CNN, {"epoch": 3}, r"unexpected keyword argument 'epoch'. Did you mean 'epochs'"),
    "no length": (CNN, {"steps": None}, "Expected `epochs` or `steps`, but got neither"),
    "both": (CNN, {"epochs": 3}, "Expected `epochs` or `steps`, but got both"),
    "lambda": (CNN, {"diversities": [0, 1.5]}, "Expected diversities.* to be at most 1, but got 1.5"),
    "twice": (CNN, {"learning_rate": [0.1, 0.1]}, "^learning_rate: expected every value once, but got 0.1 twice"),
    "kind": (CNN, {"kind": "boosted"}, "Expected kind to be 'separate', 'smoc', 'branch' or 'adapters'"),
    "branch": (CNN, {"kind": "branch"}, "needs `at`"),
    "seeds": (CNN, {"seeds": 0}, "Expected 1 to 10000 seeds, but got seeds=0"),
    "many seeds": (CNN, {"seeds": 2**70}, "Expected 1 to 10000 seeds, but got seeds=1180591620717411303424"),
    "half seeds": (CNN, {"seeds": 2.0}, r"Expected seeds to be a whole number or a list, but got 2\.0"),
    "seed flag": (CNN, {"seeds": True}, "Expected seeds to be a whole number or a list, but got True"),
    "auto": (CNN, {"diversities": "auto"}, "Expected diversities to be a number or a list, but got 'auto'"),
    "text": (CNN, {"arguments": ["a"]}, r"Expected arguments to be a dict, but got \['a'\]"),
    "out": (CNN, {"out": ""}, "Expected `out` to be a path, but got ''"),
    "ray": (CNN, {"ray": 3}, "Expected `ray` to be text, but got 3"),
    "no dict": (CNN, {"arguments": []}, r"Expected arguments to be a dict, but got \[\]"),
    "device": (CNN, {"device": 99}, "Cannot use the device 'cuda:99'"),
    "numpy device": (CNN, {"device": np.int64(99)}, "Cannot use the device 'cuda:99'"),
    "device flag": (CNN, {"device": True}, "Cannot use the device 'True'"),
    "lr": (CNN, {"lr": 0.1}, "unexpected keyword argument 'lr'. Did you mean 'learning_rate'"),
    "target": (CNN, {"target": "y"}, r"a DataFrame or a Dataset for `target`, .* but got \(X, y\)"),
    "no optimizer": (CNN, {"optimizer": 3}, "got an object of type int. Use 'adam'"),
    "separate": (CNN, {"batches": "separate"}, "^λ > 0 needs members that see each other's predictions"),
    "callback": (
        CNN,
        {"callbacks": [ace.lab.Callback]},
        "Expected callbacks of a class derived from torchace.lab.Callback",
    ),
    "layer": (CNN, {"kind": "branch", "at": "heads"}, "Expected `at` to name a layer of the model, but got 'heads'"),
    "own batches": (CNN, {"kind": "smoc", "batches": "exchanged"}, "expected 'shared' for members .*share layers"),
    "patience": (CNN, {"patience": 3}, "`patience` needs validation data"),
    "metrics": (CNN, {"metrics": {"loss": len}}, "Expected `metrics` to be a list of functions, but got 'loss' in it"),
    "object": (CNN, {"arguments": {"width": nn.Identity()}}, "Expected `arguments` and .*functools.partial"),
    "optimizer": (CNN, {"optimizer": torch.optim.SGD([torch.ones(1)], lr=1)}, "got an object of type SGD"),
    "rates": (CNN, {"optimizer_arguments": {"lr": 0.2}}, "`optimizer_arguments` has `lr`; give it as `learning_rate`"),
    "decays": (
        CNN,
        {"weight_decay": 0.1, "optimizer_arguments": {"weight_decay": 0.5}},
        "`optimizer_arguments` has `weight_decay` too; give it once",
    ),
    "no λ": (CNN, {"diversities": None}, "Expected diversities to be a number or a list, but got None"),
    "at": (CNN, {"at": "head"}, "`at` needs kind='branch', but got kind='separate'"),
    "parallel": (CNN, {"parallel": "members"}, r"parallel='members' needs several processes: torchrun"),
    "limit": (CNN, {"limit": 999}, "^limit: expected at most 160"),
    "one class": (CNN, {"num_classes": 1}, "Expected num_classes to be at least 2, but got 1"),
    "transform": (CNN, {"transform": lambda x: x @ torch.ones(3, 3)}, "The transform failed with RuntimeError: "),
}


@pytest.mark.parametrize("name", BAD)
def test_bad_input_is_one_sentence(name: str) -> None:
    member, options, message = BAD[name]
    with pytest.raises((TypeError, ValueError), match=message) as caught:
        ace.sweep(member, TRAIN, TEST, **SMALL | options)
    text = str(caught.value)
    assert "\n" not in text
    assert re.match(r"[A-Z`λ]|sweep\(\)|(learning_rate|member|arguments|batches|limit): |kind = |parallel=", text)


TOML = """
[data]
factory = "own_code:load"
arguments = { size = 60 }
[model]
factory = "own_code:make_member"
arguments = { width = 3 }
num_members = 2
[train]
steps = 2
batch_size = 20
[sweep]
diversities = [0.0, 0.5]
seeds = [0, 1]
"""
CODE = """
import torch
from torch import nn

def make_member(width):
    return nn.Sequential(nn.Linear(4, width), nn.ReLU(), nn.Linear(width, 3))

def load(size):
    generator = torch.Generator().manual_seed(0)
    x, y = torch.randn(size, 4, generator=generator), torch.arange(size) % 3
    return (x, y), (x, y)
"""


@pytest.fixture
def own_code(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A TOML file and the module that it names, in the current directory."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.delitem(sys.modules, "own_code", raising=False)
    (tmp_path / "own.toml").write_text(TOML)
    (tmp_path / "own_code.py").write_text(CODE)
    return tmp_path


def test_a_toml_file_names_code_in_the_current_directory(own_code: Path) -> None:
    assert Sweep(load_experiment("own.toml"), own_code / "out").run() == {}
    from_file = ace.SweepResult(own_code / "out")
    names = importlib.import_module("own_code")
    given = ace.sweep(
        names.make_member, *names.load(60), arguments={"width": 3}, num_members=2, steps=2, batch_size=20, seeds=2,
        diversities=[0.0, 0.5],
    )  # fmt: skip
    columns = ["diversity", "seed", "accuracy", "cross_entropy", "disagreement"]
    assert from_file.to_frame()[columns].equals(given.to_frame()[columns])
    x = torch.randn(5, 4)
    assert from_file.ensemble(0.5, 1)(x).equal(given.ensemble(0.5, 1)(x))


@pytest.mark.parametrize(
    ("old", "new", "message"),
    [
        (
            "make_member",
            "make_mebmer",
            "model.factory: there is no 'make_mebmer' in own_code. Did you mean 'make_member'",
        ),
        ("own_code:make", "other:make", "model.factory: there is no module 'other' in the current directory"),
        ("own_code:make_member", "own_code", "expected model.factory to be the name of an object, such as"),
        ("{ width = 3 }", "{ depth = 3 }", r"model.arguments: expected arguments of make_member\(width\), but missing"),
        ("{ size = 60 }", "{ sise = 60 }", "data.arguments: expected arguments of load"),
        ("own_code:make_member", "torch:pi", "model.factory: expected torch:pi to be a function or a class"),
    ],
)
def test_wrong_names_in_a_toml_file(own_code: Path, old: str, new: str, message: str) -> None:
    (own_code / "own.toml").write_text(TOML.replace(old, new))
    with pytest.raises(ConfigError, match=message):
        Sweep(load_experiment("own.toml"), own_code / "out").run()
    assert not (own_code / "out").exists()


def test_code_that_fails_to_import(own_code: Path) -> None:
    (own_code / "own_code.py").write_text("import torch\nraise RuntimeError('not today')")
    with pytest.raises(ConfigError, match=r"model.factory: cannot import own_code: RuntimeError: not today"):
        Sweep(load_experiment("own.toml"), own_code / "out").run()
