"""Write docs/results/heads.md from docs/results/heads.json.

python benchmarks/heads_page.py
"""

from __future__ import annotations

from typing import Any

import measure
from page_text import RESULTS, Values, difference, interval_text, is_significant, mean_and_sd, read_json, setup_text

LABELS = {
    "plain": "linear heads (SMOC)",
    "own_samples": "own samples",
    "mask": "own features",
    "two_layers": "two layers",
    "dropout": "dropout",
    "adapters": "adapted last stage",
    "one": "one network",
}
Key = tuple[str, float]


class Runs:
    """Runs by kind and λ."""

    def __init__(self, rows: list[dict[str, Any]]) -> None:
        self.rows: dict[Key, list[dict[str, Any]]] = {}
        for row in rows:
            self.rows.setdefault((row["arm"], row["diversity"]), []).append(row)

    def values(self, key: Key, score: str) -> Values:
        """Return a score on the test images by seed."""
        found = {}
        for row in self.rows[key]:
            test = row["test"]
            found[row["seed"]] = {
                "error": 1 - test["accuracy"],
                "gain": test["member_cross_entropy"] - test["cross_entropy"],
            }.get(score, test.get(score))
        return found

    def time(self, kind: str) -> float:
        """Return the milliseconds of a step of one run."""
        times = [row["ms_per_step"] for (arm, _), rows in self.rows.items() if arm == kind for row in rows]
        return sum(times) / len(times)

    def paying(self, tests: int) -> list[Key]:
        """Return the kinds with a significantly lower cross entropy than linear heads at λ=0 and than one network."""
        found = []
        for key in self.rows:
            own = self.values(key, "cross_entropy")
            references = [r for r in (("plain", 0.0), ("one", 0.0)) if r in self.rows and r != key]
            estimates = [difference(own, self.values(r, "cross_entropy")) for r in references]
            if key[0] not in ("plain", "one") and all(e and e.mean < 0 and is_significant(e, tests) for e in estimates):
                found.append(key)
        return found


def main() -> None:
    file = read_json("heads")
    assert file is not None
    runs, design = Runs(file["runs"]), file["design"]
    compared = [key for key in runs.rows if key != ("plain", 0.0)]
    plain, rows = runs.time("plain"), []
    for key in runs.rows:
        estimate = (
            None
            if key == ("plain", 0.0)
            else difference(runs.values(key, "cross_entropy"), runs.values(("plain", 0.0), "cross_entropy"))
        )
        rows.append(
            [
                LABELS[key[0]],
                f"{key[1]:g}" if key[0] != "one" else "–",
                mean_and_sd(runs.values(key, "error"), 2, 100),
                mean_and_sd(runs.values(key, "cross_entropy"), 4),
                "–" if estimate is None else interval_text(estimate, 4, tests=len(compared)),
                mean_and_sd(runs.values(key, "gain"), 4) if key[0] != "one" else "–",
                mean_and_sd(runs.values(key, "disagreement"), 2, 100) if key[0] != "one" else "–",
                f"{runs.time(key[0]) / plain:.2f}" if key[0] != "one" else "–",
            ]
        )
    paying = runs.paying(len(compared))
    if paying:
        names = ", ".join(f"{LABELS[kind]} at λ={diversity:g}" for kind, diversity in paying)
        finding = f"**After {design['epochs']} epochs, these are better than linear heads and one network: {names}.**"
    else:
        finding = (
            f"**After {design['epochs']} epochs, no kind of head shows a gain: none has a significantly lower cross "
            "entropy than both linear heads and one network.**"
        )
    best = max(runs.rows, key=lambda key: sum(runs.values(key, "gain").values()))
    loss = difference(runs.values(best, "member_cross_entropy"), runs.values(("plain", 0.0), "member_cross_entropy"))
    gain = sum(runs.values(best, "gain").values()) / len(runs.rows[best])
    assert loss is not None
    reason = (
        f"Single heads get worse by as much as the ensemble gains. “{LABELS[best[0]]}” at λ={best[1]:g} gains most "
        f"over one head, {gain:.4f}; one such head is worse than a linear one at λ=0 by {loss.mean:.4f}."
    )
    least, most = (
        f(sum(v.values()) / len(v) for k in runs.rows if k[0] == "plain" for v in [runs.values(k, "disagreement")])
        for f in (min, max)
    )
    seeds = len(runs.rows["plain", 0.0])
    header = [
        "heads",
        "λ",
        "error, %",
        "cross entropy",
        "minus linear heads at λ=0",
        "gain over one head",
        "disagreement, %",
        "time per step",
    ]
    lines = [
        "# Heads that stay apart",
        "",
        finding,
        "",
        f"Linear heads on one feature vector become copies: two differ on {100 * least:.2f} to {100 * most:.2f} % of "
        "the test images. The other kinds differ by construction.",
        "",
        reason,
        "",
        "![Disagreement and cross entropy by λ](../figures/heads.svg)",
        "",
        "*Error bars: standard deviation over seeds. Dashed: one network.*",
        "",
        measure.table(header, rows),
        "",
        f"ResNet-{design['depth']} on CIFAR-10, K={design['num_members']}. Mean ± standard deviation over {seeds} "
        f"seeds. Brackets: joint 95 % intervals of paired differences for {len(compared)} comparisons (Bonferroni); "
        "bold: the interval excludes zero. Gain over one head: the heads' mean cross entropy minus the ensemble's. "
        "Time per step: relative to linear heads, 15 runs at once; other trainings ran at the same time.",
        "",
        "| heads | separate for each head |",
        "| --- | --- |",
        "| linear heads (SMOC) | a linear layer |",
        "| own samples | a linear layer, and a quarter of each batch (exchanged batches) |",
        f"| own features | a linear layer on a fixed random {100 * design['share']:.0f} % of the 64 features |",
        f"| two layers | a hidden layer of {design['hidden']} units and a linear layer |",
        f"| dropout | a linear layer, and dropout of {100 * design['dropout']:.0f} % of the features in training |",
        "| adapted last stage | multiplicative adapters and BatchNorm in the last stage (`adapt`), a linear layer |",
        "",
        "## Setup",
        "",
        f"The training of {design['epochs']} epochs is short: the learning rate falls to 0, but linear heads have not "
        "yet fully converged to each other. " + setup_text(file),
        "",
        "`benchmarks/heads.py` trains, `benchmarks/heads_page.py` writes this page. [Numbers](heads.json).",
    ]
    (RESULTS / "heads.md").write_text("\n".join(lines) + "\n", "utf-8")


if __name__ == "__main__":
    main()
