"""Triggers: transitions of jobs that the lifecycle does not have, and changes of the audit log."""

from __future__ import annotations

import sqlalchemy as sa

from tessera.db.tables.columns import metadata, one_of
from tessera.formulation.lifecycle import ACTIVE, next_states


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
CREATE TRIGGER audit_log_append_only BEFORE UPDATE OR DELETE OR TRUNCATE ON audit_log
FOR EACH STATEMENT EXECUTE FUNCTION check_audit_log_change()
""",
)


@sa.event.listens_for(metadata, "after_create")
def _create_triggers(_: sa.MetaData, connection: sa.Connection, **__: object) -> None:
    for statement in (*FUNCTIONS, *TRIGGERS):
        connection.execute(sa.text(statement))
