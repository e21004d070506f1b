"""Sensitivity curves as messages."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from functools import partial
from itertools import chain

from tessera.formulation.answer.job_curves import CurveCell, CurveStep, JobCurves, TypeCurves
from tessera.formulation.base.resources import amounts_of, name_amounts
from tessera.formulation.job.execution_plan import ExecutionPlan
from tessera.formulation.records.jobs import JobSpec
from tessera.formulation.state.snapshot import Snapshot
from tessera.service.server.convert import names
from tessera.service.server.estimates.bandwidth import BandwidthCurve
from tessera.v1 import estimates_pb2
from tessera.v1 import jobs_pb2 as pb


def of_curves(
    cluster: str,
    spec: JobSpec,
    focus: Snapshot,
    found: JobCurves,
    bandwidths: Sequence[BandwidthCurve],
    plans: Mapping[int, ExecutionPlan],
) -> pb.JobCurves:
    """Return the message of a job's curves.

    ``bandwidths`` has a curve for each of ``found.types``, and ``plans`` the recorded execution
    plans by their index in ``focus``.
    """
    cell = partial(_of_cell, focus)
    message = pb.JobCurves(
        name=names.job_name(cluster, spec.name),
        requested_gpus=spec.requested_gpus,
        requested_gpu_type=spec.requested_gpu_type,
        guaranteed=spec.guaranteed,
        guaranteed_rate=0.0 if math.isnan(found.guaranteed_rate) else found.guaranteed_rate,
        reference_rate=found.reference_rate,
        current=None if found.current is None else cell(found.current),
        types=[
            _of_type(focus, of_type, bandwidth)
            for of_type, bandwidth in zip(found.types, bandwidths, strict=True)
        ],
    )
    for index in {c.plan for c in _cells_of(found)} & plans.keys():
        message.execution_plans[focus.plans[index]] = plans[index].to_json()
    return message


def _of_type(focus: Snapshot, found: TypeCurves, bandwidth: BandwidthCurve) -> pb.TypeCurves:
    points, cell = partial(_of_steps, focus), partial(_of_cell, focus)
    return pb.TypeCurves(
        gpu_type=focus.gpu_types[found.gpu_type].name,
        gpus=points(found.gpus),
        at_gpus=found.at_gpus,
        **{name: points(steps) for name, steps in found.host.items()},
        shapes=map(cell, found.shapes),
        minimum_demand=None if found.minimum is None else cell(found.minimum),
        bandwidth=pb.BandwidthCurve(
            points=[
                pb.BandwidthPoint(bytes_per_second=point.bytes_per_s, cell=cell(point.cell))
                for point in bandwidth.points
            ],
            unknown_reason=bandwidth.unknown_reason,
        ),
    )


def _of_steps(focus: Snapshot, steps: Iterable[CurveStep]) -> Iterator[pb.CurvePoint]:
    for step in steps:
        yield pb.CurvePoint(
            amount=step.amount,
            cell=_of_cell(focus, step.cell),
            best_rate=step.best_rate,
            gain=step.gain,
        )


def _of_cell(focus: Snapshot, cell: CurveCell) -> pb.CurveCell:
    return pb.CurveCell(
        cell=estimates_pb2.Cell(
            gpu_type=focus.gpu_types[cell.gpu_type].name,
            gpus=cell.demand.gpus,
            pipeline_degree=cell.pipeline_degree,
            plan=focus.plans[cell.plan],
        ),
        nodes=cell.nodes,
        **name_amounts(amounts_of(cell.demand)),
        rate=cell.rate,
    )


def _cells_of(found: JobCurves) -> Iterator[CurveCell]:
    """Yield the Cells of which a message may name the execution plan."""
    if found.current is not None:
        yield found.current
    for of_type in found.types:
        for step in chain(of_type.gpus, *of_type.host.values()):
            yield step.cell
        yield from of_type.cells
        if of_type.minimum is not None:
            yield of_type.minimum
