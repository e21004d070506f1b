"""Small cases for foresight: five jobs on two nodes of four GPUs, as scenarios of the simulator."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

import numpy as np

from tessera.formulation.clock import SystemClock
from tessera.formulation.records.clusters import NodeSpec
from tessera.formulation.records.estimates import EstimateRecord
from tessera.formulation.records.jobs import JobSpec
from tessera.formulation.tables import Floats, Ints
from tessera.formulation.values import Cell, EstimateSource, GpuType, Workload
from tessera.simulator.comparison.policies import options_of
from tessera.simulator.overheads import Overheads
from tessera.simulator.run import Conditions, Decider, simulate
from tessera.simulator.scenario import Scenario
from tessera.simulator.traces.trace import Arrival

JOBS: Final = 5
TYPES: Final = ("fast", "slow")
NODE_GPUS: Final = 4
COUNTS: Final = (1, 2, 4)
"""The GPU counts of Cells. Any of them that fit on the cluster also fit on its nodes."""
ROUND_S: Final = 1800.0
START_S: Final = 168.0
"""Seconds of any start, move or resize: those of the default overheads with a checkpoint and a search."""
SHORTEST_H, LONGEST_H = 0.5, 4.0
LAST_ARRIVAL: Final = 3
"""The last round in which a job arrives, if jobs arrive over time."""
TICK_S: Final = 0.01
"""The iteration time of any job on one fast GPU."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class SmallCase:
    """Five jobs. ``arrival`` (int64[jobs]) is the round in which each arrives.

    ``iterations`` is int64[jobs]. ``speed`` is float64[jobs, types, counts], in multiples of one fast
    GPU; 0 means that the job does not run there.
    """

    arrival: Ints
    iterations: Ints
    speed: Floats

    @property
    def work_s(self) -> Floats:
        """Return the seconds of each job on one fast GPU, float64[jobs]."""
        return np.asarray(self.iterations * TICK_S, dtype=np.float64)


def draw_case(seed: int) -> SmallCase:
    """Return the case of a seed. The jobs of odd seeds arrive over time, the others at once.

    A job on n GPUs is n^p times as fast as on one, with p uniform in 0.5 to 0.95. The slow GPUs have
    0.35 to 0.8 of the speed of the fast ones, times a factor of 0.8 to 1.25 for each job. Two of
    five jobs need at least two or four GPUs. Lengths are log-uniform in 0.5 to 4 hours.
    """
    rng = np.random.default_rng(seed)
    slow = rng.uniform(0.35, 0.8)
    speed = np.zeros((JOBS, len(TYPES), len(COUNTS)))
    for job in range(JOBS):
        power, affinity = rng.uniform(0.5, 0.95), rng.uniform(0.8, 1.25)
        curve = np.array([float(count**power) for count in COUNTS])
        speed[job] = np.stack([curve, slow * affinity * curve])
        speed[job, :, : int(rng.choice([0, 0, 0, 1, 2]))] = 0.0
    hours = np.exp(rng.uniform(np.log(SHORTEST_H), np.log(LONGEST_H), JOBS))
    arrival = np.zeros(JOBS, dtype=np.int64)
    if seed % 2:
        arrival[2:] = np.sort(rng.integers(1, LAST_ARRIVAL + 1, JOBS - 2))
    return SmallCase(
        arrival=arrival,
        iterations=np.rint(hours * 3600 / TICK_S).astype(np.int64),
        speed=speed,
    )


def scenario_of(case: SmallCase) -> Scenario:
    """Return the case as a scenario; each job has a workload of its own."""
    arrivals, profiles = [], []
    for job in range(JOBS):
        workload = Workload(model=f"model-{job}", params="1B", global_batch=1)
        runs = np.argwhere(case.speed[job] > 0)
        profiles += [
            EstimateRecord(
                workload=workload,
                cell=Cell(gpu_type=TYPES[kind], gpus=COUNTS[k], pipeline_degree=1, nodes=1),
                iter_time_s=TICK_S / float(case.speed[job, kind, k]),
                source=EstimateSource.MEASURED,
            )
            for kind, k in runs.tolist()
        ]
        spec = JobSpec(
            name=f"job-{job}",
            workload=workload,
            iterations=int(case.iterations[job]),
            requested_gpus=COUNTS[int(runs[:, 1].min())],
        )
        arrivals.append(Arrival(float(case.arrival[job]) * ROUND_S, spec))
    return Scenario(
        gpu_types=[GpuType(name=name, memory_bytes=2**34) for name in TYPES],
        nodes=[NodeSpec(name=name, gpu_type=name, gpus=NODE_GPUS) for name in TYPES],
        profiles=profiles,
        arrivals=arrivals,
    )


def simulate_case(case: SmallCase, policy: str) -> float:
    """Return the mean completion time in seconds of the case's jobs under ``policy``.

    There is a round every ``ROUND_S`` seconds. The policy sees the true speeds, and no job before
    it arrives.
    """
    costs = Overheads(save_s=0.0, load_s=START_S, search_s={1: 0.0})
    result = simulate(
        scenario_of(case),
        Decider(options_of(f"{policy}@round_s={ROUND_S}")),
        Conditions(overheads=costs, round_s=ROUND_S),
        SystemClock(),
    )
    return float((result.end_s - result.arrival_s).mean())
