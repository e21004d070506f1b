"""A throw-away Tessera of real processes, and what drives it."""
