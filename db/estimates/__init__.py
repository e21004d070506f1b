"""Workloads, their execution plans, measurements and estimates."""
