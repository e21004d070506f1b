"""The search: branch and bound over the counts of a joined core, in slices between looks at a clock."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Final

import numpy as np

from tessera.formulation.answer.certificates import Certificate
from tessera.formulation.base.tables import Ints
from tessera.formulation.round.problem import Problem
from tessera.solvers.base import Budget
from tessera.solvers.exact.answers import is_answer, objective_of
from tessera.solvers.exact.branching.joining import JoinedCore, join_core
from tessera.solvers.exact.branching.proof import certify_tree
from tessera.solvers.exact.prices import PricedProblem
from tessera.solvers.kernels.branching import (
    BOUND,
    CURRENT,
    FOUND,
    KNOWN,
    NODES,
    JoinedProgram,
    SearchState,
    SearchTree,
    Tableau,
    search_tree,
)

SLICE_NODES: Final = 20
"""Nodes between two looks at the clock."""
LEAST_PROGRESS: Final = 0.05
"""Share of the gap by which a certificate must lower the bound to be made."""
MOST_CELLS: Final = 12_000_000
"""Size of the largest tableau, in numbers: 96 MB."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class SearchResult:
    """The result of a search: a better choice (int64[jobs]) or None, and the nodes it took.

    ``over`` says that nothing was left to search. ``certificate`` is None if it needs more than 64 bits.
    """

    choice: Ints | None
    nodes: int
    over: bool
    certificate: Certificate | None


def search_core(
    problem: Problem,
    priced: PricedProblem,
    known: Ints | None,
    budget: Budget,
    *,
    gap: float,
    columns: int,
    nodes: int,
    bound: float = -math.inf,
) -> SearchResult | None:
    """Search the core of at most ``columns`` columns around ``priced``, by at most ``nodes`` nodes.

    ``gap`` is the relative gap at which it ends. A certificate is made if it lowers ``bound`` by some
    share of the gap, or if the search is over, but never if ``bound`` is -inf. Return None if there
    is nothing to search.
    """
    value = -math.inf if known is None else float(objective_of(problem, known))
    reach = priced.total + priced.slack - value if known is not None else math.inf
    core = join_core(problem, priced, reach, columns)
    if core is None or _cells(core.program) > MOST_CELLS:
        return None
    tree, tableau, state = _memory(core.program, nodes)
    state.values[KNOWN] = value - core.offset
    # The bound falls and the value rises: neither may end up further apart than the gap.
    size = abs(priced.bound) if value == -math.inf else min(abs(priced.bound), abs(value))
    allowed = gap * max(size, 1.0)
    over, looked = False, 0
    while not over and looked < nodes and not budget.expired():
        budget.check()
        now = min(SLICE_NODES, nodes - looked)
        over = search_tree(core.program, tableau, tree, state, allowed, now)
        looked += now
    if not looked:
        return None
    made = int(state.counts[NODES])
    found = max(state.values[BOUND] + core.offset, core.outside)
    certify = bound > -math.inf
    if certify and not over:
        known_now = max(value, state.values[KNOWN] + core.offset)
        certify = found <= bound - LEAST_PROGRESS * (bound - known_now)
    certificate = certify_tree(problem, priced, core, tree, made) if certify else None
    choice = _spread(problem, core, state.best, known) if state.counts[FOUND] else None
    if choice is not None and not is_answer(problem, choice):
        choice = None
    return SearchResult(choice=choice, nodes=looked, over=over, certificate=certificate)


def _cells(program: JoinedProgram) -> int:
    rows = len(program.capacity) + len(program.members)
    return rows * (rows + len(program.value))


def _memory(program: JoinedProgram, nodes: int) -> tuple[SearchTree, Tableau, SearchState]:
    """Return the arrays that a search works on."""
    rows = len(program.capacity) + len(program.members)
    variables, most = rows + len(program.value), 2 * nodes + 3
    tree = SearchTree(
        parent=np.empty(most, np.int64),
        column=np.zeros(most, np.int64),
        most=np.zeros(most, np.int64),
        above=np.zeros(most, np.bool_),
        state=np.zeros(most, np.int64),
        bound=np.empty(most),
        prices=np.zeros((most, len(program.capacity))),
    )
    tableau = Tableau(
        body=np.empty((rows, variables)),
        level=np.empty(rows),
        basis=np.empty(rows, np.int64),
        place=np.full(variables, -1),
        rest=np.empty(variables),
        low=np.empty(variables),
        high=np.empty(variables),
        gain=np.empty(variables),
    )
    counts = np.zeros(6, np.int64)
    counts[CURRENT] = -1
    state = SearchState(
        counts=counts, values=np.zeros(2), best=np.zeros(len(program.value), np.int64)
    )
    return tree, tableau, state


def _spread(problem: Problem, core: JoinedCore, number: Ints, known: Ints | None) -> Ints:
    """Return the choice of the whole problem with these counts, int64[jobs].

    A job keeps its known column if the counts of its class allow it.
    """
    choice = core.around.settled.copy()
    program, first = core.program, problem.job_start
    for k in range(len(program.members)):
        jobs = core.members[core.member_start[k] : core.member_start[k + 1]]
        span = slice(int(program.class_start[k]), int(program.class_start[k + 1]))
        place = core.columns[span] - first[jobs[0]]  # among the columns of each job
        left = dict(zip(place.tolist(), number[span].tolist(), strict=True))
        pending = []
        for job in jobs.tolist():
            own = -1 if known is None or known[job] < 0 else int(known[job] - first[job])
            if left.get(own, 0) > 0:
                left[own] -= 1
                choice[job] = known[job] if known is not None else -1
            else:
                pending.append(job)
        for at, count in left.items():
            for _ in range(count):
                job = pending.pop(0)
                choice[job] = first[job] + at
    return choice
