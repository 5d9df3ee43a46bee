"""A sweep's progress in the terminal."""

from __future__ import annotations

from collections.abc import Sequence
from types import TracebackType

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, TaskID, TextColumn, TimeRemainingColumn
from rich.progress import Progress as Bars

from torchace.lab.cli.terminal import printable
from torchace.lab.schema.results import GroupPlan, RunKey
from torchace.lab.sweeps.callbacks import Callback
from torchace.lab.training.loop import Progress


class SweepProgress(Callback):
    """One bar for the runs, one for the steps of each group at hand, with λ, cross entropy and the time left.

    Where nobody watches (a log file, a pipe), a line for each group that is done.
    """

    def __init__(self, console: Console) -> None:
        self.console = console
        self.bars = Bars(
            TextColumn("{task.description}"),
            BarColumn(bar_width=24),
            MofNCompleteColumn(),
            TextColumn("{task.fields[note]}"),
            TimeRemainingColumn(compact=True),
            console=console,
            transient=True,
            disable=not console.is_terminal,
        )
        self.total = 0
        self.steps: dict[str, TaskID] = {}  # the bars of the groups at hand

    def __enter__(self) -> SweepProgress:
        self.bars.start()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None) -> None:
        self.bars.stop()

    def on_plan(self, done: int, total: int) -> None:
        self.total = total
        if done:
            self._say(f"{done} of {total} runs are finished already.")
        self.runs = self.bars.add_task("runs", total=total, completed=done, note="")

    def on_group_start(self, group: GroupPlan) -> None:
        self.steps[group.id] = self.bars.add_task(f"  {_named(group.runs)}", total=None, note="")

    def on_step(self, group: GroupPlan, progress: Progress) -> None:
        values = [value for value in progress.score if value is not None]  # without those of failed runs
        note = f"cross entropy {sum(values) / len(values):.4f}" if values else ""
        self.bars.update(self.steps[group.id], total=progress.steps, completed=progress.step, note=note)

    def on_group_end(self, group: GroupPlan, done: int) -> None:
        self.bars.remove_task(self.steps.pop(group.id))
        self.bars.update(self.runs, completed=done)
        if self.bars.disable:
            self._say(f"{_named(group.runs)}: {done} of {self.total} runs are finished.")

    def on_worker_lost(self, group: GroupPlan, reason: str) -> None:
        self._say(f"{_named(group.runs)}: its worker died ({reason}); it goes on from its newest checkpoint.")

    def on_group_restart(self, group: GroupPlan) -> None:
        self._say(
            f"{_named(group.runs)}: the checkpoint found belongs to other runs and is removed; training restarts."
        )

    def _say(self, text: str) -> None:
        self.console.print(printable(text), markup=False, highlight=False, soft_wrap=True)


def _named(runs: Sequence[RunKey]) -> str:
    lambdas = sorted({run.diversity for run in runs})
    seeds = sorted({run.seed for run in runs})
    some = ", ".join(f"{value:g}" for value in lambdas) if len(lambdas) < 4 else f"{lambdas[0]:g}…{lambdas[-1]:g}"
    which = f"seed {seeds[0]}" if len(seeds) == 1 else f"{len(seeds)} seeds"
    return f"{runs[0].arm} λ={some}, {which}"
