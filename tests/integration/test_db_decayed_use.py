"""The decayed use of tenants in the database: exact for stints, and by day once retention was there."""

from __future__ import annotations

import math

import pytest

from tessera.db.engine import Database
from tessera.db.store import PostgresStore
from tessera.formulation.decayed_use import CPU_CORES, HOST_MEMORY
from tessera.formulation.lifecycle import JobEvent
from tessera.formulation.records.store import Retention
from tessera.formulation.records.usage import UsageQuery
from tessera.formulation.snapshot import Snapshot
from tests.support.stored_cluster import (
    C,
    a_cluster,
    a_spec,
    apply_event,
    commit,
    execute,
    start,
    submit,
)

HOUR_S = 3600.0
DAY_S = 86_400.0


def add_stint(
    database: Database, job: str, began_h: float, ended_h: float, gpu_type: str = "a100"
) -> None:
    """Add a stint of 4 GPUs, 8 cores and 100 bytes, which began and ended these hours ago."""
    execute(
        database,
        "INSERT INTO stints (job_id, gpu_type, gpus, cpus, host_bytes, effective_gpus, began_at, ended_at,"
        f" ending) SELECT id, '{gpu_type}', 4, 8, 100, 2, now() - interval '{began_h} hours',"
        f" now() - interval '{ended_h} hours', 'suspend' FROM jobs WHERE name = '{job}'",
    )


def used(snapshot: Snapshot) -> dict[tuple[str, int], float]:
    uses = snapshot.uses
    keys = zip(uses.tenant, uses.resource.tolist(), strict=True)
    return dict(zip(keys, uses.amount.tolist(), strict=True))


def part_of_past(began_h: float, ended_h: float, half_life_h: float) -> float:
    return float(0.5 ** (ended_h / half_life_h) - 0.5 ** (began_h / half_life_h))


def test_stints_decay_by_their_age_and_the_half_life(
    store: PostgresStore, database: Database
) -> None:
    a_cluster(store)
    submit(store, a_spec("a", tenant="nlp"), a_spec("b", tenant="nlp"), a_spec("c"))
    for job, began_h, ended_h in (("a", 9, 7), ("a", 7, 2), ("b", 3, 1), ("c", 50, 49)):
        add_stint(database, job, began_h, ended_h)
    add_stint(database, "c", 2, 1, gpu_type="retired")
    for half_life_h in (1.0, 24.0):
        found = used(store.snapshot(C, half_life_h * HOUR_S))
        spans = [(9, 7), (7, 2), (3, 1)]
        nlp = sum(part_of_past(*span, half_life_h) for span in spans)
        other = part_of_past(50, 49, half_life_h) if half_life_h > 2 else 0.0
        cores = part_of_past(2, 1, half_life_h)  # those of a type that is gone count
        assert found["nlp", 0] == pytest.approx(4 * nlp, rel=1e-4)
        assert found["nlp", CPU_CORES] == pytest.approx(8 * nlp, rel=1e-4)
        assert found["nlp", HOST_MEMORY] == pytest.approx(100 * nlp, rel=1e-4)
        assert found.get(("", 0), 0.0) == pytest.approx(4 * other, rel=1e-4)
        assert found["", CPU_CORES] == pytest.approx(8 * (other + cores), rel=1e-4)


def test_use_is_read_only_if_it_is_asked_for_and_never_underflows(
    store: PostgresStore, database: Database
) -> None:
    a_cluster(store)
    submit(store, a_spec("a"))
    add_stint(database, "a", 10_000, 1_000)
    assert (len(store.snapshot(C).uses), store.snapshot(C).use_half_life_s) == (0, 0.0)
    assert len(store.snapshot(C, 1.0).uses) == 0
    assert store.snapshot(C, 1e9).uses.amount.tolist() == pytest.approx(
        [100 * (p := part_of_past(10_000, 1_000, 1e9 / HOUR_S)), 8 * p, 4 * p]
    )


def test_a_stint_that_lasts_counts_until_now(store: PostgresStore, database: Database) -> None:
    a_cluster(store)
    submit(store, a_spec("a", tenant="nlp", requested_gpus=2))
    snapshot = store.snapshot(C)
    commit(store, snapshot, start(snapshot, "a", [("a100-0", (0, 1))]))
    execute(database, "UPDATE jobs SET since_at = since_at - interval '1 day'")
    assert used(store.snapshot(C, DAY_S))["nlp", 0] == pytest.approx(1.0, rel=1e-3)


def test_retention_keeps_the_use_of_days_as_if_it_was_even(
    store: PostgresStore, database: Database
) -> None:
    a_cluster(store)
    submit(store, a_spec("a", tenant="nlp"))
    add_stint(database, "a", 24 * 9, 24 * 2)
    apply_event(store, "a", JobEvent.CANCEL)
    before = used(store.snapshot(C, 2 * DAY_S))
    assert store.prune_batch(C, Retention(jobs_s=0.0))["jobs"] == 1
    after = used(store.snapshot(C, 2 * DAY_S))
    assert after.keys() == before.keys()
    # Only the first and the last day are uneven, by at most the decay of a day.
    for key, amount in before.items():
        assert after[key] == pytest.approx(amount, rel=0.15)
    # With a half-life far beyond the history, every second counts the same wherever it was.
    half_life_s = 1e5 * DAY_S
    gpu_s = used(store.snapshot(C, half_life_s))["nlp", 0] * half_life_s / math.log(2.0)
    assert gpu_s == pytest.approx(4 * 7 * DAY_S, rel=1e-3)
    (total,) = store.sum_usage(C, UsageQuery(from_s=0.0, to_s=4e9)).rows
    assert total.gpu_s == pytest.approx(4 * 7 * DAY_S)
