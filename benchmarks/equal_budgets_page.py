"""Write docs/results/equal_budgets.md from the JSON files of `equal_budgets.py` in docs/results.

python benchmarks/equal_budgets_page.py
"""

from __future__ import annotations

from typing import Any

import measure
from page_text import (
    RESULTS,
    Values,
    difference,
    fold,
    interval_text,
    is_significant,
    mean_and_sd,
    read_json,
    setup_text,
    signed,
)

FILES = ("equal_budgets_4", "equal_budgets_8", "equal_budgets_16")
SCORES = {
    "error": ("error, %", 100.0, 2),
    "cross_entropy": ("cross entropy", 1.0, 4),
    "calibration_error": ("calibration error", 1.0, 4),
}
SINGLE = {"wider": "one wider network", "deeper": "one deeper network"}


class Width:
    """Results of members of one width."""

    def __init__(self, entry: dict[str, Any], file: dict[str, Any]) -> None:
        self.entry, self.file, self.width = entry, file, entry["width"]
        self.chosen = float(entry["chosen"]["diversity"])
        self.validation = {float(key): value for key, value in entry["chosen"]["validation"].items()}
        self.contenders = {f"λ={self.chosen:g}": ("members", self.chosen), "λ=0": ("members", 0.0)}
        self.contenders |= {label: (arm, 0.0) for arm, label in SINGLE.items()}

    def values(self, contender: str, score: str, split: str = "test") -> Values:
        """Return a score by seed."""
        arm, diversity = self.contenders[contender]
        found = {}
        for run in self.entry["runs"]:
            if (run["arm"], run["diversity"]) == (arm, diversity):
                scores = run.get(split, run)
                found[run["seed"]] = 1 - scores["accuracy"] if score == "error" else scores[score]
        return found

    def shifted(self, contender: str, shift: str, score: str) -> Values:
        """Return a score on shifted images by seed."""
        key = (*self.contenders[contender], shift)
        rows = [row for row in self.entry["shifted"] if (row["arm"], row["diversity"], row["shift"]) == key]
        return {row["seed"]: row[score] for row in rows if score in row}

    def wins(self) -> dict[str, list[str]]:
        """Return the scores that λ improves significantly, by opponent."""
        found: dict[str, list[str]] = {}
        best, *others = self.contenders
        for other in others:
            found[other] = []
            for score, (label, _, _) in SCORES.items():
                estimate = difference(self.values(best, score), self.values(other, score))
                if estimate is not None and estimate.mean < 0 and is_significant(estimate, self.tests):
                    found[other].append(label.removesuffix(", %"))
        return found

    @property
    def tests(self) -> int:
        return len(SCORES) * (len(self.contenders) - 1)

    def section(self) -> list[str]:
        """Return the section of this width."""
        best, *others = self.contenders
        networks, design = self.entry["networks"], self.file["design"]
        rows = []
        for contender, (arm, _) in self.contenders.items():
            size = networks[arm]
            name = f"{design['num_members']} members, {contender}" if arm == "members" else contender
            rows.append(
                [
                    f"{name} (ResNet-{size['depth']}, width {size['width']})",
                    f"{size['parameters']:,}",
                    f"{size['operations'] / 1e6:.2f}",
                    mean_and_sd(self.values(contender, "train_cross_entropy", "train"), 3),
                    *(mean_and_sd(self.values(contender, s), digits, f) for s, (_, f, digits) in SCORES.items()),
                    f"{100 * _mean(self.values(contender, 'disagreement')):.1f}" if arm == "members" else "–",
                ]
            )
        labels = [label for label, _, _ in SCORES.values()]
        header = ["", "parameters", "operations, millions", "training cross entropy", *labels, "disagreement, %"]
        compared = []
        for other in others:
            cells = [f"{best} minus {other}"]
            for score, (_, factor, digits) in SCORES.items():
                estimate = difference(self.values(best, score), self.values(other, score))
                text = "–" if estimate is None else interval_text(estimate, digits, factor=factor, tests=self.tests)
                cells.append(text)
            compared.append(cells)
        planned = self.file["design"]["diversities"]
        chosen = ", ".join(f"λ={d:g} {_loss_text(self.validation.get(d))}" for d in planned)
        return [
            f"## Width {self.width}",
            "",
            measure.table(header, rows),
            "",
            measure.table(["", "error, points", *labels[1:]], compared),
            "",
            f"Validation cross entropy (two other seeds): {chosen}.",
            "",
        ]

    def shifted_rows(self, tests: int) -> list[list[str]]:
        """Return a row for each kind of shifted images."""
        best, zero = list(self.contenders)[:2]
        rows = []
        for shift in dict.fromkeys(row["shift"] for row in self.entry["shifted"]):
            cells = [f"{self.width}", shift.replace("_", "-")]
            for score in ("auroc_mutual_information", "auroc_entropy", "cross_entropy", "calibration_error"):
                own, level = self.shifted(best, shift, score), self.shifted(zero, shift, score)
                estimate = difference(own, level) if own and level else None
                if estimate is None:
                    cells += ["–"]
                    continue
                digits = 3 if score.startswith("auroc") else 4
                cells += [f"{_mean(level):.{digits}f}: {interval_text(estimate, digits, tests=tests)}"]
            rows.append(cells)
        return rows


def _loss_text(value: float | None) -> str:
    """Format a validation loss; above log C = 2.3 a training has diverged. None: all its runs stopped."""
    return "without a finished run" if value is None else f"{value:.4f}" if value < 2.4 else "diverged"


def size_text(widths: list[Width], arm: str) -> str:
    """Compare parameters and operations of one network with those of all members."""
    texts = []
    for name in ("parameters", "operations"):
        ratios = [w.entry["networks"][arm][name] / w.entry["networks"]["members"][name] - 1 for w in widths]
        low, high = (signed(100 * value, 0) for value in (min(ratios), max(ratios)))
        texts.append(f"{name} {low if low == high else f'{low} to {high}'} %")
    return ", ".join(texts)


def _mean(values: Values) -> float:
    return sum(values.values()) / len(values)


def finding(widths: list[Width]) -> str:
    """Return the first paragraph."""
    gains, worse = [], []
    for width in widths:
        best = next(iter(width.contenders))
        if "cross entropy" in width.wins()["λ=0"]:
            change = _mean(width.values(best, "cross_entropy")) / _mean(width.values("λ=0", "cross_entropy")) - 1
            gains.append(f"{100 * change:+.1f} % at width {width.width}".replace("-", "−"))
        rise = difference(width.values(best, "calibration_error"), width.values("λ=0", "calibration_error"))
        if rise is not None and rise.mean > 0 and is_significant(rise, width.tests):
            worse.append(width)
    text = f"λ lowers the cross entropy of four small ResNets ({', '.join(gains)})" if gains else "λ gains nothing"
    all_three = [w for w in widths if all(len(scores) == len(SCORES) for scores in w.wins().values())]
    if all_three:
        names = ", ".join(str(w.width) for w in all_three)
        return f"**{text}. At width {names} it also beats one larger network, in all three scores.**"
    some = any(scores for w in widths for other, scores in w.wins().items() if other != "λ=0")
    more = "" if some else ", but one network with as many parameters or operations has a lower one"
    cost = " λ raises the calibration error." if len(worse) == len(widths) else ""
    return f"**{text}{more}.**{cost} At no size is λ better in error, cross entropy and calibration together."


def main() -> None:
    files = [file for name in FILES if (file := read_json(name)) is not None]
    widths = [Width(entry, file) for file in files for entry in file["widths"] if entry["runs"] and entry["chosen"]]
    design = files[0]["design"]
    epochs = ", ".join(f"{w.file['design']['epochs']} at width {w.width}" for w in widths)
    lines = [
        "# Equal budgets: many small networks or one large one",
        "",
        finding(widths),
        "",
        "![Error, cross entropy and calibration error by width](../figures/equal_budgets.svg)",
        "",
        "*Error bars: standard deviation over seeds.*",
        "",
        f"{design['num_members']} ResNet-{design['depth']} on CIFAR-10, with the λ that two other seeds chose on "
        "validation images, against the same at λ=0, one network of twice the width "
        f"({size_text(widths, 'wider')}) and one deeper network ({size_text(widths, 'deeper')}).",
        "",
    ]
    for width in widths:
        lines += width.section()
    lines += [
        f"Mean ± standard deviation over {len(design['seeds'])} seeds. Operations: multiplications of a forward pass "
        "of all members. Brackets: joint 95 % intervals of the 9 paired differences of a width (Bonferroni), for new "
        "seeds; bold: without zero. Calibration error: 15 bins, top label.",
        "",
    ]
    number = sum(len({row["shift"] for row in width.entry["shifted"]}) for width in widths)
    shifted = [row for width in widths for row in width.shifted_rows(number)]
    changed, entropy = (sum(row[column].endswith("**") for row in shifted) for column in (2, 3))
    if shifted:
        header = [
            "width",
            "images",
            "AUROC, mutual information",
            "AUROC, entropy",
            "cross entropy",
            "calibration error",
        ]
        lines += [
            "## Shifted images",
            "",
            f"λ changes the AUROC of mutual information significantly in {changed} of {number} rows, that of entropy "
            f"in {entropy}.",
            "",
            fold("All rows", measure.table(header, shifted)),
            "",
            "Each cell: the value at λ=0 and the paired change at the chosen λ, with a joint 95 % interval for "
            f"{number} rows (Bonferroni). AUROC: how well a score separates these images from CIFAR-10's test "
            "images. MNIST and Fashion-MNIST have 32x32 pixels and three equal channels. Noise: standard deviation "
            "25 of 255; blur: 5x5, binomial; contrast: 40 %; pixelation: 16x16. "
            + (
                "Held-out classes: trained on eight classes, tested on the other two."
                if any(row[1] == "held-out classes" for row in shifted)
                else "Held-out classes were not run."
            ),
            "",
        ]
    lines += [
        "## Setup",
        "",
        f"Epochs: {epochs}, chosen beforehand (30 were planned at every width). "
        + ("" if any(w.width == 16 for w in widths) else "Width 16 was planned and not run. ")
        + "5,000 images for validation. "
        + setup_text(*files),
        "",
        "`benchmarks/equal_budgets.py` trains, `benchmarks/equal_budgets_page.py` writes this page. Numbers: "
        + ", ".join(f"[{name}.json]({name}.json)" for name in FILES if read_json(name) is not None)
        + ".",
    ]
    (RESULTS / "equal_budgets.md").write_text("\n".join(lines) + "\n", "utf-8")


if __name__ == "__main__":
    main()
