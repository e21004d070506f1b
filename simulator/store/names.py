"""The names that tables refer to by index: GPU types, workloads and execution plans."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from tessera.formulation.base.values import Cell, CellKey, GpuType, Workload
from tessera.formulation.records.estimates import EstimateRecord
from tessera.formulation.records.jobs import JobSpec
from tessera.formulation.state.plan_tables import PlanKinds
from tessera.simulator.scenario import Scenario


@dataclass(frozen=True, slots=True, kw_only=True)
class Names:
    """The GPU types, workloads and plans of a cluster, in the order of its snapshots."""

    gpu_types: tuple[GpuType, ...]
    workloads: tuple[Workload, ...]  # by model, size and batch
    plans: tuple[str, ...]

    def type_indices(self) -> dict[str, int]:
        """Return the index of each GPU type by its name. That of "", which is any type, is -1."""
        return {"": -1} | {kind.name: i for i, kind in enumerate(self.gpu_types)}

    def cell(self, key: CellKey) -> Cell:
        """Return the Cell of a key, with names in place of indices."""
        return key.named(self.gpu_types, self.plans)


def workloads_of(scenario: Scenario, specs: Iterable[JobSpec]) -> tuple[Workload, ...]:
    """Return the workloads of the scenario's profiles and of jobs, as snapshots order them."""
    workloads = {e.workload for e in scenario.profiles} | {spec.workload for spec in specs}
    return tuple(sorted(workloads, key=lambda w: (w.model, w.params, w.global_batch)))


def plans_of(profiles: Iterable[EstimateRecord], specs: Iterable[JobSpec]) -> tuple[str, ...]:
    """Return the ids of the plans of profiles, and of those that users state for jobs or submit."""
    plans = {"", *(e.cell.plan for e in profiles)}
    for spec in specs:
        plans |= {spec.plan.digest if spec.plan else "", spec.submitted_plan_id}
    return tuple(sorted(plans))


def plan_kinds_of(profiles: Iterable[EstimateRecord], plans: Sequence[str]) -> PlanKinds:
    """Return the kinds of those ``plans`` that have one by their profile."""
    kinds = {e.cell.plan: e.plan_kind for e in profiles if e.plan_kind}
    return PlanKinds.from_rows(
        [{"plan": i, "kind": kinds[plan]} for i, plan in enumerate(plans) if plan in kinds]
    )
