"""`diversity="auto"`: the model with λ=0 decides whether a search for λ is worth it."""

from __future__ import annotations

from dataclasses import dataclass

from torchace.diagnosis.advice import advise_diversity, is_overfit
from torchace.lab.data.folds import MIN_FOLD_ROWS
from torchace.lab.training.members import FitScores, MemberPlan
from torchace.lab.training.tasks import TASKS
from torchace.lab.tuning.grid_search import TunedDiversity, describe_scores


@dataclass(frozen=True)
class ZeroDiversity:
    """An ensemble trained with λ=0, as it would be shipped."""

    plan: MemberPlan
    num_features: int  # encoded
    num_outputs: int  # classes, or targets of a regression
    num_samples: int
    scores: FitScores | None = None  # None: no samples were left out

    def keep(self, reason: str) -> TunedDiversity:
        """Return λ=0 with the reason."""
        plan, scores, task = self.plan, self.scores, TASKS[self.plan.task]
        if scores is not None:
            reason = f"{describe_scores(plan, scores)} {reason}"
        return TunedDiversity.model_construct(
            chosen=0.0,
            best=0.0,
            task=plan.task,
            metric=task.score_name,
            candidates=(),
            train_score=None if scores is None else scores.train,
            validation_score=None if scores is None else scores.validation,
            sentence=f"{reason} λ=0 is kept without a search.",
        )

    def reason(self) -> str:
        """Why a search is not possible, or no gain is predicted; empty for a search."""
        plan, scores = self.plan, self.scores
        if plan.num_members == 1:
            return "One member cannot differ from others."
        if plan.batches == "separate":
            return "Members with separate batches are not coupled."
        if plan.task == "multilabel":
            return "Several labels per sample have no search."
        if self.num_samples < MIN_FOLD_ROWS:
            return f"There are fewer than {MIN_FOLD_ROWS} samples."
        if scores is None:
            return ""
        if is_overfit(scores.train, scores.validation):
            return "The members overfit. Beside early stopping, λ adds little."
        if plan.has_shared_weights:
            return ""
        advice = advise_diversity(
            train_loss=scores.train,
            validation_loss=scores.validation,
            member_loss=scores.member,
            num_samples=scores.num_samples,
            num_parameters=plan.count_parameters(self.num_features, self.num_outputs),
            task=plan.task,
        )
        return "" if advice.diversity else advice.sentence
