"""Search for λ and hyperparameters on validation data."""
