"""Finds λ and hyperparameters on validation data."""
