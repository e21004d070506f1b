"""The snapshot of a cluster, read in one transaction: everything that a round may look at."""
