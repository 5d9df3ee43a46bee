"""Experiments: parsing of TOML files and overrides."""

import copy
import math
import re
from pathlib import Path
from typing import Any

import pytest

from torchace.lab.data.datasets import NAMES
from torchace.lab.schema.experiment import Experiment, _check_distinct
from torchace.lab.schema.reading import DATASETS
from torchace.lab.sweeps.config import ConfigError, builtin_names, load_experiment, parse_experiment

LEAST: dict[str, Any] = {"name": "a", "train": {"epochs": 1}}


def test_the_built_in_experiments() -> None:
    assert builtin_names() == [
        "branched",
        "demo",
        "digits",
        "small_members",
        "table1",
        "table2",
        "table2_control",
        "table2_short",
        "underfitting",
    ]


def test_the_guide_lists_every_setting() -> None:
    page = Path(__file__).parents[3] / "docs" / "guides" / "experiments.md"
    listed = set(re.findall(r"`([a-z_]+)`", page.read_text("utf-8").partition("## All settings")[2]))
    for name in ("data", "model", "train", "sweep", "checkpoint"):
        section = Experiment.model_fields[name].annotation
        assert section is not None
        assert set(section.model_fields) <= listed, name


def test_every_combination_of_a_grid_is_an_arm() -> None:
    arms = [{"name": "a", "model": {"dropout": 0.1}}, {"name": "b"}]
    grid = {"data": {"limit": [100, 200]}, "model": {"hidden": [[], [8, 8]]}}
    completed = parse_experiment({**LEAST, "arms": arms, "grid": grid}).complete_arms()
    assert [arm.name for arm in completed[:4]] == [
        "a_limit_100_hidden_none", "a_limit_100_hidden_8_8", "a_limit_200_hidden_none", "a_limit_200_hidden_8_8"
    ]  # fmt: skip
    last = completed[-1]
    assert (last.label, last.cell) == ("b, limit 200, hidden 8 × 8", {"limit": "200", "hidden": "8 × 8"})
    assert (last.data.limit, last.model.hidden, last.model.dropout) == (200, [8, 8], 0.0)
    assert completed[0].model.dropout == 0.1


@pytest.mark.parametrize(
    ("grid", "message"),
    [
        ({"data": {"limit": []}}, "expected grid.data.limit to be a list with at least one value"),
        ({"data": {"limits": [1]}}, "there is no key 'data.limits'. Did you mean 'data.limit'?"),
        ({"model": {"hidden": [[4], [4]]}}, "expected distinct names of arms, but got 'hidden_4' twice"),
        ({"sweep": {"seeds": [[1]]}}, "there is no key 'grid.sweep'"),
    ],
)
def test_a_wrong_grid_is_refused(grid: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=re.escape(message)):
        parse_experiment({**LEAST, "grid": grid})


def test_every_data_set_can_be_chosen() -> None:
    assert DATASETS == NAMES


@pytest.mark.parametrize("name", builtin_names())
def test_every_built_in_experiment_loads(name: str) -> None:
    experiment = load_experiment(name)
    assert experiment.name == name
    assert experiment.title
    arms = experiment.complete_arms()
    assert all(arm.train.steps or arm.train.epochs for arm in arms)
    assert sum(arm.baseline for arm in arms) <= 1
    assert parse_experiment(experiment.model_dump(mode="json")) == experiment  # what a run directory holds


def test_table1_is_the_papers() -> None:
    experiment = load_experiment("table1")
    separate, shared, exchanged = experiment.complete_arms()
    assert [arm.train.batches for arm in (separate, shared, exchanged)] == ["separate", "shared", "exchanged"]
    assert separate.baseline
    assert separate.diversities == [0.0]
    assert shared.diversities == exchanged.diversities == [0.0, 0.05, 0.1, 0.3, 0.5, 0.7]
    assert shared.model.num_members == 5
    assert len(experiment.sweep.seeds) >= 10
    assert experiment.paper is not None
    assert [row.diversity for row in experiment.paper.rows] == shared.diversities


def test_table2_is_the_papers() -> None:
    single, smoc = load_experiment("table2").complete_arms()
    assert (single.model.num_members, smoc.model.num_members) == (1, 10)
    same, control = load_experiment("table2_control").complete_arms()
    assert (same.model, same.train, same.diversities) == (single.model, single.train, single.diversities)
    assert control.model == single.model.model_copy(update={"head_scale": control.model.head_scale})
    assert control.model.head_scale == pytest.approx(1 / math.sqrt(10))
    assert smoc.diversities == [0.0, 0.001, 0.01, 0.05, 0.1, 0.3, 0.5]
    train = smoc.train
    assert (train.steps, train.milestones, train.warmup_steps, train.warmup_learning_rate) == (
        64000,
        [32000, 48000],
        400,
        0.01,
    )
    short = load_experiment("table2_short")
    assert [arm.train.steps for arm in short.complete_arms()] == [16000] * 4
    attached = short.complete_arms()[-1]
    assert (attached.train.detach_others, attached.diversities) == (False, [0.3])


def test_whole_numbers_stand_for_numbers() -> None:
    content = {
        **LEAST,
        "train": {"epochs": 1, "learning_rate": 1, "weight_decay": 0},
        "sweep": {"diversities": [0, 1, 0.5]},
        "arms": [{"name": "b", "train": {"learning_rate": 2}, "diversities": [0, 1]}],
    }
    arm = parse_experiment(content).complete_arms()[0]
    assert arm.train.learning_rate == 2.0
    assert [type(value) for value in arm.diversities] == [float, float]


def test_content_is_not_modified() -> None:
    content = {**copy.deepcopy(LEAST), "arms": [{"name": "b", "train": {"steps": 3}}]}
    before = copy.deepcopy(content)
    parse_experiment(content)
    assert content == before


def test_an_experiment_without_arms_has_one() -> None:
    (arm,) = parse_experiment({**LEAST, "title": "T"}).complete_arms()
    assert (arm.name, arm.label, arm.baseline) == ("main", "shared batches", False)


def test_an_arm_overrides_common_settings() -> None:
    content = {
        **LEAST,
        "model": {"hidden": [3], "num_members": 4},
        "sweep": {"diversities": [0.0, 0.5]},
        "arms": [
            {"name": "one_two", "model": {"hidden": [9]}, "train": {"steps": 7}, "data": {"limit": 50}},
            {"name": "three", "diversities": [0.25], "train": {"epochs": 2}},
        ],
    }
    first, second = parse_experiment(content).complete_arms()
    assert (first.label, first.model.hidden, first.model.num_members) == ("one two", [9], 4)
    assert (first.train.steps, first.train.epochs, first.data.limit) == (7, None, 50)  # its own length alone
    assert (second.train.steps, second.train.epochs, second.diversities) == (None, 2, [0.25])


@pytest.mark.parametrize(
    ("override", "section", "key", "value"),
    [
        ("train.epochs=5", "train", "epochs", 5),
        ("train.steps = 50", "train", "steps", 50),
        (" train . learning_rate =1e-2", "train", "learning_rate", 0.01),
        ("train.learning_rate=1", "train", "learning_rate", 1.0),
        ("model.kind=smoc", "model", "kind", "smoc"),
        ("model.kind='smoc'", "model", "kind", "smoc"),
        ('model.kind="smoc"', "model", "kind", "smoc"),
        ("model.hidden=[8, 4]", "model", "hidden", [8, 4]),
        ("data.augment=true", "data", "augment", True),
        ("sweep.diversities=[0, 0.5]", "sweep", "diversities", [0.0, 0.5]),
        ("checkpoint.steps=1", "checkpoint", "steps", 1),
    ],
)
def test_overrides(override: str, section: str, key: str, value: Any) -> None:
    assert getattr(getattr(load_experiment("digits", [override]), section), key) == value


@pytest.mark.parametrize("override", ["data.arguments.num_samples=1000", "data.arguments={num_classes=3}"])
def test_an_override_that_every_arm_replaces_is_refused(override: str) -> None:
    with pytest.raises(ConfigError, match=r"has no effect: every arm sets data\.arguments itself"):
        load_experiment("demo", [override])


def test_overrides_of_other_settings_reach_every_arm() -> None:
    arms = load_experiment("demo", ["data.limit=300", "train.steps=5", "model.hidden=[3]"]).complete_arms()
    assert [(arm.data.limit, arm.train.steps, arm.model.hidden) for arm in arms] == [(300, 5, [3])] * 2


def test_later_overrides_win_and_strings_may_contain_spaces() -> None:
    experiment = load_experiment("digits", ["train.epochs=5", "train.epochs=6", "title=What the knob = does"])
    assert experiment.train.epochs == 6
    assert experiment.title == "What the knob = does"


def test_a_length_overrides_the_other() -> None:
    train = load_experiment("digits", ["train.steps=5"]).train
    assert (train.epochs, train.steps) == (None, 5)
    train = load_experiment("table2", ["train.epochs=5"]).train
    assert (train.epochs, train.steps) == (5, None)


def test_seeds() -> None:
    assert load_experiment("digits", seeds=range(3)).sweep.seeds == [0, 1, 2]
    assert load_experiment("digits", ["sweep.seeds=[7]"], seeds=range(2)).sweep.seeds == [0, 1]


@pytest.mark.parametrize(
    ("file", "name"),
    [("mine.toml", "mine"), ("My run-2.toml", "my_run_2"), ("λ.toml", "_"), ("a" * 60 + ".toml", "a" * 40)],
)
def test_a_file_gives_its_name(file: str, name: str, tmp_path: Path) -> None:
    path = tmp_path / file
    path.write_text("\ufeff[train]\nepochs = 1\n", "utf-8")  # with the mark that some editors write first
    assert load_experiment(str(path)).name == name
    path.write_text('name = "own"\n[train]\nepochs = 1\n', "utf-8")
    assert load_experiment(str(path)).name == "own"


def test_a_file_needs_no_ending(tmp_path: Path) -> None:
    (tmp_path / "mine").write_text("[train]\nepochs = 1\n")
    assert load_experiment(str(tmp_path / "mine")).train.epochs == 1


def test_a_built_in_name_is_not_a_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "digits").mkdir()
    assert load_experiment("digits").name == "digits"


def test_an_error_is_a_config_error() -> None:
    with pytest.raises(ConfigError, match=r"^digits: there is no key 'train.epoch'. Did you mean 'train.epochs'\?$"):
        load_experiment("digits", ["train.epoch=3"])


def test_many_seeds_are_checked_in_linear_time() -> None:
    """Hidden in a quadratic check: 20,000 seeds took minutes."""
    compared = 0

    class Counting(int):
        def __eq__(self, other: object) -> bool:
            nonlocal compared
            compared += 1
            return int(self) == other

        __hash__ = int.__hash__

    values = [Counting(i) for i in range(2000)]
    assert _check_distinct(values) == values
    assert compared <= 2 * len(values) + len(values)  # the last: of the line above
    with pytest.raises(ValueError, match="got 7 twice"):
        _check_distinct([*range(5000), 7])


def test_a_setting_without_its_section_is_named_with_it() -> None:
    with pytest.raises(ConfigError, match=r"^There is no key 'epochs'. Did you mean 'train.epochs'\?$"):
        load_experiment("digits", ["epochs=5"])
    assert load_experiment("digits", ["name=mine"]).name == "mine"
