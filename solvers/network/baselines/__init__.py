"""Methods that Crux is compared with; each module has a ``plan`` for the same question."""
