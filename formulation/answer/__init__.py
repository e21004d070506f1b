"""Answers to a round: solutions, decisions, proofs, checkers and explanations."""
