"""Solvers for comparison on the same problem.

They are stock solvers, and formulations and decompositions of peers. No round is decided by them;
``tessera bench solve`` runs each in a separate process.
"""
