"""Whether λ > 0 is worth trying, from one training at λ=0.

The rule comes from `torchace run underfitting`; docs/results/underfitting.md says how often it is right.
"""

from __future__ import annotations

import math
from typing import NamedTuple

OVERFIT = 0.25  # training loss relative to the validation loss; below it, members overfit
WORTHWHILE = 0.01  # expected relative gain from which λ > 0 pays
# The expected relative gain is SHARE · λ · ambiguity · min(2, √(samples / parameters)) · min(1, (C − 1) / 9).
SHARE, MAX_ROOT, MANY_CLASSES = 0.7, 2.0, 10
# The λ to start with, by the disagreement at λ=0: members that differ much are weak alone, and a large λ takes away
# what holds each of them to the labels.
DIVERSITIES = ((0.06, 0.7), (0.15, 0.5), (math.inf, 0.1))
# In a regression the last two factors are 1 if the training loss is at least this part of the validation loss and
# there are at least this many samples per parameter, else 0.
UNDERFIT, SAMPLES_PER_PARAMETER = 0.5, 2


class DiversityAdvice(NamedTuple):
    """Advice about λ.

    Attributes:
        diversity: λ to start with; 0 if a larger one is not expected to pay.
        gain: Expected reduction of the loss relative to λ=0; None for members that overfit.
        sentence: The advice with its reason.
    """

    diversity: float
    gain: float | None
    sentence: str


def is_overfit(train_loss: float, validation_loss: float) -> bool:
    """Whether the training loss is so far below the validation loss that λ cannot help.

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
    disagreement: float | None,
    num_samples: int,
    num_parameters: int,
    num_classes: int | None = None,
) -> DiversityAdvice:
    r"""Advise whether λ > 0 pays, from one ensemble trained with λ=0.

    Members that overfit need early stopping first. Otherwise λ enlarges the gain from averaging, the more so the fewer
    parameters a member has for each sample. With few classes C it does so less:

    $$\frac{\Delta H}{H} \approx 0.7\, \lambda\, \frac{\bar H_k - H}{H} \min(2, \sqrt{n / P}) \min(1, (C - 1) / 9)$$

    In a regression, the last two factors are 1 if there are at least two samples per parameter and the training loss is
    at least half of the validation loss, else 0.

    Args:
        train_loss: The ensemble's cross entropy (or mean squared error) on the training samples.
        validation_loss: The same on validation samples.
        member_loss: Mean of its members' losses on validation samples.
        disagreement: Disagreement of its members on validation samples; None for a regression.
        num_samples: Number of training samples, n.
        num_parameters: Number of parameters of one member, P.
        num_classes: Number of classes, C. None: ten or more.

    Returns:
        The λ to start with, the expected gain and a sentence.

    Example:
        >>> advice = advise_diversity(train_loss=0.186, validation_loss=0.204, member_loss=0.224, disagreement=0.034,
        ...                           num_samples=54000, num_parameters=12730)
        >>> advice.diversity, round(advice.gain, 3)
        (0.7, 0.096)
    """
    classes = MANY_CLASSES if num_classes is None else num_classes
    for name, count, least in (
        ("num_samples", num_samples, 1), ("num_parameters", num_parameters, 1), ("num_classes", classes, 2),
    ):  # fmt: skip
        if count < least:
            raise ValueError(f"Expected `{name}` to be at least {least}, but got {count}.")
    noun = "mean squared error" if disagreement is None else "cross entropy"
    both = f"the {noun} is {train_loss:.3g} on the training and {validation_loss:.3g} on the validation samples"
    if is_overfit(train_loss, validation_loss):
        return DiversityAdvice(0.0, None, f"Stop earlier before trying λ: at λ=0 {both}, so the members overfit.")
    ambiguity = max(0.0, member_loss / validation_loss - 1) if validation_loss > 0 else 0.0
    ratio = num_parameters / num_samples
    number = f"{ratio:.2g}" if ratio < 10 else f"{ratio:,.0f}"
    why = f"Averaging lowers the members' {noun} by {100 * ambiguity / (1 + ambiguity):.1f} %, and a member has "
    why += f"{number} parameter{'' if number == '1' else 's'} for each training sample"
    if disagreement is None:
        has_few = num_samples >= SAMPLES_PER_PARAMETER * num_parameters
        is_underfit = train_loss >= UNDERFIT * validation_loss
        diversity, factor = DIVERSITIES[0][1], float(has_few and is_underfit)
        if not has_few:
            why += f", more than {1 / SAMPLES_PER_PARAMETER:g}"
        elif not is_underfit:
            why = f"The {noun} on the training samples is below half of that on the validation samples"
    else:
        diversity = next(value for limit, value in DIVERSITIES if disagreement < limit)
        root = min(MAX_ROOT, math.sqrt(num_samples / num_parameters))
        factor = root * min(1.0, (classes - 1) / (MANY_CLASSES - 1))
        if classes < MANY_CLASSES:
            why = f"{why.replace(', and', ',')}, and there are only {classes} classes"
    gain = SHARE * diversity * ambiguity * factor
    if gain < WORTHWHILE:
        return DiversityAdvice(0.0, gain, f"λ > 0 should not pay (a gain of {100 * gain:.1f} %). {why}.")
    return DiversityAdvice(
        diversity, gain, f"λ={diversity:g} should lower the {noun} by about {100 * gain:.0f} %. {why}."
    )
