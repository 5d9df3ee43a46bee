"""The test cases the members dispute most: a sheet of images, or a table of rows."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import TYPE_CHECKING

from torchace.lab.report import formats
from torchace.lab.report.arrays import Array, Disputed, disputed_cases, disputed_images
from torchace.lab.report.drawing import Sketch, Theme, name
from torchace.lab.report.results import Arm, Results, Run
from torchace.lab.report.statistics import lowest
from torchace.lab.report.tables import Cell, Column, Section, Table

if TYPE_CHECKING:
    from matplotlib.figure import Figure

COLUMNS = 4


def disputed_sheet(results: Results, arms: Sequence[Arm]) -> Sketch | None:
    """A figure of disputed images.

    Args:
        results: A run directory.
        arms: The arms to look in.

    Returns:
        The images of the first run, by arm and seed, at the λ of lowest loss, that recorded any.
    """
    found = _first(results, arms, disputed_images)
    return _sheet(results, *found) if found else None


def disputed_table(results: Results, arms: Sequence[Arm]) -> Table | None:
    """A table of disputed rows, for data that are no images.

    Args:
        results: A run directory.
        arms: The arms to look in.

    Returns:
        The rows of the first run, by arm and seed, at the λ of lowest loss, that recorded any.
    """
    found = None if _first(results, arms, disputed_images) else _first(results, arms, disputed_cases)
    if found is None:
        return None
    arm, run, cases = found
    in_file = all(case.row is not None for case in cases)
    rows = tuple(
        (
            Cell(f"{case.row if in_file else case.position:,}"),
            Cell(_class(results, case.target, 40), kind="text"),
            Cell(", ".join(_votes(results, case, 5, 40)), kind="text"),
        )
        for case in cases
    )
    counted = "Rows are counted from 1 in the file." if in_file else "Rows are counted from 0 in the test part."
    note = f"{arm.label}, λ={formats.diversity(run.diversity)}, seed {run.seed}; most disputed first. {counted}"
    columns = (Column("Row of the file" if in_file else "Test row"), Column("Class"), Column("Votes of the members"))
    return Table("The test rows the members dispute most", columns, (Section("", rows),), note)


def _first(
    results: Results, arms: Sequence[Arm], read: Callable[[Mapping[str, Array]], list[Disputed]]
) -> tuple[Arm, Run, list[Disputed]] | None:
    for arm in arms:
        best = lowest(results, arm)
        for run in results.finished(arm, best) if best is not None else ():
            if cases := read(results.arrays(run)):
                return arm, run, cases
    return None


def _sheet(results: Results, arm: Arm, run: Run, cases: list[Disputed]) -> Sketch:
    told = "; ".join(
        f"case {case.position}, true class {_class(results, case.target)}, votes {', '.join(_votes(results, case))}"
        for case in cases
    )
    rows = -(-len(cases) // COLUMNS)
    return Sketch(
        "disputed",
        "disputed",
        "The test images the members dispute most",
        f"{arm.label}, λ={formats.diversity(run.diversity)}, seed {run.seed}. Above each image its true class, "
        f"below it the votes of the {arm.num_members} members.",
        f"{formats.count(len(cases), 'test image')} with true class and the members' votes: {told}.",
        partial(_draw_sheet, results, cases, rows),
        height=0.4 + 2.05 * rows,
        photographs=True,
    )


def _class(results: Results, index: int, width: int = 14) -> str:
    classes = results.data.classes
    return name(classes[index], width) if 0 <= index < len(classes) else str(index)


def _votes(results: Results, case: Disputed, most: int = 3, width: int = 14) -> list[str]:
    lines = [f"{_class(results, label, width)} × {number}" for label, number in case.votes[:most]]
    rest = sum(number for _, number in case.votes[most:])
    return [*lines, f"others × {rest}"] if rest else lines


def _draw_sheet(results: Results, cases: list[Disputed], rows: int, figure: Figure, theme: Theme) -> None:
    panels = figure.subplots(rows, COLUMNS, squeeze=False).ravel()
    for axes in panels:
        axes.set_axis_off()
    for axes, case in zip(panels, cases, strict=False):
        grey = {"cmap": "gray_r" if theme.name == "light" else "gray", "vmin": 0, "vmax": 255}
        if case.image is not None:
            axes.imshow(case.image, **(grey if case.image.ndim == 2 else {}), interpolation="nearest")
        axes.set_title(_class(results, case.target), fontsize=10.5, fontweight="bold", pad=3)
        text = "\n".join(_votes(results, case))
        axes.text(0.5, -0.04, text, transform=axes.transAxes, ha="center", va="top", fontsize=9.5, linespacing=1.15)
