"""The order in which jobs start: guaranteed jobs within their quota, then by queue and arrival."""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from tessera.formulation.draft import Draft
from tessera.formulation.promises.guarantee import has_guaranteed_rate
from tessera.formulation.promises.launched import is_launched
from tessera.formulation.promises.packing import Packing
from tessera.formulation.promises.reservation import ReservationResult, is_overdue, reserve_gpus
from tessera.formulation.reasons import Reason, ReasonCode
from tessera.formulation.tables import Bools, Floats


def guaranteed_jobs_within_quota_start(draft: Draft) -> Draft:
    """Mark the waiting guaranteed jobs that fit into the remaining quota, in order of submission.

    A packing at minimum demand seats them next to all jobs that must already run, so a launched
    promise is never broken for them. Best-effort jobs give way. Source: Morphling section 5.2,
    Algorithm 1, lines 2 and 3.
    """
    starts = np.flatnonzero(_startable(draft) & has_guaranteed_rate(draft))
    if not len(starts):
        return draft
    packing = Packing(draft, _everyone_yields_to(draft, starts.tolist()))
    order = starts[np.argsort(draft.snapshot.jobs.submit_s[starts], kind="stable")].tolist()
    return _marked(draft, packing, [job for job in order if packing.sound and packing.take(job)])


def queues_launch_in_order(draft: Draft) -> Draft:
    """Start waiting jobs by queue, then by time of arrival, as far as they fit (Eq. 38).

    A job fits if its smallest column does, next to three groups: launched jobs that must run, on
    their smallest columns; other launched jobs of its queue or a higher one; and the jobs started
    before it. Launched best-effort jobs of lower queues give way.

    The first job that does not fit blocks. Later jobs of its queue are still tried. Jobs of lower
    queues are not launched, or only opportunistically (they give way later). GPUs are reserved for
    the first blocked job that has waited ``reserve_after_s``. Later jobs may only backfill around
    them.

    While launched promises do not fit together (nodes were lost), no job is marked or held back.
    Sources: Arena section 3.5; Crius section 6.1 (opportunistic execution).
    """
    policy = draft.policy
    starts = np.flatnonzero(_startable(draft))
    if not policy.queue_order or not len(starts):
        return draft
    queue = effective_queue(draft)
    packing = Packing(draft, queue)
    if not packing.sound:
        return draft
    order = np.lexsort((starts, draft.snapshot.jobs.queued_s[starts], queue[starts]))
    taken: list[int] = []
    blocked, reserved, late = -1, ReservationResult(draft), is_overdue(draft)
    for job in starts[order].tolist():
        # Jobs of lower queues stay behind the blocked job.
        if blocked >= 0 and queue[job] > queue[blocked]:
            break
        if packing.take(job):
            taken.append(job)
        elif (blocked < 0 or not reserved.row) and packing.lacks_gpus(job):
            blocked = job if blocked < 0 else blocked
            if not reserved.row and late[job]:
                past = _gives_way(draft, queue > queue[job])
                reserved = reserve_gpus(_marked(draft, packing, taken), packing, job, past)
    draft = _marked(reserved.on(draft), packing, taken)
    if blocked < 0:
        return draft
    return _behind(draft, queue > queue[blocked], blocked, int(queue[blocked]))


def long_waits_are_reserved(draft: Draft) -> Draft:
    """Start the jobs that have waited ``reserve_after_s``, first come first served.

    This applies without ``queue_order``. Jobs that fit next to those that must run start. GPUs are
    reserved for the first that does not, and others may only backfill around them (EASY
    backfilling, Lifka 1995).
    """
    starts = np.flatnonzero(_startable(draft) & is_overdue(draft))
    if draft.policy.queue_order or not len(starts):
        return draft
    packing = Packing(draft, _everyone_yields_to(draft, starts.tolist()))
    if not packing.sound:
        return draft
    taken: list[int] = []
    reserved = ReservationResult(draft)
    for job in starts[np.argsort(draft.snapshot.jobs.queued_s[starts], kind="stable")].tolist():
        if packing.take(job):
            taken.append(job)
        elif packing.lacks_gpus(job):
            nobody = np.zeros(len(draft.current), dtype=np.bool_)
            reserved = reserve_gpus(_marked(draft, packing, taken), packing, job, nobody)
            break
    return _marked(reserved.on(draft), packing, taken)


def effective_queue(draft: Draft) -> Floats:
    """Return each job's queue after promotion, float64[jobs] (Eq. 38).

        max(1, queue_j - floor(waited_j / promote_after))

    A launched job keeps the promotion that it had when its allocation began. One that was started
    past a blocked job has none, so that it stays behind that job. Source: Arena section 3.5.
    """
    jobs = draft.snapshot.jobs
    runs = is_launched(draft.snapshot)
    until_s = np.where(runs & (jobs.since_s > 0), jobs.since_s, draft.snapshot.now_s)
    steps = np.floor(np.maximum(0.0, until_s - jobs.queued_s) / draft.policy.promote_after_s)
    queue = np.maximum(1.0, jobs.queue - steps)
    return np.where(runs & jobs.opportunistic, jobs.queue, queue)


def _startable(draft: Draft) -> Bools:
    """Return whether each waiting job may be marked, bool[jobs].

    It needs a positive weight, a column, and a promise that was not waived.
    """
    waits = ~is_launched(draft.snapshot) & draft.has_columns & ~draft.must_run
    return waits & (draft.weight > 0) & draft.promisable


def _everyone_yields_to(draft: Draft, jobs: list[int]) -> Floats:
    queue = np.ones(len(draft.current))
    queue[jobs] = 0.0
    return queue


def _gives_way(draft: Draft, behind: Bools) -> Bools:
    """Return whether each waiting job of ``behind`` may start past a blocked one, bool[jobs]."""
    waits = ~is_launched(draft.snapshot) & ~draft.must_run & behind
    return waits & ~draft.snapshot.jobs.guaranteed & draft.policy.opportunistic


def _marked(draft: Draft, packing: Packing, taken: list[int]) -> Draft:
    """Return the draft in which the jobs ``taken`` must run, with the packing as its witness."""
    if not packing.sound:
        return draft
    must_run = np.array(draft.must_run)
    must_run[taken] = True
    return replace(draft, must_run=must_run, witness=np.array(packing.column))


def _behind(draft: Draft, lower: Bools, blocked: int, queue: int) -> Draft:
    """Drop the columns of waiting jobs of lower queues, or mark these jobs as opportunistic."""
    past = _gives_way(draft, lower)
    out = ~is_launched(draft.snapshot) & ~draft.must_run & lower & draft.has_columns & ~past
    name = draft.snapshot.jobs.name[blocked]
    reason = Reason(
        code=ReasonCode.BEHIND_QUEUE,
        message=f"{name} of queue {queue} is blocked, and no job of a lower queue starts before it",
        next_step="wait for that job to start, put this job into a higher queue, or let lower queues run"
        " opportunistically",
        evidence=(("blocked job", name), ("its queue", str(queue))),
    )
    draft = draft.without(dict.fromkeys(np.flatnonzero(out).tolist(), reason))
    return replace(draft, opportunistic=draft.opportunistic | past)
