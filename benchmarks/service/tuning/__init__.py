"""The trial of tuning spaces by programs that really train, on CPU devices."""
