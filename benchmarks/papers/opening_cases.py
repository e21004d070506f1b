"""The papers' opening cases: their clusters, jobs and rates, and policies' decisions on them."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import product
from pathlib import Path
from typing import Final

from tessera.estimator.hardware import A100, V100
from tessera.formulation.decisions import CHANGES_GPUS
from tessera.formulation.records.clusters import NodeSpec
from tessera.formulation.records.estimates import EstimateRecord
from tessera.formulation.records.jobs import JobSpec
from tessera.formulation.snapshot import Snapshot
from tessera.formulation.values import GpuType, Workload
from tessera.simulator.comparison.policies import information_of, options_of
from tessera.simulator.metrics import reference_of
from tessera.simulator.overheads import preset_overheads
from tessera.simulator.run import Decider
from tessera.simulator.scenario import Scenario
from tessera.simulator.traces.speeds import ClusterRoom, Speeds
from tessera.simulator.traces.trace import Arrival
from tessera.simulator.truth import truth_of
from tessera.simulator.world import World

JOB_HOURS: Final = 10.0
"""The length of each job at its reference rate. It matters only to objectives about time."""

TypeAndGpus = tuple[str, int]
"""A GPU type and a number of GPUs, or ("", 0) for no GPUs."""
CellPlan = tuple[TypeAndGpus, ...]
NO_CELL: Final[TypeAndGpus] = ("", 0)


@dataclass(frozen=True, slots=True, kw_only=True)
class OpeningJob:
    """A job of a case, as it was requested."""

    workload: Workload
    gpus: int
    gpu_type: str = "a100"

    @property
    def name(self) -> str:
        """Return a short name of the workload."""
        return f"{self.workload.model} {self.workload.params}"


@dataclass(frozen=True, slots=True, kw_only=True)
class OpeningCase:
    """A cluster, its waiting jobs in order of arrival, and the plans that the papers compare."""

    name: str
    nodes: tuple[tuple[str, int], ...]  # the type and number of GPUs of each node
    jobs: tuple[OpeningJob, ...]
    plans: tuple[CellPlan, ...]


def _job(model: str, params: str, batch: int, gpus: int = 4, gpu_type: str = "a100") -> OpeningJob:
    workload = Workload(model=model, params=params, global_batch=batch)
    return OpeningJob(workload=workload, gpus=gpus, gpu_type=gpu_type)


def _on_a100(*counts: int) -> CellPlan:
    return tuple(("a100", n) if n else NO_CELL for n in counts)


_WRES, _BERT, _MOE = (
    _job("wide_resnet", "2B", 256),
    _job("bert", "1.3B", 256),
    _job("moe", "1.3B", 256),
)
OPENING_CASES: Final = (
    OpeningCase(
        name="resized",
        nodes=(("a100", 4), ("a100", 4)),
        jobs=(_WRES, _job("moe", "2.4B", 256), _BERT, _MOE),
        plans=(
            _on_a100(8, 0, 0, 0),
            _on_a100(4, 4, 0, 0),
            _on_a100(4, 2, 2, 0),
            _on_a100(2, 2, 2, 2),
        ),
    ),
    OpeningCase(
        name="swapped",
        nodes=(("a100", 4), ("v100", 4)),
        jobs=(_job("bert", "2.6B", 256, 4, "v100"), _job("wide_resnet", "2B", 256, 4, "a100")),
        plans=((("v100", 4), ("a100", 4)), (("a100", 4), ("v100", 4))),
    ),
    OpeningCase(
        name="inverted",
        nodes=(("a100", 4), ("a100", 4)),
        jobs=(_WRES, _job("moe", "2.4B", 512), _BERT, _MOE),
        plans=(_on_a100(4, 4, 0, 0), _on_a100(2, 2, 2, 2)),
    ),
    OpeningCase(
        name="over-allocated",
        nodes=(("a100", 4),),
        jobs=(_job("moe", "2.4B", 512), _BERT),
        plans=(_on_a100(4, 0), _on_a100(2, 2)),
    ),
    OpeningCase(
        name="surplus",
        nodes=(("a100", 4),),
        jobs=(_BERT, _MOE),
        plans=(_on_a100(4, 0), _on_a100(2, 2)),
    ),
)
"""The papers' cases. Of two plans, the papers call the second the better one."""


@dataclass(frozen=True, slots=True, kw_only=True)
class OpeningScene:
    """An opening case with its scenario and rates."""

    scenario: Scenario
    rates: tuple[Mapping[TypeAndGpus, float], ...]  # of each job: samples/s on each Cell
    reference: tuple[float, ...]  # of each job, samples/s

    @classmethod
    def of(cls, opening: OpeningCase, records: Sequence[EstimateRecord]) -> OpeningScene:
        """Return the scene, in which all jobs arrive at the same time, in order of their names."""
        nodes = [
            NodeSpec(name=f"{kind}-{i}", gpu_type=kind, gpus=gpus)
            for i, (kind, gpus) in enumerate(opening.nodes)
        ]
        kinds = {hardware.name: hardware.gpu_type for hardware in (A100, V100)}
        types: list[GpuType] = [kinds[kind] for kind in dict(opening.nodes)]
        there = [e for e in records if e.cell.gpu_type in dict(opening.nodes)]
        speeds = Speeds(there, ClusterRoom.of(nodes))
        rates = tuple(rates_of(job.workload, speeds) for job in opening.jobs)
        best = tuple(
            max(rate for (_, gpus), rate in of.items() if gpus == job.gpus)
            for job, of in zip(opening.jobs, rates, strict=True)
        )
        arrivals = [
            Arrival(
                0.0,
                JobSpec(
                    name=f"{i}-{job.name}",
                    workload=job.workload,
                    requested_gpus=job.gpus,
                    requested_type=job.gpu_type,
                    iterations=math.ceil(JOB_HOURS * 3600 * rate / job.workload.global_batch),
                ),
            )
            for i, (job, rate) in enumerate(zip(opening.jobs, best, strict=True))
        ]
        scenario = Scenario(gpu_types=types, nodes=nodes, profiles=there, arrivals=arrivals)
        return cls(
            scenario=scenario, rates=rates, reference=tuple(reference_of(scenario).rate.tolist())
        )

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
        have = ClusterRoom.of(self.scenario.nodes).gpus
        for plan in product(*([NO_CELL, *of] for of in self.rates)):
            if all(sum(n for t, n in plan if t == kind) <= most for kind, most in have.items()):
                yield plan


def rates_of(workload: Workload, speeds: Speeds) -> dict[TypeAndGpus, float]:
    """Return the samples/s of a workload on each Cell on which it runs."""
    return {cell: workload.global_batch / s for cell, s in speeds.cells(workload).items()}


def seen_rates(
    scene: OpeningScene, opening: OpeningCase, information: str, memory: Path | None
) -> tuple[dict[TypeAndGpus, float], ...]:
    """Return each job's samples/s according to an information, on the Cells that run by it."""
    snapshot = information_of(information, memory)(_snapshot(scene))
    e, kinds = snapshot.estimates, [kind.name for kind in snapshot.gpu_types]
    result: list[dict[TypeAndGpus, float]] = []
    for job in opening.jobs:
        mine = e.workload == snapshot.workloads.index(job.workload)
        cells: dict[TypeAndGpus, float] = {}
        each = zip(e.gpu_type[mine], e.gpus[mine], e.iter_time_s[mine], strict=True)
        for kind, gpus, iter_time_s in each:
            cell = (kinds[kind], int(gpus))
            rate = job.workload.global_batch / float(iter_time_s)
            cells[cell] = max(rate, cells.get(cell, 0.0))
        result.append(cells)
    return tuple(result)


def decide_openings(
    scene: OpeningScene, policy: str, information: str, memory: Path | None, seed: int
) -> CellPlan:
    """Return the Cell on which a policy starts each job, or no GPUs if the job cannot run there."""
    snapshot = _snapshot(scene)
    outcome = Decider(options_of(policy, seed), information_of(information, memory))(snapshot)
    truth, plan = truth_of(snapshot), [NO_CELL] * len(scene.rates)
    for one in outcome.decisions:
        if one.kind in CHANGES_GPUS and one.gang is not None:
            cell = snapshot.cell(one.cell).on(one.gang.nodes)
            rate = truth.iterations_per_s(int(snapshot.jobs.workload[one.job]), cell)
            job = int(snapshot.jobs.name[one.job].partition("-")[0])
            plan[job] = (cell.gpu_type, cell.gpus) if rate > 0 else NO_CELL
    return tuple(plan)


def _snapshot(scene: OpeningScene) -> Snapshot:
    """Return the snapshot when all jobs have just arrived and restarts are free."""
    world = World(scene.scenario, overheads=preset_overheads("none"))
    world.advance(0.0)
    return world.snapshot()
