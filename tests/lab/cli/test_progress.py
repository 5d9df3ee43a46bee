"""Progress of searches and fits in a terminal and in a file."""

from __future__ import annotations

import io
import re

import pytest
from rich.console import Console

from torchace.lab.cli.progress import FitProgress, TrialProgress
from torchace.lab.training.loop import Progress
from torchace.lab.tuning.search import SearchStage


def shown_text(screen: io.StringIO) -> str:
    return re.sub(r"\x1b\[[0-9;?]*[A-Za-z]", "", screen.getvalue())


def terminal(screen: io.StringIO) -> Console:
    return Console(file=screen, force_terminal=True, width=100)


@pytest.mark.parametrize(
    ("stage", "words"),
    [
        (SearchStage(2, "search", (0.2, 0.4), (1, 2, 3)), "search for λ, round 2"),
        (SearchStage(3, "gain", (0.0, 0.4), (1, 2, 3)), "λ on fresh seeds"),
    ],
)
def test_a_terminal_sees_the_search(stage: SearchStage, words: str) -> None:
    screen = io.StringIO()
    with FitProgress(terminal(screen)) as progress:
        progress.on_search(stage, 0.5)
        progress.bars.refresh()
    assert re.search(rf"{words} [━╺╸]+ 2 λ x 3 seeds", shown_text(screen))


def test_a_terminal_sees_the_training() -> None:
    screen = io.StringIO()
    with FitProgress(terminal(screen)) as progress:
        progress.on_step(Progress(5, 12, [None]))
        progress.bars.refresh()
        assert "training score" not in shown_text(screen)
        progress.on_step(Progress(6, 12, [0.25]))
        progress.bars.refresh()
    assert re.search(r"training [━╺╸]+ training score 0\.2500", shown_text(screen))
    assert progress.bars.tasks[0].percentage == 50


def test_a_terminal_sees_the_trials() -> None:
    screen = io.StringIO()
    with TrialProgress(terminal(screen), 4) as progress:
        progress.on_trial(0, None, None)
        progress.on_trial(1, 0.5, 0.5)
        progress.bars.refresh()
        assert progress.bars.tasks[0].percentage == 50
        progress.on_trial(7, 0.7, 0.5)  # trials that were tried again have numbers of their own
        assert progress.bars.tasks[0].percentage == 100
    assert re.search(r"trials [━╺╸]+ best 0\.5", shown_text(screen))
    assert "Trial 0" not in shown_text(screen)  # that is for files


def test_a_file_has_a_line_for_each_trial_and_no_bars() -> None:
    file = io.StringIO()
    with TrialProgress(Console(file=file, width=20), 3) as progress:
        progress.on_trial(0, 0.123456, 0.123456)
        progress.on_trial(1, None, 0.123456)
        progress.on_trial(2, 0.2, 0.123456)
    lines = ["Trial 0: 0.1235, best 0.1235.", "Trial 1: not completed, best 0.1235.", "Trial 2: 0.2, best 0.1235."]
    assert file.getvalue().splitlines() == lines
    file = io.StringIO()
    with FitProgress(Console(file=file)) as fit:
        fit.on_search(SearchStage(1, "search", (0.0,), (1,)), 1.0)
        fit.on_step(Progress(1, 2, [0.5]))
    assert file.getvalue() == ""


def test_a_file_has_progress_lines_at_intervals(monkeypatch: pytest.MonkeyPatch) -> None:
    now = 0.0
    monkeypatch.setattr("time.monotonic", lambda: now)
    file = io.StringIO()
    with FitProgress(Console(file=file)) as fit:
        for step in range(1, 41):
            now += 1.0
            fit.on_step(Progress(step, 40, [0.5]))
        now += 10
        fit.on_search(SearchStage(1, "search", (0.0, 0.5), (1,)), 0.25)
    lines = [f"training: step {step} of 40, training score 0.5000." for step in (10, 20, 30, 40)]
    assert file.getvalue().splitlines() == [*lines, "search for λ, round 1: 25 %, 2 λ x 1 seeds."]
