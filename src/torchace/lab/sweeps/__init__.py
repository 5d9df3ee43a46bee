"""Decides what is trained: configuration, the ledger of finished runs, sweeps; writes the result files."""
