"""A trained ensemble with the encoding of its table: what `torchace fit` keeps, and what predicts rows."""

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
from torchace.lab.training.chunks import chunk_rows, collect_chunks
from torchace.lab.training.evaluate import Evaluation, Evaluator, evaluate_regression
from torchace.nn import Ensemble
from torchace.saving import ModelFileError, load_model, save_model

if TYPE_CHECKING:
    from pandas import DataFrame  # type: ignore[import-untyped]


@dataclass(frozen=True, eq=False)
class TableModel:
    """An ensemble that predicts rows of a table.

    Attributes:
        ensemble: From the raw matrix of `encoding` to logits, or to predictions in the target's units; in float64.
        encoding: From rows to the raw matrix.
        diversity: λ.
        record: Everything else that was written down: how it was trained, how it did.
    """

    ensemble: Ensemble
    encoding: Encoding
    diversity: float
    record: Mapping[str, Any]

    @classmethod
    def load(cls, path: str | os.PathLike[str]) -> TableModel:
        """A model directory of `torchace fit`, or of an estimator's `save`.

        Raises:
            ModelFileError: The directory is damaged, or holds a model that was not trained on a table.
        """
        ensemble = load_model(path)
        manifest = cast(Mapping[str, Any], ensemble.manifest)
        extra = manifest["extra"] or {}
        if not isinstance(ensemble, Ensemble) or "encoding" not in extra or manifest["diversity"] is None:
            raise ModelFileError(f"{path} holds no model of a table; read it with torchace.load_model.")
        try:
            encoding = Encoding.from_json(extra["encoding"])
        except DataError as error:
            raise ModelFileError(f"{path} holds a table's description that cannot be read: {error}") from error
        _check_fit(ensemble, encoding, path)
        record = {key: value for key, value in extra.items() if key != "encoding"}
        _check_record(record, path)
        return cls(ensemble, encoding, manifest["diversity"], record)

    def save(self, path: str | os.PathLike[str]) -> None:
        """Writes a model directory: complete, or not there."""
        target = self.encoding.schema.target
        save_model(
            path,
            self.ensemble,
            diversity=self.diversity,
            class_names=target.class_names if self.is_classifier else None,
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
        """The logits of one chunk of rows after another."""
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
        if not self.is_classifier:
            measures = {"prediction": lambda f: f.mean((0, 2)), "spread": lambda f: f.std(0, correction=0).squeeze(1)}
            return DataFrame(self._collected(frame, measures), index=frame.index)
        target = self.encoding.schema.target
        found = self._collected(
            frame,
            {
                # rounding may leave 1 + 4e-16
                "probs": lambda z: ensemble_log_probs(z).clamp_(max=0).exp_(),
                "entropy": partial(predictive_entropy, reduction="none"),
                "mutual_information": partial(mutual_information, reduction="none"),
                "disagreement": partial(disagreement, reduction="none"),
            },
        )
        probs = found.pop("probs")
        columns: dict[str, Any] = {"prediction": target.labels(torch.from_numpy(probs.argmax(1)))}
        columns |= {f"probability_{name}": probs[:, code] for code, name in enumerate(target.class_names)}
        return DataFrame(columns | found, index=frame.index)

    def _collected(self, frame: DataFrame, measures: Mapping[str, Callable[[Tensor], Tensor]]) -> dict[str, Any]:
        """What each measure makes of the members' logits, for all rows, as numpy arrays."""
        found = collect_chunks(self._chunks(frame), len(frame), *measures.values())
        return {name: values.numpy() for name, values in zip(measures, found, strict=True)}

    def evaluate(self, frame: DataFrame) -> Evaluation:
        """Scores on rows whose target is known."""
        return score(self._chunks(frame), self.encoding.targets(frame))


def _check_record(record: Mapping[str, Any], path: str | os.PathLike[str]) -> None:
    """Notes on the training in the form that they are written and shown in."""
    search, scores = record.get("search"), record.get("scores")
    valid = search is None or (isinstance(search, Mapping) and isinstance(search.get("sentence"), str))
    if valid and scores is not None:
        parts = scores.values() if isinstance(scores, Mapping) else [None]
        valid = all(isinstance(part, Mapping) and all(map(_is_score, part.values())) for part in parts)
    if not valid:
        raise ModelFileError(f"{path} holds notes on its training that cannot be read; train it anew.")


def _is_score(value: Any) -> bool:
    return value is None or isinstance(value, list) or (type(value) in (int, float) and abs(value) < 1e300)


def _check_fit(ensemble: Ensemble, encoding: Encoding, path: str | os.PathLike[str]) -> None:
    """An ensemble that takes the encoding's rows and answers with its classes, or with a number."""
    outputs = max(1, len(encoding.schema.target.classes))
    try:
        with torch.no_grad():
            fits = ensemble(torch.zeros(1, len(encoding.columns), dtype=torch.float64)).shape[1:] == (1, outputs)
    except (RuntimeError, ValueError):
        fits = False
    if not fits:
        raise ModelFileError(f"{path} describes another table than its ensemble was trained on; train it anew.")


def score(logits: Iterable[Tensor], target: Tensor) -> Evaluation:
    """Scores of chunks of logits `(K, n, C)` and class indices `(N,)`, or of predictions `(K, n, 1)` and numbers."""
    if target.is_floating_point():
        return evaluate_regression(torch.cat(list(logits), 1).squeeze(2), target)
    evaluator, done = Evaluator(), 0
    for part in logits:
        evaluator.update(part, target[done : done + part.shape[1]])
        done += part.shape[1]
    return evaluator.compute()
