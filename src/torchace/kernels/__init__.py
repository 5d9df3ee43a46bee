"""Twins of `functional` for one device each, chosen there by device: same results, tested against it."""
