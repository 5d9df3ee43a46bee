"""Module from the raw matrix of a table to features."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn

from torchace import _checks

# Bound of scaled values: outliers stay finite in half precision.
LIMIT = 1e4

# the number of values in each buffer; columns are int64, statistics float64
BUFFERS = {
    "fill": "num_columns",
    "center": "num_numbers",
    "scale": "num_numbers",
    "inverse_limit": "num_numbers",
    "low": "num_ramps",
    "width": "num_ramps",
    "codes": "num_codes",
    "code_scale": "num_codes",
    "number_columns": "num_numbers",
    "ramp_columns": "num_ramps",
    "indicator_columns": "num_indicators",
    "code_columns": "num_codes",
}


def _dtype(name: str) -> torch.dtype:
    return torch.int64 if name.endswith("_columns") else torch.float64


class TableEncoder(nn.Module):
    """A module without parameters that maps a table's raw matrix `(N, F)` in float64 to features `(N, D)`.

    Missing values (NaN) are replaced by the column's `fill`. The features are, in this order:

    - for each of `number_columns`, z / √(1 + (z · inverse_limit)²) with z = (x - center) / scale, clipped to ±10,000:
      an `inverse_limit` of 1/3 bounds outliers smoothly to ±3, and 0 leaves z unchanged;
    - for each of `ramp_columns`, (x - low) / width, clipped to [0, 1]: a bin of a piecewise-linear encoding;
    - for each of `indicator_columns`, 1 where x is missing, otherwise 0;
    - for each of `code_columns`, `code_scale` (1 unless given) where x is the code in `codes`, otherwise 0.

    They are computed in float64 (times in seconds exceed float32's precision) and returned in the module's type.
    """

    fill: Tensor
    center: Tensor
    scale: Tensor
    inverse_limit: Tensor
    low: Tensor
    width: Tensor
    codes: Tensor
    code_scale: Tensor
    number_columns: Tensor
    ramp_columns: Tensor
    indicator_columns: Tensor
    code_columns: Tensor
    like: Tensor

    def __init__(
        self, num_columns: int, num_numbers: int = 0, num_ramps: int = 0, num_indicators: int = 0, num_codes: int = 0
    ) -> None:
        super().__init__()
        sizes = {"num_numbers": num_numbers, "num_ramps": num_ramps}
        sizes |= {"num_indicators": num_indicators, "num_codes": num_codes}
        self.num_columns, self.num_features = num_columns, sum(sizes.values())
        if self.num_features == 0:
            raise ValueError("Expected at least one feature, but got none. Give `num_numbers` or `num_codes`.")
        self.architecture: dict[str, Any] = {"name": "table_encoder", "num_columns": num_columns, **sizes}
        for name, size in BUFFERS.items():
            self.register_buffer(name, torch.ones(self.architecture[size], dtype=_dtype(name)))
        self.register_buffer("like", torch.zeros(0))  # carries the type and device of the features

    @classmethod
    def from_values(cls, **values: Sequence[float]) -> TableEncoder:
        """Return an encoder with the values of its buffers; those left out are empty.

        Example:
            >>> encoder = TableEncoder.from_values(
            ...     fill=[4.0, 0.0], number_columns=[0], center=[4.0], scale=[2.0], inverse_limit=[0.0],
            ...     ramp_columns=[0, 0], low=[2.0, 5.0], width=[3.0, 4.0], indicator_columns=[0],
            ...     code_columns=[1, 1], codes=[0, 1],
            ... )
            >>> encoder(torch.tensor([[6.0, 1.0], [float("nan"), -1.0]], dtype=torch.float64))
            tensor([[1.0000, 1.0000, 0.2500, 0.0000, 0.0000, 1.0000],
                    [0.0000, 0.6667, 0.0000, 1.0000, 0.0000, 0.0000]])
        """
        values.setdefault("code_scale", [1.0] * len(values.get("codes", ())))
        state = {name: torch.tensor(values.get(name, ()), dtype=_dtype(name)) for name in BUFFERS}
        encoder = cls(**{size: len(state[name]) for name, size in BUFFERS.items()})
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
        x = torch.where(raw.isnan(), self.fill, raw)
        parts = []
        # no empty parts: some ONNX runtimes refuse them
        if len(self.number_columns):
            z = ((x.index_select(1, self.number_columns) - self.center) / self.scale).clamp(-LIMIT, LIMIT)
            parts.append(z / (1 + (z * self.inverse_limit).square()).sqrt())
        if len(self.ramp_columns):
            parts.append(((x.index_select(1, self.ramp_columns) - self.low) / self.width).clamp(0, 1))
        if len(self.indicator_columns):
            parts.append(raw.index_select(1, self.indicator_columns).isnan().to(torch.float64))
        if len(self.code_columns):
            parts.append((raw.index_select(1, self.code_columns) == self.codes) * self.code_scale)
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
