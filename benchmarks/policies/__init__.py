"""Simulated runs of policies: workload and policy by name, runs as tasks, runs set against each other."""
