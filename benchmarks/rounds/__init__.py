"""Benchmarks of single rounds: instances, contests of solvers, and independent judges."""
