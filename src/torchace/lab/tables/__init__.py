"""Fits, evaluates, applies and exports models of tables."""
