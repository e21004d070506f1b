"""Planned and promised starts of waiting jobs in PostgreSQL."""

from __future__ import annotations

import math

import pytest
import sqlalchemy as sa

from tessera.db.engine import Database
from tessera.db.store import PostgresStore
from tessera.formulation.decisions import Decision, DecisionKind
from tessera.formulation.lifecycle import JobEvent, JobState
from tessera.formulation.records.rounds import RoundRecord
from tessera.formulation.records.store import Retention
from tests.support.stored_cluster import (
    C,
    a_cluster,
    a_planned_start,
    a_round,
    a_spec,
    a_summary,
    agents_report,
    apply_event,
    commit,
    do,
    end_back_off,
    execute,
    fail,
    job,
    plan_of,
    run,
    start,
    submit,
    wait,
)

A0, A1 = "a100-0", "a100-1"
SOON = a_planned_start(start_s=3e9 + 1 / 3, end_s=3e9 + 2 / 3)
WIDE = a_planned_start(start_s=4e9, end_s=math.inf, nodes=((A0, 3), (A1, 4)))
PROMISES = {"a": 3e9 + 1 / 3, "b": 4e9, "c": 5e9}


@pytest.fixture
def planned(store: PostgresStore) -> PostgresStore:
    """Return a store where a and b have planned starts, and a, b and c promised ones. d has none."""
    a_cluster(store, nodes=2, gpus=4)
    submit(store, *(a_spec(name) for name in "abcd"))
    snapshot = store.snapshot(C)
    plan = plan_of(snapshot, PROMISES, a=SOON, b=WIDE)
    commit(store, snapshot, *(wait(snapshot, name) for name in "abcd"), plan=plan)
    return store


def starts(store: PostgresStore) -> dict[str, tuple[bool, float]]:
    """Return whether each job has a planned start, and its promised one, where it has either."""
    records = (job(store, name) for name in "abcd")
    found = {r.spec.name: (r.planned_start is not None, r.start_by_s) for r in records}
    return {name: own for name, own in found.items() if own != (False, math.inf)}


def decide_to_wait(store: PostgresStore, *decisions: Decision, **promises: float) -> RoundRecord:
    """Commit a round that plans nothing and promises these starts. All other jobs wait."""
    snapshot = store.snapshot(C)
    decided = {d.job for d in decisions}
    waits = [wait(snapshot, n) for i, n in enumerate(snapshot.jobs.name) if i not in decided]
    return commit(store, snapshot, *decisions, *waits, plan=plan_of(snapshot, promises))


def versions(database: Database) -> dict[str, int]:
    """Return the transaction that wrote the row of each job."""
    with database.read() as connection:
        rows = connection.execute(sa.text("SELECT name, xmin::text::bigint FROM jobs"))
        return {name: writer for name, writer in rows}


def test_starts_read_back_as_the_round_has_planned_them(planned: PostgresStore) -> None:
    a, b, c, d = (job(planned, name) for name in "abcd")
    assert (a.planned_start, b.planned_start) == (SOON, WIDE)
    assert (c.planned_start, d.planned_start) == (None, None)
    assert [r.start_by_s for r in (a, b, c, d)] == [*PROMISES.values(), math.inf]
    assert {r.version for r in (a, b, c, d)} == {1}


def test_a_round_writes_only_the_rows_of_jobs_whose_start_changed(
    planned: PostgresStore, database: Database
) -> None:
    before, snapshot = versions(database), planned.snapshot(C)
    earlier = a_planned_start(start_s=3.5e9, end_s=math.inf, nodes=WIDE.nodes)
    plan = plan_of(snapshot, PROMISES | {"d": 6e9}, a=SOON, b=earlier)
    commit(planned, snapshot, *(wait(snapshot, name) for name in "abcd"), plan=plan)
    after = versions(database)
    assert {name for name in after if after[name] != before[name]} == {"b", "d"}
    assert job(planned, "b").planned_start == earlier
    assert starts(planned)["d"] == (False, 6e9)


def test_a_refused_round_leaves_all_starts_as_they_are(planned: PostgresStore) -> None:
    snapshot, before = planned.snapshot(C), starts(planned)
    refused = a_summary(snapshot, outcome="refused", verified=False)
    planned.commit(a_round(snapshot, summary=refused, plan=plan_of(snapshot, {})))
    assert starts(planned) == before


def test_a_round_does_not_touch_the_start_of_a_job_that_changed_meanwhile(
    planned: PostgresStore,
) -> None:
    snapshot = planned.snapshot(C)
    do(planned, lambda w: w.update_job(C, a_spec("a", weight=2.0), ["weight"], None))
    apply_event(planned, "c", JobEvent.HOLD)
    plan = plan_of(snapshot, dict.fromkeys("abcd", 9e9))
    record = commit(planned, snapshot, *(wait(snapshot, name) for name in "abcd"), plan=plan)
    assert [d.applied for d in record.decisions] == [False, True, False, True]
    assert starts(planned) == {"a": (True, PROMISES["a"]), "b": (False, 9e9), "d": (False, 9e9)}


def test_a_job_that_does_not_wait_after_the_round_gets_no_start(planned: PostgresStore) -> None:
    snapshot = planned.snapshot(C)
    started = start(snapshot, "a", [(A0, [0])])
    plan = plan_of(snapshot, dict.fromkeys("abcd", 9e9), a=SOON)
    commit(planned, snapshot, started, plan=plan)  # of the others, nothing is decided
    assert starts(planned) == {"b": (True, 4e9), "c": (False, 5e9)}


@pytest.mark.parametrize("event", [JobEvent.HOLD, JobEvent.CANCEL])
def test_a_job_that_is_held_or_cancelled_has_no_start_any_more(
    planned: PostgresStore, event: JobEvent
) -> None:
    apply_event(planned, "a", event)
    assert starts(planned).keys() == {"b", "c"}
    if event is JobEvent.HOLD:
        apply_event(planned, "a", JobEvent.RELEASE)
        assert starts(planned).keys() == {"b", "c"}
    assert planned.snapshot(C).planned_starts.start_s.tolist() == [4e9]


def test_a_job_that_failed_has_no_start_before_the_next_round(
    planned: PostgresStore, database: Database
) -> None:
    run(planned, a=[(A0, [0])])
    fail(planned, "a")
    end_back_off(database)
    assert job(planned, "a").state is JobState.QUEUED
    assert starts(planned).keys() == {"b", "c"}
    decide_to_wait(planned, a=9e9)
    assert starts(planned) == {"a": (False, 9e9)}


def test_a_suspended_job_keeps_its_start_while_its_gang_leaves(planned: PostgresStore) -> None:
    run(planned, a=[(A0, [0])])
    snapshot = planned.snapshot(C)
    suspended = wait(snapshot, "a")._replace(kind=DecisionKind.SUSPEND)
    plan = plan_of(snapshot, {"a": 3e9}, a=SOON)
    commit(planned, snapshot, suspended, plan=plan)
    assert job(planned, "a").state is JobState.STOPPING
    assert planned.snapshot(C).planned_starts.job.tolist() == [0, 1]
    agents_report(planned)
    assert job(planned, "a").state is JobState.QUEUED
    assert starts(planned)["a"] == (True, 3e9)


@pytest.mark.parametrize(
    ("change", "kept"),
    [
        ({"weight": 3.0, "labels": {"k": "v"}}, True),
        ({"deadline_s": 4e9}, True),
        ({"preemptible": True}, True),
        ({"iterations": 999, "max_gpus": 0}, True),
        ({"iterations": 1001}, False),
        ({"queue": 2}, False),
        ({"tenant": "t"}, False),
        ({"min_gpus": 1}, False),
        ({"avoid_nodes": (A1,)}, False),
        ({"allowed_types": ("a100",)}, False),
    ],
)
def test_a_job_that_asks_for_more_or_is_served_later_has_no_start_any_more(
    planned: PostgresStore, change: dict[str, object], kept: bool
) -> None:
    do(planned, lambda w: w.update_job(C, a_spec("a", **change), list(change), None))
    assert ("a" in starts(planned)) is kept
    assert starts(planned).keys() >= {"b", "c"}


def test_a_start_on_a_deleted_node_is_not_reserved_but_stays_promised(
    planned: PostgresStore,
) -> None:
    snapshot = planned.snapshot(C)
    do(planned, lambda w: w.delete_nodes(C, [A1], {}, allow_missing=False))
    assert starts(planned) == {"a": (True, PROMISES["a"]), "b": (False, 4e9), "c": (False, 5e9)}
    assert planned.snapshot(C).planned_starts.job.tolist() == [0]
    late = a_planned_start(start_s=5e9, end_s=6e9, nodes=((A1, 1),))
    plan = plan_of(snapshot, PROMISES, a=SOON, b=WIDE, c=late)
    commit(planned, snapshot, *(wait(snapshot, name) for name in "abcd"), plan=plan)
    assert job(planned, "c").planned_start is None


def test_a_plan_is_kept_while_a_planned_start_names_it(
    planned: PostgresStore, database: Database
) -> None:
    execute(
        database,
        "INSERT INTO plans (cluster_id, name) SELECT id, unnest(ARRAY['p', 'q']) FROM clusters",
    )
    execute(
        database,
        "UPDATE jobs SET planned_start = planned_start || '{\"plan\": \"p\"}' WHERE name = 'a'",
    )
    planned.prune_batch(C, Retention())
    with database.read() as connection:
        names = set(connection.execute(sa.text("SELECT name FROM plans")).scalars())
    assert names & {"p", "q"} == {"p"}
    snapshot = planned.snapshot(C)
    assert snapshot.plans[snapshot.planned_starts.plan[0]] == "p"


def test_the_next_snapshot_says_which_jobs_may_be_preempted(planned: PostgresStore) -> None:
    submit(planned, a_spec("e", preemptible=True))
    assert planned.snapshot(C).jobs.preemptible.tolist() == [False] * 4 + [True]
    do(planned, lambda w: w.update_job(C, a_spec("e"), ["preemptible"], None))
    assert (job(planned, "e").spec.preemptible, job(planned, "e").version) == (False, 2)
