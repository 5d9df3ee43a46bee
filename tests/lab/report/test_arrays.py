from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import save_file

from torchace.lab.report import ResultFileError
from torchace.lab.report.results import read_arrays


def test_every_truncation_of_an_array_file_is_refused(table1: Path, tmp_path: Path) -> None:
    whole = (table1 / "runs" / "shared-l0-s0.safetensors").read_bytes()
    path = tmp_path / "run.safetensors"
    for length in [0, 1, 8, 9, 100, len(whole) // 2, len(whole) - 1]:
        path.write_bytes(whole[:length])
        with pytest.raises(ResultFileError, match=r"runs/run\.safetensors"):
            read_arrays(path)


@pytest.mark.parametrize("dtype", [np.float16, np.int64])
def test_arrays_of_every_precision_are_read(tmp_path: Path, dtype: type) -> None:
    arrays = {key: np.arange(1, 4).astype(dtype) for key in ("predicted", "observed", "spread")}
    save_file(arrays, tmp_path / "run.safetensors")
    assert read_arrays(tmp_path / "run.safetensors")["observed"].tolist() == [1, 2, 3]
