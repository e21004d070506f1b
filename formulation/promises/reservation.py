"""GPUs reserved for a job that has waited long, and limits on backfilling around it (EASY)."""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np

from tessera.formulation.draft import Draft, RowUse
from tessera.formulation.problem import CouplingRow, RowKind
from tessera.formulation.promises.launched import is_launched
from tessera.formulation.promises.packing import NO_COLUMN_GPUS, Packing
from tessera.formulation.tables import Bools, Floats, Ints


@dataclass(frozen=True, slots=True)
class ReservationResult:
    """A draft, and the row that reserves GPUs for one of its jobs. It is None if nothing is reserved."""

    draft: Draft
    row: RowUse | None = None

    def on(self, draft: Draft) -> Draft:
        """Return ``draft`` with the row. It must have the same columns."""
        return draft if self.row is None else replace(draft, rows=(*draft.rows, self.row))


def is_overdue(draft: Draft) -> Bools:
    """Return whether each job, if it waits, has waited as long as the policy allows, bool[jobs]."""
    waited_s = draft.snapshot.now_s - draft.snapshot.jobs.queued_s
    return np.asarray(waited_s >= draft.policy.reserve_after_s)


def reserve_gpus(draft: Draft, packing: Packing, job: int, past: Bools) -> ReservationResult:
    """Reserve GPUs for ``job``, which does not fit now, on its earliest possible type (Eq. 39).

        sum_{j' not j} sum_{c of j'} h_c x_c <= schedulable GPUs of t - n,
        h_c = n_c where c is on t and ends after the shadow time, else 0

    ``n`` is the size of its smallest column on type ``t``. At the shadow time, the jobs that must
    run have left ``n`` GPUs, at their current rates. A job that ends before, or needs only GPUs
    that are spare then, delays no other. Launched jobs that need not run give way at that time, so
    their present GPUs are not counted. Jobs in ``past`` (bool[jobs]) are not counted at all.

    The row is added to ``packing``. Its running jobs return to their columns if there is room,
    because shrunk jobs end later. Source: EASY backfilling (Lifka 1995).
    """
    packing.restore()
    end_s = draft.end_s
    best: tuple[float, float, int] | None = None
    # Choose the type with the earliest shadow time. Among equals, choose the smallest share.
    for kind, need in enumerate(packing.need[job].tolist()):
        if need < NO_COLUMN_GPUS:
            shadow_s = _shadow_s(draft, packing, end_s, kind, need)
            share = need / max(1, int(draft.snapshot.schedulable_gpus()[kind]))
            if np.isfinite(shadow_s) and (best is None or (shadow_s, share, kind) < best):
                best = shadow_s, share, kind
    if best is None:
        return ReservationResult(draft)
    row = _row(draft, packing, job, best[2], end_s > best[0], past)
    packing.add_row(row)
    return ReservationResult(draft, row)


def _lasting(draft: Draft, packing: Packing) -> Ints:
    """Return the columns of the jobs that must run: their current ones, or else the packed ones."""
    column = np.where(draft.current >= 0, draft.current, packing.column)
    return column[draft.must_run & (column >= 0)]


def _shadow_s(draft: Draft, packing: Packing, end_s: Floats, kind: int, need: int) -> float:
    """Return the first time at which jobs that must run leave ``need`` GPUs of the type free.

    It is inf if they never do.
    """
    columns = _lasting(draft, packing)
    columns = columns[draft.gpu_type[columns] == kind]
    # GPUs become free in the order in which the jobs on the type end.
    columns = columns[np.argsort(end_s[columns], kind="stable")]
    free = int(draft.snapshot.schedulable_gpus()[kind]) - int(draft.gpus[columns].sum())
    left = free + np.cumsum(draft.gpus[columns])
    if free >= need:
        return draft.snapshot.now_s
    enough = np.flatnonzero(left >= need)
    return float(end_s[columns[enough[0]]]) if len(enough) else np.inf


def _row(draft: Draft, packing: Packing, job: int, kind: int, late: Bools, past: Bools) -> RowUse:
    """Return the row over columns that are still in use at the shadow time."""
    jobs = draft.snapshot.jobs
    hold = np.where((draft.gpu_type == kind) & late, draft.gpus, 0)
    yields = is_launched(draft.snapshot) & ~draft.must_run
    has = np.where(yields & (jobs.current_type == kind), jobs.current_gpus, 0)
    hold = np.maximum(0, hold - has[draft.job])
    hold[past[draft.job] | (draft.job == job)] = 0
    column = np.flatnonzero(hold)
    seated = packing.column[packing.column >= 0]
    spare = int(draft.snapshot.schedulable_gpus()[kind]) - int(packing.need[job, kind])
    row = CouplingRow(
        kind=RowKind.RESERVED,
        subject=jobs.name[job],
        capacity=max(spare, int(hold[seated].sum())),
    )
    return RowUse(row=row, column=column, amount=hold[column])
