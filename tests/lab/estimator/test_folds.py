"""Members that leave out folds: training samples, out-of-fold predictions, temperature, weights as repeats."""

from __future__ import annotations

from typing import Any

import numpy as np
import pandas as pd
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from scipy.optimize import minimize_scalar
from sklearn.datasets import load_breast_cancer, load_diabetes, load_iris
from sklearn.metrics import log_loss, mean_squared_error

from torchace.lab.data.folds import assign_folds, hold_out, number_blocks
from torchace.lab.data.rng import hashed_key
from torchace.lab.estimator import search
from torchace.lab.tables import training
from torchace.lab.training.config import TrainConfig
from torchace.lab.training.members import train_members
from torchace.lab.training.tasks import compute_objective, partial_mixture
from torchace.lab.tuning.grid_search import GridSearch
from torchace.sklearn import ACEClassifier, NCLRegressor

CANCER_X, CANCER_Y = load_breast_cancer(return_X_y=True)
SUGAR_X, SUGAR_Y = load_diabetes(return_X_y=True)
IRIS_X, IRIS_Y = load_iris(return_X_y=True)


def small(kind: type, **options: Any) -> Any:
    return kind(
        **{
            "num_members": 6,
            "hidden": (8,),
            "epochs": 12,
            "learning_rate": 0.02,
            "random_state": 0,
            "diversity": 0.0,
            **options,
        }
    )


def model_folds(model: Any, X: Any, y: Any) -> torch.Tensor:
    """The folds of a fitted model, from its seed."""
    return folds_for(torch.from_numpy(X), torch.from_numpy(y), seed=model._state.seed)


def folds_for(x: Any, y: Any, *, seed: int, weight: Any = None, groups: Any = None) -> torch.Tensor:
    return assign_folds(number_blocks(x, weight=weight, groups=groups), y, seed=seed, weight=weight)


# -- folds ------------------------------------------------------------------------------------------------------------


def test_identical_samples_and_groups_share_a_fold() -> None:
    rng = np.random.default_rng(0)
    x = rng.integers(0, 3, (400, 3)).astype(float)
    x[rng.random((400, 3)) < 0.1] = np.nan
    y = torch.from_numpy(rng.integers(0, 2, 400))
    folds = pd.Series(folds_for(torch.from_numpy(x), y, seed=1).numpy())
    rows = [str(row) for row in x.tolist()]
    assert (folds.groupby(rows).nunique() == 1).all()
    groups = rng.integers(0, 60, 400)
    unique = torch.arange(400.0)[:, None]
    folds = pd.Series(folds_for(unique, y, seed=1, groups=groups.astype(str)).numpy())
    assert (folds.groupby(groups).nunique() == 1).all()
    assert folds.value_counts().between(50, 110).all()
    # a group and an identical sample chain two groups together
    unique[0] = unique[1]
    folds = pd.Series(folds_for(unique, y, seed=1, groups=groups).numpy())
    assert folds[groups == groups[0]].iloc[0] == folds[groups == groups[1]].iloc[0]


def test_few_distinct_samples_are_spread_and_unusable_groups_refused() -> None:
    y = torch.arange(300) % 2
    counts = pd.crosstab(folds_for(torch.ones(300, 1).double(), y, seed=0).numpy(), y.numpy()).to_numpy()
    assert counts.tolist() == [[30, 30]] * 5
    constant = small(ACEClassifier, epochs=2).fit(np.ones((300, 1)), y.numpy())
    assert constant.oof_score_ == pytest.approx(np.log(2), abs=0.1)
    names = np.array(["a", "b", None] * 100, dtype=object)
    nullable = pd.Series(names, dtype="string")
    for groups, message in (
        (np.zeros(300), "at least two `groups`"),
        *((n, "some are missing") for n in (names, nullable)),
    ):
        with pytest.raises(ValueError, match=message):
            small(ACEClassifier).fit(torch.randn(300, 2).numpy(), y.numpy(), groups=groups)


def test_folds_have_equal_shares_of_every_class_and_ignore_the_order() -> None:
    rng = np.random.default_rng(0)
    x, y = torch.from_numpy(rng.normal(size=(503, 2))), torch.from_numpy(np.sort(rng.integers(0, 4, 503)))
    folds = folds_for(x, y, seed=3)
    counts = pd.crosstab(folds.numpy(), y.numpy()).to_numpy()
    assert counts.shape == (5, 4)
    assert (counts.max(0) - counts.min(0) <= 1).all()
    order = torch.from_numpy(rng.permutation(503))
    assert torch.equal(folds_for(x[order], y[order], seed=3), folds[order])
    assert not torch.equal(folds_for(x, y, seed=4), folds)
    times = torch.from_numpy(rng.integers(1, 4, 503))
    repeated = folds_for(x.repeat_interleave(times, 0), y.repeat_interleave(times), seed=3)
    assert torch.equal(repeated, folds_for(x, y, seed=3, weight=times * 0.5).repeat_interleave(times))


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
    places = (model_folds(model, SUGAR_X, SUGAR_Y[:, None]) == 0).nonzero().flatten().numpy()
    y = SUGAR_Y.copy()
    y[places] = y[places[::-1]]  # the same mean and deviation
    other = small(NCLRegressor, **options).fit(SUGAR_X, y)
    x = torch.randn(10, 10, dtype=torch.float64)
    same = [torch.allclose(a(x), b(x), rtol=1e-9) for a, b in zip(model.members_, other.members_, strict=True)]
    assert same == [True, False, False, False, False, True]  # members 0 and 5


@pytest.mark.parametrize("num_members", [1, 3, 6, 10])
def test_out_of_fold_predictions_are_those_of_the_members_that_left_a_sample_out(num_members: int) -> None:
    model = small(ACEClassifier, num_members=num_members).fit(CANCER_X, CANCER_Y)
    folds = model_folds(model, CANCER_X, CANCER_Y)
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
    # the temperature of the members that left a sample out, nearer to 1 where they are overconfident and not all
    z = torch.from_numpy(q).log().numpy() * model.temperature_

    def loss(temperature: float) -> float:
        probs = torch.from_numpy(z / temperature).softmax(2).numpy()
        left_out = np.arange(num_members)[:, None] % 5 == folds.numpy()  # (K, N)
        mean = (probs * left_out[..., None]).sum(0)[known] / left_out.sum(0)[known, None]
        return float(log_loss(CANCER_Y[known], mean))

    best = minimize_scalar(loss, bounds=(0.2, 5), method="bounded", options={"xatol": 1e-6}).x
    expected_temperature = np.sqrt(best) if best > 1 and num_members > 1 else best
    assert model.temperature_ == pytest.approx(expected_temperature, rel=1e-3)
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
    # 0.1 is no binary fraction: sums of it miss the quantiles by rounding
    scaled = [small(kind, **options).fit(X, y, sample_weight=times * scale) for scale in (0.1, 1e-6, 7.7e9)]
    for other in (repeated, shuffled, *scaled):
        # sums of 150 numbers in another order, amplified by 30 steps of Adam
        if kind is ACEClassifier:
            np.testing.assert_allclose(other.predict_proba(X), weighted.predict_proba(X), rtol=0, atol=1e-6)
        else:
            np.testing.assert_allclose(other.predict(X), weighted.predict(X), rtol=1e-6)
        assert other.oof_score_ == pytest.approx(weighted.oof_score_, rel=1e-6)
        assert other.temperature_ == pytest.approx(weighted.temperature_, rel=1e-4)  # of a search by steps


GROUPS = np.repeat(np.arange(60), 5)


def grouped_samples() -> tuple[Any, Any]:
    """The first input is the group; a split at random puts some group into both parts with near certainty."""
    rng = np.random.default_rng(0)
    return np.column_stack([GROUPS, rng.normal(size=(300, 2))]), rng.integers(0, 2, 60)[GROUPS]


@pytest.mark.parametrize("options", [{}, {"early_stopping": True}, {"diversity": 0.3}, {"members": "shared"}])
def test_no_training_splits_a_group(monkeypatch: pytest.MonkeyPatch, options: dict[str, Any]) -> None:
    calls: list[Any] = []

    def record(plan: Any, train: Any, *args: Any, **named: Any) -> Any:
        calls.append((train, named.get("validation"), named.get("left_out")))
        return train_members(plan, train, *args, **named)

    monkeypatch.setattr(training, "train_members", record)
    X, y = grouped_samples()
    model = small(ACEClassifier, encoding="standard", epochs=2, **options).fit(X, y, groups=GROUPS)
    train, validation, left_out = calls[0]
    if left_out is None:
        assert not set(train.x[:, 0].tolist()) & set(validation.x[:, 0].tolist())
    else:
        for own, others in zip(train.weight == 0, left_out, strict=True):  # of a member
            assert torch.equal(own, others)
            assert not set(train.x[own, 0].tolist()) & set(train.x[~own, 0].tolist())
    if "members" in options:  # the hold-out of the temperature
        seen = set(train.x[:, 0].tolist())
        assert 40 <= len(seen) <= 56
        assert len(train) == 5 * len(seen)
    with pytest.raises(ValueError, match="inconsistent numbers of samples"):
        model.fit(X, y, groups=GROUPS[:-1])


@pytest.mark.usefixtures("always_searched")
@pytest.mark.parametrize("kind", [ACEClassifier, NCLRegressor])
def test_no_part_of_a_search_splits_a_group(monkeypatch: pytest.MonkeyPatch, kind: type) -> None:
    parts: list[Any] = []

    def record(problem: Any, test: Any, **named: Any) -> Any:
        parts.extend([problem.train, problem.validation, test])
        return GridSearch(problem, test=test, **named | {"candidates": (0.5,), "num_seeds": 1, "num_fresh": 0})

    monkeypatch.setattr(search, "GridSearch", record)
    monkeypatch.setattr(search, "MAX_SEARCH_ROWS", 200)
    X, y = grouped_samples()
    small(kind, encoding="standard", epochs=2, diversity="auto").fit(X, y, groups=GROUPS)
    groups = [set(part.x[:, 0].tolist()) for part in parts]
    assert [len(part) for part in parts] == [5 * len(found) for found in groups]
    assert len(set.union(*groups)) == sum(map(len, groups))
    assert 180 <= sum(map(len, parts)) <= 220
    assert 24 <= len(parts[1]) <= 48  # a fifth of four fifths of 200


@given(st.integers(1, 12), st.integers(0, 3), st.integers(1, 3))
def test_few_blocks_are_in_the_first_folds(count: int, seed: int, num_classes: int) -> None:
    blocks = torch.arange(count).repeat_interleave(4)
    folds = assign_folds(blocks, blocks % num_classes, seed=seed)
    assert folds.unique().tolist() == list(range(int(folds.max()) + 1))
    assert (folds.view(-1, 4) == folds.view(-1, 4)[:, :1]).all()
    assert len(folds.unique()) > 1 or count == 1


@pytest.mark.parametrize("num_members", [1, 2, 3])
@pytest.mark.parametrize("is_pure", [False, True])  # each group has one class
def test_every_number_of_members_leaves_out_one_of_two_groups(num_members: int, is_pure: bool) -> None:
    X, y = grouped_samples()
    halves = GROUPS % 2
    model = small(ACEClassifier, num_members=num_members, diversity="auto")
    model.fit(X, halves if is_pure else y, groups=halves)
    known = ~np.isnan(model.oof_predictions_).any(1)
    assert known.sum() == (150 if num_members == 1 else 300)
    assert model.oof_score_ > 0
    assert model.diversity_ == 0


@pytest.mark.usefixtures("always_searched")
@pytest.mark.parametrize("kind", [ACEClassifier, NCLRegressor])
@pytest.mark.parametrize("count", [2, 3])
def test_too_few_groups_for_a_search_keep_the_model_with_no_diversity(
    monkeypatch: pytest.MonkeyPatch, kind: type, count: int
) -> None:
    """Of 3 groups of 100 samples, one is within the limit of 100 samples."""
    monkeypatch.setattr(search, "MAX_SEARCH_ROWS", 100 if count == 3 else 1000)
    X, y = grouped_samples()
    automatic, fixed = (
        small(kind, diversity=diversity).fit(X, y, groups=GROUPS % count) for diversity in ("auto", 0.0)
    )
    assert automatic.tuning_.sentence.endswith("There are too few groups for a search. λ=0 is kept without a search.")
    np.testing.assert_array_equal(automatic.predict(X), fixed.predict(X))


@given(st.integers(2, 60), st.floats(0.05, 0.6), st.integers(0, 3), st.booleans())
def test_a_hold_out_has_its_share_of_every_class_and_whole_blocks(
    count: int, fraction: float, seed: int, is_number: bool
) -> None:
    blocks = torch.arange(count).repeat_interleave(3)
    y = blocks % 2
    held_out = hold_out(blocks, y.double() if is_number else y, fraction, seed=seed)
    whole = held_out.view(-1, 3)
    assert torch.equal(whole.all(1), whole.any(1))
    assert 0 < held_out.sum() < len(y)
    for label in range(1 if is_number else 2):
        taken = whole[:, 0] if is_number else whole[label::2, 0]
        # the middle of a block decides: half a block of rounding, one more where all would be left
        assert abs(int(taken.sum()) - fraction * len(taken)) <= 1


def test_few_samples_are_trained_without_folds() -> None:
    model = small(ACEClassifier).fit(IRIS_X, IRIS_Y)
    assert (model.oof_score_, model.oof_predictions_, model.temperature_) == (None, None, 1.0)
    assert len(model.history_) == 12
    with pytest.raises(ValueError, match="at least 5 samples"):
        small(ACEClassifier, early_stopping="folds").fit(IRIS_X[48:52], IRIS_Y[48:52])


@pytest.mark.parametrize("kind", [ACEClassifier, NCLRegressor])
def test_coupled_members_are_trained_again_on_all_samples(kind: type) -> None:
    X, y = (CANCER_X, CANCER_Y) if kind is ACEClassifier else (SUGAR_X, SUGAR_Y)
    options = {"diversity": 0.3, "epochs": 30, "patience": 3}
    model, stopped = (small(kind, **options, early_stopping=value).fit(X, y) for value in ("auto", True))
    assert model.history_ == stopped.history_
    assert (model.temperature_, model.oof_score_) == (stopped.temperature_, stopped.oof_score_)
    epochs = 1 + int(np.argmin([entry["validation"] for entry in model.history_]))
    assert epochs < len(model.history_)
    whole = small(kind, diversity=0.3, epochs=epochs, schedule="constant", early_stopping=False).fit(X, y)
    x = torch.from_numpy(X)
    torch.testing.assert_close(model.ensemble_(x), whole.ensemble_(x) / model.temperature_, rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize("members", ["shared", "shared_mini"])
def test_shared_members_are_merged_and_scored_on_a_hold_out(members: str) -> None:
    model = small(ACEClassifier, members=members, hidden=(8, 8)).fit(CANCER_X, CANCER_Y)
    assert model.history_[-1]["validation"] is not None  # stopped on folds
    assert model.oof_predictions_ is None
    seed, blocks = model._state.seed, number_blocks(torch.from_numpy(CANCER_X))
    held_out = hold_out(blocks, torch.from_numpy(CANCER_Y), 0.2, seed=hashed_key(seed, "hold-out")).numpy()
    probs = model.predict_proba(CANCER_X[held_out])
    assert model.oof_score_ == pytest.approx(log_loss(CANCER_Y[held_out], probs), rel=1e-9)
    assert model.temperature_ != 1
    raw = torch.from_numpy(CANCER_X)
    network = model._network.ensemble(0)
    with torch.no_grad():
        expected = network(model.ensemble_.trunk(raw)) / model.temperature_
        # the factors of a member multiply its weights instead of its activations
        torch.testing.assert_close(model.ensemble_(raw), expected, rtol=1e-9, atol=1e-9)
        assert model.ensemble_(raw).std(0).mean() > 0.01
    assert set(network.adapters) == ({"linear1"} if members == "shared_mini" else {"linear1", "linear2"})
    own = sum(p.numel() for p in model.ensemble_.parameters())
    assert sum(p.numel() for p in model._network.parameters()) < own / 2
    assert model.score(CANCER_X, CANCER_Y) > 0.95
    with pytest.raises(ValueError, match="share weights"):
        small(ACEClassifier, members=members, batches="separate").fit(CANCER_X, CANCER_Y)
