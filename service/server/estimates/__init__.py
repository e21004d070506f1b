"""Estimates that the server makes, and their measurements."""
