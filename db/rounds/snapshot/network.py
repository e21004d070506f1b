"""The network of a cluster: its topology, the traffic of Cells, and the network plan in force."""

from __future__ import annotations

from typing import Any, TypedDict

import numpy as np
import sqlalchemy as sa

from tessera.db.base.copy import read_columns, wire_types
from tessera.db.rounds.snapshot.keys import Keys, split_rows
from tessera.db.schema.tables import LIVE
from tessera.formulation.state.network_facts import (
    StandingNetworkPlan,
    TrafficMeasurements,
    Traffics,
)
from tessera.formulation.state.topologies.described import DescribedTopology, decode_topology
from tessera.formulation.state.traffic import intern_traffic

_TRAFFIC = sa.text(f"""
SELECT e.workload_id AS workload, e.gpu_type_id AS gpu_type, e.gpus, e.nodes, e.pipeline_degree,
    e.plan_id AS plan, e.traffic AS document
FROM estimates e JOIN workloads w ON w.id = e.workload_id WHERE w.cluster_id = :cluster
    AND e.traffic <> '' AND EXISTS (SELECT FROM jobs j WHERE j.workload_id = w.id AND j.{LIVE})
""")  # noqa: S608 - constants only

_STANDING = """
SELECT s.job_id, s.generation, s.rank, s.level, s.tag
FROM standings s JOIN jobs j ON j.id = s.job_id
WHERE j.cluster_id = {cluster} ORDER BY j.id
"""

_MEASURED = f"""
SELECT m.job_id, m.generation, m.node_id, m.period_s, m.sent_bytes, m.unhindered
FROM measured_traffic m JOIN jobs j ON j.id = m.job_id AND j.generation = m.generation
JOIN nodes n ON n.id = m.node_id
WHERE j.cluster_id = {{cluster}} AND j.{LIVE} ORDER BY j.id, n.name
"""  # noqa: S608 - constants only


class NetworkFacts(TypedDict, total=False):
    """The facts of a snapshot on the network."""

    topology: DescribedTopology
    traffic: Traffics
    network_plan: StandingNetworkPlan
    traffic_measurements: TrafficMeasurements


def read_network(connection: sa.Connection, row: sa.Row[Any], keys: Keys) -> NetworkFacts:
    """Return the facts on the network, or nothing if ``row.topology`` is None."""
    if row.topology is None:
        return {}
    s, m = (
        read_columns(connection, query.format(cluster=row.id), wire_types(table))
        for query, table in ((_STANDING, StandingNetworkPlan), (_MEASURED, TrafficMeasurements))
    )
    s |= {"job": keys.jobs.of(s["job"])}
    m |= {"job": keys.jobs.of(m["job"]), "node": keys.nodes.of(m["node"])}
    return {
        "topology": decode_topology(row.topology),
        "traffic": _read_traffic(connection, row.id, keys),
        "network_plan": StandingNetworkPlan(**s),
        "traffic_measurements": TrafficMeasurements(**m),
    }


def _read_traffic(connection: sa.Connection, cluster: int, keys: Keys) -> Traffics:
    rows = connection.execute(_TRAFFIC, {"cluster": cluster}).all()
    *cells, documents = split_rows(rows, 7)
    workload, gpu_type, gpus, nodes, degree, plan = (np.array(own, np.int64) for own in cells)
    return Traffics(
        workload=keys.workloads.of(workload),
        gpu_type=keys.types.of(gpu_type),
        gpus=gpus,
        nodes=nodes,
        pipeline_degree=degree,
        plan=keys.plans.of(plan),
        document=tuple(map(intern_traffic, documents)),
    ).in_order()
