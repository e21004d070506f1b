"""Benchmarks of deadlines: how many are met, by tightness, load and scheduler."""
