"""Predictions of ensembles with one problem each, or none."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from torchace.models import mlp
from torchace.nn import SMOC, AmendedCrossEntropyLoss, StackedEnsemble
from torchace.nn.base import EnsembleModule

Case = tuple[Tensor, Tensor]  # logits (K, N, C), target (N,)


def healthy(n: int = 1000, seed: int = 0, *, members: int = 5, classes: int = 4, own: float = 0.8) -> Case:
    """Members that see the truth's own logits, each with noise: their average is nearly calibrated."""
    g = torch.Generator().manual_seed(seed)
    truth = 3 * torch.randn(n, classes, generator=g)
    target = torch.multinomial(truth.softmax(1), 1, generator=g)[:, 0]
    return truth + own * torch.randn(members, n, classes, generator=g), target


def make_collapsed(n: int = 1000, seed: int = 0) -> Case:
    return healthy(n, seed, own=0.05)


def with_member_at_chance(n: int = 1000, seed: int = 0) -> Case:
    logits, target = healthy(n, seed)
    logits[2] = torch.randn(logits[2].shape, generator=torch.Generator().manual_seed(seed + 1))
    return logits, target


def with_copy(n: int = 1000, seed: int = 0) -> Case:
    logits, target = healthy(n, seed)
    logits[3] = logits[1]
    return logits, target


def make_co_adapted(n: int = 1000, seed: int = 0) -> Case:
    """Each member knows a third of the samples, another third each, and is confident and wrong elsewhere."""
    g = torch.Generator().manual_seed(seed)
    target = torch.randint(10, (n,), generator=g)
    wrong = 4.0 * F.one_hot(torch.randint(10, (3, n), generator=g), 10)
    knows = torch.arange(3)[:, None] == torch.randint(3, (n,), generator=g)
    return torch.where(knows[..., None], 9.0 * F.one_hot(target, 10), wrong), target


def make_dominated(n: int = 1000, seed: int = 0) -> Case:
    """Member 1 is confident and mostly right; the others are near chance."""
    g = torch.Generator().manual_seed(seed)
    target = torch.randint(5, (n,), generator=g)
    logits = 0.3 * torch.randn(4, n, 5, generator=g)
    said = torch.where(torch.rand(n, generator=g) < 0.9, target, torch.randint(5, (n,), generator=g))
    logits[1] += 6 * F.one_hot(said, 5)
    return logits, target


def with_lost_class(n: int = 1000, seed: int = 0) -> Case:
    logits, target = healthy(n, seed)
    logits[:, :, 2] -= 9
    return logits, target


def scale_logits(factor: float) -> Case:
    logits, target = healthy(2000)
    return factor * logits, target


def digits() -> tuple[Tensor, Tensor, Tensor, Tensor]:
    from sklearn.datasets import load_digits

    x, y = load_digits(return_X_y=True)
    x, y = torch.tensor(x / 16, dtype=torch.float32), torch.tensor(y)
    order = torch.randperm(len(x), generator=torch.Generator().manual_seed(0))
    train, test = order[:1000], order[1000:]
    return x[train], y[train], x[test], y[test]


def train_on_digits(kind: str) -> dict[str, Tensor]:
    """Ensembles trained on digits: `"separate"` networks, linear heads on one network (`"smoc"`), `"λ=1"`."""
    torch.manual_seed(1)
    ensemble: EnsembleModule
    if kind == "smoc":
        ensemble = SMOC(mlp(64, 128, None), 128, 10, num_members=5)
    else:
        ensemble = StackedEnsemble([mlp(64, 8 if kind == "λ=1" else 16, 10) for _ in range(8)])
    x, y, x_test, y_test = digits()
    loss = AmendedCrossEntropyLoss(1.0 if kind == "λ=1" else 0.5)
    optimizer = torch.optim.Adam(ensemble.parameters(), lr=5e-3)
    for _ in range(40):
        for batch in torch.randperm(1000).split(64):
            optimizer.zero_grad()
            loss(ensemble(x[batch]), y[batch]).backward()
            optimizer.step()
    with torch.no_grad():
        return {"logits": ensemble(x_test), "target": y_test, "train_logits": ensemble(x), "train_target": y}
