"""The runtimes that agents say they can start on their nodes, and those that jobs need of nodes."""

from __future__ import annotations

from collections.abc import Collection
from typing import Any, Final

import sqlalchemy as sa

from tessera.db.tables import LIVE
from tessera.formulation.runtime_offers import (
    NO_OFFERS,
    OWN_PYTHON_VARIABLES,
    AgentOffers,
    NodeOffers,
    RuntimeLack,
    RuntimeOffer,
    describe_lack,
)
from tessera.formulation.runtimes import COMMAND, RUNTIMES

_TRAINING: Final = ", ".join(f"'{name}'" for name, runtime in RUNTIMES.items() if runtime.trains)

_OWN: Final = ", ".join(f"'{name}'" for name in OWN_PYTHON_VARIABLES)

NEEDED: Final = f"""CASE WHEN j.runtime IN ({_TRAINING})
    AND coalesce(j.launch->'environment' ?| ARRAY[{_OWN}], false) THEN '{COMMAND}' ELSE j.runtime END"""
"""SQL for the runtime that nodes must offer for a job (j): see ``needed_runtime``."""

_NEEDED_NAMES: Final = (
    f"SELECT DISTINCT {NEEDED} FROM jobs j WHERE j.cluster_id = c.id AND j.{LIVE}"  # noqa: S608
)

LACKING_AGENTS: Final = f"""(
    SELECT coalesce(json_agg(json_build_array((SELECT coalesce(json_agg(n.name ORDER BY n.name), '[]')
        FROM nodes n WHERE n.agent_id = a.id), a.runtimes->'versions', a.runtimes->'problems')
        ORDER BY a.name), '[]')
    FROM agents a WHERE a.cluster_id = c.id AND a.runtimes <> '{{}}'
        AND NOT a.runtimes->'versions' ?& ARRAY({_NEEDED_NAMES})
)"""  # noqa: S608 - constants
"""A subquery for the runtimes of a cluster's (c) agents that lack one which a live job needs."""

LACKED_NEEDS: Final = f"""(
    SELECT coalesce(json_agg(json_build_array(j.id, {NEEDED}, (
        SELECT coalesce(json_agg(DISTINCT l.node_id), '[]') FROM allocations l
        WHERE l.job_id = j.id AND l.hold <> 'releasing')) ORDER BY j.id), '[]')
    FROM jobs j WHERE j.cluster_id = c.id AND j.{LIVE} AND {NEEDED} IN (
        SELECT r.name FROM ({_NEEDED_NAMES}) AS r(name) WHERE EXISTS (SELECT FROM agents a
            WHERE a.cluster_id = c.id AND a.runtimes <> '{{}}'
                AND NOT a.runtimes->'versions' ? r.name))
)"""  # noqa: S608 - constants
"""A subquery for the live jobs of a cluster (c) whose runtime some agent lacks, with their nodes."""

_OFFERS = sa.text("""
SELECT array_agg(n.name ORDER BY n.name) AS nodes, a.runtimes FROM agents a
JOIN nodes n ON n.agent_id = a.id JOIN clusters c ON c.id = a.cluster_id
WHERE c.name = :cluster
    AND extract(epoch FROM now() - a.heard_at)::float8 <= :silence_s
GROUP BY a.id ORDER BY a.name
""")


def offers_document(offers: AgentOffers) -> dict[str, Any]:
    """Return the stored form of what an agent offers."""
    if not offers.runtimes:
        return {}
    return {
        "versions": {o.runtime: o.version for o in offers.runtimes if not o.problem},
        "problems": {o.runtime: o.problem for o in offers.runtimes if o.problem},
        "tools": list(offers.tools),
    }


def stored_offers(document: dict[str, Any] | None) -> AgentOffers:
    """Return what ``offers_document`` has stored. A node without an agent has no document (None)."""
    if not document:
        return NO_OFFERS
    versions, problems = document["versions"], document["problems"]
    return AgentOffers(
        runtimes=(
            *(RuntimeOffer(runtime=name, version=versions[name]) for name in sorted(versions)),
            *(RuntimeOffer(runtime=name, problem=problems[name]) for name in sorted(problems)),
        ),
        tools=tuple(document["tools"]),
    )


def find_lacks(
    connection: sa.Connection, cluster: str, runtimes: Collection[str], silence_s: float
) -> dict[str, RuntimeLack]:
    """Return the ``runtimes`` that no node with an agent offers, by name.

    If an agent does not say what it offers, there are none.
    """
    rows = connection.execute(_OFFERS, {"cluster": cluster, "silence_s": silence_s}).all()
    if not all(row.runtimes for row in rows):
        return {}
    offers = [
        NodeOffers(tuple(row.nodes), row.runtimes["versions"], row.runtimes["problems"])
        for row in rows
    ]
    return {
        name: describe_lack(name, offers)
        for name in sorted(runtimes)
        if offers and all(name not in o.versions for o in offers)
    }
