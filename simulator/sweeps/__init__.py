"""Sweeps of many independent runs in parallel, on this machine or a Ray cluster. They can be resumed."""
