"""tessera.v1.Estimates: what workloads can run on, and how fast."""

from __future__ import annotations

from functools import cache
from typing import Any, Final

import grpc.aio

from formulation.resources import EstimateRecord
from formulation.snapshot import Workload
from service.ports import Store, Writer
from service.rpc import fields, names
from service.rpc.calls import Calls
from service.rpc.convert import estimates as convert
from service.rpc.paging import page_of
from tessera.v1 import estimates_pb2 as pb
from tessera.v1 import estimates_pb2_grpc

MAX_CELLS: Final = 100_000
"""Cells in one call."""
_Context = grpc.aio.ServicerContext[Any, Any]


class EstimatesServicer(estimates_pb2_grpc.EstimatesServicer):
    """Serves estimates from the store."""

    def __init__(self, store: Store, calls: Calls) -> None:
        self._store, self._calls = store, calls

    async def UpsertCells(
        self, request: pb.UpsertCellsRequest, context: _Context
    ) -> pb.UpsertCellsResponse:
        """Create or replace Cells' estimates, all or none."""
        return await self._calls.run(self._upsert_cells, request)

    async def ListCells(
        self, request: pb.ListCellsRequest, context: _Context
    ) -> pb.ListCellsResponse:
        """Return a page of estimates."""
        return await self._calls.run(self._list_cells, request)

    def _upsert_cells(self, request: pb.UpsertCellsRequest) -> pb.UpsertCellsResponse:
        cluster = names.parse_cluster("parent", request.parent)
        fields.batch("cells", len(request.cells), MAX_CELLS)

        @cache
        def workload_of(job: str) -> Workload:
            return self._store.get_job(cluster, job).spec.workload

        def workload_of_job(field: str, name: str) -> Workload:
            parent, job = names.parse_job(field, name)
            names.require_parent(field, parent, cluster)
            return workload_of(job)

        records = [
            convert.to_estimate(f"cells[{i}]", cell, workload_of_job)
            for i, cell in enumerate(request.cells)
        ]
        fields.distinct((f"cells[{i}]", _identity(r)) for i, r in enumerate(records))
        key = fields.request_key(request, request.request_id)

        def work(writer: Writer) -> bytes:
            count = writer.upsert_estimates(cluster, records)
            return pb.UpsertCellsResponse(upserted=count).SerializeToString()

        kept = self._store.write(key, work, validate_only=request.validate_only)
        return pb.UpsertCellsResponse.FromString(kept)

    def _list_cells(self, request: pb.ListCellsRequest) -> pb.ListCellsResponse:
        cluster = names.parse_cluster("parent", request.parent)
        page = page_of(request, request.page_size, request.page_token, most=10_000, counts=True)
        model, params, global_batch = "", "", 0
        if request.workload.model:
            wanted = convert.to_workload("workload", request.workload)
            model, params, global_batch = wanted.model, wanted.params, wanted.global_batch
        found, cursor = self._store.list_estimates(
            cluster, model, params, global_batch, page.number, page.size
        )
        return pb.ListCellsResponse(
            cells=map(convert.of_estimate, found), next_page_token=page.token(cursor)
        )


def _identity(record: EstimateRecord) -> tuple[object, ...]:
    """Return what makes two estimates of one call the same."""
    return (
        record.workload, record.gpu_type, record.gpus, record.nodes, record.pipeline_degree,
        record.plan,
    )  # fmt: skip
