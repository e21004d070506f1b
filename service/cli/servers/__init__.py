"""Commands that start and inspect servers and agents."""
