"""Random clusters with nodes of 1 to 16 GPUs, random solutions, and the rounds that follow them."""

from __future__ import annotations

import dataclasses
import math

import numpy as np

from tessera.formulation.answer.solution import Solution, SolveStatus
from tessera.formulation.base.values import Hold
from tessera.formulation.job.lifecycle import JobState
from tessera.formulation.round.problem import Problem
from tessera.formulation.state.snapshot import STATE_CODE, Allocations, Jobs, Nodes, Snapshot
from tessera.solvers.placement import PlacementResult
from tests.support.builders import a_job, a_node, a_snapshot, an_estimate

COUNTS = (1, 2, 3, 4, 6, 8, 12, 16, 24)
WORKLOADS = 3


def a_cluster(rng: np.random.Generator, jobs: int, promised: float) -> Snapshot:
    """Return nodes of 1 to 16 GPUs in small racks, and queued jobs that cannot run on some shapes."""
    nodes = [
        a_node(
            f"n{i}",
            int(rng.integers(2)),
            int(rng.choice([1, 2, 4, 4, 6, 8, 8, 16])),
            f"r{int(rng.integers(3))}",
        )
        for i in range(int(rng.integers(2, 9)))
    ]
    estimates = {}
    for workload in range(WORKLOADS):
        for gpu_type in range(2):
            rigid = rng.random() < 0.5  # runs only on one shape
            for gpus in rng.choice(COUNTS, size=3, replace=False).tolist():
                for spread in range(1, gpus + 1):
                    if spread > 1 and not rigid and rng.random() < 0.7:
                        continue  # no estimate: 0.9 for each halving
                    dead = rng.random() < (0.9 if spread > 1 and rigid else 0.1)
                    time_s = math.inf if dead else float(8 / gpus ** rng.uniform(0.5, 1.0))
                    key = (workload, gpu_type, gpus, spread)
                    estimates[key] = an_estimate(*key, iter_time_s=time_s)
    rows = [
        a_job(
            f"j{j}",
            int(rng.integers(WORKLOADS)),
            requested_gpus=4,
            submit_s=float(j),
            restart_s=float(rng.choice([0.0, 30.0, 900.0])),
            weight=float(rng.choice([1.0, 3.0])),
            pinned=bool(rng.random() >= 0.7),
            guaranteed=bool(rng.random() < promised),
        )
        for j in range(jobs)
    ]
    return a_snapshot(
        nodes=nodes,
        jobs=rows,
        estimates=[estimates[key] for key in sorted(estimates)],
        workloads=WORKLOADS,
    )


def a_solution(rng: np.random.Generator, problem: Problem, keep: float) -> Solution:
    """Return a random choice that fits by counts; jobs keep their columns with probability ``keep``."""
    choice = np.where(problem.must_run, problem.current, -1)
    shuffled = rng.permutation(len(problem.jobs)).tolist()
    for job in sorted(shuffled, key=lambda job: not problem.must_run[job]):
        columns = list(problem.columns_of(job))
        rng.shuffle(columns)
        if problem.current[job] >= 0 and rng.random() < keep:
            columns = [int(problem.current[job])]
        before = int(choice[job])
        choice[job] = -1
        spare = problem.capacity - problem.used(choice)
        fitting = [c for c in columns if all(spare[r] >= a for r, a in problem.usage_of(c).items())]
        choice[job] = fitting[0] if fitting else before
    return Solution(
        status=SolveStatus.FEASIBLE,
        choice=choice,
        solver="random",
        objective=int(problem.value[choice[choice >= 0]].sum()),
        bound=float(np.abs(problem.value).sum()),
    )


def the_next_round(
    rng: np.random.Generator, snapshot: Snapshot, problem: Problem, placed: PlacementResult
) -> Snapshot:
    """Start the placed jobs, end some of them, release some GPUs, and perhaps drain a node."""
    queued = {
        "state": STATE_CODE[JobState.QUEUED],
        "current_type": -1,
        "current_gpus": 0,
        "current_degree": 0,
    }
    rows = [snapshot.jobs.row(j) | queued for j in range(len(snapshot.jobs))]
    allocations = []
    for job, gang in placed.placement.gangs.items():
        ended = rng.random() < 0.25
        if not ended:
            cell = problem.cells.row(int(problem.cell[placed.solution.choice[job]]))
            rows[job] |= {
                "state": STATE_CODE[JobState.RUNNING],
                "current_type": cell["gpu_type"],
                "current_gpus": cell["gpus"],
                "current_degree": cell["pipeline_degree"],
            }
        hold = Hold.RELEASING if ended else Hold.RESERVED if rng.random() < 0.2 else Hold.HELD
        allocations += [
            {
                "job": -1 if ended else job,
                "node": node,
                "gpu": gpu,
                "hold": int(hold),
                "generation": 1,
            }
            for node, gpus in gang.members
            for gpu in gpus
        ]
    nodes = [snapshot.nodes.row(n) for n in range(len(snapshot.nodes))]
    if rng.random() < 0.3:
        nodes[int(rng.integers(len(nodes)))]["schedulable"] = False
    return dataclasses.replace(
        snapshot,
        nodes=Nodes.from_rows(nodes),
        jobs=Jobs.from_rows(rows),
        allocations=Allocations.from_rows(allocations),
    )
