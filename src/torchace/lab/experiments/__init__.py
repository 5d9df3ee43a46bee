"""The built-in experiments: data, not code."""
