"""The command line.

Exit codes: 0 success; 1 error; 2 wrong usage; 3 interrupted, repeat the command to resume; 4 some runs failed.
"""

from __future__ import annotations

import errno
import io
import shlex
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

from torchace import __version__

MISSING = "The command line needs {}: pip install 'torchace[tool]'."

try:
    import typer

    from torchace.lab.cli import tables
    from torchace.lab.cli.terminal import (
        ERROR,
        INTERRUPTED,
        KEYBOARD,
        RESUME,
        SOME_FAILED,
        USAGE,
        StopSignal,
        check_report_packages,
        console,
        exit_interrupted,
        interruptible,
        print_error,
        print_line,
        print_table,
    )
except ModuleNotFoundError as error:
    sys.exit(MISSING.format(error.name))

if TYPE_CHECKING:
    from torchace.lab.schema.experiment import Experiment
    from torchace.lab.schema.results import Failure, RunKey
    from torchace.lab.sweeps.executor import Executor

# remedies by command
LESS_MEMORY = {
    "run": "Try a smaller network or batch, or fewer runs at a time (sweep.cohort_size).",
    "fit": "Try fewer or smaller members (--members, --hidden), or smaller batches (--batch-size).",
    "tune": "Try fewer or smaller members (--members, --hidden), smaller batches (--batch-size), or fewer seeds "
    "(--seeds).",
}

app = typer.Typer(
    add_completion=False,
    invoke_without_command=True,
    pretty_exceptions_enable=False,
    help="Train ensembles jointly; the diversity λ controls how much the members differ.",
)


@app.command()
def run(
    experiment: Annotated[str, typer.Argument(help="A built-in experiment or the path of a TOML file.")] = "digits",
    set_: Annotated[
        list[str] | None, typer.Option("--set", metavar="SECTION.KEY=VALUE", help="Override a setting; repeatable.")
    ] = None,
    seeds: Annotated[int | None, typer.Option(min=1, help="Number of seeds: 0, 1, 2, ...")] = None,
    out: Annotated[Path | None, typer.Option(help="Run directory. By default runs/NAME.")] = None,
    device: tables.Device = "auto",
    resume: Annotated[bool, typer.Option(help="Resume, or refuse a directory that already holds runs.")] = True,
    ray: Annotated[
        str | None, typer.Option(metavar="ADDRESS", help="Train on Ray: auto, local, HOST:PORT or ray://HOST:PORT.")
    ] = None,
    parallel: Annotated[
        str | None, typer.Option(metavar="HOW", help="With torchrun: data, members, or MxD to split both.")
    ] = None,
    tracker: Annotated[
        list[str] | None,
        typer.Option(metavar="NAME", help="Also write metrics to csv, tensorboard, mlflow or wandb; repeatable."),
    ] = None,
    tensorboard: Annotated[bool, typer.Option("--tensorboard", hidden=True)] = False,
) -> None:
    """Train a sweep over λ and seeds and write a report. Repeat the command to resume."""
    check_report_packages()

    from torchace.lab.sweeps.config import load_experiment
    from torchace.lab.sweeps.torchrun import process_group

    with process_group(parallel) as rank:  # None: a single process
        console.quiet = bool(rank)
        loaded = load_experiment(experiment, set_ or (), seeds=None if seeds is None else range(seeds))
        if rank is not None and ray is not None:
            raise ValueError("Expected torchrun or --ray, but got both: Ray starts its own processes.")
        directory = out or Path("runs") / loaded.name

        from torchace.lab.cli.progress import SweepProgress
        from torchace.lab.sweeps.callbacks import EventLog
        from torchace.lab.sweeps.executor import UnfinishedRunsError
        from torchace.lab.sweeps.sweep import Sweep
        from torchace.lab.sweeps.trackers import make_callbacks
        from torchace.lab.training.loop import Interrupted

        if not resume and (directory / "experiment.json").exists():
            raise ValueError(f"{directory} already holds runs. Remove --no-resume to resume, or choose another --out.")
        try:
            with (
                StopSignal() as stop,
                SweepProgress(console) as progress,
                _connect(loaded, directory, device, ray, parallel, rank, stop) as executor,
            ):
                trackers = [*(tracker or ()), *(["tensorboard"] if tensorboard else [])]
                callbacks = [progress, *([] if rank else [EventLog(directory), *trackers])]
                failures = Sweep(loaded, directory, executor).run(make_callbacks(callbacks, directory, loaded), stop)
        except Interrupted:
            if rank:
                raise typer.Exit(INTERRUPTED) from None
            raise exit_interrupted(RESUME.format(directory)) from None
        except UnfinishedRunsError as error:
            if any(directory.glob("runs/*.json")):
                _report(directory)
            for run, reason in error.reasons.items():
                print_error(f"Run λ={run.diversity:g}, seed {run.seed} ({run.arm}) is not finished: {reason}.")
            print_error(f"All other runs are in {directory}. Repeat the command to retry the unfinished ones.")
            raise typer.Exit(ERROR) from None
    if not rank:  # the first rank reports
        _report(directory)
        _print_failures(failures)


@contextmanager
def _connect(
    experiment: Experiment,
    directory: Path,
    device: str,
    ray: str | None,
    parallel: str | None,
    rank: int | None,
    stop: Callable[[], bool],
) -> Iterator[Executor]:
    if ray is not None:
        from torchace.lab.sweeps.ray import connect_ray

        with connect_ray(ray, device, directory, stop) as executor:
            yield executor
        return

    from torchace.lab.sweeps.executor import Executor
    from torchace.lab.sweeps.torchrun import RankExecutor
    from torchace.lab.training.members import resolve_device

    device = resolve_device(device)
    yield Executor(device) if rank is None else RankExecutor(experiment, device, parallel)


def _print_failures(failures: dict[RunKey, Failure]) -> None:
    for run, failure in failures.items():
        member = "" if failure.member is None else f", member {failure.member}"
        print_error(
            f"Run λ={run.diversity:g}, seed {run.seed} ({run.arm}) failed at step {failure.step}{member}: "
            f"{failure.message}."
        )
    if failures:
        raise typer.Exit(SOME_FAILED)


@app.command()
def report(directory: Annotated[Path, typer.Argument(help="Run directory.")]) -> None:
    """Write the report of a run directory."""
    _report(directory)


@app.command()
def diagnose(
    file: Annotated[
        Path, typer.Argument(metavar="FILE", help="logits (K, N, C) and target (N,) as .npz or .safetensors.")
    ],
    out: Annotated[Path | None, typer.Option(help="Directory for the findings and figures.")] = None,
) -> None:
    """Diagnose an ensemble's diversity from its members' logits."""
    from torchace.diagnosis import diagnose_file

    findings = diagnose_file(file)
    print_line(str(findings))
    if out is not None:
        findings.save(out)
        print_line(f"Written to {out}.")


@app.command()
def info() -> None:
    """Show versions, devices and built-in experiments."""
    import torch

    from torchace.lab.sweeps.config import builtin_names
    from torchace.lab.sweeps.environment import processor, versions

    rows = [*versions().items(), ("processor", f"{processor()}, {torch.get_num_threads()} threads")]
    rows += [(f"cuda:{i}", torch.cuda.get_device_name(i)) for i in range(torch.cuda.device_count())]
    for name, value in (*rows, ("experiments", ", ".join(builtin_names()))):
        print_line(f"{name:14} {value}")


for command in tables.COMMANDS:
    app.command()(command)


def _report(directory: Path) -> None:
    from torchace.lab.report import read_results, rich_table, write_report

    again = f"All results are in {directory}. Write the report with: torchace report {shlex.quote(str(directory))}"
    with interruptible(f"Interrupted while writing the report. {again}"):
        page = write_report(directory)
    results = read_results(directory, arrays=False)
    print_table(rich_table(results))
    print_line(f"Report: {page}")
    for damaged in results.damaged:
        print_error(f"Skipped: {damaged.reason}")


def _version(wanted: bool) -> None:
    if wanted:
        print_line(f"torchace {__version__}")
        raise typer.Exit


@app.callback()
def _main(
    context: typer.Context,
    version: Annotated[
        bool, typer.Option("--version", callback=_version, is_eager=True, help="Show the version and exit.")
    ] = False,
) -> None:
    if context.invoked_subcommand is None:
        context.get_help()


def main() -> None:
    """Run the command line; print expected errors as one line."""
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="replace")  # terminals that cannot print λ
    try:
        sys.exit(app(standalone_mode=False))
    except KeyboardInterrupt:
        sys.exit(KEYBOARD)
    except Exception as error:
        message = _describe_error(error)
        if message is None:
            raise
        print_error(f"Error: {' '.join(message.split())}")
        sys.exit(USAGE if _is_usage_error(error) else ERROR)


def _is_usage_error(error: Exception) -> bool:
    usage: Any = typer.BadParameter.__mro__[1]  # click's UsageError, which typer may vendor
    return isinstance(error, usage)


def _describe_error(error: Exception) -> str | None:
    """Return the message of an expected error; None for a bug."""
    if _is_usage_error(error):
        return str(error.format_message())  # type: ignore[attr-defined]
    if isinstance(error, ModuleNotFoundError) and error.name == "fcntl":
        return "Run directories are locked with fcntl, which this system does not have. Use Linux or macOS."
    if isinstance(error, ModuleNotFoundError) and error.name is not None:
        return MISSING.format(error.name)
    if isinstance(error, OSError) and error.strerror:
        message = f"Cannot use {error.filename}" if error.filename else "Operating system error"
        full = error.errno in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)
        remedy = " Finished work is saved. Free some space and repeat the command." if full else ""
        return f"{message}: {error.strerror}.{remedy}"
    if isinstance(error, MemoryError) or (isinstance(error, RuntimeError) and "memory" in str(error)):
        name = next((word for word in sys.argv[1:] if not word.startswith("-")), "")
        remedy = f" Finished work is saved. {LESS_MEMORY[name]}" if name in LESS_MEMORY else ""
        return f"Not enough memory.{remedy}"
    return str(error) if isinstance(error, ValueError | TypeError | OSError | ImportError) else None


if __name__ == "__main__":
    main()
