"""The checks of ``tessera doctor``."""
