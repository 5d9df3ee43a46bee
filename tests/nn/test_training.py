"""Every kind of ensemble learns, and λ acts as the mathematics says, on data that comes with scikit-learn."""

from __future__ import annotations

import copy
import itertools
from collections.abc import Callable, Iterator
from functools import cache

import pytest
import torch
import torch.nn.functional as F
from sklearn.datasets import load_diabetes, load_digits
from torch import Tensor, nn

from torchace.functional import (
    amended_cross_entropy,
    bias_variance_covariance,
    binary_amended_cross_entropy,
    disagreement,
    fit_member_weights,
    negative_correlation,
)
from torchace.nn import SMOC, AmendedCrossEntropyLoss, Ensemble, MemberWeights, StackedEnsemble, StackedLinear
from torchace.nn.base import EnsembleModule
from torchace.nn.branching import branch
from torchace.nn.conversion import stack_classifiers
from torchace.nn.stacking import Decision

EXACT = {"rtol": 0, "atol": 1e-12}  # float64, a few hundred operations on numbers of order 1


@cache
def digits() -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """1297 images `(N, 64)` in [0, 1] and their labels for training, 500 for testing."""
    images, labels = load_digits(return_X_y=True)
    order = torch.randperm(len(labels), generator=torch.Generator().manual_seed(0))
    x, y = torch.as_tensor(images / 16, dtype=torch.float32)[order], torch.as_tensor(labels)[order]
    return x[500:], y[500:], x[:500], y[:500]


def batches(epochs: int, size: int = 64, seed: int = 0) -> Iterator[tuple[Tensor, Tensor]]:
    x, y, _, _ = digits()
    g = torch.Generator().manual_seed(seed)
    for _ in range(epochs):
        for index in torch.randperm(len(x), generator=g).split(size):
            yield x[index], y[index]


def train(ensemble: EnsembleModule, diversity: float, epochs: int, lr: float = 5e-3, seed: int = 0) -> None:
    loss = AmendedCrossEntropyLoss(diversity)
    optimizer = torch.optim.Adam(ensemble.parameters(), lr=lr, fused=True)
    ensemble.train()
    for x, y in batches(epochs, seed=seed):
        optimizer.zero_grad()
        loss(ensemble(x), y).backward()
        optimizer.step()


def accuracy(ensemble: EnsembleModule) -> float:
    _, _, x, y = digits()
    return (ensemble.predict(x) == y).float().mean().item()


def mlp(width: int = 32) -> nn.Sequential:
    return nn.Sequential(nn.Linear(64, width), nn.ReLU(), nn.Linear(width, 10))


def trunk(width: int = 64) -> nn.Sequential:
    return nn.Sequential(nn.Linear(64, width), nn.ReLU())


def conv() -> nn.Sequential:
    return nn.Sequential(
        nn.Unflatten(1, (1, 8, 8)),
        nn.Conv2d(1, 8, 3, padding=1, bias=False),
        nn.BatchNorm2d(8),
        nn.ReLU(),
        nn.MaxPool2d(2),
        nn.Flatten(),
        nn.Linear(128, 10),
    )


def deep() -> nn.Sequential:
    return nn.Sequential(
        nn.Linear(64, 48), nn.LayerNorm(48), nn.GELU(), nn.Dropout(0.1), nn.Linear(48, 32), nn.Tanh(), nn.Linear(32, 10)
    )


def make_branched() -> EnsembleModule:
    model = nn.Sequential(nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 32), nn.ReLU(), nn.Linear(32, 10))
    return branch(model, at="2", num_members=4, reinitialize=True)


KINDS: dict[str, Callable[[], EnsembleModule]] = {
    "three architectures": lambda: Ensemble([mlp(64), conv(), deep()]),
    "members on a trunk": lambda: Ensemble([nn.Linear(64, 10), mlp(), mlp(16)], trunk=trunk()),
    "stacked": lambda: StackedEnsemble([mlp() for _ in range(8)]),
    "stacked with batch norm": lambda: StackedEnsemble([conv() for _ in range(3)]),
    "smoc": lambda: SMOC(trunk(), 64, 10, num_members=10),
    "low-rank smoc": lambda: SMOC(trunk(), 64, 10, num_members=10, rank=2),
    "branch": make_branched,
    "stack_classifiers": lambda: stack_classifiers(mlp(64), num_members=5),
}


SLOW = ("three architectures", "members on a trunk", "low-rank smoc", "branch")


@pytest.mark.parametrize("kind", [pytest.param(k, marks=pytest.mark.extended) if k in SLOW else k for k in KINDS])
def test_learns_digits(kind):
    torch.manual_seed(0)
    ensemble = KINDS[kind]()
    assert accuracy(ensemble) < 0.5
    train(ensemble, diversity=0.5, epochs=25)
    assert accuracy(ensemble) >= 0.95


def test_a_broken_member_loses_its_weight():
    """Member 1 learns random labels; the weights, uniform at the start, are trained beside the members."""
    torch.manual_seed(0)
    ensemble = Ensemble([mlp(48), mlp(16), mlp(32), conv()])
    weights = MemberWeights(4)
    optimizer = torch.optim.Adam(
        [{"params": list(ensemble.parameters())}, {"params": list(weights.parameters()), "lr": 0.02}], lr=5e-3
    )
    g = torch.Generator().manual_seed(1)
    for x, y in batches(10):
        wrong = torch.randint(10, y.shape, generator=g)
        targets = [wrong if k == 1 else y for k in range(4)]
        optimizer.zero_grad()
        logits = ensemble(x)
        members = sum(F.cross_entropy(own, target) for own, target in zip(logits, targets, strict=True))
        (members + weights.loss(logits, y)).backward()
        optimizer.step()
    alpha = weights().detach()
    assert alpha[1] < 0.05
    assert alpha[1] == alpha.min()
    ensemble.set_member_weights(alpha)
    assert accuracy(ensemble) >= 0.95

    x, y, _, _ = digits()
    fitted = fit_member_weights(ensemble(x).detach().log_softmax(2), y)
    assert fitted[1] < 0.05


# Effect of λ


@pytest.mark.parametrize("path", ["at once", "one by one"])
@pytest.mark.parametrize("kind", KINDS)
def test_first_gradients_are_line_2(kind, path, monkeypatch):
    """∂e^k/∂z^k = (1-λ)(q^k - p) + λ(q̄ - p), carried back by hand through a copy."""
    torch.manual_seed(0)
    if path == "one by one":
        monkeypatch.setattr("torchace.nn.stacked.decide", lambda *_, **__: Decision(False, "asked for", (), 0))
    ensemble = KINDS[kind]().double()
    for module in ensemble.modules():
        if isinstance(module, nn.Dropout):
            module.p = 0.0
    other = copy.deepcopy(ensemble)
    x, y, _, _ = digits()
    x, y, diversity = x[:32].double(), y[:32], 0.7
    amended_cross_entropy(ensemble(x), y, diversity).backward()

    logits = other(x)
    q, p = logits.detach().softmax(2), F.one_hot(y, 10)
    logits.backward(((1 - diversity) * (q - p) + diversity * (q.mean(0) - p)) / len(y))
    assert any(parameter.grad.abs().max() > 1e-3 for parameter in other.parameters())
    for (name, ours), theirs in zip(ensemble.named_parameters(), other.parameters(), strict=True):
        torch.testing.assert_close(ours.grad, theirs.grad, **EXACT, msg=lambda m, name=name: f"{name}: {m}")


@pytest.mark.parametrize("kind", ["three architectures", "stacked", "smoc", "branch"])
@pytest.mark.parametrize("link", ["sigmoid", "identity"])
def test_first_gradients_of_the_other_losses(kind, link):
    torch.manual_seed(0)
    ensemble = KINDS[kind]().double().eval()
    other = copy.deepcopy(ensemble)
    x, y, _, _ = digits()
    x, target, diversity = x[:16].double(), F.one_hot(y[:16], 10).double(), 0.7
    outputs = other(x)
    f = outputs.detach()
    if link == "sigmoid":
        binary_amended_cross_entropy(ensemble(x), target, diversity).backward()
        q = f.sigmoid()
        gradient = (1 - diversity) * (q - target) + diversity * (q.mean(0) - target)
    else:
        negative_correlation(ensemble(x), target, diversity).backward()
        gradient = (f - target) - diversity * (f - f.mean(0))
    outputs.backward(gradient / target.numel())
    for ours, theirs in zip(ensemble.parameters(), other.parameters(), strict=True):
        torch.testing.assert_close(ours.grad, theirs.grad, **EXACT)


def test_disagreement_rises_with_diversity():
    """Twenty small separate members; three seeds, each with the same start and the same batches for both λ."""
    _, _, x, _ = digits()
    for seed in range(3):
        values = []
        for diversity in (0.0, 0.7):
            torch.manual_seed(seed)
            ensemble = StackedEnsemble([mlp(8) for _ in range(20)])
            train(ensemble, diversity, epochs=8, lr=1e-2, seed=seed)
            values.append(disagreement(ensemble(x)).item())
        assert values[1] > values[0] + 0.02, (seed, values)


@pytest.mark.parametrize("diversity", [0.0, 0.5, 0.9])
def test_heads_on_the_same_samples_contract(diversity):
    """∇e^k - ∇e^j = (1-λ)(q^k - q^j): linear heads on fixed features are pulled together for every λ < 1."""
    torch.manual_seed(0)
    x, y, _, _ = digits()
    features = x[:200].double()
    heads = StackedLinear(64, 10, num_members=6).double()
    optimizer = torch.optim.SGD(heads.parameters(), lr=0.5)

    def distance() -> float:
        logits = heads(features).detach()
        logits = logits - logits.mean(2, keepdim=True)  # a constant changes no probability and has no gradient
        return (logits - logits.mean(0)).norm().item()

    distances = [distance()]
    for _ in range(300):
        optimizer.zero_grad()
        amended_cross_entropy(heads(features), y[:200], diversity).backward()
        optimizer.step()
        distances.append(distance())
    assert all(after < before for before, after in itertools.pairwise(distances))
    assert distances[-1] < {0.0: 0.3, 0.5: 0.5, 0.9: 0.85}[diversity] * distances[0]


def test_at_full_diversity_heads_do_not_contract():
    torch.manual_seed(0)
    x, y, _, _ = digits()
    features = x[:200].double()
    heads = StackedLinear(64, 10, num_members=4).double()
    start = heads.weight.detach().clone()
    optimizer = torch.optim.SGD(heads.parameters(), lr=0.5)
    for _ in range(50):
        optimizer.zero_grad()
        amended_cross_entropy(heads(features), y[:200], 1.0).backward()
        optimizer.step()
    gaps, before = (w - w[:1] for w in (heads.weight.detach(), start))
    torch.testing.assert_close(gaps, before, **EXACT)
    assert (heads.weight.detach() - start).norm() > 1  # they move, all alike


# Regression


@pytest.mark.parametrize("shared", [False, True])
def test_decomposition_of_trained_regressors_adds_up(shared):
    """Bias², variance and covariance add up to the error; `benchmarks/ncl_decomposition.py` in small."""
    x, y = (torch.as_tensor(values, dtype=torch.float64) for values in load_diabetes(return_X_y=True))
    y = ((y - y.mean()) / y.std())[:, None]
    x = x / x.std(0)
    test = slice(0, 100)
    terms, predictions = {}, {}
    for diversity in (0.0, 0.5):
        trainings = []
        for seed in range(4):
            torch.manual_seed(seed)
            if shared:
                body = nn.Sequential(nn.Linear(10, 8), nn.Tanh())
                ensemble: EnsembleModule = SMOC(body, 8, 1, num_members=4, link="identity").double()
            else:
                members = [nn.Sequential(nn.Linear(10, 4), nn.Tanh(), nn.Linear(4, 1)).double() for _ in range(4)]
                ensemble = StackedEnsemble(members, link="identity")
            own = 100 + torch.randperm(342)[:200]
            optimizer = torch.optim.Adam(ensemble.parameters(), lr=0.02)
            for _ in range(60):
                optimizer.zero_grad()
                negative_correlation(ensemble(x[own]), y[own], diversity).backward()
                optimizer.step()
            trainings.append(ensemble.eval()(x[test]).detach())
        predictions[diversity] = torch.stack(trainings)  # (T, K, N, 1)
        terms[diversity] = bias_variance_covariance(predictions[diversity], y[test])
    for diversity, decomposition in terms.items():
        error = (predictions[diversity].mean(1) - y[test]).square().mean()
        torch.testing.assert_close(decomposition.error, error, rtol=1e-12, atol=0)
        assert decomposition.variance > 0
        assert error < 1  # better than the mean of all targets
    assert not torch.allclose(terms[0.0].covariance, terms[0.5].covariance)
