"""Write docs/results/adapters.md from the JSON files of the adapter benchmarks.

python benchmarks/adapters_page.py
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import measure
from page_text import difference, fold, interval_text

RESULTS = Path(__file__).parents[1] / "docs" / "results"
GIB = 1 << 30
DATA = {"cifar10": "CIFAR-10"}
FILES = {
    "adapters_members_digits": "digits",
    "adapters_members_cifar10": "CIFAR-10",
    "adapters_members_cifar10_time": "CIFAR-10, time per step",
    "adapters_finetuning": "fine-tuning",
    "bench_adapters_gpu": "peft",
}


def read(name: str) -> dict[str, Any] | None:
    file = RESULTS / f"{name}.json"
    return json.loads(file.read_text()) if file.exists() else None


def mean_and_sd(value: dict[str, float], percent: bool = False) -> str:
    factor, digits = (100, 2) if percent else (1, 4)
    return f"{value['mean'] * factor:.{digits}f} ± {value['sd'] * factor:.{digits}f}"


def describe_environment(results: dict[str, Any]) -> str:
    """Hardware, versions, commit and total time."""
    place = results["environment"]
    machine = place.get("gpu") or f"{place['cpu']}, {place['threads']} thread"
    text = f"{machine}, torch {place['torch']}, commit {place['commit']}, {place['seconds_in_all']:.0f} s in all"
    if (place.get("busy_cores_before") or 0) > measure.BUSY:
        text += f". Other processes used {place['busy_cores_before']} cores, so the times are not reliable"
    return text


def members_section(title: str, network: str, name: str) -> list[str]:
    if (results := read(name)) is None:
        return []
    rows, settings = results["rows"], results["settings"]
    timed = (read(f"{name}_time") or results)["rows"]  # measured alone on the machine, where that was done
    times = {(row["kind"], row["diversity"]): row["ms_per_step"]["mean"] for row in timed}
    found = {(row["kind"], row["diversity"]): row for row in rows}

    def share(kind: str, diversity: float) -> str:
        return f"{found[kind, diversity]['disagreement']['mean'] * 100:.2f} %"

    def score(kind: str) -> str:
        return f"{found[kind, 0.0]['cross_entropy']['mean']:.3f}"

    def losses(kind: str) -> dict[int, float]:
        runs = (run for run in results["runs"] if (run["kind"], run["diversity"]) == (kind, 0.0))
        return {run["seed"]: run["cross_entropy"] for run in runs}

    change = difference(losses("multiplicative"), losses("one network"))
    assert change is not None

    cells = [
        [
            row["kind"],
            f"{row['diversity']:g}",
            mean_and_sd(row["accuracy"], percent=True),
            mean_and_sd(row["cross_entropy"]),
            mean_and_sd(row["member_accuracy"], percent=True),
            mean_and_sd(row["gain"]),
            mean_and_sd(row["disagreement"], percent=True),
            f"{times[row['kind'], row['diversity']] / times['one network', 0.0]:.2f}",
        ]
        for row in rows
    ]
    header = ["members", "λ", "accuracy, %", "cross entropy", "one member's accuracy, %", "gain over one member"]
    setup = (
        f"{network}; K={settings['num_members']}, rank {settings['rank']}, {settings['epochs']} epochs, batches of "
        f"{settings['batch_size']}, AdamW, learning rate {settings['learning_rate']:g}; branched at "
        f"`{settings['branched_at']}`. Mean ± standard deviation over {rows[0]['seeds']} seeds. Gain: the members' "
        "mean cross entropy minus the ensemble's. Time per step: relative to one network. "
        f"{describe_environment(results)}."
    )
    return [
        f"## {title}",
        "",
        f"{network}: test images on which two members disagree.",
        "",
        measure.table(
            ["", "multiplicative adapters", "low-rank adapters", "only heads (SMOC)", "separate members"],
            [
                [
                    f"λ={diversity:g}",
                    *(share(kind, diversity) for kind in ("multiplicative", "low rank", "SMOC", "separate")),
                ]
                for diversity in (0.0, 0.5)
            ],
        ),
        "",
        f"At λ=0 the ensemble of multiplicative members has a cross entropy of {score('multiplicative')}; one network "
        f"has {score('one network')}, separate members {score('separate')}. Multiplicative members minus one network: "
        f"{interval_text(change, 4)} (95 % interval, paired by seed; bold: without zero).",
        "",
        fold(
            "All scores and setup", f"{measure.table([*header, 'disagreement, %', 'time per step'], cells)}\n\n{setup}"
        ),
        "",
    ]


def finetuning_section(results: dict[str, Any]) -> list[str]:
    settings = results["settings"]
    accuracy = {(row["kind"], row["diversity"]): f"{row['accuracy']['mean'] * 100:.1f} %" for row in results["rows"]}
    names = ("cross_entropy", "calibration_error", "auroc_mutual_information", "auroc_entropy")
    cells = [
        [row["kind"], f"{row['diversity']:g}", mean_and_sd(row["accuracy"], percent=True)]
        + [mean_and_sd(row[name]) for name in names]
        + [mean_and_sd(row["disagreement"], percent=True), f"{row['ms_per_step']['mean']:.2f}"]
        for row in results["rows"]
    ]
    header = ["members", "λ", "accuracy, %", "cross entropy", "calibration error", "AUROC, mutual information"]
    rates = ", ".join(f"{kind} {rate:g}" for kind, rate in settings["learning_rates"].items())
    return [
        "## Fine-tuning to new classes",
        "",
        f"Eight adapters classify {accuracy['eight adapters', 0.0]} of the new images correctly at λ=0 and "
        f"{accuracy['eight adapters', 0.6]} at λ=0.6. One adapter reaches {accuracy['one adapter', 0.0]}, eight "
        f"fine-tunings of all weights {accuracy['eight fine-tunings', 0.0]}.",
        "",
        "A network trained on the first five classes is adapted to the other five. AUROC: how well a score detects "
        "test images of the first five classes, which are not in the fine-tuning data.",
        "",
        measure.table([*header, "AUROC, entropy", "disagreement, %", "ms per step"], cells),
        "",
        f"{DATA[settings['data']]}, {settings['images']:,} images for fine-tuning, K={settings['num_members']}, rank "
        f"{settings['rank']}, {settings['epochs'][0]} and {settings['epochs'][1]} epochs, batches of "
        f"{settings['batch_size']}. Learning rates (the best of three on validation data with another seed): {rates}. "
        f"Mean ± standard deviation over {results['rows'][0]['seeds']} seeds. {describe_environment(results)}.",
        "",
    ]


def speed_section(results: dict[str, Any]) -> list[str]:
    cells = []
    for row in results["rows"]:
        memory = ["", ""]
        if "peak_bytes" in row:
            memory = [f"{row['peak_bytes'] / GIB:.2f}", f"{row['times_memory_of_one_peft']:.2f}"]
        speed = measure.factor(row["times_faster_than_peft"])
        cells.append([row["contender"], measure.milliseconds(row["seconds"]), speed, *memory])
    settings = results["settings"]
    header = ["contender", "ms, a step of all members", "speedup over peft", "GiB", "relative to one peft training"]
    return [
        "## Time and memory compared with peft",
        "",
        measure.table(header, cells),
        "",
        f"{settings['num_members']} low-rank members (rank {settings['rank']}, query and value layers) on a frozen "
        f"encoder of BERT-base's size with random weights; {settings['batch_size']} sequences of {settings['length']} "
        "tokens, bf16 autocast, AdamW. peft: one step of each training, one after another; its memory is that of one "
        f"training. Targets: at least 3 times faster, at most twice the memory. {describe_environment(results)}.",
        "",
    ]


def main() -> None:
    finding = (
        "**Members that share all weights and differ by small adapters (`ace.adapt`) remain diverse in training.**"
    )
    if results := read("bench_adapters_gpu"):
        faster = next(row for row in results["rows"] if row["contender"] == "one pass")["times_faster_than_peft"]
        finding += f" Eight members in one pass train {faster['median']:.1f} times faster than with peft one by one."
    lines = ["# Adapters", "", finding, ""]
    network = "An MLP with two hidden layers of 64 units"
    lines += members_section("Members remain diverse: digits", network, "adapters_members_digits")
    lines += members_section("Members remain diverse: CIFAR-10", "ResNet-20", "adapters_members_cifar10")
    if results := read("adapters_finetuning"):
        lines += finetuning_section(results)
    if results := read("bench_adapters_gpu"):
        lines += speed_section(results)
    files = ", ".join(f"[{title}]({name}.json)" for name, title in FILES.items() if (RESULTS / f"{name}.json").exists())
    lines += [f"Numbers: {files}. Written by `benchmarks/adapters_page.py`.", ""]
    (RESULTS / "adapters.md").write_text("\n".join(lines).rstrip() + "\n")


if __name__ == "__main__":
    main()
