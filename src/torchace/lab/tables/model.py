"""A trained ensemble with the encoding of its table."""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any, cast

import numpy as np
import torch
from numpy.typing import NDArray
from pydantic import TypeAdapter, ValidationError
from torch import Tensor

from torchace.functional import disagreement, ensemble_log_probs, ensemble_probs, mutual_information, predictive_entropy
from torchace.lab.data import DataError
from torchace.lab.data.encoding import CategoryColumn, Encoding
from torchace.lab.data.parsing import positions, texts
from torchace.lab.schema.values import ModelComparison
from torchace.lab.training.evaluate import Evaluation, Evaluator, evaluate_regression
from torchace.lab.training.run_group import chunk_rows, collect_chunks
from torchace.nn import Ensemble
from torchace.saving import ModelFileError, load_model, save_model

if TYPE_CHECKING:
    from pandas import DataFrame  # type: ignore[import-untyped]


def _drop_single_target(values: Tensor) -> Tensor:
    return values[:, 0] if values.shape[1] == 1 else values  # (n,), or (n, M); the exporter does not trace squeeze


MULTILABEL_OUTPUTS: dict[str, Callable[[Tensor], Tensor]] = {"probabilities": partial(ensemble_probs, link="sigmoid")}

# logits (K, n, C) to values of each sample (n, ...)
CLASSIFIER_OUTPUTS: dict[str, Callable[[Tensor], Tensor]] = {
    "probabilities": lambda logits: ensemble_log_probs(logits).clamp_(max=0).exp_(),  # rounding may leave 1 + 4e-16
    "entropy": partial(predictive_entropy, reduction="none"),
    "mutual_information": partial(mutual_information, reduction="none"),
    "disagreement": partial(disagreement, reduction="none"),
}
REGRESSOR_OUTPUTS: dict[str, Callable[[Tensor], Tensor]] = {
    "prediction": lambda predictions: _drop_single_target(predictions.mean(0)),
    "spread": lambda predictions: _drop_single_target(predictions.std(0, correction=0)),
}


NUM_HASHES = 1000  # of training rows, kept with the model

_OUTPUTS = {"classification": CLASSIFIER_OUTPUTS, "multilabel": MULTILABEL_OUTPUTS, "regression": REGRESSOR_OUTPUTS}


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
        if not _accepts(ensemble, encoding):
            raise ModelFileError(f"The ensemble in {path} does not fit the description of its table. Train it again.")
        if not _is_readable(record):
            raise ModelFileError(f"The training record in {path} cannot be read. Train the model again.")
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
        return evaluate_chunks(self._chunks(frame), self.encoding.targets(frame))

    def evaluate_targets(self, frame: DataFrame) -> dict[str, Evaluation]:
        """Return the scores of each of several targets, by name."""
        predictions, y = self.logits(frame), self.encoding.targets(frame)
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


def evaluate_chunks(logits: Iterable[Tensor], target: Tensor) -> Evaluation:
    """Score chunks of logits `(K, n, C)` with class indices `(N,)`, or predictions `(K, n, M)` with numbers."""
    if target.is_floating_point():
        predictions = torch.cat(list(logits), 1)
        return evaluate_regression(predictions if target.ndim == 2 else predictions.squeeze(2), target)
    evaluator, done = Evaluator(), 0
    for part in logits:
        evaluator.update(part, target[done : done + part.shape[1]])
        done += part.shape[1]
    return evaluator.compute()


def _accepts(ensemble: Ensemble, encoding: Encoding) -> bool:
    outputs = encoding.schema.target.num_outputs
    try:
        with torch.no_grad():
            return ensemble(torch.zeros(1, len(encoding.columns), dtype=torch.float64)).shape[1:] == (1, outputs)
    except (RuntimeError, ValueError):
        return False


def _is_readable(record: Mapping[str, Any]) -> bool:
    search, scores = record.get("search"), record.get("scores")
    try:
        TypeAdapter(ModelComparison | None).validate_python(record.get("comparison"))
    except ValidationError:
        return False
    if search is not None and not (isinstance(search, Mapping) and isinstance(search.get("sentence"), str)):
        return False
    hashes = record.get("row_hashes", "")
    if not isinstance(hashes, str) or not re.fullmatch(r"([0-9a-f]{16})*", hashes):
        return False
    parts = {} if scores is None else scores
    return isinstance(parts, Mapping) and all(
        isinstance(part, Mapping) and all(map(_is_score, part.values())) for part in parts.values()
    )


def _is_score(value: Any) -> bool:
    return value is None or isinstance(value, list) or (type(value) in (int, float) and abs(value) < 1e300)
