"""Parquet files in chunks of rows, with bounds on unpacked memory."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

from torchace._files import CHUNK_BYTES, UNPACKED_BYTES, FileRefusedError, check_unpacked, error_reason
from torchace.lab.data.columns import check_names
from torchace.lab.data.errors import DataError, arrow, pandas

if TYPE_CHECKING:
    from pandas import DataFrame  # type: ignore[import-untyped]

_CELL_BYTES = 8  # a number, or the offset of a text


def parquet_chunks(path: Path, rows: int) -> Iterator[DataFrame]:
    """Iterate over the rows of a Parquet file, at most `rows` at a time."""
    pa, parquet = arrow(), arrow("pyarrow.parquet")
    types = _pandas_types()
    try:
        with parquet.ParquetFile(path) as file:
            compressed = _compressed_texts(file)
        # read as dictionaries: their size is known before unpacking
        with parquet.ParquetFile(path, read_dictionary=compressed) as file:
            names = [name for name in file.schema_arrow.names if not _is_index(name)]
            check_names(names, path)
            size = os.stat(path).st_size
            unpacked = sum(
                max(_CELL_BYTES * column.num_values, column.total_uncompressed_size) for column in _column_chunks(file)
            )
            check_unpacked(path, size, unpacked)
            for batch in file.iter_batches(batch_size=max(1, min(rows, CHUNK_BYTES // (_CELL_BYTES * len(names))))):
                batch.validate(full=True)  # finds text that is not UTF-8
                unpacked += sum(_text_bytes(array) for array in batch.columns)
                check_unpacked(path, size, unpacked)
                columns = {
                    name: _to_plain(array)
                    for name, array in zip(batch.schema.names, batch.columns, strict=True)
                    if not _is_index(name)
                }
                yield pa.table(columns).to_pandas(types_mapper=types.get)
    except DataError:
        raise
    except FileRefusedError as error:
        raise DataError(
            f"{path} is refused ({error_reason(error)}); write it with compression='none' and use_dictionary=False."
        ) from None
    except (pa.ArrowException, OSError, ValueError, MemoryError, OverflowError) as error:
        reason = error_reason(error)
        raise DataError(f"{path} is a damaged Parquet file ({reason}); copy or save it again.") from None


def _pandas_types() -> dict[Any, Any]:
    """Nullable types, so that every chunk has the type of the whole column."""
    pd, pa = pandas(), arrow()
    text = pd.StringDtype("pyarrow")
    types = {pa.bool_(): pd.BooleanDtype(), pa.string(): text, pa.large_string(): text, pa.string_view(): text}
    for name in (f"{sign}Int{bits}" for sign in ("", "U") for bits in (8, 16, 32, 64)):
        types[getattr(pa, name.lower())()] = getattr(pd, f"{name}Dtype")()
    return types


def _column_chunks(file: Any) -> Iterator[Any]:
    for group in (file.metadata.row_group(i) for i in range(file.metadata.num_row_groups)):
        yield from (group.column(i) for i in range(group.num_columns))


def _compressed_texts(file: Any) -> list[str]:
    """Names of text columns that may take far more memory than disk."""
    texts = {column.name for column in file.schema_arrow if _is_text(column.type)}
    compressed = {
        column.path_in_schema
        for column in _column_chunks(file)
        if column.total_uncompressed_size < UNPACKED_BYTES // 4
        or column.total_uncompressed_size > 50 * column.total_compressed_size
    }
    return sorted(texts & compressed)


def _is_text(kind: Any) -> bool:
    types = arrow().types
    return types.is_string(kind) or types.is_large_string(kind) or types.is_binary(kind) or types.is_large_binary(kind)


def _text_bytes(array: Any) -> int:
    """Bytes of a dictionary's texts after unpacking."""
    if not arrow().types.is_dictionary(array.type) or not _is_text(array.type.value_type):
        return 0
    compute = arrow("pyarrow.compute")
    return compute.sum(compute.binary_length(array.dictionary).take(array.indices)).as_py() or 0


def _is_index(name: str) -> bool:
    """Whether this column is pandas's stored index."""
    return name.startswith("__index_level_")


def _to_plain(array: Any) -> Any:
    """Unpack dictionaries; convert decimals to numbers, dates to one type, and times of day to texts."""
    pa = arrow()
    if pa.types.is_dictionary(array.type):
        array = array.dictionary_decode()
    if pa.types.is_decimal(array.type):
        return array.cast(pa.float64())
    if pa.types.is_date(array.type) or pa.types.is_timestamp(array.type):
        return array.cast(pa.timestamp("us"), safe=False)  # UTC; nanoseconds are cut
    if pa.types.is_time(array.type):
        return array.cast(pa.large_string())
    return array
