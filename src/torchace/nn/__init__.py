"""Losses, ensembles, heads and conversion as modules; no formulas, no optimizers."""
