"""Threads, and small tasks in the background."""
