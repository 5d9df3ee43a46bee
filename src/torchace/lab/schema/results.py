"""Pydantic models of result files: experiment.json, runs/*.json and jobs.json."""

from __future__ import annotations

import json
from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field
from pydantic.dataclasses import dataclass

from torchace._files import with_checksum
from torchace.lab.schema.values import (
    AXES,
    RESULT_CONFIG,
    Count,
    Diversity,
    Items,
    Measured,
    ModelComparison,
    Name,
    Number,
    SplitName,
    TaskName,
    axis_values,
    exact_text,
    variant_name,
)

FORMAT = 1


class ResultModel(BaseModel):
    """Part of a result file; unknown keys are ignored."""

    model_config = RESULT_CONFIG


class ResultFile(ResultModel):
    """A whole result file."""

    format: Literal[1] = 1

    def to_json(self) -> bytes:
        """Return the file's content with a checksum."""
        content = with_checksum(self.model_dump(mode="json", by_alias=True))
        return (json.dumps(content, indent=1, allow_nan=False) + "\n").encode()


# -- runs --------------------------------------------------------------------------------------------------------------


class Failure(ResultModel):
    """Reason, member and step of a failure."""

    message: str
    member: Count | None = None
    step: Count | None = None


class Scores(ResultModel):
    """Metrics on one split; `members` has each member's accuracy or MSE."""

    model_config = ConfigDict(extra="allow")
    __pydantic_extra__: dict[str, Measured] = Field(init=False)

    members: Items[Number] = ()

    @property
    def values(self) -> dict[str, float]:
        """Metrics that were measured."""
        return {key: value for key, value in (self.model_extra or {}).items() if value is not None}


class Metrics(ResultModel):
    """Scores by split."""

    test: Scores | None = None
    validation: Scores | None = None
    train: Scores | None = None


class RunResult(ResultFile):
    """One run: `runs/NAME.json`, with arrays in `runs/NAME.safetensors`."""

    run: str
    arm: str
    diversity: Number
    seed: Count
    learning_rate: Number | None = None  # of an axis of the sweep; None: the same for all runs
    weight_decay: Number | None = None
    label_smoothing: Number | None = None
    num_members: Count | None = None
    batches: str = "shared"
    status: Literal["finished", "failed"]
    failure: Failure | None = None
    metrics: Metrics | None = None
    history: Items[dict[str, Measured]] = ()  # one entry an epoch
    best_epoch: Count | None = None  # with early stopping: the epoch of the weights, from 1
    steps: Count = 0
    seconds: Number | None = None
    parameters: Count | None = None
    job: str = ""
    weights_sha256: str | None = None
    arrays_sha256: str | None = None
    versions: dict[str, Any] = {}
    device: str | None = None
    cpu: str | None = None
    threads: Count | None = None

    @property
    def key(self) -> RunKey:
        """Identity of the run."""
        return RunKey(self.arm, self.diversity, self.seed, *(getattr(self, name) for name in AXES))

    @property
    def settings(self) -> dict[str, float]:
        """Values on the axes other than λ and seed."""
        return axis_values(self)

    @property
    def finished(self) -> bool:
        """Whether the run did not fail."""
        return self.status == "finished"

    @property
    def scores(self) -> dict[str, dict[str, float]]:
        """Metrics by split and name."""
        splits = {} if self.metrics is None else dict(self.metrics)
        return {split: scores.values for split, scores in splits.items() if scores is not None}


@dataclass(frozen=True)
class RunKey:
    """The identity of a run: arm, λ, seed and its values on the other axes of the sweep."""

    arm: Name
    diversity: Diversity
    seed: Annotated[Count, Field(strict=True)]
    learning_rate: Number | None = None
    weight_decay: Number | None = None
    label_smoothing: Number | None = None

    @property
    def id(self) -> str:
        """Name of the run's files."""
        return variant_name(f"{self.arm}-l{exact_text(self.diversity)}-s{self.seed}", self.settings)

    @property
    def settings(self) -> dict[str, float]:
        """Values on the axes other than λ and seed."""
        return axis_values(self)

    @property
    def description(self) -> str:
        """Description for messages: `λ=0.5, seed 1 (main)`."""
        values = "".join(f", {name.replace('_', ' ')} {value:g}" for name, value in self.settings.items())
        return f"λ={self.diversity:g}, seed {self.seed}{values} ({self.arm})"


@dataclass(frozen=True)
class GroupPlan:
    """Runs of one arm that are trained together."""

    id: Name
    runs: Annotated[tuple[RunKey, ...], Field(min_length=1)]
    compile: Annotated[bool, Field(strict=True)] = False  # fixed, so that a run resumes the same way

    @property
    def arm(self) -> str:
        """Name of the arm."""
        return self.runs[0].arm


class PlanFile(ResultFile):
    """The planned run groups: `jobs.json`."""

    jobs: Items[GroupPlan]


# -- the experiment ----------------------------------------------------------------------------------------------------


class ColumnSummary(ResultModel):
    """A column in the training rows; `categories` has the most frequent ones with counts; dates are seconds."""

    name: str
    kind: Literal["number", "category", "date", "dropped"]
    format: str = ""  # such as 1.234,5 or %d.%m.%Y
    missing: Count = 0
    mean: Number | None = None
    std: Number | None = None
    min: Number | None = None
    max: Number | None = None
    categories: Items[Annotated[tuple[str, Count], Field(strict=False)]] = ()
    num_categories: Count = 0
    why: str = ""  # reason for dropping it


class TargetSummary(ResultModel):
    """Target of a table; no classes for a regression, which may have several columns."""

    name: str
    num_columns: Count = 1
    task: TaskName | None = None
    classes: Items[str] = ()
    columns: Items[ColumnSummary] = ()  # empty in files of earlier versions


class TableSummary(ResultModel):
    """Target and columns of a table, with notes."""

    target: TargetSummary
    columns: Items[ColumnSummary]
    notes: Items[str] = ()


class DataSummary(ResultModel):
    """Data of an experiment or arm."""

    name: str
    train: Count
    validation: Count = 0
    test: Count
    classes: Items[str] = ()
    image_shape: Items[Count] | None = None
    inputs: Items[str] = ()  # shape and type of each input of a sample
    notes: Items[str] = ()
    table: TableSummary | None = Field(default=None, alias="schema")


class ArmSummary(ResultModel):
    """An arm of an experiment; a fit has one arm, its model."""

    name: str
    label: str
    role: Literal["sweep", "model"] = "sweep"
    num_members: Count
    batches: str = "shared"
    network: str = ""
    parameters: Count | None = None
    diversities: Items[Number]
    axes: dict[Annotated[str, Field(pattern=f"^({'|'.join(AXES)})$")], Items[Number]] = {}  # with their values
    cell: dict[str, str] = {}  # values on the axes of the experiment's grid
    # set by the report, which makes an arm for each combination of values
    variant_of: str = ""
    settings: dict[str, Number] = {}
    baseline: bool = False
    data: DataSummary | None = None  # None: the experiment's


class PaperRow(ResultModel):
    """A row of the paper's table; `arms` are the arms to compare, None for all with its K and λ."""

    model_config = ConfigDict(extra="forbid")

    label: str | None = None
    num_members: Annotated[int, Field(ge=1, lt=2**31)]
    diversity: Diversity | None = None  # None: not stated
    arms: list[str] | None = None
    accuracy: Diversity | None = None
    error: Annotated[float, Field(ge=0, le=100, allow_inf_nan=False)] | None = None  # in percent
    cross_entropy: Annotated[Number, Field(ge=0)] | None = None
    member_accuracy: Diversity | None = None
    member_cross_entropy: Annotated[Number, Field(ge=0)] | None = None

    @property
    def values(self) -> dict[str, float]:
        """Metrics of the row as fractions; accuracy is derived from an error."""
        keys = ("accuracy", "cross_entropy", "member_accuracy", "member_cross_entropy")
        found = {key: value for key in keys if (value := getattr(self, key)) is not None}
        if self.error is not None:
            found |= {"error": self.error / 100, "accuracy": 1 - self.error / 100}
        return found

    def matches(self, arm: ArmSummary, diversity: float) -> bool:
        """Whether this row is for an arm at one λ."""
        if self.arms is not None and arm.name not in self.arms:
            return False
        same_diversity = self.diversity is None or abs(self.diversity - diversity) < 1e-9
        return self.num_members == arm.num_members and same_diversity


class PaperTable(ResultModel):
    """A table of the paper."""

    model_config = ConfigDict(extra="forbid")

    table: str
    note: str = ""
    rows: list[PaperRow] = []


class Candidate(ResultModel):
    """A candidate λ and its scores by seed; None for a failed training."""

    diversity: Number
    scores: Annotated[dict[Annotated[int, Field(ge=0, strict=False)], Number | None], Field(strict=False)]


class Gain(ResultModel):
    """Paired reduction of the loss by the chosen λ, relative to λ=0, on fresh seeds.

    The 95 % interval covers new seeds, and new samples if `samples` is given; it is corrected for `choices` λ.
    """

    split: str = "test"
    mean: Number
    low: Number | None = None
    high: Number | None = None
    seeds: Items[Count] = ()  # with both trainings finished
    beyond_noise: bool
    samples: Count | None = None
    choices: Count = 1


class DiversitySearch(ResultModel):
    """A search for λ: candidates by round, scored by `metric` on `split`, and the gain of the best over λ=0."""

    chosen: Number  # the best, if its gain is significant, else 0
    best: Number | None = None  # lowest score; None in files of earlier versions
    task: TaskName = "classification"
    metric: Literal["cross_entropy", "mse"]
    split: SplitName = "validation"
    rounds: Items[Items[Number]] = ()
    candidates: Items[Candidate]
    seeds: Items[Count] = ()
    fresh_seeds: Items[Count] = ()  # of the gain
    gain: Gain | None = None
    train_score: Number | None = None  # of the training samples at λ=0, mean over seeds, before the temperature
    validation_score: Number | None = None  # the same of the validation samples
    sentence: str = ""

    @property
    def scores(self) -> dict[float, dict[int, float]]:
        """Scores by λ, ascending, and seed, without failed trainings."""
        found = {
            candidate.diversity: {seed: score for seed, score in candidate.scores.items() if score is not None}
            for candidate in sorted(self.candidates, key=lambda candidate: candidate.diversity)
        }
        return {diversity: scores for diversity, scores in found.items() if scores}


class ExperimentResult(ResultFile):
    """A sweep or a fit: `experiment.json`."""

    name: str
    title: str = ""
    description: str = ""
    task: TaskName = "classification"
    data: DataSummary
    arms: Items[ArmSummary]
    seeds: Items[Count]
    search: DiversitySearch | None = None
    comparison: ModelComparison | None = None
    paper: PaperTable | None = None
    hardware: dict[str, Any] = {}
    versions: dict[str, Any] = {}
    config: dict[str, Any] = {}
    started: str = ""
    seconds: Number | None = None
