"""Sweeps of many independent runs in parallel processes. They can be resumed."""
