"""Topologies, network plans and the traffic of Cells over a real socket against PostgreSQL."""

from __future__ import annotations

import json
import math
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from typing import Any

import grpc.aio
import pytest
from google.protobuf.message import Message
from grpc import StatusCode

from tessera.db.store.store import Store
from tessera.formulation.job.lifecycle import JobEvent
from tessera.v1 import estimates_pb2, estimates_pb2_grpc, networks_pb2_grpc, scheduler_pb2
from tessera.v1 import networks_pb2 as pb
from tests.support.api import refusal_of
from tests.support.networked_cluster import CLOS, a_network, start_two_jobs
from tests.support.rpc import serving
from tests.support.stored_cluster import C, a_cluster, apply_event

PARENT = f"clusters/{C}"
NAME = f"{PARENT}/topology"
IN_FORCE = f"{PARENT}/networkPlans/-"
INVALID, NOT_FOUND = StatusCode.INVALID_ARGUMENT, StatusCode.NOT_FOUND


class Api:
    """The stubs of the services that these tests call."""

    def __init__(self, channel: grpc.aio.Channel) -> None:
        self.networks = networks_pb2_grpc.NetworksStub(channel)
        self.estimates = estimates_pb2_grpc.EstimatesStub(channel)

    async def describe(self, document: object = CLOS, **rest: Any) -> pb.Topology:
        """Describe the network. A document that is not a text is sent as JSON."""
        return await self.networks.UpdateTopology(an_update(document, **rest))

    async def topology(self) -> pb.Topology:
        return await self.networks.GetTopology(pb.GetTopologyRequest(name=NAME))

    async def plan(self, *, dry_run: bool = False) -> pb.NetworkPlan:
        request = pb.PlanNetworkRequest(parent=PARENT, dry_run=dry_run)
        return await self.networks.PlanNetwork(request)

    async def in_force(self, **rest: Any) -> pb.NetworkPlan:
        return await self.networks.GetNetworkPlan(pb.GetNetworkPlanRequest(name=IN_FORCE, **rest))

    async def plans(self, **page: Any) -> pb.ListNetworkPlansResponse:
        request = pb.ListNetworkPlansRequest(parent=PARENT, **page)
        return await self.networks.ListNetworkPlans(request)


def an_update(document: object = CLOS, name: str = NAME, **rest: Any) -> pb.UpdateTopologyRequest:
    text = document if isinstance(document, str) else json.dumps(document)
    topology = pb.Topology(name=name, document=text, etag=rest.pop("etag", ""))
    return pb.UpdateTopologyRequest(topology=topology, **rest)


@asynccontextmanager
async def api(store: Store) -> AsyncIterator[Api]:
    """Yield stubs to a server with a cluster of four nodes."""
    a_cluster(store, nodes=4)
    async with serving(store) as (channel, _):
        yield Api(channel)


@asynccontextmanager
async def serve_two_contending_jobs(store: Store) -> AsyncIterator[Api]:
    """Yield stubs to a server on whose network two jobs share the only aggregation switch."""
    a_network(store, aggregations=1)
    start_two_jobs(store)
    async with serving(store) as (channel, _):
        yield Api(channel)


async def test_yaml_is_accepted_and_mismatches_with_the_cluster_are_reported(
    store: Store,
) -> None:
    text = (
        "kind: clos\nnodes: [a100-0, a100-1, elsewhere]\nhost: a100\ntors: 1\naggregations: 1\n"
        "tor_bytes_per_s: 100 Gb/s\n"
    )
    async with api(store) as a:
        topology = await a.describe(text)
    assert json.loads(topology.document)["tor_bytes_per_s"] == "100 Gb/s"
    assert list(topology.unknown_hosts) == ["elsewhere"]
    assert list(topology.missing_nodes) == ["a100-2", "a100-3"]


TWO_PARTS: dict[str, Any] = {
    "hosts": ["a", "b"],
    "host": "a100",
    "switches": [{"name": "left", "tier": "tor"}, {"name": "right", "tier": "tor"}],
    "links": [
        {"from": "a", "to": "left", "bytes_per_s": 25e9},
        {"from": "b", "to": "right", "bytes_per_s": 25e9},
    ],
}


@pytest.mark.parametrize(
    ("document", "field", "message"),
    [
        ("", "topology.document", "must not be empty"),
        ("{kind: [", "topology.document", "neither JSON nor YAML"),
        (CLOS | {"kind": "closs"}, "topology.document.kind", "did you mean 'clos'"),
        (
            CLOS | {"tor_bytes_per_s": math.nan},
            "topology.document",
            "tor_bytes_per_s: must be a finite",
        ),
        (TWO_PARTS, "topology.document", "no path joins a and b"),
    ],
)
async def test_an_invalid_description_is_refused_by_field_and_nothing_is_stored(
    store: Store, document: object, field: str, message: str
) -> None:
    async with api(store) as a:
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await a.describe(document)
        assert (caught.value.code(), message in str(caught.value.details())) == (INVALID, True), (
            caught.value.details()
        )
        code, _, wrong = await refusal_of(a.describe(document))
        assert (code, wrong) == (INVALID, [field])
        code, _, _ = await refusal_of(a.topology())
    assert code is NOT_FOUND


Call = Callable[[Api], Awaitable[Message]]

WRONG: dict[str, tuple[Call, StatusCode, list[str]]] = {
    "a topology under a wrong name": (
        lambda a: a.networks.GetTopology(pb.GetTopologyRequest(name=PARENT)),
        INVALID,
        ["name"],
    ),
    "an update of something else": (
        lambda a: a.describe(name=f"{PARENT}/nodes/n"),
        INVALID,
        ["topology.name"],
    ),
    "a deletion of something else": (
        lambda a: a.networks.DeleteTopology(pb.DeleteTopologyRequest(name="x")),
        INVALID,
        ["name"],
    ),
    "a plan that is not the one in force": (
        lambda a: a.networks.GetNetworkPlan(
            pb.GetNetworkPlanRequest(name=f"{PARENT}/networkPlans/3")
        ),
        INVALID,
        ["name"],
    ),
    "a job of another cluster": (
        lambda a: a.in_force(job="clusters/other/jobs/j"),
        INVALID,
        ["job"],
    ),
    "a job without a full name": (lambda a: a.in_force(job="j"), INVALID, ["job"]),
    "a page of negative size": (lambda a: a.plans(page_size=-1), INVALID, ["page_size"]),
    "a page token that was never given": (
        lambda a: a.plans(page_token="x"),
        INVALID,
        ["page_token"],
    ),
    "plans of a cluster that does not exist": (
        lambda a: a.networks.ListNetworkPlans(pb.ListNetworkPlansRequest(parent="clusters/none")),
        NOT_FOUND,
        [],
    ),
    "the plan where no network is described": (lambda a: a.in_force(), NOT_FOUND, []),
    "planning where no network is described": (lambda a: a.plan(), NOT_FOUND, []),
    "a network of a cluster that does not exist": (
        lambda a: a.describe(name="clusters/none/topology"),
        NOT_FOUND,
        [],
    ),
}


@pytest.mark.parametrize("wrong", WRONG)
async def test_wrong_resource_names_are_refused(store: Store, wrong: str) -> None:
    call, code, fields = WRONG[wrong]
    async with api(store) as a:
        refusal = await refusal_of(call(a))
    assert (refusal[0], refusal[2]) == (code, fields)


async def test_a_dry_run_answers_and_changes_nothing(store: Store) -> None:
    async with serve_two_contending_jobs(store) as a:
        plan = await a.plan(dry_run=True)
        assert plan.name == f"{PARENT}/networkPlans/-"
        assert len(plan.decisions) == 2
        assert not (await a.plans()).plans
        code, _, _ = await refusal_of(a.in_force())
        assert code is NOT_FOUND
        assert list((await a.plan()).decisions) == list(plan.decisions)


@pytest.mark.parametrize("dry_run", [True, False])
async def test_planning_is_refused_if_the_topology_is_deleted_meanwhile(
    store: Store, monkeypatch: pytest.MonkeyPatch, dry_run: bool
) -> None:
    a_cluster(store)
    # The topology is deleted only after this check.
    monkeypatch.setattr("tessera.db.clusters.network.has_topology", lambda *_: True)
    async with api(store) as a:
        code, _, _ = await refusal_of(a.plan(dry_run=dry_run))
        assert code is StatusCode.NOT_FOUND


async def test_pages_of_plans_cover_each_once_newest_first(store: Store) -> None:
    async with serve_two_contending_jobs(store) as a:
        await a.plan()
        for number in (2, 3):
            await a.describe(CLOS | {"aggregations": number, "tors": 2})
            await a.plan()
        apply_event(store, "one", JobEvent.CANCEL)
        await a.plan()
        every = (await a.plans()).plans
        first = await a.plans(page_size=2)
        rest = await a.plans(page_size=2, page_token=first.next_page_token)
        code, _, wrong = await refusal_of(
            a.networks.ListNetworkPlans(
                pb.ListNetworkPlansRequest(
                    parent="clusters/other", page_size=2, page_token=first.next_page_token
                )
            )
        )
    assert len(every) >= 3
    numbers = [int(p.name.rpartition("/")[2]) for p in every]
    assert numbers == sorted(numbers, reverse=True)
    assert [*first.plans, *rest.plans] == list(every[:4])
    assert not any(p.decisions for p in every)
    assert (code, wrong) == (INVALID, ["page_token"])


def a_traffic(**changes: Any) -> estimates_pb2.CellTraffic:
    stage = estimates_pb2.StageTraffic(
        data_parallel=2,
        tensor_parallel=2,
        expert_parallel=1,
        tensor=estimates_pb2.Sent(bytes=1e6, messages=3),
        data=estimates_pb2.Sent(bytes=5e9, messages=14),
        pipeline=estimates_pb2.Sent(bytes=2e6, messages=1),
    )
    values: dict[str, Any] = {
        "work_flop": 1e15,
        "compute_s": 0.1,
        "start_s": 0.05,
        "stages": [stage, stage],
    }
    return estimates_pb2.CellTraffic(**(values | changes))


def a_cell(traffic: estimates_pb2.CellTraffic | None) -> estimates_pb2.UpsertCellsRequest:
    cell = estimates_pb2.CellEstimate(
        workload=estimates_pb2.Workload(model="bert", params="1B", global_batch=256),
        cell=estimates_pb2.Cell(gpu_type="a100", gpus=8, pipeline_degree=2),
        nodes=2,
        iter_time_s=1.0,
        source=estimates_pb2.MEASURED,
        traffic=traffic,
    )
    return estimates_pb2.UpsertCellsRequest(parent=PARENT, cells=[cell])


async def test_the_traffic_of_a_cell_reads_back_as_sent(store: Store) -> None:
    async with api(store) as a:

        async def stored_cell() -> estimates_pb2.CellEstimate:
            listed = await a.estimates.ListCells(estimates_pb2.ListCellsRequest(parent=PARENT))
            (cell,) = (c for c in listed.cells if c.cell.pipeline_degree == 2)
            return cell

        await a.estimates.UpsertCells(a_cell(a_traffic()))
        assert (await stored_cell()).traffic == a_traffic()
        await a.estimates.UpsertCells(a_cell(None))
        # A new time leaves the traffic unchanged.
        assert (await stored_cell()).traffic == a_traffic()
        await a.estimates.UpsertCells(a_cell(a_traffic(work_flop=2e15)))
        assert (await stored_cell()).traffic.work_flop == 2e15


def a_stage(**changes: Any) -> estimates_pb2.StageTraffic:
    return estimates_pb2.StageTraffic(**({"data_parallel": 8, "tensor_parallel": 1} | changes))


@pytest.mark.parametrize(
    ("traffic", "field"),
    [
        (a_traffic(stages=[]), "stages"),
        (a_traffic(work_flop=math.nan), "work_flop"),
        (a_traffic(compute_s=0.0), "compute_s"),
        (a_traffic(stages=[a_stage(data_parallel=0)]), "stages[0].data_parallel"),
        (a_traffic(stages=[a_stage(expert_parallel=3)]), "stages[0]"),
        (
            a_traffic(stages=[a_stage(data=estimates_pb2.Sent(bytes=-1.0, messages=1))]),
            "stages[0].data.bytes",
        ),
        (
            a_traffic(stages=[a_stage(pipeline=estimates_pb2.Sent(bytes=1.0, messages=-1))]),
            "stages[0].pipeline.messages",
        ),
        (a_traffic(stages=[a_stage(data_parallel=4)]), "stages"),
    ],
)
async def test_impossible_traffic_is_refused_by_field(
    store: Store, traffic: estimates_pb2.CellTraffic, field: str
) -> None:
    async with api(store) as a:
        code, _, wrong = await refusal_of(a.estimates.UpsertCells(a_cell(traffic)))
    assert (code, wrong) == (INVALID, [f"cells[0].traffic.{field}"])


@pytest.mark.parametrize("levels", [0, 9])
async def test_a_round_with_an_unsupported_number_of_priority_levels_is_refused(
    store: Store, levels: int
) -> None:
    a_cluster(store)
    async with serving(store) as (channel, _):
        schedule = channel.unary_unary(
            "/tessera.v1.Scheduler/Schedule",
            request_serializer=scheduler_pb2.ScheduleRequest.SerializeToString,
            response_deserializer=scheduler_pb2.Round.FromString,
        )
        options = scheduler_pb2.RoundOptions(network_levels=levels)
        request = scheduler_pb2.ScheduleRequest(parent=PARENT, options=options)
        code, _, wrong = await refusal_of(schedule(request))
    assert (code, wrong) == (INVALID, ["options.network_levels"])
