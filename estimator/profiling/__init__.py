"""Measurements of layers, steps and collectives with JAX on the devices of this machine."""
