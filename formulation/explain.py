"""Why a job does not run: one dominant reason with evidence and a next step, for every such job.

Codes are stable: programs may act on them. Evidence is flat, so that it can travel as strings.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum

import numpy as np

from formulation.lifecycle import SCHEDULABLE, JobState
from formulation.problem import Problem
from formulation.snapshot import STATES, Snapshot
from formulation.solution import Solution
from formulation.tables import Ints


class ReasonCode(StrEnum):
    """The dominant reason; the first that applies wins."""

    HELD = "HELD"
    LEAVING = "LEAVING"
    NO_ESTIMATE = "NO_ESTIMATE"
    NO_FEASIBLE_CELL = "NO_FEASIBLE_CELL"
    FITS_NOWHERE = "FITS_NOWHERE"
    FRAGMENTED = "FRAGMENTED"
    PROMISE_GIVEN_UP = "PROMISE_GIVEN_UP"
    OUTPRICED = "OUTPRICED"
    NO_CAPACITY = "NO_CAPACITY"
    NOT_WORTH_RESTART = "NOT_WORTH_RESTART"
    BUDGET_SPENT = "BUDGET_SPENT"


@dataclass(frozen=True, slots=True, kw_only=True)
class Reason:
    """Why a job does not run."""

    code: ReasonCode
    message: str
    next_step: str
    evidence: tuple[tuple[str, str], ...] = ()


def explain(
    snapshot: Snapshot,
    problem: Problem,
    solution: Solution,
    unplaced: dict[int, str],
    given_up: frozenset[int],
) -> dict[int, Reason]:
    """Return a reason for each job without a column in ``solution``.

    ``unplaced`` is what placement says of jobs whose chosen Cell found no blocks; ``given_up`` are jobs
    whose promise could not be kept.
    """
    free = problem.capacity - problem.used(solution.choice)
    tried = np.zeros(len(snapshot.workloads), dtype=np.bool_)
    tried[snapshot.estimates.workload] = True
    feasible = np.zeros(len(snapshot.workloads), dtype=np.bool_)
    feasible[snapshot.estimates.workload[np.isfinite(snapshot.estimates.iter_time_s)]] = True
    found: dict[int, Reason] = {}
    for job in np.flatnonzero(solution.choice < 0).tolist():
        state = STATES[int(snapshot.jobs.state[job])]
        workload = int(snapshot.jobs.workload[job])
        if state not in SCHEDULABLE:
            found[job] = _not_schedulable(state)
        elif not feasible[workload]:
            found[job] = _no_cell(snapshot, workload, tried=bool(tried[workload]))
        elif not problem.columns_of(job):
            found[job] = _fits_nowhere(snapshot, workload)
        elif job in unplaced:
            found[job] = Reason(
                code=ReasonCode.FRAGMENTED,
                message=f"GPUs are free, but not together: {unplaced[job]}",
                next_step="allow running jobs to be moved, or accept a smaller GPU count",
            )
        elif job in given_up:
            found[job] = Reason(
                code=ReasonCode.PROMISE_GIVEN_UP,
                message="the guaranteed jobs no longer fit together; this one weighs least",
                next_step="bring lost nodes back, or raise the job's weight",
            )
        else:
            found[job] = _lost_out(problem, solution, free, job)
    return found


def _not_schedulable(state: JobState) -> Reason:
    if state is JobState.HELD:
        return Reason(
            code=ReasonCode.HELD, message="the job is on hold", next_step="release the job"
        )
    return Reason(
        code=ReasonCode.LEAVING,
        message=f"the job is {state}; its GPUs are being given back",
        next_step="wait until its agents have reported it gone",
    )


def _no_cell(snapshot: Snapshot, workload: int, *, tried: bool) -> Reason:
    key = snapshot.workloads[workload].key
    if not tried:
        return Reason(
            code=ReasonCode.NO_ESTIMATE,
            message=f"there is no estimate of {key} on any GPU type",
            next_step="import a profile of this workload, or add Cells",
            evidence=(("workload", key),),
        )
    return Reason(
        code=ReasonCode.NO_FEASIBLE_CELL,
        message=f"every known Cell of {key} fails to run (out of memory, or the run failed)",
        next_step="add Cells with more GPUs or another GPU type",
        evidence=(("workload", key),),
    )


def _fits_nowhere(snapshot: Snapshot, workload: int) -> Reason:
    e, capacity = snapshot.estimates, snapshot.schedulable_gpus()
    mine = (e.workload == workload) & np.isfinite(e.iter_time_s)
    types = sorted(set(e.gpu_type[mine].tolist()))
    needs = ", ".join(
        f"{e.gpus[mine & (e.gpu_type == t)].min()} x {snapshot.gpu_types[t].name}"
        f" (of {capacity[t]})"
        for t in types
    )
    return Reason(
        code=ReasonCode.FITS_NOWHERE,
        message=f"its smallest Cells exceed the schedulable GPUs: it needs {needs}",
        next_step="bring nodes back, or add Cells with fewer GPUs",
        evidence=(("needs", needs),),
    )


def _lost_out(problem: Problem, solution: Solution, free: Ints, job: int) -> Reason:
    """Explain a job that had columns but was not chosen, by prices where they are known."""
    columns = problem.columns_of(job)
    values = problem.value[columns.start : columns.stop]
    if values.max() <= 0:
        return Reason(
            code=ReasonCode.NOT_WORTH_RESTART,
            message="starting it would cost as much as it could win before it ends",
            next_step="lower its restart seconds, or raise its weight",
        )
    if not len(solution.prices):
        return Reason(
            code=ReasonCode.BUDGET_SPENT,
            message="the round's time ran out before prices were known; others were worth more",
            next_step="give the round a longer deadline",
        )
    margin, column = max(
        (float(problem.value[c]) - _cost(problem, solution, c), -c) for c in columns
    )
    column = -column
    worth, cost = float(problem.value[column]) / problem.scale, _cost(problem, solution, column)
    cell = int(problem.cell[column])
    use = problem.usage_of(column)
    tight = {problem.rows[r].name: (a, int(free[r])) for r, a in use.items() if a > free[r]}
    evidence = (
        ("gpus", str(int(problem.cells.gpus[cell]))),
        ("row", ", ".join(problem.rows[r].name for r in use)),
        ("value", f"{worth:.4f}"),
        ("price", f"{cost / problem.scale:.4f}"),
        *((f"free {name}", str(left)) for name, (_, left) in tight.items()),
    )
    what = " + ".join(f"{a} of {problem.rows[r].name}" for r, a in use.items())
    if margin <= 0:
        return Reason(
            code=ReasonCode.OUTPRICED,
            message=f"its best offer, {what}, is worth {worth:.3f}; at this round's prices those"
            f" cost {cost / problem.scale:.3f}",
            next_step="wait for demand to fall, raise its weight, or add Cells that use GPUs better",
            evidence=evidence,
        )
    short = "; ".join(f"{n} needs {a}, {left} free" for n, (a, left) in tight.items())
    return Reason(
        code=ReasonCode.NO_CAPACITY,
        message=f"it is worth its price, but its GPUs do not fit beside better jobs: {short or what}",
        next_step="wait for a job to end, or add Cells with fewer GPUs",
        evidence=evidence,
    )


def _cost(problem: Problem, solution: Solution, column: int) -> float:
    """Return what ``column`` uses at the round's prices, in the problem's integers."""
    return sum(float(solution.prices[r]) * a for r, a in problem.usage_of(column).items())
