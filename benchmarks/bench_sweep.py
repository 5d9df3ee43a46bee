"""Sweep a convolutional network with `torchace.sweep`, and with a double loop in plain PyTorch.

    python benchmarks/bench_sweep.py --device cpu --out docs/results/bench_sweep.json
    python benchmarks/bench_sweep.py --device cuda

5 λ x 4 seeds x 5 members on synthetic images, the same steps and test set. `sweep` includes planning, checkpoints,
result files and all metrics; `loop` trains five modules with one Adam for each λ and seed and computes the accuracy.
Targets: 5 times faster on an H200, 1.5 times on two cores. On a CPU a sweep saves the overhead of small operations:
with `--batch-size 128` both are equally fast.
"""

from __future__ import annotations

import time
from typing import Any

import measure
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import torchace as ace

DIVERSITIES = [0.0, 0.1, 0.3, 0.5, 0.7]
SEEDS = 4
MEMBERS, CLASSES, RATE = 5, 10, 1e-3
TARGETS = {"cpu": 1.5, "cuda": 5.0}
Data = tuple[Tensor, Tensor]
Accuracies = dict[tuple[float, int], float]  # by λ and seed


def make_member(width: int = 16, pixels: int = 28) -> nn.Module:
    """A small convolutional network for square images."""
    return nn.Sequential(
        nn.Conv2d(1, width, 3, padding=1),
        nn.BatchNorm2d(width),
        nn.ReLU(),
        nn.MaxPool2d(2),
        nn.Conv2d(width, 2 * width, 3, padding=1),
        nn.BatchNorm2d(2 * width),
        nn.ReLU(),
        nn.MaxPool2d(2),
        nn.Flatten(),
        nn.Linear(2 * width * (pixels // 4) ** 2, CLASSES),
    )


def make_data(samples: int, pixels: int, device: str) -> tuple[Data, Data]:
    """Return training and test images of ten random patterns with noise."""
    generator = torch.Generator().manual_seed(0)
    patterns = torch.randn(CLASSES, 1, pixels, pixels, generator=generator)
    target = torch.randint(CLASSES, (samples + 1000,), generator=generator)
    noise = torch.randn(len(target), 1, pixels, pixels, generator=generator)
    images, target = (4 / pixels * patterns[target] + noise).to(device), target.to(device)
    return (images[:samples], target[:samples]), (images[samples:], target[samples:])


def amended_cross_entropy(logits: Tensor, target: Tensor, diversity: float) -> Tensor:
    """Loss of logits (K, N, C), written by hand from the paper: the sum over members of their means."""
    log_q = logits.log_softmax(2)
    q = log_q.detach().exp()
    others = (q.sum(0) - q) / len(q)
    cross_entropy = -log_q.gather(2, target.expand(len(q), -1).unsqueeze(2)).squeeze(2)
    return (cross_entropy + diversity * (others * log_q).sum(2)).mean(1).sum()


def run_loop(train: Data, test: Data, steps: int, batch_size: int, network: dict[str, int]) -> Accuracies:
    """Train every λ and seed one after another; return the ensembles' test accuracies."""
    x, y = train
    accuracy = {}
    for diversity in DIVERSITIES:
        for seed in range(SEEDS):
            torch.manual_seed(seed)
            members = [make_member(**network).to(x.device) for _ in range(MEMBERS)]
            optimizer = torch.optim.Adam([p for member in members for p in member.parameters()], RATE, fused=True)
            for step in range(steps):
                within = step % (len(x) // batch_size)
                if within == 0:
                    order = torch.randperm(len(x), device=x.device)
                batch = order[within * batch_size : (within + 1) * batch_size]
                logits = torch.stack([member(x[batch]) for member in members])
                loss = amended_cross_entropy(logits, y[batch], diversity)
                optimizer.zero_grad()
                loss.backward()
                optimizer.step()
            with torch.no_grad():
                probs = torch.stack([member.eval()(test[0]).softmax(1) for member in members]).mean(0)
            accuracy[diversity, seed] = (probs.argmax(1) == test[1]).float().mean().item()
    return accuracy


def run_sweep(
    train: Data, test: Data, steps: int, batch_size: int, network: dict[str, int], device: str, **options: Any
) -> Accuracies:
    """Train the same runs with `torchace.sweep`; return the ensembles' test accuracies."""
    result = ace.sweep(
        make_member,
        train,
        test,
        arguments=network,
        num_members=MEMBERS,
        diversities=DIVERSITIES,
        seeds=SEEDS,
        steps=steps,
        batch_size=batch_size,
        learning_rate=RATE,
        device=device,
        **options,
    )
    rows = result.to_frame()[["diversity", "seed", "accuracy"]].itertuples(index=False)
    return {(row.diversity, int(row.seed)): row.accuracy for row in rows}


def check_loss() -> None:
    """Check the hand-written loss against torchace's."""
    logits, target = torch.randn(MEMBERS, 8, CLASSES), torch.randint(CLASSES, (8,))
    ours = ace.amended_cross_entropy(logits, target, 0.3)
    torch.testing.assert_close(amended_cross_entropy(logits, target, 0.3), ours)
    torch.testing.assert_close(
        amended_cross_entropy(logits, target, 0.0), sum(F.cross_entropy(z, target) for z in logits)
    )


def main() -> None:
    parser = measure.make_parser(__doc__.splitlines()[0])
    parser.add_argument("--device", default="cpu", choices=TARGETS)
    parser.add_argument("--pixels", type=int, help="height and width of the images; by default 28, on a CPU 8")
    parser.add_argument("--width", type=int, default=16, help="channels of the first layer")
    parser.add_argument("--batch-size", type=int, help="samples in a batch; by default 128, on a CPU 32")
    parser.add_argument("--steps", type=int, help="steps of each run")
    parser.add_argument("--group-size", type=int, help="runs trained together; by default as torchace chooses")
    options = parser.parse_args()
    started = time.perf_counter()
    torch.set_num_threads(options.threads)
    check_loss()
    on_gpu = options.device == "cuda"
    steps = options.steps or (4 if options.quick else 1000 if on_gpu else 200)
    batch_size = options.batch_size or (128 if on_gpu else 32)
    rounds = options.rounds or (1 if options.quick else 3)
    network = {"width": options.width, "pixels": options.pixels or (28 if on_gpu else 8)}
    train, test = make_data(10_000 if on_gpu else 2_000, network["pixels"], options.device)
    accuracies: dict[str, Accuracies] = {}

    def sweep(steps: int = steps) -> None:
        accuracies["sweep"] = run_sweep(
            train, test, steps, batch_size, network, options.device, group_size=options.group_size
        )

    def loop(steps: int = steps) -> None:
        accuracies["loop"] = run_loop(train, test, steps, batch_size, network)

    seconds: dict[str, list[float]] = {"sweep": [], "loop": []}
    for call in (sweep, loop):
        call(4)  # loads what libraries load once
    for turn in range(rounds):
        for call in (sweep, loop)[:: 1 - 2 * (turn % 2)]:
            start = time.perf_counter()
            call()  # reads accuracies, so that a GPU has finished
            seconds[call.__name__].append(time.perf_counter() - start)
    compared = measure.compare(seconds, to="sweep")
    means = {name: sum(values.values()) / len(values) for name, values in accuracies.items()}
    target = TARGETS[options.device]
    rows = []
    for name, case in compared.items():
        verdict = (
            "" if name == "sweep" else f"{target} {'met' if case['times_sweep']['median'] >= target else 'MISSED'}"
        )
        taken = case["seconds"]
        a_step = {key: value / steps for key, value in taken.items()}
        rows.append(
            [
                name,
                f"{taken['median']:.2f}",
                measure.milliseconds(a_step),
                measure.factor(case["times_sweep"]),
                verdict,
                f"{means[name]:.4f}",
            ]
        )
    where = torch.cuda.get_device_name() if on_gpu else f"{options.threads} threads"
    grid = f"{len(DIVERSITIES)} λ x {SEEDS} seeds x {MEMBERS} members"
    print(f"{grid}, {steps} steps, batches of {batch_size}, {network}, {where}\n")
    header = ["contender", "s", "ms per step of the sweep", "times the sweep", "target", "mean accuracy"]
    print(measure.table(header, rows))
    results = {
        "environment": measure.environment(),
        "device": where,
        "steps": steps,
        "batch_size": batch_size,
        "network": network,
        "accuracy": means,
        "cases": compared,
    }
    measure.finish(results, options.out, started)


if __name__ == "__main__":
    main()
