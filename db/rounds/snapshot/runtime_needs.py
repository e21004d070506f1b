"""The runtimes that live jobs need and that some agents cannot start."""

from __future__ import annotations

from typing import Any, Final

import numpy as np
import sqlalchemy as sa

from tessera.db.rounds.snapshot.keys import Keys
from tessera.db.schema.tables import LIVE
from tessera.formulation.job.runtime_offers import OWN_PYTHON_VARIABLES, NodeOffers
from tessera.formulation.job.runtimes import COMMAND, RUNTIMES
from tessera.formulation.state.runtime_needs import RuntimeNeed, RuntimeRequirements

_TRAINING: Final = ", ".join(f"'{name}'" for name, runtime in RUNTIMES.items() if runtime.trains)

_VARIABLES: Final = ", ".join(f"'{name}'" for name in OWN_PYTHON_VARIABLES)

_RUNTIME: Final = f"""CASE WHEN j.runtime IN ({_TRAINING})
    AND coalesce(j.launch->'env' ?| ARRAY[{_VARIABLES}], false) THEN '{COMMAND}' ELSE j.runtime END"""
"""SQL for the runtime that nodes must offer for a job (j): see ``needed_runtime``."""

_RUNTIMES: Final = f"SELECT DISTINCT {_RUNTIME} FROM jobs j WHERE j.cluster_id = c.id AND j.{LIVE}"  # noqa: S608

_AGENTS: Final = f"""(
    SELECT coalesce(json_agg(json_build_array((SELECT coalesce(json_agg(n.name ORDER BY n.name), '[]')
        FROM nodes n WHERE n.agent_id = a.id), a.runtimes->'versions', a.runtimes->'problems')
        ORDER BY a.name), '[]')
    FROM agents a WHERE a.cluster_id = c.id AND a.runtimes <> '{{}}'
        AND NOT a.runtimes->'versions' ?& ARRAY({_RUNTIMES})
)"""  # noqa: S608 - constants
"""A subquery for the runtimes of a cluster's (c) agents that lack one which a live job needs."""

_NEEDS: Final = f"""(
    SELECT coalesce(json_agg(json_build_array(j.id, {_RUNTIME}, (
        SELECT coalesce(json_agg(DISTINCT l.node_id), '[]') FROM allocations l
        WHERE l.job_id = j.id AND l.hold <> 'releasing')) ORDER BY j.id), '[]')
    FROM jobs j WHERE j.cluster_id = c.id AND j.{LIVE} AND {_RUNTIME} IN (
        SELECT r.name FROM ({_RUNTIMES}) AS r(name) WHERE EXISTS (SELECT FROM agents a
            WHERE a.cluster_id = c.id AND a.runtimes <> '{{}}'
                AND NOT a.runtimes->'versions' ? r.name))
)"""  # noqa: S608 - constants
"""A subquery for the live jobs of a cluster (c) whose runtime some agent lacks, with their nodes."""

RUNTIME_TABLES: Final = {"agents": _AGENTS, "needs": _NEEDS}
"""Subqueries for the tables of a cluster (c). Both are empty if each agent can start all jobs."""


def read_runtime_needs(row: sa.Row[Any], keys: Keys) -> RuntimeRequirements:
    """Return the jobs whose runtime some nodes lack, from a row with ``RUNTIME_TABLES``."""
    ids, runtimes, holders = zip(*row.needs, strict=True)
    jobs = keys.jobs.of(np.array(ids, np.int64)).tolist()
    nodes = [tuple(keys.nodes.of(np.array(held_ids, np.int64)).tolist()) for held_ids in holders]
    return RuntimeRequirements(
        [RuntimeNeed(*need) for need in zip(jobs, runtimes, nodes, strict=True)],
        [NodeOffers(tuple(names), *offers) for names, *offers in row.agents],
        {node[1]: index for index, node in enumerate(row.nodes)},
    )
