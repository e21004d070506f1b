"""A running service under load and under attack."""
