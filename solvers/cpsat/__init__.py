"""CP-SAT with one Boolean for each column, on the core that shadow prices leave undecided."""

from tessera.solvers.cpsat.model import CpSat

__all__ = ["CpSat"]
