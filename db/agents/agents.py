"""Agents in the database: their nodes, their lease, what runs and what should run."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any, NamedTuple

import sqlalchemy as sa

from tessera.db.agents.clock_watch import CLOCK_S
from tessera.db.base.documents import dump_json
from tessera.db.base.limits import require_few
from tessera.db.base.rows import JOBS_KEYED, SILENT_S, allocation_record, job_spec, shares_of
from tessera.db.base.runtime_offers import offers_document
from tessera.db.base.turn import JobChange, Turn
from tessera.db.clusters import inventory
from tessera.db.clusters.failed_starts import forget_failed_starts
from tessera.db.clusters.network import decision_from
from tessera.db.clusters.outlook import HEARD_AHEAD
from tessera.db.estimates.tunings import load_plans_to_try
from tessera.db.schema.host import list_host
from tessera.formulation.base.errors import NotAllowed, NotFound
from tessera.formulation.base.resources import UNSTATED_HOST, amounts_of, name_amounts
from tessera.formulation.job.lifecycle import JobEvent, JobState
from tessera.formulation.job.runtime_offers import AgentOffers
from tessera.formulation.records.agents import DesiredGang, DesiredState, Heartbeat
from tessera.formulation.records.clusters import NodeSpec

_STORED = sa.text(f"""
SELECT n.id, n.name, n.rack, {list_host("n.@")}, n.labels, n.agent_id, a.name AS agent,
    {SILENT_S} AS silent_s
FROM nodes n LEFT JOIN agents a ON a.id = n.agent_id
WHERE n.cluster_id = :cluster AND n.name = ANY(:names)
""")  # noqa: S608 - a constant of tessera.db.base.rows

_REGISTER = sa.text("""
INSERT INTO agents (cluster_id, name, incarnation, heard_at, runtimes)
VALUES (:cluster, :name, :incarnation, clock_timestamp(), CAST(:runtimes AS jsonb))
ON CONFLICT (cluster_id, name) DO UPDATE
    SET incarnation = excluded.incarnation, heard_at = excluded.heard_at, network_remarks = '[]',
        runtimes = excluded.runtimes,
        deleted_nodes = CASE WHEN agents.incarnation = excluded.incarnation
            THEN agents.deleted_nodes ELSE '[]' END
RETURNING id
""")

_SAME_OFFERS = sa.text("""
SELECT runtimes = CAST(:runtimes AS jsonb) FROM agents WHERE cluster_id = :cluster AND name = :name
""")

_LEAVE = sa.text("""
UPDATE nodes n SET agent_id = NULL, heard_at = a.heard_at FROM agents a
WHERE a.cluster_id = :cluster AND a.name = :name AND n.agent_id = a.id AND n.name <> ALL(:names)
""")

_JOIN = sa.text("""
UPDATE nodes SET agent_id = :agent, heard_at = NULL
WHERE cluster_id = :cluster AND name = ANY(:names)
""")

# Nodes on which jobs have GPUs keep what was found before: it may be less than the jobs need.
_FIND = sa.text(f"""
UPDATE nodes n SET {list_host("reported_@ = r.@")}, version = n.version + 1
FROM json_to_recordset(CAST(:rows AS json)) AS r(name text, {list_host("@ bigint")})
WHERE n.cluster_id = :cluster AND n.name = r.name
    AND ({list_host("n.reported_@")}) IS DISTINCT FROM ({list_host("r.@")})
    AND NOT EXISTS (SELECT FROM allocations l WHERE l.node_id = n.id)
""")  # noqa: S608 - a constant of tessera.db.schema.host

_LABEL = sa.text("""
UPDATE nodes n SET agent_labels = r.labels, version = n.version + 1
FROM json_to_recordset(CAST(:rows AS json)) AS r(name text, labels jsonb)
WHERE n.cluster_id = :cluster AND n.name = r.name AND n.agent_labels <> r.labels
""")

_DELETED = sa.text("""
SELECT deleted_nodes FROM agents
WHERE cluster_id = :cluster AND name = :name AND incarnation = :incarnation
""")

_GIVE_BACK = tuple(
    sa.text(statement)
    for statement in (
        """
UPDATE nodes n SET agent_id = a.id, heard_at = NULL FROM agents a
WHERE n.cluster_id = :cluster AND n.name = ANY(:names) AND n.agent_id IS NULL
    AND a.cluster_id = n.cluster_id AND a.deleted_nodes ? n.name
""",
        """
UPDATE agents a SET deleted_nodes = a.deleted_nodes - CAST(:names AS text[])
WHERE a.cluster_id = :cluster AND a.deleted_nodes ?| CAST(:names AS text[])
""",
    )
)

_HEAR = sa.text("""
WITH heard AS MATERIALIZED (
    SELECT a.id, b.place, b.remarks
    FROM json_to_recordset(CAST(:beats AS json)) AS b(
        place int, cluster text, agent text, incarnation text, remarks jsonb
    )
    JOIN clusters c ON c.name = b.cluster
    JOIN agents a ON a.cluster_id = c.id AND a.name = b.agent AND a.incarnation = b.incarnation
    ORDER BY a.id, b.place FOR NO KEY UPDATE OF a
), last AS (
    SELECT DISTINCT ON (id) id, remarks FROM heard ORDER BY id, (remarks IS NULL), place DESC
), renewed AS (
    UPDATE agents a SET heard_at = clock_timestamp(),
        network_remarks = coalesce(l.remarks, a.network_remarks)
    FROM last l WHERE l.id = a.id RETURNING a.id
)
SELECT h.place FROM heard h JOIN renewed r ON r.id = h.id
""")

_AGENT = sa.text("""
SELECT c.id AS cluster_id, c.revision, a.id, a.incarnation, a.deleted_nodes
FROM clusters c LEFT JOIN agents a ON a.cluster_id = c.id AND a.name = :agent
WHERE c.name = :cluster
""")

_DESIRED = sa.text("""
SELECT DISTINCT l.job_id FROM nodes n
JOIN allocations l ON l.node_id = n.id AND l.hold = 'held'
JOIN jobs j ON j.id = l.job_id AND j.state IN ('starting', 'running')
WHERE n.agent_id = :agent
    AND l.job_id NOT IN (SELECT r.job_id FROM allocations r WHERE r.hold = 'reserved')
""")

_NETWORK = sa.text("""
SELECT s.job_id, j.name, s.generation, s.rank, s.level, s.tag, s.document
FROM standings s JOIN jobs j ON j.id = s.job_id AND j.generation = s.generation
WHERE s.job_id = ANY(:ids)
""")

_LEVELS = sa.text("""
SELECT p.levels FROM networks n
JOIN network_plans p ON p.cluster_id = n.cluster_id AND p.number = n.last_plan
WHERE n.cluster_id = :cluster
""")

_DEAD = sa.text(f"""
SELECT DISTINCT n.id FROM nodes n
JOIN allocations l ON l.node_id = n.id LEFT JOIN agents a ON a.id = n.agent_id
WHERE n.cluster_id = :cluster AND coalesce({SILENT_S}, 'Infinity') > :silence_s
""")  # noqa: S608 - a constant of tessera.db.base.rows

_HEARD_NOW = sa.text(f"""
WITH ahead AS MATERIALIZED (
    SELECT id FROM agents WHERE cluster_id = :cluster AND {HEARD_AHEAD}
    FOR NO KEY UPDATE SKIP LOCKED
), heard_agents AS (
    UPDATE agents a SET heard_at = clock_timestamp() FROM ahead WHERE a.id = ahead.id
)
UPDATE nodes SET heard_at = clock_timestamp() WHERE cluster_id = :cluster AND {HEARD_AHEAD}
""")  # noqa: S608 - constants only
"""A reset of times that lie in the future, so that the silence of these nodes counts again.

An agent whose row is locked is being heard. A turn that waited for it would stall the cluster, and
could be in a deadlock with the heartbeats of several agents, which PostgreSQL notices by its clock.
"""

_SILENCE = sa.text(f"""
WITH c AS (SELECT id FROM clusters WHERE name = :name)
SELECT {CLOCK_S}, coalesce((
    SELECT max(coalesce({SILENT_S}, 'Infinity'))
    FROM c JOIN nodes n ON n.cluster_id = c.id LEFT JOIN agents a ON a.id = n.agent_id
    WHERE EXISTS (SELECT FROM allocations l WHERE l.node_id = n.id)
), '-Infinity'), coalesce((
    SELECT min({SILENT_S})
    FROM c JOIN nodes n ON n.cluster_id = c.id JOIN agents a ON a.id = n.agent_id
    WHERE n.probation_until <= clock_timestamp()
), 'Infinity'), EXISTS (SELECT FROM c JOIN agents a ON a.cluster_id = c.id WHERE a.{HEARD_AHEAD})
OR EXISTS (SELECT FROM c JOIN nodes n ON n.cluster_id = c.id WHERE n.{HEARD_AHEAD})
""")  # noqa: S608 - constants only

_INTERRUPT = sa.text("UPDATE nodes SET probation_until = NULL WHERE id = ANY(:nodes)")
"""The end of probations of nodes that were silent: their health is not known for that time."""

_LOSERS = sa.text("""
SELECT j.id, j.name, j.state, array_agg(n.name) AS nodes
FROM allocations l JOIN jobs j ON j.id = l.job_id JOIN nodes n ON n.id = l.node_id
WHERE l.node_id = ANY(:nodes) AND l.hold <> 'releasing' GROUP BY j.id ORDER BY j.id
""")

_DROP = sa.text("DELETE FROM allocations WHERE node_id = ANY(:nodes)")


def register_agent(
    connection: sa.Connection,
    cluster: str,
    agent: str,
    incarnation: str,
    specs: Sequence[NodeSpec],
    offers: AgentOffers,
    silence_s: float,
) -> None:
    """Register an agent, its ``offers``, and its nodes with its labels and the capacity that it found.

    A newer incarnation takes the nodes over. Nodes taken over from a dead agent lose the jobs that
    ran there. Nodes that were deleted since this incarnation started are left out.
    ``load_desired_gangs`` returns their names. If a node is new, has returned, has changed or is
    left without an agent, a round is requested.

    Raises:
        NotFound: the cluster. InvalidInput: unknown GPU type or a count outside 1..64.
        NotAllowed: another live agent has a node; or a node in use would change type or lose GPUs.
        LimitReached: the cluster would have too many nodes or agents.
    """
    turn = Turn.take(connection, cluster)
    me = {"cluster": turn.cluster, "name": agent, "incarnation": incarnation}
    deleted = connection.execute(_DELETED, me).scalar()
    is_restarted, deleted = deleted is None, deleted or ()
    specs = [spec for spec in specs if spec.name not in deleted]
    names = [spec.name for spec in specs]
    stored = connection.execute(_STORED, {"cluster": turn.cluster, "names": names}).all()
    dead, returned = [], len(stored) < len(specs)
    # Refuse nodes of other live agents, and take over those of dead ones.
    for node in stored:
        foreign = node.agent is not None and node.agent != agent
        silent_s = float("inf") if node.silent_s is None else node.silent_s
        if foreign and silent_s <= silence_s:
            raise NotAllowed(
                f"node {node.name} belongs to agent {node.agent}, which reported {silent_s:.0f} s ago;"
                f" give each node to one agent, or stop that one and wait {silence_s:.0f} s"
            )
        if silent_s > silence_s:
            dead.append(node.id)
        returned |= node.agent is None or silent_s > silence_s
    _lose_nodes(turn, dead)
    if dead:
        connection.execute(_INTERRUPT, {"nodes": dead})
    changed = inventory.put_nodes(turn, _as_stated(specs, stored))
    found = [{"name": s.name, **name_amounts(amounts_of(s)), "labels": s.labels} for s in specs]
    values = me | {"names": names, "rows": dump_json(found)}
    for statement in (_FIND, _LABEL):
        changed |= connection.execute(statement, values).rowcount > 0
    if is_restarted:
        changed |= forget_failed_starts(connection, turn.cluster, names)
    left = connection.execute(_LEAVE, values).rowcount > 0
    values["runtimes"] = dump_json(offers_document(offers))
    changed |= connection.execute(_SAME_OFFERS, values).scalar() is False
    turn.needs_round |= returned or changed or left
    key = connection.execute(_REGISTER, values).scalar_one()
    connection.execute(_JOIN, values | {"agent": key})
    turn.end()
    for kind in ("nodes", "agents"):
        require_few(connection, cluster, kind)


def _as_stated(specs: Sequence[NodeSpec], stored: Sequence[sa.Row[Any]]) -> list[NodeSpec]:
    """Return an agent's nodes with what users have stated of them.

    These are the CPU cores, the host memory, the labels and, if the agent has none, the rack. What an
    agent finds, and its labels, are not stated: they are stored separately.
    """
    known = {node.name: node for node in stored}
    nodes, no_host = [], name_amounts(amounts_of(UNSTATED_HOST))
    for spec in specs:
        as_found = replace(spec, **no_host, labels={}, version=None)
        node = known.get(spec.name)
        if node is not None:
            as_found = replace(
                as_found,
                rack=spec.rack or node.rack,
                **name_amounts(amounts_of(node)),
                labels=node.labels,
            )
        nodes.append(as_found)
    return nodes


def record_heartbeats(connection: sa.Connection, beats: Sequence[Heartbeat]) -> set[int]:
    """Renew the leases of agents' nodes; return the positions of those whose agent is known.

    ``require_agent`` raises the reason why another one is not known. The rows are locked in one
    order, and this waits for no cluster's turn.
    """
    rows = [
        {
            "place": place,
            "cluster": beat.cluster,
            "agent": beat.agent,
            "incarnation": beat.incarnation,
            "remarks": beat.network_remarks,
        }
        for place, beat in enumerate(beats)
    ]
    return set(connection.execute(_HEAR, {"beats": dump_json(rows)}).scalars())


def require_agent(
    connection: sa.Connection, cluster: str, agent: str, incarnation: str | None
) -> sa.Row[tuple[int, int, int, str, list[str]]]:
    """Return (cluster's key, revision, agent's key, incarnation, names of its deleted nodes).

    Raises:
        NotFound: the cluster or the agent. NotAllowed: another incarnation took over.
    """
    row = connection.execute(_AGENT, {"cluster": cluster, "agent": agent}).one_or_none()
    if row is None:
        raise NotFound(f"clusters/{cluster}")
    if row.id is None:
        raise NotFound(f"clusters/{cluster}/agents/{agent}")
    if incarnation is not None and row.incarnation != incarnation:
        raise NotAllowed(
            f"another process has taken over as agent {agent}; stop this one, or give it another name"
        )
    return row


def load_desired_gangs(connection: sa.Connection, cluster: str, agent: str) -> DesiredState:
    """Return the gangs on the agent's nodes that hold all their GPUs, on every node.

    Raises NotFound.
    """
    me = require_agent(connection, cluster, agent, None)
    ids = list(connection.execute(_DESIRED, {"agent": me.id}).scalars())
    shares = shares_of(connection, ids)
    network = {
        row["job_id"]: decision_from(row)
        for row in connection.execute(_NETWORK, {"ids": ids}).mappings()
    }
    to_try = load_plans_to_try(connection, ids)
    gangs = []
    for row in connection.execute(JOBS_KEYED, {"ids": ids}).mappings():
        allocation = allocation_record(row, shares[row["id"]])
        if allocation is None:
            raise AssertionError(f"{row['name']} holds GPUs but has no Cell")
        gangs.append(
            DesiredGang(
                spec=job_spec(row),
                generation=row["generation"],
                allocation=allocation,
                iterations_done=row["iterations_done"],
                network=network.get(row["id"]),
                job_number=row["id"],
                tuning_plans=to_try.get(row["id"], ()),
            )
        )
    levels = connection.execute(_LEVELS, {"cluster": me.cluster_id}).scalar()
    return DesiredState(
        revision=me.revision,
        gangs=tuple(gangs),
        network_levels=levels or 0,
        deleted_nodes=tuple(me.deleted_nodes),
    )


def give_nodes_back(turn: Turn, names: Sequence[str]) -> None:
    """Give nodes that users create again back to the agents that still run there."""
    for statement in _GIVE_BACK:
        given = turn.connection.execute(statement, {"cluster": turn.cluster, "names": list(names)})
    turn.changed = turn.changed or given.rowcount > 0


def find_dead_nodes(connection: sa.Connection, cluster: int, silence_s: float) -> list[int]:
    """Return the keys of nodes with allocations that were silent for longer than ``silence_s``."""
    return list(connection.execute(_DEAD, {"cluster": cluster, "silence_s": silence_s}).scalars())


class Silence(NamedTuple):
    """The silence of a cluster's nodes."""

    clock_s: float  # the database's clock
    longest_s: float  # longest silence of a node with allocations; -inf if there is no such node
    returning_s: (
        float  # shortest one of a node whose probation is over; inf if there is no such node
    )
    is_ahead: bool  # whether some were heard in the future, because the clock was set back


def find_silence(connection: sa.Connection, cluster: str) -> Silence:
    """Return the silence of the nodes.

    ``expire_silent_nodes`` has something to do if some were silent for too long or were heard in the future.
    ``tessera.db.agents.health.end_probations`` has something to do if one whose probation is over was not.
    """
    return Silence(*connection.execute(_SILENCE, {"name": cluster}).one())


def expire_silent_nodes(
    connection: sa.Connection, cluster: str, silence_s: float
) -> dict[str, list[str]]:
    """Free the GPUs of silent nodes; return the names of the jobs that lost some, and of these nodes."""
    turn = Turn.take(connection, cluster)
    connection.execute(_HEARD_NOW, {"cluster": turn.cluster})
    lost = _lose_nodes(turn, find_dead_nodes(connection, turn.cluster, silence_s))
    turn.end()
    return lost


def _lose_nodes(turn: Turn, nodes: Sequence[int]) -> dict[str, list[str]]:
    """Delete the allocations of dead nodes.

    Their agents stopped their gangs when the lease expired. Jobs that owned any go through LOST.
    GPUs that they hold on live nodes need a report of the agent there.
    """
    if not nodes:
        return {}
    values = {"nodes": list(nodes)}
    losers = turn.connection.execute(_LOSERS, values).all()
    turn.connection.execute(_DROP, values)
    turn.apply(
        [
            JobChange(
                job=key, state=JobState(state), event=JobEvent.LOST, detail="a node fell silent"
            )
            for key, _, state, _ in losers
        ]
    )
    turn.changed = turn.changed or bool(losers)
    return {name: names for _, name, _, names in losers}
