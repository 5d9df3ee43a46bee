"""Predict files of any size in chunks."""

from __future__ import annotations

import contextlib
import itertools
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from torchace._files import atomic_file, error_reason, remove_abandoned
from torchace.lab.data import DataError
from torchace.lab.data.errors import arrow, first_duplicate, row_number
from torchace.lab.data.table_schema import get_column
from torchace.lab.data.tables import iterate_table
from torchace.lab.tables.model import TableModel
from torchace.lab.training.loop import Interrupted
from torchace.lab.training.run_group import chunk_rows

if TYPE_CHECKING:
    from pandas import DataFrame  # type: ignore[import-untyped]

MAX_ROWS = 65_536  # in a chunk
FORMULA_PREFIXES = ("=", "+", "-", "@", "\t", "\r", "\n")  # of text that spreadsheets evaluate


def predict_file(
    model: TableModel,
    data: Path,
    out: Path,
    *,
    keep: Sequence[str] = (),
    escape_formulas: bool = False,
    rows: int | None = None,
    stop: Callable[[], bool] = lambda: False,
    unseen: Counter[str] | None = None,
) -> int:
    """Predict every row of a file, in order, and return their number; `out` is written atomically.

    `keep` are columns to copy from the data, `rows` is the chunk size. If `stop`, called before every chunk, returns
    True, nothing is written and `Interrupted` is raised. `unseen` counts rows with unseen categories, by column.
    """
    writers = {".csv": _csv_writer, ".parquet": _parquet_writer}
    suffix = out.suffix.lower()
    if suffix not in writers:
        raise DataError(f"Expected an output file that ends in .csv or .parquet, but got {out}.")
    if data.exists() and out.exists() and data.samefile(out):
        raise DataError(f"Expected another output file than the input, but got {out} for both.")
    if (twice := first_duplicate(keep)) is not None:
        raise DataError(f"Expected each column to keep once, but got {twice!r} twice.")
    rows = rows or chunk_rows(model.ensemble, model.ensemble.num_members, max_rows=MAX_ROWS)
    chunks = _predict_chunks(model, data, keep, rows, Counter() if unseen is None else unseen)
    first = next(chunks)  # raises errors of the table before anything is written
    count = 0
    remove_abandoned(out)
    with atomic_file(out) as temporary, writers[suffix](temporary) as write:
        for chunk in itertools.chain([first], chunks):
            if stop():
                raise Interrupted
            write(_escape_formulas(chunk) if escape_formulas and suffix == ".csv" else chunk)
            count += len(chunk)
    return count


def _predict_chunks(
    model: TableModel, data: Path, keep: Sequence[str], rows: int, unseen: Counter[str]
) -> Iterator[DataFrame]:
    for frame in iterate_table(data, rows=rows):
        if not len(frame):  # a Parquet file may have empty row groups
            continue
        predictions = model.predict(frame)
        unseen.update(model.unseen_categories(frame))
        for place, name in enumerate(keep):
            if name in predictions.columns[place:]:
                raise DataError(f"The column {name!r} cannot be kept: the predictions have a column of the same name.")
            predictions.insert(place, name, get_column(frame, name, "to be kept"))
        yield predictions


def _escape_formulas(frame: DataFrame) -> DataFrame:
    def escape(value: Any) -> Any:
        return f"'{value}" if isinstance(value, str) and value.startswith(FORMULA_PREFIXES) else value

    frame = frame.copy()
    for name in frame.columns:
        if frame[name].dtype.kind not in "biuf":
            frame[name] = frame[name].map(escape)
    return frame.rename(columns=escape)


@contextlib.contextmanager
def _csv_writer(path: Path) -> Iterator[Callable[[DataFrame], None]]:
    with open(path, "w", encoding="utf-8", newline="") as file:
        yield lambda frame: frame.to_csv(file, index=False, header=file.tell() == 0, lineterminator="\n")


@contextlib.contextmanager
def _parquet_writer(path: Path) -> Iterator[Callable[[DataFrame], None]]:
    pa, parquet = arrow(), arrow("pyarrow.parquet")
    writer: Any = None

    def write(frame: DataFrame) -> None:
        nonlocal writer
        try:
            table = pa.Table.from_pandas(frame, preserve_index=False)
            if writer is None:
                writer = parquet.ParquetWriter(path, table.schema)
            writer.write_table(table.cast(writer.schema))
        except pa.ArrowException as error:
            raise DataError(
                f"A column to keep changes its type at row {row_number(frame, 0)} or later ({error_reason(error)}). "
                "Write a .csv file, or keep fewer columns."
            ) from None

    try:
        yield write
    finally:
        if writer is not None:
            writer.close()
