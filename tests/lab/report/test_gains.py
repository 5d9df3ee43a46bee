"""Gains by arm, for experiments with many arms."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from tests.lab.report import synthetic_sweeps
from tests.lab.report.figure_lines import draw
from tests.lab.report.synthetic_sweeps import ArmSpec, Spec
from torchace.lab.report import Results, read_results, write_report
from torchace.lab.report.findings import arm_gains, gain_figures, gain_table, has_many_arms, sweep_headline

SLOPES = (-0.05, -0.01, -0.0001, 0.0, 0.0001, 0.01, 0.05, -0.02)  # of cross entropy in λ


def _grid(tmp_path: Path, *, validation: int = 6000, seeds: int = 8) -> Results:
    arms = [
        ArmSpec(f"a{i}", f"arm {i}", 4, [0, 0.3, 0.7], lambda d, slope=slope: 0.2 + slope * d, lambda d: 0.05)
        for i, slope in enumerate(SLOPES)
    ]
    spec = Spec("x", "x", arms, range(seeds), image_shape=None, validation=validation)
    found = read_results(synthetic_sweeps.write(tmp_path / "run", spec))
    for i, arm in enumerate(found.arms):  # a grid of two rows and four columns
        arm.cell.update({"limit": str(i // 4), "hidden": str(i % 4)})
    return found


def test_the_first_seeds_choose_and_the_others_measure(tmp_path: Path) -> None:
    results = _grid(tmp_path)
    assert has_many_arms(results)
    gains = arm_gains(results)
    assert [gains[i].diversity for i in (0, 1, 5, 6, 7)] == [0.7, 0.7, 0, 0, 0.7]
    first = gains[0]
    expected = [
        results.values(first.arm, 0.7, "cross_entropy")[s] - results.values(first.arm, 0.0, "cross_entropy")[s]
        for s in (4, 5, 6, 7)
    ]
    assert first.difference is not None
    assert (first.difference.n, first.difference.mean) == (4, pytest.approx(sum(expected) / 4))
    assert first.relative == pytest.approx(-0.175, rel=0.02)
    assert (gains[6].difference, gains[6].relative) == (None, 0.0)
    found = sweep_headline(results)
    assert found is not None
    assert (found.number, found.detail) == (f"−{-100 * first.relative:.1f} %", "The largest gain: “arm 0” at λ=0.7.")


@pytest.mark.parametrize("validation", [0, 6000])
def test_a_verdict_agrees_with_its_interval(tmp_path: Path, validation: int) -> None:
    for gain in arm_gains(_grid(tmp_path, validation=validation)):
        low, high = (gain.difference and gain.difference.joint_interval) or (0.0, 0.0)
        assert gain.verdict == ("lower" if high < 0 else "higher" if low > 0 else "not significant")


def test_a_choice_on_the_test_data_is_corrected(tmp_path: Path) -> None:
    results = _grid(tmp_path, validation=0)
    gain = arm_gains(results)[0]
    assert gain.difference is not None
    assert (gain.difference.n, gain.difference.tests) == (8, 2)
    assert "corrected for the number of λ" in gain_table(results).note


def test_a_significant_gain_is_not_rounded_to_zero(tmp_path: Path) -> None:
    gain = arm_gains(_grid(tmp_path))[0]
    assert gain.difference is not None
    assert gain.percent == f"−{-100 * gain.relative:.1f}"
    assert replace(gain, test_loss=-1000 * gain.difference.mean / 0.3).percent == "−0.03"
    assert replace(gain, difference=replace(gain.difference, mean=1e-9, estimate=None)).percent == "0.0"


@pytest.mark.parametrize(("seeds", "choice"), [(3, "choose λ; the same seeds"), (4, "choose λ with the first half of")])
def test_the_note_says_which_seeds_choose(tmp_path: Path, seeds: int, choice: str) -> None:
    assert f"The validation data {choice}" in gain_table(_grid(tmp_path, seeds=seeds)).note


def test_the_report_has_one_map_instead_of_figures_for_each_arm(tmp_path: Path) -> None:
    results = _grid(tmp_path)
    (spec,) = gain_figures(results)
    texts = [text.get_text() for text in draw(spec).axes[0].texts]
    assert texts[0] == f"−{-100 * arm_gains(results)[0].relative:.1f}*\nλ=0.7"
    page = write_report(tmp_path / "run").read_text()
    assert "The gain of λ by arm" in page
    assert "λ lowers cross entropy significantly in" in page
    assert not list((tmp_path / "run").glob("report/reliability*"))
