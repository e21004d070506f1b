"""The package of the launcher."""
