"""Train and score an ensemble on images, for `adapters_members.py` and `adapters_finetuning.py`.

On a GPU a step is one CUDA graph in bf16; on a CPU it is eager float32. All kinds of members and all λ of a seed see
the same batches.
"""

from __future__ import annotations

import dataclasses
import json
import time
from argparse import Namespace
from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import measure
import measure_gpu
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torchmetrics.functional.classification import binary_auroc

import torchace as ace
from torchace.lab.data import Batches, CropFlip, Dataset, Split, load

EAGER_STEPS = 3  # before the capture


def load_data(name: str, quick: bool) -> Dataset:
    """Load a data set; only a small part of it if `quick`."""
    data = load(name)
    if not quick:
        return data
    parts = {part: getattr(data, part).take(torch.arange(count)) for part, count in (("train", 1200), ("test", 200))}
    return dataclasses.replace(data, **parts)


def make_batches(data: Dataset, split: Split, batch_size: int, seed: int, device: str) -> Batches:
    augment = CropFlip() if data.name == "cifar10" else None
    return Batches(split, batch_size, seed=seed, device=device, normalize=data.normalization(), augment=augment)


def train(ensemble: nn.Module, batches: Batches, *, steps: int, diversity: float, learning_rate: float) -> float:
    """Train with AdamW, linear warm-up over 5 % of the steps and linear decay to 0; return ms per step."""
    device = batches.device
    on_gpu = device.type == "cuda"
    ensemble.to(device).train()
    if on_gpu:
        use_channels_last(ensemble)
    parameters = [p for p in ensemble.parameters() if p.requires_grad]
    rate = torch.tensor(learning_rate, device=device)
    optimizer = torch.optim.AdamW(parameters, lr=rate, weight_decay=5e-4, fused=True, capturable=on_gpu)
    lambda_ = torch.tensor(diversity, device=device)

    def step(x: Tensor, y: Tensor) -> None:
        with torch.autocast(device.type, dtype=torch.bfloat16) if on_gpu else nullcontext():
            logits = ensemble(x)
        optimizer.zero_grad()
        ace.amended_cross_entropy(logits.float(), y, lambda_).backward()
        optimizer.step()

    run = GraphedStep(step) if on_gpu else step
    warmup = max(1, steps // 20)
    start = 0.0
    for i in range(steps):
        if i == EAGER_STEPS + 1:
            start = _now(on_gpu)
        rate.fill_(learning_rate * min((i + 1) / warmup, (steps - i) / max(1, steps - warmup)))
        run(*batches.batch(*batches.locate(i)))
    return (_now(on_gpu) - start) / max(1, steps - EAGER_STEPS - 1) * 1e3


def use_channels_last(ensemble: nn.Module) -> None:
    if isinstance(ensemble, ace.StackedEnsemble):
        ensemble.to(memory_format=torch.channels_last)
        return
    for parameter in ensemble.parameters():
        if parameter.ndim == 4:
            parameter.data = parameter.data.contiguous(memory_format=torch.channels_last)


class GraphedStep:
    """Run a step eagerly three times, then as a CUDA graph."""

    def __init__(self, step: Callable[[Tensor, Tensor], None]) -> None:
        self.step = step
        self.calls = 0
        self.inputs: tuple[Tensor, Tensor] | None = None
        self.graph = torch.cuda.CUDAGraph()

    def __call__(self, x: Tensor, y: Tensor) -> None:
        self.calls += 1
        if self.calls <= EAGER_STEPS:
            stream = torch.cuda.Stream()
            stream.wait_stream(torch.cuda.current_stream())
            with torch.cuda.stream(stream):
                self.step(x, y)
            torch.cuda.current_stream().wait_stream(stream)
            return
        if self.inputs is None:
            self.inputs = (x.clone(memory_format=torch.channels_last), y.clone())
            with torch.cuda.graph(self.graph):
                self.step(*self.inputs)
        self.inputs[0].copy_(x)
        self.inputs[1].copy_(y)
        self.graph.replay()


def _now(on_gpu: bool) -> float:
    if on_gpu:
        torch.cuda.synchronize()
    return time.perf_counter()


@torch.no_grad()
def predict(ensemble: nn.Module, data: Dataset, split: Split, device: str) -> Tensor:
    """Logits `(K, N, C)` in float32."""
    ensemble.eval()
    mean, std = (torch.tensor(values, device=device).view(1, -1, 1, 1) for values in data.normalization())
    logits = []
    for x in split.x.split(1000):
        x = ((x.to(device).float() - mean) / std).to(memory_format=torch.channels_last)
        with torch.autocast("cuda", dtype=torch.bfloat16) if device == "cuda" else nullcontext():
            logits.append(ensemble(x).float())
    return torch.cat(logits, 1)


def scores(logits: Tensor, target: Tensor) -> dict[str, float]:
    """Scores of the ensemble and mean scores of its members."""
    log_probs = ace.ensemble_log_probs(logits)
    right = logits.argmax(2) == target
    values = {
        "accuracy": (log_probs.argmax(1) == target).float().mean(),
        "cross_entropy": F.nll_loss(log_probs, target),
        "calibration_error": ace.calibration_error(log_probs.exp(), target),
        "member_accuracy": right.float().mean(),
        "member_cross_entropy": torch.stack([F.cross_entropy(z, target) for z in logits]).mean(),
        "disagreement": ace.disagreement(logits) if len(logits) > 1 else torch.zeros(()),
        "mutual_information": ace.mutual_information(logits),
    }
    return {name: value.item() for name, value in values.items()}


def auroc(logits: Tensor, is_new: Tensor) -> dict[str, float]:
    """AUROC of mutual information and predictive entropy for detecting classes that were not trained on."""
    log_probs = ace.ensemble_log_probs(logits)
    entropy = -(log_probs.exp() * log_probs).sum(1)
    information = ace.mutual_information(logits, reduction="none").clamp(min=0)
    # torchmetrics applies a sigmoid to values outside [0, 1]: divide by the largest possible entropy
    largest = torch.tensor(logits.shape[2]).log()
    return {
        "auroc_mutual_information": binary_auroc(information / largest, is_new.long()).item(),
        "auroc_entropy": binary_auroc(entropy.clamp(min=0) / largest, is_new.long()).item(),
    }


def report(
    options: Namespace, settings: dict[str, Any], runs: list[dict[str, Any]], columns: tuple[str, ...], started: float
) -> None:
    """Print means and standard deviations over seeds; write them with the runs, the settings and the environment."""
    groups: dict[tuple[str, float], list[dict[str, Any]]] = {}
    for run in runs:
        groups.setdefault((run["kind"], run["diversity"]), []).append(run)
    rows = []
    for (kind, diversity), group in groups.items():
        rows.append({"kind": kind, "diversity": diversity, "seeds": len(group)})
        for name in (name for name, value in group[0].items() if isinstance(value, float) and name != "diversity"):
            values = torch.tensor([run[name] for run in group], dtype=torch.float64)
            rows[-1][name] = {"mean": values.mean().item(), "sd": values.std(correction=min(1, len(group) - 1)).item()}
    cells = [
        [row["kind"], f"{row['diversity']:g}", *(f"{row[c]['mean']:.4f} ± {row[c]['sd']:.4f}" for c in columns)]
        for row in rows
    ]
    print("\n" + measure.table(["members", "λ", *columns], cells))
    environment = measure_gpu.environment() if options.device == "cuda" else measure.environment()
    environment["seconds_in_all"] = round(time.perf_counter() - started, 1)
    print(f"{environment['seconds_in_all']} s in all")
    if options.out is not None:
        results = {"environment": environment, "settings": settings, "rows": rows, "runs": runs}
        options.out.parent.mkdir(parents=True, exist_ok=True)
        options.out.write_text(json.dumps(results, indent=1) + "\n")
