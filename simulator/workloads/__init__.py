"""The workloads of simulations: published traces with their clusters, and synthetic ones."""
