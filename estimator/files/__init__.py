"""Readers of the files that users write."""
