"""Loss of K linear heads over a vocabulary, forward and backward, against K plain fused losses. One GPU.

    python benchmarks/bench_linear_gpu.py --out docs/results/bench_linear_gpu.json

Three matrix products need 6·N·K·C·D operations; the ceiling is the rate of one large product. Targets: at least 55 % of
the ceiling with 2 GiB beside weights and gradients, or 65 % with 10 GiB; at most 1.1 times the time of K plain fused
cross entropies (torchace with one head, or Liger-Kernel), in about the memory of one.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import measure
import measure_gpu
import torch
import torch.nn.functional as F
from torch import Tensor

from torchace.functional import amended_cross_entropy, linear_amended_cross_entropy
from torchace.kernels import linear_gpu

SHAPE = (4, 8192, 128_256, 4096)  # K, N, C, D
QUICK = (4, 512, 4096, 256)
DIVERSITY = 0.5
DEVICE = "cuda"
OURS = "torchace"
GIB = 1 << 30
ALL_LOGITS = 9 * GIB  # one chunk holds all logits: nothing is computed twice
ROWS = 1024  # of a chunk by rows: 1 GiB of logits

Loss = Callable[[Tensor, list[Tensor], Tensor], Tensor]


def ours(features: Tensor, heads: list[Tensor], target: Tensor) -> Tensor:
    return linear_amended_cross_entropy(features, heads[0], None, target, DIVERSITY)


def ours_in_one_chunk(features: Tensor, heads: list[Tensor], target: Tensor) -> Tensor:
    usual, linear_gpu.LOGITS = linear_gpu.LOGITS, ALL_LOGITS
    try:
        return ours(features, heads, target)
    finally:
        linear_gpu.LOGITS = usual


def ours_by_rows(features: Tensor, heads: list[Tensor], target: Tensor) -> Tensor:
    return linear_amended_cross_entropy(features, heads[0], None, target, DIVERSITY, chunk_rows=ROWS)


def ours_by_head(features: Tensor, heads: list[Tensor], target: Tensor) -> Tensor:
    return sum_losses([linear_amended_cross_entropy(features, head[None], None, target, 0.0) for head in heads])


def liger(features: Tensor, heads: list[Tensor], target: Tensor, memory: int = 1) -> Tensor:
    from liger_kernel.ops.fused_linear_cross_entropy import LigerFusedLinearCrossEntropyFunction as Fused

    options = (None, None, -100, 0.0, 0.0, "mean", None, False, None, False, False, False, None, None, memory)
    return sum_losses([Fused.apply(features, head, target, *options)[0] for head in heads])


def liger_with_memory(features: Tensor, heads: list[Tensor], target: Tensor) -> Tensor:
    """Liger-Kernel with chunks of about the size of ours."""
    return liger(features, heads, target, memory=linear_gpu.LOGITS // (features.numel() * features.element_size()))


def plain(features: Tensor, heads: list[Tensor], target: Tensor) -> Tensor:
    return sum_losses([F.cross_entropy((features @ head.T).float(), target) for head in heads])


def sum_losses(losses: list[Tensor]) -> Tensor:
    return torch.stack(losses).sum()


# name: the loss, whether the heads are one tensor (K, C, D) or K of them
LOSSES: dict[str, tuple[Loss, bool]] = {
    OURS: (ours, True),
    "torchace, all logits in one chunk": (ours_in_one_chunk, True),
    "torchace, by rows": (ours_by_rows, True),
    "K times torchace with one head": (ours_by_head, False),
    "K times Liger-Kernel": (liger, False),
    "K times Liger-Kernel, chunks as large as ours": (liger_with_memory, False),
    "K times linear and cross_entropy": (plain, False),
}
TARGETS = {
    "K times torchace with one head": "at least 0.91",
    "K times Liger-Kernel": "at least 0.91",
    "K times Liger-Kernel, chunks as large as ours": "at least 0.91",
}


class Problem:
    """Random features, heads and labels."""

    def __init__(self, shape: tuple[int, int, int, int], dtype: torch.dtype = torch.bfloat16) -> None:
        members, samples, self.classes, width = shape
        torch.manual_seed(0)
        self.features = torch.randn(samples, width, device=DEVICE, dtype=dtype).requires_grad_()
        weight = torch.randn(members, self.classes, width, device=DEVICE, dtype=dtype).mul_(width**-0.5)
        self.together = [weight.requires_grad_()]
        self.apart = [head.detach().requires_grad_() for head in weight]  # the same memory
        self.target = torch.randint(self.classes, (samples,), device=DEVICE)

    @property
    def gradient_bytes(self) -> int:
        return sum(value.numel() * value.element_size() for value in (self.features, *self.together))

    def call(self, name: str) -> Callable[[], Tensor]:
        loss, together = LOSSES[name]
        heads = self.together if together else self.apart

        def step() -> Tensor:
            value = loss(self.features, heads, self.target)
            value.backward()
            for part in (self.features, *heads):
                part.grad = None
            return value.detach()

        return step


def relative_errors(shape: tuple[int, int, int, int]) -> dict[str, float]:
    """Relative error of value and gradients, against float64 with all logits."""
    problem = Problem(shape)
    sources = [problem.features, problem.together[0]]
    value = ours(problem.features, problem.together, problem.target)
    gradients = torch.autograd.grad(value, sources)
    exact = [source.detach().double().requires_grad_() for source in sources]
    logits = torch.einsum("nd,kcd->knc", *exact)
    expected = amended_cross_entropy(logits, problem.target, DIVERSITY)
    pairs = zip((value, *gradients), (expected, *torch.autograd.grad(expected, exact)), strict=True)
    return {
        name: float(((mine.double() - theirs).norm() / theirs.norm()).detach())
        for name, (mine, theirs) in zip(("value", "features", "weights"), pairs, strict=True)
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, help="write the results here, as JSON")
    parser.add_argument("--quick", action="store_true", help="a small shape, few rounds: a smoke test")
    parser.add_argument("--rounds", type=int, default=10)
    options = parser.parse_args()
    shape, rounds = (QUICK, 2) if options.quick else (SHAPE, options.rounds)
    members, samples, classes, width = shape
    results: dict[str, Any] = {
        "environment": measure_gpu.environment(),
        "ceilings": measure_gpu.ceilings(),
        "shape": {"members": members, "samples": samples, "classes": classes, "width": width, "dtype": "bfloat16"},
        "operations": 6 * members * samples * classes * width,
        "errors": {str(size): relative_errors(size) for size in (QUICK, (3, 301, 4099, 128))},
    }
    names = [name for name in LOSSES if "Liger" not in name or find_spec("liger_kernel")]
    problem = Problem(shape)
    calls = {name: problem.call(name) for name in names}
    peaks = {}
    for name, call in calls.items():
        call()  # compiles, and makes the workspace of the products
        peaks[name] = measure_gpu.peak_bytes(call) - problem.gradient_bytes
        torch.cuda.empty_cache()
    one = Problem((1, *shape[1:]))
    results["peak_bytes_of_one_member"] = measure_gpu.peak_bytes(one.call(OURS)) - one.gradient_bytes
    del one
    compared = measure.compare(measure_gpu.timings(calls, rounds), OURS)
    ceiling = results["ceilings"]["bf16_operations_per_second"]
    rows = []
    for name, figures in compared.items():
        figures["peak_bytes"] = peaks[name]
        figures["part_of_ceiling"] = results["operations"] / figures["seconds"]["median"] / ceiling
        rows.append(
            [
                name,
                measure.milliseconds(figures["seconds"]),
                measure.factor(figures[f"times_{OURS}"]),
                TARGETS.get(name, ""),
                f"{figures['part_of_ceiling']:.1%}",
                f"{peaks[name] / GIB:.2f}",
            ]
        )
    results["contenders"] = compared
    header = ["loss", "ms: median (20 to 80 %)", "times torchace", "target", "of the ceiling", "GiB beside gradients"]
    print(measure.table(header, rows))
    print({key: value for key, value in results.items() if key != "contenders"})
    if options.out is not None:
        options.out.parent.mkdir(parents=True, exist_ok=True)
        options.out.write_text(json.dumps(results, indent=1) + "\n")


if __name__ == "__main__":
    main()
