"""Hostile callers of a running server, and the measures of what other callers then see."""
