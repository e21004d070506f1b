"""The least mean completion time of a small case over all rounds, from a time-indexed program.

The program knows all arrivals in advance. In each round a job runs on one Cell or waits. Its first
round on a Cell begins with a start. HiGHS solves it, through SciPy.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Final

import numpy as np
from scipy.optimize import Bounds, LinearConstraint, milp
from scipy.sparse import csr_array

from tessera.benchmarks.schedulers.foresight_cases import (
    COUNTS,
    JOBS,
    NODE_GPUS,
    ROUND_S,
    START_S,
    TYPES,
    SmallCase,
)

HORIZONS: Final = (8, 12, 16, 24)
"""The numbers of rounds that are tried in turn, until no optimal schedule can be longer."""
GAP: Final = 1e-4
"""The relative gap to which the program is solved."""

Key = tuple[str | int, ...]
Option = tuple[int, int]
"""A Cell of a job: its GPU type, and the index of its GPU count."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ProvenOptimum:
    """The mean completion time of the best schedule found, and a lower bound on any, in seconds.

    ``proven`` is true if they are within ``GAP`` and no longer schedule can be better.
    """

    mean_s: float
    bound_s: float
    rounds: int
    proven: bool


@dataclass(slots=True)
class _Program:
    """A mixed-integer program in the making: variables by key, and rows of coefficients."""

    index: dict[Key, int] = field(default_factory=dict)
    rows: list[list[tuple[int, float]]] = field(default_factory=list)
    least: list[float] = field(default_factory=list)
    most: list[float] = field(default_factory=list)

    def at(self, *key: str | int) -> int:
        """Return the index of a variable, which is made if it is new."""
        return self.index.setdefault(key, len(self.index))

    def add(
        self, terms: Sequence[tuple[int, float]], least: float = -math.inf, most: float = 0.0
    ) -> None:
        """Add a row."""
        self.rows.append(list(terms))
        self.least.append(least)
        self.most.append(most)

    def matrix(self) -> csr_array:
        """Return the coefficients of all rows."""
        row = np.repeat(np.arange(len(self.rows)), [len(terms) for terms in self.rows])
        column, value = zip(*(term for terms in self.rows for term in terms), strict=True)
        return csr_array((value, (row, column)), shape=(len(self.rows), len(self.index)))


def solve_case(case: SmallCase, time_limit_s: float = math.inf) -> ProvenOptimum:
    """Return the optimum of a case.

    A schedule of which job j ends after the last round takes at least what is left for j, plus the
    time of each other job alone. A horizon is long enough if that is no less than the optimum.
    """
    fastest = case.speed.reshape(JOBS, -1).max(axis=1)
    alone_s = START_S + case.work_s / fastest
    best = ProvenOptimum(mean_s=math.inf, bound_s=0.0, rounds=0, proven=False)
    for rounds in HORIZONS:
        mean_s, bound_s = _solve(case, rounds, time_limit_s)
        late_s = (rounds - case.arrival) * ROUND_S + alone_s.sum() - alone_s
        whole = bool((late_s >= JOBS * mean_s).all())
        close = mean_s - bound_s <= 2 * GAP * mean_s
        best = ProvenOptimum(mean_s=mean_s, bound_s=bound_s, rounds=rounds, proven=whole and close)
        if whole and math.isfinite(mean_s):
            break
    return best


def _solve(case: SmallCase, rounds: int, time_limit_s: float) -> tuple[float, float]:
    """Return the mean completion time of the best schedule of ``rounds`` rounds, and its bound."""
    program = _Program()
    for job in range(JOBS):
        _add_job(program, case, job, rounds)
    _add_capacity(program, case, rounds)
    names = list(program.index)
    is_whole = np.array([name[0] in ("on", "open") for name in names], dtype=np.int64)
    cost = np.array([{"open": ROUND_S, "last": 1.0}.get(str(name[0]), 0.0) for name in names])
    top = np.array([ROUND_S if name[0] in ("trains", "last") else 1.0 for name in names])
    result = milp(
        cost,
        constraints=LinearConstraint(program.matrix(), program.least, program.most),
        bounds=Bounds(np.zeros(len(names)), top),
        integrality=is_whole,
        options={"time_limit": time_limit_s, "mip_rel_gap": GAP},
    )
    if result.x is None or result.mip_dual_bound is None:
        return math.inf, 0.0
    shift = ROUND_S * JOBS  # the round in which a job ends counts by its part alone
    return (result.fun - shift) / JOBS, (result.mip_dual_bound - shift) / JOBS


def _options(case: SmallCase, job: int) -> list[Option]:
    return [(kind, k) for kind, k in np.argwhere(case.speed[job] > 0).tolist()]


def _add_job(program: _Program, case: SmallCase, job: int, rounds: int) -> None:
    """Add the variables and rows of a job.

    In round k, ``on`` is 1 on the Cell that it holds, ``starts`` is 1 if it did not hold it before,
    and ``trains`` is its seconds of training. ``open`` is 1 until it has ended, and ``last`` is its
    part of the round in which it ends.
    """
    first, options = int(case.arrival[job]), _options(case, job)
    last = program.at("last", job)
    for k in range(first, rounds):
        is_open = program.at("open", job, k)
        used = []
        for option in options:
            on, trains = program.at("on", job, *option, k), program.at("trains", job, *option, k)
            starts = program.at("starts", job, *option, k)
            program.add([(trains, 1.0), (on, -ROUND_S), (starts, START_S)])
            before = [] if k == first else [(program.at("on", job, *option, k - 1), -1.0)]
            program.add([(on, 1.0), (starts, -1.0), *before])
            program.add([(starts, 1.0), (on, -1.0)])
            used += [(trains, 1.0), (starts, START_S)]
        program.add([*((program.at("on", job, *one, k), 1.0) for one in options), (is_open, -1.0)])
        if k > first:
            program.add([(is_open, 1.0), (program.at("open", job, k - 1), -1.0)])
        later = [(program.at("open", job, k + 1), -ROUND_S)] if k + 1 < rounds else []
        program.add([(last, -1.0), *used, *later])
    done = [
        (
            program.at("trains", job, *option, k),
            float(case.speed[job, option[0], option[1]] / case.work_s[job]),
        )
        for option in options
        for k in range(first, rounds)
    ]
    program.add(done, least=1.0, most=math.inf)


def _add_capacity(program: _Program, case: SmallCase, rounds: int) -> None:
    """Add the rows of the GPUs of each type in each round."""
    for k in range(rounds):
        for kind in range(len(TYPES)):
            held = [
                (program.at("on", job, *option, k), float(COUNTS[option[1]]))
                for job in range(JOBS)
                for option in _options(case, job)
                if option[0] == kind and k >= case.arrival[job]
            ]
            if held:
                program.add(held, most=float(NODE_GPUS))
