"""λ auto: scores of the model with λ=0 against plain formulas, and the reasons not to search."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
import torch.nn.functional as F

from tests.lab.tuning.search_data import make_split
from torchace.diagnosis import advise_diversity
from torchace.lab.data import Split
from torchace.lab.data.folds import FoldSplit
from torchace.lab.training.members import FitScores, MemberPlan, score_fit, train_members
from torchace.lab.tuning.auto import ZeroDiversity

PLAN = MemberPlan("classification", num_members=3, hidden=(5,), epochs=6, batch_size=16, learning_rate=0.03)
UNDERFIT = FitScores(train=0.5, validation=0.52, member=0.6, num_samples=8000, seconds=1.0)


def zero(plan: MemberPlan = PLAN, num_samples: int = 10_000, scores: FitScores | None = UNDERFIT) -> ZeroDiversity:
    return ZeroDiversity(plan, num_features=3, num_outputs=10, num_samples=num_samples, scores=scores)


def sample_scores(task: str, logits: torch.Tensor, y: torch.Tensor) -> tuple[float, float]:
    """The ensemble's loss of one sample, and its members' mean loss; logits `(m, C)`."""
    if task == "regression":
        return float((logits.mean(0) - y).square()), float((logits - y).square().mean())
    members = [float(F.cross_entropy(z, y)) for z in logits]
    return float(-logits.softmax(1).mean(0)[y].log()), sum(members) / len(members)


@pytest.mark.parametrize("task", ["classification", "regression"])
@pytest.mark.parametrize("weighted", [False, True])
@pytest.mark.parametrize("num_members", [None, 2, 5, 7])  # None: 3 members and a hold-out
def test_scores_are_means_over_samples(task: str, weighted: bool, num_members: int | None) -> None:
    plan = replace(PLAN, task=task, num_members=num_members or 3)
    train, validation = (make_split(60, start, task, weighted) for start in range(2))
    folds = (torch.arange(60) * 7 % 5).roll(3)
    fitted_on = train if num_members is None else FoldSplit.make(train, folds, num_members).train
    outputs = 2 if task == "classification" else 1
    trained = train_members(plan, fitted_on, outputs, diversities=[0.0], seeds=[0])
    ensemble = trained.ensemble(0)

    @torch.no_grad()
    def mean(split: Split, members: Any) -> list[float]:
        """Mean over samples with members `(N, ·)`; samples without any do not count."""
        logits, total, sums = ensemble(split.x), 0.0, [0.0, 0.0]
        for i, chosen in enumerate(members):
            if chosen:
                weight = 1.0 if split.weight is None else float(split.weight[i])
                total += weight
                scores = sample_scores(task, logits[chosen, i], split.y[i])
                sums = [s + weight * score for s, score in zip(sums, scores, strict=True)]
        return [s / total for s in sums]

    every = list(range(plan.num_members))
    if num_members is None:
        found = score_fit(trained, train, validation=validation)
        assert found is not None
        expected = [mean(train, [every] * 60)[0], *mean(validation, [every] * 60)]
        assert found.num_samples == 60
    else:
        found = score_fit(trained, train, folds=folds)
        assert found is not None
        outside = [[k for k in every if k % 5 == fold] for fold in folds]
        inside = [[k for k in every if k % 5 != fold] for fold in folds]
        inside = [chosen if len(chosen) > 1 else [] for chosen in inside]
        (train_loss, train_member), member = mean(train, inside), mean(train, outside)[1]
        expected = [train_loss, member - (train_member - train_loss), member]
        assert found.num_samples == 48
    assert [found.train, found.validation, found.member] == pytest.approx(expected, rel=1e-9)


def test_two_members_of_two_folds_have_no_scores() -> None:
    """Each was trained on the samples that the other left out."""
    plan, train, folds = replace(PLAN, num_members=2), make_split(60, 0, "classification", False), torch.arange(60) % 2
    trained = train_members(plan, FoldSplit.make(train, folds, 2).train, 2, diversities=[0.0], seeds=[0])
    assert score_fit(trained, train, folds=folds) is None


@pytest.mark.parametrize(("change", "start"), [
    ({"plan": replace(PLAN, num_members=1)}, "One member cannot differ from others."),
    ({"plan": replace(PLAN, batches="separate")}, "Members with separate batches are not coupled."),
    ({"plan": replace(PLAN, task="multilabel")}, "Several labels per sample have no search."),
    ({"num_samples": 199}, "There are fewer than 200 samples."),
    ({"scores": replace(UNDERFIT, train=0.1)}, "The members overfit. Beside early stopping, λ adds little."),
    ({"scores": replace(UNDERFIT, member=0.521)}, "No gain from λ > 0 can be predicted. Averaging"),
    ({"scores": replace(UNDERFIT, num_samples=4999)}, "No gain from λ > 0 can be predicted. With"),
    ({"plan": replace(PLAN, members="shared"), "scores": replace(UNDERFIT, num_samples=4999)}, ""),
    ({"plan": replace(PLAN, task="regression"), "scores": replace(UNDERFIT, num_samples=50)}, "No gain from λ > 0"),
    ({"plan": replace(PLAN, task="regression")}, ""),
    ({"scores": None}, ""),
    ({}, ""),
])  # fmt: skip
def test_a_search_has_to_be_possible_and_worthwhile(change: dict[str, Any], start: str) -> None:
    found = zero(**change)
    assert found.reason().startswith(start)
    assert bool(found.reason()) == bool(start)
    kept = found.keep(found.reason())
    assert (kept.diversity, kept.scores) == (0.0, {})
    assert kept.sentence.endswith(f"{found.reason()} λ=0 is kept without a search.")
    assert type(kept).from_dict(kept.to_dict()) == kept


def test_the_rule_is_that_of_the_diagnosis() -> None:
    """A member has 3·5+5 + 5·10+10 = 80 parameters."""
    plan, scores = replace(PLAN, task="regression"), replace(UNDERFIT, num_samples=159)
    advice = advise_diversity(
        train_loss=0.5, validation_loss=0.52, member_loss=0.6, num_samples=159, num_parameters=80, task="regression"
    )
    assert zero(plan, scores=scores).reason() == advice.sentence != zero(plan).reason()
