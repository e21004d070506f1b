"""One dominant reason with evidence and a next step for every job that does not run."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Final

import numpy as np

from formulation.goals import WEIGHTED_SUM
from formulation.lifecycle import SCHEDULABLE, JobState
from formulation.problem import CHANGES_ROW, Problem, jobwise
from formulation.promises.quotas import HELD, KEPT, QUOTA
from formulation.promises.reservation import RESERVED
from formulation.reasons import Reason, ReasonCode
from formulation.snapshot import STATES, Snapshot
from formulation.solution import Solution
from formulation.tables import Floats, Ints


def explain(
    snapshot: Snapshot,
    problem: Problem,
    solution: Solution,
    unplaced: dict[int, str],
    given_up: frozenset[int],
    absent: Mapping[int, Reason] = MappingProxyType({}),
) -> dict[int, Reason]:
    """Return a reason for each job without a column in ``solution``.

    ``unplaced`` is what placement says of jobs whose chosen Cell found no blocks; ``given_up`` are jobs
    whose promise could not be kept; ``absent`` those whom a rule left without a column, and why.
    """
    offers = _offers(problem, solution)
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
        elif job in absent:
            found[job] = absent[job]
        elif offers.column[job] < 0:
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
                message="what was promised can no longer all be kept, and this job's promise is given up",
                next_step="bring lost nodes back, raise its weight, or give it a later deadline",
            )
        else:
            found[job] = _lost_out(problem, solution, offers, job)
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
    """Explain a job whose smallest Cells exceed what is schedulable now, or what there is at all."""
    e, kinds = snapshot.estimates, len(snapshot.gpu_types)
    mine = (e.workload == workload) & np.isfinite(e.iter_time_s)
    least = np.full(kinds, np.iinfo(np.int64).max)
    np.minimum.at(least, e.gpu_type[mine], e.gpus[mine])
    now = snapshot.schedulable_gpus()
    whole = np.bincount(snapshot.nodes.gpu_type, weights=snapshot.nodes.gpus, minlength=kinds)
    types = sorted(set(e.gpu_type[mine].tolist()))
    needs = " or ".join(
        f"{least[t]} x {snapshot.gpu_types[t].name} ({now[t]} of {int(whole[t])} schedulable)"
        for t in types
    )
    if np.any(least <= whole):
        return Reason(
            code=ReasonCode.NODES_AWAY,
            message=f"nodes that could run it are draining or silent: it needs {needs}",
            next_step="start the agents of those nodes, or undrain them",
            evidence=(("needs", needs),),
        )
    return Reason(
        code=ReasonCode.FITS_NOWHERE,
        message=f"its smallest Cells exceed the cluster: it needs {needs}",
        next_step="add nodes, or Cells with fewer GPUs",
        evidence=(("needs", needs),),
    )


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class _Offers:
    """Each job's best offer at the round's prices: the column worth most for what it costs.

    Where no column is worth anything it is the one that loses least.
    """

    column: Ints  # int64[jobs]; -1: the job has no column
    cost: Floats  # float64[columns], problem integers
    free: Ints  # int64[rows]
    limit: Ints  # int64[jobs], see _limits


def _offers(problem: Problem, solution: Solution) -> _Offers:
    known = len(solution.prices) > 0
    cost = problem.cost(solution.prices) if known else np.zeros(len(problem.cell))
    ratio = np.where(problem.value > 0, problem.value / np.maximum(cost, 1e-9), problem.value)
    order = np.lexsort((-ratio, problem.column_job))
    some = np.flatnonzero(np.diff(problem.job_start) > 0)
    column = np.full(len(problem.jobs), -1, dtype=np.int64)
    column[some] = order[problem.job_start[some]]
    free = problem.capacity - problem.used(solution.choice)
    return _Offers(column=column, cost=cost, free=free, limit=_limits(problem, free))


_LIMITS: Final[dict[str, tuple[ReasonCode, str, str]]] = {
    QUOTA: (
        ReasonCode.QUOTA_SPENT,
        "the quota of {what} for guaranteed jobs is {capacity} GPUs; {free} are left, and it is charged"
        " {amount}",
        "wait for a guaranteed job of the tenant to end, raise the quota, or run it as best effort",
    ),
    HELD: (
        ReasonCode.QUOTA_SPENT,
        "{what} may hold {capacity} GPUs, its quota and what it may borrow; {free} are left, and it needs"
        " {amount}",
        "wait for a job of the tenant to end, or let the tenant borrow more",
    ),
    KEPT: (
        ReasonCode.QUOTA_SPENT,
        "the quota of {what} is not lent: others may hold {capacity} GPUs; {free} are left, and it needs"
        " {amount}",
        "wait for a job of another tenant to end, or let the quota be lent",
    ),
    RESERVED: (
        ReasonCode.RESERVED,
        "GPUs are reserved for {what}, which has waited long: others may hold {capacity} beyond its start;"
        " {free} are left, and it needs {amount}",
        "wait for that job to start, or add Cells on which this one ends before",
    ),
}
"""First part of a row's name -> the reason where that row is what holds a job back."""


def _limited(problem: Problem, solution: Solution, offers: _Offers, job: int) -> Reason | None:
    """Explain a job that a quota or a reservation holds back; None: it is something else.

    It does where no column of the job finds room in such a row, or where such a row is most of what the
    best offer costs and the offer does not pay.
    """
    entry, best = int(offers.limit[job]), int(offers.column[job])
    if entry >= 0:
        row, amount = int(problem.row[entry]), int(problem.amount[entry])
    elif len(solution.prices) and problem.value[best] <= offers.cost[best]:
        use, prices = problem.usage_of(best), solution.prices
        row = max(use, key=lambda r: (prices[r] * use[r], -r))
        amount = use[row]
        if prices[row] <= 0:
            return None
    else:
        return None
    kind, _, what = problem.rows[row].name.partition("/")
    if kind not in _LIMITS:
        return None
    code, message, next_step = _LIMITS[kind]
    capacity, free = problem.rows[row].capacity, int(offers.free[row])
    return Reason(
        code=code, next_step=next_step,
        message=message.format(what=what, capacity=capacity, free=free, amount=amount),
        evidence=(
            ("row", problem.rows[row].name), ("capacity", str(capacity)), ("free", str(free)),
            ("needs", str(amount)),
        ),
    )  # fmt: skip


def _limits(problem: Problem, free: Ints) -> Ints:
    """Return, int64[jobs], the first usage entry by which limits stop all columns of a job; -1: none does."""
    found = np.full(len(problem.jobs), -1, dtype=np.int64)
    limit = np.array(
        [row.name.partition("/")[0] in _LIMITS for row in problem.rows], dtype=np.bool_
    )
    if not limit.any():
        return found
    entry = np.flatnonzero(limit[problem.row] & (problem.amount > free[problem.row]))
    column = problem.usage_column[entry]
    stopped = np.zeros(len(problem.cell))
    stopped[column] = 1.0
    found[problem.column_job[column[::-1]]] = entry[::-1]  # the first of each job
    return np.where(jobwise(np.minimum, stopped, problem.job_start) > 0, found, -1)


def _lost_out(problem: Problem, solution: Solution, offers: _Offers, job: int) -> Reason:
    """Explain a job that had columns but was not chosen, by prices where they are known."""
    column = int(offers.column[job])
    worth, cost = int(problem.value[column]) / problem.scale, offers.cost[column] / problem.scale
    if problem.weight[job] <= 0:
        return Reason(
            code=ReasonCode.NO_WEIGHT,
            message="its weight, with its tenant's and its queue's, is 0, so running it is worth nothing",
            next_step="give the job, its tenant and its queue a positive weight",
        )
    limited = _limited(problem, solution, offers, job)
    if limited is not None:
        return limited
    if problem.value[column] + problem.restart_price[column] < 0:
        return _only_costs(problem, offers, column)
    if worth <= 0:
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
    use = [
        (problem.rows[r].name, a, int(offers.free[r])) for r, a in problem.usage_of(column).items()
    ]
    what = " + ".join(f"{amount} of {name}" for name, amount, _ in use)
    short = "; ".join(f"{name} has {left} free" for name, amount, left in use if amount > left)
    spent = [
        f"all {row.capacity} changes of running jobs that the round may make are spent"
        for row, free in zip(problem.rows, offers.free.tolist(), strict=True)
        if row.name == CHANGES_ROW and free <= 0
    ]
    if short and spent:
        short = f"{short}; {spent[0]}"
    evidence = (
        ("offer", what),
        ("value", f"{worth:.6f}"),
        ("price", f"{cost:.6f}"),
        *((f"free {name}", str(left)) for name, _, left in use),
    )
    if worth <= cost:
        return Reason(
            code=ReasonCode.OUTPRICED,
            message=f"its best offer, {what}, is worth {worth:.3f}; at this round's prices it costs"
            f" {cost:.3f}",
            next_step="wait for demand to fall, raise its weight, or add Cells that use GPUs better",
            evidence=evidence,
        )
    if not short:
        return Reason(
            code=ReasonCode.BUDGET_SPENT,
            message=f"{what} would pay, but the round stopped at its gap or its time before it got there",
            next_step="give the round a longer deadline or a smaller gap",
            evidence=evidence,
        )
    return Reason(
        code=ReasonCode.NO_CAPACITY,
        message=f"{what} would pay ({worth:.3f} for {cost:.3f}), but does not fit beside better jobs:"
        f" {short}",
        next_step="wait for a job to end, or add Cells with fewer GPUs",
        evidence=evidence,
    )


def _only_costs(problem: Problem, offers: _Offers, column: int) -> Reason:
    """Explain a job that the last goal counts as a loss: room was short, or it is not worth its cost."""
    use = problem.usage_of(column)
    what = " + ".join(f"{amount} of {problem.rows[r].name}" for r, amount in use.items())
    short = "; ".join(
        f"{problem.rows[r].name} has {int(offers.free[r])} free"
        for r, amount in use.items()
        if amount > offers.free[r]
    )
    worth = f"{int(problem.value[column]) / problem.scale:.6f}"
    evidence = (("offer", what), ("value", worth), ("unit", problem.unit))
    if short and problem.unit != WEIGHTED_SUM:
        return Reason(
            code=ReasonCode.NO_CAPACITY,
            message=f"its cheapest offer, {what}, does not fit beside the jobs that run: {short}",
            next_step="wait for a job to end, raise its weight, or add Cells with fewer GPUs",
            evidence=evidence,
        )
    return Reason(
        code=ReasonCode.OUTPRICED,
        message=f"its best offer, {what}, costs more than the objective counts it worth",
        next_step="raise its weight, or give cost less weight in the objective",
        evidence=evidence,
    )
