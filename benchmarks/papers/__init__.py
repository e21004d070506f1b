"""Repeated published experiments: Arena's artifact and testbed, Morphling's traces, motivations."""
