"""From the raw matrix of a table to features: scaled numbers, missing indicators, one-hot categories."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from torchace import _checks

# A value this many standard deviations off is taken for one at this distance. Among N rows of the training part none is
# farther than √N, so training is not touched; a wild value at prediction time stays finite, in half precision too.
LIMIT = 1e4

_STATISTICS = ("mean", "std", "codes")  # float64, whatever the module is converted to
_PLACES = ("number_columns", "indicator_columns", "code_columns")


class TableEncoder(nn.Module):
    """What `table_encoder` returns: a module without parameters that makes features `(N, D)` of a raw matrix `(N, F)`.

    The features are, in this order:

    - for each of `number_columns`, `(x - mean) / std`, within ±10,000, and 0 where x is NaN;
    - for each of `indicator_columns`, 1 where x is NaN, otherwise 0;
    - for each of `code_columns`, 1 where x is the code in `codes`, otherwise 0.

    Statistics stay in float64 and features are computed in float64, whatever `.float()`, `.half()` or `.to(dtype)` the
    module is in: a time in seconds, 1.7e9, has no second left in float32. Only the finished features have the type that
    the module was converted to, as those of any other module; float32 at first. Give it the matrix in float64.

    Attributes:
        num_features: D.
        architecture: The module's description, from which `build` makes one of the same sizes.
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
        self.register_buffer("mean", torch.zeros(num_numbers, dtype=torch.float64))
        self.register_buffer("std", torch.ones(num_numbers, dtype=torch.float64))
        self.register_buffer("codes", torch.zeros(num_codes, dtype=torch.float64))
        self.register_buffer("number_columns", torch.zeros(num_numbers, dtype=torch.int64))
        self.register_buffer("indicator_columns", torch.zeros(num_indicators, dtype=torch.int64))
        self.register_buffer("code_columns", torch.zeros(num_codes, dtype=torch.int64))
        self.register_buffer("like", torch.zeros(0))  # no values: it has the type and the device of the features

    @classmethod
    def from_values(
        cls,
        *,
        num_columns: int,
        mean: Sequence[float],
        std: Sequence[float],
        number_columns: Sequence[int],
        indicator_columns: Sequence[int],
        code_columns: Sequence[int],
        codes: Sequence[int],
    ) -> TableEncoder:
        """An encoder with statistics: `TableEncoder.from_values(**encoding.encoder_arguments())`.

        Args:
            num_columns: F, the columns of the raw matrix.
            mean: Of each number that is a feature.
            std: Likewise, above 0.
            number_columns: Which column of the raw matrix each of them is.
            indicator_columns: For which columns it is a feature whether they are NaN.
            code_columns: For each one-hot feature, the column of the raw matrix.
            codes: Likewise the code at which the feature is 1.

        Example:
            >>> encoder = TableEncoder.from_values(
            ...     num_columns=2, mean=[4.0], std=[2.0], number_columns=[0], indicator_columns=[0],
            ...     code_columns=[1, 1], codes=[0, 1],
            ... )
            >>> encoder(torch.tensor([[6.0, 1.0], [float("nan"), -1.0]], dtype=torch.float64))
            tensor([[1., 0., 0., 1.],
                    [0., 1., 0., 0.]])
        """
        encoder = table_encoder(num_columns, len(number_columns), len(indicator_columns), len(code_columns))
        state = {
            "mean": torch.tensor(mean, dtype=torch.float64),
            "std": torch.tensor(std, dtype=torch.float64),
            "codes": torch.tensor(codes, dtype=torch.float64),
            "number_columns": torch.tensor(number_columns, dtype=torch.int64),
            "indicator_columns": torch.tensor(indicator_columns, dtype=torch.int64),
            "code_columns": torch.tensor(code_columns, dtype=torch.int64),
        }
        for name, value in state.items():
            if value.shape != getattr(encoder, name).shape:
                raise ValueError(f"Expected `{name}` of {len(getattr(encoder, name))} numbers, but got {len(value)}.")
        wrong = _wrong_values(state, num_columns)
        if wrong is not None:
            raise ValueError(wrong)
        encoder.load_state_dict({**state, "like": encoder.like})
        return encoder

    def forward(self, raw: Tensor) -> Tensor:
        """The features `(N, D)` of a raw matrix `(N, F)`."""
        if raw.ndim != 2 or raw.shape[1] != self.num_columns:
            raise ValueError(
                f"Expected a raw matrix of shape (N, {self.num_columns}) with one column for each column of the table, "
                f"but got {_checks.shape_of(raw)}. Use encoding.matrix(frame)."
            )
        raw = raw.to(torch.float64)
        parts = []
        # Parts without features are left out, since other runtimes do not like tensors without numbers.
        if len(self.number_columns):
            scaled = ((raw.index_select(1, self.number_columns) - self.mean) / self.std).clamp(-LIMIT, LIMIT)
            parts.append(torch.where(scaled.isnan(), torch.zeros_like(scaled), scaled))
        if len(self.indicator_columns):
            parts.append(raw.index_select(1, self.indicator_columns).isnan().to(torch.float64))
        if len(self.code_columns):
            parts.append((raw.index_select(1, self.code_columns) == self.codes).to(torch.float64))
        return torch.cat(parts, 1).to(self.like.dtype)

    def extra_repr(self) -> str:
        return ", ".join(f"{name}={value}" for name, value in self.architecture.items() if name != "name")

    def _apply(self, fn: Any, recurse: bool = True) -> Any:
        """Moves the values where `fn` moves them, but keeps their types."""
        before = {name: getattr(self, name) for name in (*_STATISTICS, *_PLACES)}
        super()._apply(fn, recurse)  # type: ignore[no-untyped-call]
        for name, value in before.items():
            if getattr(self, name).dtype != value.dtype:
                setattr(self, name, value.to(getattr(self, name).device))
        return self

    def _load_from_state_dict(
        self, state_dict: Mapping[str, Any], prefix: str, local_metadata: Any, strict: bool, *lists: list[str]
    ) -> None:
        """Also refuses values that no table has taught: they would fail, or mislead, much later."""
        super()._load_from_state_dict(state_dict, prefix, local_metadata, strict, *lists)
        own = {name: state_dict.get(prefix + name) for name in (*_STATISTICS, *_PLACES)}
        found = {name: value for name, value in own.items() if isinstance(value, Tensor) and not value.is_meta}
        wrong = _wrong_values(found, self.num_columns)
        if wrong is not None:
            lists[-1].append(wrong)


def _wrong_values(values: Mapping[str, Tensor], num_columns: int) -> str | None:
    """What is wrong with an encoder's values, in words."""
    for name, value in values.items():
        dtype = torch.int64 if name in _PLACES else torch.float64
        if value.dtype != dtype:
            return f"Expected `{name}` of type {dtype}, but got {value.dtype}."
        if name in _PLACES and ((value < 0) | (value >= num_columns)).any():
            return f"Expected `{name}` from 0 to {num_columns - 1}, but got {value.tolist()}."
        if name in _STATISTICS and not value.isfinite().all():
            return f"Expected finite `{name}`, but got {value.tolist()}."
        if name == "std" and (value <= 0).any():
            return f"Expected `std` above 0, but got {value.tolist()}."
    return None


def table_encoder(num_columns: int, num_numbers: int, num_indicators: int, num_codes: int) -> TableEncoder:
    """A module that makes features of the raw matrix of a table, with statistics that are yet to be given to it.

    Args:
        num_columns: F, the columns of the raw matrix.
        num_numbers: How many of them are numbers that become scaled features.
        num_indicators: For how many of them it is a feature whether they are missing.
        num_codes: How many codes of categories become features.

    Returns:
        A module that maps a raw matrix `(N, F)` to features `(N, D)`. `TableEncoder.from_values` gives one with
        statistics.

    Example:
        >>> encoder = table_encoder(num_columns=3, num_numbers=2, num_indicators=1, num_codes=4)
        >>> encoder.num_features, len(list(encoder.parameters()))
        (7, 0)
    """
    _checks.check_count(num_columns, "num_columns")
    _checks.check_count(num_numbers, "num_numbers", least=0)
    _checks.check_count(num_indicators, "num_indicators", least=0)
    _checks.check_count(num_codes, "num_codes", least=0)
    if num_numbers + num_indicators + num_codes == 0:
        raise ValueError("Expected at least one feature, but got none. Give `num_numbers` or `num_codes`.")
    return TableEncoder(num_columns, num_numbers, num_indicators, num_codes)
