"""What was run, on what, and what went wrong: the facts of a report."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from torchace.lab.report import formats
from torchace.lab.report.formats import NONE
from torchace.lab.report.results import Data, Results
from torchace.lab.report.tables import Cell, Column, Section, Table


def facts(results: Results) -> list[tuple[str, str]]:
    """Data, seeds, hardware, versions and time, as pairs of a heading and a text.

    Args:
        results: A run directory.

    Returns:
        The pairs, in the order to show them.
    """
    found = [("Data", _data(results.data))]
    if any(results.data_of(arm) != results.data for arm in results.arms):
        found = [(f"Data of “{arm.label}”", _data(results.data_of(arm))) for arm in results.arms]
    found.append(("Seeds", _seeds(results)))
    found.append(("Hardware", _pairs(results.hardware)))
    found.append(("Versions", _pairs(results.versions)))
    time = formats.duration(results.seconds)
    if results.started:
        time += f", started {formats.moment(results.started)}"
    found.append(("Time", time))
    return found


def _data(data: Data) -> str:
    sizes = [f"{data.train:,} to train"]
    if data.validation:
        sizes.append(f"{data.validation:,} to validate")
    sizes.append(f"{data.test:,} to test")
    text = f"{data.name}: {', '.join(sizes)}"
    if data.classes:
        text += f"; {formats.count(len(data.classes), 'class', 'classes')} ({_shortened(data.classes)})"
    if data.image_shape:
        text += f"; images {' × '.join(str(side) for side in data.image_shape)}"
    return text


def arm_table(results: Results) -> Table:
    """The arms: network, parameters, batches, λ."""
    rows = [
        (
            Cell(f"{arm.label}{' (baseline)' if arm.baseline else ''}", kind="text"),
            Cell(str(arm.num_members)),
            Cell(arm.network or NONE, kind="text"),
            Cell(NONE if arm.parameters is None else f"{arm.parameters:,}"),
            Cell(arm.batches, kind="text"),
            Cell(", ".join(formats.diversity(value) for value in sorted(set(arm.diversities))), kind="text"),
        )
        for arm in results.arms
    ]
    columns = tuple(Column(label) for label in ("Arm", "K", "Network", "Parameters", "Batches", "λ"))
    return Table("Arms", columns, (Section("", tuple(rows)),))


def failure_table(results: Results) -> Table | None:
    """The runs that failed and the files that could not be read, None where there are none."""
    labels = {arm.name: arm.label for arm in results.arms}
    rows = []
    for run in results.failed:
        failure = run.failure
        places = []
        if failure and failure.step is not None:
            places.append(f"step {failure.step:,}")
        if failure and failure.member is not None:
            places.append(f"member {failure.member}")
        rows.append(
            (
                Cell(run.name, kind="text"),
                Cell(labels[run.arm], kind="text"),
                Cell(formats.diversity(run.diversity)),
                Cell(str(run.seed)),
                Cell(", ".join(places) or NONE, kind="text"),
                Cell(failure.message if failure else NONE, kind="text"),
            )
        )
    for damaged in results.damaged:
        blank = Cell(NONE)
        rows.append((Cell(damaged.file, kind="text"), blank, blank, blank, blank, Cell(damaged.reason, kind="text")))
    if not rows:
        return None
    columns = tuple(Column(label) for label in ("Run or file", "Arm", "λ", "Seed", "Where", "What happened"))
    return Table("Failed runs and damaged files", columns, (Section("", tuple(rows)),))


def configuration(results: Results) -> str:
    """The experiment's configuration as indented JSON, empty where there is none."""
    return json.dumps(results.config, indent=2, ensure_ascii=False, default=str) if results.config else ""


def _shortened(items: tuple[str, ...] | list[str], most: int = 10) -> str:
    shown = ", ".join(items[:most])
    return f"{shown}, and {len(items) - most} more" if len(items) > most else shown


def _seeds(results: Results) -> str:
    if all(arm.seeds is None for arm in results.arms):
        return _counted(results.seeds)
    return "; ".join(f"{arm.label}: {_counted(results.seeds_of(arm))}" for arm in results.arms)


def _counted(seeds: tuple[int, ...]) -> str:
    return f"{len(seeds)} ({', '.join(str(seed) for seed in seeds)})" if seeds else NONE


def _pairs(values: Mapping[str, Any]) -> str:
    return "; ".join(f"{key} {value}" for key, value in values.items() if value not in (None, "")) or NONE
