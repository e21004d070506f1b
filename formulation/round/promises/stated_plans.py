"""Jobs whose users state the execution plan that they run by."""

from __future__ import annotations

import numpy as np

from tessera.formulation.base.tables import Ints
from tessera.formulation.base.values import BEST_FOUND
from tessera.formulation.job.reasons import Reason, ReasonCode
from tessera.formulation.round.draft import Draft, find_losers
from tessera.formulation.state.runnable_plans import ability_in_words, are_refused
from tessera.formulation.state.snapshot import Snapshot


def bound_plans(snapshot: Snapshot) -> Ints:
    """Return the plan that each job must run by, int64[jobs], or -1 if it may run by any.

    A plan that is only the first one binds a job until its first start.
    """
    jobs = snapshot.jobs
    free = jobs.plan_first & (jobs.generation > 0)
    return np.where(free, -1, jobs.plan)


def stated_plans(draft: Draft) -> Draft:
    """Keep only the columns of a job's stated plan (Eq. 31d).

    x_c = 0  where p_c != p_j, if job j must run by the plan p_j
    """
    plan = bound_plans(draft.snapshot)
    if (plan < 0).all():
        return draft
    keep = (plan[draft.job] < 0) | (draft.cells.plan[draft.cell] == plan[draft.job])
    lost = find_losers(draft, keep)
    return draft.only(keep, {job: _no_cell_of_plan(draft.snapshot, job) for job in lost})


def _no_cell_of_plan(snapshot: Snapshot, job: int) -> Reason:
    e, plan = snapshot.estimates, int(snapshot.jobs.plan[job])
    workload = int(snapshot.jobs.workload[job])
    own = (e.workload == workload) & (e.plan == plan)
    name, key = snapshot.plans[plan][:12], snapshot.workloads[workload].key
    runtime = int(snapshot.jobs.runtime[job])
    if are_refused(snapshot, *(np.array([n]) for n in (runtime, plan, BEST_FOUND))).any():
        problem = f"{ability_in_words(snapshot, runtime)} cannot run it"
        next_step = "submit the job with another plan, or with another runtime"
    elif not own.any():
        problem, next_step = (
            "it has no estimate yet",
            "wait until it is estimated, or add a Cell of it",
        )
    elif not np.isfinite(e.iter_time_s[own]).any():
        problem = "it fails to run on every GPU type (out of memory, or the run failed)"
        next_step = "submit the job with another plan, or without one"
    else:
        problem = "no GPU type has enough schedulable GPUs for it"
        next_step = "add nodes, or submit the job with a plan for fewer GPUs"
    return Reason(
        code=ReasonCode.PLAN_UNUSABLE,
        message=f"the job must run by its stated execution plan {name}, but {problem}",
        next_step=next_step,
        evidence=(("execution plan", snapshot.plans[plan]), ("workload", key)),
    )
