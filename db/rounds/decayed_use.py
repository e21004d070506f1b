"""The decayed use of tenants, from the stints of jobs and from the sums of days of deleted ones."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Final

import sqlalchemy as sa

from tessera.db.schema.host import list_host
from tessera.formulation.base.resources import amounts_of
from tessera.formulation.state.decayed_use import HOST_CODES, DecayedUse, tabulate_uses

_MAX_HALF_LIVES: Final = 40
"""The age, in half-lives, beyond which use does not count: less than one part in 10^12 is left."""


def _left_after(moment: str) -> str:
    """Return SQL for the part of use that is left of a ``moment``. It is 1 in the future."""
    age_s = f"greatest(date_part('epoch', now() - {moment}), 0)"  # faster than extract
    return f"power(0.5::float8, least({age_s} / :half_life_s, {_MAX_HALF_LIVES}))"


# Retention has kept only the sum of a day. It counts as used evenly, up to now if the day lasts.
_USES: Final = sa.text(f"""
WITH bounds AS MATERIALIZED (
    SELECT now() - make_interval(
        secs => least({_MAX_HALF_LIVES} * :half_life_s, date_part('epoch', now()))
    ) AS from_at
), days AS (
    SELECT d.*, CAST(d.day AS timestamp) AT TIME ZONE 'UTC' AS began_at,
        least(CAST(d.day AS timestamp) AT TIME ZONE 'UTC' + interval '1 day', now()) AS ended_at
    FROM usage_days d
), spans AS (
    SELECT j.tenant, t.gpu_type, t.gpus::float8 AS gpus,
        {list_host("t.@::float8 AS @")}, t.began_at, t.ended_at
    FROM jobs j JOIN stints t ON t.job_id = j.id CROSS JOIN bounds b
    WHERE j.cluster_id = :cluster AND t.ended_at > b.from_at
    UNION ALL
    SELECT j.tenant, g.name, j.cell_gpus, {list_host("j.cell_@")}, j.since_at, now()
    FROM jobs j JOIN gpu_types g ON g.id = j.cell_type_id
    WHERE j.cluster_id = :cluster AND j.since_at IS NOT NULL
    UNION ALL
    SELECT d.tenant, d.gpu_type, d.gpu_us / 1e6 / l.length_s, d.cpu_us / 1e6 / l.length_s,
        d.host_byte_s / l.length_s, d.began_at, d.ended_at
    FROM days d CROSS JOIN bounds b CROSS JOIN LATERAL (
        SELECT date_part('epoch', d.ended_at - d.began_at) AS length_s
    ) AS l
    WHERE d.cluster_id = :cluster AND d.ended_at > b.from_at AND l.length_s > 0
), parts AS (
    SELECT s.tenant, s.gpu_type, s.gpus, {list_host("s.@")},
        {_left_after("s.ended_at")} - {_left_after("s.began_at")} AS part
    FROM spans s
)
SELECT p.tenant, p.gpu_type, sum(p.gpus * p.part) AS gpus,
    {list_host("sum(p.@ * p.part) AS @")}
FROM parts p GROUP BY p.tenant, p.gpu_type
""")  # noqa: S608 - constants of this module


def load_uses(
    connection: sa.Connection, cluster: int, gpu_types: Sequence[str], half_life_s: float
) -> DecayedUse:
    """Return the decayed use of tenants until the transaction's time, by tenant and resource.

    The use of types that are not among ``gpu_types``, because they were deleted, is left out.
    """
    at = {name: i for i, name in enumerate(gpu_types)}
    amounts: dict[tuple[str, int], float] = {}
    values: dict[str, Any] = {"cluster": cluster, "half_life_s": half_life_s}
    for row in connection.execute(_USES, values):
        if row.gpu_type in at:
            amounts[row.tenant, at[row.gpu_type]] = float(row.gpus)
        for resource, amount in zip(HOST_CODES, amounts_of(row), strict=True):
            key = (row.tenant, resource)
            amounts[key] = amounts.get(key, 0.0) + float(amount)
    return tabulate_uses(amounts)
