"""A stand-in for Ray."""
