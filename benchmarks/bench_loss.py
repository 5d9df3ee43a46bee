"""Amended cross entropy, forward and backward, against hand-written versions. CPU.

    python benchmarks/bench_loss.py --out docs/results/bench_loss.json

Targets: faster than the O(K) form with autograd (equal within noise at the smallest shape), at least 5 times faster
than the pairwise form, no slower than K calls of F.cross_entropy.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import measure
import torch
import torch.nn.functional as F
from torch import Tensor

from torchace.functional import amended_cross_entropy

SHAPES = [(5, 128, 10), (10, 1024, 100), (8, 256, 1000), (4, 512, 32000)]
TINY = (2, 4, 6)
DIVERSITY = 0.5
OURS = "torchace"
TARGETS = {"pairwise": "at least 5", "composite": "above 1", "cross_entropy": "at least 1", OURS: ""}


def pairwise(logits: Tensor, target: Tensor) -> Tensor:
    """The definition with K² cross entropies; gradients by autograd."""
    num_members = len(logits)
    loss = logits.new_zeros(())
    for k in range(num_members):
        loss = loss + F.cross_entropy(logits[k], target)
        for j in range(num_members):
            if j != k:
                other = logits[j].detach().softmax(1)
                loss = loss - DIVERSITY / num_members * F.cross_entropy(logits[k], other)
    return loss


def composite(logits: Tensor, target: Tensor) -> Tensor:
    """O(K) form with the sum of the other members' probabilities; gradients by autograd."""
    num_members, num_samples, _ = logits.shape
    log_q = logits.log_softmax(2)
    q = log_q.detach().exp()
    others = (q.sum(0) - q) / num_members
    fit = -log_q[:, torch.arange(num_samples, device=target.device), target].mean(1)
    difference = -(others * log_q).sum(2).mean(1)
    return (fit - DIVERSITY * difference).sum()


def cross_entropy(logits: Tensor, target: Tensor) -> Tensor:
    """K plain cross entropies, without diversity."""
    return torch.stack([F.cross_entropy(own, target) for own in logits.unbind(0)]).sum()


def ours(logits: Tensor, target: Tensor) -> Tensor:
    return amended_cross_entropy(logits, target, DIVERSITY)


LOSSES: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    OURS: ours,
    "pairwise": pairwise,
    "composite": composite,
    "cross_entropy": cross_entropy,
}


def make_step(name: str, shape: tuple[int, int, int]) -> Callable[[], Tensor]:
    """Return a call of forward and backward of one loss, which returns the gradient."""
    g = torch.Generator().manual_seed(0)
    logits = torch.randn(shape, generator=g, requires_grad=True)
    target = torch.randint(shape[2], (shape[1],), generator=g)
    loss = LOSSES[name]

    def call() -> Tensor:
        logits.grad = None
        loss(logits, target).backward()
        assert logits.grad is not None
        return logits.grad

    return call


def check_gradients(shape: tuple[int, int, int]) -> None:
    """Check that all contenders but plain cross entropy compute the same gradient."""
    expected = make_step(OURS, shape)()
    for name in ("pairwise", "composite"):
        torch.testing.assert_close(make_step(name, shape)(), expected, rtol=1e-4, atol=1e-6)


def main() -> None:
    parser = measure.make_parser(__doc__ or "")
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    if options.peak_of:
        case, name = options.peak_of
        members, samples, classes = (int(size) for size in case.split(","))
        shape = members, samples, classes
        print(measure.peak_bytes(make_step(name, shape), make_step(name, TINY)))
        return

    started = time.perf_counter()
    results: dict[str, Any] = {"environment": measure.environment(), "diversity": DIVERSITY, "seed": 0, "cases": []}
    rows = []
    for shape in SHAPES[:2] if options.quick else SHAPES:
        check_gradients(shape)
        rounds = options.rounds or (3 if options.quick else 15 if shape[2] > 10_000 else 41)
        seconds = measure.timings({name: make_step(name, shape) for name in LOSSES}, rounds=rounds)
        case = {"members": shape[0], "samples": shape[1], "classes": shape[2], "contenders": {}}
        for name, figures in measure.compare(seconds, OURS).items():
            label = ",".join(map(str, shape))
            figures["peak_bytes"] = measure.peak_in_fresh_process(__file__, label, name, options.threads)
            case["contenders"][name] = figures
            rows.append(
                [
                    str(shape),
                    name,
                    measure.milliseconds(figures["seconds"]),
                    measure.factor(figures[f"times_{OURS}"]),
                    TARGETS[name],
                    measure.mebibytes(figures["peak_bytes"]),
                ]
            )
        results["cases"].append(case)
    header = ["K, N, C", "loss", "ms: median (20 to 80 %)", "times torchace", "target", "peak MiB"]
    print(measure.table(header, rows))
    measure.finish(results, options.out, started)


if __name__ == "__main__":
    main()
