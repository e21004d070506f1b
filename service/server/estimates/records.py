"""The estimates of one workload, computed by an estimator."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import product

from tessera.estimator.cell_estimator import Estimator
from tessera.estimator.models import model_of
from tessera.estimator.plan_search import OPEN
from tessera.estimator.stated.estimates import estimate_stated_plan
from tessera.estimator.tuning_plans import record_tunings
from tessera.formulation.base.values import Cell
from tessera.formulation.records.estimates import (
    ClusterGpuType,
    EstimateRecord,
    EstimationInputs,
    TuningRecord,
    UnestimatedWorkload,
)
from tessera.service.server.estimates.tasks import EstimateTask


def compute_records(
    estimator: Estimator,
    known: EstimationInputs,
    task: EstimateTask,
    cancelled: Callable[[], bool],
) -> list[EstimateRecord] | None:
    """Return the estimates of a workload, or None if ``cancelled`` has become true.

    Raises:
        TesseraError: it cannot be estimated.
    """
    wanted = task.wanted
    workload = wanted.workload
    estimator.know(workload, model_of("model", workload, known.models, known.profiles))
    kinds = {kind.gpu_type.name: kind for kind in known.kinds}
    records = []
    for gpu_type, counts in task.counts.items():
        kind = kinds[gpu_type]
        for gpus in counts:
            if cancelled():
                return None
            records += _search(estimator, kind, wanted, gpus, cancelled)
    for plan, kind in product(wanted.plans, known.kinds):
        if cancelled():
            return None
        gpu_type = kind.gpu_type.name
        if gpu_type in estimator.hardware and plan.gpus <= kind.gpus:
            records += estimate_stated_plan(estimator, workload, gpu_type, plan, kind.nodes)
    return records


def _search(
    estimator: Estimator,
    kind: ClusterGpuType,
    target: UnestimatedWorkload,
    gpus: int,
    cancelled: Callable[[], bool],
) -> list[EstimateRecord]:
    """Return the best Cells on some GPUs within the limits of each job of a workload."""
    records: dict[Cell, EstimateRecord] = {}
    for limits in (*((OPEN,) if target.is_open else ()), *target.limits):
        for cell in estimator.cells(
            target.workload,
            kind.gpu_type.name,
            gpus,
            cancelled=cancelled,
            nodes=kind.nodes,
            exhausted=target.exhausted,
            limits=limits,
            node=kind.node_capacity,
        ):
            records.setdefault(cell.record.cell, cell.record)
    return list(records.values())


def plan_stated_cells(
    estimator: Estimator, target: UnestimatedWorkload
) -> list[tuple[Cell, EstimateRecord]]:
    """Return users' Cells without a plan, each with the record of the best plan for it.

    A Cell without a pipeline degree has the best plan of all, and one without nodes has one for any.
    Those that have no plan that fits are left out.
    """
    planned_cells = list[tuple[Cell, EstimateRecord]]()
    for user_cell in target.without_plan:
        record = estimator.plan_cell(target.workload, user_cell)
        if record is not None:
            planned_cells.append((user_cell, record))
    return planned_cells


def compute_tunings(
    estimator: Estimator,
    wanted: UnestimatedWorkload,
    records: Sequence[EstimateRecord],
    cancelled: Callable[[], bool],
) -> list[TuningRecord] | None:
    """Return the plans that jobs of a workload may try around those of its estimates.

    Return None if ``cancelled`` has become true.
    """
    tunings = list[TuningRecord]()
    if not wanted.tunings:
        return tunings
    for record in records:
        if cancelled():
            return None
        tunings += record_tunings(estimator, record, wanted.tunings, wanted.exhausted)
    return tunings
