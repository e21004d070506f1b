"""The check of stored data finds every broken rule, and reports nothing if no rule is broken."""

from __future__ import annotations

import pytest

from tessera.db.engine import Database
from tessera.db.invariants import (
    INVARIANTS,
    count_long_transactions,
    count_lost_jobs,
    find_broken_rules,
    load_epochs,
    load_silence_s,
)
from tessera.db.store import PostgresStore
from tests.support.stored_cluster import C, a_cluster, a_spec, execute, run, submit

CERTIFICATE = (
    "INSERT INTO agent_certificates"
    " (serial, cluster_id, cluster, agent, nodes, issued_at, expires_at, join_token)"
)

BREAKS = {
    "a GPU has two holders": (
        "DROP INDEX uq_allocations_holder;"
        " INSERT INTO allocations (node_id, gpu, job_id, generation, hold)"
        " SELECT a.node_id, a.gpu, j.id, 1, 'held' FROM allocations a, jobs j"
        " WHERE j.name = 'idle' LIMIT 1"
    ),
    "a GPU has two successors": (
        "DROP INDEX uq_allocations_successor;"
        " INSERT INTO allocations (node_id, gpu, job_id, generation, hold)"
        " SELECT a.node_id, a.gpu, j.id, 9, 'reserved' FROM allocations a, jobs j"
    ),
    "a job owns other GPUs than its Cell has": ("DELETE FROM allocations WHERE gpu = 1"),
    "a job has GPUs of another type than its Cell": (
        "UPDATE nodes SET gpu_type_id = (SELECT id FROM gpu_types WHERE name = 'h100')"
    ),
    "a job that does not run owns GPUs": (
        "INSERT INTO allocations (node_id, gpu, job_id, generation, hold)"
        " SELECT g.node_id, g.gpu, j.id, 1, 'held' FROM gpus g, jobs j"
        " WHERE j.name = 'idle' AND NOT EXISTS"
        " (SELECT FROM allocations a WHERE a.node_id = g.node_id AND a.gpu = g.gpu) LIMIT 1"
    ),
    "an allocation is of a generation to come": "UPDATE jobs SET generation = 0 WHERE name = 'busy'",
    "a job has a gang before its former one is gone": (
        "UPDATE allocations SET hold = 'releasing', release_revision = 1 WHERE gpu = 1"
    ),
    "epochs do not rise with rounds": (
        "ALTER TABLE rounds DROP CONSTRAINT uq_rounds_cluster_id_epoch;"
        " INSERT INTO rounds SELECT cluster_id, number + 1, epoch, created_at, summary, snapshot"
        " FROM rounds"
    ),
    "a round is newer than its cluster": "UPDATE clusters SET epoch = 0",
    "a request was acknowledged without an answer": (
        "INSERT INTO request_ids (id, method, digest) VALUES ('r', 'm', 'd')"
    ),
    "a join token was used too often": (
        "ALTER TABLE join_tokens DROP CONSTRAINT ck_join_tokens_uses;"
        " INSERT INTO join_tokens"
        " (id, secret_hash, cluster_id, nodes, uses, used, created_by, expires_at)"
        " SELECT 'j', sha256(''), id, '{*}', 1, 2, 'ops', now() FROM clusters"
    ),
    "two tokens that are not revoked have one name": (
        "DROP INDEX uq_tokens_name;"
        " INSERT INTO tokens (id, name, secret_hash, role, created_by)"
        " SELECT id, 'ana', sha256(''), 'viewer', 'ops' FROM unnest('{a,b}'::text[]) AS id"
    ),
    "a certificate is of another cluster than it states": (
        f"{CERTIFICATE} SELECT 'a1', id, 'other', 'agent', '{{n}}', now(), now(), 'j' FROM clusters"
    ),
    "a certificate of a deleted cluster is not revoked": (
        "ALTER TABLE agent_certificates DROP CONSTRAINT ck_agent_certificates_cluster;"
        f" {CERTIFICATE} VALUES ('a1', NULL, 'other', 'agent', '{{n}}', now(), now(), 'j')"
    ),
}


@pytest.fixture
def busy(store: PostgresStore) -> PostgresStore:
    a_cluster(store, types=("a100", "h100"), nodes=1)
    submit(store, a_spec("busy", requested_gpus=2), a_spec("idle"))
    run(store, busy=[("a100-0", (0, 1))])
    return store


def test_data_without_broken_rules_is_reported_as_sound(
    busy: PostgresStore, database: Database
) -> None:
    assert find_broken_rules(database) == []
    assert load_epochs(database)[C] == 1
    assert count_lost_jobs(database, C) == 0


def test_every_rule_has_a_test_case() -> None:
    assert BREAKS.keys() == INVARIANTS.keys()


@pytest.mark.parametrize("rule", BREAKS)
def test_a_broken_rule_is_found(busy: PostgresStore, database: Database, rule: str) -> None:
    execute(database, BREAKS[rule])
    assert any(found.startswith(rule) for found in find_broken_rules(database))


def test_the_silence_of_each_agent_is_loaded(busy: PostgresStore, database: Database) -> None:
    execute(
        database,
        "UPDATE agents SET heard_at = now() - interval '1 hour' WHERE name = 'agent-h100-0'",
    )
    silence_s = load_silence_s(database, C)
    assert silence_s.keys() == {"agent-a100-0", "agent-h100-0"}
    assert silence_s["agent-h100-0"] >= 3600.0 > silence_s["agent-a100-0"]


def test_jobs_lost_with_a_silent_node_are_counted(busy: PostgresStore, database: Database) -> None:
    execute(database, "UPDATE agents SET heard_at = now() - interval '1 hour'")
    assert busy.expire(C) == ["busy"]
    assert count_lost_jobs(database, C) == 1


def test_a_transaction_that_stays_open_is_counted(database: Database) -> None:
    assert count_long_transactions(database, 0.0) == 0
    with database.engine.begin() as connection:
        connection.exec_driver_sql("SELECT 1")
        assert count_long_transactions(database, 0.0) == 1
