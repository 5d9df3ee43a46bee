"""Configuration of a training, and settings that differ between runs; schedules are pure functions of the step."""

from __future__ import annotations

import inspect
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from numbers import Integral
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from torchace.lab.training.run_group import RunGroup
from torchace.nn.optimizers import check_elementwise

LR_RATIO = "lr_ratio"  # key of a parameter group: its learning rate relative to the configured one


@dataclass(frozen=True)
class TrainConfig:
    """Hyperparameters of one training; steps are counted from 0."""

    steps: int
    task: str = "classification"  # "classification", "multilabel" or "regression"
    batches: str = "shared"  # "shared", "separate" or "exchanged"
    optimizer: str | Callable[..., Any] = "adam"  # "sgd", "adam", "adamw", or a class or function of parameters
    optimizer_arguments: Mapping[str, Any] = field(default_factory=dict)
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
    """Optimizer of parameters or groups; a built-in one is fused, with its learning rate on the device of a GPU."""
    if not isinstance(config.optimizer, str):
        return _make_own_optimizer(config.optimizer, config, parameters)
    first = parameters[0]
    device = (first["params"][0] if isinstance(first, dict) else first).device
    on_gpu = device.type == "cuda"
    lr = torch.tensor(config.learning_rate, device=device) if on_gpu else config.learning_rate
    options = {"lr": lr, "weight_decay": config.weight_decay, "fused": True, **config.optimizer_arguments}
    if config.optimizer == "sgd":
        return torch.optim.SGD(parameters, **{"momentum": config.momentum, "nesterov": config.nesterov, **options})
    kinds: dict[str, type[torch.optim.Adam]] = {"adam": torch.optim.Adam, "adamw": torch.optim.AdamW}
    return kinds[config.optimizer](parameters, capturable=on_gpu, **options)


def takes_argument(function: Callable[..., Any], name: str) -> bool:
    """Whether a function has a keyword argument."""
    accepted = inspect.signature(function).parameters
    return name in accepted or any(p.kind is p.VAR_KEYWORD for p in accepted.values())


def _make_own_optimizer(make: Callable[..., Any], config: TrainConfig, parameters: list[Any]) -> torch.optim.Optimizer:
    """Call a class or function with the parameters, a learning rate if it takes one, and weight decay if it is set.

    Learning rates of the optimizer's parameter groups keep their ratio to the configured one.
    """
    name = getattr(make, "__qualname__", type(make).__name__)
    options = dict(config.optimizer_arguments)
    if takes_argument(make, "lr"):
        options.setdefault("lr", config.learning_rate)
    if config.weight_decay:
        options.setdefault("weight_decay", config.weight_decay)
    try:
        optimizer = make(parameters, **options)
    except Exception as error:  # the user's code may raise anything
        raise ValueError(f"{name} failed with {type(error).__name__}: {error}") from error
    if not isinstance(optimizer, torch.optim.Optimizer):
        raise ValueError(f"Expected {name} to return an optimizer, but it returned {type(optimizer).__name__}.")
    for group in optimizer.param_groups:
        group[LR_RATIO] = float(group["lr"]) / config.learning_rate
    return optimizer


RUN = "first_run"  # key of a parameter group: index of the first run that it updates


def split_parameters(network: RunGroup, configs: Sequence[TrainConfig]) -> list[nn.Parameter] | list[dict[str, Any]]:
    """The network's parameters, or parameter groups of views if the runs' learning rates or weight decays differ.

    A view holds the rows of consecutive runs with equal settings, so that every optimizer updates them as it would
    alone. See `connect_gradients`.
    """
    parameters = [p for p in network.parameters() if p.requires_grad]
    keys = [(config.learning_rate, config.weight_decay) for config in configs]
    if len(set(keys)) <= 1:
        return parameters
    optimizer = configs[0].optimizer
    if len({rate for rate, _ in keys}) > 1 and not isinstance(optimizer, str) and not takes_argument(optimizer, "lr"):
        raise ValueError(
            "Several values of learning_rate need an optimizer with the argument `lr`: add it, and use it."
        )
    starts = [run for run in range(len(keys)) if run == 0 or keys[run] != keys[run - 1]]
    groups = []
    for start, stop in zip(starts, [*starts[1:], len(keys)], strict=True):
        sizes = [len(p) // len(keys) for p in parameters]
        views = [p.detach()[start * n : stop * n] for p, n in zip(parameters, sizes, strict=True)]
        groups.append({"params": views, "weight_decay": configs[start].weight_decay, RUN: start})
    return groups


def connect_gradients(optimizer: Optimizer, network: RunGroup) -> None:
    """Give the views of `split_parameters` their rows of the gradients before each step."""
    if RUN not in optimizer.param_groups[0]:
        return
    parameters = [p for p in network.parameters() if p.requires_grad]
    check_elementwise(optimizer)
    for group in optimizer.param_groups:
        if isinstance(group["lr"], Tensor):
            group["lr"] = group["lr"].clone()

    def before_step(*_: Any) -> None:
        done = [0] * len(parameters)
        for group in optimizer.param_groups:
            for i, (view, p) in enumerate(zip(group["params"], parameters, strict=True)):
                rows = slice(done[i], done[i] + len(view))
                view.grad, done[i] = None if p.grad is None else p.grad[rows], rows.stop

    def after_step(*_: Any) -> None:
        for group in optimizer.param_groups:
            for view in group["params"]:
                view.grad = None  # frees the memory

    optimizer.register_step_pre_hook(before_step)
    optimizer.register_step_post_hook(after_step)


def set_learning_rates(optimizer: Optimizer, configs: Sequence[TrainConfig], step: int) -> None:
    """Set the learning rates of a step in place."""
    for group in optimizer.param_groups:
        value = configs[group.get(RUN, 0)].learning_rate_at(step) * group.get(LR_RATIO, 1.0)
        if isinstance(group["lr"], Tensor):
            group["lr"].fill_(value)
        else:
            group["lr"] = value


def label_smoothing(configs: Sequence[TrainConfig], device: torch.device) -> Tensor | None:
    """Label smoothing of each run, `(R,)`, or None if it is the same for all."""
    values = [config.label_smoothing for config in configs]
    return None if len(set(values)) <= 1 else torch.tensor(values, dtype=configs[0].dtype, device=device)


def resolve_device(device: str | int | torch.device) -> str:
    """Return the name of a device (cpu, cuda, cuda:N or N); `auto` is cuda if available."""
    is_number = isinstance(device, Integral) and not isinstance(device, bool)
    name = f"cuda:{device}" if is_number else str(device)
    if name == "auto":
        return "cuda" if torch.cuda.is_available() else "cpu"
    try:
        if torch.device(name).type not in ("cpu", "cuda"):
            raise RuntimeError("torchace trains on cpu and cuda")
        torch.empty(1, device=name)
    except (RuntimeError, AssertionError) as error:
        reason = str(error).splitlines()[0].rstrip(".")
        valid = "cpu, cuda, cuda:N or auto" if torch.cuda.is_available() else "cpu or auto"
        raise ValueError(f"Cannot use the device {name!r}: {reason}. Use {valid}.") from error
    return name
