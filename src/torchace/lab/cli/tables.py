"""The commands for a user's own data: fit, tune, evaluate, predict, export, show."""

from __future__ import annotations

import inspect
import json
import re
import shlex
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from torchace.lab.cli.terminal import (
    INTERRUPTED,
    Stopper,
    check_report,
    complain,
    console,
    interruptible,
    printable,
    say,
    wide,
)

if TYPE_CHECKING:
    from torchace.lab.schema.hyperparameters import Hyperparameters
    from torchace.lab.tables.table import TableSettings

SCORES = {
    "accuracy": "accuracy",
    "cross_entropy": "cross entropy",
    "brier": "Brier score",
    "calibration_error": "calibration error",
    "member_accuracy": "members' accuracy",
    "member_cross_entropy": "members' cross entropy",
    "disagreement": "disagreement",
    "mutual_information": "mutual information",
    "r2": "R²",
    "rmse": "root mean squared error",
    "mae": "mean absolute error",
    "member_mse": "members' mean squared error",
    "spread": "members' spread",
}

Data = Annotated[Path, typer.Argument(metavar="DATA", help="A CSV, Parquet or NPZ file.")]
Model = Annotated[Path, typer.Argument(metavar="MODEL", help="A directory that `torchace fit` wrote.")]
Target = Annotated[str, typer.Option(help="The column to predict.")]
Task = Annotated[str | None, typer.Option(help="classification or regression; recognised unless given.")]
Drop = Annotated[list[str] | None, typer.Option(help="A column to leave out; repeatable.")]
Number = Annotated[list[str] | None, typer.Option(help="A column to take as numbers; repeatable.")]
Category = Annotated[list[str] | None, typer.Option(help="A column to take as categories; repeatable.")]
SplitColumn = Annotated[str | None, typer.Option(help="A column that says train, validation or test for every row.")]
Validation = Annotated[float, typer.Option(help="Share of the rows that λ is chosen on.")]
Test = Annotated[float, typer.Option(help="Share of the rows that nothing is decided on.")]
Members = Annotated[int, typer.Option(min=1, help="How many networks.")]
Hidden = Annotated[str, typer.Option(help="Widths of the hidden layers: 64, or 64,32.")]
Epochs = Annotated[int, typer.Option(min=1, help="Epochs at most.")]
BatchSize = Annotated[int, typer.Option(min=1, help="Rows in a step.")]
LearningRate = Annotated[float, typer.Option(help="AdamW's.")]
WeightDecay = Annotated[float, typer.Option(help="AdamW's.")]
Patience = Annotated[int, typer.Option(min=0, help="Epochs without improvement before training stops; 0: never.")]
Batches = Annotated[str, typer.Option(help="shared, or exchanged: every member its own rows in a step.")]
Precision = Annotated[str, typer.Option(help="float64, or float32 for a GPU.")]
Seed = Annotated[int, typer.Option(min=0, max=10**15, help="Of the split and the training.")]
Device = Annotated[str, typer.Option(help="cpu, cuda, cuda:N, or auto: cuda where there is one.")]


def fit(
    data: Data,
    target: Target,
    out: Annotated[Path | None, typer.Option(help="The model's directory; models/NAME unless given.")] = None,
    diversity: Annotated[str, typer.Option(help="λ in [0, 1], or auto: searched on held-out rows.")] = "auto",
    task: Task = None,
    drop: Drop = None,
    number: Number = None,
    category: Category = None,
    split_column: SplitColumn = None,
    validation: Validation = 0.2,
    test: Test = 0.2,
    members: Members = 10,
    hidden: Hidden = "64",
    epochs: Epochs = 100,
    batch_size: BatchSize = 128,
    learning_rate: LearningRate = 3e-3,
    weight_decay: WeightDecay = 1e-2,
    patience: Patience = 10,
    batches: Batches = "shared",
    precision: Precision = "float64",
    seed: Seed = 0,
    device: Device = "auto",
) -> None:
    """Train an ensemble on a table, find λ, and write a model and a report. Interrupted, it goes on when repeated."""
    check_report()

    from torchace.lab.cli.fit_progress import FitProgress
    from torchace.lab.tables.fit import TableFit
    from torchace.lab.tables.table import load_table
    from torchace.lab.training.loop import Interrupted
    from torchace.lab.training.members import MemberPlan, resolve_device

    settings = _settings(target, task, drop, number, category, split_column, validation, test, seed)
    values = _plan(
        diversity,
        members,
        hidden,
        patience,
        epochs=epochs,
        batch_size=batch_size,
        learning_rate=learning_rate,
        weight_decay=weight_decay,
        batches=batches,
        precision=precision,
    )
    chosen = None if values.diversity == "auto" else float(values.diversity)
    where = resolve_device(device)
    directory = _directory(out, "models", _stem(data))
    table = load_table(data, settings)
    plan = MemberPlan.from_hyperparameters(table.task, values)
    job = TableFit(table, plan, chosen, directory, settings.to_json(), seed, where)
    if job.is_finished():
        say(f"{directory} holds this very model already.")
        job.remove_work()
        show(directory)
        return
    for note in table.schema.notes:
        say(note)
    try:
        with job.lock():
            with Stopper() as stopper, FitProgress(console) as progress:
                job.train(progress, stopper)
            from torchace.lab.report import write_report

            with interruptible(f"Interrupted. Everything so far is in {job.work}; repeat the command to go on."):
                write_report(job.work)
                job.publish()
    except Interrupted:
        complain(f"Interrupted. Everything so far is in {job.work}; repeat the command to go on.")
        raise typer.Exit(INTERRUPTED) from None
    show(directory)
    say(f"Report: {directory / 'report' / 'index.html'}")


def tune(
    data: Data,
    target: Target,
    out: Annotated[Path | None, typer.Option(help="Where the search is kept; runs/tune-NAME unless given.")] = None,
    trials: Annotated[
        int | None, typer.Option(min=1, help="Search λ with width, depth, learning rate and K too, so many trials.")
    ] = None,
    storage: Annotated[
        str | None, typer.Option(help="An Optuna storage URL, for several machines; a file in --out unless given.")
    ] = None,
    study: Annotated[str, typer.Option(help="The study's name in the storage.")] = "torchace",
    pruning: Annotated[bool, typer.Option(help="Give up trials that do worse than the median.")] = True,
    seeds: Annotated[int, typer.Option(min=1, help="Trainings of each candidate.")] = 5,
    rounds: Annotated[int, typer.Option(min=1, help="Rounds of candidates for λ.")] = 2,
    task: Task = None,
    drop: Drop = None,
    number: Number = None,
    category: Category = None,
    split_column: SplitColumn = None,
    validation: Validation = 0.2,
    test: Test = 0.2,
    members: Members = 10,
    hidden: Hidden = "64",
    epochs: Epochs = 100,
    batch_size: BatchSize = 128,
    learning_rate: LearningRate = 3e-3,
    weight_decay: WeightDecay = 1e-2,
    patience: Patience = 10,
    batches: Batches = "shared",
    precision: Precision = "float64",
    seed: Seed = 0,
    device: Device = "auto",
) -> None:
    """Search λ, or λ with everything else, on held-out rows. Interrupted, it goes on when repeated."""
    from torchace.lab.cli.fit_progress import FitProgress, TrialProgress
    from torchace.lab.tables.search import TableSearch
    from torchace.lab.tables.table import load_table
    from torchace.lab.training.loop import Interrupted
    from torchace.lab.training.members import MemberPlan, resolve_device

    if trials is None and storage is not None:
        raise ValueError("--storage is for a search of several things: give --trials too.")
    settings = _settings(target, task, drop, number, category, split_column, validation, test, seed)
    values = _plan(
        "auto",
        members,
        hidden,
        patience,
        epochs=epochs,
        batch_size=batch_size,
        learning_rate=learning_rate,
        weight_decay=weight_decay,
        batches=batches,
        precision=precision,
    )
    where = resolve_device(device)
    directory = _directory(out, "runs", f"tune-{_stem(data)}")
    table = load_table(data, settings)
    job = TableSearch(table, MemberPlan.from_hyperparameters(table.task, values), directory, seed, where)
    for note in table.schema.notes:
        say(note)
    try:
        if trials is None:
            with Stopper() as stopper, FitProgress(console) as progress:
                tuned = job.tune_diversity(num_seeds=seeds, rounds=rounds, callback=progress, stop=stopper)
            wide().print(_candidates(tuned.to_json()))
            say(tuned.sentence)
        else:
            with Stopper() as stopper, TrialProgress(console, trials) as bar:
                found = job.run_study(trials, storage=storage, study=study, pruning=pruning, callback=bar, stop=stopper)
            wide().print(_trials(found.to_json()))
            if found.best is None:
                raise ValueError("No trial was completed, so there is no best one; see the table.")
            given: dict[str, Any] = {"task": task, "drop": drop, "number": number, "category": category}
            given |= {"split_column": split_column, "validation": validation, "test": test, "epochs": epochs}
            given |= {"patience": patience, "batches": batches, "precision": precision, "seed": seed, "device": device}
            say(f"To train with the best: {_command(found, data, target, given)}")
    except Interrupted:
        place = directory if storage is None else "the storage"  # its address may hold a password
        complain(f"Interrupted. Everything so far is kept in {place}; repeat the command to go on.")
        raise typer.Exit(INTERRUPTED) from None
    say(f"Written to {directory / 'tune.json'}.")


def evaluate(
    model: Model,
    data: Data,
    out: Annotated[Path | None, typer.Option(help="Write the scores to this JSON file too.")] = None,
) -> None:
    """Score a model on rows whose target is known."""
    from torchace._files import remove_abandoned, write_atomic
    from torchace.lab.data.tables import read_table
    from torchace.lab.store import finite
    from torchace.lab.tables.model import TableModel

    loaded = TableModel.load(model)
    if out is not None:
        _check_written(out, "--out", model, data)
    frame = read_table(data)
    metrics = loaded.evaluate(frame).metrics
    wide().print(_scores({data.name: metrics}))
    if out is not None:
        content = {"model": str(model), "data": str(data), "rows": len(frame), "scores": metrics}
        remove_abandoned(out)
        write_atomic(out, (json.dumps(finite(content), indent=1) + "\n").encode())
        say(f"Written to {out}.")


def predict(
    model: Model,
    data: Data,
    out: Annotated[Path, typer.Option(help="The file to write, .csv or .parquet.")],
    keep: Annotated[list[str] | None, typer.Option(help="A column to copy from the data; repeatable.")] = None,
    escape_formulas: Annotated[
        bool, typer.Option("--escape-formulas", help="Put ' before texts that a spreadsheet would calculate (.csv).")
    ] = False,
) -> None:
    """Predict every row of a file of any size: the answer, its probabilities and how sure the ensemble is."""
    from torchace.lab.tables.model import TableModel
    from torchace.lab.tables.predict import predict_file
    from torchace.lab.training.loop import Interrupted

    loaded = TableModel.load(model)
    _check_written(out, "--out", model, data)
    try:
        with Stopper() as stopper:
            rows = predict_file(loaded, data, out, keep=keep or (), escape_formulas=escape_formulas, stop=stopper)
    except Interrupted:
        complain("Interrupted. Nothing was written.")
        raise typer.Exit(INTERRUPTED) from None
    say(f"{rows} predictions written to {out}.")


def export(
    model: Model,
    onnx: Annotated[Path, typer.Option(help="The file to write.")],
) -> None:
    """Write a model as one ONNX graph, checked against torch by onnxruntime."""
    from torchace.lab.tables.export import export_onnx
    from torchace.lab.tables.model import TableModel

    loaded = TableModel.load(model)
    _check_written(onnx, "--onnx", model)
    worst = export_onnx(loaded, onnx)
    say(f"Written to {onnx}; onnxruntime's answers differ from torch's by {worst:.1g} at most.")


def show(model: Model) -> None:
    """Describe a model: what it predicts from what, λ and how it was found, how it does."""
    from torchace.lab.tables.model import TableModel

    loaded = TableModel.load(model)
    schema, ensemble = loaded.encoding.schema, loaded.ensemble
    parameters = sum(p.numel() for p in ensemble.parameters())
    columns = "1 column" if len(schema.columns) == 1 else f"{len(schema.columns)} columns"
    say(f"{model}: {schema.target.task} of {schema.target.name!r} from {columns}.")
    if schema.target.classes:
        say(f"Classes: {_listed(schema.target.class_names)}.")
    for kind, plural in (("number", "Numbers"), ("category", "Categories")):
        names = [column.name for column in schema.columns if column.kind == kind]
        if names:
            say(f"{plural}: {_listed(names)}.")
    say(f"{ensemble.num_members} members, {parameters} parameters, λ={loaded.diversity:g}.")
    search = loaded.record.get("search")
    if search:
        say(search["sentence"])
    scores = loaded.record.get("scores")
    if scores:
        wide().print(_scores({part: scores[part] for part in ("validation", "test") if part in scores}))


# -- from what was typed ----------------------------------------------------------------------------------------------


def _settings(
    target: str,
    task: str | None,
    drop: list[str] | None,
    number: list[str] | None,
    category: list[str] | None,
    split_column: str | None,
    validation: float,
    test: float,
    seed: int,
) -> TableSettings:
    from torchace.lab.tables.table import TableSettings

    if task not in (None, "classification", "regression"):
        raise ValueError(f"Expected --task classification or regression, but got {task!r}.")
    if not (validation > 0 and test >= 0 and validation + test < 1):
        raise ValueError(
            f"Expected --validation above 0 and --test of at least 0 that leave rows to train on, "
            f"but got {validation:g} and {test:g}."
        )
    kinds: dict[str, str] = {}
    for names, kind in ((number, "number"), (category, "category")):
        for name in names or ():
            if name in kinds:
                raise ValueError(f"The column {name!r} cannot be both numbers and categories.")
            if name in (drop or ()):
                raise ValueError(f"The column {name!r} cannot be both left out and a {kind}.")
            kinds[name] = kind
    return TableSettings(target, task, tuple(drop or ()), kinds, split_column, validation, test, seed)


def _plan(diversity: str, members: int, hidden: str, patience: int, **values: Any) -> Hyperparameters:
    """Check the hyperparameters."""
    from torchace.lab.schema.hyperparameters import check_hyperparameters

    if not re.fullmatch(r"\s*([0-9]{1,6}\s*(,\s*[0-9]{1,6}\s*)*)?", hidden):
        raise ValueError(f"Expected --hidden as widths such as 64 or 64,32, but got {hidden!r}.")
    if values["batches"] == "separate":
        raise ValueError("Expected --batches shared or exchanged, but got 'separate'.")
    return check_hyperparameters(
        lambda name: f"--{name.removeprefix('num_').replace('_', '-')}",
        diversity="auto" if diversity == "auto" else _number(diversity),
        num_members=members,
        hidden=[int(width) for width in hidden.split(",") if width.strip()],
        patience=patience or None,
        **values,
    )


def _stem(data: Path) -> str:
    """The name of a file without its endings."""
    return data.name.lstrip(".").split(".")[0]


def _directory(out: Path | None, home: str, name: str) -> Path:
    directory = Path(home, name) if out is None else out
    if directory.name in ("", ".."):
        raise ValueError(f"Expected --out to name a directory, but got {str(directory)!r}.")
    return directory


def _check_written(out: Path, option: str, model: Path, data: Path | None = None) -> None:
    """A file that can be written, and is neither the data nor part of the model."""
    if out.is_dir():
        raise ValueError(f"{out} is a directory, but {option} is a file. Choose another {option}.")
    if data is not None and out.exists() and data.exists() and out.samefile(data):
        raise ValueError(f"{out} is the file that is read. Choose another {option}.")
    if out.resolve().is_relative_to(model.resolve()):
        raise ValueError(f"{out} is in the model's directory, which stays as it is. Choose another {option}.")


def _number(text: str) -> float | str:
    """A number, or the text for the error message."""
    try:
        return float(text)
    except ValueError:
        return text


# -- to what is printed -----------------------------------------------------------------------------------------------


def _table(*columns: str) -> Any:
    from rich.table import Table
    from rich.text import Text

    table = Table(box=None, pad_edge=False)
    for place, name in enumerate(columns):
        table.add_column(
            Text(printable(name)), justify="left" if place == 0 else "right"
        )  # Text: [brackets] are a user's own
    return table


def _listed(names: Iterable[str], limit: int = 20) -> str:
    """Names on one line, the first few of many."""
    clear = [name if name.isprintable() and name.strip() else repr(name) for name in names]
    more = f" and {len(clear) - limit} more" if len(clear) > limit else ""
    return ", ".join(clear[:limit]) + more


def _figure(value: float | None) -> str:
    if value is None:
        return ""
    return f"{value:.4f}" if value == 0 or 1e-3 <= abs(value) < 1e6 else f"{value:.4g}"


def _scores(by_part: dict[str, Any]) -> Any:
    table = _table("", *by_part)
    for name, words in SCORES.items():
        values = [scores.get(name) for scores in by_part.values()]
        if any(value is not None for value in values):
            table.add_row(words, *map(_figure, values))
    return table


def _candidates(tuned: dict[str, Any]) -> Any:
    metric = tuned["metric"].replace("_", " ")
    table = _table("λ", f"held-out {metric}", "seeds", "failed")
    for candidate in tuned["candidates"]:
        scores = [score for score in candidate["scores"].values() if score is not None]
        mean = f"{sum(scores) / len(scores):.5g}" if scores else "-"
        mark = " ← chosen" if candidate["diversity"] == tuned["chosen"] else ""
        failed = len(candidate["scores"]) - len(scores)
        table.add_row(f"{candidate['diversity']:g}{mark}", mean, str(len(scores)), str(failed or ""))
    return table


def _trials(found: dict[str, Any]) -> Any:
    done = [trial for trial in found["trials"] if trial["value"] is not None]
    names = [found["metric"], *(done[0]["params"] if done else ())]
    words = [name.removeprefix("num_").replace("_", " ").replace("diversity", "λ") for name in names]
    table = _table("trial", *words)
    for trial in sorted(done, key=lambda trial: trial["value"])[:10]:
        table.add_row(
            str(trial["number"]), f"{trial['value']:.5g}", *(f"{value:.4g}" for value in trial["params"].values())
        )
    states = [trial["state"] for trial in found["trials"]]
    table.caption = ", ".join(f"{states.count(state)} {state}" for state in sorted(set(states)))
    return table


def _command(found: Any, data: Path, target: str, given: Mapping[str, Any]) -> str:
    """How to train with what was found, and with what else was asked for."""
    plan, usual = found.plan, inspect.signature(fit).parameters
    chosen = {"target": target, "diversity": found.diversity, "members": plan.num_members}
    chosen |= {"hidden": ",".join(map(str, plan.hidden)), "batch_size": plan.batch_size}
    chosen |= {"learning_rate": plan.learning_rate, "weight_decay": plan.weight_decay}
    words = ["torchace", "fit", str(data)]
    for name, value in (chosen | {name: v for name, v in given.items() if v != usual[name].default}).items():
        for one in value if isinstance(value, list) else [value]:
            words += [f"--{name.replace('_', '-')}", f"{one:.4g}" if isinstance(one, float) else str(one)]
    return shlex.join(words)


COMMANDS = (fit, tune, evaluate, predict, export, show)
