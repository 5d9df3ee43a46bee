"""The GPU kernels compile without a GPU."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("triton", reason="no Triton")

pytestmark = pytest.mark.extended


@pytest.mark.skipif(sys.platform != "linux", reason="Triton's compiler runs on Linux")
def test_the_kernels_compile_for_an_h200(tmp_path: Path) -> None:
    root = Path(__file__).parents[2]
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    script = root / "tests" / "support" / "compile_kernels.py"
    result = subprocess.run(
        [sys.executable, str(script)],
        env=environment | {"TRITON_CACHE_DIR": str(tmp_path), "PYTHONPATH": str(root / "src")},
        capture_output=True,
        text=True,
        check=False,
    )
    assert result.returncode == 0, result.stderr[-2000:]
    assert {line.split()[0] for line in result.stdout.splitlines()} == {
        "_read_once",
        "_read_twice",
        "_count_samples",
        "_scale",
    }
