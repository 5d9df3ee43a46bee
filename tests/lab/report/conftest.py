"""Run directories that tests of the report share; written once, never changed."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.lab.report import synthetic_sweeps
from tests.lab.report.synthetic_fits import FitSpec, write_fit
from tests.lab.report.synthetic_sweeps import ArmSpec, Spec
from torchace.lab.report import Results, read_results, write_report

HOSTILE = [
    "<script>window.broken = 1; console.error('run')</script>",
    '"><img src=x onerror="console.error(1)">',
    "$\\frac{1}{$ {{ 7 * 7 }} {% raw %}",
    "A" * 400,
    "a|b`c*d_e[f](javascript:alert(1))",
    "多样性 \u202e \u0000\n\t é \ud800",
]


@pytest.fixture(scope="session")
def table1(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return synthetic_sweeps.table1(tmp_path_factory.mktemp("table1") / "run")


@pytest.fixture(scope="session")
def table2(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return synthetic_sweeps.table2(tmp_path_factory.mktemp("table2") / "run")


@pytest.fixture(scope="session")
def single_seed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return synthetic_sweeps.small(tmp_path_factory.mktemp("single") / "run", seeds=[7])


@pytest.fixture(scope="session")
def failing(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Failed runs, one λ without a finished run, a truncated run, a damaged array file, a foreign file."""
    failed = [("shared", 0.7, 0), *(("exchanged", 0.7, seed) for seed in range(5))]
    directory = synthetic_sweeps.table1(tmp_path_factory.mktemp("failing") / "run", failed=failed)
    runs = directory / "runs"
    (runs / "shared-l0.1-s1.json").write_text('{"format": 1, "run": "shared')
    (runs / "shared-l0.3-s0.safetensors").write_bytes(b"\xff" * 100)
    (runs / "foreign.json").write_text("[1, 2]")
    return directory


@pytest.fixture(scope="session")
def hostile(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Names that would run, escape or break something if a page took them at their word."""
    arms = [
        ArmSpec(
            f"arm{i}", text, 3, [0, 0.5], lambda d: 0.2, lambda d: 0.05, network=text, batches=text, baseline=i == 0
        )
        for i, text in enumerate(HOSTILE)
    ]
    script = HOSTILE[0]
    spec = Spec(script, f"{script} {HOSTILE[3]}", arms, seeds=[0, 1], classes=[*HOSTILE, "b", "c"])
    spec.description = " ".join(HOSTILE)
    spec.failed = [("arm0", 0.5, 0)]
    spec.paper = {"table": script, "note": script, "rows": [{"label": script, "num_members": 99, "diversity": 0.1}]}
    spec.overrides = {"hardware": {script: script}, "versions": {"torch": script}, "config": {script: script + "```"}}
    spec.overrides["started"] = script
    return synthetic_sweeps.write(tmp_path_factory.mktemp("hostile") / "run", spec)


@pytest.fixture(scope="session")
def regression_fit(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_fit(tmp_path_factory.mktemp("regression") / "fit", FitSpec())


@pytest.fixture(scope="session")
def classification_fit(tmp_path_factory: pytest.TempPathFactory) -> Path:
    spec = FitSpec(task="classification", name="iris.csv", title="iris.csv: species", chosen=0.2)
    return write_fit(tmp_path_factory.mktemp("classification") / "fit", spec)


@pytest.fixture(scope="session")
def hostile_fit(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A table whose column names, classes, labels and notes would break a page that took them at their word."""
    names = [*HOSTILE, "", "\n\n", "</table></details>", "x" * 300, "Ünïcödé " * 30, "ـ" * 80]
    columns = [{"name": name, "kind": "number", "missing": i, "mean": 1.5, "std": None} for i, name in enumerate(names)]
    columns += [
        {"name": name, "kind": "category", "missing": 0, "categories": [[text, 3] for text in names[:8]]}
        for name in names
    ]
    columns += [{"name": name, "kind": "dropped", "missing": 960, "why": " ".join(names)} for name in names]
    schema = {"target": {"name": HOSTILE[0], "classes": names * 3}, "columns": columns, "notes": names}
    spec = FitSpec(task="classification", schema=schema, name=HOSTILE[0], title=HOSTILE[1])
    spec.search = {"sentence": HOSTILE[0]}
    spec.overrides = {"description": HOSTILE[2]}
    directory = write_fit(tmp_path_factory.mktemp("hostile_fit") / "fit", spec)
    file = directory / "experiment.json"
    content = json.loads(file.read_text())
    content["data"]["classes"] = names[:3]
    content["arms"][0]["label"] = HOSTILE[0]
    file.write_text(json.dumps(content))
    return directory


@pytest.fixture(scope="session")
def pages(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    """The report of a directory by the name of its fixture, drawn once and then only read."""
    out = tmp_path_factory.mktemp("pages")

    def page(name: str) -> Path:
        found = out / name / "deep" / "index.html"
        return found if found.exists() else write_report(request.getfixturevalue(name), found.parent)

    return page


@pytest.fixture(scope="session")
def table1_results(table1: Path) -> Results:
    return read_results(table1)


@pytest.fixture(scope="session")
def table2_results(table2: Path) -> Results:
    return read_results(table2)


@pytest.fixture(scope="session")
def regression_results(regression_fit: Path) -> Results:
    return read_results(regression_fit)


@pytest.fixture(scope="session")
def classification_results(classification_fit: Path) -> Results:
    return read_results(classification_fit)
