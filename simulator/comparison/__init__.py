"""Simulated runs of schedulers and policies: workloads by name, runs as tasks, results compared."""
