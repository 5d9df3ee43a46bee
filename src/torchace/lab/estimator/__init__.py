"""Common base of `ACEClassifier` and `NCLRegressor`."""

from torchace.lab.estimator.base import Estimator

__all__ = ["Estimator"]
