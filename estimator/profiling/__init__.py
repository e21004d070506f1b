"""Measuring on devices that are there, with JAX."""
