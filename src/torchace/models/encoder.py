"""Module from the raw matrix of a table to features."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from torchace import _checks

# Bound of standardized values: none of N training rows exceeds √N, and outliers stay finite in half precision.
LIMIT = 1e4

# the number of values in each buffer; columns are int64, statistics float64
BUFFERS = {
    "mean": "num_numbers",
    "std": "num_numbers",
    "codes": "num_codes",
    "number_columns": "num_numbers",
    "indicator_columns": "num_indicators",
    "code_columns": "num_codes",
}


def _dtype(name: str) -> torch.dtype:
    return torch.int64 if name.endswith("_columns") else torch.float64


class TableEncoder(nn.Module):
    """A module without parameters that maps a table's raw matrix `(N, F)` in float64 to features `(N, D)`.

    The features are, in this order:

    - for each of `number_columns`, `(x - mean) / std`, clipped to ±10,000, and 0 where x is NaN;
    - for each of `indicator_columns`, 1 where x is NaN, otherwise 0;
    - for each of `code_columns`, 1 where x is the code in `codes`, otherwise 0.

    They are computed in float64 (times in seconds exceed float32's precision) and returned in the module's type.
    """

    mean: Tensor
    std: Tensor
    codes: Tensor
    number_columns: Tensor
    indicator_columns: Tensor
    code_columns: Tensor
    like: Tensor

    def __init__(self, num_columns: int, num_numbers: int, num_indicators: int, num_codes: int) -> None:
        super().__init__()
        self.num_columns = num_columns
        self.num_features = num_numbers + num_indicators + num_codes
        self.architecture: dict[str, Any] = {
            "name": "table_encoder",
            "num_columns": num_columns,
            "num_numbers": num_numbers,
            "num_indicators": num_indicators,
            "num_codes": num_codes,
        }
        for name, size in BUFFERS.items():
            fill = 1 if name == "std" else 0
            self.register_buffer(name, torch.full((self.architecture[size],), fill, dtype=_dtype(name)))
        self.register_buffer("like", torch.zeros(0))  # carries the type and device of the features

    @classmethod
    def from_values(cls, *, num_columns: int, **values: Sequence[float]) -> TableEncoder:
        """Return an encoder with the values of its buffers: `TableEncoder.from_values(**encoding.encoder_arguments())`.

        Example:
            >>> encoder = TableEncoder.from_values(
            ...     num_columns=2, mean=[4.0], std=[2.0], number_columns=[0], indicator_columns=[0],
            ...     code_columns=[1, 1], codes=[0, 1],
            ... )
            >>> encoder(torch.tensor([[6.0, 1.0], [float("nan"), -1.0]], dtype=torch.float64))
            tensor([[1., 0., 0., 1.],
                    [0., 1., 0., 0.]])
        """
        if values.keys() != BUFFERS.keys():
            raise TypeError(f"Expected {', '.join(BUFFERS)}, but got {', '.join(values) or 'none'}.")
        sizes = (len(values[name]) for name in ("number_columns", "indicator_columns", "code_columns"))
        encoder = table_encoder(num_columns, *sizes)
        state = {name: torch.tensor(values[name], dtype=_dtype(name)) for name in BUFFERS}
        for name, value in state.items():
            if value.shape != getattr(encoder, name).shape:
                raise ValueError(f"Expected `{name}` of {len(getattr(encoder, name))} numbers, but got {len(value)}.")
        problem = _find_problem(state, num_columns)
        if problem is not None:
            raise ValueError(problem)
        encoder.load_state_dict({**state, "like": encoder.like})
        return encoder

    def forward(self, raw: Tensor) -> Tensor:
        """Return the features `(N, D)` of a raw matrix `(N, F)`."""
        if raw.ndim != 2 or raw.shape[1] != self.num_columns:
            raise ValueError(
                f"Expected a raw matrix of shape (N, {self.num_columns}) with one column for each column of the table, "
                f"but got {_checks.shape_of(raw)}. Use encoding.matrix(frame)."
            )
        raw = raw.to(torch.float64)
        parts = []
        # no empty parts: some ONNX runtimes refuse them
        if len(self.number_columns):
            scaled = ((raw.index_select(1, self.number_columns) - self.mean) / self.std).clamp(-LIMIT, LIMIT)
            parts.append(torch.where(scaled.isnan(), torch.zeros_like(scaled), scaled))
        if len(self.indicator_columns):
            parts.append(raw.index_select(1, self.indicator_columns).isnan().to(torch.float64))
        if len(self.code_columns):
            parts.append((raw.index_select(1, self.code_columns) == self.codes).to(torch.float64))
        return torch.cat(parts, 1).to(self.like.dtype)

    def extra_repr(self) -> str:
        """Return the sizes."""
        return ", ".join(f"{name}={value}" for name, value in self.architecture.items() if name != "name")

    def _apply(self, fn: Any, recurse: bool = True) -> Any:
        """Keep the buffers' types when they move to another device."""
        before = {name: getattr(self, name) for name in BUFFERS}
        super()._apply(fn, recurse)  # type: ignore[no-untyped-call]
        for name, value in before.items():
            if getattr(self, name).dtype != value.dtype:
                setattr(self, name, value.to(getattr(self, name).device))
        return self

    def _load_from_state_dict(
        self, state_dict: Mapping[str, Any], prefix: str, local_metadata: Any, strict: bool, *lists: list[str]
    ) -> None:
        """Refuse invalid values."""
        super()._load_from_state_dict(state_dict, prefix, local_metadata, strict, *lists)
        given = {name: state_dict.get(prefix + name) for name in BUFFERS}
        tensors = {name: value for name, value in given.items() if isinstance(value, Tensor) and not value.is_meta}
        problem = _find_problem(tensors, self.num_columns)
        if problem is not None:
            lists[-1].append(problem)


def _find_problem(values: Mapping[str, Tensor], num_columns: int) -> str | None:
    """Return a message for the first invalid value, if any."""
    for name, value in values.items():
        if value.dtype != _dtype(name):
            return f"Expected `{name}` of type {_dtype(name)}, but got {value.dtype}."
        if name.endswith("_columns"):
            if ((value < 0) | (value >= num_columns)).any():
                return f"Expected `{name}` from 0 to {num_columns - 1}, but got {value.tolist()}."
        elif not value.isfinite().all():
            return f"Expected finite `{name}`, but got {value.tolist()}."
        if name == "std" and (value <= 0).any():
            return f"Expected `std` above 0, but got {value.tolist()}."
    return None


def table_encoder(num_columns: int, num_numbers: int, num_indicators: int, num_codes: int) -> TableEncoder:
    """Return an encoder without statistics, from raw columns to numbers, missing indicators and one-hot codes."""
    _checks.check_count(num_columns, "num_columns")
    _checks.check_count(num_numbers, "num_numbers", least=0)
    _checks.check_count(num_indicators, "num_indicators", least=0)
    _checks.check_count(num_codes, "num_codes", least=0)
    if num_numbers + num_indicators + num_codes == 0:
        raise ValueError("Expected at least one feature, but got none. Give `num_numbers` or `num_codes`.")
    return TableEncoder(num_columns, num_numbers, num_indicators, num_codes)
