"""Sweeps: configuration, executors, callbacks and result files."""
