"""The estimates of the workloads of live jobs."""

from __future__ import annotations

from typing import Any

import numpy as np
import sqlalchemy as sa

from tessera.db.base.copy import read_columns, wire_types
from tessera.db.rounds.snapshot.keys import Keys
from tessera.db.schema.host import list_host
from tessera.db.schema.tables import LIVE
from tessera.formulation.base.tables import Bools
from tessera.formulation.state.snapshot import Estimates, Jobs

_ESTIMATES = f"""
SELECT e.workload_id, e.gpu_type_id, e.gpus, e.nodes, e.pipeline_degree, e.plan_id, e.iter_time_s,
    e.source, {list_host("e.@")}, coalesce(e.sd, 'NaN'), e.complete
FROM estimates e JOIN workloads w ON w.id = e.workload_id WHERE w.cluster_id = {{cluster}}
    AND EXISTS (SELECT FROM jobs j WHERE j.workload_id = w.id AND j.{LIVE})
"""  # noqa: S608 - constants only


def read_estimates(connection: sa.Connection, cluster: int, keys: Keys) -> Estimates:
    """Return the estimates of a cluster."""
    e = read_columns(connection, _ESTIMATES.format(cluster=cluster), wire_types(Estimates))
    positions = {
        "workload": keys.workloads.of(e["workload"]),
        "gpu_type": keys.types.of(e["gpu_type"]),
        "plan": keys.plans.of(e["plan"]),
    }
    return Estimates(**e | positions).in_order()


def are_unestimated(row: sa.Row[Any], jobs: Jobs, estimates: Estimates) -> Bools:
    """Return whether each job's workload has no estimates, and none can be derived, bool[jobs].

    ``row.workloads`` has last whether none can be derived.
    """
    underivable = np.array([workload[-1] for workload in row.workloads], dtype=np.bool_)
    underivable[estimates.workload] = False
    return underivable[jobs.workload] if len(jobs) else np.zeros(0, np.bool_)
