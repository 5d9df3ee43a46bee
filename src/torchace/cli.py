"""The command line: parse, call, print. An error is one line and an exit code.

Exit codes: 0 done; 1 an error, said in one line; 2 wrong usage; 3 interrupted after a checkpoint, repeat the command to
go on; 4 done, but some runs failed (NaN or Inf), named in one line each.
"""

from __future__ import annotations

import signal
import sys
from pathlib import Path
from types import FrameType
from typing import Annotated

from torchace import __version__

try:
    import typer
    from rich.console import Console
except ModuleNotFoundError as error:  # pragma: no cover - seen in a test without the extra
    sys.exit(f"The command line needs {error.name}: pip install 'torchace[tool]'.")

ERROR, INTERRUPTED, SOME_FAILED = 1, 3, 4

app = typer.Typer(
    add_completion=False,
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    help="Train ensembles jointly, with one knob for how much the members may differ.",
)
console = Console()


@app.command()
def run(
    experiment: Annotated[str, typer.Argument(help="A built-in experiment or the path of a TOML file.")] = "digits",
    set_: Annotated[
        list[str] | None, typer.Option("--set", metavar="SECTION.KEY=VALUE", help="Override one setting; repeatable.")
    ] = None,
    seeds: Annotated[int | None, typer.Option(min=1, help="How many seeds, 0, 1, 2, ...")] = None,
    out: Annotated[Path | None, typer.Option(help="The run directory; runs/NAME unless given.")] = None,
    device: Annotated[str, typer.Option(help="cpu, cuda, or auto: cuda where there is one.")] = "auto",
    resume: Annotated[bool, typer.Option(help="Go on where an earlier run stopped; or refuse if there is one.")] = True,
) -> None:
    """Train a sweep over λ and seeds and write a report. Interrupted, it goes on when repeated."""
    from torchace.engine.fit import Interrupted
    from torchace.runs.config import load_experiment
    from torchace.runs.ledger import LedgerError
    from torchace.runs.progress import SweepProgress
    from torchace.runs.sweep import Sweep

    chosen = load_experiment(experiment, set_ or (), seeds=None if seeds is None else range(seeds))
    directory = out or Path("runs") / chosen.name
    if not resume and (directory / "experiment.json").exists():
        raise LedgerError(f"{directory} holds runs already. Leave out --no-resume to go on, or choose another --out.")
    stopper = _Stopper()
    try:
        with SweepProgress(console) as progress:
            failures = Sweep(chosen, directory, _device(device)).run(progress, stopper)
    except Interrupted:
        console.print(f"Interrupted. Everything so far is in {directory}; repeat the command to go on.")
        raise typer.Exit(INTERRUPTED) from None
    _report(directory)
    for failed, why in failures.items():
        member = "" if why.member is None else f", member {why.member}"
        console.print(
            f"Run λ={failed.diversity:g}, seed {failed.seed} ({failed.arm}) failed at step {why.step}{member}: "
            f"{why.message}."
        )
    if failures:
        raise typer.Exit(SOME_FAILED)


@app.command()
def report(directory: Annotated[Path, typer.Argument(help="A run directory.")]) -> None:
    """Draw the report of a run directory again."""
    _report(directory)


@app.command()
def info() -> None:
    """Print versions and devices."""
    import torch

    from torchace.runs.config import builtin_names
    from torchace.runs.environment import processor, versions

    for name, version in versions().items():
        console.print(f"{name:14} {version}", highlight=False)
    console.print(f"{'processor':14} {processor()}, {torch.get_num_threads()} threads", highlight=False)
    for i in range(torch.cuda.device_count()):
        console.print(f"{f'cuda:{i}':14} {torch.cuda.get_device_name(i)}", highlight=False)
    console.print(f"{'experiments':14} {', '.join(builtin_names())}", highlight=False)


def _report(directory: Path) -> None:
    from torchace.report import read_results, rich_table, write_report

    page = write_report(directory)
    console.print(rich_table(read_results(directory)))
    console.print(f"Report: {page}", soft_wrap=True, highlight=False)


def _device(name: str) -> str:
    import torch

    if name == "auto":
        return "cuda" if torch.cuda.is_available() else "cpu"
    try:
        torch.empty(1, device=name)
    except (RuntimeError, AssertionError) as error:
        raise ValueError(f"Cannot use the device {name!r}: {str(error).splitlines()[0].rstrip('.')}.") from error
    return name


class _Stopper:
    """Says yes after SIGINT or SIGTERM; a second one ends the process at once."""

    def __init__(self) -> None:
        self.asked = False
        for number in (signal.SIGINT, signal.SIGTERM):
            signal.signal(number, self._ask)

    def _ask(self, number: int, frame: FrameType | None) -> None:
        self.asked = True
        signal.signal(number, signal.SIG_DFL)

    def __call__(self) -> bool:
        return self.asked


def _version(wanted: bool) -> None:
    if wanted:
        console.print(f"torchace {__version__}", highlight=False)
        raise typer.Exit


@app.callback()
def _main(
    version: Annotated[bool, typer.Option("--version", callback=_version, is_eager=True, help="Print it.")] = False,
) -> None:
    pass


def main() -> None:
    """The entry point: errors that users can mend are one line."""
    try:
        app()
    except (ValueError, TypeError, OSError) as error:
        sentence = " ".join(str(error).split())
        if isinstance(error, OSError) and error.strerror:
            sentence = f"{error.filename or 'The disk'}: {error.strerror}."
        Console(stderr=True).print(f"Error: {sentence}", soft_wrap=True, highlight=False, markup=False)
        sys.exit(ERROR)


if __name__ == "__main__":
    main()
