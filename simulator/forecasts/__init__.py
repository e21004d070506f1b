"""Forecasts: when jobs will start and finish, from sampled futures of a snapshot."""
