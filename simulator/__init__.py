"""A world with its own clock, on the very round function of the service."""
