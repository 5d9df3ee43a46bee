"""ResNet-110 with ten classifiers on one GPU: what the heads cost, and what several runs at once save.

    python benchmarks/bench_resnet_gpu.py --out docs/results/bench_resnet_gpu.json

Batches of 128 of random images of CIFAR's size, cropped, mirrored and normalised on the device, bf16, the SGD of
`experiments/table2.toml`, the whole step in one CUDA graph, as `engine.fit` trains. `side by side` gives every run a
stream, a branch of the graph, of cuDNN's kernels; `abreast` computes all runs layer by layer with kernels of our own.
Targets: ten classifiers take at most 1.01 times as long as one; eight runs are per model at least 2.2 times cheaper
than one in the same mode, and abreast at least 3 times cheaper than one run side by side, a plain captured step.
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import measure
import measure_gpu
import torch

from torchace.data import Batches, CropFlip, Split
from torchace.engine.abreast import Abreast
from torchace.engine.graph import EAGER_STEPS, Stepper
from torchace.engine.network import SideBySide
from torchace.engine.recipe import Recipe, make_optimizer, set_learning_rate
from torchace.models import cifar_resnet
from torchace.nn import SMOC

MODES: dict[str, type[SideBySide]] = {"side by side": SideBySide, "abreast": Abreast}
SIDE, ABREAST = MODES
CLASSES, HEADS, DIVERSITY = 10, 10, 0.1
IMAGES = 10_000
NORMALIZE = ((125.3, 123.0, 113.9), (63.0, 62.1, 66.7))  # of CIFAR-10
HEADS_COST, SAVED_IN_MODE, SAVED_ABREAST = 1.01, 2.2, 3.0
GIB = 1 << 30
# as in `experiments/table2.toml`
RECIPE = Recipe(
    steps=64_000,
    optimizer="sgd",
    learning_rate=0.1,
    momentum=0.9,
    weight_decay=1e-4,
    schedule="step",
    milestones=(32_000, 48_000),
    warmup_steps=400,
    warmup_learning_rate=0.01,
    precision="bf16",
)


class Case(NamedTuple):
    mode: str
    heads: int
    runs: int

    def __str__(self) -> str:
        return f"{self.mode}, K={self.heads}, {self.runs} run{'s' if self.runs > 1 else ''}"


@dataclass(frozen=True)
class Setting:
    """The size of what is timed."""

    depth: int
    batch: int
    images: int
    cases: list[Case]
    steps: int  # of a timing
    rounds: int
    device: str

    @classmethod
    def of(cls, options: argparse.Namespace) -> Setting:
        together = {SIDE: [1, 2], ABREAST: [1, 2]} if options.quick else {SIDE: [1, 8], ABREAST: [1, 2, 4, 8]}
        cases = [Case(mode, 1, 1) for mode in MODES]
        cases += [Case(mode, HEADS, runs) for mode in MODES for runs in together[mode]]
        if options.device == "cpu":
            return cls(20, 8, 100, cases, 2, options.rounds or 2, options.device)
        if options.quick:
            return cls(20, 128, IMAGES, cases, 20, options.rounds or 3, options.device)
        return cls(110, 128, IMAGES, cases, 20, options.rounds or 10, options.device)

    @property
    def most_runs(self) -> int:
        return max(case.runs for case in self.cases)


class Training:
    """Runs in training; a call takes some steps, each as in `engine.fit`."""

    def __init__(self, case: Case, split: Split, setting: Setting) -> None:
        torch.manual_seed(0)
        ensembles = []
        for _ in range(case.runs):
            trunk = cifar_resnet(setting.depth, None)
            ensembles.append(SMOC(trunk, trunk.num_features, CLASSES, case.heads))
        network = MODES[case.mode](ensembles).to(setting.device)
        if setting.device != "cpu":
            network = network.to(memory_format=torch.channels_last)  # type: ignore[call-overload]
        network.train()
        self.batches = Batches(split, setting.batch, normalize=NORMALIZE, augment=CropFlip())
        self.optimizer = make_optimizer(RECIPE, list(network.parameters()))
        self.stepper = Stepper(network, self.optimizer, RECIPE)
        self.seeds = list(range(case.runs))
        self.diversity = torch.full((case.runs,), DIVERSITY, device=setting.device)
        self.active = torch.ones(case.runs, dtype=torch.bool, device=setting.device)
        self.scores = torch.zeros(case.runs, dtype=torch.float64, device=setting.device)
        self.taken, self.steps = 0, setting.steps

    def __call__(self) -> None:
        self.take(self.steps)

    def take(self, steps: int) -> None:
        for _ in range(steps):
            x, y = self.batches.batch_many(self.seeds, *self.batches.locate(self.taken))
            set_learning_rate(self.optimizer, RECIPE.learning_rate_at(self.taken))
            self.scores += self.stepper(x, y, None, self.diversity, self.active).score
            self.taken += 1

    @property
    def score(self) -> float:
        """The mean cross entropy so far, over steps and runs: of random labels near ln 10, and finite."""
        return float(self.scores.mean()) / self.taken


def images(setting: Setting) -> Split:
    """Random pixels and labels, on the device."""
    g = torch.Generator(setting.device).manual_seed(0)
    pixels = torch.randint(256, (setting.images, 3, 32, 32), generator=g, device=setting.device, dtype=torch.uint8)
    return Split(pixels, torch.randint(CLASSES, (setting.images,), generator=g, device=setting.device))


def started(case: Case, split: Split, setting: Setting) -> tuple[Training, int | None]:
    """A training past its capture, and the bytes that torch holds for it."""
    start = time.perf_counter()
    on_gpu = setting.device != "cpu"
    before = torch.cuda.memory_reserved() if on_gpu else 0
    training = Training(case, split, setting)
    training.take(2 if setting.device == "cpu" else EAGER_STEPS + 3)
    held = None
    if on_gpu:
        torch.cuda.synchronize()
        torch.cuda.empty_cache()  # what the eager steps left in their streams
        held = torch.cuda.memory_reserved() - before
    size = "" if held is None else f", {held / GIB:.1f} GiB"
    print(f"{case}: ready in {time.perf_counter() - start:.1f} s{size}", flush=True)
    return training, held


def ratios(times: list[float], to: list[float]) -> dict[str, float]:
    """How many times `to` they are, round by round."""
    return measure.quantiles([value / base for value, base in zip(times, to, strict=True)])


def answers(a_model: Mapping[Case, list[float]], most: int) -> list[dict[str, Any]]:
    """The questions, from the seconds of a step of one model."""
    found = []

    def ask(question: str, ratio: dict[str, float], target: str = "", met: bool | None = None) -> None:
        found.append({"question": question, "ratio": ratio, "target": target, "met": met})

    for mode in MODES:
        ratio = ratios(a_model[Case(mode, HEADS, 1)], a_model[Case(mode, 1, 1)])
        target, met = f"at most {HEADS_COST}", ratio["median"] <= HEADS_COST
        ask(f"{mode}: K={HEADS} to K=1, one run", ratio, target, met)
    for mode in MODES:
        ratio = ratios(a_model[Case(mode, HEADS, 1)], a_model[Case(mode, HEADS, most)])
        target, met = f"at least {SAVED_IN_MODE}", ratio["median"] >= SAVED_IN_MODE
        ask(f"{mode}: one run to {most}, per model", ratio, target, met)
    plain = a_model[Case(SIDE, HEADS, 1)]
    ratio = ratios(plain, a_model[Case(ABREAST, HEADS, most)])
    target, met = f"at least {SAVED_ABREAST:g}", ratio["median"] >= SAVED_ABREAST
    ask(f"one run side by side to {most} abreast, per model", ratio, target, met)
    ask("one run side by side to one abreast", ratios(plain, a_model[Case(ABREAST, HEADS, 1)]))
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, help="write the results here, as JSON")
    parser.add_argument("--quick", action="store_true", help="ResNet-20, two runs at most: shows that it runs")
    parser.add_argument("--rounds", type=int, help="rounds of a timing")
    parser.add_argument("--device", default="cuda", choices=["cuda", "cpu"], help="cpu, with --quick, for a test")
    options = parser.parse_args()
    if options.device == "cpu" and not options.quick:
        parser.error("Expected --quick with --device cpu, which only shows that it runs.")
    began = time.perf_counter()
    setting = Setting.of(options)
    environment = (measure if setting.device == "cpu" else measure_gpu).environment()
    split = images(setting)
    ready = {case: started(case, split, setting) for case in setting.cases}
    calls = {str(case): training for case, (training, _) in ready.items()}
    if setting.device == "cpu":
        seconds = measure.timings(calls, rounds=setting.rounds)
    else:
        seconds = measure_gpu.timings(calls, setting.rounds, flush=False)

    rows, contenders = [], []
    a_model = {}
    for case, (training, held) in ready.items():
        a_step = [value / setting.steps for value in seconds[str(case)]]
        a_model[case] = [value / case.runs for value in a_step]
        figures = {
            **case._asdict(),
            "seconds_a_step": measure.quantiles(a_step),
            "seconds_a_model_step": measure.quantiles(a_model[case]),
            "held_bytes": held,
            "score": training.score,
        }
        contenders.append(figures)
        rows.append(
            [
                case.mode,
                str(case.heads),
                str(case.runs),
                measure.milliseconds(figures["seconds_a_step"]),
                measure.milliseconds(figures["seconds_a_model_step"]),
                "?" if held is None else f"{held / GIB:.1f}",
                f"{training.score:.2f}",
            ]
        )
    print(f"\nResNet-{setting.depth}, batches of {setting.batch}, {setting.rounds} rounds of {setting.steps} steps\n")
    print(measure.table(["mode", "K", "runs", "ms a step", "ms a model-step", "GiB", "cross entropy"], rows))
    found = answers(a_model, setting.most_runs)
    verdicts = {None: "", True: "met", False: "MISSED"}
    rows = [
        [one["question"], measure.factor(one["ratio"]), f"{one['target']} {verdicts[one['met']]}".strip()]
        for one in found
    ]
    print()
    print(measure.table(["how many times", "median (20 to 80 %)", "target"], rows))
    results = {
        "environment": environment,
        "depth": setting.depth,
        "batch_size": setting.batch,
        "images": setting.images,
        "diversity": DIVERSITY,
        "steps_of_a_timing": setting.steps,
        "rounds": setting.rounds,
        "contenders": contenders,
        "answers": found,
        "seconds_in_all": round(time.perf_counter() - began, 1),
    }
    print(f"\n{results['seconds_in_all']} s in all")
    if options.out is not None:
        options.out.parent.mkdir(parents=True, exist_ok=True)
        options.out.write_text(json.dumps(results, indent=1) + "\n")


if __name__ == "__main__":
    main()
