"""Reservations in the database: stored, refused, in the snapshot, and in the outlook."""

from __future__ import annotations

from typing import Any

import pytest

from tessera.db import reservations
from tessera.db.engine import Database
from tessera.db.store import PostgresStore
from tessera.formulation.clock import SystemClock
from tessera.formulation.errors import (
    AlreadyExists,
    InUse,
    InvalidInput,
    LimitReached,
    NotFound,
    StaleEtag,
)
from tessera.formulation.records.clusters import TenantSpec
from tessera.formulation.records.reservations import ReservationRecord, ReservationSpec
from tests.support.stored_cluster import C, a_cluster, a_spec, do, execute, submit


def a_reservation(name: str = "r", after_s: float = 3600.0, **changes: Any) -> ReservationSpec:
    """Return one of an hour for the tenant ``t`` on ``a100-0``."""
    start_s = SystemClock().wall_s() + after_s
    what = {} if "gpus" in changes else {"nodes": ("a100-0",)}
    serves = {"tenant": "t"} if not {"maintenance", "label_key"} & changes.keys() else {}
    times = {"start_s": start_s, "end_s": start_s + 3600.0}
    return ReservationSpec(name=name, **times | what | serves | changes)


def create(store: PostgresStore, spec: ReservationSpec) -> ReservationRecord:
    answers: list[ReservationRecord] = []
    do(store, lambda w: answers.append(w.create_reservation(C, spec)))
    return answers[0]


@pytest.fixture
def cluster(store: PostgresStore) -> PostgresStore:
    a_cluster(store)
    do(store, lambda w: w.upsert_tenants(C, [TenantSpec(name="t")]))
    return store


def test_a_reservation_reads_back_as_it_was_made(cluster: PostgresStore) -> None:
    spec = a_reservation(reason="release")
    record = create(cluster, spec)
    assert record.spec.nodes == spec.nodes
    assert record.spec.start_s == pytest.approx(spec.start_s, abs=1e-3)
    assert (record.spec.tenant, record.spec.reason, record.version) == ("t", "release", 1)
    assert (record.active, record.ended) == (False, False)
    assert cluster.get_reservation(C, "r") == record
    assert cluster.list_reservations(C) == [record]
    with pytest.raises(AlreadyExists):
        create(cluster, a_reservation(after_s=9e4))
    do(cluster, lambda w: w.delete_reservations(C, ["r"]))
    with pytest.raises(NotFound, match="clusters/lab/reservations/r does not exist"):
        do(cluster, lambda w: w.delete_reservations(C, ["r"]))
    do(cluster, lambda w: w.delete_reservations(C, ["r"], allow_missing=True))
    with pytest.raises(NotFound):
        cluster.get_reservation(C, "r")


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
def test_what_the_cluster_does_not_have_is_refused(
    cluster: PostgresStore, spec: Any, message: str
) -> None:
    with pytest.raises(InvalidInput, match=message):
        create(cluster, spec())
    assert cluster.list_reservations(C) == []


def test_times_change_only_to_what_others_leave(cluster: PostgresStore) -> None:
    create(cluster, a_reservation("first"))
    second = create(cluster, a_reservation("second", after_s=9_000.0))
    start_s = second.spec.start_s

    def update(start: float | None, end: float | None, version: int | None = None) -> None:
        do(cluster, lambda w: w.update_reservation(C, "second", start, end, version))

    with pytest.raises(InvalidInput, match=r"a100-0 is reserved by first"):
        update(start_s - 3600.0, None)
    with pytest.raises(StaleEtag):
        update(None, start_s + 60.0, 7)
    update(start_s - 60.0, start_s + 60.0, 1)
    changed = cluster.get_reservation(C, "second")
    assert changed.version == 2
    assert changed.spec.end_s - changed.spec.start_s == pytest.approx(120.0, abs=1e-3)


def test_at_the_limit_reservations_change_but_none_is_added_or_reopened(
    cluster: PostgresStore, database: Database, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(reservations, "MAX_RESERVATIONS", 1)
    first = create(cluster, a_reservation("first"))
    end_s = first.spec.end_s + 60.0
    do(cluster, lambda w: w.update_reservation(C, "first", None, end_s, None))
    assert cluster.get_reservation(C, "first").spec.end_s == pytest.approx(end_s, abs=1e-3)
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
        do(cluster, lambda w: w.update_reservation(C, "first", None, end_s, None))


def test_the_snapshot_has_windows_that_last_with_their_nodes_and_jobs(
    cluster: PostgresStore, database: Database
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
    assert all(record.ended for record in cluster.list_reservations(C))


def test_a_round_is_due_when_a_window_begins_and_when_it_ends(
    cluster: PostgresStore, database: Database
) -> None:
    create(cluster, a_reservation(after_s=600.0))
    assert cluster.outlooks([C])[C].event_in_s == pytest.approx(600.0, abs=30.0)
    execute(database, "UPDATE reservations SET start_at = now() - interval '1 min'")
    assert cluster.outlooks([C])[C].event_in_s == pytest.approx(4200.0, abs=60.0)


def test_a_node_under_maintenance_is_shown_as_draining_until_it_ends(
    cluster: PostgresStore, database: Database
) -> None:
    create(cluster, a_reservation("fans", maintenance=True))
    assert not cluster.get_node(C, "a100-0").draining
    execute(database, "UPDATE reservations SET start_at = now() - interval '1 min'")
    node = cluster.get_node(C, "a100-0")
    assert (node.draining, node.drained, node.drain_reason) == (True, True, "maintenance fans")
    execute(database, "UPDATE reservations SET end_at = now() - interval '1 s'")
    assert not cluster.get_node(C, "a100-0").draining


def test_a_reserved_gpu_type_stays_and_a_deleted_node_leaves_its_reservation(
    store: PostgresStore,
) -> None:
    a_cluster(store, types=("a100", "v100"))
    do(store, lambda w: w.upsert_tenants(C, [TenantSpec(name="t")]))
    create(store, a_reservation(gpus=1, gpu_type="v100"))
    create(store, a_reservation("n", nodes=("v100-0", "a100-0")))
    do(store, lambda w: w.delete_nodes(C, ["v100-0", "v100-1"], {}, allow_missing=False))
    assert store.get_reservation(C, "n").spec.nodes == ("a100-0",)
    with pytest.raises(InUse, match=r"1 reservation of it \(r\).*`tessera reserve delete`"):
        do(store, lambda w: w.delete_gpu_types(C, ["v100"], None, allow_missing=False))


def test_reservations_that_ended_long_ago_are_forgotten(
    cluster: PostgresStore, database: Database
) -> None:
    create(cluster, a_reservation("old"))
    execute(
        database,
        "UPDATE reservations SET start_at = now() - interval '40 d', end_at = now() - interval '31 d'",
    )
    create(cluster, a_reservation("new"))
    assert [record.spec.name for record in cluster.list_reservations(C)] == ["new"]
