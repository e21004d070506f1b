"""Rows as values, and the turn at changing them, which every other part uses."""
