"""Retention: what is deleted once nobody can ask for it any more."""

from __future__ import annotations

import sqlalchemy as sa

from db.estimating import LATEST

KEEP_EVENTS = 50
"""Latest entries of a job's history that stay as long as the job does."""

_STATEMENTS = {
    "request_ids": sa.text("""
        DELETE FROM request_ids WHERE created_at < now() - make_interval(secs => :older_than_s)
    """),
    "rounds": sa.text("""
        DELETE FROM rounds r USING clusters c
        WHERE c.id = r.cluster_id AND r.number <= c.last_round - :keep_rounds
            AND r.number <> c.decided_round
            AND r.created_at < now() - make_interval(secs => :older_than_s)
    """),
    "jobs": sa.text("""
        DELETE FROM jobs j WHERE j.ended_at < now() - make_interval(secs => :older_than_s)
            AND NOT EXISTS (SELECT FROM allocations l WHERE l.job_id = j.id)
    """),
    "job_history": sa.text("""
        DELETE FROM job_history h USING (
            SELECT id, row_number() OVER (PARTITION BY job_id ORDER BY id DESC) AS place
            FROM job_history
        ) AS ranked
        WHERE h.id = ranked.id AND ranked.place > :keep_events
            AND h.at < now() - make_interval(secs => :older_than_s)
    """),
    "network_plans": sa.text("""
        DELETE FROM network_plans p USING networks n
        WHERE n.cluster_id = p.cluster_id AND p.number <= n.last_plan - :keep_rounds
            AND p.planned_at < now() - make_interval(secs => :older_than_s)
    """),
    "measurements": sa.text("""
        DELETE FROM measurements m USING (
            SELECT x.id, row_number() OVER (PARTITION BY w.cluster_id ORDER BY x.changed_at DESC) AS place
            FROM measurements x JOIN workloads w ON w.id = x.workload_id
        ) AS ranked
        WHERE m.id = ranked.id AND ranked.place > :keep_measurements
            AND m.changed_at < now() - make_interval(secs => :older_than_s)
    """),
}


def prune(connection: sa.Connection, older_than_s: float, keep_rounds: int) -> dict[str, int]:
    """Delete what is older than ``older_than_s``; return how many rows of each kind.

    Request ids; rounds with their decisions, but never the last ``keep_rounds`` of a cluster nor the one
    that jobs' reasons come from; network plans likewise; ended jobs with their histories, once their GPUs
    are free; of the jobs that stay, entries of the history that are neither young nor among the latest
    ``KEEP_EVENTS``; measurements beyond those that are learned from.
    """
    values = {
        "older_than_s": older_than_s, "keep_rounds": keep_rounds, "keep_events": KEEP_EVENTS,
        "keep_measurements": LATEST,
    }  # fmt: skip
    return {
        name: connection.execute(statement, values).rowcount
        for name, statement in _STATEMENTS.items()
    }
