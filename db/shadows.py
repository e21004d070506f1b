"""Shadows: policies that decide without effect, and what they decided, by round."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict
from typing import Any, Final

import sqlalchemy as sa

from tessera.db.documents import dump_json, from_plain_json, to_plain_json
from tessera.db.rows import cluster_id
from tessera.db.turn import Turn
from tessera.formulation.errors import NotFound
from tessera.formulation.records.policies import DecisionFigures, ShadowRecord, ShadowRound

MAX_SHADOW_ROUNDS: Final = 5_000
"""The newest rounds of a shadow that are kept and compared."""

_SHADOW = sa.text("""
SELECT s.id AS key, s.options, s.set_by, extract(epoch FROM s.set_at)::float8 AS set_s, s.message,
    coalesce((SELECT max(r.number) FROM shadow_rounds r WHERE r.shadow_id = s.id), 0) AS last_round
FROM shadows s JOIN clusters c ON c.id = s.cluster_id WHERE c.name = :cluster
""")

_DROP = sa.text("DELETE FROM shadows WHERE cluster_id = :cluster RETURNING id")

_SET = sa.text("""
INSERT INTO shadows (cluster_id, options, set_by, message)
VALUES (:cluster, CAST(:options AS jsonb), :set_by, :message)
""")

_ADD_ROUND = sa.text("""
INSERT INTO shadow_rounds (shadow_id, number, created_at, document)
SELECT s.id, :number, to_timestamp(:created_s), CAST(:document AS jsonb) FROM shadows s
WHERE s.id = :key
ON CONFLICT DO NOTHING
""")

_ROUNDS = sa.text("""
SELECT r.number, extract(epoch FROM r.created_at)::float8 AS created_s, r.document
FROM shadow_rounds r
WHERE r.shadow_id = :key AND r.created_at >= now() - make_interval(secs => :window_s)
ORDER BY r.number DESC LIMIT :limit
""")


def find_shadow(connection: sa.Connection, cluster: str) -> ShadowRecord | None:
    """Return the cluster's shadow, or None if it has none. A missing cluster has none."""
    row = connection.execute(_SHADOW, {"cluster": cluster}).mappings().one_or_none()
    return None if row is None else ShadowRecord(**row)


def set_shadow(
    turn: Turn, options: Mapping[str, Any], *, set_by: str, message: str
) -> ShadowRecord:
    """Set the cluster's shadow in place of an earlier one, whose rounds are deleted."""
    connection = turn.connection
    values = {
        "cluster": turn.cluster,
        "options": dump_json(dict(options)),
        "set_by": set_by,
        "message": message,
    }
    connection.execute(_DROP, values)
    connection.execute(_SET, values)
    row = connection.execute(_SHADOW, {"cluster": turn.name}).mappings().one()
    return ShadowRecord(**row)


def drop_shadow(turn: Turn, *, allow_missing: bool) -> None:
    """Delete the cluster's shadow with its rounds. Raises NotFound, unless ``allow_missing``."""
    dropped = turn.connection.execute(_DROP, {"cluster": turn.cluster}).all()
    if not dropped and not allow_missing:
        raise NotFound(f"clusters/{turn.name}/shadow")


def add_shadow_round(connection: sa.Connection, key: int, decided: ShadowRound) -> None:
    """Store a round of the shadow ``key``, unless the shadow is gone."""
    document = asdict(decided)
    del document["number"], document["created_s"]
    values = {
        "key": key,
        "number": decided.number,
        "created_s": decided.created_s,
        "document": dump_json(to_plain_json(document)),
    }
    connection.execute(_ADD_ROUND, values)


def list_shadow_rounds(
    connection: sa.Connection, cluster: str, window_s: float
) -> list[ShadowRound]:
    """Return the rounds of the cluster's shadow in the last ``window_s`` seconds, newest first.

    Raises:
        NotFound: the cluster, or its shadow.
    """
    cluster_id(connection, cluster)
    shadow = find_shadow(connection, cluster)
    if shadow is None:
        raise NotFound(f"clusters/{cluster}/shadow")
    values = {"key": shadow.key, "window_s": window_s, "limit": MAX_SHADOW_ROUNDS}
    return [_round(row) for row in connection.execute(_ROUNDS, values)]


def _round(row: sa.Row[Any]) -> ShadowRound:
    fields = from_plain_json(row.document)
    for side in ("policy", "shadow"):
        if fields[side] is not None:
            fields[side] = DecisionFigures(**fields[side])
    return ShadowRound(number=row.number, created_s=row.created_s, **fields)
