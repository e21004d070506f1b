"""Priorities and paths of jobs' traffic on a node: marks at launch, and the NIC's map of them."""
