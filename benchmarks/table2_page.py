"""Write docs/results/table2.md from the runs in docs/results/table2_full: the paper's Table 2, claim by claim.

    python benchmarks/table2_page.py

More seeds: put their result files (`runs/*.json` of `torchace run table2`) into the folder and run this again.
"""

from __future__ import annotations

import json
import math
from typing import Any

import measure
import numpy as np
from page_text import ALPHA, RESULTS, interval_text, is_significant, signed

from torchace._statistics import MeanEstimate
from torchace.lab.sweeps.config import load_experiment

SCORES = {"error": ("Error, points", 100.0, 2), "cross_entropy": ("Cross entropy", 1.0, 4)}
Column = tuple[int, float]  # K and λ
ONE, ZERO = (1, 0.0), (10, 0.0)


def read_columns() -> dict[Column, dict[int, dict[str, Any]]]:
    """Return the runs by column and seed."""
    found: dict[Column, dict[int, dict[str, Any]]] = {}
    for file in sorted((RESULTS / "table2_full").glob("*.json")):
        run = json.loads(file.read_text("utf-8"))
        scores = run["metrics"]["test"]
        found.setdefault((run["num_members"], run["diversity"]), {})[run["seed"]] = {
            "error": 1 - scores["accuracy"],
            "cross_entropy": scores["cross_entropy"],
            "disagreement": scores["disagreement"],
            "parameters": run["parameters"],
        }
    return dict(sorted(found.items()))


class Table:
    """Scores `(columns, seeds)` of the seeds that all columns have."""

    def __init__(self) -> None:
        self.columns = read_columns()
        self.seeds = sorted(set.intersection(*(set(runs) for runs in self.columns.values())))
        self.index = {column: i for i, column in enumerate(self.columns)}
        self.paper = {}
        paper = load_experiment("table2").paper
        assert paper is not None
        for row in paper.rows:
            self.paper[row.num_members, row.diversity or 0.0] = {
                "error": row.error / 100,
                "cross_entropy": row.cross_entropy,
            }

    def values(self, name: str) -> np.ndarray:
        """Return one score, `(columns, seeds)`."""
        return np.array([[runs[seed][name] for seed in self.seeds] for runs in self.columns.values()])

    def difference(self, name: str, column: Column, reference: Column) -> MeanEstimate:
        """Return the mean paired difference; its error is pooled over all columns.

        The residuals of score = column + seed have (columns - 1)(seeds - 1) degrees of freedom.
        """
        values = self.values(name)
        degrees = (len(values) - 1) * (len(self.seeds) - 1)
        residuals = values - values.mean(1, keepdims=True) - values.mean(0) + values.mean()
        error = math.sqrt(2 * float((residuals**2).sum()) / degrees / len(self.seeds))
        means = values.mean(1)
        return MeanEstimate(float(means[self.index[column]] - means[self.index[reference]]), error, ((1.0, degrees),))

    def paper_difference(self, name: str, column: Column, reference: Column) -> float:
        """Return the difference in the paper."""
        return float(self.paper[column][name] - self.paper[reference][name])


def label(column: Column) -> str:
    return "K=1" if column == ONE else f"K=10, λ={column[1]:g}"


def result_table(table: Table) -> str:
    """Return all columns beside the paper's."""
    rows = []
    for column, runs in table.columns.items():
        cells = [label(column)]
        for name, (_, factor, digits) in SCORES.items():
            own = ", ".join(f"{factor * runs[seed][name]:.{digits}f}" for seed in sorted(runs))
            cells += [own, f"{factor * table.paper[column][name]:.{digits}f}"]
        differ = [runs[seed]["disagreement"] for seed in sorted(runs)]
        rows.append([*cells, "–" if column == ONE else ", ".join(f"{100 * share:.3f}" for share in differ)])
    header = ["", "error, %, by seed", "paper", "cross entropy, by seed", "paper", "pairs of heads that differ, %"]
    return measure.table(header, rows)


def difference_table(table: Table) -> str:
    """Return the paired differences beside the paper's, and whether they agree."""
    pairs = [(ZERO, ONE), *((column, ZERO) for column in table.columns if column not in (ONE, ZERO))]
    rows = []
    for column, reference in pairs:
        cells = [f"{label(column)} less {label(reference)}"]
        for name, (_, factor, digits) in SCORES.items():
            found = table.difference(name, column, reference)
            cells.append(interval_text(found, digits, factor=factor, tests=len(pairs)))
            cells.append(signed(factor * table.paper_difference(name, column, reference), digits))
        rows.append(cells)
    return measure.table(["", "error, points", "paper", "cross entropy", "paper"], rows)


def claims(table: Table) -> list[str]:
    """Return the paper's claims with what the runs say."""
    tests = len(table.columns) - 1

    def verdict(name: str, column: Column, reference: Column) -> str:
        _, factor, digits = SCORES[name]
        found, paper = table.difference(name, column, reference), table.paper_difference(name, column, reference)
        low, high = found.interval(ALPHA / tests)
        if low <= 0 <= high:
            seen = "Open" if low <= paper <= high else "Not reproduced"
        else:
            seen = "Confirmed" if paper * found.mean > 0 else "Not reproduced"
        inside = "inside" if low <= paper <= high else "outside"
        text = interval_text(found, digits, factor=factor, tests=tests)
        return f"**{seen}.** {text}; the paper's {signed(factor * paper, digits)} lies {inside} the interval"

    heads = max(runs[seed]["disagreement"] for c, runs in table.columns.items() if c != ONE for seed in runs)
    one, ten = (next(iter(table.columns[column].values()))["parameters"] for column in (ONE, ZERO))
    rows = [
        ["Ten classifiers make fewer errors than one", verdict("error", ZERO, ONE)],
        ["λ=0.05 makes fewer errors than λ=0", verdict("error", (10, 0.05), ZERO)],
        ["λ=0.1 has the lowest cross entropy", verdict("cross_entropy", (10, 0.1), ZERO)],
        ["λ=0.5 has a much higher cross entropy", verdict("cross_entropy", (10, 0.5), ZERO)],
        [
            "Ten classifiers cost few parameters",
            f"**Confirmed.** {ten:,} against {one:,}, {100 * (ten / one - 1):.2f} % more",
        ],
        [
            "Ten classifiers are an ensemble",
            f"**Not reproduced.** Two heads differ on at most {100 * heads:.3f} % of the test images: one head",
        ],
    ]
    return [measure.table(["the paper's Table 2", "these runs"], rows)]


def main() -> None:
    table = Table()
    spread = {name: table.values(name).std(1, ddof=1) for name in SCORES}
    tests = len(table.columns) - 1
    estimates = {name: table.difference(name, ZERO, ONE) for name in SCORES}
    width = {name: found.mean - found.interval(ALPHA / tests)[0] for name, found in estimates.items()}
    pairs = [(column, ONE if column == ZERO else ZERO) for column in table.columns if column != ONE]
    small = not any(is_significant(table.difference(name, *pair), tests) for name in SCORES for pair in pairs)
    seeds = len(table.seeds)
    number = {2: "Two seeds", 3: "Three seeds", 5: "Five seeds"}.get(seeds, f"{seeds} seeds")
    finding = (
        "**At the paper's full length, ten classifiers on one ResNet-110 do what one does, and λ changes nothing that "
        f"{number.lower()} can show.**"
        if small
        else "**At the paper's full length, some columns differ significantly; see the differences.**"
    )
    one = table.columns[ONE]
    mean = np.mean([run["error"] for run in one.values()])
    lines = [
        "# Table 2: SMOC on CIFAR-10",
        "",
        finding,
        "",
        f"The recipe reproduces the paper's baseline: {100 * mean:.2f} % error with K=1, the paper has "
        f"{100 * table.paper[ONE]['error']:.2f} %. The differences between columns are about as large as those between "
        f"trainings of one column: the standard deviation over seeds is {100 * spread['error'].mean():.2f} points of "
        f"error and {spread['cross_entropy'].mean():.4f} of cross entropy, on average over columns.",
        "",
        f"**{number} are few.** The paper reports one number a column, without seeds. All eight columns are complete "
        f"for seeds {', '.join(map(str, table.seeds))}; "
        + ("a third seed is missing. " if seeds < 3 else "")
        + f"The joint intervals of the differences are ±{100 * width['error']:.2f} points and "
        f"±{width['cross_entropy']:.3f}. Most of the paper's differences are smaller, so that these runs can neither "
        "confirm nor exclude them.",
        "",
        "## Claim by claim",
        "",
        *claims(table),
        "",
        "![Error and cross entropy of the eight columns, with the paper's](../figures/table2.svg)",
        "",
        "Each point is one training; crosses are the paper's numbers. The paper's cross entropy at λ=0.5, 0.4957, is "
        "off the scale.",
        "",
        "## All columns",
        "",
        result_table(table),
        "",
        "## Paired differences",
        "",
        difference_table(table),
        "",
        f"Differences are paired by seed: the same initial weights and batches. Brackets: joint 95 % intervals for "
        f"{len(table.columns) - 1} comparisons (Bonferroni); bold: the interval excludes zero. Their standard error is "
        "pooled over all columns: the residuals of score = column + seed, with "
        f"{(len(table.columns) - 1) * (seeds - 1)} degrees of freedom.",
        "",
        "## Setup",
        "",
        "`torchace run table2`: ResNet-110, 64,000 steps of batches of 128, bf16, one NVIDIA H200, torch 2.11.0, "
        "torchace 0.1.0. K=1 and λ = 0, 0.05, 0.1 and 0.5 were trained on 2026-11-15 and 16 (commit not recorded), λ = "
        "0.001, 0.01 and 0.3 at commit 32c3c84 on 2026-11-16. Both used hand-written convolutions that later versions "
        "replaced by grouped ones, and no column has been repeated since. The control arm (one classifier with small "
        "initial weights) is an experiment of its own, `table2_control`; at full length it has not been run. "
        "[A quarter of the length](table2_short.md) has it, with four seeds.",
        "",
        "One file a run, with its training curve: `docs/results/table2_full`. Written by `benchmarks/table2_page.py`.",
    ]
    (RESULTS / "table2.md").write_text("\n".join(lines) + "\n", "utf-8")


if __name__ == "__main__":
    main()
