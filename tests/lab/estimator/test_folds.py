"""Members that leave out folds: who trains on what, out-of-fold predictions, temperature, weights as repeats."""

from __future__ import annotations

from typing import Any

import numpy as np
import pandas as pd
import pytest
import torch
from sklearn.datasets import load_breast_cancer, load_diabetes, load_iris
from sklearn.metrics import log_loss, mean_squared_error

from torchace.lab.data.folds import assign_folds
from torchace.lab.training.config import TrainConfig
from torchace.lab.training.tasks import compute_objective, partial_mixture
from torchace.sklearn import ACEClassifier, NCLRegressor

CANCER_X, CANCER_Y = load_breast_cancer(return_X_y=True)
SUGAR_X, SUGAR_Y = load_diabetes(return_X_y=True)
IRIS_X, IRIS_Y = load_iris(return_X_y=True)


def small(kind: type, **options: Any) -> Any:
    return kind(**{"num_members": 6, "hidden": (8,), "epochs": 12, "learning_rate": 0.02, "random_state": 0, **options})


def folds_of(model: Any, X: Any, y: Any) -> torch.Tensor:
    """The folds of a fitted model, from its seed."""
    return assign_folds(torch.from_numpy(X), torch.from_numpy(y), seed=model._state.seed)


# -- folds ------------------------------------------------------------------------------------------------------------


def test_identical_samples_and_groups_share_a_fold() -> None:
    rng = np.random.default_rng(0)
    x = rng.integers(0, 3, (400, 3)).astype(float)
    x[rng.random((400, 3)) < 0.1] = np.nan
    y = torch.from_numpy(rng.integers(0, 2, 400))
    folds = pd.Series(assign_folds(torch.from_numpy(x), y, seed=1).numpy())
    rows = [str(row) for row in x.tolist()]
    assert (folds.groupby(rows).nunique() == 1).all()
    groups = rng.integers(0, 60, 400)
    unique = torch.arange(400.0)[:, None]
    folds = pd.Series(assign_folds(unique, y, seed=1, groups=groups.astype(str)).numpy())
    assert (folds.groupby(groups).nunique() == 1).all()
    assert folds.value_counts().between(50, 110).all()
    # a group and an identical sample chain two groups together
    unique[0] = unique[1]
    folds = pd.Series(assign_folds(unique, y, seed=1, groups=groups).numpy())
    assert folds[groups == groups[0]].iloc[0] == folds[groups == groups[1]].iloc[0]


def test_few_distinct_samples_are_spread_and_unusable_groups_refused() -> None:
    y = torch.arange(300) % 2
    counts = pd.crosstab(assign_folds(torch.ones(300, 1).double(), y, seed=0).numpy(), y.numpy()).to_numpy()
    assert counts.tolist() == [[30, 30]] * 5
    constant = small(ACEClassifier, epochs=2).fit(np.ones((300, 1)), y.numpy())
    assert constant.oof_score_ == pytest.approx(np.log(2), abs=0.1)
    names = np.array(["a", "b", None] * 100, dtype=object)
    for groups, message in ((np.zeros(300), "at least two `groups`"), (names, "some are missing")):
        with pytest.raises(ValueError, match=message):
            small(ACEClassifier).fit(torch.randn(300, 2).numpy(), y.numpy(), groups=groups)


def test_folds_have_equal_shares_of_every_class_and_ignore_the_order() -> None:
    rng = np.random.default_rng(0)
    x, y = torch.from_numpy(rng.normal(size=(503, 2))), torch.from_numpy(np.sort(rng.integers(0, 4, 503)))
    folds = assign_folds(x, y, seed=3)
    counts = pd.crosstab(folds.numpy(), y.numpy()).to_numpy()
    assert counts.shape == (5, 4)
    assert (counts.max(0) - counts.min(0) <= 1).all()
    order = torch.from_numpy(rng.permutation(503))
    assert torch.equal(assign_folds(x[order], y[order], seed=3), folds[order])
    assert not torch.equal(assign_folds(x, y, seed=4), folds)
    times = torch.from_numpy(rng.integers(1, 4, 503))
    repeated = assign_folds(x.repeat_interleave(times, 0), y.repeat_interleave(times), seed=3)
    assert torch.equal(repeated, assign_folds(x, y, seed=3, weight=times * 0.5).repeat_interleave(times))


# -- training ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("diversity", [0.0, 0.4])
@pytest.mark.parametrize("task", ["classification", "regression"])
def test_a_sample_moves_the_members_that_train_on_it_toward_their_own_mixture(task: str, diversity: float) -> None:
    """The gradient of every logit against DESIGN's lines 2 and 6, with the mixture of the training members alone."""
    generator = torch.Generator().manual_seed(0)
    z = torch.randn(2, 4, 6, 3, generator=generator, dtype=torch.float64)  # (R, K, B, C)
    weight = torch.rand(2, 4, 6, generator=generator, dtype=torch.float64)
    weight *= torch.rand(2, 4, 6, generator=generator) < 0.7
    weight[0, :, 0] = 0  # no member trains on this sample
    y = torch.randint(0, 3, (2, 6), generator=generator)
    p = torch.nn.functional.one_hot(y, 3).double()
    if task == "regression":
        y = p = torch.randn(2, 6, 3, generator=generator, dtype=torch.float64)
    config = TrainConfig(steps=1, task=task, precision="float64")
    mixture = partial_mixture(z, weight > 0, config)
    lam = torch.tensor([diversity, 1.0], dtype=torch.float64)
    _, score, gradient = compute_objective(z, y, weight, lam, torch.ones(2, dtype=torch.bool), mixture, config)
    expected_score = torch.zeros(2, dtype=torch.float64)
    for r in range(2):
        for i in range(6):
            trains = [k for k in range(4) if weight[r, k, i] > 0]
            q = z[r, :, i].softmax(1) if task == "classification" else z[r, :, i]
            mean = sum((q[k] for k in trains), torch.zeros(3, dtype=torch.float64)) / max(len(trains), 1)
            for k in range(4):
                own = (1 - lam[r]) * (q[k] - p[r, i]) + lam[r] * (mean - p[r, i])
                scale = weight[r, k, i] / 6 / (3 if task == "regression" else 1)
                torch.testing.assert_close(gradient[r, k, i], scale * own, rtol=1e-10, atol=1e-14)
            if trains:
                loss = -mean[y[r, i]].log() if task == "classification" else (mean - y[r, i]).square().mean()
                expected_score[r] += weight[r, :, i].mean() * loss / 6
    torch.testing.assert_close(score, expected_score, rtol=1e-10, atol=0)


def test_no_member_learns_from_its_own_fold() -> None:
    """Targets that change within fold 0 change every member but those that leave it out."""
    options = {"epochs": 1, "early_stopping": "folds", "encoding": "standard"}
    model = small(NCLRegressor, **options).fit(SUGAR_X, SUGAR_Y)
    places = (folds_of(model, SUGAR_X, SUGAR_Y[:, None]) == 0).nonzero().flatten().numpy()
    y = SUGAR_Y.copy()
    y[places] = y[places[::-1]]  # the same mean and deviation
    other = small(NCLRegressor, **options).fit(SUGAR_X, y)
    x = torch.randn(10, 10, dtype=torch.float64)
    same = [torch.allclose(a(x), b(x), rtol=1e-9) for a, b in zip(model.members_, other.members_, strict=True)]
    assert same == [True, False, False, False, False, True]  # members 0 and 5


@pytest.mark.parametrize("num_members", [1, 3, 6, 10])
def test_out_of_fold_predictions_are_those_of_the_members_that_left_a_sample_out(num_members: int) -> None:
    model = small(ACEClassifier, num_members=num_members).fit(CANCER_X, CANCER_Y)
    folds = folds_of(model, CANCER_X, CANCER_Y)
    with torch.no_grad():
        q = model.ensemble_(torch.from_numpy(CANCER_X)).softmax(2).numpy()  # temperature included
    expected = np.full((len(folds), 2), np.nan)
    for fold in range(min(num_members, 5)):
        members = [k for k in range(num_members) if k % 5 == fold]
        expected[folds == fold] = q[members][:, folds == fold].mean(0)
    np.testing.assert_allclose(model.oof_predictions_, expected, rtol=0, atol=1e-9)
    known = ~np.isnan(expected[:, 0])
    assert known.mean() == pytest.approx(min(num_members, 5) / 5, abs=0.02)
    assert model.oof_score_ == pytest.approx(log_loss(CANCER_Y[known], expected[known]), rel=1e-9)
    assert 0.2 < model.temperature_ < 5
    # the history has the score before the temperature
    assert model.oof_score_ <= min(entry["validation"] for entry in model.history_) + 1e-9


def test_out_of_fold_predictions_of_numbers_are_in_their_units() -> None:
    y = 1e6 + 1e3 * SUGAR_Y
    weight = np.random.default_rng(0).integers(0, 3, len(y)).astype(float)
    model = small(NCLRegressor, epochs=40).fit(SUGAR_X, y, sample_weight=weight)
    assert model.oof_predictions_.shape == y.shape
    known = ~np.isnan(model.oof_predictions_)
    assert (known == (weight > 0)).all()
    error = mean_squared_error(y[known], model.oof_predictions_[known], sample_weight=weight[known])
    assert model.oof_score_ == pytest.approx(error, rel=1e-9)
    assert error < 0.8 * y.var()
    assert model.temperature_ == 1


@pytest.mark.parametrize("kind", [ACEClassifier, NCLRegressor])
@pytest.mark.parametrize("encoding", ["standard", "piecewise"])
def test_weights_count_as_repeated_samples_with_folds_too(kind: type, encoding: str) -> None:
    """scikit-learn's check of equivalence, with folds, bins and temperature: all samples in one batch."""
    rng = np.random.default_rng(0)
    X, y = (IRIS_X, IRIS_Y) if kind is ACEClassifier else (SUGAR_X[:150], SUGAR_Y[:150])
    X = X + 1e-3 * rng.normal(size=X.shape)  # no identical samples
    times = rng.integers(0, 4, len(y))
    options = {"early_stopping": "folds", "encoding": encoding, "batch_size": 1000, "epochs": 30, "num_members": 5}
    weighted = small(kind, **options).fit(X, y, sample_weight=times)
    repeated = small(kind, **options).fit(X.repeat(times, 0), y.repeat(times))
    order = rng.permutation(int(times.sum()))
    shuffled = small(kind, **options).fit(X.repeat(times, 0)[order], y.repeat(times)[order])
    for other in (repeated, shuffled):
        # sums of 150 numbers in another order, amplified by 30 steps of Adam
        if kind is ACEClassifier:
            np.testing.assert_allclose(other.predict_proba(X), weighted.predict_proba(X), rtol=0, atol=1e-6)
        else:
            np.testing.assert_allclose(other.predict(X), weighted.predict(X), rtol=1e-6)
        assert other.oof_score_ == pytest.approx(weighted.oof_score_, rel=1e-6)
        assert other.temperature_ == pytest.approx(weighted.temperature_, rel=1e-4)  # of a search by steps


def test_groups_keep_out_of_fold_scores_honest() -> None:
    """Labels that depend on the group alone cannot be predicted for a new group."""
    rng = np.random.default_rng(0)
    groups = np.repeat(np.arange(40), 10)
    X = rng.normal(size=(40, 3))[groups] + 0.01 * rng.normal(size=(400, 3))
    y = rng.integers(0, 2, 40)[groups]
    options = {"epochs": 40, "hidden": 64, "num_members": 5}
    blind = small(ACEClassifier, **options).fit(X, y)
    aware = small(ACEClassifier, **options).fit(X, y, groups=groups)
    assert blind.oof_score_ < 0.2
    assert aware.oof_score_ > 0.5
    for other in ({"early_stopping": True}, {"diversity": 0.3}):  # a hold-out: of eight groups, with luck 0.35
        assert small(ACEClassifier, **options | other).fit(X, y).oof_score_ < 0.2
        assert small(ACEClassifier, **options | other).fit(X, y, groups=groups).oof_score_ > 0.3
    with pytest.raises(ValueError, match="inconsistent numbers of samples"):
        small(ACEClassifier).fit(X, y, groups=groups[:-1])


def test_few_samples_are_trained_without_folds() -> None:
    model = small(ACEClassifier).fit(IRIS_X, IRIS_Y)
    assert (model.oof_score_, model.oof_predictions_, model.temperature_) == (None, None, 1.0)
    assert len(model.history_) == 12
    with pytest.raises(ValueError, match="at least 5 samples"):
        small(ACEClassifier, early_stopping="folds").fit(IRIS_X[48:52], IRIS_Y[48:52])


def test_shared_members_are_merged_and_have_nothing_out_of_fold() -> None:
    model = small(ACEClassifier, members="shared", hidden=(8, 8)).fit(CANCER_X, CANCER_Y)
    assert model.history_[-1]["validation"] is not None  # stopped on folds
    assert (model.oof_score_, model.oof_predictions_, model.temperature_) == (None, None, 1.0)
    raw = torch.from_numpy(CANCER_X)
    network = model._network.ensemble(0)
    with torch.no_grad():
        expected = network(model.ensemble_.trunk(raw))
        # the factors of a member multiply its weights instead of its activations
        torch.testing.assert_close(model.ensemble_(raw), expected, rtol=1e-9, atol=1e-9)
        assert model.ensemble_(raw).std(0).mean() > 0.01
    own = sum(p.numel() for p in model.ensemble_.parameters())
    assert sum(p.numel() for p in model._network.parameters()) < own / 2
    assert model.score(CANCER_X, CANCER_Y) > 0.95
    with pytest.raises(ValueError, match="share weights"):
        small(ACEClassifier, members="shared", batches="separate").fit(CANCER_X, CANCER_Y)
