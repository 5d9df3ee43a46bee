"""A trained model for a table: prediction of frames and of files of any size."""

from __future__ import annotations

import contextlib
import itertools
import os
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, cast

import numpy as np
import torch
from numpy.typing import NDArray
from pydantic import BaseModel, Field, ValidationError
from torch import Tensor

from torchace._files import atomic_file, error_reason
from torchace.functional import disagreement, ensemble_log_probs, ensemble_probs, mutual_information, predictive_entropy
from torchace.lab.data import DataError
from torchace.lab.data.encoding import CategoryColumn, Encoding
from torchace.lab.data.errors import arrow, first_duplicate, row_number
from torchace.lab.data.parsing import positions, texts
from torchace.lab.data.table_schema import get_column
from torchace.lab.data.tables import iterate_table
from torchace.lab.schema.values import RESULT_CONFIG, ModelComparison
from torchace.lab.training.evaluate import Evaluation, evaluate, evaluate_regression
from torchace.lab.training.loop import Interrupted
from torchace.lab.training.run_group import chunk_rows, collect_chunks
from torchace.nn import Ensemble
from torchace.saving import ModelFileError, load_model, save_model

if TYPE_CHECKING:
    from pandas import DataFrame  # type: ignore[import-untyped]


def _drop_single_target(values: Tensor) -> Tensor:
    return values[:, 0] if values.shape[1] == 1 else values  # (n,), or (n, M); the exporter does not trace squeeze


# logits (K, n, C) to values of each sample (n, ...), by task
_OUTPUTS: dict[str, dict[str, Callable[[Tensor], Tensor]]] = {
    "classification": {
        "probabilities": lambda logits: ensemble_log_probs(logits).clamp_(max=0).exp_(),  # rounding may leave 1 + 4e-16
        "entropy": partial(predictive_entropy, reduction="none"),
        "mutual_information": partial(mutual_information, reduction="none"),
        "disagreement": partial(disagreement, reduction="none"),
    },
    "multilabel": {"probabilities": partial(ensemble_probs, link="sigmoid")},
    "regression": {
        "prediction": lambda predictions: _drop_single_target(predictions.mean(0)),
        "spread": lambda predictions: _drop_single_target(predictions.std(0, correction=0)),
    },
}


NUM_HASHES = 1000  # of training rows, kept with the model


class _Search(BaseModel):
    sentence: str


class _Record(BaseModel):
    """Part of a model's training record that commands read."""

    model_config = RESULT_CONFIG

    comparison: ModelComparison | None = None
    search: _Search | None = None
    scores: dict[str, dict[str, Annotated[float, Field(gt=-1e300, lt=1e300)] | list[Any] | None]] | None = None
    row_hashes: Annotated[str, Field(pattern="^([0-9a-f]{16})*$")] = ""


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
        try:
            with torch.no_grad():
                shape = ensemble(torch.zeros(1, len(encoding.columns), dtype=torch.float64)).shape[1:]
        except (RuntimeError, ValueError):
            shape = torch.Size()
        if shape != (1, encoding.schema.target.num_outputs):
            raise ModelFileError(f"The ensemble in {path} does not fit the description of its table. Train it again.")
        try:
            _Record.model_validate(record)
        except ValidationError as error:
            raise ModelFileError(f"The training record in {path} cannot be read. Train the model again.") from error
        return cls(ensemble, encoding, manifest["diversity"], record)

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write a model directory, completely or not at all."""
        save_model(
            path,
            self.ensemble,
            diversity=self.diversity,
            class_names=self.encoding.schema.target.class_names if self.is_classifier else None,
            extra={**self.record, "encoding": self.encoding.to_dict()},
        )

    @property
    def is_classifier(self) -> bool:
        """Whether the model predicts classes."""
        return self.encoding.schema.target.task != "regression"

    @property
    def outputs(self) -> dict[str, Callable[[Tensor], Tensor]]:
        """Functions of the members' logits or predictions, by name."""
        return _OUTPUTS[self.encoding.schema.target.task]

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
        `disagreement`. Columns for a number: `prediction`, and `spread`, the members' standard deviation; for several,
        `prediction_TARGET` and `spread_TARGET`.
        """
        from pandas import DataFrame

        if not len(frame):
            raise DataError("Expected a table with at least one row, but got none.")
        outputs = self.outputs
        values = collect_chunks(self._chunks(frame), len(frame), *outputs.values())
        columns: dict[str, Any] = {name: value.numpy() for name, value in zip(outputs, values, strict=True)}
        if self.is_classifier:
            target, probs = self.encoding.schema.target, columns.pop("probabilities")
            predicted: dict[str, Any] = {}
            if target.task == "classification":
                predicted["prediction"] = target.labels(torch.from_numpy(probs.argmax(1)))
            predicted |= {f"probability_{name}": probs[:, code] for code, name in enumerate(target.class_names)}
            columns = predicted | columns
        elif len(names := self.encoding.schema.target.names) > 1:
            columns = {f"{key}_{name}": v[:, i] for i, name in enumerate(names) for key, v in columns.items()}
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
    writers = {".csv": _csv_writer, ".parquet": _parquet_writer}
    suffix = out.suffix.lower()
    if suffix not in writers:
        raise DataError(f"Expected an output file that ends in .csv or .parquet, but got {out}.")
    if data.exists() and out.exists() and data.samefile(out):
        raise DataError(f"Expected another output file than the input, but got {out} for both.")
    if (twice := first_duplicate(keep)) is not None:
        raise DataError(f"Expected each column to keep once, but got {twice!r} twice.")
    rows = rows or chunk_rows(model.ensemble, model.ensemble.num_members, max_rows=MAX_ROWS)
    chunks = _predict_chunks(model, data, keep, rows, Counter() if unseen is None else unseen)
    first = next(chunks)  # raises errors of the table before anything is written
    count = 0
    with atomic_file(out) as temporary, writers[suffix](temporary) as write:
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
        for place, name in enumerate(keep):
            if name in predictions.columns[place:]:
                raise DataError(f"The column {name!r} cannot be kept: the predictions have a column of the same name.")
            predictions.insert(place, name, get_column(frame, name, "to be kept"))
        yield predictions


def _escape_formulas(frame: DataFrame) -> DataFrame:
    def escape(value: Any) -> Any:
        return f"'{value}" if isinstance(value, str) and value.startswith(FORMULA_PREFIXES) else value

    frame = frame.copy()
    for name in frame.columns:
        if frame[name].dtype.kind not in "biuf":
            frame[name] = frame[name].map(escape)
    return frame.rename(columns=escape)


@contextlib.contextmanager
def _csv_writer(path: Path) -> Iterator[Callable[[DataFrame], None]]:
    with open(path, "w", encoding="utf-8", newline="") as file:
        yield lambda frame: frame.to_csv(file, index=False, header=file.tell() == 0, lineterminator="\n")


@contextlib.contextmanager
def _parquet_writer(path: Path) -> Iterator[Callable[[DataFrame], None]]:
    pa, parquet = arrow(), arrow("pyarrow.parquet")
    writer: Any = None

    def write(frame: DataFrame) -> None:
        nonlocal writer
        try:
            table = pa.Table.from_pandas(frame, preserve_index=False)
            if writer is None:
                writer = parquet.ParquetWriter(path, table.schema)
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
