"""The places where generations of jobs run or ran, and requests for their output.

A request is a row from when a client asks until its answer is delivered, for ``EXPIRY_S`` at most.
It takes no cluster's turn and does not change a revision. The replica of the node's agent and the
replica of the client learn of the row and of its answer by notices.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

import sqlalchemy as sa

from tessera.db.base.rows import SILENT_S
from tessera.formulation.base.errors import NodeSilent, NotFound, TooBusy
from tessera.formulation.job.lifecycle import JobState
from tessera.formulation.records.logs import (
    MAX_READS_PER_AGENT,
    JobStart,
    LogAnswer,
    LogRead,
    StartedJob,
    agent_key,
    answer_key,
)

LOGS_CHANNEL: Final = "tessera_logs"
"""Channel that receives ``agent_key`` when an agent is asked, and ``answer_key`` when it answers."""

EXPIRY_S: Final = 30.0
"""Seconds after which a request is given up. Its row is deleted with a later request, or pruned."""

MAX_READS_PER_CLUSTER: Final = 256
MAX_READS_PER_CLIENT: Final = 32
"""Largest numbers of requests that wait: their answers take up to 256 KiB each."""

FRESH: Final = f"""(
    asked_at BETWEEN clock_timestamp() - make_interval(secs => {EXPIRY_S})
        AND clock_timestamp() + make_interval(secs => {EXPIRY_S})
)"""
"""Whether a request has not expired. One from the future was made before the clock was set back."""

_START = sa.text("""
SELECT j.id, j.tenant, j.state, s.generation, s.shares, s.waits,
    EXISTS (SELECT FROM allocations l WHERE l.job_id = j.id AND l.generation = s.generation) AS holds,
    (SELECT coalesce(min(k.generation), 0) FROM job_starts k WHERE k.job_id = j.id) AS first,
    (SELECT coalesce(max(k.generation), 0) FROM job_starts k WHERE k.job_id = j.id) AS last,
    (SELECT coalesce(min(k.generation), 0) FROM job_starts k
        WHERE k.job_id = j.id AND k.generation > coalesce(s.generation, :generation)) AS following
FROM jobs j JOIN clusters c ON c.id = j.cluster_id
LEFT JOIN LATERAL (
    SELECT k.generation, k.shares, EXISTS (SELECT FROM allocations l WHERE l.job_id = k.job_id
        AND l.generation = k.generation AND l.hold = 'reserved') AS waits
    FROM job_starts k
    WHERE k.job_id = j.id AND (:generation = 0 OR k.generation = :generation)
    ORDER BY waits, k.generation DESC LIMIT 1
) AS s ON true
WHERE c.name = :cluster AND j.name = :job
""")

_CLUSTER = sa.text("SELECT FROM clusters WHERE name = :cluster")

_NODE = sa.text(f"""
SELECT c.id AS cluster_id, n.id AS node_id, a.id AS agent_id, a.name AS agent,
    {SILENT_S} AS silent_s
FROM clusters c LEFT JOIN nodes n ON n.cluster_id = c.id AND n.name = :node
LEFT JOIN agents a ON a.id = n.agent_id
WHERE c.name = :cluster
""")  # noqa: S608 - a constant of tessera.db.base.rows

_ASK = sa.text(f"""
WITH expired AS (
    DELETE FROM log_reads WHERE id = ANY(ARRAY(
        SELECT id FROM log_reads WHERE NOT {FRESH} LIMIT 100 FOR UPDATE SKIP LOCKED
    ))
), waiting AS (
    SELECT count(*) FILTER (WHERE cluster_id = :cluster_id) AS of_cluster,
        count(*) FILTER (WHERE client = :client) AS of_client
    FROM log_reads WHERE {FRESH}
), asked AS (
    INSERT INTO log_reads (id, cluster_id, agent_id, client, asked_at, job, job_number, generation,
        rank, node, first_byte, max_bytes)
    SELECT :id, :cluster_id, :agent_id, :client, clock_timestamp(), :job, :job_number, :generation,
        :rank, :node, :offset, :max_bytes
    FROM waiting
    WHERE of_cluster < {MAX_READS_PER_CLUSTER} AND of_client < {MAX_READS_PER_CLIENT}
    RETURNING pg_notify(:channel, :key)
)
SELECT of_cluster, of_client, (SELECT count(*) FROM asked) AS asked FROM waiting
""")  # noqa: S608 - constants of this module

_PENDING = sa.text(f"""
SELECT r.id, r.job, r.job_number, r.generation, r.rank, r.node, r.first_byte, r.max_bytes
FROM log_reads r JOIN agents a ON a.id = r.agent_id JOIN clusters c ON c.id = a.cluster_id
WHERE c.name = :cluster AND a.name = :agent AND NOT r.answered AND {FRESH}
ORDER BY r.asked_at, r.id LIMIT {MAX_READS_PER_AGENT}
""")  # noqa: S608 - constants of this module

_ANSWER = sa.text("""
UPDATE log_reads r SET answered = true, answer_first_byte = :offset, data = :data, ended = :ended,
    error = :error
FROM agents a JOIN clusters c ON c.id = a.cluster_id
WHERE r.id = :id AND NOT r.answered AND a.id = r.agent_id AND a.name = :agent AND c.name = :cluster
RETURNING pg_notify(:channel, :key)
""")

_TAKE = sa.text("""
DELETE FROM log_reads WHERE id = :id AND answered
RETURNING answer_first_byte, data, ended, error
""")

_DROP = sa.text("DELETE FROM log_reads WHERE id = :id")


def find_start(connection: sa.Connection, cluster: str, job: str, generation: int) -> StartedJob:
    """Return a job and one of its starts.

    If ``generation`` is 0, it is the last one, but one that still waits for GPUs counts only if
    there is no other. Raises NotFound.
    """
    values = {"cluster": cluster, "job": job, "generation": generation}
    row = connection.execute(_START, values).one_or_none()
    if row is None:
        known = connection.execute(_CLUSTER, values).one_or_none() is not None
        raise NotFound(f"clusters/{cluster}/jobs/{job}" if known else f"clusters/{cluster}")
    start = None
    if row.generation is not None:
        start = JobStart(
            generation=row.generation,
            shares=tuple((node, tuple(gpus)) for node, gpus in row.shares),
            waits=row.waits,
            holds=row.holds,
        )
    return StartedJob(
        number=row.id,
        tenant=row.tenant,
        state=JobState(row.state),
        start=start,
        first=row.first,
        last=row.last,
        following=row.following,
    )


def silence_of_node(connection: sa.Connection, cluster: str, node: str) -> float | None:
    """Return the seconds since a node was heard, or None if it was never heard or is not there."""
    row = connection.execute(_NODE, {"cluster": cluster, "node": node}).one_or_none()
    return None if row is None else row.silent_s


def store_request(
    connection: sa.Connection, cluster: str, read: LogRead, client: str, lease_s: float
) -> None:
    """Store a request, and notify the replica that holds the stream of the node's agent.

    Raises:
        NotFound: the cluster. NodeSilent: the node is not there, or silent for over ``lease_s``.
        TooBusy: the client or the cluster has too many requests that wait.
    """
    node = connection.execute(_NODE, {"cluster": cluster, "node": read.node}).one_or_none()
    if node is None:
        raise NotFound(f"clusters/{cluster}")
    if node.node_id is None:
        raise NodeSilent(
            f"node {read.node} was deleted from the cluster; its output is on its disk"
        )
    if node.agent_id is None or node.silent_s is None:
        raise NodeSilent(
            f"no agent runs on node {read.node}; start one, because the output is on the node's disk"
        )
    if node.silent_s > lease_s:
        raise NodeSilent(
            f"node {read.node} was last heard {node.silent_s:.0f} s ago; its output is on its disk, so"
            " start its agent again"
        )
    values = {
        "id": read.id,
        "cluster_id": node.cluster_id,
        "agent_id": node.agent_id,
        "client": client,
        "job": read.job,
        "job_number": read.job_number,
        "generation": read.generation,
        "rank": read.rank,
        "node": read.node,
        "offset": read.offset,
        "max_bytes": read.max_bytes,
        "channel": LOGS_CHANNEL,
        "key": agent_key(cluster, node.agent),
    }
    result = connection.execute(_ASK, values).one()
    if not result.asked:
        whose = "of this client" if result.of_client >= MAX_READS_PER_CLIENT else "of this cluster"
        waiting = result.of_client if whose == "of this client" else result.of_cluster
        raise TooBusy(
            f"{waiting} requests {whose} for output are waiting, which is the limit; read the output of"
            " fewer ranks at a time"
        )


def find_pending(connection: sa.Connection, cluster: str, agent: str) -> list[LogRead]:
    """Return the requests that an agent has not answered, oldest first."""
    rows = connection.execute(_PENDING, {"cluster": cluster, "agent": agent})
    return [
        LogRead(
            id=row.id,
            job=row.job,
            job_number=row.job_number,
            generation=row.generation,
            rank=row.rank,
            node=row.node,
            offset=row.first_byte,
            max_bytes=row.max_bytes,
        )
        for row in rows
    ]


def store_answers(
    connection: sa.Connection, cluster: str, agent: str, answers: Sequence[LogAnswer]
) -> None:
    """Store an agent's answers, and notify the replicas that wait for them.

    Answers to requests that are gone, answered or not this agent's are ignored.
    """
    for answer in answers:
        values = {
            "cluster": cluster,
            "agent": agent,
            "id": answer.id,
            "offset": answer.offset,
            "data": answer.data,
            "ended": answer.ended,
            "error": answer.error,
            "channel": LOGS_CHANNEL,
            "key": answer_key(answer.id),
        }
        connection.execute(_ANSWER, values)


def take_answer(connection: sa.Connection, read_id: str) -> LogAnswer | None:
    """Delete a request that is answered and return its answer, or None if it is not answered."""
    row = connection.execute(_TAKE, {"id": read_id}).one_or_none()
    if row is None:
        return None
    return LogAnswer(
        id=read_id,
        offset=row.answer_first_byte,
        data=bytes(row.data or b""),
        ended=row.ended,
        error=row.error,
    )


def drop_request(connection: sa.Connection, read_id: str) -> None:
    """Delete a request that nobody waits for any more."""
    connection.execute(_DROP, {"id": read_id})
