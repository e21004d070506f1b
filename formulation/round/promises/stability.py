"""Limits on changes to running jobs: a time to settle, rare replans, a cap on changes."""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from tessera.formulation.base.moments import SAME_S
from tessera.formulation.base.resources import amounts_of
from tessera.formulation.base.tables import Bools, Ints
from tessera.formulation.round.draft import Draft, RowUse
from tessera.formulation.round.policy import MODES_WITHOUT_PROMISES
from tessera.formulation.round.problem import CouplingRow, RowKind
from tessera.formulation.round.promises.launched import is_launched
from tessera.formulation.round.promises.packing import Packing
from tessera.formulation.round.rates import work_left
from tessera.formulation.round.starts.holds import settled_s
from tessera.formulation.state.replans import pay_back_s


def jobs_settle_before_they_change(draft: Draft) -> Draft:
    """Keep jobs on their column and GPUs until they have run for some time (Eq. 34).

        x_c = 1  for the current c of j, where now - since_j < (k + 1) R_j

    ``k`` is ``change_spacing`` and ``R`` the seconds that a restart loses. At most a share of
    1 / (k + 1) of the time that a job holds GPUs is then lost to restarts that rounds chose. A job that
    cannot stay (its node is lost or avoided, or its column breaks its guarantee) is not bound, and
    neither is one with a deadline that is promised, or may be.
    """
    jobs = draft.snapshot.jobs
    if draft.policy.change_spacing <= 0:
        return draft
    young = (jobs.since_s > 0) & (draft.snapshot.now_s < settled_s(draft) - SAME_S)
    bound = young & is_launched(draft.snapshot) & (draft.current >= 0) & draft.promisable
    bound &= ~_dated(draft)
    if not bound.any():
        return draft
    draft = draft.only(~(bound[draft.job] & draft.starts))
    return replace(draft, must_run=draft.must_run | bound, movable=draft.movable & ~bound)


def replans_are_rare_and_pay_back(draft: Draft) -> Draft:
    """Drop the columns that would replan a job too soon, or for too little (Eq. 34a).

        x_c = 0  for the columns c of other plans than that of the current column k of j, with its
                 GPU type, GPU count and shape, where
                     now - since_j < N R_j                                       or
                     R_j q_c / (q_c - r_k) > min(N R_j, H, W_j / r_k)  and  c frees nothing
                     with q_c = r_c exp(-sqrt(sd_c^2 + sd_k^2))

    ``N`` is ``replan_spacing``, ``R`` the seconds that a restart loses, ``r`` samples/s, ``W`` the
    samples left and ``H`` the restart horizon. ``sd`` is the standard deviation of ln ``r``, as far
    as estimates state it, because estimates that flicker must not cause replans. A column frees
    something if it needs fewer CPU cores or less host memory than the current one. The objective
    then decides whether others need them.

    A job that cannot stay as it is may change at once. So may one with a deadline that is promised,
    or may be.
    """
    snapshot, policy = draft.snapshot, draft.policy
    bound = is_launched(snapshot) & (draft.current >= 0) & draft.promisable & ~_dated(draft)
    if policy.replan_spacing <= 0 or not bound.any():
        return draft
    column = _other_plans(draft, np.flatnonzero(bound[draft.job] & draft.starts))
    job = draft.job[column]
    now, lost_s = draft.current[job], snapshot.jobs.restart_s[job]
    spaced_s, since_s = policy.replan_spacing * lost_s, snapshot.jobs.since_s[job]
    young = (since_s > 0) & (snapshot.now_s - since_s < spaced_s)
    ends_s = work_left(snapshot)[job] / draft.rate[now]
    within_s = np.minimum(np.minimum(spaced_s, policy.restart_horizon_s), ends_s)
    doubt = np.hypot(draft.cells.sd[draft.cell[column]], draft.cells.sd[draft.cell[now]])
    pays = pay_back_s(lost_s, draft.rate[now], draft.rate[column] * np.exp(-doubt)) <= within_s
    demand = draft.demand
    frees = np.logical_or.reduce([needs[column] < needs[now] for needs in amounts_of(demand)])
    keep = np.ones(len(draft.cell), dtype=np.bool_)
    keep[column] = ~young & (pays | frees)
    return draft.only(keep)


def _other_plans(draft: Draft, column: Ints) -> Ints:
    """Return those of ``column`` that differ from their job's current column only in the plan."""
    cells, cell = draft.cells, draft.cell[column]
    own = draft.cell[draft.current[draft.job[column]]]
    alike = np.ones(len(column), dtype=np.bool_)
    for values in (cells.gpu_type, cells.gpus, cells.nodes):
        alike &= values[cell] == values[own]
    return column[alike]


def _dated(draft: Draft) -> Bools:
    """Return the jobs with a deadline that this round keeps or may promise, bool[jobs]."""
    jobs = draft.snapshot.jobs
    if draft.policy.deadline_mode in MODES_WITHOUT_PROMISES:
        return jobs.admitted
    return np.isfinite(jobs.deadline_s)


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
