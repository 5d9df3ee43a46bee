"""The progress of searches and fits in the terminal."""

from __future__ import annotations

from types import TracebackType
from typing import Self

from rich.console import Console
from rich.progress import BarColumn, TextColumn, TimeRemainingColumn
from rich.progress import Progress as Bars

from torchace.lab.cli.terminal import printable
from torchace.lab.tables.fit import FitCallback
from torchace.lab.training.loop import Progress
from torchace.lab.tuning.search import SearchCallback, SearchStage


class _Display:
    """One bar; where nobody watches, nothing but what is said."""

    def __init__(self, console: Console) -> None:
        self.console = console
        self.bars = Bars(
            TextColumn("{task.description}"),
            BarColumn(bar_width=24),
            TextColumn("{task.fields[note]}"),
            TimeRemainingColumn(compact=True),
            console=console,
            transient=True,
            disable=not console.is_terminal,
        )
        self.task = self.bars.add_task("", total=None, note="")

    def __enter__(self) -> Self:
        self.bars.start()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None) -> None:
        self.bars.stop()

    def _say(self, text: str) -> None:
        self.console.print(printable(text), markup=False, highlight=False, soft_wrap=True)


class FitProgress(_Display, FitCallback):
    """The rounds of a search for λ, then the training of the model."""

    def on_search(self, stage: SearchStage, fraction: float) -> None:
        if stage.purpose == "gain":
            what = "λ on fresh seeds"
        else:
            what = f"search for λ, round {stage.number}"
        note = f"{len(stage.diversities)} λ x {len(stage.seeds)} seeds"
        self.bars.update(self.task, description=what, total=1.0, completed=fraction, note=note)

    def on_step(self, progress: Progress) -> None:
        value = progress.score[0]
        note = "" if value is None else f"training score {value:.4f}"
        self.bars.update(self.task, description="the model", total=progress.steps, completed=progress.step, note=note)


class TrialProgress(_Display, SearchCallback):
    """The trials of a study."""

    def __init__(self, console: Console, trials: int) -> None:
        super().__init__(console)
        self.trials = trials
        self.bars.update(self.task, description="trials", total=trials)

    def on_trial(self, number: int, value: float | None, best: float | None) -> None:
        note = "" if best is None else f"best {best:.4g}"
        self.bars.update(self.task, completed=min(number + 1, self.trials), note=note)
        if self.bars.disable:
            outcome = "not completed" if value is None else f"{value:.4g}"
            self._say(f"Trial {number}: {outcome}{', ' + note if note else ''}.")
