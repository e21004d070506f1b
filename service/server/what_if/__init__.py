"""Answers to questions about what would happen, of which nothing is stored."""
