"""A client can create a bounded number of resources, and those without live jobs cost nothing."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

import grpc.aio
import pytest

from tessera.db.engine import Database
from tessera.db.store import PostgresStore
from tessera.formulation.errors import InvalidInput, LimitReached
from tessera.formulation.lifecycle import JobEvent
from tessera.formulation.records.clusters import NodeSpec, TenantSpec
from tessera.formulation.records.estimates import ModelSpec
from tessera.formulation.records.store import StoreLimits
from tessera.formulation.values import GpuType
from tessera.service.cluster_task import ClusterTask
from tessera.service.config import Config
from tessera.service.rpc.calls import Calls
from tessera.service.wiring import run_server
from tessera.v1 import clusters_pb2, clusters_pb2_grpc
from tests.support.hand_clock import HandClock
from tests.support.periodic import a_replica
from tests.support.rows import query_scalar
from tests.support.stored_cluster import C, a_cluster, a_spec, apply_event, do, execute, submit

TYPES = [GpuType(name="a100", memory_bytes=2**35)]
LIMITS = StoreLimits(clusters=2, nodes=3, models=2, tenants=2, open_jobs=5)


@pytest.fixture
def limited(database: Database) -> PostgresStore:
    store = PostgresStore(database, limits=LIMITS)
    a_cluster(store, nodes=2)
    return store


def make_cluster(store: PostgresStore, name: str) -> None:
    do(store, lambda w: w.upsert_cluster(name, TYPES, None))


def put_node(store: PostgresStore, name: str) -> None:
    do(store, lambda w: w.upsert_nodes(C, [NodeSpec(name=name, gpu_type="a100", gpus=1)]))


def put_model(store: PostgresStore, name: str) -> None:
    model = ModelSpec(model=name, params="1B", architecture="{}")
    do(store, lambda w: w.upsert_models(C, [model]))


def put_tenant(store: PostgresStore, name: str) -> None:
    do(store, lambda w: w.upsert_tenants(C, [TenantSpec(name=name)]))


def register_agent(store: PostgresStore, name: str) -> None:
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
    limited: PostgresStore, put: Callable[[PostgresStore, str], None], kind: str, fitting: int
) -> None:
    for i in range(fitting):
        put(limited, f"x{i}")
    with pytest.raises(LimitReached, match=rf"at most \d {kind}.*setting max_{kind}"):
        put(limited, "one-too-many")
    put(limited, "x0")  # an existing resource can still be changed


def test_agents_that_share_a_node_s_name_are_bounded_too(limited: PostgresStore) -> None:
    execute(
        limited._database,
        "INSERT INTO agents (cluster_id, name, incarnation) SELECT id, 'ghost', 'x' FROM clusters",
    )
    with pytest.raises(LimitReached, match="agents"):
        register_agent(limited, "a")


def submit_of(store: PostgresStore, tenant: str, *names: str) -> None:
    submit(store, *(a_spec(name, tenant=tenant) for name in names))


def test_a_tenant_has_no_more_live_jobs_than_the_settings_allow(limited: PostgresStore) -> None:
    submit_of(limited, "nlp", "a", "b", "c", "d", "e")
    with pytest.raises(
        LimitReached,
        match=r"at most 5 live jobs of tenant nlp, .* make 6; .* setting max_open_jobs",
    ):
        submit_of(limited, "nlp", "f")
    submit_of(limited, "vision", "g")  # of another tenant
    apply_event(limited, "a", JobEvent.CANCEL)
    submit_of(limited, "nlp", "h")
    assert len(limited.list_jobs(C, [], 0, 99)[0]) == 7


def test_a_submission_or_change_beyond_the_limit_changes_nothing(limited: PostgresStore) -> None:
    with pytest.raises(LimitReached, match=r"5 live jobs without a tenant.*would make 6"):
        submit(limited, a_spec("x", tenant="nlp"), *(a_spec(f"j{i}") for i in range(6)))
    assert limited.list_jobs(C, [], 0, 99)[0] == []
    submit_of(limited, "nlp", "a", "b", "c", "d", "e")
    submit_of(limited, "vision", "f")
    with pytest.raises(LimitReached, match="tenant nlp"):
        do(limited, lambda w: w.update_job(C, a_spec("f", tenant="nlp"), ["tenant"], None))
    do(limited, lambda w: w.update_job(C, a_spec("a", weight=2.0), ["weight"], None))


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


def test_many_clients_at_once_get_no_more_than_one(limited: PostgresStore) -> None:
    assert count_done(8, lambda i: make_cluster(limited, f"c{i}")) == 1
    assert len(limited.list_clusters("", 9)) == 2
    assert count_done(9, lambda i: submit_of(limited, "nlp", f"j{i}")) == 5
    assert len(limited.list_jobs(C, [], 0, 99)[0]) == 5


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


def test_a_limit_is_at_least_one() -> None:
    for name in ("max_clusters", "max_nodes", "max_models", "max_tenants", "max_open_jobs"):
        settings: dict[str, Any] = {name: 0}
        with pytest.raises(InvalidInput, match=name):
            Config(**settings)


async def test_clusters_without_live_jobs_have_no_rounds_no_leases_and_no_periodic_work(
    store: PostgresStore, database: Database
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
