"""The sensitivity curves of jobs over a real socket against PostgreSQL."""

from __future__ import annotations

from typing import Any

import grpc.aio
import pytest
from grpc import StatusCode

from tessera.db.store import PostgresStore
from tessera.estimator.hardware.cluster_types import catalogue_of
from tessera.service.cells.deriver import CellDeriver
from tessera.service.rpc import curves
from tessera.service.rpc.curves import KeptResults
from tessera.v1 import estimates_pb2, jobs_pb2
from tests.support.api import (
    INVALID,
    Api,
    C,
    a_cell,
    a_submit,
    a_workload,
    api,
    connect_agent,
    refusal_of,
    some_cells,
)

JOB = f"{C}/jobs/j"


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
    store: PostgresStore,
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
        assert "name no recorded execution plan" in of_type.bandwidth.unknown_because
        assert (await read(a, 8)).types[0].at_gpus == 8


async def test_a_known_model_is_priced_at_other_bandwidths_of_the_network(
    store: PostgresStore,
) -> None:
    async with api(store) as a:
        connect_agent(store)
        await a.estimates.DeleteCells(
            estimates_pb2.DeleteCellsRequest(parent=C, workload=a_workload())
        )
        await a.jobs.SubmitJob(a_submit(requested_gpus=8))
        CellDeriver(store, catalogue_of(), (1.0, 2.0)).derive("c")

        found = await read(a, 16)

        curve = found.types[0].bandwidth
        assert curve.unknown_because == ""
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
    store: PostgresStore, monkeypatch: pytest.MonkeyPatch
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


async def test_a_call_that_has_no_curve_is_refused_with_what_to_do(store: PostgresStore) -> None:
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
