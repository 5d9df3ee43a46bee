"""Whether a search for λ is worth it, from one training at λ=0.

The rules come from `torchace run underfitting`; docs/results/underfitting.md says how often they are right.
"""

from __future__ import annotations

import math
from typing import NamedTuple

OVERFIT = 0.25  # training loss relative to the validation loss; below it, members overfit
LEAST_GAIN = 0.01  # least part of the members' loss that averaging removes; λ enlarges this gain
MANY_SAMPLES = 5000  # of a classification: with fewer, λ often raises the loss
UNDERFIT, SAMPLES_PER_PARAMETER = 0.5, 2  # of a regression: least relative training loss, fewest samples per parameter
DIVERSITIES = {"classification": 0.3, "regression": 0.7}  # λ to start with


class DiversityAdvice(NamedTuple):
    """Advice about λ.

    Attributes:
        diversity: λ to start with; 0 where no gain is predicted.
        sentence: The advice with its reason.
    """

    diversity: float
    sentence: str


def is_overfit(train_loss: float, validation_loss: float) -> bool:
    """Whether the training loss is so far below the validation loss that early stopping helps more than λ.

    Example:
        >>> is_overfit(0.02, 0.41), is_overfit(0.40, 0.42)
        (True, False)
    """
    return train_loss < OVERFIT * validation_loss


def advise_diversity(
    *,
    train_loss: float,
    validation_loss: float,
    member_loss: float,
    num_samples: int,
    num_parameters: int,
    task: str = "classification",
) -> DiversityAdvice:
    """Advise whether to search λ > 0, from one ensemble trained with λ=0.

    Members that overfit need early stopping first. λ enlarges the gain from averaging, which must be at least 1 % of
    the members' loss. Classifiers also need at least 5,000 training samples, regressors two per parameter and a
    training loss of at least half the validation loss.

    Args:
        train_loss: The ensemble's cross entropy (or mean squared error) on the training samples.
        validation_loss: The same on validation samples.
        member_loss: Mean of its members' losses on validation samples.
        num_samples: Number of training samples of a member.
        num_parameters: Number of parameters of one member.
        task: `"classification"` or `"regression"`.

    Returns:
        The λ to start with, and a sentence.

    Example:
        >>> advice = advise_diversity(train_loss=0.186, validation_loss=0.204, member_loss=0.224, num_samples=54000,
        ...                           num_parameters=12730)
        >>> advice.diversity
        0.3
    """
    if task not in DIVERSITIES:
        raise ValueError(f"Expected `task` to be 'classification' or 'regression', but got {task!r}.")
    for name, count in (("num_samples", num_samples), ("num_parameters", num_parameters)):
        if count < 1:
            raise ValueError(f"Expected `{name}` to be at least 1, but got {count}.")
    noun = "mean squared error" if task == "regression" else "cross entropy"
    if not all(map(math.isfinite, (train_loss, validation_loss, member_loss))):
        return DiversityAdvice(0.0, f"No gain from λ > 0 can be predicted. The {noun} at λ=0 is not finite.")
    if is_overfit(train_loss, validation_loss):
        return DiversityAdvice(
            0.0,
            f"Stop earlier before trying λ. At λ=0 the {noun} is {train_loss:.3g} on the training and "
            f"{validation_loss:.3g} on the validation samples, so the members overfit.",
        )
    gain = max(0.0, 1 - validation_loss / member_loss) if member_loss > 0 else 0.0
    why = ""
    if gain < LEAST_GAIN:
        why = f"Averaging lowers the members' {noun} by less than {100 * LEAST_GAIN:g} %, and λ enlarges only this gain"
    elif task == "classification" and num_samples < MANY_SAMPLES:
        why = f"With fewer than {MANY_SAMPLES:,} training samples (here {num_samples:,}), λ > 0 often raises the {noun}"
    elif task == "regression" and num_samples < SAMPLES_PER_PARAMETER * num_parameters:
        why = f"There are fewer than {SAMPLES_PER_PARAMETER} training samples for each parameter of a member"
    elif task == "regression" and train_loss < UNDERFIT * validation_loss:
        why = f"The {noun} on the training samples is below half of that on the validation samples"
    if why:
        return DiversityAdvice(0.0, f"No gain from λ > 0 can be predicted. {why}.")
    diversity = DIVERSITIES[task]
    why = f"Averaging lowers the members' {noun} by {100 * gain:.1f} %, the members do not overfit, and there are "
    why += f"at least {MANY_SAMPLES:,}" if task == "classification" else f"{SAMPLES_PER_PARAMETER} or more"
    why += " training samples" if task == "classification" else " training samples for each parameter"
    return DiversityAdvice(diversity, f"Search λ on validation data, from λ={diversity:g}. {why}.")
