"""Answers to a statement: exact, greedy, second opinions, and placement."""
