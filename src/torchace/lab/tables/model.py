"""A trained ensemble with the encoding of its table: the content of a model directory of `torchace fit`."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any, cast

import torch
from torch import Tensor

from torchace.functional import disagreement, ensemble_log_probs, mutual_information, predictive_entropy
from torchace.lab.data import DataError
from torchace.lab.data.encoding import Encoding
from torchace.lab.training.evaluate import Evaluation, Evaluator, evaluate_regression
from torchace.lab.training.memory import chunk_rows, collect_chunks
from torchace.nn import Ensemble
from torchace.saving import ModelFileError, load_model, save_model

if TYPE_CHECKING:
    from pandas import DataFrame  # type: ignore[import-untyped]

# of logits (K, n, C), for each sample (n, ...)
CLASSIFIER_OUTPUTS: dict[str, Callable[[Tensor], Tensor]] = {
    "probabilities": lambda logits: ensemble_log_probs(logits).clamp_(max=0).exp_(),  # rounding may leave 1 + 4e-16
    "entropy": partial(predictive_entropy, reduction="none"),
    "mutual_information": partial(mutual_information, reduction="none"),
    "disagreement": partial(disagreement, reduction="none"),
}
REGRESSOR_OUTPUTS: dict[str, Callable[[Tensor], Tensor]] = {
    "prediction": lambda predictions: predictions.mean((0, 2)),
    "spread": lambda predictions: predictions.std(0, correction=0).squeeze(1),
}


@dataclass(frozen=True, eq=False)
class TableModel:
    """An ensemble that predicts rows of a table.

    Attributes:
        ensemble: Maps the raw matrix of `encoding` to logits, or to predictions in the target's units; in float64.
        encoding: Maps rows to the raw matrix.
        diversity: λ.
        record: How the model was trained, and its scores.
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
            raise ModelFileError(f"{path} holds no model of a table; read it with torchace.load_model.")
        try:
            encoding = Encoding.from_json(record.pop("encoding"))
        except DataError as error:
            raise ModelFileError(f"{path} holds a table's description that cannot be read: {error}") from error
        if not _accepts(ensemble, encoding):
            raise ModelFileError(f"{path} describes another table than its ensemble was trained on; train it anew.")
        if not _is_readable(record):
            raise ModelFileError(f"{path} holds notes on its training that cannot be read; train it anew.")
        return cls(ensemble, encoding, manifest["diversity"], record)

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write a model directory, completely or not at all."""
        save_model(
            path,
            self.ensemble,
            diversity=self.diversity,
            class_names=self.encoding.schema.target.class_names if self.is_classifier else None,
            extra={**self.record, "encoding": self.encoding.to_json()},
        )

    @property
    def is_classifier(self) -> bool:
        return self.encoding.schema.target.task == "classification"

    def logits(self, frame: DataFrame) -> Tensor:
        """The members' logits `(K, N, C)`, or predictions `(K, N, 1)`."""
        return torch.cat(list(self._chunks(frame)), 1)

    @torch.no_grad()
    def _chunks(self, frame: DataFrame) -> Iterator[Tensor]:
        """Logits of consecutive chunks of rows."""
        rows = chunk_rows(self.ensemble, self.ensemble.num_members)
        for part in self.encoding.matrix(frame).split(rows):
            yield self.ensemble(part)

    def predict(self, frame: DataFrame) -> DataFrame:
        """Predictions and their uncertainty, one row for each row of a table.

        The columns are, for classes: `prediction`, `probability_CLASS` for each, `entropy`, `mutual_information` and
        `disagreement`; for numbers: `prediction` and `spread`, the members' standard deviation.
        """
        from pandas import DataFrame

        if not len(frame):
            raise DataError("The table has no rows; nothing can be predicted.")
        outputs = CLASSIFIER_OUTPUTS if self.is_classifier else REGRESSOR_OUTPUTS
        values = collect_chunks(self._chunks(frame), len(frame), *outputs.values())
        columns: dict[str, Any] = {name: value.numpy() for name, value in zip(outputs, values, strict=True)}
        if self.is_classifier:
            target, probs = self.encoding.schema.target, columns.pop("probabilities")
            predicted: dict[str, Any] = {"prediction": target.labels(torch.from_numpy(probs.argmax(1)))}
            predicted |= {f"probability_{name}": probs[:, code] for code, name in enumerate(target.class_names)}
            columns = predicted | columns
        return DataFrame(columns, index=frame.index)

    def evaluate(self, frame: DataFrame) -> Evaluation:
        """Scores on rows whose target is known."""
        return evaluate_chunks(self._chunks(frame), self.encoding.targets(frame))


def evaluate_chunks(logits: Iterable[Tensor], target: Tensor) -> Evaluation:
    """Scores of chunks of logits `(K, n, C)` and class indices `(N,)`, or of predictions `(K, n, 1)` and numbers."""
    if target.is_floating_point():
        return evaluate_regression(torch.cat(list(logits), 1).squeeze(2), target)
    evaluator, done = Evaluator(), 0
    for part in logits:
        evaluator.update(part, target[done : done + part.shape[1]])
        done += part.shape[1]
    return evaluator.compute()


def _accepts(ensemble: Ensemble, encoding: Encoding) -> bool:
    """Whether an ensemble maps the encoding's rows to its classes, or to one number."""
    outputs = max(1, len(encoding.schema.target.classes))
    try:
        with torch.no_grad():
            return ensemble(torch.zeros(1, len(encoding.columns), dtype=torch.float64)).shape[1:] == (1, outputs)
    except (RuntimeError, ValueError):
        return False


def _is_readable(record: Mapping[str, Any]) -> bool:
    """Whether the search and the scores have the form in which they are written and shown."""
    search, scores = record.get("search"), record.get("scores")
    if search is not None and not (isinstance(search, Mapping) and isinstance(search.get("sentence"), str)):
        return False
    parts = {} if scores is None else scores
    return isinstance(parts, Mapping) and all(
        isinstance(part, Mapping) and all(map(_is_score, part.values())) for part in parts.values()
    )


def _is_score(value: Any) -> bool:
    return value is None or isinstance(value, list) or (type(value) in (int, float) and abs(value) < 1e300)
