"""Small files that hold much: refused before they are unpacked; those that hold what they seem to are read."""

from __future__ import annotations

import gzip
import io
import tarfile
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pandas as pd
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from tests.lab.data.damaged_files import load_error
from torchace.lab.data import load, read_table


def write_file(table: pa.Table, path: Path) -> Path:
    pq.write_table(table, path / "t.parquet", compression="zstd")
    return path / "t.parquet"


@pytest.mark.parametrize("write", [np.savez, np.savez_compressed])
def test_wide_arrays_come_in_chunks_of_few_bytes(write: Callable[..., None], tmp_path: Path) -> None:
    values = np.random.default_rng(0).normal(size=(50, 300))
    write(tmp_path / "t.npz", x=values)
    assert np.array_equal(read_table(tmp_path / "t.npz").to_numpy(), values)


def test_texts_of_a_dictionary(tmp_path: Path) -> None:
    texts = ["long", "short", None, "λ", ""] * 100
    table = pa.table({"x": texts, "y": pa.array(texts, pa.large_string()), "n": range(500)})
    frame = read_table(write_file(table, tmp_path))
    for name in ("x", "y"):
        assert [None if pd.isna(value) else value for value in frame[name]] == texts


@pytest.mark.usefixtures("small_sources")
@pytest.mark.parametrize("kind", [tarfile.GNUTYPE_LONGNAME, tarfile.XHDTYPE, tarfile.REGTYPE])
def test_archive_headers_with_huge_sizes(kind: bytes, tmp_path: Path) -> None:
    """A name, a record or a file of 8 GiB in a few bytes, of which nothing is read into memory."""
    member = tarfile.TarInfo("data_batch_1.bin")
    member.type, member.size = kind, 1 << 33
    with gzip.open(tmp_path / "cifar-10-binary.tar.gz", "wb", compresslevel=1) as file:
        file.write(member.tobuf(tarfile.GNU_FORMAT))
        for _ in range(300):
            file.write(bytes(1 << 20))
    load_error("cifar10", tmp_path, "cifar-10-binary.tar.gz")


@pytest.mark.usefixtures("small_sources")
def test_an_archive_with_records_and_long_names_is_read(tmp_path: Path) -> None:
    from tests.lab.data.writers import cifar_files

    buffer = io.BytesIO()
    with tarfile.open(fileobj=buffer, mode="w:gz", format=tarfile.PAX_FORMAT) as archive:
        for name, data in {"x" * 300: b"something", **cifar_files()}.items():
            member = tarfile.TarInfo(f"cifar-10-batches-bin/{name}")
            member.size, member.pax_headers = len(data), {"comment": "λ"}
            archive.addfile(member, io.BytesIO(data))
    (tmp_path / "cifar-10-binary.tar.gz").write_bytes(buffer.getvalue())
    assert len(load("cifar10", directory=tmp_path, download=False).train) == 15
