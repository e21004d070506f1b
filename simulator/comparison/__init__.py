"""Simulated runs of schedulers and policies: workloads, tasks and comparisons."""
