"""CP-SAT: one Boolean a column, on the core that prices leave undecided."""

from tessera.solvers.cpsat.model import CpSat

__all__ = ["CpSat"]
