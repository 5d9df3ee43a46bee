"""Pydantic models of experiments and of result files: written by sweeps and fits, read by reports; no torch."""
