"""Figures and tables from arrays: reliability, predictions of a regression, contested cases."""

from __future__ import annotations

import base64
import io
from typing import TYPE_CHECKING, Any

import numpy as np

from torchace._figures import HEIGHT, FigureSpec, Theme, add_tooltips, legend
from torchace.lab.report import formats
from torchace.lab.report.formats import at, quantity
from torchace.lab.report.plots import DASHED, arm_style, figure_title, two_diversities
from torchace.lab.report.results import Array, Results
from torchace.lab.report.statistics import best_diversity
from torchace.lab.report.tables import Cell, ReportTable, Row, main_arms, make_table
from torchace.lab.schema.results import ArmSummary

if TYPE_CHECKING:
    from matplotlib.figure import Figure

MOST_CASES = 12  # contested cases to list
MOST_VOTES = 5  # classes to list for a contested case
RELIABILITY = ("reliability_count", "reliability_confidence", "reliability_correct")  # sums by bin


def array_figures(results: Results) -> list[FigureSpec]:
    """Return the figures drawn from arrays."""
    build = _predictions if results.task.name == "regression" else _reliability
    found = [build(results, arm) for arm in main_arms(results) or results.arms]
    return [spec for spec in found if spec]


def _reliability(results: Results, arm: ArmSummary) -> FigureSpec | None:
    curves: dict[float, tuple[Array, Array, Array]] = {}  # confidence, accuracy and share of cases of non-empty bins
    for diversity in two_diversities(results, arm):
        arrays = [results.arrays(run) for run in results.finished(arm, diversity)]
        recorded = [[a[key] for key in RELIABILITY] for a in arrays if RELIABILITY[0] in a]
        total: Array = np.asarray(recorded, dtype=np.float64).sum(0)  # (3, bins)
        if recorded and total[0].any():
            count, confidence, correct = total[:, total[0] > 0]
            curves[diversity] = confidence / count, correct / count, count / count.sum()
    if not curves:
        return None

    def draw(figure: Figure, theme: Theme) -> None:
        axes = figure.add_subplot()
        start = min(float(confidence.min()) for confidence, _, _ in curves.values())
        axes.plot([start, 1], [start, 1], color=theme.quiet, lw=1, ls=DASHED)
        colors = [theme.quiet, arm_style(results, arm, theme)[0]][-len(curves) :]
        for color, marker, (diversity, (x, y, share)) in zip(colors, "os", curves.items(), strict=False):
            [line] = axes.plot(x, y, color=color, lw=1.4, marker=marker, label=at(diversity))
            points = np.stack([x, y, share], 1)
            texts = [f"confidence {a:.3f}, accuracy {b:.3f}, {100 * c:.1f} % of cases" for a, b, c in points]
            add_tooltips(line, [f"{at(diversity)}: {text}" for text in texts])
        axes.set(xlabel="confidence", ylabel="accuracy")
        legend(figure, *axes.get_legend_handles_labels())

    title = figure_title(results, "Reliability", arm)
    together = "All seeds together. " * (len(results.experiment.seeds) > 1)
    caption = f"{together}Above the diagonal the ensemble is underconfident, below it overconfident."
    name = f"reliability_{results.arms.index(arm)}"
    return FigureSpec(name, "calibration", title, caption, title, draw)


def _predictions(results: Results, arm: ArmSummary) -> FigureSpec | None:
    """Predictions against observed values, at the best λ and the first seed that recorded them."""
    runs = [run for d in reversed(two_diversities(results, arm)) for run in results.finished(arm, d)]
    run = next((run for run in runs if results.arrays(run).get("predicted", np.empty(0)).size), None)
    if run is None:
        return None
    predicted, observed = (results.arrays(run)[key].astype(np.float64) for key in ("predicted", "observed"))
    size = len(observed)

    def draw(figure: Figure, theme: Theme) -> None:
        axes = figure.add_subplot()
        both = np.concatenate([observed, predicted])
        low, high = float(both.min()), float(both.max())
        margin = 0.04 * (high - low) or abs(high) or 1.0
        limits = (low - margin, high + margin)
        axes.plot(limits, limits, color=theme.quiet, lw=1, ls=DASHED)
        style: dict[str, Any] = {"ls": "", "marker": "o", "ms": 4, "mew": 0, "alpha": 0.75 if size <= 200 else 0.4}
        [dots] = axes.plot(observed, predicted, color=arm_style(results, arm, theme)[0], **style)
        pairs = zip(observed.tolist(), predicted.tolist(), strict=True)
        add_tooltips(dots, [f"observed {quantity(o)}, predicted {quantity(p)}" for o, p in pairs])
        axes.set(xlim=limits, ylim=limits, aspect="equal", xlabel="observed", ylabel="predicted")

    title = figure_title(results, "Predicted and observed", arm)
    caption = f"A dot is a test row; on the line, the prediction is exact. {at(run.diversity)}, seed {run.seed}."
    if size < results.data.test:
        caption += f" {size:,} of {results.data.test:,} test rows are drawn."
    name = f"predicted_{results.arms.index(arm)}"
    return FigureSpec(name, "predictions", title, caption, title, draw, HEIGHT + 0.7)


def contested_table(results: Results) -> ReportTable | None:
    """Table of the test cases on which members disagree most, of the first run at a best λ that recorded any."""
    best = [(arm, best_diversity(results, arm)) for arm in main_arms(results)]
    runs = [(arm, run) for arm, diversity in best if diversity is not None for run in results.finished(arm, diversity)]
    arm, run = next(((a, r) for a, r in runs if len(results.arrays(r).get("disputed_votes", ()))), (None, None))
    if arm is None or run is None:
        return None
    arrays, rows = results.arrays(run), list[Row]()
    in_file = "disputed_row" in arrays
    for i, votes in enumerate(arrays["disputed_votes"]):  # (K,)
        classes, counts = np.unique(votes, return_counts=True)
        if len(classes) == 1:
            continue
        ranked = sorted(zip(-counts, classes, strict=True))
        texts = [f"{_class_name(results, label)} ({-count})" for count, label in ranked[:MOST_VOTES]]
        if rest := -sum(count for count, _ in ranked[MOST_VOTES:]):
            texts.append(f"others ({rest})")
        image = _data_uri(arrays["disputed_images"][i]) if "disputed_images" in arrays else ""
        place = arrays["disputed_row" if in_file else "disputed_index"][i]
        rows.append(
            [Cell(f"{place:,}", image=image), _class_name(results, arrays["disputed_target"][i]), ", ".join(texts)]
        )
    if not rows:
        return None
    counted = "Rows are counted from 1 in the file." if in_file else "Cases are counted from 0 in the test set."
    note = f"Most contested first. {counted}"
    if not results.model:
        note = f"{formats.capitalize(arm.label)}, {at(run.diversity)}, seed {run.seed}. {note}"
    columns = ("Row of the file" if in_file else "Test case", "Class", "Votes of the members")
    return make_table("Test cases on which members disagree most", columns, [("", rows[:MOST_CASES])], note, "ntt")


def _data_uri(image: Array) -> str:
    from PIL import Image

    buffer = io.BytesIO()
    Image.fromarray(image).save(buffer, "png")
    return f"data:image/png;base64,{base64.b64encode(buffer.getvalue()).decode()}"


def _class_name(results: Results, index: int) -> str:
    classes = results.data.classes
    return formats.shorten(classes[index], 40) if 0 <= index < len(classes) else str(index)
