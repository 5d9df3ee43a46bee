"""StackedEnsemble against a loop over members and `torch.func.vmap`: a training step on one GPU.

    python benchmarks/bench_stacking_gpu.py --out docs/results/bench_stacking_gpu.json

`resnet110` trains SMOC as `torchace run table2` does, one CUDA graph a step: one run, eight runs stacked, and these
compiled. The other cases are eager steps of `StackedEnsemble`, also compiled; bf16 for all but the MLPs. Targets: eight
ResNet-110 at most 3.8 ms per model and step, compiled 3.0; stacked at least 3 times as fast as the loop where a member
does not fill the GPU, never below 0.95.
"""

from __future__ import annotations

import argparse
import copy
import json
import time
from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import measure
import measure_gpu
import torch
from torch import Tensor, nn
from torch.func import functional_call, vmap

from torchace.functional import amended_cross_entropy
from torchace.lab.data import Batches, CropFlip, Split
from torchace.lab.training.config import TrainConfig, make_optimizer
from torchace.lab.training.run_group import RunGroup
from torchace.lab.training.step import EAGER_STEPS, TrainStep, graph_on_gpu
from torchace.models import cifar_resnet, mlp
from torchace.nn import SMOC, Ensemble, StackedEnsemble

CLASSES, HEADS, DIVERSITY = 10, 10, 0.1
GIB = 1 << 30
TRAIN_CONFIG = TrainConfig(steps=64_000, optimizer="sgd", learning_rate=0.1, weight_decay=1e-4, precision="bf16")


def resnet18() -> nn.Module:
    from torchvision.models import resnet18

    return resnet18(weights=None, num_classes=CLASSES)


def vit_tiny() -> nn.Module:
    import timm

    return timm.create_model("vit_tiny_patch16_224", pretrained=False, num_classes=CLASSES, img_size=32, patch_size=4)


class SmallBert(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        from transformers import BertConfig, BertForSequenceClassification

        config = BertConfig(
            vocab_size=30_522, hidden_size=256, num_hidden_layers=4, num_attention_heads=4, intermediate_size=1024
        )
        config.num_labels = CLASSES
        self.model = BertForSequenceClassification(config)

    def forward(self, tokens: Tensor) -> Tensor:
        return self.model(tokens).logits


Case = tuple[Callable[[], nn.Module], int, Callable[[], Tensor], bool]  # member, K, input, whether in bf16


def make_cases(quick: bool) -> dict[str, Case]:
    size = 8 if quick else 128
    return {
        "resnet18": (resnet18, 2 if quick else 8, lambda: torch.randn(size, 3, 32, 32), True),
        "vit_tiny": (vit_tiny, 2 if quick else 8, lambda: torch.randn(size, 3, 32, 32), True),
        "mlp": (lambda: mlp(784, 256, CLASSES), 4 if quick else 32, lambda: torch.randn(size, 784), False),
        "bert": (SmallBert, 2 if quick else 8, lambda: torch.randint(30_000, (size // 4, 64)), True),
    }


def make_step(ensemble: nn.Module, x: Tensor, y: Tensor, bf16: bool) -> Callable[[], None]:
    """Return a training step; bf16 by autocast."""
    optimizer = torch.optim.AdamW(ensemble.parameters(), lr=1e-4, fused=True)

    def step() -> None:
        optimizer.zero_grad()
        with torch.autocast(x.device.type, dtype=torch.bfloat16) if bf16 else nullcontext():
            logits = ensemble(x)
        amended_cross_entropy(logits, y, DIVERSITY).backward()
        optimizer.step()

    return step


def make_steps(case: Case, device: str, compiled: bool) -> dict[str, Callable[[], None]]:
    make, count, inputs, bf16 = case
    torch.manual_seed(0)
    members = [make() for _ in range(count)]
    x = inputs().to(device)
    y = torch.randint(CLASSES, (len(x),), device=device)
    ensembles: dict[str, nn.Module] = {
        "stacked": StackedEnsemble(copy.deepcopy(members)),
        "loop": Ensemble(copy.deepcopy(members)),
        "vmap": VmapEnsemble(StackedEnsemble(members).stacked),
    }
    if compiled:
        ensembles["stacked, compiled"] = StackedEnsemble(copy.deepcopy(members))
    for name, ensemble in ensembles.items():
        ensemble.to(device)
        if x.ndim == 4:
            for part in ensemble if isinstance(ensemble, Ensemble) else [ensemble]:
                part.to(memory_format=torch.channels_last)
        if name.endswith("compiled"):
            ensemble.compile()
    if x.ndim == 4:
        x = x.contiguous(memory_format=torch.channels_last)
    return {name: make_step(ensemble, x, y, bf16) for name, ensemble in ensembles.items()}


class VmapEnsemble(nn.Module):
    """A stacked network computed by `torch.func.vmap`."""

    def __init__(self, stacked: nn.Module) -> None:
        super().__init__()
        self.stacked = stacked

    def forward(self, x: Tensor) -> Tensor:
        def member(parameters: dict[str, Tensor], buffers: dict[str, Tensor]) -> Tensor:
            return functional_call(self.stacked, {**parameters, **buffers}, (x,))

        state = dict(self.stacked.named_parameters()), dict(self.stacked.named_buffers())
        return vmap(member, randomness="different")(*state)


def make_resnet_step(
    runs: int, split: Split, device: str, depth: int, batch: int, compiled: bool
) -> Callable[[], None]:
    """Return a training step of a run group, as in `fit`."""
    torch.manual_seed(0)
    ensembles = []
    for _ in range(runs):
        trunk = cifar_resnet(depth, None)
        ensembles.append(SMOC(trunk, trunk.num_features, CLASSES, HEADS))
    network = RunGroup(ensembles).to(device).train()
    if device == "cuda":
        assert network.trunk is not None
        network.trunk.to(memory_format=torch.channels_last)
    if compiled:
        network.compile()
    network.set_seeds(list(range(runs)))
    batches = Batches(split, batch, normalize=((125.3, 123.0, 113.9), (63.0, 62.1, 66.7)), augment=CropFlip())
    optimizer = make_optimizer(TRAIN_CONFIG, list(network.parameters()))
    train_step = graph_on_gpu(TrainStep(network, optimizer, TRAIN_CONFIG))
    diversity = torch.full((runs,), DIVERSITY, device=device)
    active = torch.ones(runs, dtype=torch.bool, device=device)
    taken = 0

    def step() -> None:
        nonlocal taken
        x, y = batches.batch_many(list(range(runs)), *batches.locate(taken))
        train_step(x, y, None, diversity, active)
        taken += 1

    return step


def time_steps(calls: dict[str, Callable[[], None]], device: str, rounds: int, steps: int) -> dict[str, list[float]]:
    """Seconds per step; contenders take turns."""

    def repeat(call: Callable[[], None]) -> Callable[[], None]:
        return lambda: [call() for _ in range(steps)] and None

    repeated = {name: repeat(call) for name, call in calls.items()}
    if device == "cpu":
        found = measure.timings(repeated, rounds=rounds)
    else:
        found = measure_gpu.timings(repeated, rounds, flush=False)
    return {name: [value / steps for value in values] for name, values in found.items()}


def peak_memory(call: Callable[[], None], device: str) -> float | None:
    """Peak memory of a step in GiB, beyond what was allocated before."""
    if device == "cpu":
        return None
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    call()
    torch.cuda.synchronize()
    return (torch.cuda.max_memory_allocated() - before) / GIB


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, help="write the results here, as JSON")
    parser.add_argument("--quick", action="store_true", help="a smoke test")
    parser.add_argument("--rounds", type=int, default=10, help="rounds of a timing")
    parser.add_argument("--cases", nargs="+", default=["resnet110", "resnet18", "vit_tiny", "mlp", "bert"])
    parser.add_argument("--no-compile", action="store_true", help="leave the compiled contenders out")
    parser.add_argument("--device", default="cuda", choices=["cuda", "cpu"], help="cpu, with --quick, for a test")
    options = parser.parse_args()
    device, began = options.device, time.perf_counter()
    rounds = 2 if options.quick else options.rounds
    environment = (measure if device == "cpu" else measure_gpu).environment()
    results: dict[str, Any] = {"environment": environment, "rounds": rounds, "cases": {}}
    for name in options.cases:
        started = time.perf_counter()
        if name == "resnet110":
            depth, batch, images = (8, 8, 64) if options.quick else (110, 128, 10_000)
            g = torch.Generator(device).manual_seed(0)
            pixels = torch.randint(256, (images, 3, 32, 32), generator=g, device=device, dtype=torch.uint8)
            split = Split(pixels, torch.randint(CLASSES, (images,), generator=g, device=device))
            sizes = {"one run": (1, False), "eight runs": (8, False), "eight runs, compiled": (8, True)}
            sizes = {key: size for key, size in sizes.items() if not (size[1] and options.no_compile)}
            calls = {key: make_resnet_step(n, split, device, depth, batch, c) for key, (n, c) in sizes.items()}
            models = {key: n for key, (n, _) in sizes.items()}
        else:
            calls = make_steps(make_cases(options.quick)[name], device, not options.no_compile)
            models = dict.fromkeys(calls, make_cases(options.quick)[name][1])
        first: dict[str, float] = {}
        memory: dict[str, float | None] = {}
        failed: dict[str, str] = {}
        for key, call in list(calls.items()):  # past compiling and capturing
            start = time.perf_counter()
            try:
                for _ in range(EAGER_STEPS + 2):
                    call()
            except RuntimeError as error:
                failed[key] = str(error).split("\n")[0]
                print(f"{name}, {key}: {failed[key]}", flush=True)
                continue
            if device == "cuda":
                torch.cuda.synchronize()
            first[key] = time.perf_counter() - start
            memory[key] = peak_memory(call, device)
        calls = {key: call for key, call in calls.items() if key not in failed}
        seconds = time_steps(calls, device, rounds, 1 if options.quick else 5)
        rows = []
        found: dict[str, Any] = {}
        for key, values in seconds.items():
            a_model = measure.quantiles([value / models[key] for value in values])
            base = seconds.get("loop", seconds.get("one run"))
            assert base is not None
            other = models.get("loop", models.get("one run", 1))
            ratio = measure.quantiles([b / other / (v / models[key]) for b, v in zip(base, values, strict=True)])
            found[key] = {
                "models": models[key],
                "seconds_a_model_step": a_model,
                "times_the_loops_speed": ratio,
                "peak_gib_of_a_step": memory[key],
                "seconds_before": round(first[key], 1),
            }
            gib = "?" if memory[key] is None else f"{memory[key]:.2f}"
            rows.append([key, measure.milliseconds(a_model), measure.factor(ratio), gib, f"{first[key]:.1f}"])
        results["cases"][name] = {**found, **{key: {"failed": reason} for key, reason in failed.items()}}
        print(f"\n{name} ({time.perf_counter() - started:.0f} s)\n", flush=True)
        print(
            measure.table(["", "ms per run and step", "times the loop's speed", "GiB a step", "s before"], rows),
            flush=True,
        )
        del calls
        if device == "cuda":
            torch.cuda.empty_cache()
        results["seconds_in_all"] = round(time.perf_counter() - began, 1)
        if options.out is not None:  # after every case: what was measured is kept
            options.out.parent.mkdir(parents=True, exist_ok=True)
            options.out.write_text(json.dumps(results, indent=1) + "\n")


if __name__ == "__main__":
    main()
