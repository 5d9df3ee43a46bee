"""A user's own network by torchrun and by Ray gives what one process gives."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.lab.sweeps.small_sweeps import PYTHONPATH

pytestmark = pytest.mark.extended

MODULE = """
from torch import nn
from mine.layers import Scale

def make_member(width=6):
    return nn.Sequential(nn.Linear(4, width), nn.BatchNorm1d(width), nn.ReLU(), Scale(), nn.Linear(width, 3))
"""
LAYERS = """
import torch
from torch import nn

class Scale(nn.Module):
    def __init__(self):
        super().__init__()
        self.scale = nn.Parameter(torch.ones(()))

    def forward(self, x):
        return x * self.scale
"""
SCRIPT = """
import json, os, pathlib, sys
import torch
from torch import nn
import torchace as ace
from mine.models import make_member

OFFSET = 0.5

def double(x):
    return 2 * x + OFFSET

class Epochs(ace.lab.Callback):
    seen = []

    def on_epoch_end(self, run, progress):
        self.seen.append([run.id, progress.epoch, progress.metrics])

if __name__ == "__main__":
    generator = torch.Generator().manual_seed(0)
    x, y = torch.randn(60, 4, generator=generator), torch.randint(3, (60,), generator=generator)
    options = json.loads(sys.argv[1])
    found = []
    own = lambda: nn.Sequential(nn.Linear(4, 5), nn.Tanh(), nn.Linear(5, 3))
    for member in (make_member, own):
        epochs = Epochs()
        result = ace.sweep(
            member, (x[:40], y[:40]), (x[40:], y[40:]), num_members=2, diversities=[0, 0.5], seeds=2, epochs=2,
            batch_size=20, learning_rate=[0.01, 0.1], precision="float64", transform=double, device="cpu", group_size=4,
            callbacks=[epochs], **options
        )
        rank, gone = os.environ.get("RANK"), pathlib.Path(f"gone-{len(found)}")
        while rank == "1" and not gone.exists():  # the first rank has finished with its result
            pass
        frame = result.to_frame().sort_values(["learning_rate", "diversity", "seed"])
        found.append([frame.cross_entropy.tolist(), sorted(epochs.seen)])
        if rank == "0":
            del result
            gone.touch()
        epochs.seen.clear()
    rank = os.environ.get("RANK", "0")
    with open(f"found-{rank}.json", "w") as file:
        json.dump(found, file)
"""


def run(folder: Path, launcher: list[str], options: dict[str, str]) -> list[list[list[float]]]:
    folder.mkdir()
    (folder / "mine").mkdir()
    (folder / "mine" / "__init__.py").touch()
    (folder / "mine" / "models.py").write_text(MODULE)
    (folder / "mine" / "layers.py").write_text(LAYERS)
    (folder / "script.py").write_text(SCRIPT)
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": PYTHONPATH, "RAY_AUTH_MODE": "disabled"}
    command = [sys.executable, *launcher, "script.py", json.dumps(options)]
    done = subprocess.run(
        command, cwd=folder, env=environment, capture_output=True, text=True, check=False, timeout=540
    )
    assert done.returncode == 0, done.stderr[-3000:]
    return [json.loads(file.read_text()) for file in sorted(folder.glob("found-*.json"))]


@pytest.fixture(scope="module")
def alone(tmp_path_factory: pytest.TempPathFactory) -> list[list[float]]:
    (found,) = run(tmp_path_factory.mktemp("alone") / "here", [], {})
    assert all(len(scores) == len(set(scores)) == 8 for scores, _ in found)
    assert all(len(epochs) == 16 for _, epochs in found)
    return found


def test_torchrun(alone: list[list[float]], tmp_path: Path) -> None:
    launcher = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2"]
    first, second = run(tmp_path / "here", launcher, {"parallel": "members"})
    assert [scores for scores, _ in first] == [scores for scores, _ in second]  # both ranks have the result
    assert all(epochs == [] for _, epochs in second)  # callbacks are called on the first rank
    for (scores, epochs), (expected, reported) in zip(first, alone, strict=True):
        assert scores == pytest.approx(expected, abs=1e-9)  # float64, sums in another order
        assert [entry[:2] for entry in epochs] == [entry[:2] for entry in reported]


def test_ray(alone: list[list[float]], tmp_path: Path) -> None:
    pytest.importorskip("ray", reason="needs the extra `ray`")
    (found,) = run(tmp_path / "here", [], {"ray": "local"})
    assert found == alone  # bit for bit: the same groups and the same number of threads
