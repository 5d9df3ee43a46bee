"""Result pages of built-in experiments: keep the results of a run directory in one file, and write the pages.

    python benchmarks/sweep_pages.py RUN_DIRECTORY NAME    # writes docs/results/NAME.json
    python benchmarks/sweep_pages.py                       # writes the pages of all files

The sentences in `PAGES` are written by hand and without numbers; headlines, tables and setup come from the files.
"""

from __future__ import annotations

import argparse
import json
import tempfile
from pathlib import Path
from typing import Any

import measure
from page_text import RESULTS, fold

from torchace.lab.report import Results, read_results, summary_sentences
from torchace.lab.report.formats import capitalize
from torchace.lab.report.page import table_markdown
from torchace.lab.report.statistics import best_diversity, compare
from torchace.lab.report.tables import difference_tables, result_table

BARS = "*Error bars: standard deviation over seeds. Dashed: trained at one λ only.*"
DROPPED = ("history", "sha256", "checksum")  # of a run
REFERENCES = {  # pairs of arms to compare, beside each λ with λ=0
    "table1": [("shared", "separate")],
    "table1_wide": [("shared", "separate")],
    "branched": [("branched", "single"), ("branched", "equal")],
    "table2_short": [("smoc", "single"), ("control", "single")],
}
PAGES: dict[str, tuple[str, str, dict[str, tuple[str, str]]]] = {
    "small_members": (
        "Small members on MNIST",
        "**Many small networks gain most: λ lowers the cross entropy and the error of the ensemble, while single "
        "members get worse.**\n\n"
        f"![Cross entropy against λ](../figures/small_members.svg)\n\n{BARS}",
        {"": ("small_members", "torchace run small_members")},
    ),
    "table1": (
        "Table 1: several models on MNIST",
        "**With members as accurate as the paper's, no λ changes the cross entropy significantly; trained more "
        "briefly, wider members gain a little.**\n\n"
        "| the paper's Table 1 | these runs |\n| :-- | :-- |\n"
        "| λ > 0 lowers the ensemble's cross entropy, best at λ=0.5 | Not for the first network; **confirmed** for the "
        "second, on exchanged batches, with the lowest mean at the same λ |\n"
        "| λ > 0 raises the accuracy | Significant only for the second network on shared batches |\n"
        "| One member gets worse as λ grows | **Confirmed** |\n\n"
        "The paper does not state its network. The first one below matches its single member at λ=0; the second is "
        "wider and trained more briefly. Separate batches (the paper's λ=0) have a lower mean cross entropy than any λ "
        "on shared batches; with the first network, significantly.\n\n"
        f"![Cross entropy against λ](../figures/table1.svg)\n\n{BARS}",
        {
            "100 hidden units, 18 epochs": ("table1", "torchace run table1"),
            "128 hidden units, 10 epochs": (
                "table1_wide",
                "torchace run table1 --set model.hidden=[128] --set train.epochs=10",
            ),
        },
    ),
    "branched": (
        "Branching earlier: ResNet-20 on CIFAR-10",
        "**Heads on one feature vector (SMOC) collapse at every λ. Members with their own last stage differ and beat "
        "one network of the same width. Against one with as many parameters, three seeds show no significant "
        "difference.**\n\n"
        f"![Cross entropy against λ](../figures/branched.svg)\n\n{BARS}",
        {"": ("branched", "torchace run branched")},
    ),
    "table2_short": (
        "Table 2 at a quarter of its length: SMOC on CIFAR-10",
        "**Ten classifiers on one ResNet-110 collapse onto each other: one of them has the same cross entropy as the "
        "ensemble.**\n\n"
        "- No λ differs significantly from λ=0 or from K=1; the paper's 0.4957 at λ=0.5 is not reproduced.\n"
        "- The control (K=1 with its initial head weights times 1/√10) does not differ significantly from K=1: no sign "
        "that small initial weights help.\n"
        "- **Gradients into the other members prevent training**: with `detach_others = false` the error is several "
        "times as large. The paper's members were probably not trained in this way.\n\n"
        "![Cross entropy against λ, without the ablation](../figures/table2_short.svg)\n\n"
        f"{BARS} The paper's value at λ=0.5 is off the scale."
        "\n\n![Cross entropy against λ, with the ablation](../figures/table2_short_ablation.svg)",
        {"": ("table2_short", "torchace run table2_short")},
    ),
}


def collect(directory: Path, name: str) -> None:
    """Write the results of a run directory as one file."""
    experiment = _read(directory / "experiment.json")
    experiment["commit"] = measure.commit()
    runs = [_read(file) for file in sorted((directory / "runs").glob("*.json"))]
    file = RESULTS / f"{name}.json"
    file.write_text(json.dumps({"experiment": experiment, "runs": runs}, ensure_ascii=False) + "\n", "utf-8")
    print(f"{file}: {len(runs)} runs, {file.stat().st_size:,} bytes")


def _read(file: Path) -> dict[str, Any]:
    content = json.loads(file.read_text("utf-8"))
    return {key: value for key, value in content.items() if key not in DROPPED}


def restore(content: dict[str, Any], directory: Path) -> Results:
    """Write a run directory again and read it."""
    (directory / "runs").mkdir()
    (directory / "experiment.json").write_text(json.dumps(content["experiment"]), "utf-8")
    for run in content["runs"]:
        (directory / "runs" / f"{run['run']}.json").write_text(json.dumps(run), "utf-8")
    return read_results(directory)


def describe(name: str, command: str, content: dict[str, Any]) -> list[str]:
    """Return headlines, tables and setup of one file as Markdown."""
    with tempfile.TemporaryDirectory() as folder:
        results = restore(content, Path(folder))
        pairs = [compare_arms(results, *pair) for pair in REFERENCES.get(name, ())]
        sentences = [*summary_sentences(results), *pairs]
        parts = ["\n".join(f"- {sentence}" for sentence in sentences)]
        compared = difference_tables(results)[0]
        parts += [table_markdown(result_table(results)), fold(compared.caption, table_markdown(compared))]
    about = content["experiment"]
    versions, commit = about["versions"], about.get("commit") or "not recorded"
    if not about["data"]["validation"]:
        parts.append(
            "There is no validation set: the test data chose each λ named above, and the intervals are corrected for "
            "that choice."
        )
    return [
        *parts,
        f"`{command}`, {len(about['seeds'])} seeds; {about['hardware']['device']}, torch {versions['torch']}, torchace "
        f"{versions['torchace']} (commit {commit}), {about['started'][:10]}, {about['seconds']:.0f} s. Every run: "
        f"[{name}.json]({name}.json).",
    ]


def compare_arms(results: Results, first: str, second: str) -> str:
    """Compare an arm at its best λ with another arm."""
    arm, other = (next(arm for arm in results.arms if arm.name == name) for name in (first, second))
    best, found = best_diversity(results, arm), []
    for key in (results.task.loss, "accuracy"):
        metric, comparison = results.metrics[key], compare(results, arm, key, other)
        difference = comparison.at(best) if comparison else None
        assert difference is not None
        assert difference.joint_interval is not None
        interval = metric.interval(difference.joint_interval)
        found.append(f"{metric.noun} {metric.difference(difference.mean)} (95 % interval {interval})")
    at_best = f", λ={best:g}" if difference.tests > 1 else ""
    text = f"{capitalize(arm.label)}{at_best}, minus {other.label}: {', '.join(found)}"
    return f"{text}, corrected for {difference.tests} λ." if difference.tests > 1 else f"{text}."


def render(page: str) -> str | None:
    """Return a page, or None if its files are missing."""
    title, lead, files = PAGES[page]
    parts = [f"# {title}", lead]
    for heading, (name, command) in files.items():
        file = RESULTS / f"{name}.json"
        if not file.exists():
            return None
        parts += [f"## {heading}"] if heading else []
        parts += describe(name, command, json.loads(file.read_text("utf-8")))
    return drop_repeated("\n\n".join(parts)) + "\n"


def drop_repeated(text: str) -> str:
    """Keep the first of several equal notes on tables."""
    blocks: list[str] = []
    for block in text.split("\n\n"):
        if block not in blocks or not block[0].isalpha():
            blocks.append(block)
    return "\n\n".join(blocks)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("directory", type=Path, nargs="?")
    parser.add_argument("name", nargs="?")
    given = parser.parse_args()
    if given.directory is not None:
        collect(given.directory, given.name or given.directory.name)
        return
    for page in PAGES:
        if text := render(page):
            (RESULTS / f"{page}.md").write_text(text, "utf-8")


if __name__ == "__main__":
    main()
