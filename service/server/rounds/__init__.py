"""Rounds, forecasts, explanations and network plans of clusters."""
