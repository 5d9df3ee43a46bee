"""The search space of a study."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass, fields, replace
from typing import Any

from optuna.trial import Trial

from torchace.lab.training.members import MemberPlan

Bounds = float | tuple[float, float]
LOG_SCALE = {"width", "learning_rate", "weight_decay", "batch_size"}
WHOLE_NUMBERS = {"width", "num_layers", "num_members", "batch_size"}


@dataclass(frozen=True)
class SearchSpace:
    """Bounds of each hyperparameter; a single number fixes it. Those in `LOG_SCALE` are searched on a log scale."""

    diversity: Bounds = (0.0, 0.95)
    width: Bounds = (8, 256)
    num_layers: Bounds = (1, 3)
    learning_rate: Bounds = (3e-4, 3e-2)
    weight_decay: Bounds = (1e-4, 1e-1)
    num_members: Bounds = (3, 20)
    batch_size: Bounds = (32, 256)

    def __post_init__(self) -> None:
        for name in DIMENSIONS:
            given, ends = getattr(self, name), self.bounds(name)
            if len(ends) != 2 or not all(_is_valid(name, end) for end in ends) or not ends[0] <= ends[1]:
                raise ValueError(
                    f"Expected `{name}` to be bounds (low, high) or one value, "
                    f"{'whole numbers of at least 1' if name in WHOLE_NUMBERS else 'numbers of at least 0'}"
                    f"{' and at most 1' if name == 'diversity' else ''}, but got {given!r}."
                )
            if name in LOG_SCALE and ends[0] == 0 and (ends[1] > 0 or name == "learning_rate"):
                raise ValueError(
                    f"Expected `{name}` above 0, but got {given!r}. It is searched on a logarithmic scale."
                )

    def bounds(self, name: str) -> tuple[float, ...]:
        """Return the bounds of a hyperparameter; equal if it is fixed."""
        given = getattr(self, name)
        return tuple(given) if isinstance(given, tuple | list) else (given, given)

    @property
    def free(self) -> tuple[str, ...]:
        """Names of the hyperparameters that are not fixed."""
        return tuple(name for name in DIMENSIONS if self.bounds(name)[0] < self.bounds(name)[1])

    def suggest(self, trial: Trial) -> dict[str, float]:
        """Return Optuna's suggestions and the fixed values."""
        values: dict[str, float] = {}
        for name in DIMENSIONS:
            low, high = self.bounds(name)
            if low == high:
                values[name] = low
            elif name in WHOLE_NUMBERS:
                values[name] = trial.suggest_int(name, int(low), int(high), log=name in LOG_SCALE)
            else:
                values[name] = trial.suggest_float(name, low, high, log=name in LOG_SCALE)
        return values

    def clip(self, plan: MemberPlan) -> dict[str, float]:
        """Return a plan's free values at λ=0, clipped to the bounds."""
        hidden = plan.hidden or (1,)
        values = {**asdict(plan), "diversity": 0.0, "width": hidden[0], "num_layers": len(hidden)}
        return {name: min(max(values[name], self.bounds(name)[0]), self.bounds(name)[1]) for name in self.free}


def apply_values(plan: MemberPlan, values: Mapping[str, Any]) -> tuple[MemberPlan, float]:
    """Return the plan with a trial's values, and λ."""
    known = {name: value for name, value in values.items() if name in {one.name for one in fields(plan)}}
    return replace(plan, hidden=(values["width"],) * values["num_layers"], **known), values["diversity"]


def _is_valid(name: str, value: object) -> bool:
    if isinstance(value, bool) or not isinstance(value, int if name in WHOLE_NUMBERS else int | float):
        return False
    least, most = int(name in WHOLE_NUMBERS), 1 if name == "diversity" else math.inf
    return least <= value <= most and math.isfinite(value)


DIMENSIONS = tuple(field.name for field in fields(SearchSpace))
