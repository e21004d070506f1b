"""Triggers that refuse what no constraint of one row can.

These are transitions of jobs that the lifecycle does not have, nodes whose jobs need more than they
have, changes of the audit log, and writes of programs of other releases.
"""

from __future__ import annotations

from typing import Final

import sqlalchemy as sa

from tessera.db.tables.columns import metadata, one_of
from tessera.formulation.lifecycle import ACTIVE, next_states

NODE_CAPACITY: Final = "node_capacity"
"""The name by which errors say that a node's jobs would need more than it has."""

SCHEMA_FENCE: Final = "schema_fence"
"""The name by which errors say that a program of another release wrote, and that of each trigger."""

STATED_SCHEMA: Final = "tessera.schema"
"""The setting in which each connection states the schema that its program writes to."""

MIGRATION: Final = "migration"
"""The stated schema of a migration, which writes to all of them."""


def _transitions() -> str:
    pairs = [(b.value, a.value) for b, after in next_states().items() for a in sorted(after)]
    return ",\n        ".join(f"('{before}', '{after}')" for before, after in pairs)


FUNCTIONS: tuple[str, ...] = (
    f"""
CREATE FUNCTION check_job_transition() RETURNS trigger LANGUAGE plpgsql AS $$
BEGIN
    IF (OLD.state, NEW.state) NOT IN (
        {_transitions()}
    ) THEN
        RAISE EXCEPTION 'a job that is % cannot become %', OLD.state, NEW.state
            USING ERRCODE = 'check_violation', CONSTRAINT = 'jobs_transition';
    END IF;
    RETURN NEW;
END $$
""",
    """
CREATE FUNCTION check_job_owns_nothing() RETURNS trigger LANGUAGE plpgsql AS $$
BEGIN
    IF EXISTS (
        SELECT FROM allocations a JOIN jobs j ON j.id = a.job_id
        WHERE a.job_id = NEW.id AND a.hold <> 'releasing' AND j.state = NEW.state
    ) THEN
        RAISE EXCEPTION 'a job that is % cannot own GPUs', NEW.state
            USING ERRCODE = 'check_violation', CONSTRAINT = 'jobs_own_nothing';
    END IF;
    RETURN NULL;
END $$
""",
    # Without statistics of rows that were just written, the planner would read all of them for each
    # node: committing 1,280 starts on 8 GPUs took 18 s in place of 6 s.
    f"""
CREATE FUNCTION require_node_capacity(node bigint) RETURNS void LANGUAGE plpgsql
SET enable_seqscan = off AS $$
DECLARE
    has record;
    needs record;
BEGIN
    IF NOT EXISTS (
        SELECT FROM nodes n WHERE n.id = node
            AND (coalesce(n.cpus, n.found_cpus) IS NOT NULL
                OR coalesce(n.host_bytes, n.found_host_bytes) IS NOT NULL)
    ) THEN
        RETURN;
    END IF;
    -- Whoever gives something of this node away waits here, and then sees what others gave.
    SELECT n.name, coalesce(n.cpus, n.found_cpus) AS cpus,
        coalesce(n.host_bytes, n.found_host_bytes) AS host_bytes
    INTO has FROM nodes n WHERE n.id = node FOR NO KEY UPDATE;
    -- A job's share is that of its GPUs here, rounded up, as in formulation.demand. Whole parts and
    -- the rest are multiplied separately, so that nothing overflows.
    SELECT coalesce(sum(cell_cpus / cell_gpus * gpus
            + (cell_cpus % cell_gpus * gpus + cell_gpus - 1) / cell_gpus), 0) AS cpus,
        coalesce(sum(cell_host_bytes / cell_gpus * gpus
            + (cell_host_bytes % cell_gpus * gpus + cell_gpus - 1) / cell_gpus), 0) AS host_bytes
    INTO needs FROM (
        SELECT j.cell_cpus, j.cell_host_bytes, j.cell_gpus, count(*) AS gpus
        FROM allocations a JOIN jobs j ON j.id = a.job_id
        WHERE a.node_id = node AND a.hold <> 'releasing' AND j.cell_gpus > 0 GROUP BY j.id
    ) AS shares;
    IF needs.cpus > has.cpus THEN
        RAISE EXCEPTION 'node % has % CPU cores, but its jobs need %; stop or move one of them first,'
            ' or state more cores', has.name, has.cpus, needs.cpus
            USING ERRCODE = 'check_violation', CONSTRAINT = '{NODE_CAPACITY}';
    END IF;
    IF needs.host_bytes > has.host_bytes THEN
        RAISE EXCEPTION 'node % has % bytes of host memory, but its jobs need %; stop or move one of'
            ' them first, or state more memory', has.name, has.host_bytes, needs.host_bytes
            USING ERRCODE = 'check_violation', CONSTRAINT = '{NODE_CAPACITY}';
    END IF;
END $$
""",  # noqa: S608 - a constant of this module
    """
CREATE FUNCTION check_allocation_capacity() RETURNS trigger LANGUAGE plpgsql AS $$
BEGIN
    PERFORM require_node_capacity(NEW.node_id);
    RETURN NULL;
END $$
""",
    """
CREATE FUNCTION check_job_capacity() RETURNS trigger LANGUAGE plpgsql AS $$
BEGIN
    PERFORM require_node_capacity(a.node_id) FROM (
        SELECT DISTINCT node_id FROM allocations WHERE job_id = NEW.id AND hold <> 'releasing'
        ORDER BY node_id
    ) AS a;
    RETURN NULL;
END $$
""",
    """
CREATE FUNCTION check_node_capacity() RETURNS trigger LANGUAGE plpgsql AS $$
BEGIN
    PERFORM require_node_capacity(NEW.id);
    RETURN NULL;
END $$
""",
    """
CREATE FUNCTION check_audit_log_change() RETURNS trigger LANGUAGE plpgsql AS $$
BEGIN
    IF TG_OP = 'DELETE' AND current_setting('tessera.pruning', true) = 'on' THEN
        RETURN NULL;
    END IF;
    RAISE EXCEPTION 'entries of the audit log can only be added, but this is %', TG_OP
        USING ERRCODE = 'check_violation', CONSTRAINT = 'audit_log_append_only';
END $$
""",
    # Programs report this code as the schema of another release.
    f"""
CREATE FUNCTION check_stated_schema() RETURNS trigger LANGUAGE plpgsql AS $$
DECLARE
    stated text := current_setting('{STATED_SCHEMA}', true);
    present text;
BEGIN
    IF stated = '{MIGRATION}' THEN
        RETURN NULL;
    END IF;
    SELECT version_num INTO present FROM alembic_version;
    IF stated IS DISTINCT FROM present THEN
        RAISE EXCEPTION 'the database has schema %, and a program for % may not write to it; upgrade'
            ' that program, or run `tessera migrate` if it is newer',
            present, coalesce('schema ' || nullif(stated, ''), 'an older schema')
            USING ERRCODE = 'undefined_table', CONSTRAINT = '{SCHEMA_FENCE}';
    END IF;
    RETURN NULL;
END $$
""",  # noqa: S608 - a constant of this module
)
"""The functions of the triggers, with the states of ``tessera.formulation.lifecycle``."""

TRIGGERS: tuple[str, ...] = (
    """
CREATE TRIGGER jobs_transition BEFORE UPDATE OF state ON jobs FOR EACH ROW
WHEN (OLD.state IS DISTINCT FROM NEW.state) EXECUTE FUNCTION check_job_transition()
""",
    f"""
CREATE CONSTRAINT TRIGGER jobs_own_nothing AFTER UPDATE OF state ON jobs
DEFERRABLE INITIALLY DEFERRED FOR EACH ROW
WHEN (NEW.state NOT IN {one_of(sorted(ACTIVE))}) EXECUTE FUNCTION check_job_owns_nothing()
""",
    """
CREATE CONSTRAINT TRIGGER allocations_capacity AFTER INSERT ON allocations
DEFERRABLE INITIALLY DEFERRED FOR EACH ROW
WHEN (NEW.hold <> 'releasing') EXECUTE FUNCTION check_allocation_capacity()
""",
    """
CREATE CONSTRAINT TRIGGER allocations_moved_capacity AFTER UPDATE OF node_id, job_id, hold ON allocations
DEFERRABLE INITIALLY DEFERRED FOR EACH ROW
WHEN (NEW.hold <> 'releasing' AND (
    OLD.hold = 'releasing' OR NEW.node_id <> OLD.node_id OR NEW.job_id <> OLD.job_id
)) EXECUTE FUNCTION check_allocation_capacity()
""",
    """
CREATE CONSTRAINT TRIGGER jobs_capacity AFTER UPDATE OF cell_cpus, cell_host_bytes, cell_gpus ON jobs
DEFERRABLE INITIALLY DEFERRED FOR EACH ROW
WHEN ((NEW.cell_cpus > 0 OR NEW.cell_host_bytes > 0)
    AND (NEW.cell_cpus, NEW.cell_host_bytes, NEW.cell_gpus)
        IS DISTINCT FROM (OLD.cell_cpus, OLD.cell_host_bytes, OLD.cell_gpus))
EXECUTE FUNCTION check_job_capacity()
""",
    """
CREATE CONSTRAINT TRIGGER nodes_capacity
AFTER UPDATE OF cpus, host_bytes, found_cpus, found_host_bytes ON nodes
DEFERRABLE INITIALLY DEFERRED FOR EACH ROW
WHEN ((NEW.cpus, NEW.host_bytes, NEW.found_cpus, NEW.found_host_bytes)
    IS DISTINCT FROM (OLD.cpus, OLD.host_bytes, OLD.found_cpus, OLD.found_host_bytes))
EXECUTE FUNCTION check_node_capacity()
""",
    """
CREATE TRIGGER audit_log_append_only BEFORE UPDATE OR DELETE OR TRUNCATE ON audit_log
FOR EACH STATEMENT EXECUTE FUNCTION check_audit_log_change()
""",
)


def fence_of(table: str) -> str:
    """Return the statement that fences a table off from programs of other releases."""
    return f"""
CREATE TRIGGER {SCHEMA_FENCE} BEFORE INSERT OR UPDATE OR DELETE OR TRUNCATE ON {table}
FOR EACH STATEMENT EXECUTE FUNCTION check_stated_schema()
"""


@sa.event.listens_for(metadata, "after_create")
def _create_triggers(_: sa.MetaData, connection: sa.Connection, **__: object) -> None:
    for statement in (*FUNCTIONS, *TRIGGERS, *map(fence_of, metadata.tables)):
        connection.execute(sa.text(statement))
