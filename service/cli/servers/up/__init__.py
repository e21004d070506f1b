"""``tessera up``: a complete Tessera on this machine, in processes that are stopped in order."""
