"""The invariants of all stored data."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final

import sqlalchemy as sa

from tessera.db.schema.engine import Database

INVARIANTS: Final[Mapping[str, str]] = {
    "a GPU has two holders": """
        SELECT node_id || '/' || gpu FROM allocations WHERE hold IN ('held', 'releasing')
        GROUP BY node_id, gpu HAVING count(*) > 1
    """,
    "a GPU has two successors": """
        SELECT node_id || '/' || gpu FROM allocations WHERE hold = 'reserved'
        GROUP BY node_id, gpu HAVING count(*) > 1
    """,
    "a job owns other GPUs than its Cell has": """
        SELECT j.name FROM jobs j LEFT JOIN allocations a
            ON a.job_id = j.id AND a.generation = j.generation AND a.hold <> 'releasing'
        WHERE j.state IN ('starting', 'running')
        GROUP BY j.id HAVING count(a.gpu) <> j.cell_gpus
    """,
    "a job has GPUs of another type than its Cell": """
        SELECT j.name FROM jobs j JOIN allocations a ON a.job_id = j.id AND a.generation = j.generation
            JOIN nodes n ON n.id = a.node_id
        WHERE a.hold <> 'releasing' AND j.cell_type_id IS NOT NULL
            AND n.gpu_type_id <> j.cell_type_id
    """,
    "a job that does not run owns GPUs": """
        SELECT j.name FROM jobs j JOIN allocations a ON a.job_id = j.id
        WHERE a.hold <> 'releasing' AND j.cell_type_id IS NULL
    """,
    "an allocation is of a generation to come": """
        SELECT j.name FROM jobs j JOIN allocations a ON a.job_id = j.id
        WHERE a.generation > j.generation
    """,
    "a job has a gang before its former one is gone": """
        SELECT DISTINCT j.name FROM jobs j JOIN allocations a ON a.job_id = j.id
            JOIN allocations b ON b.job_id = j.id
        WHERE a.hold = 'held' AND b.hold = 'releasing'
    """,
    "epochs do not rise with rounds": """
        SELECT cluster_id || '/' || number FROM (
            SELECT cluster_id, number, epoch,
                lag(epoch) OVER (PARTITION BY cluster_id ORDER BY number) AS before FROM rounds
        ) r WHERE before >= epoch
    """,
    "a round is newer than its cluster": """
        SELECT c.name FROM clusters c JOIN rounds r ON r.cluster_id = c.id
        WHERE r.number > c.last_round OR r.epoch > c.epoch
    """,
    "a request was acknowledged without an answer": """
        SELECT id FROM request_ids WHERE response IS NULL
    """,
    "a join token was used too often": "SELECT id FROM join_tokens WHERE used > uses",
    "two tokens that are not revoked have one name": """
        SELECT name FROM tokens WHERE revoked_at IS NULL GROUP BY name HAVING count(*) > 1
    """,
    "a certificate is of another cluster than it states": """
        SELECT a.serial FROM agent_certificates a JOIN clusters c ON c.id = a.cluster_id
        WHERE c.name <> a.cluster
    """,
    "a certificate of a deleted cluster is not revoked": """
        SELECT serial FROM agent_certificates WHERE cluster_id IS NULL AND revoked_at IS NULL
    """,
}
"""A query of names for each possible violation of a rule. Each result must be empty."""

MAX_NAMES: Final = 5
"""Largest number of names in a message."""


def find_broken_rules(database: Database) -> list[str]:
    """Return a sentence for each of ``INVARIANTS`` that does not hold now. Raises Unavailable."""
    sentences = []
    with database.read() as connection:
        for wrong, query in INVARIANTS.items():
            names = [str(name) for name in connection.execute(sa.text(query)).scalars()]
            if names:
                sentences.append(f"{wrong}: {', '.join(names[:MAX_NAMES])} ({len(names)} in all)")
    return sentences
