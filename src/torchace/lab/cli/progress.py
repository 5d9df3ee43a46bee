"""Progress of sweeps, fits and searches in the terminal."""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Self

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, ProgressColumn, TaskID, TextColumn, TimeRemainingColumn
from rich.progress import Progress as Bars

from torchace.lab.cli.terminal import print_line
from torchace.lab.schema.results import GroupPlan, RunKey
from torchace.lab.sweeps.callbacks import Callback
from torchace.lab.training.loop import Progress
from torchace.lab.tuning.search import SearchCallback, SearchStage

SECONDS_BETWEEN_LINES = 10.0


class _Display:
    """Progress bars in a terminal; elsewhere messages, and a line now and then."""

    def __init__(self, console: Console, *columns: ProgressColumn) -> None:
        self.console = console
        self._next_line = time.monotonic() + SECONDS_BETWEEN_LINES
        self.bars = Bars(
            TextColumn("{task.description}"),
            BarColumn(bar_width=24),
            *columns,
            TextColumn("{task.fields[note]}"),
            TimeRemainingColumn(compact=True),
            console=console,
            transient=True,
            disable=not console.is_terminal,
        )

    def __enter__(self) -> Self:
        self.bars.start()
        return self

    def __exit__(self, *error: object) -> None:
        self.bars.stop()

    def _print(self, text: str) -> None:
        print_line(text, self.console)

    def _update(self, task: TaskID, title: str, *, done: float, total: float, unit: str = "", note: str = "") -> None:
        """Move a bar; without a terminal, print a line, at most one every few seconds."""
        self.bars.update(task, description=title, completed=done, total=total, note=note)
        if self.bars.disable and time.monotonic() >= self._next_line:
            self._next_line = time.monotonic() + SECONDS_BETWEEN_LINES
            place = f"{unit} {done:g} of {total:g}" if unit else f"{100 * done / total:.0f} %"
            self._print(f"{title.strip()}: {place}{', ' + note if note else ''}.")


class SweepProgress(_Display, Callback):
    """A bar for all runs and one for each run group; without a terminal, a line for each finished group."""

    def __init__(self, console: Console) -> None:
        super().__init__(console, MofNCompleteColumn())
        self.total = 0
        self.groups: dict[str, TaskID] = {}

    def on_plan(self, done: int, total: int) -> None:
        """Show how many runs are finished."""
        self.total = total
        if done:
            self._print(f"{done} of {total} runs are already finished.")
        self.runs = self.bars.add_task("runs", total=total, completed=done, note="")

    def on_group_start(self, group: GroupPlan) -> None:
        """Add a bar."""
        self.groups[group.id] = self.bars.add_task(f"  {_describe(group.runs)}", total=None, note="")

    def on_group_step(self, group: GroupPlan, progress: Progress) -> None:
        """Update a bar."""
        values = [value for value in progress.score if value is not None]  # None: failed runs
        note = f"{progress.metric.replace('_', ' ')} {sum(values) / len(values):.4f}" if values else ""
        title, task = f"  {_describe(group.runs)}", self.groups[group.id]
        self._update(task, title, done=progress.step, total=progress.steps, unit="step", note=note)

    def on_group_end(self, group: GroupPlan, done: int) -> None:
        """Remove a bar, or print a line."""
        self.bars.remove_task(self.groups.pop(group.id))
        self.bars.update(self.runs, completed=done)
        if self.bars.disable:
            self._print(f"{_describe(group.runs)}: {done} of {self.total} runs are finished.")

    def on_worker_lost(self, group: GroupPlan, reason: str) -> None:
        """Print the reason."""
        self._print(f"{_describe(group.runs)}: the worker died ({reason}). Resuming from the newest checkpoint.")

    def on_group_restart(self, group: GroupPlan) -> None:
        """Print the reason."""
        self._print(f"{_describe(group.runs)}: removed a checkpoint of other runs. Training starts again.")


class FitProgress(_Display, SearchCallback):
    """A bar for the search for λ, then for the training."""

    def __init__(self, console: Console) -> None:
        super().__init__(console)
        self.task = self.bars.add_task("", total=None, note="")

    def on_search(self, stage: SearchStage, fraction: float) -> None:
        """Show the stage of the search."""
        title = "gain of λ on fresh seeds" if stage.purpose == "gain" else f"search for λ, round {stage.number}"
        note = f"{len(stage.diversities)} λ x {len(stage.seeds)} seeds"
        self._update(self.task, title, done=fraction, total=1.0, note=note)

    def on_estimate(self, seconds: float) -> None:
        """Print the time that the search will take."""
        length = f"{seconds:.0f} s" if seconds < 100 else f"{seconds / 60:.0f} min"
        self._print(f"The search for λ will take at most about {length}; --diversity 0 skips it.")

    def on_step(self, progress: Progress) -> None:
        """Show the training score."""
        value = progress.score[0]
        note = "" if value is None else f"training score {value:.4f}"
        self._update(self.task, "training", done=progress.step, total=progress.steps, unit="step", note=note)


class TrialProgress(_Display, SearchCallback):
    """A bar for the trials; without a terminal, a line for each."""

    def __init__(self, console: Console, trials: int) -> None:
        super().__init__(console)
        self.trials = trials
        self.task = self.bars.add_task("trials", total=trials, note="")

    def on_trial(self, number: int, value: float | None, best: float | None) -> None:
        """Show the best value."""
        note = "" if best is None else f"best {best:.4g}"
        self.bars.update(self.task, completed=min(number + 1, self.trials), note=note)
        if self.bars.disable:
            outcome = "not completed" if value is None else f"{value:.4g}"
            self._print(f"Trial {number}: {outcome}{', ' + note if note else ''}.")


def _describe(runs: Sequence[RunKey]) -> str:
    lambdas = sorted({run.diversity for run in runs})
    seeds = sorted({run.seed for run in runs})
    values = ", ".join(f"{value:g}" for value in lambdas) if len(lambdas) < 4 else f"{lambdas[0]:g}…{lambdas[-1]:g}"
    return f"{runs[0].arm} λ={values}, " + (f"seed {seeds[0]}" if len(seeds) == 1 else f"{len(seeds)} seeds")
