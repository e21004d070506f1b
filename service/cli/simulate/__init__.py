"""``tessera simulate``: a trace of one's own under policies by name."""
