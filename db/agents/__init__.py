"""Agents: the work of their nodes, and their reports."""
