"""Comparisons of rounds and of futures without and with a hypothetical change."""
