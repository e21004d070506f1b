"""A stand-in for PyTorch, which has nothing but its launcher."""
