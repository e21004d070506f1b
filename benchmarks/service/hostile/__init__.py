"""Hostile callers of a running server, and measurements of their effect on other callers."""
