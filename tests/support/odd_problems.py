"""Random problems that no real round would state, and their optimum by a dynamic program."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

import numpy as np

from tessera.formulation.answer.check import find_violations
from tessera.formulation.answer.solution import Solution, SolveStatus
from tessera.formulation.base.tables import Floats, Ints
from tessera.formulation.round.problem import MAX_TOTAL, CouplingRow, Problem, RowKind
from tessera.formulation.state.cells import one_cell
from tests.support.family_problems import SMALL_FAMILIES, draw_small_family

KINDS: Final = (
    "small",
    "middling",
    "empty",
    "huge",
    "tiny",
    "no capacity",
    "many rows",
    "alike",
    "must run",
    "counts who waits",
    "equal ratios",
    *SMALL_FAMILIES,
)
"""The kinds of unusual problems, which ``draw_problem`` describes."""
MAX_STATES: Final = 2_000
"""The largest number of states of the dynamic program. Beyond it, another solver is used."""


@dataclass(slots=True)
class _ProblemDistribution:
    """The distribution of a random problem. Ranges include both ends."""

    jobs: tuple[int, int] = (0, 5)
    options: tuple[int, int] = (0, 3)
    rows: tuple[int, int] = (1, 3)
    uses: int = 2  # at most this number of rows for each column
    value: tuple[int, int] = (-3, 20)
    amount: tuple[int, int] = (0, 5)
    capacity: tuple[int, int] = (0, 9)
    must_run: float = 0.15
    current: float = 0.3
    idle: float = 0.0


def draw_problem(rng: np.random.Generator, kind: str = "") -> Problem:
    """Draw a problem of the given kind, or of any kind if none is named.

    ``huge``: values and amounts up to what the sums allow; ``tiny``: values of 0 and 1, capacities
    up to 2; ``alike``: every job has the same columns; ``must run``: most jobs must run, often more
    than fit; ``counts who waits``: jobs use rows by waiting; ``equal ratios``: the value of every
    column is three times its size. The kinds of ``SMALL_FAMILIES`` are small rounds of the named
    families.
    """
    kind = kind or str(rng.choice(KINDS))
    if kind in SMALL_FAMILIES:
        return draw_small_family(rng, kind)
    shape = _shape(kind, rng)
    jobs, rows = _between(rng, shape.jobs), _between(rng, shape.rows)
    count = rng.integers(shape.options[0], shape.options[1] + 1, jobs)
    if kind == "alike" and jobs:
        count[:] = count[0]
    columns = int(count.sum())
    use = _use(rng, shape, columns, rows)
    value = rng.integers(shape.value[0], shape.value[1] + 1, columns)
    if kind == "equal ratios":
        value = 3 * use.sum(axis=1)
    if kind == "alike" and jobs:
        value, use = np.tile(value[: count[0]], jobs), np.tile(use[: count[0]], (jobs, 1))
    start = np.append(0, np.cumsum(count))
    current = np.where(count > 0, start[:-1] + rng.integers(0, np.maximum(count, 1)), -1)
    runs = rng.random(jobs) < shape.current
    idle = np.where(
        (rng.random((jobs, rows)) < shape.idle) & (count > 0)[:, None],
        rng.integers(1, 4, (jobs, rows)),
        0,
    )
    capacity = rng.integers(shape.capacity[0], shape.capacity[1] + 1, rows)
    used, waiting = use > 0, idle > 0
    return Problem(
        jobs=tuple(f"job-{j}" for j in range(jobs)),
        job_start=start,
        cells=one_cell(),
        plans=("",),
        cell=np.zeros(columns, np.int64),
        value=value,
        restart_price=np.zeros(columns, np.int64),
        scale=1.0,
        unit="units",
        rows=tuple(
            CouplingRow(kind=RowKind.GPUS, subject=f"type-{r}", capacity=c)
            for r, c in enumerate(capacity.tolist())
        ),
        usage_start=np.append(0, np.cumsum(used.sum(axis=1))),
        row=np.nonzero(used)[1],
        amount=use[used],
        idle_start=np.append(0, np.cumsum(waiting.sum(axis=1))),
        idle_row=np.nonzero(waiting)[1],
        idle_amount=idle[waiting],
        must_run=rng.random(jobs) < shape.must_run,
        current=np.where(runs, current, -1),
        restart_share=np.zeros(jobs),
        weight=np.ones(jobs),
        least_rate=np.zeros(jobs),
        movable=np.ones(jobs, np.bool_),
    )


def _shape(kind: str, rng: np.random.Generator) -> _ProblemDistribution:
    shape = _ProblemDistribution()
    if kind == "middling":
        shape = _ProblemDistribution(
            jobs=(5, 60),
            options=(0, 6),
            rows=(1, 4),
            value=(0, 10**6),
            amount=(1, 16),
            capacity=(0, 128),
            must_run=0.02,
        )
    elif kind == "empty":
        shape = _ProblemDistribution(jobs=(0, 2), options=(0, 1), rows=(0, 1), capacity=(0, 1))
    elif kind == "huge":
        most = int(MAX_TOTAL) // 8
        shape.value = (-most // 4, most) if rng.random() < 0.5 else (most - 9, most)
        shape.amount = shape.capacity = (0, most // 8)
        shape.uses = 1
    elif kind == "tiny":
        shape.value, shape.amount, shape.capacity = (0, 1), (0, 1), (0, 2)
    elif kind == "no capacity":
        shape.capacity = (0, 0)
    elif kind == "many rows":
        shape.rows, shape.uses, shape.capacity = (10, 40), 12, (2, 9)
    elif kind == "must run":
        shape.must_run = 0.8
    elif kind == "counts who waits":
        shape.idle, shape.capacity = 0.5, (1, 6)
    return shape


def _between(rng: np.random.Generator, ends: tuple[int, int]) -> int:
    return int(rng.integers(ends[0], ends[1] + 1))


def _use(rng: np.random.Generator, shape: _ProblemDistribution, columns: int, rows: int) -> Ints:
    """Return the amount that each column uses of each row, int64[columns, rows].

    A column uses at most ``shape.uses`` rows.
    """
    if not rows:
        return np.zeros((columns, 0), np.int64)
    amount = rng.integers(shape.amount[0], shape.amount[1] + 1, (columns, rows))
    rank = np.argsort(np.argsort(rng.random((columns, rows)), axis=1), axis=1)
    kept = rank < rng.integers(0, min(shape.uses, rows) + 1, (columns, 1))
    return np.where(kept, amount, 0)


class TooLarge(Exception):
    """An error of a dynamic program that would need more than ``MAX_STATES`` states."""


def dynamic_optimum(problem: Problem) -> int | None:
    """Return the best objective, by a dynamic program over the used capacity.

    If there is no answer, return None. It uses only Python's own integers and dictionaries, so that
    it shares no arithmetic with the code that it judges.

    Raises:
        TooLarge: it would take too long.
    """
    capacity = [row.capacity for row in problem.rows]
    best: dict[tuple[int, ...], int] = {(0,) * len(capacity): 0}
    for job in range(len(problem.jobs)):
        ways = [(int(problem.value[c]), problem.usage_of(c)) for c in problem.columns_of(job)]
        if not problem.must_run[job]:
            ways.append((0, problem.idle_usage_of(job)))
        following: dict[tuple[int, ...], int] = {}
        for used, worth in best.items():
            for value, use in ways:
                after = _after(used, use, capacity)
                if after is not None and worth + value > following.get(after, worth + value - 1):
                    following[after] = worth + value
        if len(following) > MAX_STATES:
            raise TooLarge
        best = following
    return max(best.values(), default=None)


def _after(
    used: tuple[int, ...], use: dict[int, int], capacity: Sequence[int]
) -> tuple[int, ...] | None:
    after = list(used)
    for row, amount in use.items():
        after[row] += amount
        if after[row] > capacity[row]:
            return None
    return tuple(after)


def draw_prices(rng: np.random.Generator, problem: Problem) -> Floats:
    """Draw shadow prices of the problem's rows, most of the size of its values, some wild."""
    top = float(np.abs(problem.value).max(initial=1))
    wild = rng.choice([0.0, 1e-300, 1.0, top, 1e15], len(problem.rows))
    return np.where(
        rng.random(len(problem.rows)) < 0.5, wild, rng.uniform(0, top, len(problem.rows))
    )


def answer_faults(problem: Problem, solution: Solution, best: int | float | None) -> list[str]:
    """Return the faults of an answer, given the optimum.

    If ``best`` is None, the problem has no answer. If it is NaN, the optimum is not known.
    """
    wrong = []
    if (solution.has_answer and find_violations(problem, solution)) or len(solution.choice) != len(
        problem.jobs
    ):
        wrong.append("violations")
    if best is None:
        if solution.has_answer:
            wrong.append("wrong_proofs")
        return wrong
    if math.isnan(best):
        return wrong
    if not solution.bound >= best or (solution.has_answer and solution.objective > best):
        wrong.append("wrong_bounds")
    untrue = solution.status is SolveStatus.OPTIMAL and solution.objective != best
    if untrue or solution.status is SolveStatus.INFEASIBLE:
        wrong.append("wrong_proofs")
    return wrong
