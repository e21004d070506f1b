"""Rounds on GPUs and jobs that are stated in Python, without a server.

>>> from tessera.modelling import Problem
"""

from tessera.formulation.base.errors import InvalidInput
from tessera.formulation.base.values import Cell
from tessera.modelling.files import read_snapshot, write_snapshot
from tessera.modelling.problem import Problem
from tessera.modelling.result import JobResult, RoundResult

__all__ = [
    "Cell",
    "InvalidInput",
    "JobResult",
    "Problem",
    "RoundResult",
    "read_snapshot",
    "write_snapshot",
]
