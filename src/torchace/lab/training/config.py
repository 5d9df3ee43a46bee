"""Configuration of a training; schedules are pure functions of the step."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import torch


@dataclass(frozen=True)
class TrainConfig:
    """Hyperparameters of one training; steps are counted from 0."""

    steps: int
    task: str = "classification"  # "classification", "multilabel" or "regression"
    batches: str = "shared"  # "shared", "separate" or "exchanged"
    optimizer: str = "adam"  # "sgd", "adam" or "adamw"
    learning_rate: float = 1e-3
    momentum: float = 0.9  # of SGD
    nesterov: bool = False
    weight_decay: float = 0.0
    schedule: str = "constant"  # "constant", "step" or "cosine"
    milestones: tuple[int, ...] = ()  # steps of a decay
    decay: float = 0.1
    warmup_steps: int = 0
    warmup_learning_rate: float | None = None  # constant (He et al.); None: linear rise
    diversity_warmup_steps: int = 0  # linear rise of λ from 0
    label_smoothing: float = 0.0
    detach_others: bool = True
    precision: str = "float32"  # "float32", "float64" or "bf16" (autocast; weights stay float32)

    @property
    def dtype(self) -> torch.dtype:
        """Type of weights and inputs."""
        return torch.float64 if self.precision == "float64" else torch.float32

    def learning_rate_at(self, step: int) -> float:
        """Learning rate of a step."""
        if step < self.warmup_steps:
            if self.warmup_learning_rate is not None:
                return self.warmup_learning_rate
            return self.learning_rate * (step + 1) / self.warmup_steps
        if self.schedule == "step":
            return self.learning_rate * self.decay ** sum(step >= milestone for milestone in self.milestones)
        if self.schedule == "cosine":
            done = (step - self.warmup_steps) / max(self.steps - self.warmup_steps, 1)
            return self.learning_rate * 0.5 * (1 + math.cos(math.pi * done))
        return self.learning_rate

    def diversity_share_at(self, step: int) -> float:
        """Factor of λ at a step."""
        return 1.0 if step >= self.diversity_warmup_steps else step / self.diversity_warmup_steps


def make_optimizer(config: TrainConfig, parameters: list[Any]) -> torch.optim.Optimizer:
    """Fused optimizer of parameters or groups; on a GPU the learning rate is on the device, for CUDA graphs."""
    first = parameters[0]
    device = (first["params"][0] if isinstance(first, dict) else first).device
    on_gpu = device.type == "cuda"
    lr = torch.tensor(config.learning_rate, device=device) if on_gpu else config.learning_rate
    decay = config.weight_decay
    if config.optimizer == "sgd":
        options = {"momentum": config.momentum, "nesterov": config.nesterov}
        return torch.optim.SGD(parameters, lr=lr, weight_decay=decay, fused=True, **options)  # type: ignore[arg-type]
    kinds: dict[str, type[torch.optim.Adam]] = {"adam": torch.optim.Adam, "adamw": torch.optim.AdamW}
    return kinds[config.optimizer](parameters, lr=lr, weight_decay=decay, fused=True, capturable=on_gpu)
