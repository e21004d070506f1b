"""Simulated jobs that share a network, at the rates that they reach when they share links."""
