"""Scores of ensembles, accumulated over batches as torchmetrics metrics."""

from torchace.metrics.ensemble import EnsembleMetrics

__all__ = ["EnsembleMetrics"]
