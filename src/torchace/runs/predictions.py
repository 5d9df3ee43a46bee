"""Predictions for a file of any size, in chunks; the result is there whole or not at all."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from torchace.data import DataError
from torchace.data.columns import column_of
from torchace.data.packages import arrow
from torchace.data.tables import iterate_table
from torchace.engine.files import PARTIAL, flush_directory
from torchace.runs.table_model import TableModel

if TYPE_CHECKING:
    from pandas import DataFrame  # type: ignore[import-untyped]

ROWS = 65_536  # in a chunk


def predict_file(
    model: TableModel,
    data: Path,
    out: Path,
    *,
    keep: Sequence[str] = (),
    rows: int = ROWS,
    watch: Callable[[int], None] = lambda done: None,
) -> int:
    """Predicts every row of a file, in order.

    Args:
        model: What predicts.
        data: CSV, Parquet or NPZ.
        out: The file to write, `.csv` or `.parquet`; one that is there is replaced once all is done.
        keep: Columns of the data that are written beside the predictions.
        rows: How many are in memory at once.
        watch: Is told how many are done.

    Returns:
        The number of rows.
    """
    writer = _writer(out)
    if data.exists() and out.exists() and data.samefile(out):
        raise DataError(f"{out} is the file that is read; write the predictions to another one.")
    done = 0
    with _whole(out) as temporary, writer(temporary) as write:
        for frame in iterate_table(data, rows=rows):
            if not len(frame):
                continue
            predicted = model.predict(frame)
            for place, name in enumerate(keep):
                if name in predicted.columns[place:]:
                    raise DataError(f"The predictions have a column {name!r} of their own; do not keep the other one.")
                predicted.insert(place, name, column_of(frame, name, "to be kept"))
            write(predicted)
            done += len(frame)
            watch(done)
        if not done:
            raise DataError(f"{data} has no rows; nothing can be predicted.")
    return done


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
        table = pa.Table.from_pandas(frame, preserve_index=False)
        if writer is None:
            writer = parquet.ParquetWriter(path, table.schema)
        writer.write_table(table.cast(writer.schema))

    try:
        yield write
    finally:
        if writer is not None:
            writer.close()


@contextlib.contextmanager
def _whole(out: Path) -> Iterator[Path]:
    """A temporary name that becomes `out` when everything is written."""
    temporary = out.with_name(f".{out.name}.{os.getpid()}{PARTIAL}")
    try:
        out.parent.mkdir(parents=True, exist_ok=True)
        try:
            yield temporary
            with open(temporary, "rb") as file:
                os.fsync(file.fileno())
            os.replace(temporary, out)
        except BaseException:
            with contextlib.suppress(OSError):
                temporary.unlink(missing_ok=True)
            raise
        flush_directory(out.parent)
    except OSError as error:
        raise OSError(error.errno, error.strerror or str(error), str(out)) from error
