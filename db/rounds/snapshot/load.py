"""The snapshot of a cluster from its tables, as arrays, read at one moment."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import sqlalchemy as sa

from tessera.db.base.rows import named_subqueries
from tessera.db.estimates.runnable_plans import load_refused_plans
from tessera.db.rounds.decayed_use import load_uses
from tessera.db.rounds.snapshot import cluster, estimates, jobs, network, permissions, reservations
from tessera.db.rounds.snapshot.keys import Keys
from tessera.formulation.base.errors import NotFound
from tessera.formulation.base.values import GpuType
from tessera.formulation.state.decayed_use import NO_DECAYED_USE, DecayedUse
from tessera.formulation.state.snapshot import Snapshot

_TABLES = cluster.TABLES | jobs.TABLES | permissions.TABLES | reservations.TABLES
"""The small tables of a cluster (c). One statement reads them, because each statement is a wait for
the database.
"""

_CLUSTER = sa.text(f"""
SELECT c.id, c.epoch, c.last_round, extract(epoch FROM now())::float8 AS now_s,
    (SELECT n.topology FROM networks n WHERE n.cluster_id = c.id) AS topology,
    {named_subqueries(_TABLES)}
FROM clusters c WHERE c.name = :name
""")  # noqa: S608 - constants of db


def load_snapshot(
    connection: sa.Connection, name: str, silence_s: float, use_half_life_s: float = 0.0
) -> Snapshot:
    """Return the cluster's snapshot.

    Nodes that were not heard for ``silence_s`` are not schedulable. The use of tenants decays by
    ``use_half_life_s``, and is not read if that is 0. The keys of rows never appear in it: the same
    content gives the same snapshot in any database.

    Raises:
        NotFound: the cluster.
    """
    row = connection.execute(_CLUSTER, {"name": name, "silence_s": silence_s}).one_or_none()
    if row is None:
        raise NotFound(f"clusters/{name}")
    keys = Keys.of_cluster(row)
    known, techniques, job_keys = jobs.read_jobs(connection, row, keys)
    keys = replace(keys, jobs=job_keys)
    facts = cluster.read_cluster(row, keys)
    estimated = estimates.read_estimates(connection, row.id, keys)
    if "" in facts["plans"]:  # the plan by which jobs without estimates run
        known = replace(known, unestimated=estimates.are_unestimated(row, known, estimated))
    planned_starts, planned_nodes = jobs.read_planned_starts(row, keys, facts)
    known, runtimes, refused = load_refused_plans(
        connection, row.id, known, techniques, estimated, facts["plans"]
    )
    return Snapshot(
        cluster=name,
        epoch=row.epoch,
        round_number=row.last_round + 1,
        now_s=row.now_s,
        estimates=estimated,
        allocations=jobs.read_allocations(connection, row.id, keys),
        schedule_segments=jobs.read_segments(connection, row.id, keys),
        planned_starts=planned_starts,
        planned_nodes=planned_nodes,
        dependencies=jobs.read_dependencies(row, keys),
        runtimes=runtimes,
        refused_plans=refused,
        decayed_use=_uses(connection, row.id, facts["gpu_types"], use_half_life_s),
        use_half_life_s=use_half_life_s,
        **facts,
        **permissions.read_permissions(row, keys, known),
        **reservations.read_reservations(row, keys),
        **network.read_network(connection, row, keys),
    )


def _uses(
    connection: sa.Connection, key: int, gpu_types: Sequence[GpuType], half_life_s: float
) -> DecayedUse:
    if not half_life_s > 0:
        return NO_DECAYED_USE
    return load_uses(connection, key, [kind.name for kind in gpu_types], half_life_s)
