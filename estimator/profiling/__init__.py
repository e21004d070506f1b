"""Measurements with JAX on the devices of this machine."""
