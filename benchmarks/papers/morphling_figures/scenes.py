"""Rounds on parts of Morphling's cluster: the Cells that our program gives to a few jobs."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Final

from tessera.estimator.hardware import A800
from tessera.formulation.decisions import CHANGES_GPUS
from tessera.formulation.records.clusters import NodeSpec
from tessera.formulation.records.estimates import EstimateRecord
from tessera.formulation.records.jobs import JobSpec
from tessera.formulation.values import Cell, Workload
from tessera.simulator.comparison.policies import options_of
from tessera.simulator.overheads import preset_overheads
from tessera.simulator.run import Decider
from tessera.simulator.scenario import Scenario
from tessera.simulator.traces.trace import Arrival
from tessera.simulator.world import World

POLICY: Final = "ilp:throughput@gap=1e-9"
"""Our program for total normalised throughput, which is what these figures show."""
JOB_ITERATIONS: Final = 10_000
"""The length of each job. It does not matter to throughput."""
SERVER_CPUS, SERVER_HOST_BYTES = 96, 1600 * 10**9
"""CPU cores and host memory of a server (Morphling, section 7)."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ResourceLimits:
    """The resources that jobs may use: equal nodes, each with a part of a server."""

    name: str
    nodes: int
    gpus: int  # of each node
    cpus: int = SERVER_CPUS  # of each node
    host_bytes: int = SERVER_HOST_BYTES  # of each node

    @property
    def total_gpus(self) -> int:
        """Return the number of GPUs."""
        return self.nodes * self.gpus


@dataclass(frozen=True, slots=True, kw_only=True)
class SceneJob:
    """A job of a workload on exactly ``gpus`` GPUs. 0 means that it may use any number."""

    workload: Workload
    gpus: int = 0


def decide_cells(
    limits: ResourceLimits,
    jobs: Sequence[SceneJob],
    records: Sequence[EstimateRecord],
    policy: str = POLICY,
) -> list[Cell | None]:
    """Return the Cell, with its nodes, on which a round starts each job. None means that it waits.

    All jobs have just arrived, request all GPUs or their number of them, and start for free. The
    round sees ``records``.
    """
    nodes = [
        NodeSpec(
            name=f"node-{i}",
            gpu_type=A800.name,
            gpus=limits.gpus,
            cpus=limits.cpus,
            host_bytes=limits.host_bytes,
        )
        for i in range(limits.nodes)
    ]
    arrivals = [
        Arrival(
            0.0,
            JobSpec(
                name=str(i),
                workload=job.workload,
                iterations=JOB_ITERATIONS,
                requested_gpus=job.gpus or limits.total_gpus,
                requested_gpu_type=A800.name,
                min_gpus=job.gpus,
                max_gpus=job.gpus,
            ),
        )
        for i, job in enumerate(jobs)
    ]
    scenario = Scenario(gpu_types=[A800.gpu_type], nodes=nodes, profiles=records, arrivals=arrivals)
    world = World(scenario, overheads=preset_overheads("none"))
    world.advance(0.0)
    snapshot = world.snapshot()
    cells: list[Cell | None] = [None] * len(jobs)
    decide = Decider(replace(options_of(policy), promise_starts=False))
    for decision in decide(snapshot).decisions:
        if decision.kind in CHANGES_GPUS and decision.gang is not None:
            job = int(snapshot.jobs.name[decision.job])
            cells[job] = snapshot.cell(decision.cell).on(decision.gang.nodes)
    return cells


def measured_s(cell: Cell | None, of: Sequence[EstimateRecord]) -> float:
    """Return the measured iteration time of a Cell in seconds, or inf if it did not run."""
    return next((record.iter_time_s for record in of if record.cell == cell), math.inf)


def records_within(limits: ResourceLimits, of: Sequence[EstimateRecord]) -> list[EstimateRecord]:
    """Return the records that fit into the limits and ran, fastest first."""
    fitting = [r for r in of if math.isfinite(r.iter_time_s) and _fits(limits, r)]
    return sorted(fitting, key=lambda record: record.iter_time_s)


def _fits(limits: ResourceLimits, record: EstimateRecord) -> bool:
    """Return whether the most loaded node of an even placement has room."""
    cell = record.cell
    gpus = math.ceil(cell.gpus / cell.nodes)
    return (
        cell.nodes <= limits.nodes
        and gpus <= limits.gpus
        and math.ceil(record.cpus * gpus / cell.gpus) <= limits.cpus
        and math.ceil(record.host_bytes * gpus / cell.gpus) <= limits.host_bytes
    )
