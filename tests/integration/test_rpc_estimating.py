"""Models, estimates and curves over a real socket: answers, stored Cells and models, and refusals."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from typing import Any

import grpc.aio
import pytest
from grpc import StatusCode

from tessera.db.estimates.workloads import upsert_estimates
from tessera.db.store.cluster_changes import upsert_cluster, upsert_nodes
from tessera.db.store.store import Store
from tessera.estimator.cell_estimator import Estimator
from tessera.estimator.hardware.cluster_types import catalogue_of
from tessera.formulation.base.values import GpuType, Workload
from tessera.formulation.records.clusters import NodeSpec
from tessera.service.server.convert.estimates import to_workload
from tessera.service.server.estimates.deriver import CellDeriver
from tessera.service.server.rpc import curves
from tessera.service.server.rpc.curves import KeptResults
from tessera.v1 import estimates_pb2 as pb
from tessera.v1 import estimates_pb2_grpc, jobs_pb2
from tests.support.api import (
    INVALID,
    Api,
    a_cell,
    a_submit,
    a_workload,
    api,
    connect_agent,
    refusal_of,
    some_cells,
)
from tests.support.api import C as PLACE
from tests.support.patience import PATIENCE_S
from tests.support.rpc import error_details, serving
from tests.support.stored_cluster import (
    C,
    a_bare_cluster,
    a_record,
    a_spec,
    agents_report,
    run,
    submit,
)
from tests.support.training import TRAINER

PARENT = f"clusters/{C}"


MINE = pb.Model(
    model="mine",
    params="4L",
    micro_batches=8,
    architecture="{architecture: transformer, layers: 4, hidden: 256, heads: 4, sequence: 128,"
    " vocabulary: 1000}",
)


BERT = pb.Workload(model="bert", params="1.3B", global_batch=256)


@asynccontextmanager
async def estimates(
    store: Store, *types: str, **settings: Any
) -> AsyncIterator[estimates_pb2_grpc.EstimatesAsyncStub]:
    """Yield a stub to a server whose cluster has two nodes of four GPUs of each type."""
    a_bare_cluster(store, *types or ("a100", "v100"))
    async with serving(store, **settings) as (channel, _):
        yield estimates_pb2_grpc.EstimatesStub(channel)


def a_call(**fields: Any) -> pb.EstimateCellsRequest:
    return pb.EstimateCellsRequest(parent=PARENT, **fields)


async def test_a_jobs_cells_are_estimated_on_all_types_around_the_requested_count(
    store: Store,
) -> None:
    async with estimates(store) as stub:
        submit(store, a_spec("j", workload=to_workload("w", BERT), requested_gpus=2))
        answer = await stub.EstimateCells(a_call(job=f"{PARENT}/jobs/j"))
        stored = await stub.ListCells(pb.ListCellsRequest(parent=PARENT, workload=BERT))
    cells = [c.estimate.cell for c in answer.cells]
    assert {(c.gpu_type, c.gpus, c.pipeline_degree) for c in cells} == {
        (t, n, d) for t in ("a100", "v100") for n in (1, 2, 4) for d in (1, 2, 4) if d <= n
    }
    assert answer.stored == len(stored.cells) == len(answer.cells)
    assert sorted(str(c) for c in stored.cells) == sorted(str(c.estimate) for c in answer.cells)
    four = next(
        c for c in answer.cells if (c.estimate.cell.gpus, c.estimate.cell.pipeline_degree) == (4, 1)
    )
    assert four.estimate.source == pb.ANALYTIC
    assert 0.1 < four.estimate.sd < 1.0
    assert four.micro_batches == 16
    (stage,) = four.stages
    assert stage.data_parallel * stage.tensor_parallel == 4
    assert 1e9 < stage.memory_bytes < 40 * 2**30


async def test_pages_of_models_cover_each_once_and_include_published_ones_on_request(
    store: Store,
) -> None:
    async with estimates(store) as stub:
        own = pb.Model(model="bert", params="1.3B", architecture=MINE.architecture)
        await stub.UpsertModels(pb.UpsertModelsRequest(parent=PARENT, models=[MINE, own]))
        models: list[pb.Model] = []
        token = ""
        while True:
            page = await stub.ListModels(
                pb.ListModelsRequest(
                    parent=PARENT, page_size=7, page_token=token, with_published=True
                )
            )
            models += page.models
            token = page.next_page_token
            if not token:
                break
    keys = [(m.model, m.params) for m in models]
    assert keys == sorted(set(keys))
    assert {("bert", "1.3B"), ("mine", "4L"), ("moe", "27B")} <= set(keys)
    published = {(m.model, m.params): m.published for m in models}
    assert (published["bert", "1.3B"], published["bert", "2.6B"]) == (False, True)


IMPOSSIBLE: list[tuple[dict[str, Any], str, str]] = [
    (
        {"workload": pb.Workload(model="sphinx", global_batch=8), "gpus": [1]},
        "workload.model",
        "describe it with `tessera models add` (Estimates.UpsertModels), or import a",
    ),
    (
        {"workload": BERT, "gpus": [1], "gpu_types": ["a100", "b100"]},
        "gpu_types[1]",
        "the cluster has no GPU type 'b100'; it has: a100, abacus",
    ),
    (
        {"workload": BERT, "gpus": [1], "gpu_types": ["abacus"]},
        "gpu_types[0]",
        "abacus is not in the hardware catalogue",
    ),
    ({"workload": BERT}, "gpus", "must be given"),
    ({"workload": BERT, "gpus": [0]}, "gpus[0]", "must lie in 1 to 8,192"),
    ({"workload": BERT, "gpus": [1], "pipeline_degrees": [0]}, "pipeline_degrees[0]", "must lie"),
    ({"workload": BERT, "job": "clusters/c/jobs/j"}, "workload", "exactly one"),
    ({}, "workload", "exactly one"),
    ({"workload": BERT, "gpus": [1], "gpu_types": ["a100", "a100"]}, "gpu_types[1]", "repeats"),
]


"""Calls of EstimateCells, the field that is wrong, and what the refusal says."""


async def test_an_impossible_estimate_is_refused_by_field(store: Store) -> None:
    async with estimates(store, "a100", "abacus") as stub:
        for fields, field, says in IMPOSSIBLE:
            with pytest.raises(grpc.aio.AioRpcError) as wrong:
                await stub.EstimateCells(a_call(**fields))
            assert wrong.value.code() is StatusCode.INVALID_ARGUMENT
            assert says in str(wrong.value.details())
            assert error_details(wrong.value)[1] == [field]


async def test_unknown_types_are_skipped_unless_no_type_remains(store: Store) -> None:
    async with estimates(store, "a100", "abacus") as stub:
        answer = await stub.EstimateCells(a_call(workload=BERT, gpus=[1]))
        assert {c.estimate.cell.gpu_type for c in answer.cells} == {"a100"}
    store_of_abaci = "abacus"
    store.change(upsert_cluster, "d", [GpuType(name=store_of_abaci, memory_bytes=1)], None)
    async with serving(store) as (channel, _):
        stub = estimates_pb2_grpc.EstimatesStub(channel)
        with pytest.raises(grpc.aio.AioRpcError, match="has no nodes yet"):
            await stub.EstimateCells(
                pb.EstimateCellsRequest(parent="clusters/d", workload=BERT, gpus=[1])
            )
        store.change(upsert_nodes, "d", [NodeSpec(name="n", gpu_type="abacus", gpus=1)])
        with pytest.raises(
            grpc.aio.AioRpcError, match=r"none of the cluster's GPU types \(abacus\)"
        ):
            await stub.EstimateCells(
                pb.EstimateCellsRequest(parent="clusters/d", workload=BERT, gpus=[1])
            )


async def test_a_user_defined_type_is_estimated(store: Store, tmp_path: Any) -> None:
    file = tmp_path / "hardware.yaml"
    file.write_text("hardware: [{name: abacus, like: a100, memory_gib: 20}]")
    async with estimates(store, "abacus", hardware=str(file)) as stub:
        answer = await stub.EstimateCells(a_call(workload=BERT, gpus=[4]))
    assert {c.estimate.cell.gpu_type for c in answer.cells} == {"abacus"}


SMALL = pb.Workload(model="bert", params="760M", global_batch=256)


async def test_a_cancelled_call_stops_estimating(
    store: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    a_bare_cluster(store, nodes=1)
    begun, cancelled, counts = asyncio.Event(), threading.Event(), list[int]()
    loop = asyncio.get_running_loop()

    def cells(
        _: Estimator, _workload: Workload, _type: str, gpus: int, *__: Any, **___: Any
    ) -> list[Any]:
        counts.append(gpus)
        loop.call_soon_threadsafe(begun.set)
        assert cancelled.wait(PATIENCE_S)
        return []

    monkeypatch.setattr(Estimator, "cells", cells)
    async with serving(store) as (channel, _):
        call = estimates_pb2_grpc.EstimatesStub(channel).EstimateCells(
            a_call(workload=SMALL, gpus=[1, 2, 3, 4])
        )
        waiting = asyncio.ensure_future(call)
        await asyncio.wait_for(begun.wait(), PATIENCE_S)
        call.cancel()
        with suppress(asyncio.CancelledError):
            await waiting
        stub = estimates_pb2_grpc.EstimatesStub(channel)
        # By now the server knows of the cancellation.
        await stub.ListModels(pb.ListModelsRequest(parent=PARENT))
        cancelled.set()
    assert counts == [1]


@pytest.mark.usefixtures("trainer")
@pytest.mark.parametrize("learn", [True, False])
async def test_measurements_affect_estimates_only_on_a_server_that_learns(
    store: Store, learn: bool
) -> None:
    a_bare_cluster(store, nodes=1)
    workload = to_workload("w", SMALL)
    submit(store, a_spec("j", workload=workload))
    record = a_record(1, workload=workload, iter_time_s=9.0)
    store.change(upsert_estimates, C, [record])
    run(store, j=[("a100-0", [0])])
    for done in range(1, 8):
        agents_report(store, iterations_done=float(done), iter_time_s=9.0, runtime=TRAINER)
    async with serving(store, learn=learn) as (channel, _):
        stub = estimates_pb2_grpc.EstimatesStub(channel)
        answer = await stub.EstimateCells(a_call(workload=SMALL, gpus=[2], validate_only=True))
    assert answer.measurements == int(learn)


JOB = f"{PLACE}/jobs/j"


async def read(a: Api, gpus: int = 0) -> jobs_pb2.JobCurves:
    return await a.jobs.GetJobCurves(jobs_pb2.GetJobCurvesRequest(name=JOB, gpus=gpus))


def counted(monkeypatch: pytest.MonkeyPatch, module: Any, name: str) -> list[int]:
    """Return a list that grows by one item for each call of a function."""
    calls, real = list[int](), getattr(module, name)

    def call(*arguments: Any) -> Any:
        calls.append(1)
        return real(*arguments)

    monkeypatch.setattr(module, name, call)
    return calls


async def test_a_job_is_shown_its_best_rate_at_each_count_and_the_minimum(
    store: Store,
) -> None:
    async with api(store) as a:
        connect_agent(store)
        await a.estimates.UpsertCells(some_cells(a_cell(2, iter_time_s=0.2), a_cell(4)))
        await a.jobs.SubmitJob(a_submit(requested_gpus=4, guaranteed=True))

        found = await read(a)

        (of_type,) = found.types
        points = [(p.amount, round(p.best_rate), round(p.gain)) for p in of_type.gpus]
        assert points == [(1, 256, 1024), (2, 1280, 128), (4, 1280, 256), (8, 2048, 0)]
        assert (found.name, found.guaranteed, found.requested_gpus) == (JOB, True, 4)
        assert found.guaranteed_rate == pytest.approx(1024.0)
        least = of_type.minimum_demand
        assert (least.cell.gpus, least.nodes) == (2, 1)
        assert not found.HasField("current")
        assert not of_type.cpus
        assert "name no recorded execution plan" in of_type.bandwidth.unknown_reason
        assert (await read(a, 8)).types[0].at_gpus == 8


async def test_a_known_model_is_priced_at_other_bandwidths_of_the_network(
    store: Store,
) -> None:
    async with api(store) as a:
        connect_agent(store)
        await a.estimates.DeleteCells(pb.DeleteCellsRequest(parent=PLACE, workload=a_workload()))
        await a.jobs.SubmitJob(a_submit(requested_gpus=8))
        CellDeriver(store, catalogue_of(), (1.0, 2.0)).derive("c")

        found = await read(a, 16)

        curve = found.types[0].bandwidth
        assert curve.unknown_reason == ""
        rates = [point.cell.rate for point in curve.points]
        assert rates == sorted(rates)
        assert rates[0] < rates[-1]  # 16 GPUs are on two nodes
        at_16 = next(p for p in found.types[0].gpus if p.amount == 16)
        assert curve.points[3].cell.rate == pytest.approx(at_16.cell.rate)  # the present bandwidth
        speeds = [point.bytes_per_second for point in curve.points]
        assert speeds[3] == catalogue_of()["a100"].network_bytes_per_s
        assert speeds[4] == 2 * speeds[3]
        assert {point.cell.cell.plan for point in curve.points} <= set(found.execution_plans)


async def test_curves_are_computed_again_only_if_the_estimates_change(
    store: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    traced = counted(monkeypatch, curves, "curves_of_job")
    priced = counted(monkeypatch, curves, "trace_bandwidth")
    async with api(store) as a:
        connect_agent(store)
        await a.jobs.SubmitJob(a_submit())
        first = await read(a)
        await a.jobs.SubmitJob(a_submit("another"))
        assert await read(a) == first
        assert (len(traced), len(priced)) == (1, 1)

        await a.estimates.UpsertCells(some_cells(a_cell(1, iter_time_s=0.5)))

        assert (await read(a)).types[0].gpus[0].best_rate == pytest.approx(512.0)
        assert (len(traced), len(priced)) == (2, 2)


async def test_a_call_that_has_no_curve_is_refused_with_what_to_do(store: Store) -> None:
    async with api(store) as a:
        assert (await refusal_of(read(a)))[0] is StatusCode.NOT_FOUND
        await a.jobs.SubmitJob(a_submit())
        assert (await refusal_of(read(a)))[0] is StatusCode.FAILED_PRECONDITION  # no agent yet
        connect_agent(store)
        assert (await refusal_of(read(a, 3)))[::2] == (INVALID, ["gpus"])
        assert (await refusal_of(read(a, -1)))[::2] == (INVALID, ["gpus"])
        await a.jobs.CancelJob(jobs_pb2.CancelJobRequest(name=JOB))
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await read(a)
        assert "has ended" in (caught.value.details() or "")


def test_results_that_were_not_used_lately_are_dropped() -> None:
    kept, made = KeptResults[str, str](2), list[str]()

    def get(key: str) -> str:
        def compute() -> str:
            made.append(key)
            return key.upper()

        return kept.get(key, compute)

    assert [get(key) for key in ("a", "b", "a", "c", "a", "b")] == ["A", "B", "A", "C", "A", "B"]
    assert made == ["a", "b", "c", "b"]
