"""Jobs that must keep running, and jobs of weight 0, which run only to keep a promise."""

from __future__ import annotations

import numpy as np

from tessera.formulation.base.tables import Bools
from tessera.formulation.job.lifecycle import ACTIVE
from tessera.formulation.job.reasons import Reason, ReasonCode
from tessera.formulation.round.draft import Draft


def must_keep_running(draft: Draft) -> Bools:
    """Return whether each job must keep running, whatever the objective, bool[jobs].

    These are launched guaranteed jobs, and jobs whose deadline was admitted. Jobs whose promise
    cannot be kept are excluded.
    """
    jobs = draft.snapshot.jobs
    stays = jobs.among(ACTIVE) & jobs.guaranteed
    admitted = draft.admission.admitted if draft.admission is not None else jobs.admitted
    due = admitted & (draft.policy.deadline_mode != "ignore")
    return (stays | due) & draft.promisable


def jobs_without_weight_wait(draft: Draft) -> Draft:
    """Drop the columns of jobs of weight 0, so that they displace no other job.

    Jobs with a promise to run keep theirs.
    """
    out = draft.weight == 0
    if not out.any():
        return draft
    out = out & draft.has_columns & ~must_keep_running(draft)
    return draft.without({j: _no_weight(draft, j) for j in np.flatnonzero(out).tolist()})


def _no_weight(draft: Draft, job: int) -> Reason:
    jobs = draft.snapshot.jobs
    priority = int(jobs.priority[job])
    if jobs.weight[job] == 0:
        whose, step = "the job's weight is 0", "give the job a positive weight"
    elif draft.policy.weight_of_priority.get(priority) == 0:
        whose = f"priority_weights gives priority {priority} the factor 0"
        step = "give the priority a positive factor, or the job another priority"
    else:
        whose = f"the weight of tenant {jobs.tenant[job]} is 0, or its product with the job's is 0"
        step = "give the tenant a positive weight"
    return Reason(
        code=ReasonCode.NO_WEIGHT,
        message=f"{whose}, so running the job has no value",
        next_step=step,
    )
