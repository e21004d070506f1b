"""A simulated cluster with its own clock, which runs the same round function as the service."""
