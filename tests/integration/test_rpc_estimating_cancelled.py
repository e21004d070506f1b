"""EstimateCells: a cancelled call stops computing, and a server learns only if its settings say so."""

from __future__ import annotations

import asyncio
import threading
from contextlib import suppress
from typing import Any

import pytest

from tessera.db.store import PostgresStore
from tessera.estimator.cell_estimator import Estimator
from tessera.formulation.records.clusters import NodeSpec
from tessera.formulation.values import GpuType, Workload
from tessera.v1 import estimates_pb2 as pb
from tessera.v1 import estimates_pb2_grpc
from tests.support.patience import PATIENCE_S
from tests.support.rpc import serving
from tests.support.stored_cluster import C, a_record, a_spec, agents_report, do, run, submit
from tests.support.training import TRAINER

PARENT = f"clusters/{C}"
BERT = Workload(model="bert", params="760M", global_batch=256)


def a_call(**fields: Any) -> pb.EstimateCellsRequest:
    workload = pb.Workload(model=BERT.model, params=BERT.params, global_batch=BERT.global_batch)
    return pb.EstimateCellsRequest(parent=PARENT, workload=workload, **fields)


def a_bare_cluster(store: PostgresStore) -> None:
    do(store, lambda w: w.upsert_cluster(C, [GpuType(name="a100", memory_bytes=2**35)], None))
    store.hello(C, "agent-a100-0", "first", [NodeSpec(name="a100-0", gpu_type="a100", gpus=4)])


async def test_a_cancelled_call_stops_estimating(
    store: PostgresStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    a_bare_cluster(store)
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
        call = estimates_pb2_grpc.EstimatesStub(channel).EstimateCells(a_call(gpus=[1, 2, 3, 4]))
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
    store: PostgresStore, learn: bool
) -> None:
    a_bare_cluster(store)
    submit(store, a_spec("j", workload=BERT))
    record = a_record(1, workload=BERT, iter_time_s=9.0)
    do(store, lambda w: w.upsert_estimates(C, [record]))
    run(store, j=[("a100-0", [0])])
    for done in range(1, 8):
        agents_report(store, iterations_done=float(done), iter_time_s=9.0, runtime=TRAINER)
    async with serving(store, learn=learn) as (channel, _):
        stub = estimates_pb2_grpc.EstimatesStub(channel)
        answer = await stub.EstimateCells(a_call(gpus=[2], validate_only=True))
    assert answer.measurements == int(learn)
