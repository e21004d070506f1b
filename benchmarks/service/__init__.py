"""Benchmarks of a running service under load and under attack."""
