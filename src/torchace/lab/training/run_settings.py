"""Settings that differ between the runs of a group: learning rate, weight decay and label smoothing."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from torchace.lab.training.config import LR_RATIO, TrainConfig, takes_argument
from torchace.lab.training.run_group import RunGroup
from torchace.nn.optimizers import check_elementwise

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
    check_elementwise(optimizer, {id(view) for group in optimizer.param_groups for view in group["params"]})
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
