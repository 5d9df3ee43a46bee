"""A trained model for a table: prediction of frames and of files of any size."""

from __future__ import annotations

import itertools
import os
import re
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from torchace._files import atomic_file, error_reason
from torchace.functional import disagreement, ensemble_log_probs, mutual_information, predictive_entropy
from torchace.lab.data import DataError
from torchace.lab.data.encoding import CategoryColumn, Encoding
from torchace.lab.data.errors import arrow, first_duplicate, row_number
from torchace.lab.data.parsing import positions, texts
from torchace.lab.data.table_schema import get_column
from torchace.lab.data.tables import iterate_table
from torchace.lab.training.evaluate import Evaluation, evaluate, evaluate_regression
from torchace.lab.training.loop import Interrupted
from torchace.lab.training.run_group import chunk_rows, collect_chunks
from torchace.nn import Ensemble
from torchace.saving import ModelFileError, load_model, save_model

if TYPE_CHECKING:
    from pandas import DataFrame  # type: ignore[import-untyped]

Output = Callable[[Tensor], Tensor]  # of the members' logits or predictions (K, n, C), to values (n, ...)


def _by_label(measure: Output, logits: Tensor) -> Tensor:
    """Measure of each label, `(n, L)`: a choice between the logits 0 and z."""
    pairs = torch.stack([torch.zeros_like(logits), logits], 3).flatten(1, 2)  # (K, n * L, 2)
    return measure(pairs).view(logits.shape[1:])


def log_probs(task: str, logits: Tensor) -> Tensor:
    """Log probabilities of classes, or of labels, `(n, C)`."""
    link = "softmax" if task == "classification" else "sigmoid"
    return ensemble_log_probs(logits, link=link).clamp_(max=0)  # rounding may leave 1 + 4e-16


_UNCERTAINTIES: dict[str, Output] = {
    "entropy": partial(predictive_entropy, reduction="none"),
    "mutual_information": partial(mutual_information, reduction="none"),
    "disagreement": partial(disagreement, reduction="none"),
}
# by task
UNCERTAINTIES: dict[str, dict[str, Output]] = {
    "classification": _UNCERTAINTIES,
    "multilabel": {name: partial(_by_label, measure) for name, measure in _UNCERTAINTIES.items()},
    "regression": {"spread": lambda predictions: predictions.std(0, correction=0)},
}
NUM_HASHES = 1000  # of training rows, kept with the model


@dataclass(frozen=True, eq=False)
class TableModel:
    """An ensemble that predicts rows of a table.

    Attributes:
        ensemble: Maps the raw matrix to logits, or to predictions in the target's units; float64.
        encoding: Maps rows to the raw matrix.
        diversity: λ.
        record: Settings and scores of the training.
    """

    ensemble: Ensemble
    encoding: Encoding
    diversity: float
    record: Mapping[str, Any]

    @classmethod
    def load(cls, path: str | os.PathLike[str]) -> TableModel:
        """Load a model directory of `torchace fit`, or of an estimator's `save`.

        Raises:
            ModelFileError: The directory is damaged, or its model was not trained on a table.
        """
        ensemble = load_model(path)
        manifest = cast(Mapping[str, Any], ensemble.manifest)
        record = dict(manifest["extra"] or {})
        if not isinstance(ensemble, Ensemble) or "encoding" not in record or manifest["diversity"] is None:
            raise ModelFileError(f"Expected a model of a table in {path}, but got another. Use torchace.load_model.")
        try:
            encoding = Encoding.from_dict(record.pop("encoding"))
        except DataError as error:
            raise ModelFileError(f"The description of the table in {path} cannot be read: {error}") from error
        return cls(ensemble, encoding, manifest["diversity"], record)

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write a model directory, completely or not at all."""
        target, extra = self.encoding.schema.target, {**self.record, "encoding": self.encoding.to_dict()}
        names = target.class_names if target.task == "classification" else None
        save_model(path, self.ensemble, diversity=self.diversity, class_names=names, extra=extra)

    @property
    def is_classifier(self) -> bool:
        """Whether the model predicts classes."""
        return self.encoding.schema.target.task != "regression"

    @property
    def outputs(self) -> dict[str, Output]:
        """Functions of the members' logits or predictions, by name."""
        target = self.encoding.schema.target
        if self.is_classifier:
            uncertainties = UNCERTAINTIES[target.task] if target.task == "classification" else {}
            return {"probabilities": lambda logits: log_probs(target.task, logits).exp_(), **uncertainties}
        outputs: dict[str, Output] = {"prediction": partial(torch.mean, dim=0), **UNCERTAINTIES[target.task]}
        if target.num_outputs > 1:
            return outputs
        return {name: partial(lambda function, p: function(p)[:, 0], output) for name, output in outputs.items()}

    def logits(self, frame: DataFrame) -> Tensor:
        """Return the members' logits `(K, N, C)`, or predictions `(K, N, M)`."""
        return torch.cat(list(self._chunks(frame)), 1)

    @torch.no_grad()
    def _chunks(self, frame: DataFrame) -> Iterator[Tensor]:
        rows = chunk_rows(self.ensemble, self.ensemble.num_members)
        for part in self.encoding.matrix(frame).split(rows):
            yield self.ensemble(part)

    def predict(self, frame: DataFrame) -> DataFrame:
        """Return predictions and their uncertainty, one row for each row of `frame`.

        Columns for classes: `prediction`, one `probability_CLASS` each, `entropy`, `mutual_information`,
        `disagreement`. Columns for a number: `prediction`, and `spread`, the members' standard deviation; for several
        numbers or labels, one column for each, such as `prediction_TARGET`.
        """
        from pandas import DataFrame

        if not len(frame):
            raise DataError("Expected a table with at least one row, but got none.")
        target, outputs = self.encoding.schema.target, self.outputs
        found = collect_chunks(self._chunks(frame), len(frame), *outputs.values())
        values = {name: value.numpy() for name, value in zip(outputs, found, strict=True)}
        columns: dict[str, Any] = {}
        if self.is_classifier:
            probs = values.pop("probabilities")
            if target.task == "classification":
                columns["prediction"] = target.labels(torch.from_numpy(probs.argmax(1)))
            columns |= {f"probability_{name}": probs[:, code] for code, name in enumerate(target.class_names)}
        if target.task == "classification" or len(names := target.class_names or target.names) == 1:
            columns |= values
        else:
            columns |= {f"{key}_{name}": v[:, i] for i, name in enumerate(names) for key, v in values.items()}
        return DataFrame(columns, index=frame.index)

    def unseen_categories(self, frame: DataFrame) -> dict[str, int]:
        """Return the number of rows whose category training did not have, or had too rarely, by column."""
        counts = {}
        for column in self.encoding.columns:
            if isinstance(column, CategoryColumn):
                cells = texts(frame[column.name])
                counts[column.name] = int(((positions(cells, column.categories) < 0) & cells.is_valid()).sum())
        return {name: count for name, count in counts.items() if count}

    def training_share(self, frame: DataFrame) -> float:
        """Estimate the share of the rows of the training that `frame` contains; 0 if the model does not know."""
        kept = np.frombuffer(bytes.fromhex(self.record.get("row_hashes", "")), dtype="<u8")
        return float(np.isin(kept, _hash_rows(self.encoding.matrix(frame))).mean()) if len(kept) else 0.0

    def evaluate(self, frame: DataFrame) -> Evaluation:
        """Return scores on rows whose target is known."""
        schema = self.encoding.schema
        return evaluate(self._chunks(frame), schema.targets(frame), task=schema.target.task)

    def evaluate_targets(self, frame: DataFrame) -> dict[str, Evaluation]:
        """Return the scores of each of several targets, by name."""
        predictions, y = self.logits(frame), self.encoding.schema.targets(frame)
        names = self.encoding.schema.target.names
        return {name: evaluate_regression(predictions[..., i], y[:, i]) for i, name in enumerate(names)}


def sample_hashes(raw: Tensor) -> str:
    """Return the smallest hashes of rows of the raw matrix as text: a random sample of the distinct rows."""
    return _hash_rows(raw)[:NUM_HASHES].tobytes().hex()


def _hash_rows(raw: Tensor) -> NDArray[np.uint64]:
    """Return the hashes of the distinct rows, sorted."""
    from pandas import DataFrame
    from pandas.util import hash_pandas_object  # type: ignore[import-untyped]

    rows = np.where(np.isnan(raw.numpy()), np.nan, raw.numpy() + 0.0)  # one NaN, no -0.0
    return np.unique(hash_pandas_object(DataFrame(rows), index=False).to_numpy()).astype("<u8")


MAX_ROWS = 65_536  # in a chunk
FORMULA_PREFIXES = ("=", "+", "-", "@", "\t", "\r", "\n")  # of text that spreadsheets evaluate
SIGNED_NUMBER = re.compile("[+-][0-9.,]+(?:[eE][+-]?[0-9]+)?")  # no formula


def predict_file(
    model: TableModel,
    data: Path,
    out: Path,
    *,
    keep: Sequence[str] = (),
    escape_formulas: bool = False,
    rows: int | None = None,
    stop: Callable[[], bool] = lambda: False,
    unseen: Counter[str] | None = None,
) -> int:
    """Predict every row of a file, in order, and return their number; `out` is written atomically.

    `keep` are columns to copy from the data, `rows` is the chunk size. If `stop`, called before every chunk, returns
    True, nothing is written and `Interrupted` is raised. `unseen` counts rows with unseen categories, by column.
    """
    suffix = out.suffix.lower()
    if suffix not in (".csv", ".parquet"):
        raise DataError(f"Expected an output file that ends in .csv or .parquet, but got {out}.")
    rows = rows or chunk_rows(model.ensemble, model.ensemble.num_members, max_rows=MAX_ROWS)
    chunks = _predict_chunks(model, data, keep, rows, Counter() if unseen is None else unseen)
    first, count = next(chunks), 0  # raises errors of the table before anything is written
    with atomic_file(out) as temporary, (_write_csv if suffix == ".csv" else _write_parquet)(temporary) as write:
        for chunk in itertools.chain([first], chunks):
            if stop():
                raise Interrupted
            write(_escape_formulas(chunk) if escape_formulas and suffix == ".csv" else chunk)
            count += len(chunk)
    return count


def _predict_chunks(
    model: TableModel, data: Path, keep: Sequence[str], rows: int, unseen: Counter[str]
) -> Iterator[DataFrame]:
    for frame in iterate_table(data, rows=rows):
        if not len(frame):  # a Parquet file may have empty row groups
            continue
        predictions = model.predict(frame)
        unseen.update(model.unseen_categories(frame))
        if (twice := first_duplicate([*keep, *predictions.columns])) is not None:
            raise DataError(f"The output would have two columns named {twice!r}. Keep others, or rename that column.")
        for place, name in enumerate(keep):
            predictions.insert(place, name, get_column(frame, name, "to be kept"))
        yield predictions


def _escape_formulas(frame: DataFrame) -> DataFrame:
    def escape(value: Any) -> Any:
        is_formula = (
            isinstance(value, str) and value.startswith(FORMULA_PREFIXES) and not SIGNED_NUMBER.fullmatch(value)
        )
        return f"'{value}" if is_formula else value

    others = frame.select_dtypes(exclude="number")
    return frame.assign(**{name: others[name].map(escape) for name in others}).rename(columns=escape)


@contextmanager
def _write_csv(path: Path) -> Iterator[Callable[[DataFrame], None]]:
    with open(path, "w", encoding="utf-8", newline="") as file:
        yield lambda frame: frame.to_csv(file, index=False, header=file.tell() == 0, lineterminator="\n")


@contextmanager
def _write_parquet(path: Path) -> Iterator[Callable[[DataFrame], None]]:
    pa, parquet = arrow(), arrow("pyarrow.parquet")
    writer: Any = None

    def write(frame: DataFrame) -> None:
        nonlocal writer
        try:
            table = pa.Table.from_pandas(frame, preserve_index=False)
            table = table.replace_schema_metadata()  # of pandas, which cannot read some types back by name
            writer = writer or parquet.ParquetWriter(path, table.schema)
            writer.write_table(table.cast(writer.schema))
        except pa.ArrowException as error:
            raise DataError(
                f"A column to keep changes its type at row {row_number(frame, 0)} or later ({error_reason(error)}). "
                "Write a .csv file, or keep fewer columns."
            ) from None

    try:
        yield write
    finally:
        if writer is not None:
            writer.close()
