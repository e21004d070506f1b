"""The estimates of one workload, computed by an estimator."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import product

from tessera.estimator.cell_estimator import Estimator
from tessera.estimator.models import model_of
from tessera.estimator.runnable_plans import estimate_runnable_plans
from tessera.estimator.stated.estimates import estimate_stated_plan
from tessera.estimator.tuning_plans import record_tunings
from tessera.formulation.records.estimates import (
    EstimateRecord,
    EstimationInputs,
    TuningRecord,
    UnestimatedWorkload,
)
from tessera.service.cells.tasks import EstimateTask


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
            estimates = estimator.cells(
                workload,
                gpu_type,
                gpus,
                None,
                cancelled,
                nodes=kind.nodes,
                exhausted=wanted.exhausted,
            )
            records += [cell.record for cell in estimates if _is_wanted(wanted, cell.record)]
            records += estimate_runnable_plans(
                estimator,
                workload,
                gpu_type,
                gpus,
                wanted.limits,
                estimates,
                kind.nodes,
                exhausted=wanted.exhausted,
                node=kind.node_capacity,
            )
    for plan, kind in product(wanted.plans, known.kinds):
        if cancelled():
            return None
        gpu_type = kind.gpu_type.name
        if gpu_type in estimator.hardware and plan.gpus <= kind.gpus:
            records += estimate_stated_plan(estimator, workload, gpu_type, plan, kind.nodes)
    return records


def _is_wanted(wanted: UnestimatedWorkload, record: EstimateRecord) -> bool:
    """Return whether some job of a workload may run by the plan of an estimate."""
    if wanted.is_open or record.plan is None:
        return wanted.is_open
    return any(limits.allow(record.plan) for limits in wanted.limits)


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
