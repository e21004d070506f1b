"""Answers to a round's problem: greedy, guided by prices, exact, and second opinions."""
