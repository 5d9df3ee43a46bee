"""Experiments as TOML: checked, with one sentence for what is wrong."""

from __future__ import annotations

import copy
import difflib
import re
import tomllib
from collections import Counter
from collections.abc import Mapping, Sequence
from importlib import resources
from pathlib import Path
from typing import Annotated, Any, Literal, Self, TypeVar

from pydantic import AfterValidator, BaseModel, ConfigDict, Field, ValidationError, model_validator

from torchace._files import TOML_BYTES, check_depth, read_bounded
from torchace.lab.data import NAMES
from torchace.lab.schema.errors import describe_error


class ConfigError(ValueError):
    """A configuration that cannot be used: one sentence that says where, why and what to do."""


class _Section(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True, strict=True)


Section = TypeVar("Section", bound=_Section)
T = TypeVar("T")

Fraction = Annotated[float, Field(ge=0, le=1, allow_inf_nan=False)]
Positive = Annotated[float, Field(gt=0, allow_inf_nan=False)]
NonNegative = Annotated[float, Field(ge=0, allow_inf_nan=False)]
Count = Annotated[int, Field(ge=1, lt=2**31)]
Width = Annotated[int, Field(ge=1, le=100_000)]
Seed = Annotated[int, Field(ge=0, lt=2**31)]
Name = Annotated[str, Field(pattern=r"^[a-z0-9_]+$", max_length=40)]


def _distinct(values: list[Any]) -> list[Any]:
    if (twice := _repeated(values)) is not None:
        raise ValueError(f"expected every value once, but got {twice:g} twice.")
    return values


def _repeated(values: Sequence[T]) -> T | None:
    """The first value that is there more than once."""
    return next((value for value, times in Counter(values).items() if times > 1), None)


Diversities = Annotated[list[Fraction], Field(min_length=1), AfterValidator(_distinct)]


class DataSection(_Section):
    """What is trained on."""

    name: Literal[NAMES] = "digits"  # type: ignore[valid-type]
    limit: Count | None = None  # the first so many training samples
    validation: Annotated[float, Field(ge=0, lt=1, allow_inf_nan=False)] = 0.0  # share of the training samples held out
    normalize: Literal["unit", "standard"] = "unit"
    augment: bool = False  # pad by 4, crop at random, mirror


class ModelSection(_Section):
    """What is trained."""

    kind: Literal["separate", "smoc", "branch"] = "separate"
    network: Literal["mlp", "resnet"] = "mlp"
    hidden: Annotated[list[Width], Field(max_length=100)] = [64]  # the MLP's hidden layers
    dropout: Annotated[float, Field(ge=0, lt=1, allow_inf_nan=False)] = 0.0  # the MLP's
    depth: Annotated[int, Field(ge=8, le=2000)] = 20  # the ResNet's
    width: Annotated[int, Field(ge=1, le=4096)] = 16  # the ResNet's first stage
    num_members: Annotated[int, Field(ge=1, le=10_000)] = 5
    rank: Count | None = None  # SMOC: members differ by a matrix of this rank
    at: str = "stage3"  # branch: where the members part
    head_scale: Positive = 1.0  # what the heads' initial weights are multiplied by

    @model_validator(mode="after")
    def _fits(self) -> Self:
        if self.network == "resnet" and self.depth % 6 != 2:
            raise ValueError(f"a CIFAR ResNet's depth is 6n + 2 (20, 32, 44, 56, 110), but got {self.depth}.")
        if self.kind == "branch" and self.network == "mlp" and self.at == "stage3":
            raise ValueError("a branched MLP needs `at`, the layer where the members part, such as 'linear2'.")
        if self.network == "resnet" and self.dropout:
            raise ValueError("a CIFAR ResNet has no dropout: leave `dropout` out, or use network = 'mlp'.")
        if self.rank is not None and self.kind != "smoc":
            raise ValueError(f"`rank` is for kind = 'smoc', but got kind = {self.kind!r}.")
        if self.head_scale != 1 and self.kind == "branch":
            raise ValueError("`head_scale` is for kind = 'separate' and kind = 'smoc', but got kind = 'branch'.")
        return self


class TrainSection(_Section):
    """How it is trained."""

    epochs: Count | None = None
    steps: Count | None = None
    batch_size: Count = 128
    batches: Literal["shared", "separate", "exchanged"] = "shared"
    optimizer: Literal["sgd", "adam", "adamw"] = "adam"
    learning_rate: Positive = 1e-3
    momentum: Annotated[float, Field(ge=0, lt=1, allow_inf_nan=False)] = 0.9
    nesterov: bool = False
    weight_decay: NonNegative = 0.0
    schedule: Literal["constant", "step", "cosine"] = "constant"
    milestones: list[Count] = []
    decay: Positive = 0.1
    warmup_steps: Annotated[int, Field(ge=0, lt=2**31)] = 0
    warmup_learning_rate: Positive | None = None
    diversity_warmup_epochs: NonNegative = 0.0
    label_smoothing: Annotated[float, Field(ge=0, lt=1, allow_inf_nan=False)] = 0.0
    detach_others: bool = True
    precision: Literal["float32", "float64", "bf16"] = "float32"
    compile: Literal[True, False, "auto"] = "auto"  # "auto": on a GPU, where the steps repay it

    @model_validator(mode="after")
    def _fits(self) -> Self:
        if self.epochs is not None and self.steps is not None:
            raise ValueError("give `epochs` or `steps`, not both.")
        if self.schedule == "step" and not self.milestones:
            raise ValueError("schedule = 'step' needs `milestones`, the steps at which the learning rate falls.")
        if self.schedule != "step" and self.milestones:
            raise ValueError(f"`milestones` are for schedule = 'step', but got schedule = {self.schedule!r}.")
        if any(later <= earlier for earlier, later in zip(self.milestones, self.milestones[1:], strict=False)):
            raise ValueError(f"`milestones` must rise, but got {self.milestones}.")
        if self.warmup_learning_rate is not None and not self.warmup_steps:
            raise ValueError("`warmup_learning_rate` needs `warmup_steps`, the steps it is for.")
        if self.nesterov and (self.optimizer != "sgd" or not self.momentum):
            raise ValueError("nesterov = true needs optimizer = 'sgd' and a momentum above 0.")
        if self.batches == "exchanged" and not self.detach_others:
            raise ValueError(
                "with batches = 'exchanged' the others' predictions have no gradient: set detach_others = true."
            )
        return self


class SweepSection(_Section):
    """Which runs there are."""

    diversities: Diversities = [0.0, 0.1, 0.3, 0.5, 0.7]
    seeds: Annotated[list[Seed], Field(min_length=1), AfterValidator(_distinct)] = [0, 1, 2, 3, 4]
    cohort_size: Count | None = None  # runs trained as one network at most; None: by network and device


class CheckpointSection(_Section):
    """How often the state is saved."""

    steps: Count | None = None
    seconds: Positive | None = 60.0


class ArmSection(_Section):
    """One series of runs: what differs from the experiment."""

    name: Name
    label: str = ""
    baseline: bool = False  # its λ=0 is what other arms are compared with
    model: dict[str, Any] = {}
    train: dict[str, Any] = {}
    data: dict[str, Any] = {}
    diversities: Diversities | None = None


class Arm(_Section):
    """A series of runs, complete."""

    name: str
    label: str
    baseline: bool
    data: DataSection
    model: ModelSection
    train: TrainSection
    diversities: list[Fraction]

    @model_validator(mode="after")
    def _coupled(self) -> Self:
        if self.train.batches == "separate" and any(self.diversities):
            raise ValueError(
                "λ > 0 needs members that see each other's predictions: with batches = 'separate' set "
                "diversities = [0.0], or use batches = 'exchanged'."
            )
        if self.train.epochs is None and self.train.steps is None:
            raise ValueError("give `epochs` or `steps` under [train].")
        return self


class PaperRow(_Section):
    """A row of the paper's table, beside which ours stands."""

    label: str | None = None
    num_members: Count
    diversity: Fraction | None = None  # None where the paper states none
    arms: list[str] | None = None  # the arms it stands beside; None: all with its K and λ
    accuracy: Fraction | None = None
    error: Annotated[float, Field(ge=0, le=100, allow_inf_nan=False)] | None = None  # in percent
    cross_entropy: NonNegative | None = None
    member_accuracy: Fraction | None = None
    member_cross_entropy: NonNegative | None = None


class PaperSection(_Section):
    """A table of the paper."""

    table: str
    note: str = ""
    rows: list[PaperRow] = []


class Experiment(_Section):
    """An experiment: what its runs have in common, and its arms."""

    name: Name
    title: str = ""
    description: str = ""
    data: DataSection = DataSection()
    model: ModelSection = ModelSection()
    train: TrainSection = TrainSection()
    sweep: SweepSection = SweepSection()
    checkpoint: CheckpointSection = CheckpointSection()
    arms: list[ArmSection] = []
    paper: PaperSection | None = None

    @model_validator(mode="after")
    def _complete(self) -> Self:
        if (twice := _repeated([arm.name for arm in self.arms])) is not None:
            raise ValueError(f"expected every arm to have a name of its own, but got {twice!r} twice.")
        self.complete_arms()
        return self

    def complete_arms(self) -> list[Arm]:
        """The arms with everything the experiment says in common filled in; one, named `main`, where none is given."""
        if not self.arms:
            return [self._completed(ArmSection(name="main", label=f"{self.train.batches} batches"), ())]
        return [self._completed(arm, ("arms", i)) for i, arm in enumerate(self.arms)]

    def _completed(self, arm: ArmSection, place: tuple[int | str, ...]) -> Arm:
        content = {
            "name": arm.name,
            "label": arm.label or arm.name.replace("_", " "),
            "baseline": arm.baseline,
            "data": _checked(DataSection, {**self.data.model_dump(), **arm.data}, (*place, "data")),
            "model": _checked(ModelSection, {**self.model.model_dump(), **arm.model}, (*place, "model")),
            "train": _checked(TrainSection, _merged_train(self.train.model_dump(), arm.train), (*place, "train")),
            "diversities": self.sweep.diversities if arm.diversities is None else arm.diversities,
        }
        return _checked(Arm, content, place)


def _checked(model: type[Section], content: dict[str, Any], place: tuple[int | str, ...]) -> Section:
    """A section of an arm; what is wrong with it is said with its place in the file."""
    try:
        return model(**content)
    except ValidationError as error:
        raise ValueError(describe_error(error, model, place)) from error


def _merged_train(common: dict[str, Any], own: Mapping[str, Any]) -> dict[str, Any]:
    merged = {**common, **own}
    if "epochs" in own and "steps" not in own:  # an arm's own length takes the place of the common one
        merged["steps"] = None
    if "steps" in own and "epochs" not in own:
        merged["epochs"] = None
    return merged


def builtin_names() -> list[str]:
    """The experiments that come with the library."""
    folder = resources.files("torchace.lab.experiments")
    return sorted(item.name.removesuffix(".toml") for item in folder.iterdir() if item.name.endswith(".toml"))


def load_experiment(
    source: str = "digits", overrides: Sequence[str] = (), *, seeds: Sequence[int] | None = None
) -> Experiment:
    """An experiment by the name of a built-in one or the path of a TOML file.

    Args:
        source: A name or a path.
        overrides: `section.key=value` each, the value in TOML (`train.epochs=5`, `sweep.diversities=[0, 0.5]`).
        seeds: In the place of those in the file.
    """
    name, text = _text_of(source)
    try:
        content = _parse_toml(text)
    except ValueError as error:  # a number of thousands of digits, lists in lists in lists
        raise ConfigError(f"{source} is not valid TOML: {str(error).rstrip('.')}.") from error
    content.setdefault("name", name)
    for override in overrides:
        _override(content, override)
    if seeds is not None:
        sweep = content.setdefault("sweep", {})
        if isinstance(sweep, dict):  # else an error in a moment
            sweep["seeds"] = list(seeds)
    return parse_experiment(content, source)


def parse_experiment(content: Mapping[str, Any], where: str = "The configuration") -> Experiment:
    """An experiment from plain data."""
    try:
        check_depth(content)
    except ValueError as error:
        raise ConfigError(f"{where}: sections are {error}.") from error
    try:
        return Experiment.model_validate(copy.deepcopy(dict(content)))
    except ValidationError as error:
        raise ConfigError(f"{where}: {describe_error(error, Experiment)}") from error


def _text_of(source: str) -> tuple[str, str]:
    """The name of an experiment and its TOML."""
    if source in builtin_names():
        return source, (resources.files("torchace.lab.experiments") / f"{source}.toml").read_text("utf-8")
    path = Path(source)
    if path.suffix != ".toml" and not path.exists():
        close = difflib.get_close_matches(source, builtin_names(), n=1)
        hint = f" Did you mean {close[0]!r}?" if close else ""
        raise ConfigError(
            f"Expected an experiment out of {', '.join(builtin_names())} or the path of a TOML file, "
            f"but got {source!r}.{hint}"
        )
    try:
        text = read_bounded(path, TOML_BYTES).decode("utf-8-sig")
    except (OSError, UnicodeDecodeError) as error:
        reason = "it is not UTF-8 text" if isinstance(error, UnicodeDecodeError) else error.strerror
        raise ConfigError(f"Cannot read the experiment {path}: {reason}.") from error
    return re.sub(r"[^a-z0-9_]+", "_", path.stem.lower())[:40] or "experiment", text


def _parse_toml(text: str) -> dict[str, Any]:
    # tomllib's time grows with the square of the points in a key, and keys stand on one line
    if sum(line.count(".") ** 2 for line in text.splitlines()) > 10**7:
        raise ValueError("keys of too many parts")
    try:
        return tomllib.loads(text)
    except RecursionError:
        raise ValueError("lists within lists that are too deep") from None


def _override(content: dict[str, Any], override: str) -> None:
    key, equals, value = override.partition("=")
    parts = [part.strip() for part in key.split(".")]
    if not equals or not all(parts):
        raise ConfigError(f"Expected --set section.key=value, but got {override!r}.")
    try:
        parsed = _parse_toml(f"value = {value}")
    except ValueError:
        parsed = {"value": value.strip()}  # a bare word: --set model.kind=smoc
    if len(parsed) != 1:
        raise ConfigError(f"Expected one value in --set section.key=value, but got {override!r}.")
    section = content
    for part in parts[:-1]:
        section = section.setdefault(part, {})
        if not isinstance(section, dict):
            raise ConfigError(f"Expected --set section.key=value, but {part!r} in {override!r} is not a section.")
    section[parts[-1]] = parsed["value"]
    if parts in (["train", "epochs"], ["train", "steps"]):  # one length takes the place of the other
        section.pop("steps" if parts[1] == "epochs" else "epochs", None)
