"""Heads that stay apart: six kinds of heads on one ResNet-20, with the cost of a step.

    TORCHACE_DATA=data python benchmarks/heads.py --runs runs --out docs/results/heads.json
    python benchmarks/heads_page.py

Linear heads on one feature vector become one head (SMOC). Here they differ by construction: own samples, a fixed random
mask of the features, two layers, dropout, and for comparison an adapted last stage. CIFAR-10, K=4, three λ, five seeds.
"""

from __future__ import annotations

import json
from typing import Any

import torch
from image_sweeps import BATCH_SIZE, LEAST_EPOCHS, TIMED_STEPS, Sweeps, arguments, read_runs
from torch import Tensor, nn

import torchace as ace
from torchace.lab.schema.experiment import Experiment
from torchace.models import cifar_resnet
from torchace.nn import AdaptedEnsemble

DEPTH, MEMBERS = 20, 4
DIVERSITIES, SEEDS = [0.0, 0.3, 0.6], list(range(5))
EPOCHS = 10
FEATURES, CLASSES = 64, 10
SHARE, HIDDEN, DROPOUT = 0.5, 32, 0.5  # of features in a mask; units of two-layer heads
KINDS = ("plain", "own_samples", "mask", "two_layers", "dropout", "adapters")
# time of all kinds in units of plain heads: the pass without gradient of own samples, and four last stages
ALL_KINDS, SETUP_SECONDS = 8.0, 50.0


class FeatureMask(nn.Module):
    """Keep a fixed random share of the features, scaled as dropout does."""

    def __init__(self, num_features: int, share: float) -> None:
        super().__init__()
        kept = torch.randperm(num_features)[: round(share * num_features)]
        self.register_buffer("mask", torch.zeros(num_features).index_fill_(0, kept, 1 / share))

    def forward(self, features: Tensor) -> Tensor:
        return features * self.mask


def make_head(kind: str) -> nn.Module:
    """Return one member's head."""
    if kind == "two_layers":
        return nn.Sequential(nn.Linear(FEATURES, HIDDEN), nn.ReLU(), nn.Linear(HIDDEN, CLASSES))
    first = {"mask": lambda: FeatureMask(FEATURES, SHARE), "dropout": lambda: nn.Dropout(DROPOUT)}
    return nn.Sequential(*([first[kind]()] if kind in first else []), nn.Linear(FEATURES, CLASSES))


def make_ensemble(kind: str, num_members: int = MEMBERS) -> ace.Ensemble | AdaptedEnsemble:
    """Return a ResNet-20 trunk with heads of one kind."""
    if kind != "adapters":
        trunk = cifar_resnet(DEPTH, num_classes=None).to(memory_format=torch.channels_last)
        return ace.Ensemble([make_head(kind) for _ in range(num_members)], trunk)
    layers = dict(cifar_resnet(DEPTH).to(memory_format=torch.channels_last).named_children())
    last = {name: layers.pop(name) for name in ("stage3", "pool", "flatten", "fc")}
    tail = ace.adapt(nn.Sequential(*last.values()), num_members)
    return AdaptedTail(nn.Sequential(*layers.values()), tail)


class AdaptedTail(AdaptedEnsemble):
    """Adapted members on a shared trunk."""

    def __init__(self, trunk: nn.Module, tail: AdaptedEnsemble) -> None:
        super().__init__(tail.stacked, tail.num_members, tail.link, tail.num_classes, tail.options)
        self.trunk = trunk

    def forward(self, x: Tensor) -> Tensor:
        """Return the members' logits, `(K, N, C)`."""
        return super().forward(ace.average_gradients(self.trunk(x), self.num_members))


class Heads(Sweeps):
    """The sweep of all kinds, and one network for comparison."""

    def __init__(self, options: Any) -> None:
        super().__init__(options, self.results)

    def heads_experiment(self, kinds: tuple[str, ...], steps: int) -> Experiment:
        """Return the experiment of some kinds."""
        arms: list[dict[str, Any]] = []
        if len(kinds) > 1:
            one = {"factory": "heads:make_ensemble", "arguments": {"kind": "plain", "num_members": 1}}
            arms.append({"name": "one", "diversities": [0.0], "model": {**one, "kind": "branch", "num_members": 1}})
        for kind in kinds:
            own = {"batches": "exchanged", "batch_size": BATCH_SIZE // MEMBERS} if kind == "own_samples" else {}
            factory = {"factory": "heads:make_ensemble", "arguments": {"kind": kind}}
            arms.append({"name": kind, "model": {**factory, "kind": "branch"}, "train": own})
        sizes = {"diversities": DIVERSITIES, "seeds": SEEDS[:1] if self.options.quick else SEEDS}
        model = {"num_members": MEMBERS}
        return self.experiment("heads", steps=steps, model=model, arms=arms, **sizes, group_size=15, keep_weights=False)

    def results(self) -> dict[str, Any]:
        """Return all finished runs."""
        epochs = self.options.runs / "epochs.json"
        settings = {"num_members": MEMBERS, "depth": DEPTH, "share": SHARE, "hidden": HIDDEN, "dropout": DROPOUT}
        settings["epochs"] = json.loads(epochs.read_text()) if epochs.exists() else None
        return {"design": settings, "runs": read_runs(self.options.runs / "heads")}

    def train(self) -> None:
        """Train all kinds."""
        timed = self.heads_experiment(("plain",), 3 if self.options.quick else TIMED_STEPS)
        epochs = self.choose_epochs(lambda: ALL_KINDS * self.seconds_per_step(timed), SETUP_SECONDS)
        steps = 4 if self.options.quick else max(LEAST_EPOCHS, epochs) * self.steps_per_epoch
        self.run(self.heads_experiment(KINDS, steps))
        self.write()


def main() -> None:
    Heads(arguments(__doc__.splitlines()[0], EPOCHS).parse_args()).train()


if __name__ == "__main__":
    main()
