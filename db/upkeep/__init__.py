"""Retention, the removal of deleted clusters, and checks of stored data."""
