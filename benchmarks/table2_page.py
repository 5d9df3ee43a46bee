"""Write docs/results/table2.md from the runs in docs/results/table2_full: the paper's Table 2, claim by claim.

    python benchmarks/table2_page.py

More seeds: put their result files (`runs/*.json` of `torchace run table2`) into the folder, name their code in
`PROVENANCE`, and run this again; columns need not have the same seeds. Runs of a seed that the folder has already go to
docs/results/table2_repeated: the page then says how far they differ.
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
NUMBERS = {1: "One", 2: "Two", 3: "Three", 4: "Four", 5: "Five"}
PROVENANCE = (
    "K=1 and λ = 0, 0.05, 0.1 and 0.5 of seeds 0 and 1 were trained on 2026-11-15 and 16 (commit not recorded), "
    "λ = 0.001, 0.01 and 0.3 of seeds 0 and 1 at commit 32c3c84 on 2026-11-16, with torchace 0.1.0 and hand-written "
    "convolutions that later versions replaced by grouped ones. Of seed 2, λ = 0, 0.05, 0.1 and 0.5 were trained at "
    "commit 53096bc on 2026-11-18, the other columns at commit df0c2cd on 2026-11-19, with torchace 0.2.0 and grouped "
    "convolutions, four and five runs at once in 1,352 and 1,454 seconds. K=1 of seed 2 was trained as ten heads that "
    "start equal and stay equal (`benchmarks/table2_runs.py`), to share a network with the others."
)


def read_columns(folder: str = "table2_full") -> dict[Column, dict[int, dict[str, Any]]]:
    """Return the runs by column and seed."""
    found: dict[Column, dict[int, dict[str, Any]]] = {}
    for file in sorted((RESULTS / folder).glob("*.json")):
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
    """Scores by column and seed."""

    def __init__(self) -> None:
        self.columns = read_columns()
        self.seeds = sorted(set.union(*(set(runs) for runs in self.columns.values())))
        self.pairs = [(column, seed) for column, runs in self.columns.items() for seed in sorted(runs)]
        design = np.array(
            [
                [column == c for c in self.columns] + [seed == other for other in self.seeds[1:]]
                for column, seed in self.pairs
            ],
            dtype=float,
        )
        self.design, self.inverse = design, np.linalg.pinv(design.T @ design)
        self.degrees = len(design) - int(np.linalg.matrix_rank(design))
        self.paper = {}
        paper = load_experiment("table2").paper
        assert paper is not None
        for row in paper.rows:
            self.paper[row.num_members, row.diversity or 0.0] = {
                "error": row.error / 100,
                "cross_entropy": row.cross_entropy,
            }

    def spread(self, name: str) -> float:
        """Return the standard deviation over seeds, on average over columns."""
        values = [[run[name] for run in runs.values()] for runs in self.columns.values() if len(runs) > 1]
        return float(np.mean([np.std(column, ddof=1) for column in values]))

    def difference(self, name: str, column: Column, reference: Column) -> MeanEstimate:
        """Return the mean difference, adjusted for seeds; its error is pooled over all columns.

        Least squares of score = column + seed; with the same seeds in all columns, the mean paired difference.
        """
        values = np.array([self.columns[c][seed][name] for c, seed in self.pairs])
        effects = self.inverse @ self.design.T @ values
        variance = float(((values - self.design @ effects) ** 2).sum()) / self.degrees
        order = list(self.columns)
        contrast = np.zeros(len(effects))
        contrast[order.index(column)], contrast[order.index(reference)] = 1.0, -1.0
        error = math.sqrt(variance * float(contrast @ self.inverse @ contrast))
        return MeanEstimate(float(contrast @ effects), error, ((1.0, self.degrees),))

    def describe_seeds(self) -> str:
        """Say which seeds the columns have."""
        complete = [seed for seed in self.seeds if all(seed in runs for runs in self.columns.values())]
        text = f"All eight columns have seeds {', '.join(map(str, complete[:-1]))} and {complete[-1]}"
        for seed in sorted(set(self.seeds) - set(complete)):
            found = [column for column, runs in self.columns.items() if seed in runs]
            diversities = ", ".join(f"{column[1]:g}" for column in found if column != ONE)
            text += f"; seed {seed} has {'K=1 and ' if ONE in found else ''}λ = {diversities}"
        return text + ". "

    def count_seeds(self) -> str:
        """Return the number of seeds of a column in words, or the fewest and the most."""
        counts = sorted({len(runs) for runs in self.columns.values()})
        words = [NUMBERS[count] for count in counts]
        return f"{words[0]} seeds" if len(words) == 1 else f"{words[0]} or {words[-1].lower()} seeds"

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
        cells = [f"{label(column)} minus {label(reference)}"]
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
        ["λ=0.1 has a lower cross entropy than λ=0", verdict("cross_entropy", (10, 0.1), ZERO)],
        ["λ=0.5 has a much higher cross entropy than λ=0", verdict("cross_entropy", (10, 0.5), ZERO)],
        [
            "Ten classifiers cost few parameters",
            f"**Confirmed.** {ten:,} instead of {one:,}, {100 * (ten / one - 1):.2f} % more",
        ],
        [
            "Ten classifiers are an ensemble",
            f"**Not reproduced.** Two heads differ on at most {100 * heads:.3f} % of the test images: they are copies",
        ],
    ]
    return [measure.table(["the paper's Table 2", "these runs"], rows)]


def describe_repetition(table: Table) -> str:
    """Compare runs that were repeated with later code."""
    texts = []
    for column, runs in read_columns("table2_repeated").items():
        for seed, run in runs.items():
            first = table.columns[column][seed]
            texts.append(
                f"{label(column)}, seed {seed}: error {100 * run['error']:.2f} % instead of {100 * first['error']:.2f} "
                f"%, cross entropy {run['cross_entropy']:.4f} instead of {first['cross_entropy']:.4f}"
            )
    if not texts:
        return "No run has been repeated with later code. "
    spread = f"{100 * table.spread('error'):.2f} points and {table.spread('cross_entropy'):.4f}"
    return f"Repeated at commit df0c2cd: {'; '.join(texts)}. The standard deviation over seeds is {spread}. "


def main() -> None:
    table = Table()
    tests = len(table.columns) - 1
    estimates = {name: table.difference(name, ZERO, ONE) for name in SCORES}
    width = {name: found.mean - found.interval(ALPHA / tests)[0] for name, found in estimates.items()}
    pairs = [(column, ONE if column == ZERO else ZERO) for column in table.columns if column != ONE]
    small = not any(is_significant(table.difference(name, *pair), tests) for name in SCORES for pair in pairs)
    number = table.count_seeds()
    finding = (
        "**At the paper's full length, ten classifiers on one ResNet-110 are copies of each other. Neither their "
        f"number nor λ has an effect that {number.lower()} could show.**"
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
        f"The setup reproduces the paper's baseline: {100 * mean:.2f} % error with K=1; the paper has "
        f"{100 * table.paper[ONE]['error']:.2f} %. Columns differ about as much as trainings of one column: the "
        f"standard deviation over seeds, averaged over columns, is {100 * table.spread('error'):.2f} points of error "
        f"and {table.spread('cross_entropy'):.4f} of cross entropy.",
        "",
        f"**{number} are few.** The paper reports one number per column, without seeds. {table.describe_seeds()}"
        f"The joint intervals of the differences are ±{100 * width['error']:.2f} points and "
        f"±{width['cross_entropy']:.3f}. Most of the paper's differences are smaller: these runs can neither confirm "
        "nor exclude them.",
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
        f"pooled over all columns: the residuals of score = column + seed, with {table.degrees} degrees of freedom.",
        "",
        "## Setup",
        "",
        "`torchace run table2`: ResNet-110, 64,000 steps of batches of 128, bf16, one NVIDIA H200, torch 2.11.0. "
        f"{PROVENANCE} {describe_repetition(table)}"
        "The control (one classifier with small initial weights) is the experiment `table2_control`; it has not been "
        "run at full length. [At a quarter of the length](table2_short.md), it was run with four seeds.",
        "",
        "One file per run, with its training curve: `docs/results/table2_full`. Written by "
        "`benchmarks/table2_page.py`.",
    ]
    (RESULTS / "table2.md").write_text("\n".join(lines) + "\n", "utf-8")


if __name__ == "__main__":
    main()
