"""Solvers to compare with, on the same problem: stock ones, and formulations and decompositions of peers.

No round is decided by them; ``tessera bench solve`` runs each in a process of its own.
"""
