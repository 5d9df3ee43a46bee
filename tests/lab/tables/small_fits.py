"""Small fits of tables, and their files."""

from __future__ import annotations

import json
import tempfile
from pathlib import Path
from typing import Any

import pandas as pd

from tests.lab.cli.command_line import fake_report, write_table
from tests.lab.sweeps.small_sweeps import TIMES
from torchace.lab.tables.fit import TableFit
from torchace.lab.tables.model import TableModel
from torchace.lab.tables.table import TableSettings, load_table
from torchace.lab.training.members import MemberPlan

TINY: dict[str, Any] = {"num_members": 2, "hidden": (4,), "epochs": 1}
NAMES = {".csv": "table.csv", ".parquet": "table.parquet", ".npz": "table.npz"}


def job(data: Path, target: str, out: Path, diversity: float | None = 0.5, **options: Any) -> TableFit:
    """A fit of a file; options are those of the plan, of the table, `seed`."""
    settings = {name: options.pop(name) for name in list(options) if name in TableSettings.__dataclass_fields__}
    wanted = TableSettings((target,), **settings)
    table = load_table(data, wanted)
    plan = MemberPlan(table.task, **{**TINY, **options})
    return TableFit(table, plan, diversity, out, baselines=False)


def done(fit: TableFit) -> TableModel:
    """The whole of a fit, with a page instead of a report."""
    with fit.lock():
        fit.train()
        fake_report(fit.model)
        fit.publish()
    return TableModel.load(fit.out)


def fitted(frame: pd.DataFrame, target: str, suffix: str = ".csv", **options: Any) -> TableModel:
    """A model of a table, which went through a file."""
    with tempfile.TemporaryDirectory() as folder:
        data = write_table(frame, Path(folder, NAMES[suffix]))
        return done(job(data, target, Path(folder, "out"), **options))


def weights_digest(out: Path) -> str:
    """The SHA-256 of a model's weights."""
    return json.loads((out / "manifest.json").read_text())["weights_sha256"]


def is_complete(out: Path) -> bool:
    """Whether everything of a model is there; what loads must be."""
    if not out.exists():
        return False
    model = TableModel.load(out)
    assert json.loads((out / "experiment.json").read_text())["config"] == model.record["fit"]
    assert (out / "report" / "index.html").read_text().startswith("<!doctype html>")
    assert len(list(out.glob("runs/*.json"))) == len(list(out.glob("runs/*.safetensors"))) == 1
    assert list(out.rglob(".*")) == []
    return True


def without_seconds(content: Any) -> Any:
    """Content of a JSON file without the seconds of baselines."""
    if isinstance(content, dict):
        return {key: without_seconds(value) for key, value in content.items() if key != "seconds"}
    return [without_seconds(value) for value in content] if isinstance(content, list) else content


def read_untimed(out: Path) -> dict[str, Any]:
    """Everything that a fit wrote down but its times."""
    found: dict[str, Any] = {"weights": (out / "weights.safetensors").read_bytes()}
    manifest = json.loads((out / "manifest.json").read_text())
    del manifest["sha256"]  # also of the times
    found["manifest"] = without_seconds(manifest)
    for file in [out / "experiment.json", *sorted(out.glob("runs/*.json"))]:
        content = json.loads(file.read_text())
        content = {key: value for key, value in content.items() if key not in TIMES}
        found[str(file.relative_to(out))] = without_seconds(content)
    for file in sorted(out.glob("runs/*.safetensors")):
        found[file.name] = file.read_bytes()
    return found
