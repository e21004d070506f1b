"""Small problems given as arrays, a strategy for random ones, and their optimum by trying all."""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence

import numpy as np
from hypothesis import strategies as st

from tessera.formulation.answer.solution import Solution
from tessera.formulation.round.problem import CouplingRow, Problem, RowKind
from tessera.formulation.state.cells import one_cell

Option = tuple[int, Mapping[int, int]]  # value, row -> amount


def a_problem(
    jobs: Sequence[Sequence[Option]],
    capacity: Sequence[int] = (8,),
    *,
    must_run: Sequence[int] = (),
    current: Mapping[int, int] | None = None,
) -> Problem:
    """Return a problem. ``current`` maps a job to the position of its running option."""
    options = [option for job in jobs for option in job]
    starts = np.cumsum([0, *(len(job) for job in jobs)])
    running = np.full(len(jobs), -1)
    for job, position in (current or {}).items():
        running[job] = starts[job] + position
    must = np.zeros(len(jobs), dtype=np.bool_)
    must[list(must_run)] = True
    return Problem(
        jobs=tuple(f"job-{j}" for j in range(len(jobs))),
        job_start=starts,
        cells=one_cell(),
        plans=("",),
        cell=np.zeros(len(options), np.int64),
        value=np.array([value for value, _ in options], np.int64),
        restart_price=np.zeros(len(options), np.int64),
        scale=1.0,
        unit="units",
        rows=tuple(
            CouplingRow(kind=RowKind.GPUS, subject=f"type-{r}", capacity=c)
            for r, c in enumerate(capacity)
        ),
        usage_start=np.cumsum([0, *(len(use) for _, use in options)]),
        row=np.array([r for _, use in options for r in sorted(use)], np.int64),
        amount=np.array([use[r] for _, use in options for r in sorted(use)], np.int64),
        idle_start=np.zeros(len(jobs) + 1, np.int64),
        idle_row=np.zeros(0, np.int64),
        idle_amount=np.zeros(0, np.int64),
        must_run=must,
        current=running,
        restart_share=np.zeros(len(jobs)),
        weight=np.ones(len(jobs)),
        least_rate=np.zeros(len(jobs)),
        movable=np.ones(len(jobs), np.bool_),
    )


@st.composite
def problems(draw: st.DrawFn, *, jobs: int = 5, options: int = 3, rows: int = 3) -> Problem:
    """Draw a problem with up to this number of jobs, options per job and rows.

    Some jobs must run, and some run now.
    """
    height = draw(st.integers(1, rows))
    use = st.dictionaries(st.integers(0, height - 1), st.integers(0, 5), max_size=2)
    option = st.tuples(st.integers(-3, 20), use)
    drawn = draw(st.lists(st.lists(option, max_size=options), max_size=jobs))
    chosen = st.sets(st.integers(0, max(0, len(drawn) - 1)), max_size=2)
    must = [j for j in draw(chosen) if j < len(drawn)]
    running = [j for j in draw(chosen) if j < len(drawn) and drawn[j]]
    capacity = draw(st.lists(st.integers(0, 9), min_size=height, max_size=height))
    return a_problem(drawn, capacity, must_run=must, current=dict.fromkeys(running, 0))


def brute_force(problem: Problem) -> int | None:
    """Return the best objective by trying all, or None if the must-run jobs do not fit."""
    best: int | None = None
    ways = [
        [*([] if problem.must_run[j] else [-1]), *problem.columns_of(j)]
        for j in range(len(problem.jobs))
    ]
    for choice in itertools.product(*ways):
        picked = [c for c in choice if c >= 0]
        used = [0] * len(problem.rows)
        for column in picked:
            for row, amount in problem.usage_of(column).items():
                used[row] += amount
        if all(u <= row.capacity for u, row in zip(used, problem.rows, strict=True)):
            worth = sum(int(problem.value[c]) for c in picked)
            best = worth if best is None else max(best, worth)
    return best


def are_equal(one: Solution, other: Solution) -> bool:
    """Return whether two solutions are equal bit for bit."""
    return (
        np.array_equal(one.choice, other.choice)
        and np.array_equal(one.prices, other.prices)
        and (one.status, one.objective, one.bound, one.seed, one.work)
        == (other.status, other.objective, other.bound, other.seed, other.work)
    )
