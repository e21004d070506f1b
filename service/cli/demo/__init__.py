"""The demonstration: a temporary Tessera of real processes, and its driver."""
