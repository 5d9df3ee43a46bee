"""All scores in one metric: equal to `functional` on all data at once, for any batches."""

from __future__ import annotations

import copy
import itertools
import pickle

import matplotlib.pyplot as plt
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from sklearn.metrics import log_loss
from torchmetrics.classification import MulticlassAccuracy, MulticlassCalibrationError

from torchace import functional
from torchace.metrics import EnsembleMetrics

# Results are float32: half a unit in the last place of numbers of order 1
ROUNDED = {"rtol": 1e-6, "atol": 1e-6}
BOTH = ("accuracy", "cross_entropy", "brier", "calibration_error")
NAMES = {*BOTH, *(f"member_{name}" for name in BOTH), "disagreement", "mutual_information", "ambiguity", "members"}


def case(num_members=4, num_samples=200, classes=5, rest=(), seed=0, dtype=torch.float64):
    g = torch.Generator().manual_seed(seed)
    target = torch.randint(classes, (num_samples, *rest), generator=g)
    logits = 2 * torch.randn(num_members, num_samples, classes, *rest, generator=g, dtype=dtype)
    return logits, target


def scored(logits, target, **options):
    """Metrics of all samples."""
    metrics = EnsembleMetrics(*logits.shape[::2][:2], **options)
    metrics.update(logits, target)
    return metrics


def expected_scores(logits, target, member_weights=None, num_bins=15):
    """The scores of `(K, N, C)` logits, from functional alone."""
    probs = functional.ensemble_probs(logits, member_weights=member_weights)
    members = [member.softmax(1) for member in logits.double()]
    accuracies = torch.stack([(q.argmax(1) == target).double().mean() for q in members])
    scores = {
        "accuracy": (probs.argmax(1) == target).double().mean(),
        "cross_entropy": torch.nn.functional.nll_loss(
            functional.ensemble_log_probs(logits, member_weights=member_weights), target
        ),
        "brier": functional.brier_score(probs, target),
        "calibration_error": functional.calibration_error(probs, target, num_bins),
        "member_accuracy": accuracies.mean(),
        "member_cross_entropy": torch.stack([-q.log()[range(len(target)), target].mean() for q in members]).mean(),
        "member_brier": torch.stack([functional.brier_score(q, target) for q in members]).mean(),
        "member_calibration_error": torch.stack(
            [functional.calibration_error(q, target, num_bins) for q in members]
        ).mean(),
        "disagreement": functional.disagreement(logits),
        "mutual_information": functional.mutual_information(logits, member_weights=member_weights),
        "ambiguity": functional.ambiguity(logits, target, member_weights=member_weights),
        "members": accuracies,
    }
    return {name: score.float() for name, score in scores.items()}


def assert_same(scores, wanted):
    assert set(scores) == NAMES
    for name in NAMES:
        assert scores[name].dtype is torch.float32, name
        torch.testing.assert_close(scores[name], wanted[name], **ROUNDED, msg=lambda m, name=name: f"{name}: {m}")


@settings(max_examples=60)
@given(
    seed=st.integers(0, 1000),
    num_members=st.integers(1, 4),
    classes=st.integers(1, 5),
    cuts=st.lists(st.integers(0, 40), max_size=4),
    weighted=st.booleans(),
    num_bins=st.sampled_from([1, 10, 15]),
)
def test_equals_functional_over_any_split(seed, num_members, classes, cuts, weighted, num_bins):
    logits, target = case(num_members, 40, classes, seed=seed)
    alpha = None
    if weighted:
        alpha = torch.rand(num_members, generator=torch.Generator().manual_seed(seed), dtype=torch.float64) + 0.01
        alpha = alpha / alpha.sum()
    metrics = EnsembleMetrics(num_members, classes, num_bins=num_bins)
    bounds = [0, *sorted(cuts), 40]
    for start, end in itertools.pairwise(bounds):  # some batches are empty
        metrics.update(logits[:, start:end], target[start:end], member_weights=alpha)
    assert_same(metrics.compute(), expected_scores(logits, target, alpha, num_bins))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_lower_precision(dtype):
    logits, target = case(dtype=dtype) if dtype is torch.float32 else case()
    logits = logits.to(dtype)
    wanted = expected_scores(logits.double(), target)
    for name, score in scored(logits, target).compute().items():
        torch.testing.assert_close(score, wanted[name], rtol=1e-5, atol=1e-5)  # float32 arithmetic


def test_against_torchmetrics_and_scikit_learn():
    logits, target = case(num_samples=500)
    scores = scored(logits, target).compute()
    probs = functional.ensemble_probs(logits)
    micro = MulticlassAccuracy(5, average="micro")
    error = MulticlassCalibrationError(5, n_bins=15, norm="l1")
    torch.testing.assert_close(scores["accuracy"], micro(probs, target), **ROUNDED)
    torch.testing.assert_close(scores["calibration_error"], error(probs.float(), target), rtol=0, atol=1e-5)
    assert scores["cross_entropy"].item() == pytest.approx(log_loss(target, probs, labels=range(5)), rel=1e-6)
    brier = ((probs - torch.nn.functional.one_hot(target, 5)) ** 2).sum(1).mean()
    torch.testing.assert_close(scores["brier"], brier.float(), **ROUNDED)
    for k in range(4):
        micro.reset()
        torch.testing.assert_close(scores["members"][k], micro(logits[k], target), **ROUNDED)
    singles = torch.stack(
        [MulticlassCalibrationError(5, n_bins=15, norm="l1")(q.softmax(1).float(), target) for q in logits]
    )
    torch.testing.assert_close(scores["member_calibration_error"], singles.mean(), rtol=0, atol=1e-5)


def test_brier_of_two_classes_is_twice_scikit_learns():
    from sklearn.metrics import brier_score_loss

    logits, target = case(classes=2)
    metrics = scored(logits, target)
    probs = functional.ensemble_probs(logits)[:, 1]
    assert metrics.compute()["brier"].item() == pytest.approx(2 * brier_score_loss(target, probs), rel=1e-6)


@pytest.mark.parametrize("ignore_index", [-100, 2])
def test_ignored_samples_do_not_count(ignore_index):
    logits, target = case()
    g = torch.Generator().manual_seed(1)
    target = target.masked_fill(torch.rand(200, generator=g) < 0.3, ignore_index)
    kept = target != ignore_index
    logits = logits.clone()
    logits[2, ~kept] = float("nan")  # not even looked at
    metrics = EnsembleMetrics(4, 5, ignore_index=ignore_index)
    for part in (slice(0, 70), slice(70, 200)):
        metrics.update(logits[:, part], target[part])
    assert_same(metrics.compute(), expected_scores(logits[:, kept], target[kept]))


def test_dense_outputs():
    logits, target = case(num_samples=6, rest=(3, 2))
    target[0, 1, 1] = -100
    metrics = scored(logits, target)
    rows = logits.permute(0, 1, 3, 4, 2).reshape(4, -1, 5)
    kept = target.flatten() != -100
    assert_same(metrics.compute(), expected_scores(rows[:, kept], target.flatten()[kept]))


def test_one_member_is_its_ensemble():
    logits, target = case(num_members=1)
    scores = scored(logits, target).compute()
    for name in BOTH:
        torch.testing.assert_close(scores[name], scores[f"member_{name}"])
    for name in ("disagreement", "mutual_information", "ambiguity"):
        assert scores[name] == pytest.approx(0, abs=1e-7)
    assert scores["members"].shape == (1,)


@pytest.mark.parametrize("bad", [float("nan"), float("inf"), -float("inf")])
def test_non_finite_logits_name_the_member(bad):
    logits, target = case()
    metrics = scored(logits, target)
    before = metrics.compute()
    broken = logits.clone()
    broken[2, 7, 1] = bad
    with pytest.raises(ValueError, match=r"member 2 hold NaN or Inf"):
        metrics.update(broken, target)
    broken[0, 3, 0] = bad
    with pytest.raises(ValueError, match=r"members 0, 2 hold"):
        metrics.update(broken, target)
    metrics._computed = None
    assert_same(metrics.compute(), before)  # the refused batches left no trace


def test_non_finite_logits_where_values_are_not_read(monkeypatch):
    """On another device `update` cannot look; `compute` then refuses."""
    logits, target = case()
    logits[3, 0, 0] = float("nan")
    metrics = EnsembleMetrics(4, 5)
    monkeypatch.setattr("torchace._checks.can_read", lambda tensor: False)
    metrics.update(logits, target)
    with pytest.raises(ValueError, match="member 3 hold"):
        metrics.compute()


def test_merge_state():
    logits, target = case()
    whole, left, right = (EnsembleMetrics(4, 5) for _ in range(3))
    whole.update(logits, target)
    left.update(logits[:, :30], target[:30])
    right.update(logits[:, 30:], target[30:])
    left.merge_state(right)
    assert_same(left.compute(), whole.compute())


def test_reduction_over_processes_adds_up():
    """States of several processes are stacked, then reduced, as in torchmetrics."""
    logits, target = case()
    parts = [EnsembleMetrics(4, 5) for _ in range(2)]
    for part, index in zip(parts, (slice(0, 50), slice(50, 200)), strict=True):
        part.update(logits[:, index], target[index])
    together = EnsembleMetrics(4, 5)
    for name, reduce in together._reductions.items():
        setattr(together, name, reduce(torch.stack([getattr(part, name) for part in parts])))
    together._update_count = 1
    assert_same(together.compute(), expected_scores(logits, target))


def test_copies_and_reset():
    logits, target = case()
    metrics = EnsembleMetrics(4, 5, num_bins=10)
    metrics.update(logits[:, :90], target[:90])
    for other in (copy.deepcopy(metrics), pickle.loads(pickle.dumps(metrics)), metrics.clone()):
        other.update(logits[:, 90:], target[90:])
        assert_same(other.compute(), expected_scores(logits, target, num_bins=10))
    assert_same(metrics.compute(), expected_scores(logits[:, :90], target[:90], num_bins=10))
    metrics.reset()
    metrics.update(logits[:, 90:], target[90:])
    assert_same(metrics.compute(), expected_scores(logits[:, 90:], target[90:], num_bins=10))


def test_state_dict_round_trip():
    logits, target = case()
    metrics, other = EnsembleMetrics(4, 5), EnsembleMetrics(4, 5)
    for one in (metrics, other):
        one.persistent(True)
    metrics.update(logits, target)
    other.load_state_dict(metrics.state_dict())
    other._update_count = 1
    assert_same(other.compute(), metrics.compute())


def test_forward_gives_the_batch_and_adds_it():
    logits, target = case()
    metrics = EnsembleMetrics(4, 5)
    assert_same(metrics(logits[:, :50], target[:50]), expected_scores(logits[:, :50], target[:50]))
    assert_same(metrics(logits[:, 50:], target[50:]), expected_scores(logits[:, 50:], target[50:]))
    assert_same(metrics.compute(), expected_scores(logits, target))


def test_many_small_batches_keep_their_digits():
    logits, target = case(num_samples=50, dtype=torch.float32)
    metrics = EnsembleMetrics(4, 5)
    for _ in range(300):
        metrics.update(logits, target)
    assert_same(metrics.compute(), expected_scores(logits, target))


def test_no_gradient_is_kept():
    logits, target = case()
    scores = scored(logits.requires_grad_(), target).compute()
    assert not any(score.requires_grad for score in scores.values())


def test_confident_members_stay_finite():
    logits = torch.tensor([[[1e4, -1e4]], [[-1e4, 1e4]]])
    scores = scored(logits, torch.tensor([0])).compute()
    assert all(torch.isfinite(score).all() for score in scores.values())
    assert scores["cross_entropy"].item() == pytest.approx(0.693147, abs=1e-5)
    assert scores["disagreement"] == 1


def test_errors():
    logits, target = case()
    metrics = EnsembleMetrics(4, 5)
    with pytest.raises(ValueError, match="4 members and 5 classes"):
        metrics.update(logits[:2], target)
    with pytest.raises(ValueError, match="4 members and 5 classes"):
        metrics.update(logits[:, :, :3], target)
    with pytest.raises(ValueError, match=r"logits\[None\]"):
        metrics.update(logits[0], target)
    with pytest.raises(TypeError, match="class probabilities"):
        metrics.update(logits, logits[0].softmax(1))
    with pytest.raises(ValueError, match="class indices in"):
        metrics.update(logits, target + 3)
    with pytest.raises(ValueError, match="sum to 1"):
        metrics.update(logits, target, member_weights=[0.5, 0.5, 0.5, 0.5])
    with pytest.raises(ValueError, match="`num_members` to be at least 1"):
        EnsembleMetrics(0, 5)


@pytest.mark.filterwarnings("ignore:The ``compute`` method of metric")
def test_compute_without_update_is_an_error():
    metrics = EnsembleMetrics(4, 5)
    with pytest.raises(ValueError, match="at least one sample"):
        metrics.compute()
    metrics.update(torch.zeros(4, 3, 5), torch.full((3,), -100))
    with pytest.raises(ValueError, match="at least one sample"):
        metrics.compute()


def test_repr():
    assert repr(EnsembleMetrics(num_members=5, num_classes=10)) == "EnsembleMetrics(num_members=5, num_classes=10)"


def test_plot_draws_members_and_ensemble_or_a_score_over_results():
    metrics = EnsembleMetrics(4, 5)
    history = []
    for seed in range(3):
        metrics.update(*case(seed=seed))
        history.append(metrics.compute())
    figure, ax = metrics.plot()
    members, ensemble = ax.get_lines()
    assert members.get_ydata().tolist() == history[-1]["members"].tolist()
    assert set(ensemble.get_ydata()) == {float(history[-1]["accuracy"])}
    assert ax.get_xlabel() == "member"
    _, own = plt.subplots()
    assert metrics.plot(history, own, score="brier") == (own.figure, own)
    for line, key in zip(own.get_lines(), ("brier", "member_brier"), strict=True):
        assert line.get_ydata().tolist() == [float(scores[key]) for scores in history]
    _, ax = metrics.plot(history[0], score="disagreement")  # which no member has alone
    assert [line.get_ydata().tolist() for line in ax.get_lines()] == [[float(history[0]["disagreement"])]]
    with pytest.raises(ValueError, match=r"`score` to be one of 'accuracy', .*but got 'f1'"):
        metrics.plot(score="f1")
    assert figure is not own.figure
    plt.close("all")
