"""Limits on changes to running jobs: a minimum run time, and a cap on changes in a round."""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from tessera.formulation.draft import Draft, RowUse
from tessera.formulation.problem import CouplingRow, RowKind
from tessera.formulation.promises.launched import is_launched
from tessera.formulation.promises.packing import Packing
from tessera.formulation.tables import Ints


def jobs_run_their_minimum_time(draft: Draft) -> Draft:
    """Keep jobs whose allocation is younger than ``min_run_s`` on their column and GPUs (Eq. 34).

        x_c = 1  for the current c of j, where now - since_j < min_run_s

    A job that cannot stay (its node is lost or avoided, or its column breaks its guarantee) is not
    bound.
    """
    jobs, least_s = draft.snapshot.jobs, draft.policy.min_run_s
    if least_s <= 0:
        return draft
    young = (jobs.since_s > 0) & (draft.snapshot.now_s - jobs.since_s < least_s)
    bound = young & is_launched(draft.snapshot) & (draft.current >= 0) & draft.promisable
    if not bound.any():
        return draft
    draft = draft.only(~(bound[draft.job] & draft.starts))
    return replace(draft, must_run=draft.must_run | bound, movable=draft.movable & ~bound)


def changes_are_capped(draft: Draft) -> Draft:
    """Limit the running jobs that are moved, resized or suspended to ``max_changes`` (Eq. 35).

        sum_j sum_{c of j, c not current} x_c  +  sum_j [j waits]  <=  max(max_changes, forced)

    The sums are over the jobs j that could stay unchanged. ``forced`` is the number of jobs that
    must change so that every job that must run does and every row holds. It comes from a packing
    that keeps the other jobs unchanged, small ones first, because promises and limits go before
    the cap.
    Placement counts its moves within a column against the same row.
    """
    if draft.policy.max_changes < 0:
        return draft
    stays = draft.current >= 0
    column = np.flatnonzero(stays[draft.job] & draft.starts)
    idle = np.flatnonzero(stays)
    use = RowUse(
        row=CouplingRow(kind=RowKind.CHANGES, capacity=len(idle)),
        column=column,
        amount=np.ones_like(column),
        idle_job=idle,
        idle_amount=np.ones_like(idle),
    )
    packed = _as_they_are(draft, use)
    if packed is None:  # promises must be waived before changes can be counted
        return replace(draft, rows=(*draft.rows, use))
    forced = int(np.count_nonzero(stays & (packed != draft.current)))
    cap = CouplingRow(kind=RowKind.CHANGES, capacity=max(draft.policy.max_changes, forced))
    return replace(draft, rows=(*draft.rows, replace(use, row=cap)), witness=packed)


def _as_they_are(draft: Draft, use: RowUse) -> Ints | None:
    """Return a column or -1 for each job, such that all must-run jobs run and few jobs change.

    The result is int64[jobs]. Must-run jobs stay unchanged, or take the column of their witness, or
    shrink. The first of these ways in which all of them fit is used. If none works, return None.
    """
    gpus = np.where(draft.current >= 0, draft.gpus[draft.current], 0) if len(draft.cell) else 0
    order = np.zeros(len(draft.current)) + gpus
    capped = replace(draft, rows=(*draft.rows, use))
    for stated in (replace(capped, witness=None), capped, replace(draft, witness=None)):
        packing = Packing(stated, order)
        if packing.sound:
            packing.restore()
            return packing.column
    return None
