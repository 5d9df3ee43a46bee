"""Run directories with made-up but realistic numbers, in the format the engine writes."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np
from safetensors.numpy import save_file

TABLE1 = [
    (0, 0.9790, 0.0669, 0.9767, 0.0810),
    (0.05, 0.9798, 0.0663, 0.9770, 0.0809),
    (0.1, 0.9799, 0.0664, 0.9768, 0.0802),
    (0.3, 0.9797, 0.0658, 0.9767, 0.0806),
    (0.5, 0.9802, 0.0649, 0.9764, 0.0842),
    (0.7, 0.9800, 0.0659, 0.9760, 0.0866),
]
TABLE2 = [
    (1, None, 6.43, 0.3056),
    (10, 0, 6.2, 0.3102),
    (10, 0.001, 6.14, 0.3041),
    (10, 0.01, 6.12, 0.3048),
    (10, 0.05, 5.98, 0.2968),
    (10, 0.1, 6.09, 0.2918),
    (10, 0.3, 6.13, 0.3137),
    (10, 0.5, 6.31, 0.4957),
]
SMALL_CLASSES = [str(digit) for digit in range(10)]
CIFAR = ["airplane", "automobile", "bird", "cat", "deer", "dog", "frog", "horse", "ship", "truck"]


@dataclass
class ArmSpec:
    """An arm, with the numbers its runs shall have: functions of λ, noise added by seed."""

    name: str
    label: str
    num_members: int
    diversities: Sequence[float]
    cross_entropy: Callable[[float], float]
    error: Callable[[float], float]
    disagreement: Callable[[float], float] = lambda diversity: 0.01 + 0.02 * diversity
    batches: str = "shared"
    network: str = "MLP 784-128-10"
    baseline: bool = False
    noise: float = 0.0003


@dataclass
class Spec:
    """An experiment to write."""

    name: str
    title: str
    arms: Sequence[ArmSpec]
    seeds: Sequence[int] = (0, 1, 2, 3, 4)
    classes: Sequence[str] = tuple(SMALL_CLASSES)
    image_shape: Sequence[int] | None = (28, 28)
    paper: dict[str, Any] | None = None
    validation: int = 0
    data: str = "mnist"
    failed: Sequence[tuple[str, float, int]] = ()
    description: str = "Numbers made up for a test."
    overrides: dict[str, Any] = field(default_factory=dict)


def write(directory: Path, spec: Spec) -> Path:
    """Writes a run directory and returns it."""
    (directory / "runs").mkdir(parents=True)
    experiment = {
        "format": 1,
        "name": spec.name,
        "title": spec.title,
        "description": spec.description,
        "task": "classification",
        "data": {
            "name": spec.data,
            "train": 60000 - spec.validation,
            "validation": spec.validation,
            "test": 10000,
            "classes": list(spec.classes),
            "image_shape": None if spec.image_shape is None else list(spec.image_shape),
            "schema": None,
        },
        "arms": [
            {
                "name": arm.name,
                "label": arm.label,
                "num_members": arm.num_members,
                "batches": arm.batches,
                "network": arm.network,
                "parameters": 101770 * arm.num_members,
                "diversities": list(arm.diversities),
                "baseline": arm.baseline,
            }
            for arm in spec.arms
        ],
        "seeds": list(spec.seeds),
        "paper": spec.paper,
        "hardware": {"device": "NVIDIA H200", "cpu": "two cores", "threads": 2},
        "versions": {"torchace": "0.1.0", "torch": "2.13.0", "python": "3.11.7"},
        "config": {"train": {"epochs": 10, "batch_size": 128, "optimizer": "adam", "learning_rate": 0.001}},
        "started": "2026-01-31T12:00:00+00:00",
        "seconds": 9.8,
        **spec.overrides,
    }
    (directory / "experiment.json").write_text(json.dumps(experiment))
    for arm in spec.arms:
        for diversity in arm.diversities:
            for seed in spec.seeds:
                _write_run(directory / "runs", spec, arm, diversity, seed)
    return directory


def _write_run(folder: Path, spec: Spec, arm: ArmSpec, diversity: float, seed: int) -> None:
    name = f"{arm.name}-l{diversity:g}-s{seed}"
    failed = (arm.name, diversity, seed) in spec.failed
    run = {
        "format": 1,
        "run": name,
        "arm": arm.name,
        "diversity": diversity,
        "seed": seed,
        "num_members": arm.num_members,
        "batches": arm.batches,
        "status": "failed" if failed else "finished",
        "failure": {"message": "The loss of member 3 is NaN.", "member": 3, "step": 1204} if failed else None,
        "metrics": None if failed else _metrics(spec, arm, diversity, seed),
        "history": [{"epoch": 1, "train_cross_entropy": 0.4}, {"epoch": 2, "train_cross_entropy": 0.2}],
        "steps": 4690,
        "seconds": 2.5,
        "parameters": 101770 * arm.num_members,
    }
    (folder / f"{name}.json").write_text(json.dumps(run))
    if not failed:
        save_file(_arrays(spec, arm, diversity, seed), folder / f"{name}.safetensors")


def _metrics(spec: Spec, arm: ArmSpec, diversity: float, seed: int) -> dict[str, Any]:
    common = np.random.default_rng([seed, 1])  # the same at every λ: runs of one seed are paired
    own = np.random.default_rng([seed, round(diversity * 1e6), sum(map(ord, arm.name))])
    scale = arm.noise * (common.normal() + 0.4 * own.normal())
    cross_entropy = arm.cross_entropy(diversity) + scale
    accuracy = 1 - arm.error(diversity) - 0.4 * scale + 0.0001 * own.normal()
    spread = max(0.0, arm.disagreement(diversity) * (1 + 0.05 * own.normal()))
    alone = arm.num_members == 1
    members = accuracy - 0.15 * spread + 0.0006 * own.normal(size=arm.num_members)
    test = {
        "accuracy": accuracy,
        "cross_entropy": cross_entropy,
        "brier": 0.45 * cross_entropy,
        "calibration_error": 0.003 + 0.004 * diversity,
        "member_accuracy": float(members.mean()),
        "member_cross_entropy": cross_entropy + 0.6 * spread,
        "member_brier": 0.45 * cross_entropy + 0.2 * spread,
        "member_calibration_error": 0.006,
        "disagreement": None if alone else spread,
        "mutual_information": None if alone else 0.6 * spread,
        "ambiguity": None if alone else 0.6 * spread,
        "members": members.tolist(),
    }
    validation = {**test, "cross_entropy": cross_entropy + 0.001} if spec.validation else None
    return {"test": test, "validation": validation, "train": None}


def _arrays(spec: Spec, arm: ArmSpec, diversity: float, seed: int) -> dict[str, np.ndarray]:
    rng = np.random.default_rng([seed, 7])
    K, C, M = arm.num_members, len(spec.classes), 16
    confidence = (np.arange(15) + 0.5) / 15
    count = np.round(10000 * np.exp(5 * confidence) / np.exp(5 * confidence).sum())
    count[:2] = 0
    correct = count * np.clip(confidence + 0.05 * np.sin(6 * confidence) * (1 - diversity), 0, 1)
    votes = rng.integers(0, C, (M, K))
    votes = np.where(rng.random((M, K)) < 0.7, votes[:, :1], votes)
    arrays = {
        "reliability_count": count,
        "reliability_confidence": count * confidence,
        "reliability_correct": correct,
        "disputed_index": rng.integers(0, 10000, M),
        "disputed_target": rng.integers(0, C, M),
        "disputed_votes": votes,
        "disputed_probs": np.full((M, C), 1 / C),
    }
    if spec.image_shape is not None:
        arrays["disputed_images"] = _images(rng, M, spec.image_shape)
    return arrays


def _images(rng: np.random.Generator, number: int, shape: Sequence[int]) -> np.ndarray:
    """Smooth strokes, (M, H, W) or (M, H, W, 3)."""
    y, x = np.mgrid[: shape[0], : shape[1]] / shape[0]
    images = []
    for _ in range(number):
        t = np.linspace(0, 1, 40)[:, None, None]
        a, b, c, d = rng.uniform(0.2, 0.8, 4)
        path_x, path_y = a + (b - a) * t + 0.2 * np.sin(5 * t + a), c + (d - c) * t + 0.2 * np.cos(4 * t + b)
        ink = np.exp(-((x - path_x) ** 2 + (y - path_y) ** 2) / 0.004).max(0)
        images.append(ink[..., None] * rng.uniform(0.4, 1, 3) + 0.1 if len(shape) == 3 else ink)
    return np.ascontiguousarray(np.clip(255 * np.stack(images), 0, 255).astype(np.uint8))


def table1(directory: Path, **changes: Any) -> Path:
    """Three arms: shared and exchanged batches at six λ, separate ones at λ=0; the paper's Table 1 beside."""
    grid = [row[0] for row in TABLE1]
    arms = [
        ArmSpec(name, f"{name} batches", 5, own_grid, *scores, batches=name, baseline=name == "separate")
        for name, own_grid, *scores in (
            ("shared", grid, lambda d: 0.0670 - 0.001 * d + 0.002 * d**4, lambda d: 0.02),
            ("exchanged", grid, lambda d: 0.0649 + 0.013 * (d - 0.35) ** 2 - 0.0016, lambda d: 0.0195 - 0.0006 * d),
            ("separate", [0], lambda d: 0.0644, lambda d: 0.0196),
        )
    ]
    names = ("diversity", "accuracy", "cross_entropy", "member_accuracy", "member_cross_entropy")
    rows = [{"label": f"λ={row[0]:g}", "num_members": 5, **dict(zip(names, row, strict=True))} for row in TABLE1]
    for row in rows:  # the paper's λ=0 has separate batches
        row["arms"] = ["separate"] if row["diversity"] == 0 else ["shared", "exchanged"]
    title = "Several models on MNIST: the paper's Table 1"
    spec = Spec("table1", title, arms, paper={"table": "Table 1", "rows": rows})
    return write(directory, replace(spec, **changes))


def table2(directory: Path, **changes: Any) -> Path:
    """K=1, its control, and K=10 heads that collapse; the paper's Table 2 beside, color images."""
    one: dict[str, Any] = {"network": "ResNet-110", "baseline": True}
    ten: dict[str, Any] = {"network": "ResNet-110, SMOC", "noise": 0.003}
    grid = [row[1] for row in TABLE2 if row[1] is not None]
    collapsed = (lambda d: 0.302 + 0.004 * d, lambda d: 0.062, lambda d: 0.0002 + 0.0003 * d)
    arms = [
        ArmSpec("single", "K=1", 1, [0], lambda d: 0.3056, lambda d: 0.0643, **one),
        ArmSpec("control", "K=1, head started at 1/√10", 1, [0], lambda d: 0.301, lambda d: 0.0622, **one),
        ArmSpec("smoc", "SMOC", 10, grid, *collapsed, **ten),
    ]
    names = ("num_members", "diversity", "error", "cross_entropy")
    rows = [{**dict(zip(names, row, strict=True)), "arms": ["single" if row[0] == 1 else "smoc"]} for row in TABLE2]
    title = "SMOC on CIFAR-10: the paper's Table 2"
    spec = Spec("table2", title, arms, data="cifar10", classes=CIFAR, image_shape=(32, 32, 3))
    return write(directory, replace(spec, paper={"table": "Table 2", "rows": rows}, **changes))


def small(directory: Path, **changes: Any) -> Path:
    """One arm, three λ, no images, no paper."""
    arm = ArmSpec("shared", "shared batches", 4, [0, 0.3, 0.7], lambda d: 0.2 - 0.05 * d, lambda d: 0.06 - 0.01 * d)
    return write(directory, replace(Spec("digits", "Digits", [arm], image_shape=None), **changes))
