"""Jobs without weight, and the promises that hold all the same."""

from __future__ import annotations

import numpy as np

from tessera.formulation.draft import Draft
from tessera.formulation.lifecycle import ACTIVE
from tessera.formulation.reasons import Reason, ReasonCode
from tessera.formulation.tables import Bools


def owed(draft: Draft) -> Bools:
    """Return which jobs are owed their run whatever the objective says of them, bool[jobs].

    Launched ones that are guaranteed, all launched ones where jobs run to completion, and those
    whose deadline was admitted; none whose promise cannot be kept.
    """
    jobs, policy = draft.snapshot.jobs, draft.policy
    launched = jobs.among(ACTIVE)
    stays = launched & (jobs.guaranteed | (policy.run_to_completion & ~jobs.opportunistic))
    admitted = draft.admission.admitted if draft.admission is not None else jobs.admitted
    due = admitted & (policy.deadline_mode != "ignore")
    return (stays | due) & draft.promisable


def jobs_without_weight_wait(draft: Draft) -> Draft:
    """Leave jobs of weight 0 without columns, so that they displace nobody, but for those owed their run."""
    out = draft.weight == 0
    if not out.any():
        return draft
    out = out & draft.has_columns & ~owed(draft)
    return draft.without({j: _no_weight(draft, j) for j in np.flatnonzero(out).tolist()})


def _no_weight(draft: Draft, job: int) -> Reason:
    jobs = draft.snapshot.jobs
    queue = int(jobs.queue[job])
    if jobs.weight[job] == 0:
        whose, step = "the job's weight is 0", "give the job a positive weight"
    elif draft.policy.weight_of_queue.get(queue) == 0:
        whose = f"queue_weights gives queue {queue} the factor 0"
        step = "give the queue a positive factor, or put the job into another queue"
    else:
        whose = f"the weight of tenant {jobs.tenant[job]} is 0, or too small beside the job's"
        step = "give the tenant a positive weight"
    return Reason(
        code=ReasonCode.NO_WEIGHT,
        message=f"{whose}: it is not to run for its own sake",
        next_step=step,
    )
