"""Promised deadlines, rejections, goals and prices: what a round decides apart from GPUs."""

from __future__ import annotations

import math

import pytest

from tessera.db.engine import Database
from tessera.db.store import PostgresStore
from tessera.formulation.decisions import DecisionKind
from tessera.formulation.goals import GoalResult
from tessera.formulation.last_round import NO_PRICES
from tessera.formulation.lifecycle import JobState
from tessera.formulation.snapshot import Snapshot
from tessera.solvers.rounds.plan import RoundOptions
from tests.support.stored_cluster import (
    C,
    a_cluster,
    a_leg,
    a_round,
    a_spec,
    a_summary,
    agent_reports,
    agents_report,
    commit,
    do,
    execute,
    job,
    legs_of,
    run,
    start,
    states,
    submit,
    wait,
)

A0 = "a100-0"


LATE_S = 4e9


@pytest.fixture
def promised(store: PostgresStore) -> PostgresStore:
    """Return a store where the deadlines of a, which runs, and b, which waits, are promised."""
    a_cluster(store, nodes=2, gpus=4)
    submit(store, *(a_spec(name, deadline_s=LATE_S) for name in "abc"))
    snapshot = store.snapshot(C)
    commit(
        store,
        snapshot,
        start(snapshot, "a", [(A0, [0])])._replace(admitted=True),
        wait(snapshot, "b")._replace(admitted=True),
        wait(snapshot, "c"),
        legs=legs_of(snapshot, a=[a_leg()], b=[a_leg(gpus=2), a_leg(start_s=2e9, end_s=math.inf)]),
    )
    return store


def test_a_promise_is_kept_with_the_schedule_that_meets_it(promised: PostgresStore) -> None:
    a, b, c = (job(promised, name) for name in "abc")
    assert (a.admitted, b.admitted, c.admitted) == (True, True, False)
    assert b.certificate == (a_leg(gpus=2), a_leg(start_s=2e9, end_s=math.inf))
    assert (len(a.certificate), c.certificate) == (1, ())
    # Only the start of a raised a version: promises raise none.
    assert (a.version, b.version, c.version) == (2, 1, 1)
    assert [d.admitted for d in promised.get_round(C, 1).decisions] == [True, True, False]


def test_times_of_a_schedule_read_back_exactly(store: PostgresStore) -> None:
    a_cluster(store)
    submit(store, a_spec("a", deadline_s=LATE_S))
    snapshot = store.snapshot(C)
    times = (1763726400.1 + 1 / 3, 1763726400.1 + 2 / 3)
    commit(
        store,
        snapshot,
        wait(snapshot, "a")._replace(admitted=True),
        legs=legs_of(snapshot, a=[a_leg(start_s=times[0], end_s=times[1])]),
    )
    legs = store.snapshot(C).legs
    assert (legs.start_s[0], legs.end_s[0]) == times


def test_a_round_does_not_touch_the_promise_of_a_job_that_changed_meanwhile(
    promised: PostgresStore,
) -> None:
    snapshot = promised.snapshot(C)
    do(promised, lambda w: w.update_job(C, a_spec("b", weight=2.0), ["weight"], None))
    record = commit(
        promised,
        snapshot,
        wait(snapshot, "b"),
        wait(snapshot, "c")._replace(admitted=True),
        legs=legs_of(snapshot, c=[a_leg()]),
    )
    assert [d.applied for d in record.decisions] == [False, True]
    assert (job(promised, "b").admitted, len(job(promised, "b").certificate)) == (True, 2)
    assert (job(promised, "c").admitted, len(job(promised, "c").certificate)) == (True, 1)


@pytest.mark.parametrize(
    ("change", "kept"),
    [
        ({"deadline_s": LATE_S + 1}, True),
        ({"deadline_s": LATE_S - 1}, False),
        ({"deadline_s": math.inf}, False),
        ({"iterations": 999}, True),
        ({"iterations": 1001}, False),
        ({"requested_type": "a100"}, True),
        ({"requested_type": "a100", "pinned_type": True}, False),
        ({"avoid_nodes": (A0,)}, False),
        ({"guaranteed": True}, False),
        ({"min_gpus": 1}, False),
        ({"max_gpus": 8}, False),
        ({"weight": 3.0, "labels": {"k": "v"}}, True),
    ],
)
def test_a_job_that_asks_for_more_is_no_longer_promised(
    promised: PostgresStore, change: dict[str, object], kept: bool
) -> None:
    do(promised, lambda w: w.update_job(C, a_spec("b", **change), list(change), None))
    record = job(promised, "b")
    assert (record.admitted, len(record.certificate)) == ((True, 2) if kept else (False, 0))
    assert job(promised, "a").admitted


def test_a_schedule_on_a_removed_type_is_not_read(
    promised: PostgresStore, database: Database
) -> None:
    execute(
        database, "UPDATE jobs SET certificate = jsonb_set(certificate, '{0,gpu_type}', '\"k80\"')"
    )
    assert promised.snapshot(C).legs.gpus.tolist() == [1]
    assert job(promised, "b").certificate[0].cell.gpu_type == "k80"


def test_a_refused_round_leaves_promises_alone(promised: PostgresStore) -> None:
    snapshot = promised.snapshot(C)
    summary = a_summary(snapshot, outcome="refused", verified=False)
    promised.commit(a_round(snapshot, summary=summary))
    assert job(promised, "b").admitted


def test_a_job_is_opportunistic_only_while_it_runs(store: PostgresStore) -> None:
    a_cluster(store)
    submit(store, a_spec("a"), a_spec("b"))
    snapshot = store.snapshot(C)
    record = commit(
        store,
        snapshot,
        start(snapshot, "a", [(A0, [0])])._replace(opportunistic=True),
        wait(snapshot, "b"),
    )
    assert [d.opportunistic for d in record.decisions] == [True, False]
    assert store.get_round(C, 1) == record
    agents_report(store)
    assert store.snapshot(C).jobs.opportunistic.tolist() == [True, False]
    agent_reports(store, f"agent-{A0}", phase="failed")
    assert job(store, "a").state is JobState.STOPPING
    assert not job(store, "a").opportunistic


def test_a_rejection_outlives_later_rounds(store: PostgresStore) -> None:
    a_cluster(store)
    submit(store, a_spec("a", deadline_s=LATE_S), a_spec("b"))
    snapshot = store.snapshot(C)
    rejected = wait(snapshot, "a", DecisionKind.REJECT)._replace(admitted=True)
    commit(store, snapshot, rejected, wait(snapshot, "b"), legs=legs_of(snapshot, a=[a_leg()]))
    again = store.snapshot(C)
    assert again.jobs.name == ("b",)
    commit(store, again, wait(again, "b"))
    record = job(store, "a")
    assert (record.state, record.reason, record.reason_round) == (
        JobState.REJECTED,
        rejected.reason,
        1,
    )
    assert (record.last_error, record.admitted, record.certificate) == ("no GPU is free", False, ())
    assert record.ended_s is not None
    (event,) = store.job_history(C, "a")
    assert (event.event, event.state) == ("reject", JobState.REJECTED)
    assert event.detail == "reject: no GPU is free"
    assert job(store, "b").reason_round == 2


def test_only_a_queued_job_is_rejected(store: PostgresStore) -> None:
    a_cluster(store)
    submit(store, a_spec("a"))
    run(store, a=[(A0, [0])])
    snapshot = store.snapshot(C)
    (decision,) = commit(store, snapshot, wait(snapshot, "a", DecisionKind.REJECT)).decisions
    assert (decision.applied, decision.skipped) == (False, "a job that is running cannot reject")
    assert (states(store), job(store, "a").reason) == ({"a": JobState.RUNNING}, None)


def test_goals_and_options_are_read_back_whatever_their_values(store: PostgresStore) -> None:
    a_cluster(store)
    snapshot = store.snapshot(C)
    options = RoundOptions(
        objective="throughput",
        queue_weights="1:4,2:1",
        promote_after_s=1800.0,
        max_changes=3,
        queue_order=True,
    )
    flat = {name: getattr(options, name) for name in options.__dataclass_fields__ if name != "work"}
    goals = (
        GoalResult(name="deadline", unit="jobs", objective=3.0, bound=math.inf, gap=math.inf),
        GoalResult(
            name="throughput", unit="samples/s", objective=math.nan, bound=-math.inf, gap=0.0
        ),
    )
    summary = a_summary(snapshot, goals=goals, options=flat)
    store.commit(a_round(snapshot, summary=summary))
    (stored,) = store.list_rounds(C, 0, 1)
    assert repr(stored.goals) == repr(goals)  # NaN is not equal to itself
    assert RoundOptions(**stored.options) == options  # type: ignore[arg-type]  # as the loop does


def commit_with_prices(store: PostgresStore, prices: dict[str, float]) -> Snapshot:
    """Commit a round with these prices, and return the next round's snapshot."""
    snapshot = store.snapshot(C)
    summary = a_summary(snapshot, prices=prices)
    store.commit(a_round(snapshot, wait(snapshot, "a"), summary=summary, legs=snapshot.legs))
    return store.snapshot(C)


def test_the_next_round_reads_the_last_decided_rounds_prices_to_the_bit(
    store: PostgresStore,
) -> None:
    a_cluster(store)
    submit(store, a_spec("a"))
    third = 1.0 / 3.0
    following = commit_with_prices(
        store, {"gpus/v100": 1e-17, "gpus/a100": third, "changes": 0.0, "Z": 2e300}
    )
    assert following.prices.name == ("Z", "changes", "gpus/a100", "gpus/v100")
    assert following.prices.price.tolist() == [2e300, 0.0, third, 1e-17]
    later = commit_with_prices(store, {"gpus/a100": 0.5})
    assert (later.prices.name, later.prices.price.tolist()) == (("gpus/a100",), [0.5])
    assert commit_with_prices(store, {}).prices.equals(NO_PRICES)


def test_invalid_prices_never_stop_a_cluster(store: PostgresStore) -> None:
    a_cluster(store)
    submit(store, a_spec("a"))
    following = commit_with_prices(
        store, {"a": -1e-12, "b": float("inf"), "c": float("nan"), "d": 1.0}
    )
    assert (following.prices.name, following.prices.price.tolist()) == (("a", "d"), [0.0, 1.0])


def test_a_stored_round_keeps_the_prices_that_it_began_with(store: PostgresStore) -> None:
    a_cluster(store)
    submit(store, a_spec("a"))
    commit_with_prices(store, {"gpus/a100": 0.25})
    commit_with_prices(store, {"gpus/a100": 0.75})
    assert store.round_snapshot(C, 1).prices.equals(NO_PRICES)
    assert store.round_snapshot(C, 2).prices.price.tolist() == [0.25]
