"""Placement of jobs: rules, bounds on resources, and clusters with many of them."""

from __future__ import annotations

import math
import threading
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import grpc.aio
import pytest
import sqlalchemy as sa
from google.protobuf.duration_pb2 import Duration
from google.protobuf.field_mask_pb2 import FieldMask

from tessera.db.agents.agents import load_desired_gangs
from tessera.db.clusters.deletion import delete_cells, delete_nodes
from tessera.db.clusters.drains import drain_nodes
from tessera.db.clusters.tenants import upsert_tenants
from tessera.db.estimates.derived_estimates import upsert_models
from tessera.db.estimates.workloads import upsert_estimates
from tessera.db.jobs.job_changes import update_job
from tessera.db.schema.engine import Database
from tessera.db.store.cluster_changes import upsert_cluster, upsert_nodes
from tessera.db.store.reads import (
    EVERY_WORKLOAD,
    get_node,
    job_history,
    list_clusters,
    list_estimates,
    list_jobs,
    list_nodes,
)
from tessera.db.store.store import Store
from tessera.formulation.answer.decisions import DecisionKind
from tessera.formulation.base.errors import InvalidInput, LimitReached, NotAllowed
from tessera.formulation.base.resources import NOT_STATED
from tessera.formulation.base.values import GpuType
from tessera.formulation.job.lifecycle import JobEvent, JobState
from tessera.formulation.records.clusters import NodeSpec, TenantSpec
from tessera.formulation.records.estimates import CellFilter, EstimateRecord, ModelSpec
from tessera.formulation.records.jobs import JobSpec
from tessera.formulation.records.store import StoreLimits
from tessera.formulation.state.decayed_use import HOST_CODES
from tessera.formulation.state.snapshot import Snapshot
from tessera.service.server.rounds.cluster_task import ClusterTask
from tessera.service.server.settings.config import Config
from tessera.service.server.tasks.calls import Calls
from tessera.service.server.wiring import run_server
from tessera.solvers.base import Budget
from tessera.solvers.exact.portfolio import Portfolio
from tessera.solvers.rounds.plan import RoundOptions, plan_round
from tessera.v1 import clusters_pb2, clusters_pb2_grpc, jobs_pb2
from tests.support import api as calls
from tests.support.hand_clock import HandClock
from tests.support.periodic import a_replica
from tests.support.rows import query_scalar
from tests.support.stored_cluster import (
    C,
    a_cluster,
    a_record,
    a_spec,
    agent_reports,
    agents_report,
    apply_event,
    commit,
    execute,
    job,
    run,
    start,
    submit,
    wait,
)

A0 = "a100-0"


@pytest.fixture
def store(database: Database) -> Store:
    """Return a store whose agents do not expire, however slow the machine is."""
    return Store(database, lease_s=3600.0)


def label_nodes(store: Store, **labels: dict[str, str]) -> None:
    specs = [
        NodeSpec(name=name.replace("_", "-"), gpu_type="a100", gpus=4, labels=own)
        for name, own in labels.items()
    ]
    store.change(upsert_nodes, C, specs)


def update(store: Store, spec: JobSpec, *fields: str) -> None:
    store.change(update_job, C, spec, fields, None)


def nodes_by_job(snapshot: Snapshot, column: str = "required_selector") -> dict[str, list[str]]:
    """Return the nodes that match the selector of each job that has one."""
    matches = snapshot.matching_nodes()
    return {
        snapshot.jobs.name[job]: [snapshot.nodes.name[n] for n in matches[s].nonzero()[0].tolist()]
        for job, s in enumerate(getattr(snapshot.jobs, column).tolist())
        if s >= 0
    }


# labels


def test_labels_of_nodes_are_stored_and_an_agent_that_returns_keeps_them(
    store: Store,
) -> None:
    a_cluster(store, nodes=2)
    label_nodes(store, a100_0={"zone": "a", "disk": "ssd"})
    store.hello(C, "agent-a100-0", "second", [NodeSpec(name=A0, gpu_type="a100", gpus=4)])
    page = store.read(list_nodes, C, "", 10)
    assert [n.spec.labels for n in page] == [{"zone": "a", "disk": "ssd"}, {}]
    before = page[0].version
    label_nodes(store, a100_0={"disk": "ssd", "zone": "a"})
    assert store.read(list_nodes, C, "", 10)[0].version == before  # nothing has changed


def test_an_agents_labels_count_below_those_that_are_stated(store: Store) -> None:
    a_cluster(store, nodes=2)
    submit(
        store,
        a_spec("stated", node_selector="zone=a"),
        a_spec("given", node_selector="disk=ssd"),
        a_spec("earlier", node_selector="zone=b"),
    )
    label_nodes(store, a100_0={"zone": "a"})

    def register(**labels: str) -> None:
        node = NodeSpec(name=A0, gpu_type="a100", gpus=4, labels=labels)
        store.hello(C, "agent-a100-0", "second", [node])

    register(zone="b", disk="ssd")
    record = store.read(get_node, C, A0)
    assert (record.spec.labels, record.agent_labels) == (
        {"zone": "a"},
        {"zone": "b", "disk": "ssd"},
    )
    assert nodes_by_job(store.snapshot(C)) == {"stated": [A0], "given": [A0], "earlier": []}
    register(zone="b", disk="ssd")
    assert store.read(get_node, C, A0).version == record.version  # nothing has changed
    label_nodes(store, a100_0={})
    assert nodes_by_job(store.snapshot(C)) == {"stated": [], "given": [A0], "earlier": [A0]}
    register()
    assert store.read(get_node, C, A0).agent_labels == {}
    assert nodes_by_job(store.snapshot(C)) == {"stated": [], "given": [], "earlier": []}


def test_selectors_of_jobs_are_in_the_snapshot_and_follow_labels_and_changes(
    store: Store,
) -> None:
    a_cluster(store, nodes=3)
    label_nodes(store, a100_0={"zone": "a"}, a100_1={"zone": "b"})
    submit(
        store,
        a_spec("x", node_selector="zone=a", preferred_labels="zone!=b"),
        a_spec("y"),
        a_spec("z", node_selector="zone in (a, b)"),
    )
    assert nodes_by_job(store.snapshot(C)) == {"x": [A0], "z": [A0, "a100-1"]}
    assert nodes_by_job(store.snapshot(C), "preferred_selector") == {"x": [A0, "a100-2"]}
    label_nodes(store, a100_0={}, a100_2={"zone": "a"})
    update(store, a_spec("z", node_selector="zone=b"), "node_selector")
    assert nodes_by_job(store.snapshot(C)) == {"x": ["a100-2"], "z": ["a100-1"]}
    apply_event(store, "x", JobEvent.CANCEL)
    update(store, a_spec("z"), "node_selector")
    assert len(store.snapshot(C).selectors) == 0


# GPU types


def test_allowed_types_are_in_the_snapshot_and_cannot_be_removed(store: Store) -> None:
    a_cluster(store, nodes=1, types=("a100", "v100"))
    submit(store, a_spec("x", allowed_gpu_types=("v100", "a100")), a_spec("y"), a_spec("z"))
    update(store, a_spec("z", allowed_gpu_types=("v100",)), "allowed_gpu_types")
    allowed = store.snapshot(C).allowed_gpu_types
    assert list(zip(allowed.job.tolist(), allowed.gpu_type.tolist(), strict=True)) == [
        *((0, 0), (0, 1)),
        (2, 1),
    ]
    store.change(delete_cells, C, CellFilter(gpu_type="v100"))
    store.change(drain_nodes, C, ["v100-0"], draining=True)
    store.change(delete_nodes, C, ["v100-0"], {}, allow_missing=False)
    kinds = [GpuType(name="a100", memory_bytes=2**35)]
    with pytest.raises(InvalidInput, match=r"2 live jobs that ask for it \(x, z\)"):
        store.change(upsert_cluster, C, kinds, None)


# run times


def make_older(database: Database, seconds: int) -> None:
    """Make the present allocations of all jobs begin this much earlier."""
    execute(
        database,
        f"UPDATE jobs SET since_at = since_at - interval '{seconds} s' WHERE since_at IS NOT NULL",
    )


def test_a_job_that_has_run_for_its_longest_run_time_is_stopped_and_has_failed(
    store: Store, database: Database
) -> None:
    a_cluster(store, nodes=1)
    submit(store, a_spec("a", longest_run_s=7200.0), a_spec("b"))
    run(store, a=[(A0, [0])])
    make_older(database, 3600)
    apply_event(store, "a", JobEvent.HOLD)  # the time of its first start counts, too
    agents_report(store)
    apply_event(store, "a", JobEvent.RELEASE)
    assert 3600 <= job(store, "a").run_s < 3700
    run(store, a=[(A0, [0])])
    make_older(database, 3000)
    assert 500 < store.outlooks([C])[C].event_in_s <= 600
    store.begin_round(C, None)
    assert job(store, "a").state is JobState.RUNNING
    make_older(database, 600)
    assert store.outlooks([C])[C].event_in_s == 0
    snapshot = store.begin_round(C, None)
    assert isinstance(snapshot, Snapshot)
    assert snapshot.jobs.name == ("a", "b")
    ended = job(store, "a")
    assert (ended.state, ended.retries) == (JobState.FAILING, 0)
    assert ended.last_error == "ran for its longest run time of 7,200 s"
    agents_report(store)
    assert job(store, "a").state is JobState.FAILED
    assert [e.event for e in store.read(job_history, C, "a")][-2:] == ["time_out", "gone"]


def test_a_waiting_job_whose_time_is_used_up_fails_without_a_start(
    store: Store, database: Database
) -> None:
    a_cluster(store, nodes=1)
    submit(store, a_spec("a"))
    run(store, a=[(A0, [0])])
    make_older(database, 3600)
    apply_event(store, "a", JobEvent.HOLD)
    agents_report(store)
    update(store, a_spec("a", longest_run_s=60.0), "longest_run_s")
    store.begin_round(C, None)
    assert job(store, "a").state is JobState.HELD  # until its user releases it
    apply_event(store, "a", JobEvent.RELEASE)
    assert store.outlooks([C])[C].event_in_s == 0
    store.begin_round(C, None)
    assert job(store, "a").state is JobState.FAILED
    assert job(store, "a").ended_s is not None


# the API


async def test_the_api_keeps_and_changes_where_a_job_may_run_and_for_how_long(
    store: Store,
) -> None:
    async with calls.api(store) as a:
        node = calls.a_node("n1", labels={"zone": "a"})
        listed = await a.clusters.UpsertNodes(
            clusters_pb2.UpsertNodesRequest(parent=calls.C, nodes=[node])
        )
        assert dict(listed.nodes[0].labels) == {"zone": "a"}
        avoided = [f"{calls.C}/nodes/n1"]
        sent = await a.jobs.SubmitJob(
            calls.a_submit(
                allowed_gpu_types=["a100"],
                requested_gpu_type="a100",
                pinned_gpu_type=True,
                avoid_nodes=avoided,
                min_gpus=1,
                max_gpus=5,
                node_selector="zone=a,disk in(ssd,nvme)",
                preferred_labels="rack!=b",
                longest_run=Duration(seconds=3600),
            )
        )
        assert (list(sent.allowed_gpu_types), list(sent.avoid_nodes)) == (["a100"], avoided)
        assert (sent.pinned_gpu_type, sent.min_gpus, sent.max_gpus) == (True, 1, 5)
        assert sent.node_selector == "zone=a, disk in (nvme, ssd)"
        assert (sent.preferred_labels, sent.longest_run.seconds) == ("rack!=b", 3600)
        paths = ["allowed_gpu_types", "node_selector", "preferred_labels", "longest_run"]
        paths += ["pinned_gpu_type", "avoid_nodes", "min_gpus", "max_gpus"]
        request = jobs_pb2.UpdateJobRequest(
            job=jobs_pb2.Job(name=sent.name, avoid_nodes=[f"{calls.C}/nodes/n9"]),
            update_mask=FieldMask(paths=paths),
        )
        assert (await calls.refusal_of(a.jobs.UpdateJob(request)))[0] is calls.INVALID
        assert await a.jobs.GetJob(jobs_pb2.GetJobRequest(name=sent.name)) == sent
        avoided = [f"{calls.C}/nodes/n2"]
        request.job.avoid_nodes[:] = avoided
        free = await a.jobs.UpdateJob(request)
        assert (list(free.allowed_gpu_types), list(free.avoid_nodes)) == ([], avoided)
        assert (free.pinned_gpu_type, free.min_gpus, free.max_gpus) == (False, 0, 0)
        assert (free.node_selector, free.preferred_labels) == ("", "")
        assert not free.HasField("longest_run")
        assert free.requested_gpu_type == "a100"
        least = jobs_pb2.UpdateJobRequest(
            job=jobs_pb2.Job(name=sent.name, min_gpus=9), update_mask=FieldMask(paths=["min_gpus"])
        )
        assert (await calls.refusal_of(a.jobs.UpdateJob(least)))[2] == ["job.min_gpus"]


async def test_the_api_refuses_bad_wishes_under_their_fields(store: Store) -> None:
    wishes: list[tuple[dict[str, Any], str]] = [
        ({"allowed_gpu_types": ["a100", "a100"]}, "job.allowed_gpu_types[1]"),
        ({"allowed_gpu_types": ["a\n"]}, "job.allowed_gpu_types[0]"),
        ({"allowed_gpu_types": ["v100"], "requested_gpu_type": "a100"}, "job.allowed_gpu_types"),
        ({"node_selector": "zone"}, "job.node_selector"),
        ({"preferred_labels": "zone=\x07"}, "job.preferred_labels"),
        ({"longest_run": Duration(seconds=0)}, "job.longest_run"),
        ({"longest_run": Duration(seconds=-5)}, "job.longest_run"),
    ]
    async with calls.api(store) as a:
        for fields, field in wishes:
            refusal = await calls.refusal_of(a.jobs.SubmitJob(calls.a_submit(**fields)))
            assert refusal == (calls.INVALID, "INVALID_INPUT", [field])


TYPES = [GpuType(name="a100", memory_bytes=2**35)]
LIMITS = StoreLimits(clusters=2, nodes=3, models=2, tenants=2, open_jobs=5)


@pytest.fixture
def limited(database: Database) -> Store:
    store = Store(database, limits=LIMITS)
    a_cluster(store, nodes=2)
    return store


def make_cluster(store: Store, name: str) -> None:
    store.change(upsert_cluster, name, TYPES, None)


def put_node(store: Store, name: str) -> None:
    store.change(upsert_nodes, C, [NodeSpec(name=name, gpu_type="a100", gpus=1)])


def put_model(store: Store, name: str) -> None:
    model = ModelSpec(model=name, params="1B", architecture="{}")
    store.change(upsert_models, C, [model])


def put_tenant(store: Store, name: str) -> None:
    store.change(upsert_tenants, C, [TenantSpec(name=name)])


def register_agent(store: Store, name: str) -> None:
    store.hello(C, name, "1", [NodeSpec(name=f"of-{name}", gpu_type="a100", gpus=1)])


@pytest.mark.parametrize(
    ("put", "kind", "fitting"),
    [
        (make_cluster, "clusters", 1),
        (put_node, "nodes", 1),
        (put_model, "models", 2),
        (put_tenant, "tenants", 2),
        (register_agent, "nodes", 1),
    ],
)
def test_no_more_resources_can_be_created_than_the_settings_allow(
    limited: Store, put: Callable[[Store, str], None], kind: str, fitting: int
) -> None:
    for i in range(fitting):
        put(limited, f"x{i}")
    with pytest.raises(LimitReached, match=rf"at most \d {kind}.*setting max_{kind}"):
        put(limited, "one-too-many")
    put(limited, "x0")  # an existing resource can still be changed


def test_agents_that_share_a_node_s_name_are_bounded_too(limited: Store) -> None:
    execute(
        limited._database,
        "INSERT INTO agents (cluster_id, name, incarnation) SELECT id, 'ghost', 'x' FROM clusters",
    )
    with pytest.raises(LimitReached, match="agents"):
        register_agent(limited, "a")


def submit_of(store: Store, tenant: str, *names: str) -> None:
    submit(store, *(a_spec(name, tenant=tenant) for name in names))


def test_a_tenant_has_no_more_live_jobs_than_the_settings_allow(limited: Store) -> None:
    with pytest.raises(LimitReached, match=r"5 live jobs without a tenant.*would make 6"):
        submit(limited, a_spec("x", tenant="nlp"), *(a_spec(f"j{i}") for i in range(6)))
    assert limited.read(list_jobs, C, [], 0, 99)[0] == []
    submit_of(limited, "nlp", "a", "b", "c", "d", "e")
    submit_of(limited, "vision", "f")
    with pytest.raises(LimitReached, match="tenant nlp"):
        limited.change(update_job, C, a_spec("f", tenant="nlp"), ["tenant"], None)
    limited.change(update_job, C, a_spec("a", weight=2.0), ["weight"], None)
    with pytest.raises(
        LimitReached,
        match=r"at most 5 live jobs of tenant nlp, .* make 6; .* setting max_open_jobs",
    ):
        submit_of(limited, "nlp", "g")
    apply_event(limited, "a", JobEvent.CANCEL)
    submit_of(limited, "nlp", "h")
    assert len(limited.read(list_jobs, C, [], 0, 99)[0]) == 7


def count_done(calls: int, call: Callable[[int], object]) -> int:
    """Make calls at the same time; return how many did not reach a limit."""
    outcomes: list[bool] = []

    def make(number: int) -> None:
        try:
            call(number)
            outcomes.append(True)
        except LimitReached:
            outcomes.append(False)

    threads = [threading.Thread(target=make, args=(i,)) for i in range(calls)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(outcomes) == calls
    return sum(outcomes)


def test_many_clients_at_once_get_no_more_than_one(limited: Store) -> None:
    assert count_done(8, lambda i: make_cluster(limited, f"c{i}")) == 1
    assert len(limited.read(list_clusters, "", 9)) == 2
    assert count_done(9, lambda i: submit_of(limited, "nlp", f"j{i}")) == 5
    assert len(limited.read(list_jobs, C, [], 0, 99)[0]) == 5


async def test_a_client_gets_an_error_when_a_limit_is_reached(database: Database) -> None:
    config = Config(listen="127.0.0.1:0", database_url=database.url, max_clusters=1)
    async with (
        run_server(config) as port,
        grpc.aio.insecure_channel(f"127.0.0.1:{port}") as channel,
    ):
        stub = clusters_pb2_grpc.ClustersStub(channel)
        for name in ("one", "two"):
            cluster = clusters_pb2.Cluster(
                name=f"clusters/{name}",
                gpu_types=[clusters_pb2.GpuType(name="a100", memory_bytes=2**35)],
            )
            request = clusters_pb2.UpsertClusterRequest(cluster=cluster)
            if name == "one":
                await stub.UpsertCluster(request)
                continue
            with pytest.raises(grpc.aio.AioRpcError) as refused:
                await stub.UpsertCluster(request)
    assert refused.value.code() is grpc.StatusCode.RESOURCE_EXHAUSTED
    assert "max_clusters" in str(refused.value.details())


async def test_clusters_without_live_jobs_have_no_rounds_no_leases_and_no_periodic_work(
    store: Store, database: Database
) -> None:
    a_cluster(store)
    for i in range(20):
        make_cluster(store, f"empty-{i}")
    submit(store, a_spec("a"))
    apply_event(store, "a", JobEvent.CANCEL)
    visited: list[str] = []
    calls = Calls(2, "store")
    watching = ClusterTask(
        store,
        HandClock(),
        lambda cluster, *_: visited.append(cluster),
        calls=calls,
        work=calls,
        holder="me",
        period_s=60.0,
        fails="",
        event="",
    )
    async with a_replica(store) as replica:
        assert await replica.tick_after(0.0) == 0
        await watching.look(None)
        assert visited == []
        assert query_scalar(database, "SELECT count(*) FROM leases") == 0
        submit(store, a_spec("b"))  # the next tick begins a round, without waiting for a period
        assert await replica.tick_after(0.0) == 1
        await watching.look(None)
    assert visited == [C]
    assert query_scalar(database, "SELECT count(*) FROM rounds") == 1
    await calls.close()


GIB = 2**30


def state(store: Store, cpus: int | None, host_bytes: int | None = None) -> None:
    """State the CPU cores and the host memory of a100-0."""
    node = NodeSpec(name="a100-0", gpu_type="a100", gpus=4, cpus=cpus, host_bytes=host_bytes)
    store.change(upsert_nodes, C, [node])


def find(store: Store, cpus: int | None, host_bytes: int | None = None) -> None:
    """Let the agent of a100-0 start again and report what it found."""
    node = NodeSpec(name="a100-0", gpu_type="a100", gpus=4, cpus=cpus, host_bytes=host_bytes)
    store.hello(C, "agent-a100-0", "first", [node])


def estimate(store: Store, *records: EstimateRecord) -> None:
    store.change(upsert_estimates, C, records)


def needs(gpus: int, cpus: int, host_bytes: int = 0) -> EstimateRecord:
    return replace(a_record(gpus, gpu_type="a100", nodes=1), cpus=cpus, host_bytes=host_bytes)


def seen(store: Store) -> tuple[Sequence[int], Sequence[int]]:
    """Return the cores and the host memory of the nodes as a round sees them."""
    nodes = store.snapshot(C).nodes
    return nodes.cpus.tolist(), nodes.host_bytes.tolist()


@pytest.fixture
def cluster(store: Store) -> Store:
    """Return a store with nodes a100-0 and a100-1 of 4 GPUs, of which a100-0 has 8 cores."""
    a_cluster(store)
    state(store, 8, 64 * GIB)
    return store


# what is stated and found


def test_what_nodes_state_is_stored_and_seen_by_rounds(cluster: Store) -> None:
    specs = [node.spec for node in cluster.read(list_nodes, C, "", 10)]
    assert [(s.cpus, s.host_bytes) for s in specs] == [(8, 64 * GIB), (None, None)]
    assert seen(cluster) == ([8, NOT_STATED], [64 * GIB, NOT_STATED])
    before = cluster.read(list_nodes, C, "", 1)[0].version
    state(cluster, 8, 64 * GIB)
    assert cluster.read(list_nodes, C, "", 1)[0].version == before
    state(cluster, None)
    assert seen(cluster) == ([NOT_STATED, NOT_STATED], [NOT_STATED, NOT_STATED])
    assert cluster.read(list_nodes, C, "", 1)[0].version == before + 1


def test_what_an_agent_finds_counts_where_nothing_is_stated(cluster: Store) -> None:
    find(cluster, 16, 128 * GIB)
    assert seen(cluster)[0][0] == 8
    state(cluster, None, 64 * GIB)  # again, as a file that states no cores does
    assert (seen(cluster)[0][0], seen(cluster)[1][0]) == (16, 64 * GIB)
    record = cluster.read(list_nodes, C, "", 1)[0]
    assert (record.spec.cpus, record.reported_cpus, record.reported_host_bytes) == (
        None,
        16,
        128 * GIB,
    )


def test_what_is_found_later_is_taken_up_once_no_job_holds_gpus(cluster: Store) -> None:
    state(cluster, None)
    estimate(cluster, needs(1, 6))
    submit(cluster, a_spec("a"))
    run(cluster, a=[("a100-0", [0])])
    find(cluster, 4)  # fewer than the job needs
    assert seen(cluster)[0][0] == NOT_STATED
    apply_event(cluster, "a", JobEvent.CANCEL)
    agents_report(cluster)
    find(cluster, 4)
    assert seen(cluster)[0][0] == 4


def test_demands_of_estimates_are_stored_and_seen_by_rounds(cluster: Store) -> None:
    estimate(cluster, needs(2, 6, 3 * GIB))
    stored = cluster.read(list_estimates, C, EVERY_WORKLOAD, 0, 10)[0]
    (record,) = (e for e in stored if e.cell.gpus == 2)
    assert (record.cpus, record.host_bytes) == (6, 3 * GIB)
    submit(cluster, a_spec("a"))
    e = cluster.snapshot(C).estimates
    rows = [(g, c, h) for g, c, h in zip(e.gpus, e.cpus, e.host_bytes, strict=True) if c or h]
    assert rows == [(2, 6, 3 * GIB)]


# what jobs are given


def test_the_use_of_a_job_has_what_it_was_given_while_it_runs_and_afterwards(
    cluster: Store,
) -> None:
    estimate(cluster, needs(1, 6, 3 * GIB))
    submit(cluster, a_spec("a", tenant="t"))
    run(cluster, a=[("a100-0", [0])])
    running = cluster.snapshot(C, 3600.0).decayed_use
    apply_event(cluster, "a", JobEvent.CANCEL)
    agents_report(cluster)
    ended = cluster.snapshot(C, 3600.0).decayed_use
    for uses in (running, ended):
        assert uses.resource.tolist() == [*reversed(HOST_CODES), 0]
        assert (uses.amount / uses.amount[2]).tolist() == pytest.approx([3 * GIB, 6, 1])


def test_a_job_keeps_what_it_was_given_whatever_estimates_say_later(cluster: Store) -> None:
    estimate(cluster, needs(1, 6))
    submit(cluster, a_spec("a", guaranteed=True, max_gpus=1), a_spec("b", max_gpus=1))
    run(cluster, a=[("a100-0", [0])])
    estimate(cluster, needs(1, 20))  # more than the node has
    snapshot = cluster.snapshot(C)
    assert snapshot.jobs.current_cpus.tolist() == [6, NOT_STATED]
    options = RoundOptions(deadlines="ignore")
    outcome = plan_round(snapshot, options, Portfolio(), Budget(remaining_s=lambda: math.inf))
    assert not outcome.violations
    decisions = {snapshot.jobs.name[d.job]: d for d in outcome.decisions}
    assert decisions["a"].gang is not None
    where = [snapshot.nodes.name[n] for n, _ in decisions["a"].gang.members]
    assert (decisions["a"].kind, where) == (DecisionKind.KEEP, ["a100-0"])
    record = commit(cluster, snapshot, *outcome.decisions)
    assert all(d.applied for d in record.decisions)


def test_a_job_waits_for_cores_until_the_former_job_is_gone(cluster: Store) -> None:
    estimate(cluster, needs(1, 8))
    submit(cluster, a_spec("a"), a_spec("b"))
    run(cluster, a=[("a100-0", [0])])
    snapshot = cluster.snapshot(C)
    commit(
        cluster,
        snapshot,
        wait(snapshot, "a", DecisionKind.SUSPEND),
        start(snapshot, "b", [("a100-0", [1])]),  # another GPU, but the same cores
    )
    assert not cluster.read(
        load_desired_gangs, C, "agent-a100-0"
    ).gangs  # a must stop, and b may not start yet
    agent_reports(cluster, "agent-a100-0")
    assert [g.spec.name for g in cluster.read(load_desired_gangs, C, "agent-a100-0").gangs] == ["b"]


# what the database refuses


GIVE = """
    INSERT INTO allocations (node_id, gpu, job_id, generation, hold)
    SELECT n.id, {gpu}, j.id, j.generation, 'held' FROM nodes n, jobs j
    WHERE n.name = '{node}' AND j.name = '{job}'
"""


@pytest.fixture
def busy(cluster: Store) -> Store:
    """Return the cluster where a job needs 6 of the 8 cores and 40 of the 64 GiB of a100-0."""
    estimate(cluster, needs(1, 6, 40 * GIB))
    submit(cluster, a_spec("a"), a_spec("b"))
    run(cluster, a=[("a100-0", [0])])
    run(cluster, b=[("a100-1", [0])])
    return cluster


def test_rows_that_give_more_than_a_node_has_are_refused(busy: Store, database: Database) -> None:
    for statement, said in (
        (GIVE.format(gpu=1, node="a100-0", job="b"), "has 8 CPU cores, but its jobs need 12"),
        (
            "UPDATE allocations SET node_id = (SELECT id FROM nodes WHERE name = 'a100-0'), gpu = 1"
            " WHERE job_id = (SELECT id FROM jobs WHERE name = 'b')",
            "has 8 CPU cores, but its jobs need 12",
        ),
        ("UPDATE jobs SET cell_cpus = 9 WHERE name = 'a'", "its jobs need 9"),
        (
            "UPDATE jobs SET cell_host_bytes = 65::bigint << 30 WHERE name = 'a'",
            "has 68719476736 bytes of host memory, but its jobs need 69793218560",
        ),
        ("UPDATE nodes SET cpus = 5 WHERE name = 'a100-0'", "has 5 CPU cores, but its jobs need 6"),
        ("UPDATE nodes SET host_bytes = 0 WHERE name = 'a100-0'", "has 0 bytes of host memory"),
    ):
        with pytest.raises(
            NotAllowed, match=f"node a100-0 {said}|{said}.*stop or move one of them first"
        ):
            execute(database, statement)
        assert seen(busy)[0][0] == 8
    with pytest.raises(InvalidInput, match="ck_nodes_resources"):
        execute(database, "UPDATE nodes SET cpus = -1")
    with pytest.raises(NotAllowed, match="node a100-0 has 5 CPU cores, but its jobs need 6"):
        state(busy, 5, 64 * GIB)
    state(busy, 6, 40 * GIB)


def test_a_transaction_may_take_before_it_gives(busy: Store, database: Database) -> None:
    def work(connection: sa.Connection) -> None:
        connection.execute(sa.text(GIVE.format(gpu=1, node="a100-0", job="b")))
        connection.execute(
            sa.text("DELETE FROM allocations WHERE job_id = (SELECT id FROM jobs WHERE name = 'a')")
        )

    database.write(work)
    assert busy.snapshot(C).allocations.gpu.tolist() == [1, 0]


def test_shares_of_a_job_are_rounded_up_on_each_node(cluster: Store, database: Database) -> None:
    estimate(cluster, needs(8, 20))
    submit(cluster, a_spec("a", requested_gpus=8))
    run(cluster, a=[("a100-0", [0]), ("a100-1", [0, 1, 2, 3])])  # 5 GPUs by a Cell of no demand
    execute(database, "UPDATE jobs SET cell_cpus = 36 WHERE name = 'a'")  # 7.2 cores for each GPU
    with pytest.raises(NotAllowed, match="has 8 CPU cores, but its jobs need 9"):
        execute(database, "UPDATE jobs SET cell_cpus = 41 WHERE name = 'a'")


def test_a_round_gives_no_cores_that_a_job_keeps_because_it_changed(busy: Store) -> None:
    submit(busy, a_spec("c"))
    snapshot = busy.snapshot(C)
    apply_event(busy, "a", JobEvent.HOLD)
    apply_event(busy, "a", JobEvent.RELEASE)
    agents_report(busy)
    run(busy, a=[("a100-0", [0])])  # in the meantime, a has begun again
    late = replace(busy.snapshot(C), jobs=snapshot.jobs)
    record = commit(
        busy, late, wait(late, "a", DecisionKind.SUSPEND), start(late, "c", [("a100-0", [1])])
    )
    assert [d.applied for d in record.decisions] == [False, False]
    assert "would lack CPU cores or host memory" in record.decisions[1].skipped
