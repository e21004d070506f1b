"""Retention: `prune` names its database, and servers delete old rows in small batches."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import pytest
import sqlalchemy as sa
from typer.testing import CliRunner, Result

from tessera.db.clusters.policies import newest_policy, set_policy
from tessera.db.rounds.rounds import list_rounds
from tessera.db.schema.engine import Database, connect_database
from tessera.db.store.reads import get_job, job_history, list_jobs
from tessera.db.store.store import Connection, Store
from tessera.db.upkeep import prune
from tessera.formulation.base.errors import InvalidInput, NoLongerKept, NotFound
from tessera.formulation.job.lifecycle import JobEvent
from tessera.formulation.records.store import Request, Retention
from tessera.service.cli.main import app
from tessera.service.server.settings.config import Config
from tessera.service.server.settings.sources import load_config
from tessera.service.server.tasks.retention import Pruner
from tessera.service.server.wiring import run_server
from tests.support.access import add_audit_entries
from tests.support.patience import PATIENCE_S
from tests.support.stored_cluster import (
    C,
    a_cluster,
    a_spec,
    agent_reports,
    agents_report,
    apply_event,
    commit,
    execute,
    run,
    submit,
    wait,
)


def run_tessera(*arguments: str, **environment: str) -> Result:
    return CliRunner().invoke(app, arguments, env=environment)


def url_of(database: Database) -> str:
    return database.url.replace("+psycopg2", "", 1)


def store_old_data(store: Store, database: Database, jobs: int = 3, rounds: int = 5) -> None:
    """Store ended jobs, a request and rounds that are two months old."""
    a_cluster(store)
    submit(store, a_spec("stays"), *(a_spec(f"old-{i}") for i in range(jobs)))
    for i in range(jobs):
        apply_event(store, f"old-{i}", JobEvent.CANCEL)
    store.write(Request(id="r", method="m", digest="d"), lambda w: b"x")
    for _ in range(rounds):
        snapshot = store.snapshot(C)
        commit(store, snapshot, wait(snapshot, "stays"))
    for column in (
        "jobs SET ended_at = ended_at",
        "rounds SET created_at = created_at",
        "request_ids SET created_at = created_at",
    ):
        execute(database, f"UPDATE {column} - interval '60 days'")


OLD = {"request_ids": 1, "rounds": 2, "jobs": 3}


def counts(output: str) -> dict[str, int]:
    return {kind: int(n) for kind, n in (row.split() for row in output.splitlines()) if int(n)}


def test_a_dry_run_names_the_database_and_counts_without_deleting(
    store: Store, database: Database
) -> None:
    store_old_data(store, database, rounds=102)
    names = ("REQUESTS_DAYS", "ROUNDS_DAYS", "ROUNDS", "SNAPSHOTS", "JOBS_DAYS", "AUDIT_DAYS")
    forever = load_config(None, {f"TESSERA_RETAIN_{name}": "0" for name in names})
    assert not any(store.prune_batch(C, forever.retention()).values())
    url = url_of(database).replace("postgres:@", "postgres:secret@")
    for _ in range(2):
        done = run_tessera("prune", "--dry-run", TESSERA_DATABASE_URL=url)
        assert done.exit_code == 0
        assert counts(done.stdout) == OLD
        assert f"would delete from postgresql://postgres:***@/{database.engine.url.database}" in (
            done.stderr
        )
        assert "secret" not in done.output
    done = run_tessera("prune", TESSERA_DATABASE_URL=url)
    assert (done.exit_code, counts(done.stdout)) == (0, OLD)
    assert "deleting from postgresql://" in done.stderr
    assert len(store.read(list_jobs, C, [], 0, 9)[0]) == 1


def test_prune_keeps_the_audit_log_for_as_long_as_its_setting_says(
    store: Store, database: Database
) -> None:
    a_cluster(store)
    for days in (1, 60, 400):
        add_audit_entries(database, days)
    settings = {"TESSERA_DATABASE_URL": url_of(database)}
    done = run_tessera("prune", "--older-than", "0s", **settings)
    assert (done.exit_code, counts(done.stdout)) == (0, {"audit_log": 1})
    done = run_tessera("prune", **settings, TESSERA_RETAIN_AUDIT_DAYS="30")
    assert counts(done.stdout) == {"audit_log": 1}


@pytest.mark.parametrize(
    ("arguments", "url", "said"),
    [
        (("prune",), "", "set TESSERA_DATABASE_URL"),
        (("prune", "--dry-run"), "", "--embedded"),
        (("prune", "--embedded"), "", "there is no embedded database"),
        (("prune", "--embedded"), "postgresql://u:secret@h/d", "postgresql://u:***@h/d"),
    ],
)
def test_prune_demands_one_explicit_database_that_exists(
    tmp_path: Path, arguments: tuple[str, ...], url: str, said: str
) -> None:
    settings = {"TESSERA_DATABASE_DIRECTORY": str(tmp_path / "pg")}
    done = run_tessera(*arguments, **settings | ({"TESSERA_DATABASE_URL": url} if url else {}))
    assert (done.exit_code, said in done.stderr) == (2, True)
    assert not (tmp_path / "pg").exists()


async def test_a_server_deletes_what_exceeds_its_retention_settings(
    store: Store, database: Database
) -> None:
    store_old_data(store, database, rounds=102)
    config = Config(listen="127.0.0.1:0", database_url=database.url, period_s=0.0)
    async with run_server(config), asyncio.timeout(PATIENCE_S):
        while len((await asyncio.to_thread(store.read, list_jobs, C, [], 0, 9))[0]) > 1:
            await asyncio.sleep(0.02)
        while len(await asyncio.to_thread(store.read, list_rounds, C, 0, 200)) > 100:
            await asyncio.sleep(0.02)
    assert store.read(get_job, C, "stays").reason is not None
    assert not any(store.count_old(30 * 86_400.0, 100).values())


def test_a_pass_ends_when_the_server_stops_and_pauses_between_batches(
    store: Store, database: Database, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(prune, "BATCH_ROWS", 1)
    store_old_data(store, database)
    pauses: list[float] = []
    pruner = Pruner(store, Retention(jobs_s=86_400.0), pauses.append)
    assert pruner.prune(C, lambda: len(pauses) == 1)["jobs"] == 1
    assert pruner.prune(C, lambda: False)["jobs"] == 2
    assert len(pauses) == 3


def test_a_job_is_not_pruned_before_its_gpus_are_free(store: Store, database: Database) -> None:
    a_cluster(store)
    submit(store, a_spec("a"))
    run(store, a=[("a100-0", [0])])
    agent_reports(store, "agent-a100-0", phase="succeeded")
    execute(database, "UPDATE jobs SET ended_at = ended_at - interval '1 day'")
    assert store.prune(0.0, 0)["jobs"] == 0
    agents_report(store)
    assert store.prune(0.0, 0)["jobs"] == 1


def test_the_latest_history_of_a_live_job_is_kept(store: Store, database: Database) -> None:
    a_cluster(store)
    submit(store, a_spec("long"), a_spec("short"))
    for name, times in (("long", 30), ("short", 2)):
        for _ in range(times):
            apply_event(store, name, JobEvent.HOLD)
            apply_event(store, name, JobEvent.RELEASE)
    before = store.read(job_history, C, "long")
    execute(database, "UPDATE job_history SET at = at - interval '1 day'")
    assert store.prune(3600.0, 0)["job_history"] == 10
    history = store.read(job_history, C, "long")
    assert [(e.event, e.state) for e in history] == [(e.event, e.state) for e in before[-50:]]
    assert len(store.read(job_history, C, "short")) == 4


def test_a_workload_is_not_deleted_during_a_submission_that_uses_it(
    store: Store, database: Database
) -> None:
    """Once, a workload was deleted between two statements of a submission, which then failed."""
    a_cluster(store)
    submit(store, a_spec("a"))
    apply_event(store, "a", JobEvent.CANCEL)
    execute(database, "DELETE FROM jobs; DELETE FROM estimates")
    other = connect_database(database.url)

    def submit_while_pruning(connection: Connection) -> bytes:
        ids = "SELECT id FROM workloads FOR KEY SHARE"
        connection.execute(sa.text(ids)).all()
        assert Store(other).prune_batch(C, Retention())["workloads"] == 0
        return b""

    store.write(None, submit_while_pruning)
    assert Store(other).prune_batch(C, Retention())["workloads"] == 1
    submit(store, a_spec("a"))
    other.engine.dispose()


def test_retention_settings_are_checked() -> None:
    settings: dict[str, Any] = {
        "retain_jobs_days": -1.0,
        "retain_rounds_days": 1e9,
        "retain_requests_days": float("nan"),
        "retain_snapshots": 2**40,
    }
    for setting, value in settings.items():
        with pytest.raises(InvalidInput, match=setting):
            Config(**{setting: value})


def test_a_round_that_is_no_longer_kept_is_told_from_one_that_never_was(
    store: Store, database: Database
) -> None:
    store_old_data(store, database, jobs=1)
    store.prune_batch(C, Retention(rounds_s=86_400.0, least_rounds=1))
    with pytest.raises(NoLongerKept, match=r"rounds/3 is no longer kept; .* retain_rounds_days"):
        store.get_round(C, 3)
    with pytest.raises(NotFound, match="rounds/900 does not exist"):
        store.get_round(C, 900)


def test_old_policies_are_deleted_but_the_latest(store: Store, database: Database) -> None:
    a_cluster(store)
    for _ in range(prune.KEEP_POLICIES + 3):
        store.change(set_policy, C, {}, set_by="", message="", version=None)
    execute(database, "UPDATE policies SET set_at = set_at - interval '60 days'")
    assert store.prune_batch(C, Retention(audit_s=86_400.0))["policies"] == 3
    newest = store.read(newest_policy, C)
    assert newest is not None
    assert newest.version == prune.KEEP_POLICIES + 3
