"""Tenants, quotas, GPU costs and jobs' demands: stored, refused, and in the snapshot."""

from __future__ import annotations

import math

import pytest

from tessera.db.engine import Database
from tessera.db.store import PostgresStore
from tessera.formulation.errors import InUse, InvalidInput, NotFound
from tessera.formulation.lifecycle import JobEvent
from tessera.formulation.records.clusters import TenantSpec
from tessera.formulation.records.jobs import JobSpec
from tessera.formulation.records.reservations import ReservationSpec
from tessera.formulation.values import GpuType, Workload
from tests.support.stored_cluster import (
    C,
    a_cluster,
    a_record,
    a_spec,
    apply_event,
    do,
    execute,
    job,
    states,
    submit,
)


def upsert_tenants(store: PostgresStore, *tenants: TenantSpec) -> None:
    do(store, lambda w: w.upsert_tenants(C, tenants))


def test_jobs_of_a_deleted_tenant_stay(store: PostgresStore) -> None:
    a_cluster(store)
    upsert_tenants(store, TenantSpec(name="a", quotas={"a100": 1}), TenantSpec(name="b"))
    submit(store, a_spec("x", tenant="a"))
    with pytest.raises(NotFound, match=f"clusters/{C}/tenants/z does not exist"):
        do(store, lambda w: w.delete_tenants(C, ["a", "z"]))
    do(store, lambda w: w.delete_tenants(C, ["a"]))
    assert [t.name for t in store.list_tenants(C)] == ["b"]
    assert job(store, "x").spec.tenant == "a"
    assert len(store.snapshot(C).quotas) == 0


@pytest.mark.parametrize(
    ("quotas", "message"),
    [
        (({"a100": 5}, {"a100": 4}), "quotas of a100 sum to 9 GPUs, but the cluster has 8"),
        (({"": 9}, {"": 8}), "quotas sum to 17 GPUs, but the cluster has 16"),
        (({"a100": 8, "v100": 1}, {"": 8}), "quotas sum to 17 GPUs, but the cluster has 16"),
        (({"h100": 1},), "no GPU type 'h100'; it has: a100, v100"),
        (({"a100": -1},), "ck_quotas_gpus"),
    ],
)
def test_quotas_that_cannot_be_met_together_are_refused(
    store: PostgresStore, quotas: tuple[dict[str, int], ...], message: str
) -> None:
    a_cluster(store, nodes=2, gpus=4, types=("a100", "v100"))
    do(store, lambda w: w.drain_nodes(C, ["a100-0"], draining=True))  # a draining node counts, too
    upsert_tenants(store, TenantSpec(name="t0", quotas={"v100": 1}))
    tenants = [TenantSpec(name=f"t{i}", quotas=q) for i, q in enumerate(quotas)]
    with pytest.raises(InvalidInput, match=message):
        upsert_tenants(store, *tenants)
    for tenant in tenants[:-1]:  # those before the last are accepted without it
        upsert_tenants(store, tenant)
    with pytest.raises(InvalidInput, match=message):
        upsert_tenants(store, tenants[-1])


def test_quotas_up_to_the_whole_cluster_are_accepted(store: PostgresStore) -> None:
    a_cluster(store, nodes=2, gpus=4, types=("a100", "v100"))
    upsert_tenants(
        store,
        TenantSpec(name="a", quotas={"a100": 8, "v100": 2, "": 10}),
        TenantSpec(name="b", quotas={"": 6}),
    )
    upsert_tenants(
        store, TenantSpec(name="a", quotas={"v100": 8}), TenantSpec(name="b", quotas={"a100": 8})
    )


def test_the_snapshot_has_tenants_and_quotas_in_order(store: PostgresStore) -> None:
    a_cluster(store, types=("v100", "a100"))
    upsert_tenants(
        store,
        TenantSpec(name="b", borrow_gpus=2, lends=False, quotas={"a100": 3, "": 4}),
        TenantSpec(name="a", weight=0.5, quotas={"a100": 1, "v100": 2}),
    )
    snapshot = store.snapshot(C)
    assert snapshot.tenants.name == ("a", "b")
    assert snapshot.tenants.weight.tolist() == [0.5, 1.0]
    assert snapshot.tenants.borrow_gpus.tolist() == [-1, 2]
    assert snapshot.tenants.lends.tolist() == [True, False]
    quotas = snapshot.quotas
    rows = zip(quotas.tenant.tolist(), quotas.gpu_type.tolist(), quotas.gpus.tolist(), strict=True)
    assert list(rows) == [(0, 0, 2), (0, 1, 1), (1, -1, 4), (1, 1, 3)]


def test_gpu_types_store_their_costs(store: PostgresStore) -> None:
    a_cluster(store, types=("a100", "v100"))
    kinds = (
        GpuType(name="a100", memory_bytes=1, dollars_per_hour=2.21, watts=400.0),
        GpuType(name="v100", memory_bytes=1, watts=300.0),
    )
    do(store, lambda w: w.upsert_cluster(C, kinds, None))
    assert store.get_cluster(C).gpu_types == store.snapshot(C).gpu_types == kinds
    version = store.get_cluster(C).version
    do(store, lambda w: w.upsert_cluster(C, kinds, None))
    assert store.get_cluster(C).version == version  # nothing changed


def update_job(store: PostgresStore, spec: JobSpec, *fields: str) -> None:
    do(store, lambda w: w.update_job(C, spec, fields, None))


def test_avoided_nodes_are_stored_and_in_the_snapshot(store: PostgresStore) -> None:
    a_cluster(store, nodes=3)
    submit(store, a_spec("a", avoid_nodes=("a100-2", "a100-0", "a100-2")), a_spec("b"))
    assert job(store, "a").spec.avoid_nodes == ("a100-0", "a100-2")
    assert job(store, "b").spec.avoid_nodes == ()
    update_job(store, a_spec("b", avoid_nodes=("a100-1",)), "avoid_nodes")
    avoids = store.snapshot(C).avoids
    pairs = list(zip(avoids.job.tolist(), avoids.node.tolist(), strict=True))
    assert pairs == [(0, 0), (0, 2), (1, 1)]
    assert job(store, "b").version == 2
    update_job(store, a_spec("a"), "avoid_nodes")
    apply_event(store, "b", JobEvent.CANCEL)
    assert len(store.snapshot(C).avoids) == 0


def test_a_node_to_avoid_must_exist(store: PostgresStore) -> None:
    a_cluster(store)
    with pytest.raises(InvalidInput, match=r"jobs/b.avoid_nodes: the cluster has no node a100-9"):
        submit(store, a_spec("a"), a_spec("b", avoid_nodes=("a100-0", "a100-9")))
    assert states(store) == {}
    submit(store, a_spec("a"))
    with pytest.raises(InvalidInput, match="no node a100-9"):
        update_job(store, a_spec("a", avoid_nodes=("a100-9",)), "avoid_nodes")


def test_a_pinned_type_is_stored_and_in_the_snapshot(store: PostgresStore) -> None:
    a_cluster(store, types=("v100", "a100"))
    submit(store, a_spec("a", requested_type="a100", pinned_type=True), a_spec("b"))
    jobs = store.snapshot(C).jobs
    assert (jobs.pinned_type.tolist(), jobs.requested_type.tolist()) == ([True, False], [1, -1])
    update_job(store, a_spec("a", requested_type="v100"), "requested_type")
    assert (job(store, "a").spec.requested_type, job(store, "a").spec.pinned_type) == ("v100", True)
    update_job(store, a_spec("a"), "pinned_type", "requested_type")
    assert (job(store, "a").spec.requested_type, job(store, "a").spec.pinned_type) == ("", False)


def test_bounds_on_gpus_are_stored_and_in_the_snapshot(store: PostgresStore) -> None:
    a_cluster(store)
    submit(store, a_spec("a", requested_gpus=2, min_gpus=1, max_gpus=4), a_spec("b"))
    jobs = store.snapshot(C).jobs
    assert (jobs.min_gpus.tolist(), jobs.max_gpus.tolist()) == ([1, 0], [4, 0])
    update_job(store, a_spec("a", min_gpus=2, max_gpus=0), "min_gpus", "max_gpus")
    assert (job(store, "a").spec.min_gpus, job(store, "a").spec.max_gpus) == (2, 0)


def test_bounds_that_contradict_the_request_are_refused(store: PostgresStore) -> None:
    a_cluster(store)
    with pytest.raises(InvalidInput, match=r"jobs/a.min_gpus: is 3, but the job requests 2 GPUs"):
        submit(store, a_spec("a", requested_gpus=2, min_gpus=3))
    with pytest.raises(InvalidInput, match=r"jobs/a.max_gpus: is 1, but the job requests 2 GPUs"):
        submit(store, a_spec("a", requested_gpus=2, max_gpus=1))
    submit(store, a_spec("a", requested_gpus=2))
    with pytest.raises(InvalidInput, match="set it to at most that, or to 0 for no bound"):
        update_job(store, a_spec("a", requested_gpus=2, min_gpus=3), "min_gpus")


def test_gpu_bounds_of_jobs_are_counts_to_estimate(store: PostgresStore) -> None:
    a_cluster(store)
    fresh = Workload(model="new", params="1B", global_batch=8)
    submit(store, a_spec("a", workload=fresh, requested_gpus=4, min_gpus=3, max_gpus=6))
    (wanted,) = store.estimation(C).wanted
    assert (wanted.requests, wanted.counts) == ((4,), (3, 6))


def test_pins_that_cannot_be_met_are_refused(store: PostgresStore) -> None:
    a_cluster(store, nodes=2, gpus=4, types=("a100", "v100", "k80"))
    lone = Workload(model="gpt", params="1B", global_batch=8)
    fresh = Workload(model="new", params="1B", global_batch=8)
    do(
        store,
        lambda w: w.upsert_estimates(
            C,
            [
                a_record(1, workload=lone),
                a_record(9, workload=lone, gpu_type="v100", nodes=3),
                a_record(1, workload=lone, gpu_type="k80", iter_time_s=math.inf),
            ],
        ),
    )
    with pytest.raises(InvalidInput, match=r"jobs/a.pinned_type: needs a GPU type to pin"):
        submit(store, a_spec("a", pinned_type=True))
    with pytest.raises(InvalidInput, match=r"gpt has no Cells on it; it has some on a100, v100"):
        submit(store, a_spec("a", workload=lone, requested_type="k80", pinned_type=True))
    with pytest.raises(
        InvalidInput, match=r"exceed the cluster: it needs 9 x v100 \(there are 8\)"
    ):
        submit(store, a_spec("a", workload=lone, requested_type="v100", pinned_type=True))
    # Without a pin, the type is only a wish.
    submit(store, a_spec("a", workload=lone, requested_type="k80"))
    submit(store, a_spec("b", workload=fresh, requested_type="k80", pinned_type=True))
    with pytest.raises(InvalidInput, match="gpt has no Cells on it"):
        update_job(store, a_spec("a", pinned_type=True), "pinned_type")
    with pytest.raises(InvalidInput, match="needs a GPU type to pin"):
        update_job(store, a_spec("b"), "requested_type")
    assert job(store, "a").version == job(store, "b").version == 1


def test_a_deadline_must_be_in_the_future(store: PostgresStore, database: Database) -> None:
    a_cluster(store)
    past = store.snapshot(C).now_s - 60.0
    with pytest.raises(InvalidInput, match=r"jobs/b.deadline: lies 6\d s in the past"):
        submit(store, a_spec("a", deadline_s=4e9), a_spec("b", deadline_s=past), a_spec("c"))
    submit(store, a_spec("a", deadline_s=4e9))
    with pytest.raises(InvalidInput, match="in the past"):
        update_job(store, a_spec("a", deadline_s=past), "deadline_s")
    execute(database, "UPDATE jobs SET deadline_s = 1")
    # The deadline has passed, but other fields may change.
    update_job(store, a_spec("a", weight=2.0), "weight")
    assert job(store, "a").spec.weight == 2.0


def test_parents_read_back_and_their_quotas_bound_those_of_children(store: PostgresStore) -> None:
    a_cluster(store)
    lab = TenantSpec(name="lab", quotas={"a100": 3})
    nlp, chat = TenantSpec(name="nlp", parent="lab"), TenantSpec(name="chat", parent="nlp")
    upsert_tenants(store, chat, nlp, lab)
    assert store.list_tenants(C) == [chat, lab, nlp]
    tenants = store.snapshot(C).tenants
    assert [tenants.name[p] if p >= 0 else "" for p in tenants.parent.tolist()] == [
        "nlp",
        "",
        "lab",
    ]
    with pytest.raises(InvalidInput, match="tenants below lab sum to 4 GPUs"):
        upsert_tenants(store, TenantSpec(name="chat", parent="nlp", quotas={"a100": 4}))
    with pytest.raises(InvalidInput, match="circle"):
        upsert_tenants(store, TenantSpec(name="lab", parent="chat"))
    with pytest.raises(InvalidInput, match="the parent of x, y, has no settings"):
        upsert_tenants(store, TenantSpec(name="x", parent="y"))
    with pytest.raises(InUse, match=r"tenants/nlp is in use by 1 child \(chat\)"):
        do(store, lambda w: w.delete_tenants(C, ["nlp"]))
    upsert_tenants(store, TenantSpec(name="chat"))
    do(store, lambda w: w.delete_tenants(C, ["nlp", "lab"]))
    assert store.list_tenants(C) == [TenantSpec(name="chat")]


def test_a_reservation_of_a_tenant_serves_the_jobs_of_those_below_it(store: PostgresStore) -> None:
    a_cluster(store)
    upsert_tenants(store, TenantSpec(name="lab"), TenantSpec(name="nlp", parent="lab"))
    submit(store, a_spec("below", tenant="nlp"), a_spec("own", tenant="lab"), a_spec("no"))
    now_s = store.snapshot(C).now_s
    spec = ReservationSpec(
        name="r", start_s=now_s, end_s=now_s + 60.0, gpu_type="a100", gpus=1, tenant="lab"
    )
    do(store, lambda w: w.create_reservation(C, spec))
    snapshot = store.snapshot(C)
    served = {snapshot.jobs.name[job] for job in snapshot.entitlements.job.tolist()}
    assert served == {"below", "own"}
