"""The training of `torchace fit` and of the estimators: from encoded samples to an ensemble of raw inputs."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

from torch import Tensor

from torchace.lab.data import Split
from torchace.lab.data.encoding import Encoding
from torchace.lab.data.folds import FoldSplit
from torchace.lab.training.members import (
    FitScores,
    MemberPlan,
    OutOfFold,
    TrainedGroup,
    collect_out_of_fold,
    score_fit,
    train_members,
)
from torchace.lab.training.scaling import Scaler, assemble_ensemble
from torchace.nn import Ensemble


class TrainingError(ValueError):
    """The training ended in NaN or Inf."""


@dataclass(frozen=True, eq=False)
class FittedEnsemble:
    """A trained ensemble, and its predictions of samples that no member, or not every member, was trained on."""

    ensemble: Ensemble  # from the raw matrix to logits, or to predictions in the targets' units
    trained: TrainedGroup
    held_out: OutOfFold | None  # None: every member was trained on all samples
    temperature: float  # of the logits; 1 for a regression
    left_out: Tensor | None = None  # (K, N): the members that left out each sample
    scores: FitScores | None = None  # if asked for, and samples were left out


def fit_ensemble(
    plan: MemberPlan,
    samples: Split,
    num_outputs: int,
    encoding: Encoding,
    scaler: Scaler | None,
    *,
    diversity: float,
    seed: int,
    folds: Tensor | None = None,
    validation: Split | None = None,
    refit: Split | None = None,
    scored: bool = False,
    **options: Any,
) -> FittedEnsemble:
    """Train an ensemble; stop on samples that members left out, if the plan has `patience`.

    Args:
        plan: Architecture and training.
        samples: Encoded samples on the device, in the plan's precision.
        num_outputs: Number of classes, or of targets.
        encoding: Encoding of the samples.
        scaler: Scaler of a regression's targets.
        diversity: λ.
        seed: Determines initial weights and sample order.
        folds: Fold of each sample, `(N,)`: member k leaves out fold k mod 5, and these samples stop the training.
        validation: Samples that give the temperature and the score, and stop the training unless there are folds.
        refit: Samples of a second training for the best number of epochs.
        scored: Whether to score it for `advise_diversity`.
        options: Options of `train_members`.
    """
    split = None if folds is None else FoldSplit.make(samples, folds, plan.num_members)
    left_out = None if split is None else split.left_out

    def train(plan: MemberPlan, samples: Split, **options: Any) -> TrainedGroup:
        trained = train_members(plan, samples, num_outputs, diversities=[diversity], seeds=[seed], **options)
        if (failure := trained.fitted.failures.get(0)) is not None:
            member = "" if failure.member is None else f", member {failure.member}"
            raise TrainingError(
                f"Training (λ={diversity:g}, seed {seed}{member}) ended at step {failure.step} with {failure.message}. "
                "Try a smaller learning rate, and look for extreme values among the samples."
            )
        return trained

    if split is None:
        trained = train(plan, samples, validation=validation, **options)
    else:
        trained = train(plan, split.train, validation=split.validation, left_out=left_out, **options)
    held_out = None
    if plan.patience is not None and validation is not None:
        held_out = collect_out_of_fold(trained, validation, None, scaler)
    elif split is not None and folds is not None:
        held_out = collect_out_of_fold(trained, split.validation, left_out, scaler)
        held_out = replace(held_out, rows=split.rows.cpu().numpy(), folds=folds.numpy())
    scores = None
    if scored and plan.num_members > 1 and (validation is not None or folds is not None):
        scores = score_fit(trained, samples, validation=validation, folds=folds)
    if refit is not None and trained.fitted.best_epochs:
        epochs, schedule = trained.fitted.best_epochs[0], trained.train_config.schedule
        whole = train(replace(plan, epochs=epochs, schedule=schedule, patience=None), refit, **options)
        trained = replace(trained, network=whole.network)
    temperature = 1.0 if held_out is None else held_out.temperature
    ensemble = assemble_ensemble(encoding.encoder(), trained.ensemble(0), scaler, temperature)
    return FittedEnsemble(ensemble, trained, held_out, temperature, left_out, scores)
