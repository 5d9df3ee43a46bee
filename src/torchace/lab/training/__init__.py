"""Training: step, loop, evaluation and checkpoints."""
