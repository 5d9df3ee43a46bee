"""Commands for tables: fit, tune, evaluate, predict, export, show."""

from __future__ import annotations

import json
import os
import shlex
from collections import Counter
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from torchace.lab.cli.table_options import (
    Data,
    SkipMissingTarget,
    TableRequest,
    option,
    option_name,
    with_table_options,
)
from torchace.lab.cli.terminal import (
    RESUME,
    check_report_packages,
    console,
    exit_interrupted,
    print_line,
    print_table,
    printable,
    stop_signal,
)

if TYPE_CHECKING:
    from torchace.lab.report.tables import ReportTable

MOST_COLUMNS = 50  # to print

SCORES = (
    *("accuracy", "cross_entropy", "brier", "calibration_error", "member_accuracy", "member_cross_entropy"),
    *("disagreement", "mutual_information", "r2", "rmse", "mae", "member_mse", "spread"),
)

Model = Annotated[Path, typer.Argument(metavar="MODEL", help="Model directory of `torchace fit`.")]


@with_table_options
def fit(
    request: TableRequest,
    out: Annotated[Path | None, option("DIRECTORY", "Model directory. By default models/NAME.")] = None,
    diversity: Annotated[str, option("λ", "λ in [0, 1], or auto: choose it on validation rows.")] = "auto",
    overwrite: Annotated[bool, option(None, "Replace the model in the directory.", "--overwrite")] = False,
    baselines: Annotated[bool, option(None, "Compare with simpler models and gradient boosting.")] = True,
) -> None:
    """Train an ensemble on a table; write the model and a report. Repeat the command to resume."""
    check_report_packages()

    from torchace.lab.cli.progress import FitProgress
    from torchace.lab.report import write_report
    from torchace.lab.report.tables import column_table
    from torchace.lab.tables.fit import TableFit
    from torchace.lab.training.loop import Interrupted

    chosen = request.hyperparameters.diversity
    directory = _directory(out, "models", request.data)
    table, plan = request.load()
    searched = None if chosen == "auto" else float(chosen)
    job = TableFit(table, plan, searched, directory, request.device, overwrite, baselines)
    if job.is_finished():
        print_line(f"{directory} already holds this model.")
        job.remove_work()
    else:
        if understood := column_table(table.description, len(table.train)):
            print_table(_rich_table(understood))
            if len(table.description.columns) > MOST_COLUMNS:
                print_line(f"{len(table.description.columns) - MOST_COLUMNS} more columns are in the report.")
        for note in table.schema.notes:
            print_line(note)
        try:
            with job.lock():
                with stop_signal() as stop, FitProgress(console) as progress:
                    job.train(progress, stop)
                write_report(job.model)
                job.publish()
        except (Interrupted, KeyboardInterrupt):
            raise exit_interrupted(RESUME.format(job.work)) from None
    show(directory)
    print_line(f"Report: {directory / 'report' / 'index.html'}")


@with_table_options
def tune(
    request: TableRequest,
    out: Annotated[Path | None, option("DIRECTORY", "Directory of the search. By default runs/tune-NAME.")] = None,
    trials: Annotated[
        int | None, option("N", "Number of trials; searches width, depth, K and more besides λ.", min=1)
    ] = None,
    storage: Annotated[
        str | None, option("URL", "Optuna storage, to search on several machines. By default a file in --out.")
    ] = None,
    study: Annotated[str, option("NAME", "Name of the study in the storage.")] = "torchace",
    pruning: Annotated[bool, option(None, "Stop trials that are worse than the median.")] = True,
    seeds: Annotated[int, option("N", "Number of trainings per candidate.", min=1)] = 5,
    rounds: Annotated[int, option("N", "Rounds of candidates for λ.", min=1)] = 2,
) -> None:
    """Search λ, or λ with other hyperparameters, on validation rows. Repeat the command to resume."""
    from torchace.lab.cli.progress import FitProgress, TrialProgress
    from torchace.lab.training.loop import Interrupted
    from torchace.lab.tuning.search import SearchCache

    if trials is None and storage is not None:
        raise ValueError("--storage needs --trials: it is for a search of several hyperparameters.")
    directory = _directory(out, "runs", request.data, "tune-")
    if directory.is_dir() and (names := os.listdir(directory)) and not {"search", "study.db", "tune.json"} & {*names}:
        raise ValueError(f"{directory} already holds other files. Choose another --out.")
    table, plan = request.load()
    for note in table.schema.notes:
        print_line(note)
    place = (plan, request.device, request.settings.seed)
    options: dict[str, Any] = {"num_seeds": seeds, "num_fresh": seeds, "rounds": rounds}
    try:
        if trials is None:
            grid = table.grid_search(*place, cache=SearchCache(directory / "search"), **options)
            with stop_signal() as stop, FitProgress(console) as progress:
                tuned = grid.run(progress, stop)
            _write_json(directory / "tune.json", tuned.to_dict())
            print_table(_candidate_table(tuned.to_dict()))
            print_line(tuned.sentence)
        else:
            from torchace.lab.tuning.optuna_search import OptunaSearch

            where = storage or directory / "study.db"
            search = OptunaSearch(
                table.search_problem(*place), trials, storage=where, study_name=study, pruning=pruning
            )
            with stop_signal() as stop, TrialProgress(console, trials) as bar:
                result = search.run(bar, stop)
            _write_json(directory / "tune.json", result.to_dict())
            print_table(_trial_table(result.to_dict()))
            if result.best is None:
                raise ValueError("No trial was completed; see the table for the reasons.")
            print_line(f"Train with the best hyperparameters: {_fit_command(result, request)}")
    except Interrupted:
        raise exit_interrupted(RESUME.format("the storage" if storage else directory)) from None  # no password
    print_line(f"Written to {directory / 'tune.json'}.")


def evaluate(
    model: Model,
    data: Data,
    out: Annotated[Path | None, option("FILE", "JSON file for the scores.")] = None,
    skip_missing_target: SkipMissingTarget = False,
) -> None:
    """Score a model on rows whose target is known."""
    from torchace.lab.data.inference import skip_missing_targets
    from torchace.lab.data.tables import read_table
    from torchace.lab.tables.model import TableModel

    loaded = TableModel.load(model)
    if out is not None:
        _check_output(out, "--out", model, data)
    frame, target = read_table(data), loaded.encoding.schema.target
    if skip_missing_target:
        frame = skip_missing_targets(frame, target.names, "regression" if target.task == "regression" else None)
    for note in frame.attrs.get("notes", ()):
        print_line(note)
    scores: dict[str, Any]
    if len(target.names) > 1:
        scores = {name: found.metrics for name, found in loaded.evaluate_targets(frame).items()}
        print_table(_score_table(scores))
    else:
        scores = loaded.evaluate(frame).metrics
        print_table(_score_table({data.name: scores}))
    if share := loaded.training_share(frame):
        part = "all" if share == 1 else f"about {max(100 * share, 1):.0f} %"
        print_line(
            f"{data.name} contains {part} of the rows that the model was trained on. These scores are too optimistic; "
            f"for those of its test rows, use: torchace show {shlex.quote(str(model))}"
        )
    if out is not None:
        _write_json(out, {"model": str(model), "data": str(data), "rows": len(frame), "scores": scores})
        print_line(f"Written to {out}.")


def predict(
    model: Model,
    data: Data,
    out: Annotated[Path, option("FILE", "Output file, .csv or .parquet.")],
    keep: Annotated[list[str] | None, option("COLUMN", "Column to copy to the output; repeatable.")] = None,
    escape_formulas: Annotated[
        bool, option(None, "Put ' before text that a spreadsheet would evaluate (.csv).", "--escape-formulas")
    ] = False,
) -> None:
    """Predict every row of a file, with probabilities and uncertainty."""
    from torchace.lab.tables.model import TableModel, predict_file
    from torchace.lab.training.loop import Interrupted

    loaded = TableModel.load(model)
    _check_output(out, "--out", model, data)
    unseen: Counter[str] = Counter()
    options: dict[str, Any] = {"keep": keep or (), "escape_formulas": escape_formulas, "unseen": unseen}
    try:
        with stop_signal() as stop:
            rows = predict_file(loaded, data, out, stop=stop, **options)
    except Interrupted:
        raise exit_interrupted("Interrupted. Nothing was written.") from None
    for name, count in unseen.items():
        print_line(f"{count} of {rows} rows have a category in {name!r} that training did not have, or had too rarely.")
    print_line(f"{rows} predictions written to {out}.")


def export(model: Model, onnx: Annotated[Path, option("FILE", "Output file.")]) -> None:
    """Export a model to ONNX, and compare its outputs with torch's."""
    from torchace.lab.tables.export import export_onnx
    from torchace.lab.tables.model import TableModel

    loaded = TableModel.load(model)
    _check_output(onnx, "--onnx", model)
    worst = export_onnx(loaded, onnx)
    print_line(f"Written to {onnx}; onnxruntime's outputs differ from torch's by at most {worst:.1g}.")


def show(model: Model) -> None:
    """Show a model: target, columns, λ and scores."""
    from torchace.lab.report.model_findings import comparison_headline, model_table
    from torchace.lab.schema.values import ModelComparison
    from torchace.lab.tables.model import TableModel

    loaded = TableModel.load(model)
    schema, ensemble = loaded.encoding.schema, loaded.ensemble
    parameters = sum(p.numel() for p in ensemble.parameters())
    columns = "1 column" if len(schema.columns) == 1 else f"{len(schema.columns)} columns"
    targets = " and ".join(map(repr, schema.target.names))
    print_line(f"{model}: {schema.target.task} of {targets} from {columns}.")
    if schema.target.classes:
        print_line(f"Classes: {_list_names(schema.target.class_names)}.")
    for kind, plural in (("number", "Numbers"), ("category", "Categories"), ("date", "Dates")):
        names = [column.name for column in schema.columns if column.kind == kind]
        if names:
            print_line(f"{plural}: {_list_names(names)}.")
    print_line(f"{ensemble.num_members} members, {parameters} parameters, λ={loaded.diversity:g}.")
    if search := loaded.record.get("search"):
        print_line(search["sentence"])
    if scores := loaded.record.get("scores"):
        print_table(_score_table({part: scores[part] for part in ("validation", "test") if part in scores}))
    if content := loaded.record.get("comparison"):
        comparison = ModelComparison.model_validate(content)
        table = model_table(comparison)
        print_table(_rich_table(table))
        print_line(table.note)
        if headline := comparison_headline(comparison):
            print_line(f"{headline.sentence} {headline.detail}")


def _write_json(file: Path, content: Mapping[str, Any]) -> None:
    from torchace._files import write_atomic
    from torchace.lab.store import finite

    write_atomic(file, (json.dumps(finite(content), indent=1) + "\n").encode())


def _directory(out: Path | None, parent: str, data: Path, prefix: str = "") -> Path:
    directory = Path(parent, prefix + data.name.lstrip(".").split(".")[0]) if out is None else out
    if directory.name in ("", ".."):
        raise ValueError(f"Expected --out to name a directory, but got {str(directory)!r}.")
    return directory


def _check_output(out: Path, option: str, model: Path, data: Path | None = None) -> None:
    """Refuse an output file that is a directory, the data or part of the model."""
    if out.is_dir():
        raise ValueError(f"Expected a file for {option}, but {out} is a directory.")
    if data is not None and out.exists() and data.exists() and out.samefile(data):
        raise ValueError(f"{out} is the input file. Choose another {option}.")
    if out.resolve().is_relative_to(model.resolve()):
        raise ValueError(f"{out} is inside the model directory. Choose another {option}.")


# -- output -----------------------------------------------------------------------------------------------------------


def _table(*columns: str) -> Any:
    from rich.table import Table

    table = Table(box=None, pad_edge=False)
    for i, name in enumerate(columns):
        table.add_column(_plain(name), justify="left" if i == 0 else "right")
    return table


def _plain(text: str) -> Any:
    """Return text without markup and control characters."""
    from rich.text import Text

    return Text(printable(text), overflow="fold")


def _rich_table(table: ReportTable) -> Any:
    """Draw the first rows of a table of the report."""
    drawn = _table(*(column.label for column in table.columns))
    for column, kind in zip(drawn.columns, table.kinds, strict=True):
        column.justify = "left" if kind == "text" else "right"
    for row in table.sections[0].rows[:MOST_COLUMNS]:
        drawn.add_row(*(_plain(cell.text) for cell in row))
    return drawn


def _list_names(names: Iterable[str], limit: int = 20) -> str:
    quoted = [name if name.isprintable() and name.strip() else repr(name) for name in names]
    more = f" and {len(quoted) - limit} more" if len(quoted) > limit else ""
    return ", ".join(quoted[:limit]) + more


def _score_table(by_part: Mapping[str, Any]) -> Any:
    from torchace.lab.report.formats import TASKS

    metrics = {**TASKS["regression"].metrics, **TASKS["classification"].metrics}
    table = _table("", *by_part)
    for name in SCORES:
        values = [scores.get(name) for scores in by_part.values()]
        if any(value is not None for value in values):
            forms = [".4f" if value == 0 or 1e-3 <= abs(value or 0) < 1e6 else ".4g" for value in values]
            cells = ["" if value is None else format(value, form) for value, form in zip(values, forms, strict=True)]
            table.add_row(metrics[name].noun, *cells)
    return table


def _candidate_table(tuned: Mapping[str, Any]) -> Any:
    table = _table("λ", f"validation {tuned['metric'].replace('_', ' ')}", "seeds", "failed")
    for candidate in tuned["candidates"]:
        scores = [score for score in candidate["scores"].values() if score is not None]
        mean = f"{sum(scores) / len(scores):.5g}" if scores else "-"
        mark = " ← chosen" if candidate["diversity"] == tuned["chosen"] else ""
        failed = len(candidate["scores"]) - len(scores)
        table.add_row(f"{candidate['diversity']:g}{mark}", mean, str(len(scores)), str(failed or ""))
    return table


def _trial_table(study: Mapping[str, Any]) -> Any:
    done = [trial for trial in study["trials"] if trial["value"] is not None]
    names = [study["metric"], *(done[0]["params"] if done else ())]
    titles = [name.removeprefix("num_").replace("_", " ").replace("diversity", "λ") for name in names]
    table = _table("trial", *titles)
    for trial in sorted(done, key=lambda trial: trial["value"])[:10]:
        values = (f"{value:.4g}" for value in trial["params"].values())
        table.add_row(str(trial["number"]), f"{trial['value']:.5g}", *values)
    states = [trial["state"] for trial in study["trials"]]
    table.caption = ", ".join(f"{states.count(state)} {state}" for state in sorted(set(states)))
    return table


def _fit_command(result: Any, request: TableRequest) -> str:
    plan = result.plan
    chosen = {"target": list(request.settings.target), "diversity": result.diversity, "num_members": plan.num_members}
    chosen |= {"hidden": ",".join(map(str, plan.hidden)), "batch_size": plan.batch_size}
    chosen |= {"learning_rate": plan.learning_rate, "weight_decay": plan.weight_decay}
    words = ["torchace", "fit", str(request.data)]
    others = {name: value for name, value in request.given.items() if name not in chosen and name != "data"}
    for name, value in {**chosen, **others}.items():
        for one in value if isinstance(value, list) else [value]:
            words.append(option_name(f"no_{name}" if one is False else name))
            words += [] if isinstance(one, bool) else [f"{one:.4g}" if isinstance(one, float) else str(one)]
    return shlex.join(words)


COMMANDS = (fit, show, predict, evaluate, tune, export)
