"""The keeper: a small process that runs a member's program, watches it, and outlives the agent.

It is run by path on the standard library alone (``main.py``), so its modules import nothing else.
"""
