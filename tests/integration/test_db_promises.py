"""Promises, prices and reservations in PostgreSQL."""

from __future__ import annotations

import math
from typing import Any

import pytest

from tessera.db.clusters import reservations
from tessera.db.clusters.deletion import delete_nodes
from tessera.db.clusters.reservations import (
    create_reservation,
    get_reservation,
    list_reservations,
    update_reservation,
)
from tessera.db.clusters.tenants import upsert_tenants
from tessera.db.jobs.job_changes import update_job
from tessera.db.rounds.rounds import list_rounds
from tessera.db.schema.engine import Database
from tessera.db.store.cluster_changes import delete_gpu_types
from tessera.db.store.reads import get_node, job_history
from tessera.db.store.store import Store
from tessera.formulation.answer.decisions import DecisionKind
from tessera.formulation.base.access import LOCAL
from tessera.formulation.base.clock import SystemClock
from tessera.formulation.base.errors import (
    AlreadyExists,
    InUse,
    InvalidInput,
    LimitReached,
    StaleEtag,
)
from tessera.formulation.job.lifecycle import JobState
from tessera.formulation.records.clusters import TenantSpec
from tessera.formulation.records.reservations import ReservationRecord, ReservationSpec
from tessera.formulation.round.goals import GoalResult
from tessera.formulation.state.last_round import NO_PRICES
from tessera.formulation.state.snapshot import Snapshot
from tessera.service.server.convert.jobs import of_job
from tessera.solvers.rounds.plan import RoundOptions
from tests.support.stored_cluster import (
    C,
    a_cluster,
    a_round,
    a_segment,
    a_spec,
    a_summary,
    agent_reports,
    agents_report,
    commit,
    execute,
    job,
    run,
    segments_of,
    start,
    states,
    submit,
    wait,
)

A0 = "a100-0"

LATE_S = 4e9
TIMES = {"start_s": 1763726400.1 + 1 / 3, "end_s": 1763726400.1 + 2 / 3}


@pytest.fixture
def promised(store: Store) -> Store:
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
        schedule_segments=segments_of(
            snapshot,
            a=[a_segment(**TIMES)],
            b=[a_segment(gpus=2), a_segment(start_s=2e9, end_s=math.inf)],
        ),
    )
    return store


def test_a_round_does_not_touch_the_promise_of_a_job_that_changed_meanwhile(
    promised: Store,
) -> None:
    snapshot = promised.snapshot(C)
    promised.change(update_job, C, a_spec("b", weight=2.0), ["weight"], None)
    record = commit(
        promised,
        snapshot,
        wait(snapshot, "b"),
        wait(snapshot, "c")._replace(admitted=True),
        schedule_segments=segments_of(snapshot, c=[a_segment()]),
    )
    assert [d.applied for d in record.decisions] == [False, True]
    assert (job(promised, "b").admitted, len(job(promised, "b").schedule)) == (True, 2)
    assert (job(promised, "c").admitted, len(job(promised, "c").schedule)) == (True, 1)
    snapshot = promised.snapshot(C)
    refused = a_summary(snapshot, outcome="refused", verified=False)
    promised.commit(a_round(snapshot, summary=refused))
    assert job(promised, "b").admitted


@pytest.mark.parametrize(
    ("change", "kept"),
    [
        ({"deadline_s": LATE_S + 1}, True),
        ({"deadline_s": LATE_S - 1}, False),
        ({"deadline_s": math.inf}, False),
        ({"iterations": 999}, True),
        ({"iterations": 1001}, False),
        ({"requested_gpu_type": "a100"}, True),
        ({"requested_gpu_type": "a100", "pinned_gpu_type": True}, False),
        ({"avoid_nodes": (A0,)}, False),
        ({"guaranteed": True}, False),
        ({"min_gpus": 1}, False),
        ({"max_gpus": 8}, False),
        ({"weight": 3.0, "labels": {"k": "v"}}, True),
    ],
)
def test_a_job_that_asks_for_more_is_no_longer_promised(
    promised: Store, change: dict[str, object], kept: bool
) -> None:
    promised.change(update_job, C, a_spec("b", **change), list(change), None)
    record = job(promised, "b")
    assert (record.admitted, len(record.schedule)) == ((True, 2) if kept else (False, 0))
    assert job(promised, "a").admitted


def test_a_schedule_on_a_removed_type_is_not_read(promised: Store, database: Database) -> None:
    execute(database, "UPDATE jobs SET schedule = jsonb_set(schedule, '{0,gpu_type}', '\"k80\"')")
    assert promised.snapshot(C).schedule_segments.gpus.tolist() == [1]
    assert job(promised, "b").schedule[0].cell.gpu_type == "k80"


def test_a_job_is_opportunistic_only_while_it_runs(store: Store) -> None:
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


def test_a_rejection_outlives_later_rounds(store: Store) -> None:
    a_cluster(store)
    submit(store, a_spec("a", deadline_s=LATE_S), a_spec("b"))
    snapshot = store.snapshot(C)
    rejected = wait(snapshot, "a", DecisionKind.REJECT)._replace(admitted=True)
    commit(
        store,
        snapshot,
        rejected,
        wait(snapshot, "b"),
        schedule_segments=segments_of(snapshot, a=[a_segment()]),
    )
    again = store.snapshot(C)
    assert again.jobs.name == ("b",)
    commit(store, again, wait(again, "b"))
    record = job(store, "a")
    assert (record.state, record.reason, record.reason_round) == (
        JobState.REJECTED,
        rejected.reason,
        1,
    )
    assert (record.admitted, record.schedule) == (False, ())
    assert of_job(record, LOCAL.sees_tenant).last_error == "no GPU is free"
    assert record.ended_s is not None
    (event,) = store.read(job_history, C, "a")
    assert (event.event, event.state) == ("reject", JobState.REJECTED)
    assert event.detail == "reject: no GPU is free"
    assert job(store, "b").reason_round == 2


def test_only_a_queued_job_is_rejected(store: Store) -> None:
    a_cluster(store)
    submit(store, a_spec("a"))
    run(store, a=[(A0, [0])])
    snapshot = store.snapshot(C)
    (decision,) = commit(store, snapshot, wait(snapshot, "a", DecisionKind.REJECT)).decisions
    assert (decision.applied, decision.skipped) == (False, "a job that is running cannot reject")
    assert (states(store), job(store, "a").reason) == ({"a": JobState.RUNNING}, None)


def test_goals_and_options_are_read_back_whatever_their_values(store: Store) -> None:
    a_cluster(store)
    snapshot = store.snapshot(C)
    options = RoundOptions(
        objective="throughput",
        priority_weights="1:4,2:1",
        default_run_s=1800.0,
        max_changes=3,
        keep_requests=False,
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
    (stored,) = store.read(list_rounds, C, 0, 1)
    assert repr(stored.goals) == repr(goals)  # NaN is not equal to itself
    assert RoundOptions(**stored.options) == options  # type: ignore[arg-type]  # as the loop does


def commit_with_prices(store: Store, prices: dict[str, float]) -> Snapshot:
    """Commit a round with these prices, and return the next round's snapshot."""
    snapshot = store.snapshot(C)
    summary = a_summary(snapshot, prices=prices)
    store.commit(
        a_round(
            snapshot,
            wait(snapshot, "a"),
            summary=summary,
            schedule_segments=snapshot.schedule_segments,
        )
    )
    return store.snapshot(C)


def test_the_next_round_reads_the_last_decided_rounds_valid_prices_to_the_bit(
    store: Store,
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
    following = commit_with_prices(
        store, {"a": -1e-12, "b": float("inf"), "c": float("nan"), "d": 1.0}
    )
    assert (following.prices.name, following.prices.price.tolist()) == (("a", "d"), [0.0, 1.0])


def test_a_stored_round_keeps_the_prices_that_it_began_with(store: Store) -> None:
    a_cluster(store)
    submit(store, a_spec("a"))
    commit_with_prices(store, {"gpus/a100": 0.25})
    commit_with_prices(store, {"gpus/a100": 0.75})
    assert store.round_snapshot(C, 1).prices.equals(NO_PRICES)
    assert store.round_snapshot(C, 2).prices.price.tolist() == [0.25]


def a_reservation(name: str = "r", after_s: float = 3600.0, **changes: Any) -> ReservationSpec:
    """Return one of an hour for the tenant ``t`` on ``a100-0``."""
    start_s = SystemClock().wall_s() + after_s
    what = {} if "gpus" in changes else {"nodes": ("a100-0",)}
    serves = {"tenant": "t"} if not {"maintenance", "label_key"} & changes.keys() else {}
    times = {"start_s": start_s, "end_s": start_s + 3600.0}
    return ReservationSpec(name=name, **times | what | serves | changes)


def create(store: Store, spec: ReservationSpec) -> ReservationRecord:
    answers: list[ReservationRecord] = []
    answers.append(store.change(create_reservation, C, spec))
    return answers[0]


@pytest.fixture
def cluster(store: Store) -> Store:
    a_cluster(store)
    store.change(upsert_tenants, C, [TenantSpec(name="t")])
    return store


@pytest.mark.parametrize(
    ("spec", "message"),
    [
        (lambda: a_reservation(after_s=-100.0), "start_time: r would begin in the past"),
        (lambda: a_reservation(after_s=-9e4), "end_time: r would end in the past"),
        (lambda: a_reservation(tenant="u"), "tenant: no tenant u has settings or jobs"),
        (lambda: a_reservation(nodes=("n9",)), "nodes: the cluster has no node n9"),
        (lambda: a_reservation(gpus=99, gpu_type="a100"), "gpus: 99 x a100 are requested"),
        (lambda: a_reservation(gpus=1, gpu_type="h100"), "h100"),
    ],
)
def test_what_the_cluster_does_not_have_is_refused(cluster: Store, spec: Any, message: str) -> None:
    with pytest.raises(InvalidInput, match=message):
        create(cluster, spec())
    assert cluster.read(list_reservations, C) == []


def test_times_change_only_to_what_others_leave(cluster: Store) -> None:
    create(cluster, a_reservation("first"))
    second = create(cluster, a_reservation("second", after_s=9_000.0))
    start_s = second.spec.start_s

    def update(start: float | None, end: float | None, version: int | None = None) -> None:
        cluster.change(update_reservation, C, "second", start, end, version)

    with pytest.raises(InvalidInput, match=r"a100-0 is reserved by first"):
        update(start_s - 3600.0, None)
    with pytest.raises(StaleEtag):
        update(None, start_s + 60.0, 7)
    update(start_s - 60.0, start_s + 60.0, 1)
    changed = cluster.read(get_reservation, C, "second")
    assert changed.version == 2
    assert changed.spec.end_s - changed.spec.start_s == pytest.approx(120.0, abs=1e-3)


def test_at_the_limit_reservations_change_but_none_is_added_or_reopened(
    cluster: Store, database: Database, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(reservations, "MAX_RESERVATIONS", 1)
    first = create(cluster, a_reservation("first"))
    end_s = first.spec.end_s + 60.0
    cluster.change(update_reservation, C, "first", None, end_s, None)
    assert cluster.read(get_reservation, C, "first").spec.end_s == pytest.approx(end_s, abs=1e-3)
    with pytest.raises(LimitReached, match="lab has 1 reservations, which is the limit"):
        create(cluster, a_reservation("second", after_s=9e4))
    with pytest.raises(AlreadyExists):
        create(cluster, a_reservation("first", after_s=9e4))
    execute(
        database,
        "UPDATE reservations SET start_at = now() - interval '1 h', end_at = now() - interval '1 s'",
    )
    create(cluster, a_reservation("second", after_s=9e4))
    with pytest.raises(LimitReached):
        cluster.change(update_reservation, C, "first", None, end_s, None)


def test_the_snapshot_has_windows_that_last_with_their_nodes_and_jobs(
    cluster: Store, database: Database
) -> None:
    submit(
        cluster,
        a_spec("own", tenant="t"),
        a_spec("labelled", labels={"team": "nlp"}),
        a_spec("other", labels={"team": "x"}),
    )
    create(cluster, a_reservation("b"))
    create(
        cluster, a_reservation("a", gpus=2, gpu_type="a100", label_key="team", label_value="nlp")
    )
    create(cluster, a_reservation("m", 9_000.0, maintenance=True))
    snapshot = cluster.snapshot(C)
    table = snapshot.reservations
    assert sorted(table.name[:2]) == ["a", "b"]
    assert table.name[2] == "m"
    assert table.maintenance.tolist() == [False, False, True]
    of = {name: i for i, name in enumerate(table.name)}
    assert (table.gpu_type[of["a"]], table.gpus[of["a"]]) == (0, 2)
    nodes = snapshot.reserved_nodes
    assert {
        (table.name[r], snapshot.nodes.name[n])
        for r, n in zip(nodes.reservation.tolist(), nodes.node.tolist(), strict=True)
    } == {("b", "a100-0"), ("m", "a100-0")}
    serves = snapshot.entitlements
    assert {
        (table.name[r], snapshot.jobs.name[j])
        for r, j in zip(serves.reservation.tolist(), serves.job.tolist(), strict=True)
    } == {("b", "own"), ("a", "labelled")}
    execute(
        database,
        "UPDATE reservations SET start_at = now() - interval '2 h', end_at = now() - interval '1 h'",
    )
    assert len(cluster.snapshot(C).reservations) == 0
    assert all(record.ended for record in cluster.read(list_reservations, C))


def test_a_window_is_an_event_a_maintenance_and_forgotten_long_after_its_end(
    cluster: Store, database: Database
) -> None:
    create(cluster, a_reservation(after_s=600.0))
    assert cluster.outlooks([C])[C].event_in_s == pytest.approx(600.0, abs=30.0)
    execute(database, "UPDATE reservations SET start_at = now() - interval '1 min'")
    assert cluster.outlooks([C])[C].event_in_s == pytest.approx(4200.0, abs=60.0)
    execute(
        database,
        "UPDATE reservations SET start_at = now() - interval '40 d', end_at = now() - interval '31 d'",
    )
    create(cluster, a_reservation("fans", maintenance=True))
    assert [record.spec.name for record in cluster.read(list_reservations, C)] == ["fans"]
    assert not cluster.read(get_node, C, "a100-0").draining
    execute(database, "UPDATE reservations SET start_at = now() - interval '1 min'")
    node = cluster.read(get_node, C, "a100-0")
    assert (node.draining, node.drained, node.drain_reason) == (True, True, "maintenance fans")
    execute(database, "UPDATE reservations SET end_at = now() - interval '1 s'")
    assert not cluster.read(get_node, C, "a100-0").draining


def test_a_reserved_gpu_type_stays_and_a_deleted_node_leaves_its_reservation(
    store: Store,
) -> None:
    a_cluster(store, types=("a100", "v100"))
    store.change(upsert_tenants, C, [TenantSpec(name="t")])
    create(store, a_reservation(gpus=1, gpu_type="v100"))
    create(store, a_reservation("n", nodes=("v100-0", "a100-0")))
    store.change(delete_nodes, C, ["v100-0", "v100-1"], {}, allow_missing=False)
    assert store.read(get_reservation, C, "n").spec.nodes == ("a100-0",)
    with pytest.raises(InUse, match=r"1 reservation of it \(r\).*`tessera reserve delete`"):
        store.change(delete_gpu_types, C, ["v100"], None, allow_missing=False)
