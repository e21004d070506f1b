"""CP-SAT with one Boolean for each column, on the core that shadow prices leave undecided."""

from tessera.solvers.exact.cpsat.model import POLISHING_WORK, WORK_PER_S, CpSat

__all__ = ["POLISHING_WORK", "WORK_PER_S", "CpSat"]
