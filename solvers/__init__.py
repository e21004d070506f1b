"""Solvers for a round's problem: exact, greedy and second-opinion solvers, and placement."""
