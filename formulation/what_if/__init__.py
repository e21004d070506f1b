"""Hypothetical changes of a cluster, and the records of what they would change."""
