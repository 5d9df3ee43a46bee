"""The command line: parse, call, print. An error is one line and an exit code.

Exit codes: 0 done; 1 an error, said in one line; 2 wrong usage; 3 interrupted after a checkpoint, repeat the command to
go on; 4 done, but some runs failed (NaN or Inf), named in one line each.
"""

from __future__ import annotations

import errno
import io
import shlex
import sys
from importlib.util import find_spec
from pathlib import Path
from typing import Annotated, Any

from torchace import __version__

TOOL = "The command line needs {}: pip install 'torchace[tool]'."
# What to do about too little memory, by command.
LESS_MEMORY = {
    "run": "What was saved is kept; try a smaller network or batch, or fewer runs at a time (sweep.cohort_size).",
    "fit": "What was saved is kept; try fewer or smaller members (--members, --hidden), or smaller batches "
    "(--batch-size).",
    "tune": "What was saved is kept; try fewer or smaller members (--members, --hidden), smaller batches "
    "(--batch-size), or fewer seeds (--seeds).",
}

try:
    import typer

    from torchace.lab.cli import tables as cli_data
    from torchace.lab.cli.terminal import (
        ERROR,
        INTERRUPTED,
        KEYBOARD,
        SOME_FAILED,
        USAGE,
        Stopper,
        complain,
        console,
        interruptible,
        say,
        wide,
    )
except ModuleNotFoundError as error:
    sys.exit(TOOL.format(error.name))

app = typer.Typer(
    add_completion=False,
    invoke_without_command=True,
    pretty_exceptions_enable=False,
    help="Train ensembles jointly, with one knob for how much the members may differ.",
)


@app.command()
def run(
    experiment: Annotated[str, typer.Argument(help="A built-in experiment or the path of a TOML file.")] = "digits",
    set_: Annotated[
        list[str] | None, typer.Option("--set", metavar="SECTION.KEY=VALUE", help="Override one setting; repeatable.")
    ] = None,
    seeds: Annotated[int | None, typer.Option(min=1, help="How many seeds, 0, 1, 2, ...")] = None,
    out: Annotated[Path | None, typer.Option(help="The run directory; runs/NAME unless given.")] = None,
    device: Annotated[str, typer.Option(help="cpu, cuda, cuda:N, or auto: cuda where there is one.")] = "auto",
    resume: Annotated[bool, typer.Option(help="Go on where an earlier run stopped; or refuse if there is one.")] = True,
    ray: Annotated[
        str | None, typer.Option(metavar="ADDRESS", help="Train on Ray: auto, local, HOST:PORT or ray://HOST:PORT.")
    ] = None,
    parallel: Annotated[
        str | None, typer.Option(metavar="HOW", help="Under torchrun, what is spread: data, members, or MxD for both.")
    ] = None,
    tensorboard: Annotated[bool, typer.Option("--tensorboard", help="Write scalars for TensorBoard too.")] = False,
) -> None:
    """Train a sweep over λ and seeds and write a report. Interrupted, it goes on when repeated."""
    for package in ("matplotlib", "jinja2"):  # of the report: better said now than after the training
        if find_spec(package) is None:
            raise ModuleNotFoundError(name=package)

    from torchace.lab.sweeps.config import load_experiment
    from torchace.lab.sweeps.torchrun import RankExecutor, process_group

    with process_group(parallel) as rank:  # one of several processes that train together; None: the only one
        console.quiet = bool(rank)
        chosen = load_experiment(experiment, set_ or (), seeds=None if seeds is None else range(seeds))
        if rank is not None and ray is not None:
            raise ValueError("Expected torchrun or --ray, but got both: Ray starts processes of its own.")
        directory = out or Path("runs") / chosen.name
        from torchace.lab.training.members import resolve_device

        device = resolve_device(device) if ray is None else device  # of this machine, or of the cluster's

        from torchace.lab.cli.sweep_progress import SweepProgress
        from torchace.lab.store import RunStoreError
        from torchace.lab.sweeps.callbacks import CallbackList, EventLog, TensorBoard
        from torchace.lab.sweeps.executor import Executor, UnfinishedRunsError
        from torchace.lab.sweeps.sweep import Sweep
        from torchace.lab.training.loop import Interrupted

        if not resume and (directory / "experiment.json").exists():
            raise RunStoreError(
                f"{directory} holds runs already. Leave out --no-resume to go on, or choose another --out."
            )
        try:
            with Stopper() as stopper, SweepProgress(console) as bars:
                trackers = [] if rank else [EventLog(directory), *([TensorBoard(directory)] if tensorboard else [])]
                progress = CallbackList([bars, *trackers])
                if rank is not None:
                    executor: Executor = RankExecutor(chosen, device, parallel)
                    failures = Sweep(chosen, directory, executor).run(progress, stopper)
                elif ray is None:
                    failures = Sweep(chosen, directory, Executor(device)).run(progress, stopper)
                else:
                    from torchace.lab.sweeps.ray import connect_ray

                    with connect_ray(ray, device, directory, stopper) as executor:
                        failures = Sweep(chosen, directory, executor).run(progress, stopper)
        except Interrupted:
            if not rank:
                complain(f"Interrupted. Everything so far is in {directory}; repeat the command to go on.")
            raise typer.Exit(INTERRUPTED) from None
        except UnfinishedRunsError as error:
            if any(directory.glob("runs/*.json")):
                _report(directory)
            for lost, reason in error.reasons.items():
                complain(f"Run λ={lost.diversity:g}, seed {lost.seed} ({lost.arm}) is not finished: {reason}.")
            complain(f"All other runs are in {directory}; repeat the command to try these again.")
            raise typer.Exit(ERROR) from None
    if rank:  # the first one reports
        return
    _report(directory)
    for failed, why in failures.items():
        member = "" if why.member is None else f", member {why.member}"
        complain(
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
def diagnose(
    file: Annotated[
        Path, typer.Argument(metavar="FILE", help="logits (K, N, C) and target (N,), .npz or .safetensors.")
    ],
    out: Annotated[
        Path | None, typer.Option(help="Write the findings and their figures to this directory too.")
    ] = None,
) -> None:
    """Tell whether an ensemble's diversity is real, from its members' logits."""
    from torchace.diagnosis import diagnose_file

    found = diagnose_file(file)
    say(str(found))
    if out is not None:
        found.save(out)
        say(f"Written to {out}.")


@app.command()
def info() -> None:
    """Print versions and devices."""
    import torch

    from torchace.lab.sweeps.config import builtin_names
    from torchace.lab.sweeps.environment import processor, versions

    for name, version in versions().items():
        say(f"{name:14} {version}")
    say(f"{'processor':14} {processor()}, {torch.get_num_threads()} threads")
    for i in range(torch.cuda.device_count()):
        say(f"{f'cuda:{i}':14} {torch.cuda.get_device_name(i)}")
    say(f"{'experiments':14} {', '.join(builtin_names())}")


for command in cli_data.COMMANDS:
    app.command()(command)


def _report(directory: Path) -> None:
    from torchace.lab.report import read_results, rich_table, write_report

    again = f"All results are in {directory}; draw the report with: torchace report {shlex.quote(str(directory))}"
    with interruptible(f"Interrupted while the report was drawn. {again}"):
        page = write_report(directory)
    results = read_results(directory, arrays=False)
    wide().print(rich_table(results))
    say(f"Report: {page}")
    for damaged in results.damaged:
        complain(f"Left out: {damaged.reason}")


def _version(wanted: bool) -> None:
    if wanted:
        say(f"torchace {__version__}")
        raise typer.Exit


@app.callback()
def _main(
    context: typer.Context,
    version: Annotated[bool, typer.Option("--version", callback=_version, is_eager=True, help="Print it.")] = False,
) -> None:
    if context.invoked_subcommand is None:
        context.get_help()


def main() -> None:
    """The entry point: errors that users can mend are one line."""
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="replace")  # a terminal without λ
    try:
        sys.exit(app(standalone_mode=False))
    except KeyboardInterrupt:
        sys.exit(KEYBOARD)
    except Exception as error:
        sentence, code = _explained(error)
        if sentence is None:
            raise
        complain(f"Error: {' '.join(sentence.split())}")
        sys.exit(code)


def _explained(error: Exception) -> tuple[str | None, int]:
    """An error in one sentence, and the exit code; None for what a user cannot mend."""
    usage: Any = typer.BadParameter.__mro__[1]  # click's UsageError, which typer may carry under a name of its own
    if isinstance(error, usage):
        return error.format_message(), USAGE
    if isinstance(error, ModuleNotFoundError) and error.name == "fcntl":
        return "Runs are locked with means that this system does not have. Use Linux or macOS.", ERROR
    if isinstance(error, ModuleNotFoundError) and error.name is not None:
        return TOOL.format(error.name), ERROR
    if isinstance(error, OSError) and error.strerror:
        what = f"Cannot use {error.filename}" if error.filename else "The system refused"
        if error.errno in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG):
            return f"{what}: {error.strerror}. What was saved is kept; make room and repeat the command.", ERROR
        return f"{what}: {error.strerror}.", ERROR
    if isinstance(error, RuntimeError | MemoryError):
        if isinstance(error, MemoryError) or "memory" in str(error):
            command = next((word for word in sys.argv[1:] if not word.startswith("-")), "")
            return f"Not enough memory. {LESS_MEMORY.get(command, '')}", ERROR
        return None, ERROR
    if isinstance(error, ValueError | TypeError | OSError | ImportError):
        return str(error), ERROR
    return None, ERROR


if __name__ == "__main__":
    main()
