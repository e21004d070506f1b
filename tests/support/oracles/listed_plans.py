"""Rounds of a few waiting jobs whose plans can all be listed, as in the papers' opening cases.

A plan gives each job a GPU type and a number of GPUs, or nothing. Restarts are free, and no job has
run before.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import product
from typing import Final

from tessera.estimator.hardware import A100, V100
from tessera.formulation.answer.decisions import CHANGES_GPUS
from tessera.formulation.base.values import Workload
from tessera.formulation.records.clusters import NodeSpec
from tessera.formulation.records.estimates import EstimateRecord
from tessera.formulation.records.jobs import JobSpec
from tessera.simulator.comparison.policies import options_of
from tessera.simulator.metrics import reference_of
from tessera.simulator.overheads import preset_overheads
from tessera.simulator.run import Decider
from tessera.simulator.scenario import Scenario
from tessera.simulator.traces.speeds import ClusterRoom, Speeds
from tessera.simulator.traces.trace import Arrival
from tessera.simulator.truth import truth_of
from tessera.simulator.world import World

NODE_GPUS: Final = 4
JOB_HOURS: Final = 10.0
"""The length of each job at its best rate as requested. It matters only to objectives about time."""

TypeAndGpus = tuple[str, int]
"""A GPU type and a number of GPUs, or ("", 0) for no GPUs."""
CellPlan = tuple[TypeAndGpus, ...]
NO_CELL: Final[TypeAndGpus] = ("", 0)


@dataclass(frozen=True, slots=True, kw_only=True)
class WaitingJob:
    """A job as it was requested."""

    workload: Workload
    gpus: int
    gpu_type: str


@dataclass(frozen=True, slots=True, kw_only=True)
class ListedRound:
    """A round with the rates of its jobs, from which the worth of each plan follows."""

    scenario: Scenario
    rates: tuple[Mapping[TypeAndGpus, float], ...]  # of each job: samples/s on each Cell
    reference: tuple[float, ...]  # of each job, samples/s

    @classmethod
    def of(
        cls, kinds: Sequence[str], jobs: Sequence[WaitingJob], records: Sequence[EstimateRecord]
    ) -> ListedRound:
        """Return the round of jobs that arrive together, on a node of each of ``kinds``."""
        nodes = [
            NodeSpec(name=f"{kind}-{i}", gpu_type=kind, gpus=NODE_GPUS)
            for i, kind in enumerate(kinds)
        ]
        catalogue = {hardware.name: hardware.gpu_type for hardware in (A100, V100)}
        speeds = Speeds(records, ClusterRoom.of(nodes))
        rates = tuple(_rates_of(job.workload, speeds) for job in jobs)
        arrivals = []
        for i, (job, of_job) in enumerate(zip(jobs, rates, strict=True)):
            best = max(rate for (_, gpus), rate in of_job.items() if gpus == job.gpus)
            spec = JobSpec(
                name=str(i),
                workload=job.workload,
                requested_gpus=job.gpus,
                requested_gpu_type=job.gpu_type,
                iterations=math.ceil(JOB_HOURS * 3600 * best / job.workload.global_batch),
            )
            arrivals.append(Arrival(0.0, spec))
        scenario = Scenario(
            gpu_types=[catalogue[kind] for kind in dict.fromkeys(kinds)],
            nodes=nodes,
            profiles=records,
            arrivals=arrivals,
        )
        reference = tuple(reference_of(scenario).rate.tolist())
        return cls(scenario=scenario, rates=rates, reference=reference)

    def total(self, plan: CellPlan) -> float:
        """Return the samples/s of a plan. A Cell on which a job does not run adds nothing."""
        return sum(of.get(cell, 0.0) for of, cell in zip(self.rates, plan, strict=True))

    def normalised(self, plan: CellPlan) -> float:
        """Return the normalised throughput of a plan."""
        each = zip(self.rates, plan, self.reference, strict=True)
        return sum(of.get(cell, 0.0) / reference for of, cell, reference in each)

    def plans(self) -> Iterator[CellPlan]:
        """Yield every plan that fits the GPUs of each type.

        Counts and node sizes are powers of two, so the Cells also fit the nodes.
        """
        room = ClusterRoom.of(self.scenario.nodes).gpus
        for plan in product(*([NO_CELL, *of] for of in self.rates)):
            if all(sum(n for t, n in plan if t == kind) <= most for kind, most in room.items()):
                yield plan

    def decided_by(self, policy: str) -> CellPlan:
        """Return the Cell on which a policy starts each job, or no GPUs if the job cannot run there."""
        world = World(self.scenario, overheads=preset_overheads("none"))
        world.advance(0.0)
        snapshot = world.snapshot()
        truth, plan = truth_of(snapshot), [NO_CELL] * len(self.rates)
        for decision in Decider(options_of(policy))(snapshot).decisions:
            if decision.kind in CHANGES_GPUS and decision.gang is not None:
                cell = snapshot.cell(decision.cell).on(decision.gang.nodes)
                workload = int(snapshot.jobs.workload[decision.job])
                runs = truth.iterations_per_s(workload, cell) > 0
                job = int(snapshot.jobs.name[decision.job])
                plan[job] = (cell.gpu_type, cell.gpus) if runs else NO_CELL
        return tuple(plan)


def _rates_of(workload: Workload, speeds: Speeds) -> dict[TypeAndGpus, float]:
    """Return the samples/s of a workload on each Cell on which it runs."""
    return {cell: workload.global_batch / s for cell, s in speeds.cells(workload).items()}
