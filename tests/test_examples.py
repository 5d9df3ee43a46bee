"""The examples run offline and print the documented results."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest

from tests.support.scripts import load_script

pytestmark = pytest.mark.extended

EXAMPLES = Path(__file__).parents[1] / "examples"


def result(name: str) -> Any:
    return load_script(f"examples/{name}.py").main()


def test_a_training_loop_of_three_changed_lines() -> None:
    found = result("training_loop")
    assert found["together"] > found["alone"]
    assert found["together"] > 0.94


def test_heads_disagree_less_than_branches() -> None:
    found = result("smoc_convolutional")
    assert all(values["accuracy"] > 0.9 for values in found.values())
    for diversity in ("0", "0.7"):
        heads, branches = (found[f"{kind} λ={diversity}"]["disagreement"] for kind in ("heads", "branches"))
        assert heads < branches


def test_weights_help_members_of_different_kinds() -> None:
    found = result("mixed_members")
    assert found["weighed"] < found["uniform"]


def test_an_ensemble_of_regressors_beats_its_members() -> None:
    for values in result("regression").values():
        assert values["mse"] < values["member_mse"]
        assert values["mse"] < 0.8  # of targets with a variance of 1


def test_votes_are_learned_from_votes() -> None:
    found = result("soft_labels")
    assert found["votes"]["cross_entropy"] < found["majority"]["cross_entropy"]
    assert found["votes"]["accuracy"] > 0.93


def test_adapted_members_differ_where_fine_tuning_showed_nothing() -> None:
    found = result("adapters_digits")
    assert found["accuracy"] > 0.95
    assert found["mutual_information_unseen"] > 2 * found["mutual_information"]
    assert max(found["loaded"], found["merged"]) < 1e-4  # float32; a merged weight rounds once more


def test_mutual_information_is_higher_on_unfamiliar_inputs() -> None:
    found = result("out_of_distribution")
    assert set(found) == {"inverted", "on its side", "shuffled pixels", "noise"}
    for by_diversity in found.values():
        assert len(by_diversity) == 2
        assert all(0.6 < value <= 1 for values in by_diversity.values() for value in values)


@pytest.mark.parametrize("file", sorted(EXAMPLES.glob("*.py")), ids=lambda file: file.stem)
def test_every_example_has_a_docstring(file: Path) -> None:
    module = load_script(f"examples/{file.name}")
    assert module.__doc__
    assert f"python examples/{file.name}" in module.__doc__
    assert callable(module.main)


def test_the_page_of_examples_names_all_of_them() -> None:
    page = (EXAMPLES.parent / "docs" / "guides" / "examples.md").read_text("utf-8")
    assert set(re.findall(r"^\| `(\w+)\.py` \|", page, re.MULTILINE)) == {file.stem for file in EXAMPLES.glob("*.py")}
