"""Simulated jobs that share the links of a network, with their rates and slowdowns."""
