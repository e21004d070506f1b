"""Tenants' quotas: what guaranteed jobs may claim, what a tenant may borrow, and what is kept for it.

A tenant without a quota is unlimited, and so is one with a quota on other types alone, on the rest: give it 0
GPUs of what it is not entitled to. A quota cut below what launched promises use does not break them: the row
then has room for just these.
"""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from tessera.formulation.draft import Draft, RowUse
from tessera.formulation.problem import Row, RowKind
from tessera.formulation.promises.guarantee import min_demand, owed_a_rate
from tessera.formulation.tables import Bools, Ints


def guaranteed_jobs_stay_within_quota(draft: Draft) -> Draft:
    """Charge running guaranteed jobs their minimum demand, at most the tenant's quota (Eq. 36).

        sum_{j guaranteed, of the tenant} sum_{c of j} D_{j, t_c} x_c <= quota      (also type by type)

    Source: Morphling section 5.2. The charge is the same whatever column the job runs.
    """
    if not len(draft.snapshot.quotas):
        return draft
    owed = owed_a_rate(draft)
    charge = np.where(owed[draft.job], min_demand(draft)[draft.job, draft.gpu_type], 0)
    rows = [
        _row(draft, RowKind.QUOTA, name, gpus, (of[draft.job] & on & owed[draft.job]), charge)
        for _, _, name, of, on, gpus in _quotas(draft)
    ]
    return _with_rows(draft, rows)


def tenants_borrow_within_limits(draft: Draft) -> Draft:
    """Let a tenant hold at most its quota and what it may borrow, with all its jobs (Eq. 37).

    sum_{j of the tenant} sum_{c of j} n_c x_c <= quota + borrow     where borrow >= 0
    """
    borrow = draft.snapshot.tenants.borrow_gpus
    rows = [
        _row(draft, RowKind.HELD, name, gpus + int(borrow[tenant]), of[draft.job] & on, draft.gpus)
        for tenant, _, name, of, on, gpus in _quotas(draft)
        if borrow[tenant] >= 0
    ]
    return _with_rows(draft, rows)


def unlent_quota_is_kept(draft: Draft) -> Draft:
    """Keep the quota of a tenant that does not lend free of other tenants' jobs (Eq. 37).

    sum_{j of others} sum_{c of j} n_c x_c <= max(0, schedulable GPUs - quota)
    """
    lends, capacity = draft.snapshot.tenants.lends, draft.snapshot.schedulable_gpus()
    rows = []
    for tenant, kind, name, of, on, gpus in _quotas(draft):
        if not lends[tenant]:
            left = max(0, int(capacity.sum() if kind < 0 else capacity[kind]) - gpus)
            rows.append(_row(draft, RowKind.KEPT, name, left, ~of[draft.job] & on, draft.gpus))
    return _with_rows(draft, rows)


def _with_rows(draft: Draft, rows: list[RowUse]) -> Draft:
    return replace(draft, rows=(*draft.rows, *(row for row in rows if len(row.column))))


Quota = tuple[int, int, str, Bools, Bools, int]
"""(tenant, type or -1, their names, bool[jobs] that are the tenant's, bool[columns] of the type, GPUs)."""


def _quotas(draft: Draft) -> list[Quota]:
    snapshot = draft.snapshot
    quotas, owner = snapshot.quotas, np.array(snapshot.jobs.tenant, dtype=object)
    found: list[Quota] = []
    for tenant, kind, gpus in zip(
        quotas.tenant.tolist(), quotas.gpu_type.tolist(), quotas.gpus.tolist(), strict=True
    ):
        name = snapshot.tenants.name[tenant]
        of = np.asarray(owner == name, dtype=np.bool_)
        on = (draft.gpu_type == kind) | (kind < 0)
        full = name if kind < 0 else f"{name}/{snapshot.gpu_types[kind].name}"
        found.append((tenant, kind, full, of, on, gpus))
    return found


def _row(
    draft: Draft, kind: RowKind, subject: str, capacity: int, mine: Bools, amount: Ints
) -> RowUse:
    """Return the row over the columns ``mine``, with room at least for launched jobs that must go on."""
    column = np.flatnonzero(mine)
    promised = int(_promised(draft, column, amount).sum())
    row = Row(kind=kind, subject=subject, capacity=max(capacity, promised))
    return RowUse(row=row, column=column, amount=amount[column])


def _promised(draft: Draft, column: Ints, amount: Ints) -> Ints:
    """Return what each launched job that must go on uses of a row, int64[jobs]: as it is, else the least."""
    found = np.full(len(draft.current), np.iinfo(np.int64).max)
    np.minimum.at(found, draft.job[column], amount[column])
    in_row = np.zeros(len(draft.cell), dtype=np.bool_)
    in_row[column] = True
    stays = draft.current >= 0
    now = draft.current[stays]
    found[stays] = np.where(in_row[now], amount[now], 0)
    return np.where(draft.must_run & (found < np.iinfo(np.int64).max), found, 0)
