"""Decides what is trained: configuration, the store of finished runs, sweeps; writes the result files."""
