"""Comparisons of published schedulers and our policies in simulation."""
