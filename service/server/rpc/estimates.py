"""tessera.v1.Estimates: the Cells that workloads can run on, and how fast they are."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from functools import cache
from itertools import product
from typing import Any, Final

import grpc.aio
from google.protobuf.empty_pb2 import Empty

from tessera.db.clusters.deletion import delete_cells, delete_models
from tessera.db.estimates.derived_estimates import (
    list_models,
    load_estimation,
    put_derived_estimates,
    upsert_models,
)
from tessera.db.estimates.workloads import upsert_estimates
from tessera.db.store.profile_changes import add_profiles
from tessera.db.store.reads import EVERY_WORKLOAD, get_job, list_estimates
from tessera.db.store.store import Connection, Store
from tessera.estimator.architectures.published import published_models
from tessera.estimator.cell_estimator import CellEstimate, Estimator
from tessera.estimator.gpu_counts import GPU_MULTIPLES, MAX_GPUS, gpu_counts_of
from tessera.estimator.hardware import Hardware
from tessera.estimator.hardware.cluster_types import hardware_of, no_known_type
from tessera.estimator.models import known_models, model_of, read_model
from tessera.estimator.profiling.tasks import ProfilingOptions, profiling_status
from tessera.formulation.base.cancellation import require_caller
from tessera.formulation.base.errors import InvalidInput
from tessera.formulation.base.values import Cell, Workload
from tessera.formulation.records.estimates import (
    ClusterGpuType,
    EstimateRecord,
    EstimationInputs,
    ModelSpec,
)
from tessera.formulation.records.jobs import JobSpec
from tessera.service import fields
from tessera.service.server.convert import estimates as convert
from tessera.service.server.convert import names
from tessera.service.server.convert.models import of_cell, of_model, of_published, to_model
from tessera.service.server.convert.profiles import of_status, to_gap, to_host, to_profiles
from tessera.service.server.rpc.paging import page_of
from tessera.service.server.tasks.lanes import CALLER, Lane, SizedCalls
from tessera.v1 import estimates_pb2 as pb
from tessera.v1 import estimates_pb2_grpc

MAX_CELLS: Final = 100_000
"""Largest number of Cells in one call."""
MAX_MODELS: Final = 1000
"""Largest number of models in a call and in a page of an answer: each has a document to read."""
MAX_COUNTS: Final = 16
MAX_DEGREE: Final = 64
_Context = grpc.aio.ServicerContext[Any, Any]


class EstimatesServicer(estimates_pb2_grpc.EstimatesServicer):
    """The servicer of estimates, from the store."""

    def __init__(
        self,
        store: Store,
        calls: SizedCalls,
        estimates: Lane,
        hardware: Mapping[str, Hardware],
        *,
        learns: bool = True,
        profiling: ProfilingOptions | None = None,
    ) -> None:
        """Remember the parts.

        ``estimates`` is the lane for estimates that callers request. ``hardware`` is the catalogue
        by name. If ``learns`` is set, measurements correct the estimates. ``profiling`` says what
        is measured and when.
        """
        self._profiling = profiling or ProfilingOptions()
        self._store, self._calls, self._learns = store, calls, learns
        self._estimates, self._hardware = estimates, hardware

    async def UpsertCells(
        self, request: pb.UpsertCellsRequest, context: _Context
    ) -> pb.UpsertCellsResponse:
        """Create or replace Cells' estimates, all or none."""
        return await self._calls.run_by_size(self._upsert_cells, request)

    async def ListCells(
        self, request: pb.ListCellsRequest, context: _Context
    ) -> pb.ListCellsResponse:
        """Return a page of estimates."""
        return await self._calls.run_by_size(self._list_cells, request)

    async def DeleteCells(
        self, request: pb.DeleteCellsRequest, context: _Context
    ) -> pb.DeleteCellsResponse:
        """Delete all matching estimates."""
        return await self._calls.run(self._delete_cells, request)

    async def EstimateCells(
        self, request: pb.EstimateCellsRequest, context: _Context
    ) -> pb.EstimateCellsResponse:
        """Estimate a workload's Cells."""
        cluster = names.parse_cluster("parent", request.parent)
        return await self._estimates.run(
            CALLER.get(),
            f"EstimateCells of {cluster}",
            lambda turn: self._estimate(request, turn.is_over),
        )

    async def AddProfiles(
        self, request: pb.AddProfilesRequest, context: _Context
    ) -> pb.AddProfilesResponse:
        """Store measured layers, all or none."""
        return await self._calls.run_by_size(self._add_profiles, request)

    async def GetProfiling(
        self, request: pb.GetProfilingRequest, context: _Context
    ) -> pb.Profiling:
        """Return the state of a workload's profiling."""
        return await self._calls.run(self._profiling_of, request)

    async def UpsertModels(
        self, request: pb.UpsertModelsRequest, context: _Context
    ) -> pb.UpsertModelsResponse:
        """Create or replace models, all or none."""
        return await self._calls.run_cancellable(self._upsert_models, request)

    async def DeleteModels(self, request: pb.DeleteModelsRequest, context: _Context) -> Empty:
        """Delete models that no live job trains, all or none."""
        return await self._calls.run_by_size(self._delete_models, request)

    async def ListModels(
        self, request: pb.ListModelsRequest, context: _Context
    ) -> pb.ListModelsResponse:
        """Return a page of models."""
        return await self._calls.run_cancellable(self._list_models, request)

    def _upsert_cells(self, request: pb.UpsertCellsRequest) -> pb.UpsertCellsResponse:
        cluster = names.parse_cluster("parent", request.parent)
        fields.require_batch_size("cells", len(request.cells), MAX_CELLS)

        @cache
        def workload_of(field: str, name: str) -> Workload:
            return self._job(field, name, cluster).workload

        records = [
            convert.to_estimate(f"cells[{i}]", cell, workload_of)
            for i, cell in enumerate(request.cells)
        ]
        fields.require_distinct((f"cells[{i}]", _identity(r)) for i, r in enumerate(records))
        key = fields.request_key(request, request.request_id)

        def work(connection: Connection) -> bytes:
            count = upsert_estimates(connection, cluster, records)
            return pb.UpsertCellsResponse(upserted=count).SerializeToString()

        kept = self._store.write(key, work, validate_only=request.validate_only)
        return pb.UpsertCellsResponse.FromString(kept)

    def _delete_cells(self, request: pb.DeleteCellsRequest) -> pb.DeleteCellsResponse:
        cluster = names.parse_cluster("parent", request.parent)
        cells = convert.to_cell_filter(request)
        key = fields.request_key(request, request.request_id)

        def work(connection: Connection) -> bytes:
            deleted = delete_cells(connection, cluster, cells)
            return pb.DeleteCellsResponse(deleted=deleted).SerializeToString()

        kept = self._store.write(key, work, validate_only=request.validate_only)
        return pb.DeleteCellsResponse.FromString(kept)

    def _list_cells(self, request: pb.ListCellsRequest) -> pb.ListCellsResponse:
        cluster = names.parse_cluster("parent", request.parent)
        page = page_of(request, request.page_size, request.page_token, most=10_000, counts=True)
        workload = EVERY_WORKLOAD
        if request.workload.model:
            workload = convert.to_workload("workload", request.workload)
        found, cursor = self._store.read(list_estimates, cluster, workload, page.number, page.size)
        return pb.ListCellsResponse(
            cells=map(convert.of_estimate, found), next_page_token=page.token(cursor)
        )

    def _estimate(
        self, request: pb.EstimateCellsRequest, cancelled: Callable[[], bool]
    ) -> pb.EstimateCellsResponse:
        cluster = names.parse_cluster("parent", request.parent)
        if bool(request.job) == request.HasField("workload"):
            raise InvalidInput("workload", "set exactly one of workload and job")
        spec = self._job("job", request.job, cluster) if request.job else None
        workload = spec.workload if spec else convert.to_workload("workload", request.workload)
        counts, degrees = _counts(request, spec), _degrees(request)
        known = self._store.read(load_estimation, cluster)
        hardware = self._kinds(request, known)
        measurements = known.measurements if self._learns else ()
        place = "job" if request.job else "workload"
        models = {
            **known_models((m.workload for m in measurements), known.models, known.profiles),
            workload: model_of(
                f"{place}.model" if not spec else place, workload, known.models, known.profiles
            ),
        }
        estimator = Estimator(hardware, models, measurements)
        there = {kind.gpu_type.name: kind.nodes for kind in known.kinds}
        exhausted = next((w.exhausted for w in known.wanted if w.workload == workload), ())
        estimates: list[CellEstimate] = []
        for gpu_type, gpus in product(hardware, counts):
            require_caller(cancelled)
            nodes = there[gpu_type] or None  # shapes of types without nodes are not bounded
            estimates += estimator.cells(
                workload, gpu_type, gpus, degrees, cancelled, nodes=nodes, exhausted=exhausted
            )
        kept = self._keep(cluster, estimates, validate_only=request.validate_only)
        return pb.EstimateCellsResponse(
            cells=map(of_cell, estimates), stored=kept, measurements=estimator.learned
        )

    def _keep(self, cluster: str, found: Sequence[CellEstimate], *, validate_only: bool) -> int:
        kept: list[int] = []

        def work(connection: Connection) -> bytes:
            kept.append(
                put_derived_estimates(connection, cluster, [cell.record for cell in found], {})
            )
            return b""

        self._store.write(None, work, validate_only=validate_only)
        return kept[-1]

    def _kinds(
        self, request: pb.EstimateCellsRequest, known: EstimationInputs
    ) -> dict[str, Hardware]:
        """Return the requested GPU types, or if none are, all known types that have nodes."""
        by_name = {kind.gpu_type.name: kind for kind in known.kinds}

        def hardware_at(field: str, kind: ClusterGpuType) -> Hardware:
            return hardware_of(field, kind, self._hardware, known.hosts)

        if not request.gpu_types:
            there = {name: kind for name, kind in by_name.items() if kind.node_gpus}
            chosen = {name: kind for name, kind in there.items() if name in self._hardware}
            if not chosen:
                raise InvalidInput("gpu_types", no_known_type(there, self._hardware))
            return {name: hardware_at("gpu_types", kind) for name, kind in chosen.items()}
        fields.require_distinct(
            (f"gpu_types[{i}]", name) for i, name in enumerate(request.gpu_types)
        )
        hardware = {}
        for i, name in enumerate(request.gpu_types):
            if name not in by_name:
                has = ", ".join(by_name) or "none"
                raise InvalidInput(
                    f"gpu_types[{i}]", f"the cluster has no GPU type {name[:80]!r}; it has: {has}"
                )
            hardware[name] = hardware_at(f"gpu_types[{i}]", by_name[name])
        return hardware

    def _job(self, field: str, name: str, cluster: str) -> JobSpec:
        parent, job = names.parse_job(field, name)
        names.require_parent(field, parent, cluster)
        return self._store.read(get_job, cluster, job).spec

    def _add_profiles(self, request: pb.AddProfilesRequest) -> pb.AddProfilesResponse:
        cluster = names.parse_cluster("parent", request.parent)
        rows, gap, host = to_profiles(request), to_gap(request), to_host(request)
        key = fields.request_key(request, request.request_id)

        def work(connection: Connection) -> bytes:
            added = add_profiles(connection, cluster, rows, gap, host)
            return pb.AddProfilesResponse(new_records=added).SerializeToString()

        kept = self._store.write(key, work, validate_only=request.validate_only)
        return pb.AddProfilesResponse.FromString(kept)

    def _profiling_of(self, request: pb.GetProfilingRequest) -> pb.Profiling:
        cluster = names.parse_cluster("parent", request.parent)
        workload = convert.to_workload("workload", request.workload)
        known = self._store.read(load_estimation, cluster)
        return of_status(profiling_status(known, self._hardware, self._profiling, workload))

    def _upsert_models(
        self, request: pb.UpsertModelsRequest, cancelled: Callable[[], bool]
    ) -> pb.UpsertModelsResponse:
        cluster = names.parse_cluster("parent", request.parent)
        fields.require_batch_size("models", len(request.models), MAX_MODELS)
        specs = [to_model(f"models[{i}]", model) for i, model in enumerate(request.models)]
        fields.require_distinct((f"models[{i}]", (s.model, s.params)) for i, s in enumerate(specs))
        read = []
        for i, spec in enumerate(specs):
            require_caller(cancelled)
            read.append(read_model(f"models[{i}]", spec, cancelled))
        key = fields.request_key(request, request.request_id)

        def work(connection: Connection) -> bytes:
            upsert_models(connection, cluster, specs)
            models = [of_model(spec, model) for spec, model in zip(specs, read, strict=True)]
            return pb.UpsertModelsResponse(models=models).SerializeToString()

        kept = self._store.write(key, work, validate_only=request.validate_only)
        return pb.UpsertModelsResponse.FromString(kept)

    def _delete_models(self, request: pb.DeleteModelsRequest) -> Empty:
        cluster = names.parse_cluster("parent", request.parent)
        fields.require_batch_size("models", len(request.models), MAX_MODELS)
        models = [convert.to_model_name(f"models[{i}]", m) for i, m in enumerate(request.models)]
        fields.require_distinct((f"models[{i}]", model) for i, model in enumerate(models))
        key = fields.request_key(request, request.request_id)

        def work(connection: Connection) -> bytes:
            delete_models(connection, cluster, models, allow_missing=request.allow_missing)
            return b""

        self._store.write(key, work, validate_only=request.validate_only)
        return Empty()

    def _list_models(
        self, request: pb.ListModelsRequest, cancelled: Callable[[], bool]
    ) -> pb.ListModelsResponse:
        cluster = names.parse_cluster("parent", request.parent)
        page = page_of(request, request.page_size, request.page_token, most=MAX_MODELS)
        specs = {(s.model, s.params): s for s in self._store.read(list_models, cluster)}
        keys = sorted({*specs, *(published_models() if request.with_published else ())})
        at = [json.dumps(key) for key in keys]
        start = at.index(page.cursor) + 1 if page.cursor in at else 0
        shown = keys[start : start + page.size]
        more = len(keys) > start + page.size
        models = []
        for key in shown:
            require_caller(cancelled)
            models.append(_shown(key, specs.get(key)))
        return pb.ListModelsResponse(
            models=models,
            next_page_token=page.token(json.dumps(shown[-1]) if more else ""),
        )


def _shown(key: tuple[str, str], spec: ModelSpec | None) -> pb.Model:
    if spec is not None:
        return of_model(spec, read_model("", spec))
    workload = Workload(model=key[0], params=key[1], global_batch=1)
    return of_published(key, model_of("", workload, ()))


def _counts(request: pb.EstimateCellsRequest, spec: JobSpec | None) -> list[int]:
    if not request.gpus:
        if spec is None:
            raise InvalidInput(
                "gpus", "must be given, because without a job no number is requested"
            )
        return [n for n in gpu_counts_of([spec.requested_gpus], GPU_MULTIPLES) if n <= MAX_GPUS]
    fields.require_batch_size("gpus", len(request.gpus), MAX_COUNTS)
    return sorted(
        {fields.require_whole(f"gpus[{i}]", n, 1, MAX_GPUS) for i, n in enumerate(request.gpus)}
    )


def _degrees(request: pb.EstimateCellsRequest) -> list[int] | None:
    if not request.pipeline_degrees:
        return None
    fields.require_batch_size("pipeline_degrees", len(request.pipeline_degrees), MAX_COUNTS)
    return [
        fields.require_whole(f"pipeline_degrees[{i}]", n, 1, MAX_DEGREE)
        for i, n in enumerate(request.pipeline_degrees)
    ]


def _identity(record: EstimateRecord) -> tuple[Workload, Cell]:
    """Return the key by which two estimates of one call are the same."""
    return record.workload, record.cell
