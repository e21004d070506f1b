"""The schema: migrations and models agree, and the database itself refuses impossible values."""

from __future__ import annotations

import re
import threading
from pathlib import Path

import pytest
import sqlalchemy as sa

from tessera.db.clusters.tenants import upsert_tenants
from tessera.db.schema import migrate, tables
from tessera.db.schema.engine import Database, connect_database
from tessera.db.schema.revision import head_revision
from tessera.db.store.store import Store
from tessera.formulation.base.errors import InvalidInput, NotMigrated
from tessera.formulation.job.lifecycle import ACTIVE, JobState, next_states
from tessera.formulation.records.clusters import TenantSpec
from tests.support.database import TEMPLATE, a_database, digest_tables
from tests.support.migrations import a_newer_release
from tests.support.stored_cluster import C, a_cluster, a_spec, job, run, submit

CATALOGS = {
    "columns": """
        SELECT table_name, column_name, data_type, is_nullable, column_default, collation_name,
            is_identity FROM information_schema.columns WHERE table_schema = 'public'""",
    "constraints": """
        SELECT conrelid::regclass::text, conname, pg_get_constraintdef(oid) FROM pg_constraint
        WHERE connamespace = 'public'::regnamespace AND contype NOT IN ('n', 't')""",
    "indexes": "SELECT tablename, indexname, indexdef FROM pg_indexes WHERE schemaname = 'public'",
    "triggers": "SELECT tgname, pg_get_triggerdef(oid) FROM pg_trigger WHERE NOT tgisinternal",
    "functions": """
        SELECT proname, pg_get_functiondef(oid) FROM pg_proc
        WHERE pronamespace = 'public'::regnamespace""",
}


def catalog(database: Database) -> dict[str, set[tuple[object, ...]]]:
    with database.read() as connection:
        return {
            name: {
                tuple(row)
                for row in connection.execute(sa.text(query))
                if "alembic_version" not in row
            }
            for name, query in CATALOGS.items()
        }


def test_migrations_build_the_schema_of_the_models(database: Database, postgres_url: str) -> None:
    with a_database(postgres_url, "template1") as fresh:
        with fresh.engine.begin() as connection:
            tables.metadata.create_all(connection)
        from_models, migrated = catalog(fresh), catalog(database)
    for name in ("columns", "constraints", "indexes"):
        assert from_models[name], name
        assert migrated[name] == from_models[name], name


def test_the_triggers_know_the_lifecycle_of_jobs(database: Database) -> None:
    definitions = {
        str(name): str(text)
        for kind in ("functions", "triggers")
        for name, text in catalog(database)[kind]
    }
    pairs = set(re.findall(r"\('(\w+)', '(\w+)'\)", definitions["check_job_transition"]))
    assert pairs == {(b.value, a.value) for b, after in next_states().items() for a in after}
    owners = set(re.findall(r"'(\w+)'::text", definitions["jobs_own_nothing"]))
    assert owners == {state.value for state in ACTIVE}


def test_migrations_can_be_undone(database: Database) -> None:
    migrate.downgrade_schema(database, "base")
    left = catalog(database)
    assert not any(left[name] for name in ("columns", "constraints", "triggers", "functions"))
    with pytest.raises(NotMigrated, match="tessera migrate"):
        Store(database).ready()
    migrate.upgrade_schema(database)
    Store(database).ready()


def test_an_upgrade_keeps_the_data_of_an_older_release_and_can_be_undone(
    database: Database, tmp_path: Path
) -> None:
    older = Store(database)
    a_cluster(older)
    submit(older, a_spec("runs"), a_spec("waits"))
    run(older, runs=[("a100-0", [0])])
    before = digest_tables(database)
    first_revision = head_revision()
    with a_newer_release(tmp_path, database.url) as upgraded:
        newer = Store(upgraded)
        with pytest.raises(
            NotMigrated, match=f"has schema {first_revision}, but this release needs 0002"
        ):
            newer.ready()
        migrate.upgrade_schema(upgraded)
        after = digest_tables(upgraded)
        changed = {table for table in after if after[table] != before.get(table)}
        assert changed == {"alembic_version", "mottos"}
        run(newer, waits=[("a100-0", [1])])
        migrate.downgrade_schema(upgraded, first_revision)
    assert job(older, "waits").state is JobState.RUNNING
    assert digest_tables(database).keys() == before.keys()


def test_a_store_on_a_database_without_a_schema_says_to_migrate(postgres_url: str) -> None:
    with a_database(postgres_url, "template1") as fresh:
        store = Store(fresh)
        with pytest.raises(NotMigrated, match="no schema yet; run `tessera migrate`"):
            store.ready()
        with pytest.raises(NotMigrated, match="tessera migrate"):
            store.snapshot(C)


def test_a_newer_schema_is_distinguished_from_an_older_one(database: Database) -> None:
    with database.engine.begin() as connection:
        connection.execute(sa.text("UPDATE alembic_version SET version_num = '9999'"))
    with pytest.raises(NotMigrated, match="newer release"):
        Store(database).ready()


@pytest.mark.parametrize("template", ["template1", TEMPLATE])
def test_replicas_may_migrate_at_once(server_url: str, tmp_path: Path, template: str) -> None:
    """They may make a schema, and upgrade one."""
    with a_database(server_url, template) as old, a_newer_release(tmp_path, old.url) as upgraded:
        others = [connect_database(old.url) for _ in range(3)]
        threads = [
            threading.Thread(target=migrate.upgrade_schema, args=(other,)) for other in others
        ]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        for other in others:
            other.engine.dispose()
        Store(upgraded).ready()


def expect_constraint(database: Database, statement: str, constraint: str) -> None:
    """Check that ``statement`` fails on ``constraint``."""
    with pytest.raises(InvalidInput, match=constraint):
        database.write(lambda c: c.execute(sa.text(statement)))


@pytest.fixture
def running(database: Database) -> Database:
    """Return a database where a runs on GPUs 0 and 1 of node a100-0, b is queued, and t has quotas."""
    store = Store(database)
    a_cluster(store, nodes=2, gpus=4)
    submit(store, a_spec("a"), a_spec("b"))
    run(store, a=[("a100-0", [0, 1])])
    tenant = TenantSpec(name="t", quotas={"": 1, "a100": 1})
    store.change(upsert_tenants, C, [tenant])
    return database


ALLOCATE = """
    INSERT INTO allocations (node_id, gpu, job_id, generation, hold, release_revision)
    SELECT n.id, {gpu}, j.id, 1, '{hold}', {revision} FROM nodes n, jobs j
    WHERE n.name = 'a100-0' AND j.name = 'b'
"""


@pytest.mark.parametrize(("hold", "revision"), [("held", "NULL"), ("releasing", "1")])
def test_a_gpu_cannot_have_two_holders(running: Database, hold: str, revision: str) -> None:
    statement = ALLOCATE.format(gpu=0, hold=hold, revision=revision)
    expect_constraint(running, statement, "uq_allocations_holder")


def test_a_gpu_cannot_have_two_successors(running: Database) -> None:
    reserve = ALLOCATE.format(gpu=0, hold="reserved", revision="NULL")
    running.write(lambda c: c.execute(sa.text(reserve)))
    expect_constraint(running, reserve.replace("1, '", "2, '"), "uq_allocations_successor")


def test_a_gpu_that_does_not_exist_cannot_be_allocated(running: Database) -> None:
    statement = ALLOCATE.format(gpu=4, hold="reserved", revision="NULL")
    expect_constraint(running, statement, "fk_allocations_node_id_gpu")


def test_the_database_knows_exactly_the_transitions_of_the_lifecycle(running: Database) -> None:
    legal = next_states()
    with running.engine.connect() as connection:
        for before in JobState:
            for after in JobState:
                connection.rollback()
                connection.execute(sa.text("SET session_replication_role = replica"))
                jump = sa.text("UPDATE jobs SET state = :state WHERE name = 'b'")
                cell = sa.text("""
                    UPDATE jobs b SET state = CAST(:state AS text), cell_type_id = a.cell_type_id,
                        cell_gpus = 1, cell_degree = 1, cell_plan_id = a.cell_plan_id,
                        cell_rate = 1, leader_id = a.leader_id, since_at = now()
                    FROM jobs a WHERE a.name = 'a' AND b.name = 'b'
                """)
                clear = sa.text("""
                    UPDATE jobs SET state = :state, cell_type_id = NULL, cell_gpus = NULL,
                        cell_degree = NULL, cell_plan_id = NULL, cell_rate = NULL, since_at = NULL
                    WHERE name = 'b'
                """)
                put = cell if before in ("starting", "running") else jump
                connection.execute(put, {"state": before})
                connection.execute(sa.text("SET session_replication_role = origin"))
                put = cell if after in ("starting", "running") else clear
                if after is before or after in legal[before]:
                    connection.execute(put, {"state": after})
                else:
                    with pytest.raises(sa.exc.IntegrityError, match="cannot become"):
                        connection.execute(put, {"state": after})
        connection.rollback()


def test_an_ended_job_cannot_own_gpus(running: Database) -> None:
    statement = """
        UPDATE jobs SET state = 'succeeded', cell_type_id = NULL, cell_gpus = NULL,
            cell_degree = NULL, cell_plan_id = NULL, cell_rate = NULL, since_at = NULL
        WHERE name = 'a'
    """
    expect_constraint(running, statement, "cannot own GPUs")


@pytest.mark.parametrize(
    ("change", "constraint"),
    [
        ("jobs SET state = 'lost'", "ck_jobs_state|cannot become"),
        ("jobs SET iterations_done = -1", "ck_jobs_progress"),
        ("jobs SET iterations_done = 'NaN'", "ck_jobs_progress"),
        ("jobs SET weight = 'NaN'", "ck_jobs_weight"),
        ("jobs SET restart_s = -1", "ck_jobs_restart"),
        ("jobs SET requested_gpus = 0", "ck_jobs_positive"),
        ("jobs SET iterations = 0", "ck_jobs_positive"),
        ("jobs SET max_retries = -1", "ck_jobs_counts"),
        ("jobs SET deadline_s = 'NaN'", "ck_jobs_deadline"),
        ("jobs SET cell_gpus = NULL WHERE name = 'a'", "ck_jobs_cell"),
        ("jobs SET cell_gpus = 1 WHERE name = 'b'", "ck_jobs_cell"),
        ("estimates SET iter_time_s = 0", "ck_estimates_iter_time"),
        ("estimates SET iter_time_s = 'NaN'", "ck_estimates_iter_time"),
        ("estimates SET nodes = gpus + 1", "ck_estimates_shape"),
        ("estimates SET sd = -0.1", "ck_estimates_sd"),
        ("estimates SET sd = 'NaN'", "ck_estimates_sd"),
        ("gpu_types SET dollars_per_hour = 'Infinity'", "ck_gpu_types_dollars"),
        ("nodes SET gpus = 65", "ck_nodes_gpus"),
        ("gpu_types SET memory_bytes = 0", "ck_gpu_types_memory"),
        ("gpu_types SET watts = 'NaN'", "ck_gpu_types_watts"),
        ("jobs SET pinned_gpu_type = true", "ck_jobs_pinned_gpu_type"),
        ("jobs SET min_gpus = requested_gpus + 1", "ck_jobs_gpu_bounds"),
        ("jobs SET requested_gpus = 2, max_gpus = 1", "ck_jobs_gpu_bounds"),
        ("jobs SET since_at = NULL WHERE name = 'a'", "ck_jobs_since"),
        ("jobs SET since_at = now() WHERE name = 'b'", "ck_jobs_since"),
        ("jobs SET service_gpu_s = -1", "ck_jobs_service"),
        ("jobs SET service_gpu_s = 'NaN'", "ck_jobs_service"),
        ("jobs SET schedule = '{}'", "ck_jobs_schedule"),
        ("jobs SET schedule = '[1]'", "ck_jobs_schedule"),
        ("jobs SET opportunistic = true WHERE name = 'b'", "ck_jobs_opportunistic"),
        ("jobs SET start_by_s = 1 WHERE name = 'a'", "ck_jobs_start"),
        ("jobs SET planned_start = '{\"nodes\": {}}' WHERE name = 'a'", "ck_jobs_start"),
        ("jobs SET planned_start = '{\"nodes\": []}' WHERE name = 'b'", "ck_jobs_planned_start"),
        ("jobs SET start_by_s = 'Infinity' WHERE name = 'b'", "ck_jobs_start_by"),
        ("jobs SET rejection = '{}'", "ck_jobs_rejection"),
        ("jobs SET runtime = ''", "ck_jobs_launch"),
        ("jobs SET launch = '[]'", "ck_jobs_launch"),
        ("tenants SET borrow_gpus = -2", "ck_tenants_borrow"),
        ("tenants SET weight = 'NaN'", "ck_tenants_weight"),
        ("quotas SET gpus = -1", "ck_quotas_gpus"),
        ("quotas SET gpu_type_id = NULL", "uq_quotas_tenant_id"),
        ("quotas SET gpu_type_id = (SELECT max(id) FROM gpu_types)", "uq_quotas_tenant_id"),
        ("allocations SET hold = 'borrowed'", "ck_allocations_hold"),
        ("allocations SET release_revision = 1", "ck_allocations_release"),
    ],
)
def test_the_database_refuses_impossible_values(
    running: Database, change: str, constraint: str
) -> None:
    expect_constraint(running, f"UPDATE {change}", constraint)
