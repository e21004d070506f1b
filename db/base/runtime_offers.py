"""The runtimes that agents say they can start on their nodes."""

from __future__ import annotations

from collections.abc import Collection
from typing import Any

import sqlalchemy as sa

from tessera.formulation.job.runtime_offers import (
    NO_OFFERS,
    AgentOffers,
    NodeOffers,
    RuntimeLack,
    RuntimeOffer,
    describe_lack,
)

_OFFERS = sa.text("""
SELECT array_agg(n.name ORDER BY n.name) AS nodes, a.runtimes FROM agents a
JOIN nodes n ON n.agent_id = a.id JOIN clusters c ON c.id = a.cluster_id
WHERE c.name = :cluster
    AND extract(epoch FROM now() - a.heard_at)::float8 <= :silence_s
GROUP BY a.id ORDER BY a.name
""")


def offers_document(offers: AgentOffers) -> dict[str, Any]:
    """Return the stored form of an agent's offers."""
    if not offers.runtimes:
        return {}
    return {
        "versions": {o.runtime: o.version for o in offers.runtimes if not o.problem},
        "problems": {o.runtime: o.problem for o in offers.runtimes if o.problem},
        "tools": list(offers.tools),
    }


def stored_offers(document: dict[str, Any] | None) -> AgentOffers:
    """Return the offers in a document of ``offers_document``.

    It is None for a node without an agent.
    """
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

    The result is empty if an agent lists no runtimes: it may offer all.
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
