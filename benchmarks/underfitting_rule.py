"""How often the rule of docs/results/underfitting.md is right, for its page."""

from __future__ import annotations

import json
from collections.abc import Iterable
from pathlib import Path
from statistics import fmean, median
from typing import Any, NamedTuple

from torchace.diagnosis.advice import MANY_SAMPLES, DiversityAdvice, advise_diversity, is_overfit

RESULTS = Path(__file__).parents[1] / "docs" / "results"
WORTHWHILE = 0.01  # relative gain from which λ > 0 pays
START = 0.3  # the rule's λ
TITLES = {"mnist": "MNIST", "fashion_mnist": "Fashion-MNIST"}
SYNTHETIC = "synthetic table"
KNOWN = {  # title and number of classes of the data whose gains were known when the rule was chosen
    "mnist": ("MNIST", 10),
    "fashion_mnist": ("Fashion-MNIST", 10),
    "mnist_early": ("MNIST, stopped early", 10),
    "fashion_mnist_early": ("Fashion-MNIST, stopped early", 10),
    "mnist_noisy": ("MNIST, 20 % of the labels random", 10),
    "mnist_two": ("MNIST, even or odd", 2),
    "mnist_two_noisy": ("MNIST, even or odd, 20 % of the labels random", 2),
    "fashion_two": ("Fashion-MNIST, even or odd", 2),
    "fashion_five": ("Fashion-MNIST, pairs of classes", 5),
    "cifar": ("CIFAR-10, gray, 16x16", 10),
    "cifar_two": ("CIFAR-10, gray, 16x16, vehicle or animal", 2),
    "digits": ("scikit-learn's digits", 10),
    "letters": ("letters", 26),
    "vowel": ("vowel", 11),
    "hpc": ("hpc_data", 4),
    "dna": ("DNA", 3),
    "spam": ("spam", 2),
    "credit": ("credit_data", 2),
    "churn": ("churn", 2),
    "synthetic_twenty": (SYNTHETIC, 20),
    "synthetic_three": (SYNTHETIC, 3),
    "chess": ("chess", 2),
    "phoneme": ("phoneme", 2),
    "mushroom": ("mushroom", 2),
    "magic": ("magic", 2),
    "wvs": ("WVS", 3),
    "chile": ("Chile", 4),
    "diamonds": ("diamonds", 5),
    "satimage": ("satimage", 6),
    "segment": ("segment", 7),
    "shuttle": ("Shuttle", 7),
    "marketing": ("marketing", 9),
    "penbased": ("penbased", 10),
    "texture": ("texture", 11),
}
NEW: dict[str, tuple[str, int]] = {  # the same of data chosen and trained after the rule was fixed
}
Cell = dict[str, Any]


def read(name: str) -> dict[str, Any] | None:
    file = RESULTS / f"underfitting_{name}.json"
    return json.loads(file.read_text("utf-8")) if file.exists() else None


def losses(cell: Cell) -> dict[str, float]:
    """The ensemble's mean losses at λ=0."""
    return {f"{name}_loss": fmean(cell[name][0]) for name in ("train", "validation")}


def overfits(cell: Cell) -> bool:
    """Whether members overfit at λ=0."""
    return is_overfit(**losses(cell))


def advise(cell: Cell) -> DiversityAdvice:
    """The rule's advice for a cell, from its runs at λ=0."""
    task = "classification" if "disagreement" in cell else "regression"
    sizes = {"num_samples": cell["n"], "num_parameters": cell["parameters"] // 10}
    return advise_diversity(**losses(cell), **sizes, task=task)


def gain_at(results: dict[str, Any], cell: Cell, diversity: float) -> float:
    """Relative reduction of the mean test loss at one λ, over all seeds."""
    level, loss = (fmean(cell["test"][results["diversities"].index(d)]) for d in (0.0, diversity))
    return 1 - loss / level


class Hits(NamedTuple):
    """How often the rule is right, in cells that do not overfit."""

    cells: int
    judged: int
    right: int
    pays: int  # right if one always expects a gain
    lower: int  # cells in which the rule's λ lowers the loss
    advised: int

    @property
    def missed(self) -> int:
        """Gains that the rule does not expect."""
        return (self.judged - self.right - self.advised + self.pays) // 2


def count_hits(results: dict[str, Any]) -> Hits:
    """Count in how many cells the rule is right."""
    judged = [(cell, advise(cell).diversity) for cell in results["cells"] if not overfits(cell)]
    pays = [-cell["relative"] >= WORTHWHILE for cell, _ in judged]
    right = sum(pay == (diversity > 0) for pay, (_, diversity) in zip(pays, judged, strict=True))
    advised = [gain_at(results, cell, diversity) > 0 for cell, diversity in judged if diversity]
    return Hits(len(results["cells"]), len(judged), right, sum(pays), sum(advised), len(advised))


def sum_hits(results: Iterable[dict[str, Any] | None]) -> Hits:
    """Add the hits of several files."""
    return Hits(*map(sum, zip(*(count_hits(found) for found in results if found), strict=True)))


def hit_row(label: str, classes: int | str, hits: Hits) -> str:
    """A row of the table of hit rates."""
    cells, n, right, pays, lower, advised = hits
    return f"| {label} | {classes} | {cells} | {cells - n} | **{right} of {n}** | {pays} | {n - pays} | {lower} of {advised} |"


def hit_table() -> str:
    """The rule's hit rates, apart for data known when it was chosen and for new data."""
    rows = [
        "| cells | classes | number | overfit | pays or not: rule right | always «pays»: right | never: right | "
        f"λ={START:g} lowers the loss where advised |\n| --- | --: | --: | --: | --: | --: | --: | --: |"
    ]
    parts = {"known when the rule was chosen": KNOWN, "chosen and trained afterwards": NEW}
    for title, files in parts.items():
        rows.append(f"| **{title}** | | | | | | | |")
        rows += [hit_row(name, n, count_hits(found)) for key, (name, n) in files.items() if (found := read(key))]
        rows.append(hit_row("sum", "", sum_hits(map(read, files))))
    return "\n".join(rows)


def list_gains(*, many: bool) -> list[float]:
    """Relative gains at the rule's λ in all cells with many, or few, samples that do not overfit."""
    found = []
    for results in filter(None, map(read, KNOWN | NEW)):
        cells = [cell for cell in results["cells"] if not overfits(cell) and (cell["n"] >= MANY_SAMPLES) == many]
        found += [gain_at(results, cell, START) for cell in cells]
    return found


def describe_hits() -> str:
    """Summarize the hit rates."""
    new, many, few = sum_hits(map(read, NEW)), list_gains(many=True), list_gains(many=False)
    return (
        f"**On {len(NEW)} data sets chosen and trained after the rule was fixed, it is right in {new.right} of "
        f"{new.judged} cells; «always» is right in {new.pays}, «never» in {new.judged - new.pays}.** It misses "
        f"{new.missed} of {new.pays} gains; where it expects one, λ={START:g} lowers the loss in {new.lower} of "
        f"{new.advised} cells.\n\n"
        f"In all cells with at least {MANY_SAMPLES:,} samples, λ={START:g} lowers the mean test loss in "
        f"{sum(gain > 0 for gain in many)} of {len(many)}, by {100 * median(many):.1f} % in the median (mean "
        f"{100 * fmean(many):.1f} %, worst case {100 * min(many):+.1f} %). With fewer samples it lowers it in "
        f"{sum(gain > 0 for gain in few)} of {len(few)}, by {100 * median(few):.1f} % in the median (worst case "
        f"{100 * min(few):+.1f} %)."
    )
