"""Models and estimates over a real socket: answers, stored Cells and models, and refusals."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import grpc.aio
import pytest
from grpc import StatusCode

from tessera.db.store import PostgresStore
from tessera.formulation.records.clusters import NodeSpec
from tessera.formulation.values import EstimateSource, GpuType
from tessera.service.rpc.convert.estimates import to_workload
from tessera.v1 import estimates_pb2 as pb
from tessera.v1 import estimates_pb2_grpc
from tests.support.rpc import error_details, serving
from tests.support.stored_cluster import C, a_record, a_spec, do, submit

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
    store: PostgresStore, *types: str, **settings: Any
) -> AsyncIterator[estimates_pb2_grpc.EstimatesAsyncStub]:
    """Yield a stub to a server whose cluster has two nodes of four GPUs of each type."""
    kinds = [GpuType(name=t, memory_bytes=40 * 2**30) for t in types or ("a100", "v100")]
    do(store, lambda w: w.upsert_cluster(C, kinds, None))
    nodes = [NodeSpec(name=f"{t.name}-{i}", gpu_type=t.name, gpus=4) for t in kinds for i in (0, 1)]
    do(store, lambda w: w.upsert_nodes(C, nodes))
    async with serving(store, **settings) as (channel, _):
        yield estimates_pb2_grpc.EstimatesStub(channel)


def a_call(**fields: Any) -> pb.EstimateCellsRequest:
    return pb.EstimateCellsRequest(parent=PARENT, **fields)


async def test_a_jobs_cells_are_estimated_on_all_types_around_the_requested_count(
    store: PostgresStore,
) -> None:
    async with estimates(store) as stub:
        submit(store, a_spec("j", workload=to_workload("w", BERT), requested_gpus=2))
        answer = await stub.EstimateCells(a_call(job=f"{PARENT}/jobs/j"))
        stored = await stub.ListCells(pb.ListCellsRequest(parent=PARENT, workload=BERT))
    cells = [c.estimate.cell for c in answer.cells]
    assert {(c.gpu_type, c.gpus, c.pipeline_degree) for c in cells} == {
        (t, n, d) for t in ("a100", "v100") for n in (1, 2, 4) for d in (1, 2, 4) if d <= n
    }
    assert answer.kept == len(stored.cells) == len(answer.cells)
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


async def test_user_estimates_stay_when_their_workload_is_estimated(store: PostgresStore) -> None:
    async with estimates(store, "a100") as stub:
        users = a_record(
            2, workload=to_workload("w", BERT), source=EstimateSource.PROFILED, iter_time_s=9.0
        )
        do(store, lambda w: w.upsert_estimates(C, [users]))
        answer = await stub.EstimateCells(a_call(workload=BERT, gpus=[1, 2]))
        stored = await stub.ListCells(pb.ListCellsRequest(parent=PARENT, workload=BERT))
    assert answer.kept == 1
    cells = {(c.cell.gpus, c.cell.pipeline_degree): c for c in stored.cells}
    assert cells.keys() == {(1, 1), (2, 1)}
    assert (cells[2, 1].iter_time_s, cells[2, 1].source) == (9.0, pb.PROFILED)


async def test_a_user_model_is_stored_listed_and_estimated(store: PostgresStore) -> None:
    async with estimates(store) as stub:
        stored = await stub.UpsertModels(pb.UpsertModelsRequest(parent=PARENT, models=[MINE]))
        listed = await stub.ListModels(pb.ListModelsRequest(parent=PARENT))
        cells = await stub.EstimateCells(
            a_call(workload=pb.Workload(model="mine", params="4L", global_batch=32), gpus=[1])
        )
    (model,) = stored.models
    assert list(listed.models) == [model]
    assert (model.micro_batches, model.state_bytes, model.dtype) == (8, 16.0, "bf16")
    assert 3e6 < model.parameters < 5e6
    assert {c.micro_batches for c in cells.cells} == {8}


async def test_pages_of_models_cover_each_once_and_include_published_ones_on_request(
    store: PostgresStore,
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
    ({"workload": BERT, "gpus": [0]}, "gpus[0]", "must lie in 1 to 512"),
    (
        {"workload": BERT, "gpus": [1], "pipeline_degrees": [0]},
        "pipeline_degrees[0]",
        "must lie",
    ),
    ({"workload": BERT, "job": "clusters/c/jobs/j"}, "workload", "exactly one"),
    ({}, "workload", "exactly one"),
    ({"workload": BERT, "gpus": [1], "gpu_types": ["a100", "a100"]}, "gpu_types[1]", "repeats"),
]
"""Calls of EstimateCells, the field that is wrong, and what the refusal says."""


async def test_an_impossible_estimate_is_refused_by_field(store: PostgresStore) -> None:
    async with estimates(store, "a100", "abacus") as stub:
        for fields, field, says in IMPOSSIBLE:
            with pytest.raises(grpc.aio.AioRpcError) as wrong:
                await stub.EstimateCells(a_call(**fields))
            assert wrong.value.code() is StatusCode.INVALID_ARGUMENT
            assert says in str(wrong.value.details())
            assert error_details(wrong.value)[1] == [field]


async def test_unknown_types_are_skipped_unless_no_type_remains(
    store: PostgresStore,
) -> None:
    async with estimates(store, "a100", "abacus") as stub:
        answer = await stub.EstimateCells(a_call(workload=BERT, gpus=[1]))
        assert {c.estimate.cell.gpu_type for c in answer.cells} == {"a100"}
    store_of_abaci = "abacus"
    do(store, lambda w: w.upsert_cluster("d", [GpuType(name=store_of_abaci, memory_bytes=1)], None))
    async with serving(store) as (channel, _):
        stub = estimates_pb2_grpc.EstimatesStub(channel)
        with pytest.raises(grpc.aio.AioRpcError, match="has no nodes yet"):
            await stub.EstimateCells(
                pb.EstimateCellsRequest(parent="clusters/d", workload=BERT, gpus=[1])
            )
        do(store, lambda w: w.upsert_nodes("d", [NodeSpec(name="n", gpu_type="abacus", gpus=1)]))
        with pytest.raises(
            grpc.aio.AioRpcError, match=r"none of the cluster's GPU types \(abacus\)"
        ):
            await stub.EstimateCells(
                pb.EstimateCellsRequest(parent="clusters/d", workload=BERT, gpus=[1])
            )


async def test_a_user_defined_type_is_estimated(store: PostgresStore, tmp_path: Any) -> None:
    file = tmp_path / "hardware.yaml"
    file.write_text("hardware: [{name: abacus, like: a100, memory_gib: 20}]")
    async with estimates(store, "abacus", hardware=str(file)) as stub:
        answer = await stub.EstimateCells(a_call(workload=BERT, gpus=[4]))
    assert {c.estimate.cell.gpu_type for c in answer.cells} == {"abacus"}


async def test_an_invalid_model_is_refused_by_its_field(store: PostgresStore) -> None:
    wrong = pb.Model(model="b", architecture="{architecture: transformer, layers: many}")
    async with estimates(store) as stub:
        with pytest.raises(grpc.aio.AioRpcError) as refused:
            await stub.UpsertModels(pb.UpsertModelsRequest(parent=PARENT, models=[MINE, wrong]))
        again = pb.UpsertModelsRequest(parent=PARENT, models=[MINE, MINE])
        with pytest.raises(grpc.aio.AioRpcError, match="repeats"):
            await stub.UpsertModels(again)
        assert not (await stub.ListModels(pb.ListModelsRequest(parent=PARENT))).models
    assert error_details(refused.value)[1] == ["models[1].architecture.layers"]
