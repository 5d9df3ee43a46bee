"""Eight adapters trained in one pass against eight trainings with peft: time and memory of a step.

    python benchmarks/bench_adapters_gpu.py --out docs/results/bench_adapters_gpu.json

A frozen encoder of BERT-base's size, 32 sequences of 128 tokens, bf16 autocast, AdamW; rank 8 on the query and value
layers (peft's default for BERT) and a head for each member. A call of `peft` is one step of each of the eight
trainings; its memory is that of one. Memory is the peak that torch has allocated in a step, weights and optimizer
included. Targets: at least 3 times faster, at most twice the memory of one training.
"""

from __future__ import annotations

import argparse
import gc
import json
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import measure
import measure_gpu
import torch
from peft import LoraConfig, get_peft_model
from torch import Tensor, nn
from transformers import BertConfig, BertForSequenceClassification

import torchace as ace

MEMBERS, RANK, LENGTH, BATCH, CLASSES, DIVERSITY = 8, 8, 128, 32, 2, 0.3
GIB = 1 << 30
Step = Callable[[], Any]


def make_encoder(quick: bool, checkpointing: bool = False) -> BertForSequenceClassification:
    torch.manual_seed(0)
    small = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 64}
    model = BertForSequenceClassification(BertConfig(num_labels=CLASSES, **(small if quick else {})))
    if checkpointing:
        model.gradient_checkpointing_enable({"use_reentrant": False})
    return model


def make_batch(device: str) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(0)
    tokens = torch.randint(30_000, (BATCH, LENGTH), generator=generator)
    return tokens.to(device), torch.randint(CLASSES, (BATCH,), generator=generator).to(device)


def make_step(model: nn.Module, loss: Callable[[Tensor, Tensor], Tensor], device: str) -> Step:
    """Return a step of AdamW on the trainable parameters; `model` maps tokens to logits."""
    model.to(device).train()
    parameters = [p for p in model.parameters() if p.requires_grad]
    optimizer = torch.optim.AdamW(parameters, lr=1e-4, fused=True)
    tokens, labels = make_batch(device)

    def step() -> None:
        optimizer.zero_grad()
        with torch.autocast(device, dtype=torch.bfloat16):
            output = model(input_ids=tokens)
        logits = output if isinstance(output, Tensor) else output.logits
        loss(logits.float(), labels).backward()
        optimizer.step()

    return step


def make_adapter_step(quick: bool, device: str, *, checkpointing: bool = False, compiled: bool = False) -> Step:
    model = make_encoder(quick, checkpointing)
    layers = [name for name, _ in model.named_modules() if name.endswith((".query", ".value"))]
    ensemble = ace.adapt(model, MEMBERS, adapter="low_rank", rank=RANK, layers=layers, freeze=True)
    loss = ace.AmendedCrossEntropyLoss(DIVERSITY).to(device)
    return make_step(torch.compile(ensemble) if compiled else ensemble, loss, device)


def make_peft_step(quick: bool, device: str, *, checkpointing: bool = False, compiled: bool = False) -> Step:
    model = make_encoder(quick, checkpointing)
    if checkpointing:
        model.enable_input_require_grads()  # so that the first layers are recomputed with gradients
    config = LoraConfig(r=RANK, target_modules=["query", "value"], modules_to_save=["classifier"])
    model = get_peft_model(model, config)
    return make_step(torch.compile(model) if compiled else model, nn.functional.cross_entropy, device)


def repeat(step: Step, times: int) -> Step:
    def steps() -> None:
        for _ in range(times):
            step()

    return steps


CONTENDERS: dict[str, Callable[[bool, str], Step]] = {
    "peft": make_peft_step,
    "one pass": make_adapter_step,
    "peft, checkpointing": lambda quick, device: make_peft_step(quick, device, checkpointing=True),
    "one pass, checkpointing": lambda quick, device: make_adapter_step(quick, device, checkpointing=True),
    "peft, compiled": lambda quick, device: make_peft_step(quick, device, compiled=True),
    "one pass, compiled": lambda quick, device: make_adapter_step(quick, device, compiled=True),
}


def peak_memory(make: Callable[[bool, str], Step], quick: bool) -> int:
    """Peak memory of the third step in bytes, model and optimizer included."""
    gc.collect()
    torch.cuda.empty_cache()
    before = torch.cuda.memory_allocated()
    step = make(quick, "cuda")
    repeat(step, 2)()
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    step()
    torch.cuda.synchronize()
    return torch.cuda.max_memory_allocated() - before


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--out", type=Path, help="write the results here, as JSON")
    parser.add_argument("--quick", action="store_true", help="a small encoder and few rounds, on the CPU without a GPU")
    parser.add_argument("--compile", action="store_true", help="also compiled contenders, which takes minutes")
    parser.add_argument("--rounds", type=int, default=20)
    options = parser.parse_args()
    started = time.perf_counter()
    names = [name for name in CONTENDERS if options.compile or "compiled" not in name]
    if not torch.cuda.is_available():
        run_on_cpu(names)
        return
    peaks = {name: peak_memory(CONTENDERS[name], options.quick) for name in names if "compiled" not in name}
    steps = {name: CONTENDERS[name](options.quick, "cuda") for name in names}
    calls = {name: repeat(step, MEMBERS) if "peft" in name else step for name, step in steps.items()}
    seconds = measure_gpu.timings(calls, 2 if options.quick else options.rounds, flush=False)
    rows = []
    for name in names:
        row: dict[str, Any] = {"contender": name, "seconds": measure.quantiles(seconds[name])}
        row["times_faster_than_peft"] = measure.quantiles(
            [base / own for base, own in zip(seconds["peft"], seconds[name], strict=True)]
        )
        if name in peaks:
            row |= {"peak_bytes": peaks[name], "times_memory_of_one_peft": peaks[name] / peaks["peft"]}
        rows.append(row)
    cells = [
        [
            row["contender"],
            measure.milliseconds(row["seconds"]),
            measure.factor(row["times_faster_than_peft"]),
            f"{row['peak_bytes'] / GIB:.2f}" if "peak_bytes" in row else "",
            f"{row['times_memory_of_one_peft']:.2f}" if "peak_bytes" in row else "",
        ]
        for row in rows
    ]
    header = ["contender", "ms, eight members", "times faster than peft", "GiB", "times one peft training"]
    print(measure.table(header, cells))
    environment = measure_gpu.environment() | {"seconds_in_all": round(time.perf_counter() - started, 1)}
    settings = {"num_members": MEMBERS, "rank": RANK, "length": LENGTH, "batch_size": BATCH, "diversity": DIVERSITY}
    if options.out is not None:
        options.out.parent.mkdir(parents=True, exist_ok=True)
        options.out.write_text(json.dumps({"environment": environment, "settings": settings, "rows": rows}, indent=1))


def run_on_cpu(names: list[str]) -> None:
    """Run every contender twice on the CPU, without measuring."""
    for name in names:
        step = CONTENDERS[name](True, "cpu")
        start = time.perf_counter()
        repeat(step, 2)()
        print(f"{name}: two steps in {time.perf_counter() - start:.1f} s")


if __name__ == "__main__":
    main()
