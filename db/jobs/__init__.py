"""Jobs: their submission, their changes, and their limits."""
