"""Planned and promised starts of waiting jobs in PostgreSQL."""

from __future__ import annotations

import math

import pytest
import sqlalchemy as sa

from tessera.db.clusters.deletion import delete_nodes
from tessera.db.jobs.job_changes import update_job
from tessera.db.schema.engine import Database
from tessera.db.store.store import Store
from tessera.formulation.answer.decisions import Decision, DecisionKind
from tessera.formulation.job.lifecycle import JobEvent, JobState
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
from tests.support.waiting import until

A0, A1 = "a100-0", "a100-1"
NARROW = a_planned_start(start_s=3e9 + 1 / 3, end_s=3e9 + 2 / 3)
WIDE = a_planned_start(start_s=4e9, end_s=math.inf, nodes=((A0, 3), (A1, 4)))
PROMISES = {"a": 3e9 + 1 / 3, "b": 4e9, "c": 5e9}


@pytest.fixture
def planning_store(store: Store) -> Store:
    """Return a store where a and b have planned starts, and a, b and c promised ones. d has none."""
    a_cluster(store, nodes=2, gpus=4)
    submit(store, *(a_spec(name) for name in "abcd"))
    snapshot = store.snapshot(C)
    plan = plan_of(snapshot, PROMISES, a=NARROW, b=WIDE)
    commit(store, snapshot, *(wait(snapshot, name) for name in "abcd"), plan=plan)
    return store


def starts(store: Store) -> dict[str, tuple[bool, float]]:
    """Return whether each job has a planned start, and its promised one, where it has either."""
    records = (job(store, name) for name in "abcd")
    starts_by_name = {r.spec.name: (r.planned_start is not None, r.start_by_s) for r in records}
    return {name: start for name, start in starts_by_name.items() if start != (False, math.inf)}


def decide_to_wait(store: Store, *decisions: Decision, **promises: float) -> RoundRecord:
    """Commit a round that plans nothing and promises these starts. All other jobs wait."""
    snapshot = store.snapshot(C)
    jobs = {d.job for d in decisions}
    waits = [wait(snapshot, n) for i, n in enumerate(snapshot.jobs.name) if i not in jobs]
    return commit(store, snapshot, *decisions, *waits, plan=plan_of(snapshot, promises))


def versions(database: Database) -> dict[str, int]:
    """Return the transaction that wrote the row of each job."""
    with database.read() as connection:
        rows = connection.execute(sa.text("SELECT name, xmin::text::bigint FROM jobs"))
        return {name: writer for name, writer in rows}


def test_a_planned_start_asks_for_a_round_at_its_time_and_a_late_one_for_none(
    planning_store: Store,
) -> None:
    snapshot = planning_store.snapshot(C)
    outlook = planning_store.outlooks([C])[C]
    assert outlook.start_in_s == pytest.approx(NARROW.start_s - snapshot.now_s, abs=60.0)
    assert (outlook.event_in_s, outlook.promises_due_in_s) == (math.inf, math.inf)
    late_start = a_planned_start(start_s=snapshot.now_s - 5.0, end_s=math.inf)
    commit(planning_store, snapshot, wait(snapshot, "a"), plan=plan_of(snapshot, {}, a=late_start))
    assert planning_store.outlooks([C])[C].start_in_s == pytest.approx(
        4e9 - snapshot.now_s, abs=60.0
    )


def test_a_start_that_comes_while_its_round_is_committed_asks_for_another_round(
    planning_store: Store,
) -> None:
    snapshot = planning_store.snapshot(C)
    due_start = a_planned_start(start_s=snapshot.now_s + 0.002, end_s=math.inf)
    until(lambda: planning_store.snapshot(C).now_s > due_start.start_s, "the start has come")
    commit(planning_store, snapshot, wait(snapshot, "a"), plan=plan_of(snapshot, {}, a=due_start))
    assert planning_store.outlooks([C])[C].start_in_s == 0
    snapshot = planning_store.snapshot(C)
    commit(planning_store, snapshot, wait(snapshot, "a"), plan=plan_of(snapshot, {}, a=due_start))
    assert planning_store.outlooks([C])[C].start_in_s > 1e6


def test_a_round_writes_only_the_rows_of_jobs_whose_start_changed(
    planning_store: Store, database: Database
) -> None:
    old, snapshot = versions(database), planning_store.snapshot(C)
    earlier = a_planned_start(start_s=3.5e9, end_s=math.inf, nodes=WIDE.nodes)
    plan = plan_of(snapshot, PROMISES | {"d": 6e9}, a=NARROW, b=earlier)
    commit(planning_store, snapshot, *(wait(snapshot, name) for name in "abcd"), plan=plan)
    new = versions(database)
    assert {name for name in new if new[name] != old[name]} == {"b", "d"}
    assert job(planning_store, "b").planned_start == earlier
    assert starts(planning_store)["d"] == (False, 6e9)


def test_a_refused_round_leaves_all_starts_as_they_are(planning_store: Store) -> None:
    snapshot, old = planning_store.snapshot(C), starts(planning_store)
    refusal = a_summary(snapshot, outcome="refused", verified=False)
    planning_store.commit(a_round(snapshot, summary=refusal, plan=plan_of(snapshot, {})))
    assert starts(planning_store) == old


def test_a_round_does_not_touch_the_start_of_a_job_that_changed_meanwhile(
    planning_store: Store,
) -> None:
    snapshot = planning_store.snapshot(C)
    planning_store.change(update_job, C, a_spec("a", weight=2.0), ["weight"], None)
    apply_event(planning_store, "c", JobEvent.HOLD)
    plan = plan_of(snapshot, dict.fromkeys("abcd", 9e9))
    record = commit(planning_store, snapshot, *(wait(snapshot, name) for name in "abcd"), plan=plan)
    assert [d.applied for d in record.decisions] == [False, True, False, True]
    assert starts(planning_store) == {
        "a": (True, PROMISES["a"]),
        "b": (False, 9e9),
        "d": (False, 9e9),
    }


@pytest.mark.parametrize("event", [JobEvent.HOLD, JobEvent.CANCEL])
def test_a_job_that_is_held_or_cancelled_has_no_start_any_more(
    planning_store: Store, event: JobEvent
) -> None:
    apply_event(planning_store, "a", event)
    assert starts(planning_store).keys() == {"b", "c"}
    if event is JobEvent.HOLD:
        apply_event(planning_store, "a", JobEvent.RELEASE)
        assert starts(planning_store).keys() == {"b", "c"}
    assert planning_store.snapshot(C).planned_starts.start_s.tolist() == [4e9]


def test_a_job_that_failed_has_no_start_before_the_next_round(
    planning_store: Store, database: Database
) -> None:
    run(planning_store, a=[(A0, [0])])
    fail(planning_store, "a")
    end_back_off(database)
    assert job(planning_store, "a").state is JobState.QUEUED
    assert starts(planning_store).keys() == {"b", "c"}
    decide_to_wait(planning_store, a=9e9)
    assert starts(planning_store) == {"a": (False, 9e9)}


def test_a_suspended_job_keeps_its_start_while_its_gang_leaves(
    planning_store: Store,
) -> None:
    run(planning_store, a=[(A0, [0])])
    snapshot = planning_store.snapshot(C)
    decision = wait(snapshot, "a")._replace(kind=DecisionKind.SUSPEND)
    plan = plan_of(snapshot, {"a": 3e9}, a=NARROW)
    commit(planning_store, snapshot, decision, plan=plan)
    assert job(planning_store, "a").state is JobState.STOPPING
    assert planning_store.snapshot(C).planned_starts.job.tolist() == [0, 1]
    agents_report(planning_store)
    assert job(planning_store, "a").state is JobState.QUEUED
    assert starts(planning_store)["a"] == (True, 3e9)


@pytest.mark.parametrize(
    ("change", "keeps"),
    [
        ({"weight": 3.0, "labels": {"k": "v"}}, True),
        ({"deadline_s": 4e9}, True),
        ({"preemptible": True}, True),
        ({"iterations": 999, "max_gpus": 0}, True),
        ({"iterations": 1001}, False),
        ({"priority": 2}, False),
        ({"tenant": "t"}, False),
        ({"min_gpus": 1}, False),
        ({"avoid_nodes": (A1,)}, False),
        ({"allowed_gpu_types": ("a100",)}, False),
    ],
)
def test_a_job_that_asks_for_more_or_is_served_later_has_no_start_any_more(
    planning_store: Store, change: dict[str, object], keeps: bool
) -> None:
    planning_store.change(update_job, C, a_spec("a", **change), list(change), None)
    assert ("a" in starts(planning_store)) is keeps
    assert starts(planning_store).keys() >= {"b", "c"}


def test_a_start_on_a_deleted_node_is_not_reserved_but_stays_promised(
    planning_store: Store,
) -> None:
    snapshot = planning_store.snapshot(C)
    planning_store.change(delete_nodes, C, [A1], {}, allow_missing=False)
    assert starts(planning_store) == {
        "a": (True, PROMISES["a"]),
        "b": (False, 4e9),
        "c": (False, 5e9),
    }
    assert planning_store.snapshot(C).planned_starts.job.tolist() == [0]
    deleted_start = a_planned_start(start_s=5e9, end_s=6e9, nodes=((A1, 1),))
    plan = plan_of(snapshot, PROMISES, a=NARROW, b=WIDE, c=deleted_start)
    commit(planning_store, snapshot, *(wait(snapshot, name) for name in "abcd"), plan=plan)
    assert job(planning_store, "c").planned_start is None


def test_a_plan_is_kept_while_a_planned_start_names_it(
    planning_store: Store, database: Database
) -> None:
    execute(
        database,
        "INSERT INTO plans (cluster_id, name) SELECT id, unnest(ARRAY['p', 'q']) FROM clusters",
    )
    execute(
        database,
        "UPDATE jobs SET planned_start = planned_start || '{\"plan\": \"p\"}' WHERE name = 'a'",
    )
    planning_store.prune_batch(C, Retention())
    with database.read() as connection:
        names = set(connection.execute(sa.text("SELECT name FROM plans")).scalars())
    assert names & {"p", "q"} == {"p"}
    snapshot = planning_store.snapshot(C)
    assert snapshot.plans[snapshot.planned_starts.plan[0]] == "p"


def test_the_next_snapshot_says_which_jobs_may_be_preempted(planning_store: Store) -> None:
    submit(planning_store, a_spec("e", preemptible=True))
    assert planning_store.snapshot(C).jobs.preemptible.tolist() == [False] * 4 + [True]
    planning_store.change(update_job, C, a_spec("e"), ["preemptible"], None)
    assert (job(planning_store, "e").spec.preemptible, job(planning_store, "e").version) == (
        False,
        2,
    )


def test_a_snapshot_says_when_a_job_last_reported_progress(planning_store: Store) -> None:
    """A job trains from its first report on. Before it, there is nothing to say."""

    def progress_s() -> float:
        jobs = planning_store.snapshot(C).jobs
        return float(jobs.progress_s[jobs.name.index("a")])

    idle_snapshot = planning_store.snapshot(C)
    commit(planning_store, idle_snapshot, start(idle_snapshot, "a", [(A0, [0])]))
    assert progress_s() == 0
    agents_report(planning_store)
    ran_s = progress_s()
    assert idle_snapshot.now_s <= ran_s <= planning_store.snapshot(C).now_s
    agents_report(planning_store)
    assert progress_s() == ran_s
    agents_report(planning_store, iterations_done=1.0)
    assert ran_s < progress_s() <= planning_store.snapshot(C).now_s
