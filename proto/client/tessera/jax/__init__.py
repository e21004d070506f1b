"""Training programs in JAX that can run any execution plan: see docs/training.md."""
