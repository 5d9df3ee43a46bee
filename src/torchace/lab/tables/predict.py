"""Predictions for a file of any size, in chunks; the result is there whole or not at all."""

from __future__ import annotations

import contextlib
import itertools
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from torchace._files import atomic_file, error_reason, remove_abandoned
from torchace.lab.data import DataError
from torchace.lab.data.columns import get_column
from torchace.lab.data.messages import first_duplicate, row_number
from torchace.lab.data.packages import arrow
from torchace.lab.data.tables import iterate_table
from torchace.lab.tables.model import TableModel
from torchace.lab.training.chunks import chunk_rows
from torchace.lab.training.loop import Interrupted

if TYPE_CHECKING:
    from pandas import DataFrame  # type: ignore[import-untyped]

ROWS = 65_536  # in a chunk, at most
FORMULA = ("=", "+", "-", "@", "\t", "\r", "\n")  # how texts begin that a spreadsheet calculates


def predict_file(
    model: TableModel,
    data: Path,
    out: Path,
    *,
    keep: Sequence[str] = (),
    escape_formulas: bool = False,
    rows: int | None = None,
    stop: Callable[[], bool] = lambda: False,
) -> int:
    """Predicts every row of a file, in order.

    Args:
        model: What predicts.
        data: CSV, Parquet or NPZ.
        out: The file to write, `.csv` or `.parquet`; one that is there is replaced once all is done.
        keep: Columns of the data that are written beside the predictions.
        escape_formulas: Put a `'` before texts and names in a `.csv` file that a spreadsheet would take for formulas,
            those that begin with `=`, `+`, `-`, `@`, a tab or a line break.
        rows: How many are in memory at once; as many as members and classes allow unless given.
        stop: Is asked before every chunk; when it says yes, nothing is written and `Interrupted` raised.

    Returns:
        The number of rows.
    """
    writer = _writer(out)
    if data.exists() and out.exists() and data.samefile(out):
        raise DataError(f"{out} is the file that is read; write the predictions to another one.")
    if (twice := first_duplicate(keep)) is not None:
        raise DataError(f"The column {twice!r} is to be kept twice; name it once.")
    rows = rows or chunk_rows(model.ensemble, model.ensemble.num_members, most=ROWS)
    chunks = _predicted(model, data, keep, rows)
    first = next(chunks)  # what is wrong with the table comes up here, before anything is written
    done = 0
    remove_abandoned(out)
    with atomic_file(out) as temporary, writer(temporary) as write:
        for chunk in itertools.chain([first], chunks):
            if stop():
                raise Interrupted
            write(_without_formulas(chunk) if escape_formulas and out.suffix.lower() == ".csv" else chunk)
            done += len(chunk)
    return done


def _without_formulas(frame: DataFrame) -> DataFrame:
    """The same table with a `'` before every text, names of columns too, that a spreadsheet would calculate."""
    changed = frame.copy()
    for name in changed.columns:
        if changed[name].dtype.kind not in "biuf":
            changed[name] = changed[name].map(_escaped)
    return changed.rename(columns=_escaped)


def _escaped(value: Any) -> Any:
    return f"'{value}" if isinstance(value, str) and value.startswith(FORMULA) else value


def _predicted(model: TableModel, data: Path, keep: Sequence[str], rows: int) -> Iterator[DataFrame]:
    """What is written for one chunk after another."""
    for frame in iterate_table(data, rows=rows):
        if not len(frame):  # a Parquet file may have groups of no rows
            continue
        predicted = model.predict(frame)
        for place, name in enumerate(keep):
            if name in predicted.columns[place:]:
                raise DataError(f"The predictions have a column {name!r} of their own; do not keep the other one.")
            predicted.insert(place, name, get_column(frame, name, "to be kept"))
        yield predicted


def _writer(out: Path) -> Callable[[Path], Any]:
    writers = {".csv": _csv, ".parquet": _parquet}
    if out.suffix.lower() not in writers:
        raise DataError(f"Expected a file to write that ends in .csv or .parquet, but got {out}.")
    return writers[out.suffix.lower()]


@contextlib.contextmanager
def _csv(path: Path) -> Iterator[Callable[[DataFrame], None]]:
    with open(path, "w", encoding="utf-8", newline="") as file:
        begun = False

        def write(frame: DataFrame) -> None:
            nonlocal begun
            frame.to_csv(file, index=False, header=not begun, lineterminator="\n")
            begun = True

        yield write


@contextlib.contextmanager
def _parquet(path: Path) -> Iterator[Callable[[DataFrame], None]]:
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
            first = row_number(frame, 0)
            raise DataError(
                f"From row {first} on, a column that is kept is of another type than before ({error_reason(error)}); "
                "write a .csv file, or keep fewer columns."
            ) from None

    try:
        yield write
    finally:
        if writer is not None:
            writer.close()
