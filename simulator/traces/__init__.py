"""Readers of users' CSV files into domain values.

Sending these to a server is the caller's task.
"""
