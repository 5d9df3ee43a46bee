"""Fit, evaluate, predict and export models of tables."""
