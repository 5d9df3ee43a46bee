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
from typing import Annotated, Any

from torchace import __version__
from torchace._extras import missing_extra, package_name

try:
    import typer

    from torchace.lab.cli import sweep_commands, table_commands
    from torchace.lab.cli.table_options import option
    from torchace.lab.cli.terminal import ERROR, INTERRUPTED, USAGE, print_error, print_line
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


def _help(command: Callable[..., None]) -> str:
    return f"{command.__doc__}\n\nExample: torchace {EXAMPLES[command.__name__]}"


for command in (*table_commands.COMMANDS, sweep_commands.run, sweep_commands.report):
    app.command(help=_help(command))(command)


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


app.command(help=_help(diagnose))(diagnose)


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
