"""Hyperparameters shared by TOML files, estimators and the command line."""

from __future__ import annotations

import fractions
import re
from collections.abc import Callable, Iterator, Mapping
from typing import Annotated, Any, Literal, Self

from pydantic import BaseModel, ConfigDict, Field, ValidationError, field_validator, model_validator

from torchace.lab.schema.reading import OBJECT_NAME, capitalize, describe_error

Fraction = Annotated[float, Field(ge=0, le=1, allow_inf_nan=False)]
Share = Annotated[float, Field(ge=0, lt=1, allow_inf_nan=False)]
Positive = Annotated[float, Field(gt=0, allow_inf_nan=False)]
NonNegative = Annotated[float, Field(ge=0, allow_inf_nan=False)]
Count = Annotated[int, Field(ge=1, lt=2**31)]
Seed = Annotated[int, Field(ge=0, lt=2**31)]
Width = Annotated[int, Field(ge=1, le=100_000)]
NumMembers = Annotated[int, Field(ge=1, le=10_000)]
Batches = Literal["shared", "separate", "exchanged"]


ObjectName = Annotated[str, Field(pattern=OBJECT_NAME)]  # "package.module:function"


class Hyperparameters(BaseModel):
    """Hyperparameters of estimators and `torchace fit`."""

    model_config = ConfigDict(extra="forbid", frozen=True, strict=True)

    # descriptions are those of the command line
    num_members: NumMembers = Field(default=10, description="Number of members.")
    members: Literal["separate", "shared", "shared_mini"] = Field(
        default="separate", description="Weights of the members; shared: one network with an adapter for each member."
    )
    hidden: Annotated[tuple[Width, ...], Field(max_length=100, strict=False)] = Field(
        default=(64,), description="Widths of the hidden layers, such as 64 or 64,32."
    )
    encoding: Literal["auto", "standard", "robust", "piecewise"] = Field(
        default="auto", description="Encoding of numbers; piecewise adds bins between quantiles."
    )
    diversity: float | str = Field(default="auto", description="λ in [0, 1], or auto: choose it on validation rows.")
    epochs: Count = Field(default=100, description="Maximum number of epochs.")
    batch_size: Count = Field(default=128, description="Rows in a batch.")
    learning_rate: Positive = Field(default=3e-3, description="Learning rate of AdamW.")
    weight_decay: NonNegative = Field(default=1e-2, description="Weight decay of AdamW.")
    schedule: Literal["constant", "cosine"] | None = Field(
        default=None, description="By default constant with early stopping, else cosine."
    )
    batches: Batches = Field(
        default="shared", description="Separate and exchanged: each member its own, without or with coupling."
    )
    validation_fraction: Annotated[float, Field(gt=0, lt=1)] = Field(
        default=0.2, description="Share of rows for choosing λ and early stopping."
    )
    patience: Count | None = Field(default=10, description="Epochs without improvement before training stops.")
    precision: Literal["float32", "float64"] = Field(default="float64", description="float32 is faster on a GPU.")
    device: str = Field(default="auto", description="cpu, cuda, cuda:N, or auto: cuda if available.")

    @field_validator("hidden", mode="before")
    @classmethod
    def _check_hidden(cls, value: Any) -> Any:
        if not isinstance(value, list | tuple):
            raise ValueError(f"expected a whole number or a list of them, but got {value!r}.")
        return value

    @field_validator("diversity", mode="plain")
    @classmethod
    def _check_diversity(cls, value: Any) -> float | str:
        if value == "auto":
            return "auto"
        if isinstance(value, bool) or not isinstance(value, int | float) or not 0 <= value <= 1:
            raise ValueError(f"expected a number in [0, 1] or 'auto', but got {value!r}.")
        return value + 0.0  # no -0.0

    @model_validator(mode="after")
    def _check_batches(self) -> Self:
        if self.batches == "separate" and self.diversity not in (0, "auto"):
            raise ValueError(
                "λ > 0 needs members that see each other's predictions: with batches='separate' set diversity=0, or "
                "use batches='exchanged'."
            )
        if self.members != "separate" and self.batches != "shared":
            raise ValueError("members that share weights see the same samples: set batches='shared'.")
        return self


def check_hyperparameters(name: Callable[[str], str], **values: Any) -> Hyperparameters:
    """Return validated hyperparameters; `name` formats their names in errors."""
    try:
        return Hyperparameters(**values)
    except ValidationError as error:

        def format_key(key: str) -> str:  # such as `hidden.0`
            return name(re.sub(r"\.(\d+)", r"[\1]", key))

        raise ValueError(capitalize(describe_error(error, Hyperparameters, name=format_key))) from None


def to_python(value: Any) -> Any:
    """Convert tuples, arrays and numbers of NumPy and torch to lists and numbers of Python; devices to their names."""
    if isinstance(value, Mapping):
        return {key: to_python(item) for key, item in value.items()}
    if hasattr(value, "tolist"):
        return value.tolist()
    if isinstance(value, fractions.Fraction):
        return float(value)
    if type(value).__name__ == "device":  # of torch, which reports must not import
        return str(value)
    return [to_python(item) for item in value] if isinstance(value, (list, tuple, range, set, Iterator)) else value
