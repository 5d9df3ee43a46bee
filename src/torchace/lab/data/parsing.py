"""What a cell of a table says: a number, a text, or nothing.

The rules hold cell by cell and for every kind of table, so that a chunk of a file is never read differently from the
whole of it, nor a CSV file differently from the same table in Parquet.

- Spaces around a text do not count.
- Nothing is said by an empty cell, by pandas's NaN, NA, NaT and None, and by the texts in `MISSING`, in capitals or
  not.
- A text is a number if it is written as one with a decimal point: `-1.5e3`, `.5`, `007`; not `1,5`, `1_000` or `0x1F`.
  `inf` and `infinity` are infinite, as is `1e999`.
- Truth values are texts, `True` and `False`, not numbers; dates are texts as ISO 8601 writes them.
"""

from __future__ import annotations

import datetime
import decimal
import math
import re
import uuid
from collections import Counter
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from torchace.lab.data.errors import DataError
from torchace.lab.data.messages import quote, row_number
from torchace.lab.data.packages import arrow, pandas

if TYPE_CHECKING:
    from pandas import Series  # type: ignore[import-untyped]

MISSING = ("", "na", "n/a", "nan", "null", "none", "<na>", "#n/a")

# For the texts of whole columns (RE2) and of single cells (re) alike.
_NUMBER = r"[+-]?(?:[0-9]+\.?[0-9]*|\.[0-9]+)(?:[eE][+-]?[0-9]+)?"
_INFINITE = r"[+-]?(?:inf|infinity)"
_WHOLE = re.compile(r"[+-]?[0-9]{1,300}")


class CellError(DataError):
    """A column whose cells are neither numbers nor texts: lists, bytes, complex numbers.

    Attributes:
        found: What was found, without what to do about it.
    """

    def __init__(self, column: Series, place: int, what: str) -> None:
        self.found = f"Column {quote(column.name)} has {what} in row {row_number(column, place)}"
        super().__init__(f"{self.found}, which is neither a number nor a text; convert the column, or leave it out.")


# -- whole columns ----------------------------------------------------------------------------------------------------


def texts(column: Series) -> Any:
    """The cells of a column as texts: an Arrow array of strings, null where a cell says nothing.

    Example:
        >>> import pandas as pd
        >>> texts(pd.Series([" a", "n/a", None])).to_pylist(), texts(pd.Series([1.0, 2.5, True])).to_pylist()
        (['a', None, None], ['1', '2.5', 'True'])
    """
    pa, pc = arrow(), arrow("pyarrow.compute")
    cells = pc.utf8_trim_whitespace(_written(column).cast(pa.large_string()))
    said = pc.invert(pc.is_in(pc.utf8_lower(cells), value_set=pa.array(MISSING, pa.large_string())))
    return pc.if_else(said, cells, pa.scalar(None, pa.large_string()))


def numbers(column: Series) -> tuple[NDArray[np.float64], NDArray[np.bool_]]:
    """The cells of a column as numbers.

    Returns:
        The numbers, NaN where a cell says nothing; and where a cell says something that is no number, both `(N,)`.

    Example:
        >>> import pandas as pd
        >>> numbers(pd.Series(["1", "NA", "one"]))
        (array([ 1., nan, nan]), array([False, False,  True]))
    """
    types = pandas().api.types
    column = _dense(column)
    dtype = column.dtype
    if not _is_category(dtype) and types.is_numeric_dtype(dtype) and not types.is_bool_dtype(dtype):
        if types.is_complex_dtype(dtype):
            raise CellError(column, 0, "a complex number")
        with np.errstate(over="ignore"):  # numbers of 128 bits
            values = column.to_numpy(dtype=np.float64, na_value=np.nan, copy=True)
        return values, np.zeros(len(values), dtype=bool)
    pa, pc = arrow(), arrow("pyarrow.compute")
    cells = texts(column)
    finite = pc.match_substring_regex(cells, f"^(?:{_NUMBER})$")
    infinite = pc.match_substring_regex(cells, f"^(?:{_INFINITE})$", ignore_case=True)
    is_number = pc.or_(finite, infinite)
    parsed = pc.cast(pc.if_else(is_number, cells, pa.scalar(None, pa.large_string())), pa.float64())
    wrong = np.asarray(pc.fill_null(pc.invert(is_number), False))
    return parsed.to_numpy(zero_copy_only=False).astype(np.float64), wrong


def positions(cells: Any, known: Sequence[str]) -> NDArray[np.int64]:
    """Where each cell of `texts(...)` stands among known texts, `(N,)`; -1 for those that do not, and for null.

    A cell is looked for as it is written; failing that, as the number (`1`, `1.0` and `01`) or truth value (`True` and
    `true`) that it says, since one file writes what another one holds.

    Example:
        >>> import pandas as pd
        >>> positions(texts(pd.Series(["1.0", "yes", "Yes", None])), ["1", "yes"])
        array([ 0,  1, -1, -1])
    """
    pc = arrow("pyarrow.compute")
    exact = {text: place for place, text in enumerate(known)}
    forms = Counter(map(canonical, known))
    by_form = {canonical(text): place for place, text in enumerate(known) if forms[canonical(text)] == 1}
    encoded = cells.dictionary_encode()
    found = [exact.get(text, by_form.get(canonical(text), -1)) for text in encoded.dictionary.to_pylist()]
    places = np.asarray(pc.fill_null(encoded.indices, len(found)), dtype=np.int64)
    return np.asarray([*found, -1], dtype=np.int64)[places]


def _written(column: Series) -> Any:
    """The cells of a column as Arrow strings, as they are written."""
    pd, pa = pandas(), arrow()
    column = _dense(column)
    types, dtype = pd.api.types, column.dtype
    if _is_category(dtype):
        column = column.cat.remove_unused_categories()
        codes = column.cat.codes.to_numpy()
        try:
            return _written(pd.Series(column.cat.categories)).take(pa.array(codes, mask=codes < 0))
        except CellError:
            return _written(column.astype(object))  # the same error, with the row
    if types.is_bool_dtype(dtype):
        return _listed(column, ["True" if value else "False" for value in column.fillna(False)])
    if types.is_integer_dtype(dtype):
        return _whole(pa.array(column)).cast(pa.large_string())
    if types.is_float_dtype(dtype):
        values, places = np.unique(column.to_numpy(na_value=np.nan), return_inverse=True)
        return pa.array([None if np.isnan(v) else number_text(v) for v in values], pa.large_string()).take(places)
    is_string = isinstance(dtype, pd.StringDtype) or types.infer_dtype(column, skipna=True) in ("string", "empty")
    try:
        if is_string:
            return _whole(pa.array(column, type=pa.large_string(), from_pandas=True))
        return pa.array([_cell_text(column, i, value) for i, value in enumerate(column)], pa.large_string())
    except UnicodeEncodeError:
        wrong = next(i for i, v in enumerate(column) if isinstance(v, str) and v != v.encode(errors="replace").decode())
        raise CellError(column, wrong, "half a Unicode character") from None


def _listed(column: Series, cells: list[str]) -> Any:
    return arrow().array(cells, arrow().large_string(), mask=np.asarray(column.isna()))


def _whole(array: Any) -> Any:
    """One Arrow array, where pandas may hold several."""
    pa = arrow()
    return array.combine_chunks() if isinstance(array, pa.ChunkedArray) else array


def _dense(column: Series) -> Series:
    is_sparse = isinstance(column.dtype, pandas().SparseDtype)
    return column.sparse.to_dense() if is_sparse else column


def _is_category(dtype: Any) -> bool:
    return isinstance(dtype, pandas().CategoricalDtype)


# -- single cells -----------------------------------------------------------------------------------------------------


def number_text(value: float) -> str:
    """A number as text, whole numbers without a point.

    Example:
        >>> number_text(3.0), number_text(0.1), number_text(1e300)
        ('3', '0.1', '1e+300')
    """
    plain = float(value)
    return str(int(plain)) if abs(plain) < 2**53 and plain == int(plain) else str(value)


def canonical(text: str) -> str:
    """A form in which the spellings of one number, or of one truth value, are the same.

    Example:
        >>> canonical("01"), canonical("1.0"), canonical("TRUE"), canonical("Yes")
        ('1', '1', 'true', 'Yes')
    """
    if _WHOLE.fullmatch(text):
        return str(int(text))
    if re.fullmatch(_NUMBER, text):
        return number_text(float(text))
    return text.lower() if text.lower() in ("true", "false") else text


def _cell_text(column: Series, place: int, value: Any) -> str | None:
    """One cell of a column that holds Python objects."""
    pd = pandas()
    if isinstance(value, str):
        return value
    if value is None or value is pd.NA or value is pd.NaT:
        return None
    if isinstance(value, bool | np.bool_):
        return "True" if value else "False"
    if isinstance(value, int | np.integer):
        value = int(value)
        return str(value) if value.bit_length() <= 1024 else ("inf" if value > 0 else "-inf")
    if isinstance(value, float | np.floating):
        return None if math.isnan(value) else number_text(value)  # type: ignore[arg-type]
    if isinstance(value, decimal.Decimal):
        return None if value.is_nan() else number_text(float(value))
    if isinstance(value, datetime.date | datetime.time):  # a datetime is a date
        return value.isoformat()
    if isinstance(value, datetime.timedelta | np.datetime64 | uuid.UUID | pd.Period | pd.Interval):
        return str(value)
    raise CellError(column, place, f"a value of type {type(value).__name__}")
