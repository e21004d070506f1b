"""GPUs reserved for a job that has waited long, and what others may do around it (EASY backfilling)."""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np

from tessera.formulation.draft import Draft, RowUse
from tessera.formulation.problem import Row, RowKind
from tessera.formulation.promises.launched import launched
from tessera.formulation.promises.packing import NOWHERE, Packing
from tessera.formulation.rates import work_left
from tessera.formulation.tables import Bools, Floats, Ints

"""First part of the name of the row: ``reserved/JOB``."""


@dataclass(frozen=True, slots=True)
class ReservedFor:
    """A draft, and the row that reserves GPUs for one of its jobs; None: nothing is reserved."""

    draft: Draft
    row: RowUse | None = None

    def on(self, draft: Draft) -> Draft:
        """Return ``draft``, which has the same columns, with the row."""
        return draft if self.row is None else replace(draft, rows=(*draft.rows, self.row))


def overdue(draft: Draft) -> Bools:
    """Return which jobs, if they wait, have waited for as long as the policy lets them, bool[jobs]."""
    waited_s = draft.snapshot.now_s - draft.snapshot.jobs.queued_s
    return np.asarray(waited_s >= draft.policy.reserve_after_s)


def reservation(draft: Draft, packing: Packing, job: int, past: Bools) -> ReservedFor:
    """Reserve GPUs for ``job``, which does not fit now, where it can have them earliest (Eq. 39).

        sum_{j' not j} sum_{c of j'} h_c x_c <= schedulable GPUs of t - n,
        h_c = n_c where c is on t and ends after the shadow time, else 0

    ``n`` is its smallest column on type ``t``; the shadow time is when the jobs that must run, at their
    current rates, have left so much. What ends before, or needs no more than what is spare then, delays
    nobody. Launched jobs that need not run give way when the time comes, so what they hold already counts
    nothing, and jobs ``past`` (bool[jobs]) do not count at all. The row is added to ``packing``, whose
    running jobs go back to their columns where there is room, because shrunk jobs end later. Source: EASY
    backfilling (Lifka 1995).
    """
    packing.restore()
    end_s = _end_s(draft)
    best: tuple[float, float, int] | None = None
    for kind, need in enumerate(packing.need[job].tolist()):
        if need < NOWHERE:
            shadow_s = _shadow_s(draft, packing, end_s, kind, need)
            share = need / max(1, int(draft.snapshot.schedulable_gpus()[kind]))
            if np.isfinite(shadow_s) and (best is None or (shadow_s, share, kind) < best):
                best = shadow_s, share, kind
    if best is None:
        return ReservedFor(draft)
    row = _row(draft, packing, job, best[2], end_s > best[0], past)
    packing.add_row(row)
    return ReservedFor(draft, row)


def _end_s(draft: Draft) -> Floats:
    """Return when each column's job would end on it, seconds since 1970, float64[columns]."""
    left_s = work_left(draft.snapshot)[draft.job] / draft.rate
    restart_s = np.where(draft.starts, draft.snapshot.jobs.restart_s[draft.job], 0.0)
    found: Floats = draft.snapshot.now_s + restart_s + left_s
    return found


def _lasting(draft: Draft, packing: Packing) -> Ints:
    """Return the columns of the jobs that must run: as they are, else as packed."""
    column = np.where(draft.current >= 0, draft.current, packing.column)
    return column[draft.must_run & (column >= 0)]


def _shadow_s(draft: Draft, packing: Packing, end_s: Floats, kind: int, need: int) -> float:
    """Return the first time at which ``need`` GPUs of the type are free of jobs that must run; inf: never."""
    columns = _lasting(draft, packing)
    columns = columns[draft.gpu_type[columns] == kind]
    columns = columns[np.argsort(end_s[columns], kind="stable")]
    free = int(draft.snapshot.schedulable_gpus()[kind]) - int(draft.gpus[columns].sum())
    left = free + np.cumsum(draft.gpus[columns])
    if free >= need:
        return draft.snapshot.now_s
    enough = np.flatnonzero(left >= need)
    return float(end_s[columns[enough[0]]]) if len(enough) else np.inf


def _row(draft: Draft, packing: Packing, job: int, kind: int, late: Bools, past: Bools) -> RowUse:
    """Return the row over columns that are still there at the shadow time."""
    jobs = draft.snapshot.jobs
    hold = np.where((draft.gpu_type == kind) & late, draft.gpus, 0)
    yields = launched(draft.snapshot) & ~draft.must_run
    has = np.where(yields & (jobs.current_type == kind), jobs.current_gpus, 0)
    hold = np.maximum(0, hold - has[draft.job])
    hold[past[draft.job] | (draft.job == job)] = 0
    column = np.flatnonzero(hold)
    seated = packing.column[packing.column >= 0]
    spare = int(draft.snapshot.schedulable_gpus()[kind]) - int(packing.need[job, kind])
    row = Row(
        kind=RowKind.RESERVED,
        subject=jobs.name[job],
        capacity=max(spare, int(hold[seated].sum())),
    )
    return RowUse(row=row, column=column, amount=hold[column])
