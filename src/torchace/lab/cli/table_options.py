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


def _option(metavar: str | None, text: str, *names: str, **limits: Any) -> Any:
    """Declare an option; without names, it has that of its parameter."""
    return typer.Option(*names, metavar=metavar, help=text, **limits)


Columns = list[str] | None
Data = Annotated[Path, typer.Argument(metavar="DATA", help="A CSV, Parquet or NPZ file.")]
Device = Annotated[str, _option("DEVICE", "cpu, cuda, cuda:N, or auto: cuda if available.")]


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
    target: Annotated[list[str], _option("COLUMN", "Column to predict; repeatable for regression.")],
    task: Annotated[str | None, _option("TASK", "classification or regression. Inferred by default.")] = None,
    drop: Annotated[Columns, _option("COLUMN", "Column to leave out; repeatable.")] = None,
    number: Annotated[Columns, _option("COLUMN", "Column to read as numbers; repeatable.")] = None,
    category: Annotated[Columns, _option("COLUMN", "Column to read as categories; repeatable.")] = None,
    date: Annotated[Columns, _option("COLUMN", "Column to read as dates; repeatable.")] = None,
    split_column: Annotated[
        str | None, _option("COLUMN", "Column that says train, validation or test for each row.")
    ] = None,
    validation: Annotated[
        float,
        _option("SHARE", "Share of rows for choosing λ and early stopping.", "--validation", "--validation-fraction"),
    ] = DEFAULTS.validation_fraction,
    test: Annotated[float, _option("SHARE", "Share of rows for the final scores.")] = 0.2,
    class_weight: Annotated[Columns, _option("WEIGHT", "balanced, or CLASS=NUMBER; repeatable.")] = None,
    skip_missing_target: Annotated[bool, _option(None, "Skip rows without a target.", "--skip-missing-target")] = False,
    num_members: Annotated[int, _option("K", "Number of members.", min=1)] = DEFAULTS.num_members,
    members: Annotated[
        str, _option("KIND", "separate, or shared or shared_mini: one network with an adapter for each member.")
    ] = DEFAULTS.members,
    hidden: Annotated[str, _option("WIDTHS", "Widths of the hidden layers, such as 64 or 64,32.")] = ",".join(
        map(str, DEFAULTS.hidden)
    ),
    encoding: Annotated[
        str, _option("HOW", "Encoding of numbers: auto, standard, robust or piecewise (bins between quantiles).")
    ] = DEFAULTS.encoding,
    epochs: Annotated[int, _option("N", "Maximum number of epochs.", min=1)] = DEFAULTS.epochs,
    batch_size: Annotated[int, _option("N", "Rows in a batch.", min=1)] = DEFAULTS.batch_size,
    learning_rate: Annotated[float, _option("RATE", "Learning rate of AdamW.")] = DEFAULTS.learning_rate,
    weight_decay: Annotated[float, _option("RATE", "Weight decay of AdamW.")] = DEFAULTS.weight_decay,
    schedule: Annotated[
        str | None, _option("HOW", "constant or cosine. By default constant with early stopping, else cosine.")
    ] = DEFAULTS.schedule,
    batches: Annotated[
        str, _option("HOW", "shared; exchanged or separate: each member its own, with or without coupling.")
    ] = DEFAULTS.batches,
    early_stopping: Annotated[
        bool, _option(None, "Stop on rows left out of the training, or train all epochs.")
    ] = True,
    patience: Annotated[
        int, _option("N", "Epochs without improvement before training stops.", min=0)
    ] = DEFAULTS.patience or 0,
    precision: Annotated[str, _option("TYPE", "float64, or float32, which is faster on a GPU.")] = DEFAULTS.precision,
    seed: Annotated[
        int, _option("N", "Random seed of the split and the training.", "--seed", "--random-state", min=0, max=10**15)
    ] = 0,
    device: Device = DEFAULTS.device,
    *,
    diversity: str | float,
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
    if members.isdigit():
        raise ValueError(f"--members says what the members share; their number is --num-members {members}.")
    hyperparameters = check_hyperparameters(
        option_name,
        num_members=num_members,
        members=members,
        diversity=diversity,
        hidden=[int(width) for width in hidden.split(",") if width.strip()],
        epochs=epochs,
        batch_size=batch_size,
        learning_rate=learning_rate,
        weight_decay=weight_decay,
        schedule=schedule,
        patience=patience if early_stopping and patience else None,
        batches=batches,
        precision=precision,
        encoding=encoding,
    )
    return TableRequest(data, settings, hyperparameters, resolve_device(device), given)


_SHARED = dict(inspect.signature(_table_options, eval_str=True).parameters)
del _SHARED["diversity"]


def option_name(name: str) -> str:
    """Return the option of a hyperparameter."""
    return f"--{name.replace('_', '-')}"


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


def _parse_diversity(text: str) -> float | str:
    try:
        return float(text)
    except ValueError:
        return text


def with_table_options(command: Callable[..., None]) -> Callable[..., None]:
    """Add the shared options to a command, whose first argument becomes a `TableRequest`."""
    own = list(inspect.signature(command, eval_str=True).parameters.values())[1:]
    data, target, *others = _SHARED.values()
    parameters = [data, target, *own, *others]

    def call(**options: Any) -> None:
        diversity = _parse_diversity(options.get("diversity", "auto"))  # `tune` searches it
        request = _table_options(**{name: options.pop(name) for name in _SHARED}, diversity=diversity)
        command(request, **options)

    call.__name__, call.__doc__ = command.__name__, command.__doc__
    call.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]
    call.__annotations__ = {parameter.name: parameter.annotation for parameter in parameters}
    return call
