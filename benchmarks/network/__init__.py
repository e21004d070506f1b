"""Benchmarks of network plans, and the networks and jobs on which they measure."""
