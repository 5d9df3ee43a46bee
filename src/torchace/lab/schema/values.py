"""Types of the values in result files."""

from __future__ import annotations

from typing import Annotated, Any, Literal, TypeVar

from pydantic import BeforeValidator, ConfigDict, Field

LARGEST = 1e100  # bound of measured numbers; its square is finite

TaskName = Literal["classification", "multilabel", "regression"]
SplitName = Literal["train", "validation", "test"]

T = TypeVar("T")
Items = Annotated[tuple[T, ...], Field(strict=False)]  # a list in JSON
Count = Annotated[int, Field(ge=0, lt=2**63)]
Number = Annotated[float, Field(gt=-LARGEST, lt=LARGEST, allow_inf_nan=False)]
Diversity = Annotated[float, Field(ge=0, le=1, allow_inf_nan=False, strict=True)]
Name = Annotated[str, Field(pattern=r"^[A-Za-z0-9_][A-Za-z0-9_.-]{0,99}$")]  # part of a path


def _drop_not_finite(value: Any) -> Any:
    is_number = isinstance(value, int | float) and not isinstance(value, bool)
    return None if is_number and not abs(value) < LARGEST else value


Measured = Annotated[Number | None, BeforeValidator(_drop_not_finite)]  # None: not measured or not finite

RESULT_CONFIG = ConfigDict(frozen=True, strict=True, populate_by_name=True)  # unknown keys are ignored
