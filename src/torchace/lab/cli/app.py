"""The command line.

Exit codes: 0 success; 1 error; 2 wrong usage; 3 interrupted, repeat the command to resume; 4 some runs failed.
"""

from __future__ import annotations

import errno
import io
import sys
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Annotated, Any, TypeVar

from torchace import __version__
from torchace._extras import missing_extra, package_name

try:
    import typer

    from torchace.lab.cli import table_commands
    from torchace.lab.cli.table_options import Device, option
    from torchace.lab.cli.terminal import (
        ERROR,
        INTERRUPTED,
        RESUME,
        SOME_FAILED,
        USAGE,
        check_report_packages,
        console,
        exit_interrupted,
        print_error,
        print_line,
        print_table,
        stop_signal,
    )
except ModuleNotFoundError as error:
    sys.exit(str(missing_extra(f"The command line needs {package_name(error.name)}")))

USAGE_ERROR: Any = typer.BadParameter.__mro__[1]  # click's UsageError, which typer may vendor

TOUR = """Ensembles of networks, trained jointly; the diversity λ sets how much members may differ.

\b
A table of yours:
  torchace fit flowers.csv --target species     train, compare with baselines, report
  torchace show models/flowers                  columns, λ and scores of the model
  torchace predict models/flowers new.csv --out predictions.csv

\b
The effect of λ:
  torchace run demo                             when λ pays and when not, in a minute
  torchace run digits                           an experiment; `torchace info` lists all
  torchace run mine.toml                        your own network and data

Repeat `fit`, `tune` or `run` to resume it. `torchace COMMAND --help` explains a command; `torchace
--install-completion` makes the tab key complete commands and options.
"""

Command = TypeVar("Command", bound=Callable[..., None])

app = typer.Typer(
    invoke_without_command=True,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,
    context_settings={"max_content_width": 100},
    help=TOUR,
)
EXAMPLES = {
    "fit": "fit flowers.csv --target species --diversity auto",
    "show": "show models/flowers",
    "predict": "predict models/flowers new.csv --out predictions.csv",
    "evaluate": "evaluate models/flowers labeled.csv --out scores.json",
    "tune": "tune flowers.csv --target species --trials 20",
    "export": "export models/flowers --onnx flowers.onnx",
    "run": "run digits --seeds 3 --set train.epochs=5 --out runs/short",
    "report": "report runs/digits",
    "diagnose": "diagnose predictions.npz --out diagnosis",
}


def _command(function: Command) -> Command:
    """Add a command, with an example in its help."""
    return app.command(help=f"{function.__doc__}\n\nExample: torchace {EXAMPLES[function.__name__]}")(function)


for command in table_commands.COMMANDS:
    _command(command)


@_command
def run(
    experiment: Annotated[
        str, typer.Argument(metavar="EXPERIMENT", help="A built-in experiment or the path of a TOML file.")
    ] = "digits",
    set_: Annotated[
        list[str] | None,
        option("SECTION.KEY=VALUE", "Override a setting, such as train.epochs=5; repeatable.", "--set"),
    ] = None,
    seeds: Annotated[int | None, option("N", "Number of seeds: 0, 1, 2, ...", min=1, max=10_000)] = None,
    out: Annotated[Path | None, option("DIRECTORY", "Run directory. By default runs/NAME.")] = None,
    device: Device = "auto",
    resume: Annotated[bool, option(None, "Resume, or refuse a directory that already holds runs.")] = True,
    ray: Annotated[str | None, option("ADDRESS", "Train on Ray: auto, local, HOST:PORT or ray://HOST:PORT.")] = None,
    parallel: Annotated[str | None, option("HOW", "With torchrun: data, members, or MxD to split both.")] = None,
    tracker: Annotated[
        list[str] | None, option("NAME", "Also write metrics to csv, tensorboard, mlflow or wandb; repeatable.")
    ] = None,
) -> None:
    """Train a sweep over λ and seeds and write a report. Repeat the command to resume."""
    check_report_packages()

    from torchace.lab.sweeps.config import load_experiment
    from torchace.lab.sweeps.executor import process_group

    with process_group(parallel) as rank:  # None: a single process
        console.quiet = bool(rank)
        loaded = load_experiment(experiment, set_ or (), seeds=None if seeds is None else range(seeds))
        directory = out or Path("runs") / loaded.name

        from torchace.lab.cli.progress import SweepProgress
        from torchace.lab.sweeps.callbacks import make_callbacks
        from torchace.lab.sweeps.executor import UnfinishedRunsError, make_executor
        from torchace.lab.sweeps.sweep import Sweep
        from torchace.lab.training.loop import Interrupted

        if not resume and (directory / "experiment.json").exists():
            raise ValueError(f"{directory} already holds runs. Remove --no-resume to resume, or choose another --out.")
        try:
            with (
                stop_signal() as stop,
                SweepProgress(console) as progress,
                make_executor(loaded, device, ray=ray, parallel=parallel, rank=rank) as executor,
            ):
                callbacks = [progress, *([] if rank else tracker or ())]
                failures = Sweep(loaded, directory, executor).run(make_callbacks(callbacks, directory, loaded), stop)
        except Interrupted:
            if rank:
                raise typer.Exit(INTERRUPTED) from None
            raise exit_interrupted(RESUME.format(directory)) from None
        except UnfinishedRunsError as error:
            if any(directory.glob("runs/*.json")):
                report(directory)
            for run, reason in error.reasons.items():
                print_error(f"Run {run.description} is not finished: {reason}.")
            print_error(f"All other runs are in {directory}. Repeat the command to retry the unfinished ones.")
            raise typer.Exit(ERROR) from None
    if not rank:  # the first rank reports
        report(directory)
        for run, failure in failures.items():
            member = "" if failure.member is None else f", member {failure.member}"
            print_error(f"Run {run.description} failed at step {failure.step}{member}: {failure.message}.")
        if failures:
            raise typer.Exit(SOME_FAILED)


@_command
def report(
    directory: Annotated[Path, typer.Argument(metavar="DIRECTORY", help="Run directory.")],
    out: Annotated[Path | None, option("DIRECTORY", "Folder of the report. By default DIRECTORY/report.")] = None,
) -> None:
    """Write the report of a run directory."""
    from torchace.lab.report import read_results, rich_table, summary_sentences, write_report

    page = write_report(directory, out)
    results = read_results(directory)
    print_table(rich_table(results, bold=console.is_terminal))
    for sentence in (results.experiment.description, *summary_sentences(results)):
        if sentence:
            print_line(sentence)
    print_line(f"Report: {page}")
    for reason in results.damaged.values():
        print_error(f"Skipped: {reason} Delete the files of this run to train it again.")


@_command
def diagnose(
    file: Annotated[
        Path, typer.Argument(metavar="FILE", help="An .npz or .safetensors file with logits (K, N, C) and target (N,).")
    ],
    out: Annotated[Path | None, option("DIRECTORY", "Directory for the findings and figures.")] = None,
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

    from torchace.lab.sweeps.config import builtin_names, load_experiment, processor, versions

    rows = [*versions().items(), ("processor", f"{processor()}, {torch.get_num_threads()} threads")]
    rows += [(f"cuda:{i}", torch.cuda.get_device_name(i)) for i in range(torch.cuda.device_count())]
    for name, value in rows:
        print_line(f"{name:14} {value}")
    print_line("experiments of `torchace run`:")
    for name in builtin_names():
        print_line(f"  {name:14} {load_experiment(name).title}")


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
        typer.echo(context.get_help())


def main() -> None:
    """Run the command line; print expected errors as one line."""
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="replace")  # terminals that cannot print λ
    try:
        with warnings.catch_warnings():  # restores how warnings are shown
            warnings.showwarning = lambda message, *_, **__: print_error(f"Warning: {' '.join(str(message).split())}")
            code = app(prog_name="torchace", standalone_mode=False)
        if code == 130:  # Ctrl-C
            print_error("Interrupted. Finished work is saved; repeat the command to resume.")
            code = INTERRUPTED
        sys.exit(code)
    except Exception as error:
        message = _describe_error(error)
        if message is None:
            raise
        print_error(f"Error: {' '.join(message.split())}")
        sys.exit(USAGE if isinstance(error, USAGE_ERROR) else ERROR)


def _describe_error(error: Exception) -> str | None:
    """Return the message of an expected error; None for a bug."""
    if isinstance(error, USAGE_ERROR):
        return str(error.format_message())
    if isinstance(error, ModuleNotFoundError) and error.name == "fcntl":
        return "Run directories are locked with fcntl, which this system does not have. Use Linux or macOS."
    if isinstance(error, ModuleNotFoundError) and error.name is not None:
        return str(missing_extra(f"The command line needs {package_name(error.name)}"))
    if isinstance(error, OSError) and error.strerror:
        message = f"Cannot use {error.filename}" if error.filename else "Operating system error"
        full = error.errno in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)
        remedy = " Finished work is saved. Free some space and repeat the command." if full else ""
        return f"{message}: {error.strerror}.{remedy}"
    if isinstance(error, MemoryError) or (isinstance(error, RuntimeError) and "memory" in str(error)):
        return "Not enough memory. Finished work is saved. Try fewer or smaller members, or smaller batches."
    return str(error) if isinstance(error, ValueError | TypeError | OSError | ImportError) else None


if __name__ == "__main__":
    main()
