"""StackedEnsemble against a loop over members, and SMOC against one classifier: time of a training step. CPU.

    python benchmarks/bench_members.py --out docs/results/bench_members.json

Targets: StackedEnsemble never slower than the loop, and with 30 members at least 3 times faster at width 32 and 1.6
times at width 128; SMOC with ten classifiers at most 1.05 times the time of one (ResNet-20, batches of 128).
"""

from __future__ import annotations

import copy
import time
from collections.abc import Callable
from functools import partial
from typing import Any

import measure
import torch
from torch import Tensor, nn

from torchace.functional import amended_cross_entropy
from torchace.nn import SMOC, Ensemble, StackedEnsemble

BATCH, CLASSES, DIVERSITY = 128, 10, 0.5
MLPS = [(members, width, inputs) for inputs in (64, 784) for width in (32, 128) for members in (5, 30, 150)]
CONVS = [(5, 8), (30, 8), (5, 28), (30, 28)]  # members, size of the images: digits and MNIST


def mlp(inputs: int, width: int) -> nn.Module:
    return nn.Sequential(nn.Linear(inputs, width), nn.ReLU(), nn.Linear(width, CLASSES))


def conv() -> nn.Module:
    return nn.Sequential(
        nn.Conv2d(1, 8, 3, padding=1, bias=False),
        nn.BatchNorm2d(8),
        nn.ReLU(),
        nn.MaxPool2d(2),
        nn.Conv2d(8, 16, 3, padding=1, bias=False),
        nn.BatchNorm2d(16),
        nn.ReLU(),
        nn.AdaptiveAvgPool2d(1),
        nn.Flatten(),
        nn.Linear(16, CLASSES),
    )


def make_step(ensemble: nn.Module, optimizer: torch.optim.Optimizer, x: Tensor, y: Tensor) -> Callable[[], Tensor]:
    def call() -> Tensor:
        optimizer.zero_grad()
        loss = amended_cross_entropy(ensemble(x), y, DIVERSITY)
        loss.backward()
        optimizer.step()
        return loss

    return call


def stacked_and_loop_steps(make: Callable[[], nn.Module], count: int, x: Tensor) -> dict[str, Callable[[], Tensor]]:
    """A step of StackedEnsemble and a step of a loop, from the same weights."""
    torch.manual_seed(0)
    y = torch.randint(CLASSES, (len(x),))
    members = [make() for _ in range(count)]
    ensembles = {"stacked": StackedEnsemble(members), "loop": Ensemble(copy.deepcopy(members))}
    steps = {
        name: make_step(ensemble, torch.optim.Adam(ensemble.parameters(), lr=1e-3, fused=True), x, y)
        for name, ensemble in ensembles.items()
    }
    for _ in range(3):  # check that both compute the same
        torch.testing.assert_close(steps["stacked"](), steps["loop"](), rtol=1e-3, atol=1e-3)
    return steps


def resnet_steps(batch: int) -> dict[str, Callable[[], Tensor]]:
    from torchace.models import cifar_resnet

    x, y = torch.randn(batch, 3, 32, 32), torch.randint(CLASSES, (batch,))
    steps = {}
    for members in (1, 10):
        torch.manual_seed(0)
        trunk = cifar_resnet(20, num_classes=None)
        smoc = SMOC(trunk, trunk.num_features, CLASSES, num_members=members)
        optimizer = torch.optim.SGD(smoc.parameters(), lr=0.1, momentum=0.9, weight_decay=1e-4, fused=True)
        steps[f"K={members}"] = make_step(smoc, optimizer, x, y)
    return steps


def speed_target(members: int, width: int) -> str:
    if members == 30:
        return "at least 3" if width == 32 else "at least 1.6"
    return "at least 1"


def main() -> None:
    parser = measure.make_parser(__doc__ or "")
    parser.add_argument("--skip-resnet", action="store_true", help="leave SMOC on ResNet-20 out")
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    if options.peak_of:
        parser.error("only bench_loss.py measures peak memory")
    started = time.perf_counter()
    results: dict[str, Any] = {
        "environment": measure.environment(),
        "batch": BATCH,
        "diversity": DIVERSITY,
        "seed": 0,
        "cases": [],
    }
    rows = []

    def record(case: dict[str, Any], steps: dict[str, Callable[[], Tensor]], to: str, rounds: int, wanted: str) -> None:
        figures = measure.compare(measure.timings(steps, rounds=rounds, least_seconds=0.05), to)
        results["cases"].append({**case, "contenders": figures, "target": wanted})
        for name, values in figures.items():
            label = ", ".join(f"{key} {value}" for key, value in case.items())
            ratio = values[f"times_{to}"]
            aim = "" if name == to else wanted
            rows.append([label, name, measure.milliseconds(values["seconds"]), measure.factor(ratio), aim])
            print("  ".join(rows[-1]), flush=True)

    rounds = options.rounds or (3 if options.quick else 21)
    for members, width, inputs in [(5, 32, 64), (30, 32, 64)] if options.quick else MLPS:
        x = torch.randn(BATCH, inputs, generator=torch.Generator().manual_seed(1))
        steps = stacked_and_loop_steps(partial(mlp, inputs, width), members, x)
        case = {"network": "mlp", "inputs": inputs, "width": width, "K": members}
        record(case, steps, "stacked", rounds, speed_target(members, width))
    for members, size in CONVS[:1] if options.quick else CONVS:
        x = torch.randn(BATCH, 1, size, size, generator=torch.Generator().manual_seed(1))
        case = {"network": "conv with batch norm", "inputs": f"{size}x{size}", "K": members}
        record(case, stacked_and_loop_steps(conv, members, x), "stacked", rounds, "at least 1")
    if not options.skip_resnet:
        batch = 16 if options.quick else BATCH
        case = {"network": "ResNet-20 with SMOC", "batch": batch}
        record(case, resnet_steps(batch), "K=1", rounds, "at most 1.05")

    print()
    header = ["case", "contender", "ms: median (20 to 80 %)", "times the first (stacked, K=1)", "target"]
    print(measure.table(header, rows))
    measure.finish(results, options.out, started)


if __name__ == "__main__":
    main()
