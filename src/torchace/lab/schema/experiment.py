"""Pydantic models of an experiment's TOML file."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Mapping, Sequence
from itertools import product
from typing import Annotated, Any, Literal, Self, TypeVar

from pydantic import AfterValidator, BaseModel, ConfigDict, Discriminator, Field, Tag, ValidationError, model_validator

from torchace.lab.schema.hyperparameters import (
    Batches,
    Count,
    Fraction,
    NonNegative,
    NumMembers,
    ObjectName,
    Positive,
    Seed,
    Share,
    Width,
)
from torchace.lab.schema.reading import DATA_NAME, GIVEN, OPTIMIZER_NAME, describe_error
from torchace.lab.schema.results import PaperTable, RunKey
from torchace.lab.schema.values import AXES, TaskName

BRANCH_AT = "stage3"  # of a ResNet
OPTIMIZERS = ("sgd", "adam", "adamw")


class Section(BaseModel):
    """A section of the TOML file; unknown keys are refused."""

    model_config = ConfigDict(extra="forbid", frozen=True, strict=True)


Name = Annotated[str, Field(pattern=r"^[a-z0-9_]+$", max_length=40)]
GridValues = Annotated[list[Any], Field(min_length=1)]


def _check_distinct(values: list[Any]) -> list[Any]:
    value, count = Counter(values).most_common(1)[0]
    if count > 1:
        raise ValueError(f"expected every value once, but got {value:g} twice.")
    return values


Distinct = (Field(min_length=1), AfterValidator(_check_distinct))
Diversities = Annotated[list[Fraction], *Distinct]
T = TypeVar("T")
# one number, or a list of numbers: an axis of the grid of runs
Axis = Annotated[
    Annotated[T, Tag("one")] | Annotated[list[T], *Distinct, Tag("many")],
    Discriminator(lambda value: "many" if isinstance(value, list) else "one"),
]


class DataSection(Section):
    """The data: a built-in set, a function that returns (train, test), a file, or objects given from Python."""

    name: Annotated[str, Field(pattern=DATA_NAME)] = "digits"
    factory: ObjectName | None = None
    arguments: dict[str, Any] = {}  # of the factory
    file: str | None = None  # .npz, .csv or .parquet
    target: str | list[str] | None = None  # column of a table, array of an .npz file, or key of a Dataset's items
    test: Annotated[Fraction, Field(gt=0, lt=1)] = 0.2  # fraction of a file's samples
    test_file: str | None = None
    validation_file: str | None = None
    task: TaskName = "classification"
    num_classes: Annotated[int, Field(ge=2, lt=2**31)] | None = None  # None: the largest label + 1
    limit: Count | None = None  # number of training samples to use
    validation: Share = 0.0  # fraction of the training samples
    normalize: Literal["unit", "standard"] = "unit"  # built-in image sets
    augment: bool = False  # pad by 4, random crop, random flip
    stream: Literal[True, False, "auto"] = "auto"  # read a Dataset while training; "auto": if random or too large
    num_workers: Annotated[int, Field(ge=0, le=1024)] = 0  # processes that read a Dataset
    transform: ObjectName | None = None  # function of a batch of inputs, called on the device

    @model_validator(mode="after")
    def _check(self) -> Self:
        given = [key for key in ("factory", "file") if getattr(self, key) is not None]
        sources = ["name", *given] if self.name != "digits" else given
        if len(sources) > 1:
            raise ValueError(f"expected one source of data, but got {' and '.join(f'`{key}`' for key in sources)}.")
        for key, needed in (("arguments", "factory"), ("test_file", "file"), ("validation_file", "file")):
            if getattr(self, key) and getattr(self, needed) is None:
                raise ValueError(f"`{key}` needs `{needed}`, the source of the data.")
        if self.target is not None and not sources:
            raise ValueError("`target` needs `file` or `factory`, the source of the data.")
        if self.task != "classification" and not (set(sources) - {"name"} or self.name == GIVEN):
            raise ValueError(f"task = {self.task!r} needs own data; {self.name} is for classification.")
        return self


class ModelSection(Section):
    """The ensemble: a built-in network, or a function that returns one member."""

    kind: Literal["separate", "smoc", "branch", "adapters"] = "separate"
    factory: ObjectName | None = None  # replaces `network` and its settings
    arguments: dict[str, Any] = {}  # of the factory
    network: Literal["mlp", "resnet"] = "mlp"
    hidden: Annotated[list[Width], Field(max_length=100)] = [64]  # MLP
    dropout: Share = 0.0  # MLP
    depth: Annotated[int, Field(ge=8, le=2000)] = 20  # ResNet
    width: Annotated[int, Field(ge=1, le=4096)] = 16  # ResNet: channels of the first stage
    num_members: NumMembers = 5
    rank: Count | None = None  # SMOC: rank of the difference between members; low-rank adapters: their rank
    at: str = BRANCH_AT  # branch: first layer that is separate for each member
    adapter: Literal["multiplicative", "low_rank"] | None = None  # None: low rank if `rank` is given
    layers: list[str] | str | None = None  # adapters: names of the layers, or "first"
    freeze: bool = False  # adapters: train adapters and heads alone
    head: str | None = None  # SMOC, adapters: name of the layer that each member has alone; None: the last linear one
    head_scale: Positive = 1.0  # factor of the initial head weights

    @property
    def adapter_kind(self) -> str:
        """The adapter, also where none is named."""
        return self.adapter or ("multiplicative" if self.rank is None else "low_rank")

    @model_validator(mode="after")
    def _check(self) -> Self:
        if self.factory is None:
            if self.network == "resnet" and self.depth % 6 != 2:
                raise ValueError(f"expected a ResNet depth of 6n + 2 (20, 32, 44, 56, 110), but got {self.depth}.")
            if self.kind == "branch" and self.network == "mlp" and self.at == BRANCH_AT:
                raise ValueError("a branched MLP needs `at`, the first separate layer, such as 'linear2'.")
            if self.network == "resnet" and self.dropout:
                raise ValueError("a CIFAR ResNet has no dropout: remove `dropout`, or use network = 'mlp'.")
        if self.arguments and self.factory is None:
            raise ValueError("`arguments` need `factory`, the function that returns a member.")
        if self.rank is not None and self.kind not in ("smoc", "adapters"):
            raise ValueError(f"`rank` needs kind = 'smoc' or kind = 'adapters', but got kind = {self.kind!r}.")
        if self.rank is not None and self.kind == "adapters" and self.adapter == "multiplicative":
            raise ValueError(f"`rank` needs adapter = 'low_rank', but got adapter = {self.adapter!r}.")
        if (self.layers is not None or self.freeze) and self.kind != "adapters":
            raise ValueError(f"`layers` and `freeze` need kind = 'adapters', but got kind = {self.kind!r}.")
        if self.kind == "adapters" and self.factory is None:
            raise ValueError("kind = 'adapters' needs `factory`, a function that returns the network to adapt.")
        if self.head_scale != 1 and self.factory is not None:
            raise ValueError("`head_scale` needs a built-in network, but got a `factory`.")
        if self.head_scale != 1 and self.kind == "branch":
            raise ValueError("`head_scale` needs kind = 'separate' or kind = 'smoc', but got kind = 'branch'.")
        return self


class TrainSection(Section):
    """Training of each run."""

    epochs: Count | None = None
    steps: Count | None = None
    batch_size: Count = 128
    batches: Batches = "shared"
    optimizer: Annotated[str, Field(pattern=OPTIMIZER_NAME)] = "adam"
    optimizer_arguments: dict[str, Any] = {}
    learning_rate: Axis[Positive] = 1e-3
    momentum: Share = 0.9
    nesterov: bool = False
    weight_decay: Axis[NonNegative] = 0.0
    schedule: Literal["constant", "step", "cosine"] = "constant"
    milestones: list[Count] = []
    decay: Positive = 0.1
    warmup_steps: Seed = 0
    warmup_learning_rate: Positive | None = None
    diversity_warmup_epochs: NonNegative = 0.0
    label_smoothing: Axis[Share] = 0.0
    patience: Count | None = None  # epochs without improvement on validation data; None: no early stopping
    metrics: list[ObjectName] = []  # functions of logits (K, N, C) and target
    detach_others: bool = True
    precision: Literal["float32", "float64", "bf16"] = "float32"
    compile: Literal[True, False, "auto"] = "auto"  # "auto": for long trainings on a GPU

    @model_validator(mode="after")
    def _check(self) -> Self:
        if "lr" in self.optimizer_arguments:
            raise ValueError("`optimizer_arguments` has `lr`; give it as `learning_rate`.")
        if "weight_decay" in self.optimizer_arguments and self.weight_decay:
            raise ValueError("`optimizer_arguments` has `weight_decay` too; give it once.")
        if self.epochs is not None and self.steps is not None:
            raise ValueError("expected `epochs` or `steps`, but got both.")
        if self.schedule == "step" and not self.milestones:
            raise ValueError("schedule = 'step' needs `milestones`, the steps at which the learning rate decays.")
        if self.schedule != "step" and self.milestones:
            raise ValueError(f"`milestones` need schedule = 'step', but got schedule = {self.schedule!r}.")
        if sorted(set(self.milestones)) != self.milestones:
            raise ValueError(f"expected ascending `milestones`, but got {self.milestones}.")
        if self.warmup_learning_rate is not None and not self.warmup_steps:
            raise ValueError("`warmup_learning_rate` needs `warmup_steps`.")
        if self.nesterov and (self.optimizer != "sgd" or not self.momentum):
            raise ValueError("nesterov = true needs optimizer = 'sgd' and a momentum above 0.")
        if self.batches == "exchanged" and not self.detach_others:
            raise ValueError("batches = 'exchanged' needs detach_others = true: the others' predictions are constants.")
        return self


class SweepSection(Section):
    """The grid of runs."""

    diversities: Diversities = [0.0, 0.1, 0.3, 0.5, 0.7]
    seeds: Annotated[list[Seed], *Distinct] = [0, 1, 2, 3, 4]
    group_size: Count | None = None  # maximum size of a run group
    keep_weights: Literal[True, False, "auto"] = "auto"  # "auto": where all runs together take at most 256 MiB


class CheckpointSection(Section):
    """Interval between checkpoints."""

    steps: Count | None = None
    seconds: Positive | None = 60.0


class ArmSection(Section):
    """Settings of an arm that differ from the experiment's."""

    name: Name
    label: str = ""
    baseline: bool = False  # reference for the other arms
    model: dict[str, Any] = {}
    train: dict[str, Any] = {}
    data: dict[str, Any] = {}
    diversities: Diversities | None = None


class GridSection(Section):
    """Lists of values by section and key; every combination is an arm of its own."""

    data: dict[str, GridValues] = {}
    model: dict[str, GridValues] = {}
    train: dict[str, GridValues] = {}

    def expand(self, arm: ArmSection) -> list[tuple[ArmSection, dict[str, str]]]:
        """Return an arm for each combination of values, with the values as text."""
        keys = [(section, key) for section, lists in self for key in lists]
        if not keys:
            return [(arm, {})]
        found = []
        for values in product(*(getattr(self, section)[key] for section, key in keys)):
            own = {section: dict(getattr(arm, section)) for section in ("data", "model", "train")}
            for (section, key), value in zip(keys, values, strict=True):
                own[section][key] = value
            texts = [
                (" × ".join(map(str, value)) or "none") if isinstance(value, list) else str(value) for value in values
            ]
            cell = {key.replace("_", " "): text for (_, key), text in zip(keys, texts, strict=True)}
            parts = [*(() if arm.name == "main" else (arm.label or arm.name,)), *map(" ".join, cell.items())]
            name = re.sub(r"[^a-z0-9]+", "_", " ".join(parts).lower()).strip("_")
            found.append((arm.model_copy(update={"name": name, "label": ", ".join(parts), **own}), cell))
        return found


class Arm(Section):
    """An arm with all settings."""

    name: str
    label: str
    baseline: bool
    data: DataSection
    model: ModelSection
    train: TrainSection
    diversities: list[Fraction]
    cell: dict[str, str] = {}  # values on the axes of the grid

    @property
    def axes(self) -> dict[str, list[float]]:
        """Settings with a list of values, beside λ."""
        return {name: value for name in AXES if isinstance(value := getattr(self.train, name), list)}

    def runs(self, seeds: Sequence[int]) -> list[RunKey]:
        """Return the runs of this arm; those with equal settings are neighbors."""
        settings = [dict(zip(self.axes, values, strict=True)) for values in product(*self.axes.values())]
        return [
            RunKey(self.name, diversity, seed, **own)
            for own in settings
            for diversity in self.diversities
            for seed in seeds
        ]

    @model_validator(mode="after")
    def _check(self) -> Self:
        if self.train.batches == "separate" and any(self.diversities):
            raise ValueError(
                "λ > 0 needs members that see each other's predictions: with batches = 'separate' set "
                "diversities = [0.0], or use batches = 'exchanged'."
            )
        if self.train.epochs is None and self.train.steps is None:
            raise ValueError("expected `epochs` or `steps`, but got neither.")
        if self.data.task == "regression" and self.train.label_smoothing != 0:
            raise ValueError("`label_smoothing` needs classes: remove it for task = 'regression'.")
        if self.data.task != "classification" and not self.train.detach_others:
            raise ValueError(f"detach_others = false needs task = 'classification', but got {self.data.task!r}.")
        return self


class Experiment(Section):
    """An experiment: common settings and arms."""

    name: Name
    title: str = ""
    description: str = ""
    data: DataSection = DataSection()
    model: ModelSection = ModelSection()
    train: TrainSection = TrainSection()
    sweep: SweepSection = SweepSection()
    checkpoint: CheckpointSection = CheckpointSection()
    arms: list[ArmSection] = []
    grid: GridSection = GridSection()
    paper: PaperTable | None = None

    @model_validator(mode="after")
    def _check(self) -> Self:
        counts = Counter(arm.name for arm in self.complete_arms()).most_common(1)
        if counts[0][1] > 1:
            raise ValueError(f"expected distinct names of arms, but got {counts[0][0]!r} twice.")
        return self

    def complete_arms(self) -> list[Arm]:
        """Return the arms with all settings; a single arm `main` if none is given."""
        arms = self.arms or [ArmSection(name="main", label=f"{self.train.batches} batches")]
        return [
            self._complete(variant, ("arms", i) if self.arms else (), cell)
            for i, arm in enumerate(arms)
            for variant, cell in self.grid.expand(arm)
        ]

    def _complete(self, arm: ArmSection, place: tuple[int | str, ...], cell: dict[str, str]) -> Arm:
        train = self.train.model_dump()
        if "epochs" in arm.train or "steps" in arm.train:  # replaces the common length
            train |= {"epochs": None, "steps": None}
        content = {
            "name": arm.name,
            "label": arm.label or arm.name.replace("_", " "),
            "baseline": arm.baseline,
            "data": _merge(self.data, arm.data, _SOURCES),
            "model": _merge(self.model, arm.model, _NETWORKS),
            "train": {**train, **arm.train},
            "diversities": self.sweep.diversities if arm.diversities is None else arm.diversities,
            "cell": cell,
        }
        try:
            return Arm.model_validate(content)
        except ValidationError as error:
            raise ValueError(describe_error(error, Arm, place)) from error


# keys of an arm that replace all of the common section's keys for the same purpose
_SOURCES = (
    {"name", "factory", "file"},
    {"name", "factory", "arguments", "file", "target", "test_file", "validation_file"},
)
_NETWORKS = ({"network", "factory"}, {"factory", "arguments"})


def _merge(section: Section, arm: Mapping[str, Any], keys: tuple[set[str], set[str]]) -> dict[str, Any]:
    """Return a section's settings, replaced by those of an arm."""
    source, replaced = keys
    return {**section.model_dump(exclude=replaced if source & set(arm) else set()), **arm}
