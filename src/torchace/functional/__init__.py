"""Pure tensor functions: every formula of the library, one subject per file."""

from torchace.functional.ace import amended_cross_entropy, diversity_from_gamma, gamma_from_diversity
from torchace.functional.binary import binary_amended_cross_entropy
from torchace.functional.gradients import average_gradients
from torchace.functional.linear import linear_amended_cross_entropy
from torchace.functional.ncl import negative_correlation
from torchace.functional.prediction import ensemble_log_probs, ensemble_probs, fit_member_weights, mixture_cross_entropy
from torchace.functional.scores import (
    BiasVarianceCovariance,
    ambiguity,
    bias_variance_covariance,
    brier_score,
    calibration_error,
    disagreement,
    mutual_information,
    pairwise_cross_entropy,
    predictive_entropy,
)

__all__ = [
    "BiasVarianceCovariance",
    "ambiguity",
    "amended_cross_entropy",
    "average_gradients",
    "bias_variance_covariance",
    "binary_amended_cross_entropy",
    "brier_score",
    "calibration_error",
    "disagreement",
    "diversity_from_gamma",
    "ensemble_log_probs",
    "ensemble_probs",
    "fit_member_weights",
    "gamma_from_diversity",
    "linear_amended_cross_entropy",
    "mixture_cross_entropy",
    "mutual_information",
    "negative_correlation",
    "pairwise_cross_entropy",
    "predictive_entropy",
]
