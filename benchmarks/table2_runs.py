"""Train any runs of Table 2 as one network: K=10 at any λ and seed, and K=1.

    python benchmarks/table2_runs.py 0.001:2 0.01:2 0.3:2 single:2 --out runs/table2

A run is λ:seed, or single:seed for K=1. Networks of one group need equal shapes, so K=1 is trained as ten heads that
start equal. At λ=0 they receive equal gradients and stay equal, and the trunk receives the mean of ten equal gradients:
the same training up to rounding (`--check` compares the two in float64). SIGTERM saves a checkpoint; repeat the command
to resume. The result files, `OUT/runs/*.json`, go to docs/results/table2_full.
"""

from __future__ import annotations

import argparse
import json
import signal
import tempfile
import time
from pathlib import Path
from typing import Any

import torch

from torchace.lab.schema.results import GroupPlan, RunKey
from torchace.lab.store import RunStore
from torchace.lab.sweeps import executor
from torchace.lab.sweeps.callbacks import Callback
from torchace.lab.sweeps.config import Components, load_experiment
from torchace.lab.sweeps.networks import build_network, is_compiled
from torchace.lab.training.loop import Interrupted, Progress
from torchace.lab.training.run_group import RunGroup
from torchace.nn import SMOC, StackedLinear

SINGLE, HEADS = "single", "smoc"
CHECK = ["model.depth=8", "train.steps=20", "train.batch_size=16", "train.precision=float64", "data.limit=400"]


def tie_heads(network: SMOC, num_members: int) -> SMOC:
    """Return a network of one head as one of equal heads."""
    one: Any = network.head
    heads = StackedLinear(one.in_features, one.out_features, num_members, dtype=one.weight.dtype)
    with torch.no_grad():
        heads.weight.copy_(one.weight.expand_as(heads.weight))
        heads.bias.copy_(one.bias.expand_as(heads.bias))
    return SMOC.from_parts(network.trunk, heads, network.link)


def train(runs: tuple[RunKey, ...], out: Path, device: str, overrides: list[str], *, tied: bool = True) -> None:
    """Train runs as one group and write their result files."""
    experiment = load_experiment("table2", ["checkpoint.seconds=300", *overrides])
    arms = {arm.name: arm for arm in experiment.complete_arms()}
    components = {name: Components.load(arm) for name, arm in arms.items()}
    data = executor.Executor(device).load_data(arms, components)
    plan = executor.Plan(experiment, arms, components, data, RunStore(out), device)
    num_members = arms[HEADS].model.num_members

    def build(arm: Any, dataset: Any, seeds: Any, place: Any, **options: Any) -> RunGroup:
        ensembles = []
        for run in runs:
            ensemble: Any = build_network(arms[run.arm], dataset, [run.seed], "cpu", **options).ensemble(0)
            ensembles.append(tie_heads(ensemble, num_members) if tied and run.arm == SINGLE else ensemble)
        network = RunGroup(ensembles).to(device=place)
        return network.to(memory_format=torch.channels_last) if place == "cuda" else network

    executor.build_network = build  # type: ignore[assignment]
    group = GroupPlan("group", runs, is_compiled(arms[HEADS].train, arms[HEADS].train.steps or 0, device))
    with plan.store.lock():
        executor.train_group(plan, group, Log(), stop=lambda: bool(STOP))
    for run in runs:
        if run.arm == SINGLE and tied:
            network = build_network(arms[SINGLE], data[SINGLE].dataset, [0], "cpu")
            mark_as_single(out / "runs" / f"{run.id}.json", network)


def mark_as_single(file: Path, network: RunGroup) -> None:
    """Rewrite the result of tied heads as that of one head."""
    result = json.loads(file.read_text("utf-8"))
    scores = result["metrics"]["test"]
    if len(set(scores["members"])) > 1 or scores["disagreement"]:
        raise RuntimeError(f"Expected heads that stay equal, but their accuracies are {scores['members']}.")
    scores["members"] = scores["members"][:1]
    result |= {"num_members": 1, "parameters": executor.count_run_parameters(network)}
    result.pop("sha256", None)  # of the heads' result
    file.write_text(json.dumps(result, indent=1) + "\n", "utf-8")


class Log(Callback):
    """Print the time of a step every ten seconds."""

    last = (time.monotonic(), 0)

    def on_group_step(self, group: GroupPlan, progress: Progress) -> None:
        now, (before, step) = time.monotonic(), self.last
        if now - before > 10:
            time_of_step = 1000 * (now - before) / (progress.step - step)
            scores = " ".join("nan" if score is None else f"{score:.4f}" for score in progress.score)
            print(f"step {progress.step} of {progress.steps}, {time_of_step:.2f} ms a step: {scores}", flush=True)
            self.last = now, progress.step


def check() -> None:
    """Compare K=1 as one head and as ten tied heads on the CPU in float64."""
    runs, found = (RunKey(SINGLE, 0.0, 2),), []
    for tied in (False, True):
        with tempfile.TemporaryDirectory() as folder:
            train(runs, Path(folder), "cpu", CHECK, tied=tied)
            result = json.loads((Path(folder) / "runs" / f"{runs[0].id}.json").read_text("utf-8"))
        found.append({"train": result["history"][-1]["train_cross_entropy"], **result["metrics"]["test"]})
    for name in ("train", "cross_entropy", "brier", "accuracy"):
        print(f"{name}: {found[0][name]!r}, {found[1][name]!r}, difference {found[1][name] - found[0][name]:.1e}")


STOP: list[int] = []


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("runs", nargs="*", metavar="λ:SEED")
    parser.add_argument("--out", type=Path, default=Path("runs/table2"))
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--set", action="append", default=[], metavar="SECTION.KEY=VALUE")
    parser.add_argument("--check", action="store_true")
    options = parser.parse_args()
    if options.check:
        check()
        return
    signal.signal(signal.SIGTERM, lambda number, frame: STOP.append(number))
    runs = []
    for text in options.runs:
        column, _, seed = text.partition(":")
        runs.append(RunKey(SINGLE, 0.0, int(seed)) if column == SINGLE else RunKey(HEADS, float(column), int(seed)))
    try:
        train(tuple(runs), options.out, options.device, options.set)
    except Interrupted:
        print("stopped; repeat the command to resume", flush=True)


if __name__ == "__main__":
    main()
