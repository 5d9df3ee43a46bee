"""Options shared by `fit` and `tune`."""

from __future__ import annotations

import inspect
import math
import re
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from torchace.lab.schema.hyperparameters import Hyperparameters, check_hyperparameters

if TYPE_CHECKING:
    from torchace.lab.tables.table import Table, TableSettings
    from torchace.lab.training.members import MemberPlan

DEFAULTS = Hyperparameters()

Columns = list[str] | None
Data = Annotated[Path, typer.Argument(metavar="DATA", help="A CSV, Parquet or NPZ file.")]
Device = Annotated[str, typer.Option(help="cpu, cuda, cuda:N, or auto: cuda if available.")]


@dataclass(frozen=True)
class TableRequest:
    """Checked options; `given` has those that differ from the defaults."""

    data: Path
    settings: TableSettings
    hyperparameters: Hyperparameters
    device: str
    given: dict[str, Any]

    def load(self) -> tuple[Table, MemberPlan]:
        """Read the table and return it with the plan for its task."""
        from torchace.lab.tables.table import load_table
        from torchace.lab.training.members import MemberPlan

        table = load_table(self.data, self.settings)
        return table, MemberPlan.from_hyperparameters(table.task, self.hyperparameters)


def _table_options(
    data: Data,
    target: Annotated[list[str], typer.Option(help="Column to predict; repeatable for regression.")],
    task: Annotated[str | None, typer.Option(help="classification or regression. Inferred by default.")] = None,
    drop: Annotated[Columns, typer.Option(help="Column to leave out; repeatable.")] = None,
    number: Annotated[Columns, typer.Option(help="Column to read as numbers; repeatable.")] = None,
    category: Annotated[Columns, typer.Option(help="Column to read as categories; repeatable.")] = None,
    date: Annotated[Columns, typer.Option(help="Column to read as dates; repeatable.")] = None,
    split_column: Annotated[
        str | None, typer.Option(help="Column that says train, validation or test for each row.")
    ] = None,
    validation: Annotated[float, typer.Option(help="Fraction of rows for choosing λ and early stopping.")] = 0.2,
    test: Annotated[float, typer.Option(help="Fraction of rows for the final scores.")] = 0.2,
    class_weight: Annotated[Columns, typer.Option(help="balanced, or CLASS=WEIGHT (repeatable; 1 by default).")] = None,
    skip_missing_target: Annotated[
        bool, typer.Option("--skip-missing-target", help="Skip rows without a target.")
    ] = False,
    members: Annotated[int, typer.Option(min=1, help="Number of members.")] = DEFAULTS.num_members,
    hidden: Annotated[str, typer.Option(help="Widths of the hidden layers, such as 64 or 64,32.")] = ",".join(
        map(str, DEFAULTS.hidden)
    ),
    epochs: Annotated[int, typer.Option(min=1, help="Maximum number of epochs.")] = DEFAULTS.epochs,
    batch_size: Annotated[int, typer.Option(min=1, help="Rows in a batch.")] = DEFAULTS.batch_size,
    learning_rate: Annotated[float, typer.Option(help="Learning rate of AdamW.")] = DEFAULTS.learning_rate,
    weight_decay: Annotated[float, typer.Option(help="Weight decay of AdamW.")] = DEFAULTS.weight_decay,
    patience: Annotated[
        int, typer.Option(min=0, help="Epochs without improvement before training stops; 0 disables early stopping.")
    ] = DEFAULTS.patience or 0,
    batches: Annotated[str, typer.Option(help="shared, or exchanged: a separate batch for each member.")] = "shared",
    precision: Annotated[str, typer.Option(help="float64, or float32, which is faster on a GPU.")] = DEFAULTS.precision,
    encoding: Annotated[
        str, typer.Option(help="Encoding of numbers: auto, standard, robust or piecewise (bins between quantiles).")
    ] = DEFAULTS.encoding,
    seed: Annotated[int, typer.Option(min=0, max=10**15, help="Random seed of the split and the training.")] = 0,
    device: Device = DEFAULTS.device,
) -> TableRequest:
    from torchace.lab.tables.table import TableSettings
    from torchace.lab.training.config import resolve_device

    given = {name: value for name, value in locals().items() if name in _SHARED and value != _SHARED[name].default}
    if task not in (None, "classification", "regression"):
        raise ValueError(f"Expected --task classification or regression, but got {task!r}.")
    if not (validation > 0 and test >= 0 and validation + test < 1):
        raise ValueError(
            f"Expected --validation above 0, --test of at least 0 and a sum below 1, but got {validation:g} and "
            f"{test:g}."
        )
    kinds: dict[str, str] = {}
    for names, kind in ((number, "number"), (category, "category"), (date, "date")):
        for name in names or ():
            if name in kinds:
                raise ValueError(f"The column {name!r} cannot be both a {kinds[name]} and a {kind}.")
            if name in (drop or ()):
                raise ValueError(f"The column {name!r} cannot be both dropped and a {kind}.")
            kinds[name] = kind
    settings = TableSettings(
        tuple(target),
        task,
        tuple(drop or ()),
        kinds,
        split_column,
        validation,
        test,
        seed,
        class_weight=_parse_class_weight(class_weight),
        skip_missing_target=skip_missing_target,
        encoding=encoding,
    )
    if not re.fullmatch(r"\s*([0-9]{1,6}\s*(,\s*[0-9]{1,6}\s*)*)?", hidden):
        raise ValueError(f"Expected --hidden as widths such as 64 or 64,32, but got {hidden!r}.")
    if batches == "separate":
        raise ValueError("Expected --batches shared or exchanged, but got 'separate'.")
    hyperparameters = check_hyperparameters(
        option_name,
        num_members=members,
        hidden=[int(width) for width in hidden.split(",") if width.strip()],
        epochs=epochs,
        batch_size=batch_size,
        learning_rate=learning_rate,
        weight_decay=weight_decay,
        patience=patience or None,
        batches=batches,
        precision=precision,
        encoding=encoding,
    )
    return TableRequest(data, settings, hyperparameters, resolve_device(device), given)


_SHARED = inspect.signature(_table_options, eval_str=True).parameters


def option_name(name: str) -> str:
    """Return the option of a hyperparameter."""
    return f"--{name.removeprefix('num_').replace('_', '-')}"


def _parse_class_weight(values: Columns) -> dict[str, float] | str | None:
    """Parse --class-weight: balanced, or one CLASS=WEIGHT for each class."""
    if not values:
        return None
    if values == ["balanced"]:
        return "balanced"
    weights = {}
    for value in values:
        name, _, number = value.rpartition("=")
        try:
            weights[name] = float(number)
        except ValueError:
            weights[name] = -1.0
        if not name or not 0 < weights[name] < math.inf:
            raise ValueError(
                f"Expected --class-weight balanced, or CLASS=WEIGHT with a weight above 0, but got {value!r}."
            )
    return weights


def parse_diversity(text: str) -> float | None:
    """Parse --diversity; None for `auto`."""
    try:
        value: float | str = float(text)
    except ValueError:
        value = text
    checked = check_hyperparameters(option_name, diversity=value).diversity
    return None if checked == "auto" else float(checked)


def with_table_options(command: Callable[..., None]) -> Callable[..., None]:
    """Add the shared options to a command, whose first argument becomes a `TableRequest`."""
    own = list(inspect.signature(command, eval_str=True).parameters.values())[1:]
    data, target, *others = _SHARED.values()
    parameters = [data, target, *own, *others]

    def call(**options: Any) -> None:
        request = _table_options(**{name: options.pop(name) for name in _SHARED})
        command(request, **options)

    call.__name__, call.__doc__ = command.__name__, command.__doc__
    call.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]
    call.__annotations__ = {parameter.name: parameter.annotation for parameter in parameters}
    return call
