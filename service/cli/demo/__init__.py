"""The demonstration: a temporary Tessera of real processes, and what drives it."""
