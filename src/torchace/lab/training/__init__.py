"""Trains what it is given: the step, the loop around it, evaluation and checkpoints."""
