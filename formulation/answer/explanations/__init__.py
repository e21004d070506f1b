"""Explanations of what rounds decide on jobs: reasons, changes that would help, and their words."""
