"""The search for λ, read from the result files."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass
from typing import Any

from torchace.lab.report._fields import Fields, ReportError, as_count, as_number

SPLITS = ("train", "validation", "test")


@dataclass(frozen=True)
class Candidate:
    """A λ that was tried, and its score by seed."""

    diversity: float
    scores: Mapping[int, float]


@dataclass(frozen=True)
class Gain:
    """By how much the chosen λ lowers the score of λ=0, seed by seed on fresh seeds: above zero is better.

    `low` and `high` are a 95 % interval, None where there are too few seeds for one. It covers the noise of seeds
    and of `samples` samples; where that is None, as in files of earlier versions, of seeds alone.
    """

    split: str
    mean: float
    low: float | None
    high: float | None
    seeds: tuple[int, ...]
    beyond_noise: bool
    samples: int | None = None


@dataclass(frozen=True)
class Search:
    """How λ was chosen: candidates in rounds, scored by `metric` on `split`; lower is better."""

    chosen: float
    metric: str
    split: str
    rounds: tuple[tuple[float, ...], ...]
    candidates: tuple[Candidate, ...]
    gain: Gain | None
    sentence: str

    def round_of(self, diversity: float) -> int | None:
        """The round in which a λ was first tried, counted from 1."""
        return next((i for i, tried in enumerate(self.rounds, 1) if diversity in tried), None)

    @property
    def scores(self) -> dict[float, Mapping[int, float]]:
        """The scores by seed of every λ that has any, in ascending λ."""
        found = {candidate.diversity: candidate.scores for candidate in self.candidates if candidate.scores}
        return dict(sorted(found.items()))


def read_search(fields: Fields, metrics: Collection[str]) -> Search:
    """Reads the object under `search`.

    Args:
        fields: The object.
        metrics: The names a metric may have.

    Returns:
        The search.

    Raises:
        ReportError: A key is missing or of the wrong kind.
    """
    return Search(
        chosen=fields.number("chosen"),
        metric=_one_of(fields, "metric", metrics, ...),
        split=_one_of(fields, "split", SPLITS, "validation"),
        rounds=fields.items("rounds", _round, "a list of lists of numbers", []),
        candidates=fields.items("candidates", lambda value: _candidate(Fields(value, fields.where)), "a list of λ"),
        gain=None if fields.value.get("gain") is None else _gain(fields.object("gain")),
        sentence=fields.text("sentence", ""),
    )


def _one_of(fields: Fields, key: str, allowed: Collection[str], default: Any) -> str:
    if (value := fields.text(key, default)) not in allowed:
        raise ReportError(f"Expected one of {', '.join(allowed)} under `{key}` in {fields.where}, but got {value!r}.")
    return value


def _round(value: object) -> tuple[float, ...]:
    if not isinstance(value, list):
        raise TypeError(value)
    return tuple(as_number(item) for item in value)


def _candidate(fields: Fields) -> Candidate:
    scores = {}
    for seed, value in fields.object("scores").value.items():
        if not seed.isdecimal():
            raise ReportError(f"Expected seeds as the keys of `scores` in {fields.where}, but got {seed!r}.")
        if value is not None:  # a training that failed
            scores[int(seed)] = fields.object("scores").number(seed)
    return Candidate(fields.number("diversity"), scores)


def _gain(fields: Fields) -> Gain:
    return Gain(
        split=_one_of(fields, "split", SPLITS, "test"),
        mean=fields.number("mean"),
        low=fields.optional_number("low"),
        high=fields.optional_number("high"),
        seeds=fields.items("seeds", as_count, "a list of integers", []),
        beyond_noise=fields.flag("beyond_noise"),
        samples=fields.optional_integer("samples"),
    )
