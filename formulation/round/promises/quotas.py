"""Tenants' quotas: limits on guaranteed jobs, on borrowing, and on other tenants' use.

A tenant without a quota is unlimited. One with a quota only on some types is unlimited on the
others, so a tenant needs a quota of 0 GPUs for the types it may not use. A quota that is cut below
the use of launched promises does not break them. The row then has room for exactly these.

Tenants may have parents. A tenant's jobs are then those of all tenants below it, too. So what a
child uses counts in the quotas of its parent, and a parent that does not lend keeps its quota for
the tenants below it, which lend to each other.
"""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from tessera.formulation.base.tables import Bools, Ints
from tessera.formulation.round.draft import Draft, RowUse
from tessera.formulation.round.problem import CouplingRow, RowKind
from tessera.formulation.round.promises.guarantee import has_guaranteed_rate, min_demand
from tessera.formulation.state.hierarchy import jobs_of_tenants


def guaranteed_jobs_stay_within_quota(draft: Draft) -> Draft:
    """Limit the minimum demand of running guaranteed jobs to the tenant's quota (Eq. 36).

        sum_{j guaranteed, of the tenant} sum_{c of j} D_{j, t_c} x_c <= quota     (also by type)

    Source: Morphling section 5.2. A job is charged the same whichever column of a type it runs.
    """
    if not len(draft.snapshot.quotas):
        return draft
    guaranteed = has_guaranteed_rate(draft)
    charge = np.where(guaranteed[draft.job], min_demand(draft)[draft.job, draft.gpu_type], 0)
    rows = [
        _row(draft, RowKind.QUOTA, name, gpus, (of[draft.job] & on & guaranteed[draft.job]), charge)
        for _, _, name, of, on, gpus in _quotas(draft)
    ]
    return _with_rows(draft, rows)


def tenants_borrow_within_limits(draft: Draft) -> Draft:
    """Limit the GPUs of all of a tenant's jobs to its quota and what it may borrow (Eq. 37).

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
    """Keep other tenants' jobs off the quota of a tenant that does not lend it (Eq. 37).

    sum_{j of others} sum_{c of j} n_c x_c <= max(0, schedulable GPUs - quota)
    """
    keeps, capacity = draft.snapshot.tenants.keeps_idle_quota, draft.snapshot.schedulable_gpus()
    rows = []
    for tenant, kind, name, of, on, gpus in _quotas(draft):
        if keeps[tenant]:
            left = max(0, int(capacity.sum() if kind < 0 else capacity[kind]) - gpus)
            rows.append(_row(draft, RowKind.KEPT, name, left, ~of[draft.job] & on, draft.gpus))
    return _with_rows(draft, rows)


def _with_rows(draft: Draft, rows: list[RowUse]) -> Draft:
    return replace(draft, rows=(*draft.rows, *(row for row in rows if len(row.column))))


Quota = tuple[int, int, str, Bools, Bools, int]
"""(tenant, type or -1, their names, the tenant's jobs, columns of the type, GPUs).

The jobs are those of the tenant and of all below it, bool[jobs]. The columns are bool[columns].
"""


def _quotas(draft: Draft) -> list[Quota]:
    snapshot = draft.snapshot
    quotas = snapshot.quotas
    jobs_of = jobs_of_tenants(snapshot, set(quotas.tenant.tolist()))
    rows: list[Quota] = []
    for tenant, kind, gpus in zip(
        quotas.tenant.tolist(), quotas.gpu_type.tolist(), quotas.gpus.tolist(), strict=True
    ):
        name = snapshot.tenants.name[tenant]
        of = jobs_of[tenant]
        on = (draft.gpu_type == kind) | (kind < 0)
        full = name if kind < 0 else f"{name}/{snapshot.gpu_types[kind].name}"
        rows.append((tenant, kind, full, of, on, gpus))
    return rows


def _row(
    draft: Draft, kind: RowKind, subject: str, capacity: int, counts: Bools, amount: Ints
) -> RowUse:
    """Return the row over the columns that ``counts``, with room for jobs that must keep running.

    ``counts`` is bool[columns].
    """
    column = np.flatnonzero(counts)
    promised = int(_promised(draft, column, amount).sum())
    row = CouplingRow(kind=kind, subject=subject, capacity=max(capacity, promised))
    return RowUse(row=row, column=column, amount=amount[column])


def _promised(draft: Draft, column: Ints, amount: Ints) -> Ints:
    """Return the use of a row by each launched job that must keep running, int64[jobs].

    It is the use of the job's current column, or else the least of its columns.
    """
    use = np.full(len(draft.current), np.iinfo(np.int64).max)
    np.minimum.at(use, draft.job[column], amount[column])
    in_row = np.zeros(len(draft.cell), dtype=np.bool_)
    in_row[column] = True
    stays = draft.current >= 0
    now = draft.current[stays]
    use[stays] = np.where(in_row[now], amount[now], 0)
    return np.where(draft.must_run & (use < np.iinfo(np.int64).max), use, 0)
