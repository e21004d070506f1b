"""Tokens of users, certificates of agents, and the audit log."""
