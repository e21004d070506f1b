"""Rounds: the snapshots that they read, and the commit of their decisions."""
