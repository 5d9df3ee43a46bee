"""Train a sweep on digits as one run group, run by run, and member by member. CPU.

    python benchmarks/bench_run_group.py --out docs/results/bench_run_group.json

6 λ x 5 seeds x 5 members, the same batches and steps. `run_group` is one network of 150 members; `runs` trains the 30
stacked ensembles one after another; `members` trains 150 plain modules, coupled by their mean prediction. All three end
with the same weights up to rounding (checked first). Targets: at least 1.5 times faster than `runs`, 3.5 times faster
than `members`.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Any

import measure
import torch
from torch import Tensor, nn

from torchace.functional import amended_cross_entropy
from torchace.lab.data import Batches, load
from torchace.lab.training.config import TrainConfig
from torchace.lab.training.loop import fit
from torchace.lab.training.run_group import RunGroup
from torchace.models import mlp
from torchace.nn import Ensemble

DIVERSITIES = [0.0, 0.1, 0.3, 0.5, 0.7, 0.9]
SEEDS = [0, 1, 2, 3, 4]
MEMBERS, BATCH, RATE = 5, 64, 0.005
RUNS = [(diversity, seed) for diversity in DIVERSITIES for seed in SEEDS]
TARGETS = {"runs": 1.5, "members": 3.5}


def make_members(seed: int, width: int) -> list[nn.Module]:
    torch.manual_seed(seed)
    return [mlp(64, width, 10) for _ in range(MEMBERS)]


def train_run_group(data: Batches, steps: int, width: int, runs: Sequence[tuple[float, int]] = RUNS) -> list[Tensor]:
    """Train all runs of a sweep at once."""
    network = RunGroup([Ensemble(make_members(seed, width)) for _, seed in runs])
    train_config = TrainConfig(steps=steps, learning_rate=RATE)
    fit(network, data, train_config, diversities=[d for d, _ in runs], seeds=[seed for _, seed in runs])
    return [network.get_parameter("members.stacked.fc.weight").detach()]


def train_runs(data: Batches, steps: int, width: int) -> list[Tensor]:
    """Train run by run, the members of each stacked."""
    return [weights for run in RUNS for weights in train_run_group(data, steps, width, [run])]


def train_members(data: Batches, steps: int, width: int) -> list[Tensor]:
    """Train member by member, as a plain training script does."""
    weights = []
    for diversity, seed in RUNS:
        members = make_members(seed, width)
        optimizers = [torch.optim.Adam(member.parameters(), lr=RATE, fused=True) for member in members]
        share = torch.tensor([1 / MEMBERS])
        for step in range(steps):
            x, y = data.batch_many([seed], *data.locate(step))
            logits = [member(x[0]) for member in members]
            with torch.no_grad():
                mixture = torch.stack([one.softmax(1) for one in logits]).mean(0)
            for own, optimizer in zip(logits, optimizers, strict=True):
                loss = amended_cross_entropy(own[None], y[0], diversity, mixture=mixture, member_weights=share)
                optimizer.zero_grad()
                loss.backward()
                optimizer.step()
        weights += [torch.stack([member.get_parameter("fc.weight").detach() for member in members])]
    return weights


TRAIN = {"run_group": train_run_group, "runs": train_runs, "members": train_members}


def check_equal(data: Batches, width: int) -> None:
    """Check that all three trainings end with the same weights."""
    trained = {name: torch.cat(train(data, 3, width)) for name, train in TRAIN.items()}
    for name in TARGETS:
        torch.testing.assert_close(trained[name], trained["run_group"], rtol=1e-3, atol=1e-4)


def main() -> None:
    options = measure.make_parser(__doc__.splitlines()[0]).parse_args()
    started = time.perf_counter()
    torch.set_num_threads(options.threads)
    dataset = load("digits")
    data = Batches(dataset.train, BATCH, normalize=dataset.normalization("unit"))
    steps, rounds = (4, 2) if options.quick else (40, options.rounds or 5)
    results: dict[str, Any] = {"environment": measure.environment(), "steps": steps, "cases": {}}
    rows = []
    for width in (8, 64):
        check_equal(data, width)
        calls = {name: lambda train=train: train(data, steps, width) for name, train in TRAIN.items()}  # noqa: B023
        compared = measure.compare(measure.timings(calls, rounds=rounds), to="run_group")
        results["cases"][f"width {width}"] = compared
        for name, case in compared.items():
            ratio = case["times_run_group"]
            target = TARGETS.get(name)
            verdict = "" if target is None else f"{target} {'met' if ratio['median'] >= target else 'MISSED'}"
            a_step = {key: value / steps for key, value in case["seconds"].items()}
            rows.append([str(width), name, measure.milliseconds(a_step), measure.factor(ratio), verdict])
    print(f"{len(RUNS)} runs of {MEMBERS} members on digits, batches of {BATCH}, {steps} steps, {rounds} rounds\n")
    print(measure.table(["width", "contender", "ms per step of the sweep", "times the run group", "target"], rows))
    measure.finish(results, options.out, started)


if __name__ == "__main__":
    main()
