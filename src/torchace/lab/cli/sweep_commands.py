"""Commands for sweeps: run, report."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from torchace.lab.cli.table_options import Device, option
from torchace.lab.cli.terminal import (
    ERROR,
    INTERRUPTED,
    RESUME,
    SOME_FAILED,
    check_report_packages,
    console,
    exit_interrupted,
    print_error,
    print_line,
    print_table,
    stop_signal,
)


def run(
    experiment: Annotated[
        str, typer.Argument(metavar="EXPERIMENT", help="A built-in experiment or the path of a TOML file.")
    ] = "digits",
    set_: Annotated[
        list[str] | None,
        option("SECTION.KEY=VALUE", "Override a setting, such as train.epochs=5; repeatable.", "--set"),
    ] = None,
    seeds: Annotated[int | None, option("N", "Number of seeds: 0, 1, 2, ...", min=1)] = None,
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


def report(directory: Annotated[Path, typer.Argument(metavar="DIRECTORY", help="Run directory.")]) -> None:
    """Write the report of a run directory."""
    from torchace.lab.report import read_results, rich_table, summary_sentences, write_report

    page = write_report(directory)
    results = read_results(directory)
    print_table(rich_table(results, bold=console.is_terminal))
    for sentence in summary_sentences(results):
        print_line(sentence)
    print_line(f"Report: {page}")
    for reason in results.damaged.values():
        print_error(f"Skipped: {reason} Delete the files of this run to train it again.")
