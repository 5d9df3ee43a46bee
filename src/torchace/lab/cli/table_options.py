"""Options shared by `fit` and `tune`; those of hyperparameters come from their schema."""

from __future__ import annotations

import inspect
import math
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, get_args

import typer

from torchace.lab.schema.hyperparameters import Hyperparameters, check_hyperparameters

if TYPE_CHECKING:
    from torchace.lab.tables.table import Table, TableSettings
    from torchace.lab.training.members import MemberPlan


def option(metavar: str | None, text: str, *names: str, **limits: Any) -> Any:
    """Declare an option; without names, it has the name of its parameter."""
    return typer.Option(*names, metavar=metavar, help=text, **limits)


def _hyperparameter_option(name: str) -> tuple[Any, Any]:
    """Type and default of the option for a hyperparameter."""
    field = Hyperparameters.model_fields[name]
    default = ",".join(map(str, field.default)) if name == "hidden" else field.default
    kind = str if default is None else type(default)
    choices = [choice for choice in get_args(field.annotation) if isinstance(choice, str)]
    if default is None:
        choices = list(get_args(get_args(field.annotation)[0]))
    metavar = "|".join(choices) or {int: "N", float: "NUMBER"}.get(kind, name.upper())
    return Annotated[kind | None if default is None else kind, option(metavar, field.description or "")], default


Columns = list[str] | None
Data = Annotated[Path, typer.Argument(metavar="DATA", help="A CSV, Parquet or NPZ file.")]
SkipMissingTarget = Annotated[bool, option(None, "Skip rows without a target.", "--skip-missing-target")]
Device, _ = _hyperparameter_option("device")


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
    target: Annotated[list[str], option("COLUMN", "Column to predict; repeatable for regression.")],
    task: Annotated[str | None, option("TASK", "classification or regression. Inferred by default.")] = None,
    drop: Annotated[Columns, option("COLUMN", "Column to leave out; repeatable.")] = None,
    number: Annotated[Columns, option("COLUMN", "Column to read as numbers; repeatable.")] = None,
    category: Annotated[Columns, option("COLUMN", "Column to read as categories; repeatable.")] = None,
    date: Annotated[Columns, option("COLUMN", "Column to read as dates; repeatable.")] = None,
    split_column: Annotated[
        str | None, option("COLUMN", "Column that says train, validation or test for each row.")
    ] = None,
    validation: Annotated[
        float,
        option("SHARE", "Share of rows for choosing λ and early stopping.", "--validation", "--validation-fraction"),
    ] = Hyperparameters().validation_fraction,
    test: Annotated[float, option("SHARE", "Share of rows for the final scores.")] = 0.2,
    class_weight: Annotated[Columns, option("WEIGHT", "balanced, or CLASS=NUMBER; repeatable.")] = None,
    skip_missing_target: SkipMissingTarget = False,
    early_stopping: Annotated[bool, option(None, "Stop on rows left out of the training, or train all epochs.")] = True,
    seed: Annotated[
        int, option("N", "Random seed of the split and the training.", "--seed", "--random-state", min=0, max=10**15)
    ] = 0,
    **hyperparameters: Any,
) -> TableRequest:
    from torchace.lab.tables.table import TableSettings
    from torchace.lab.training.config import resolve_device

    options = {**{name: value for name, value in locals().items() if name in _SHARED}, **hyperparameters}
    if task not in (None, "classification", "regression"):
        raise ValueError(f"Expected --task classification or regression, but got {task!r}.")
    if not (validation > 0 and test >= 0 and validation + test < 1):
        raise ValueError(
            f"Expected --validation above 0, --test of at least 0 and a sum below 1, but got {validation:g} and "
            f"{test:g}."
        )
    kinds: dict[str, str] = {}
    for names, kind in ((number, "number"), (category, "category"), (date, "date"), (drop, "dropped")):
        for name in names or ():
            if kinds.setdefault(name, kind) != kind:
                raise ValueError(f"The column {name!r} cannot be both a {kinds[name]} and a {kind}.")
    settings = TableSettings(
        target=tuple(target),
        task=task,
        drop=tuple(drop or ()),
        kinds={name: kind for name, kind in kinds.items() if kind != "dropped"},
        split_column=split_column,
        validation=validation,
        test=test,
        seed=seed,
        class_weight=_parse_class_weight(class_weight),
        skip_missing_target=skip_missing_target,
        encoding=hyperparameters["encoding"],
    )
    values = dict(hyperparameters)
    try:
        values["hidden"] = [int(width) for width in values["hidden"].split(",") if width.strip()]
    except ValueError:
        raise ValueError(f"Expected --hidden as widths such as 64 or 64,32, but got {values['hidden']!r}.") from None
    if values["members"].isdigit():
        raise ValueError(f"--members says what the members share; their number is --num-members {values['members']}.")
    values["patience"] = values["patience"] if early_stopping and values["patience"] else None
    checked = check_hyperparameters(option_name, **values)
    given = {name: value for name, value in options.items() if name in _SHARED and value != _SHARED[name].default}
    return TableRequest(data, settings, checked, resolve_device(checked.device), given)


def _shared_parameters() -> dict[str, inspect.Parameter]:
    """Parameters of `fit` and `tune`; `validation` stands for `validation_fraction`, and `fit` alone has λ."""
    parameters = dict(inspect.signature(_table_options, eval_str=True).parameters)
    del parameters["hyperparameters"]
    for name in Hyperparameters.model_fields:
        if name not in ("validation_fraction", "diversity"):
            kind, default = _hyperparameter_option(name)
            keyword = inspect.Parameter.POSITIONAL_OR_KEYWORD
            parameters[name] = inspect.Parameter(name, keyword, default=default, annotation=kind)
    return parameters


_SHARED = _shared_parameters()


def option_name(name: str) -> str:
    """Return the option of a hyperparameter."""
    return f"--{name.replace('_', '-')}"


def _parse_class_weight(values: Columns) -> dict[str, float] | str | None:
    """Parse --class-weight: balanced, or one CLASS=WEIGHT for each class."""
    if not values or values == ["balanced"]:
        return "balanced" if values else None
    weights: dict[str, float] = {}
    for value in values:
        name, _, number = value.rpartition("=")
        with suppress(ValueError):
            weights[name] = float(number)
        if not name or not 0 < weights.get(name, 0) < math.inf:
            raise ValueError(
                f"Expected --class-weight balanced, or CLASS=WEIGHT with a weight above 0, but got {value!r}."
            )
    return weights


def with_table_options(command: Callable[..., None]) -> Callable[..., None]:
    """Add the shared options to a command, whose first argument becomes a `TableRequest`."""
    own = list(inspect.signature(command, eval_str=True).parameters.values())[1:]
    data, target, *others = _SHARED.values()
    parameters = [data, target, *own, *others]

    def call(**options: Any) -> None:
        diversity = options.pop("diversity", "auto")  # `tune` searches it
        with suppress(ValueError):
            diversity = float(diversity)
        request = _table_options(**{name: options.pop(name) for name in _SHARED}, diversity=diversity)
        command(request, **options)

    call.__name__, call.__doc__ = command.__name__, command.__doc__
    call.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]
    call.__annotations__ = {parameter.name: parameter.annotation for parameter in parameters}
    return call
