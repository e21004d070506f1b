"""Simulators of published artifacts, oddities and all, for numbers that must be compared with theirs."""
