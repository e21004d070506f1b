"""Seeded rounds to solve: realistic ones, hard ones, and the next round after some churn.

A workload has Cells on every GPU type, for half the GPUs that its jobs request, for as many and for
twice as many. It has every pipeline degree that is a power of two up to the count. Speed-ups are
sub-linear and noisy. Many Cells are therefore dominated, and the others are on no smooth curve.
Jobs share at most ``MAX_WORKLOADS`` workloads, so that a million jobs are a million rows and not a
million tables.

The families:

``real``
    Requests of 1 to 64 GPUs, small ones most often (``REQUEST_SHARES``); weights 1, 2 and 4; a start
    costs 60 s.
``equal-ratios``
    Requests as in ``real``, but every column has the same value per GPU: linear speed-ups,
    identical GPU types, weights in proportion to requests, free starts. Any answer that fills the
    cluster is best, and shadow prices do not distinguish columns.
``tight``
    Gangs are large for the cluster: requests of any number from a tenth to a half of a type's GPUs.
    Only some tens of jobs run, and the GPUs that they leave over decide.
``alike``
    Every job is the same: one workload, one weight, and as much work left to do.
"""

from __future__ import annotations

from dataclasses import dataclass, fields, replace
from typing import Any, Final

import numpy as np

from tessera.formulation.base.errors import InvalidInput
from tessera.formulation.base.tables import Bools, Floats, Ints, concatenate_ranges
from tessera.formulation.base.values import EstimateSource, GpuType, Hold, Workload
from tessera.formulation.job.lifecycle import JobState
from tessera.formulation.round.problem import Problem
from tessera.formulation.state.snapshot import (
    STATE_CODE,
    Allocations,
    Estimates,
    Jobs,
    Nodes,
    Snapshot,
)

FAMILIES: Final = ("real", "equal-ratios", "tight", "alike")
REQUEST_SHARES: Final = {1: 0.30, 2: 0.20, 4: 0.18, 8: 0.14, 16: 0.10, 32: 0.05, 64: 0.03}
"""GPUs requested -> share of the workloads."""
MAX_WORKLOADS: Final = 1000
NODE_GPUS: Final = 8
BATCH: Final = 256
ROUND_S: Final = 300.0
RESTART_S: Final = 60.0
_SHARES: Final = np.array([0.5, 1.0, 2.0])
"""The GPU counts of a workload's Cells, as shares of the request."""
_NONE: Final = np.zeros(0, np.int64)
NO_ALLOCATIONS: Final = Allocations(job=_NONE, node=_NONE, gpu=_NONE, hold=_NONE, generation=_NONE)


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class WorkloadRates:
    """The speeds of workloads on their Cells, and the request of each (int64[workloads])."""

    request: Ints
    rate: Floats  # float64[workloads, types, counts, degrees], samples/s; 0: there is no such Cell
    count: Ints  # int64[workloads, counts]


def make_instance(
    jobs: int, gpus: int, types: int, seed: int = 0, *, family: str = "real", running: float = 0.0
) -> Snapshot:
    """Return a round of ``jobs`` jobs on ``gpus`` GPUs, divided evenly over ``types`` types.

    Jobs on about the share ``running`` of the GPUs run already, at their requested counts.

    Raises:
        InvalidInput: there is no such family, or a number has no meaning.
    """
    if family not in FAMILIES:
        raise InvalidInput("family", f"must be one of {', '.join(FAMILIES)}")
    if jobs < 0 or types < 1 or gpus < types:
        raise InvalidInput("gpus", "must be at least one of each type, and jobs at least 0")
    rng = np.random.default_rng([seed, FAMILIES.index(family)])
    capacity = gpus // types + (np.arange(types) < gpus % types)
    works = _works(rng, jobs, capacity, family)
    snapshot = assemble_snapshot(
        capacity, works, draw_queued(rng, np.arange(jobs), works.request, family)
    )
    return _started(snapshot, rng, works, running) if running > 0 else snapshot


def assemble_snapshot(capacity: Ints, works: WorkloadRates, queued: Jobs) -> Snapshot:
    """Return the first round of the jobs ``queued`` on an idle cluster.

    ``capacity`` is int64[types], the GPUs of each type.
    """
    return Snapshot(
        cluster="bench",
        epoch=1,
        round_number=1,
        now_s=0.0,
        gpu_types=tuple(GpuType(name=f"t{t}", memory_bytes=2**35) for t in range(len(capacity))),
        nodes=_nodes(capacity),
        workloads=tuple(
            Workload(model="m", params=str(w), global_batch=BATCH)
            for w in range(len(works.request))
        ),
        plans=("",),
        estimates=_estimates(works),
        jobs=queued,
        allocations=NO_ALLOCATIONS,
    )


def _works(rng: np.random.Generator, jobs: int, capacity: Ints, family: str) -> WorkloadRates:
    """Draw the workloads."""
    number = 1 if family == "alike" else max(8, min(MAX_WORKLOADS, jobs // 4))
    if family == "tight":
        least = max(1, int(capacity.min()) // 10)
        request = rng.integers(least, max(least, int(capacity.min()) // 2) + 1, number)
    elif family == "alike":
        request = np.array([4])
    else:
        request = rng.choice(list(REQUEST_SHARES), number, p=list(REQUEST_SHARES.values()))
    count = np.maximum(1, (request[:, None] * _SHARES).astype(np.int64))
    again = np.zeros_like(count, dtype=np.bool_)
    again[:, 1:] = count[:, 1:] == count[:, :-1]  # half of one GPU is one GPU
    degrees = 1 + int(np.log2(count.max()))
    shape = (number, len(capacity), len(_SHARES), degrees)
    gpus = np.broadcast_to(count[:, None, :, None], shape)
    none = np.broadcast_to(again[:, None, :, None], shape) | (2 ** np.arange(degrees) > gpus)
    if family == "equal-ratios":
        rate = 10.0 * gpus
    else:
        speed = rng.uniform(5, 50, (number, 1)) * rng.uniform(0.5, 2.0, shape[:2])
        exponent = rng.uniform(0.7, 0.95, (number, 1, 1, 1))
        rate = speed[:, :, None, None] * gpus**exponent * rng.uniform(0.8, 1.0, shape)
    return WorkloadRates(request=request, rate=np.where(none, 0.0, rate), count=count)


def _estimates(works: WorkloadRates) -> Estimates:
    workload, gpu_type, which, degree = np.nonzero(works.rate)
    gpus = works.count[workload, which]
    return Estimates(
        workload=workload,
        gpu_type=gpu_type,
        gpus=gpus,
        nodes=-(-gpus // NODE_GPUS),
        pipeline_degree=2**degree,
        plan=np.zeros_like(gpus),
        iter_time_s=BATCH / works.rate[workload, gpu_type, which, degree],
        source=np.full_like(gpus, EstimateSource.ANALYTIC),
    )


def _nodes(capacity: Ints) -> Nodes:
    """Return nodes of 8 GPUs, type after type. The last node of a type has the rest of its GPUs."""
    count = -(-capacity // NODE_GPUS)
    gpu_type = np.repeat(np.arange(len(capacity)), count)
    gpus = np.full(len(gpu_type), NODE_GPUS)
    last = np.cumsum(count) - 1
    gpus[last] = capacity - NODE_GPUS * (count - 1)
    number = len(gpus)
    return Nodes(
        name=tuple(f"n{n}" for n in range(number)),
        gpu_type=gpu_type,
        gpus=gpus,
        rack=("r",) * number,
        schedulable=np.ones(number, np.bool_),
        version=np.ones(number, np.int64),
    )


def draw_queued(
    rng: np.random.Generator, number: Ints, request: Ints, family: str, now_s: float = 0.0
) -> Jobs:
    """Draw queued jobs of the workloads with these requests.

    ``number`` has the numbers in their names.
    """
    jobs = len(number)
    workload = rng.integers(0, len(request), jobs)
    left, weight = rng.uniform(1e2, 1e5, jobs), rng.choice([1.0, 1.0, 1.0, 2.0, 4.0], jobs)
    if family == "alike":
        left, weight = np.full(jobs, 1e4), np.ones(jobs)
    if family == "equal-ratios":
        weight = np.ones(jobs)
    arrived_s = np.full(jobs, now_s)
    return Jobs(
        name=tuple(f"j{n}" for n in number.tolist()),
        tenant=("t",) * jobs,
        workload=workload,
        iterations=np.maximum(left, 1e5),
        iterations_left=left,
        requested_gpus=request[workload],
        weight=weight,
        submit_s=arrived_s,
        queued_s=arrived_s,
        restart_s=np.full(jobs, 0.0 if family == "equal-ratios" else RESTART_S),
    )


def _started(
    snapshot: Snapshot, rng: np.random.Generator, works: WorkloadRates, share: float
) -> Snapshot:
    """Return the snapshot with random jobs running on about this share of each type's GPUs."""
    jobs, capacity = snapshot.jobs, snapshot.schedulable_gpus()
    wanted = rng.integers(0, len(capacity), len(jobs))
    gpus = jobs.requested_gpus
    runs = np.zeros(len(jobs), np.bool_)
    for t, room in enumerate((share * capacity).astype(np.int64).tolist()):
        mine = np.flatnonzero(wanted == t)
        runs[mine[np.cumsum(gpus[mine]) <= room]] = True
    which = np.argmax(works.count == works.request[:, None], axis=1)
    at = works.rate[np.arange(len(which)), :, which]  # float64[workloads, types, degrees]
    degree = 2 ** np.argmax(at, axis=2)[jobs.workload, wanted]
    return _on(snapshot, runs, wanted, gpus, degree)


def _on(snapshot: Snapshot, runs: Bools, gpu_type: Ints, gpus: Ints, degree: Ints) -> Snapshot:
    """Return the snapshot in which exactly the jobs ``runs`` run, on these Cells (all int64[jobs]).

    Gangs are packed into the nodes of their type again, largest first. Counts that are powers of
    two are therefore on as few nodes as possible: the statement of a round does not see which GPUs
    a job has.
    """
    jobs = snapshot.jobs
    started = runs & (
        (jobs.current_type != gpu_type)
        | (jobs.current_gpus != gpus)
        | (jobs.current_degree != degree)
    )
    generation = jobs.generation + started
    state = np.where(runs, STATE_CODE[JobState.RUNNING], STATE_CODE[JobState.QUEUED])
    return replace(
        snapshot,
        jobs=replace(
            jobs,
            state=state,
            generation=generation,
            current_type=np.where(runs, gpu_type, -1),
            current_gpus=np.where(runs, gpus, 0),
            current_degree=np.where(runs, degree, 0),
            since_s=np.where(started, snapshot.now_s, np.where(runs, jobs.since_s, 0.0)),
            queued_s=np.where(~runs & (jobs.current_gpus > 0), snapshot.now_s, jobs.queued_s),
        ),
        allocations=_packed(snapshot.nodes, np.flatnonzero(runs), gpu_type, gpus, generation),
    )


def _packed(
    nodes: Nodes, running: Ints, gpu_type: Ints, gpus: Ints, generation: Ints
) -> Allocations:
    """Return GPUs for the jobs ``running``. Those of a type are adjacent, node after node."""
    every_node = np.repeat(np.arange(len(nodes)), nodes.gpus)  # nodes are sorted by type
    every_gpu = concatenate_ranges(np.zeros(len(nodes), np.int64), nodes.gpus)
    first = np.searchsorted(nodes.gpu_type[every_node], gpu_type[running])
    order = running[np.lexsort((running, -gpus[running], gpu_type[running]))]
    first = np.sort(first)
    before = np.cumsum(gpus[order]) - gpus[order]
    new = np.flatnonzero(np.diff(gpu_type[order], prepend=-1))
    before -= np.repeat(before[new], np.diff(np.append(new, len(order))))
    at = concatenate_ranges(first + before, gpus[order])
    job = np.repeat(order, gpus[order])
    return Allocations(
        job=job,
        node=every_node[at],
        gpu=every_gpu[at],
        hold=np.full(len(job), Hold.HELD),
        generation=generation[job],
    )


def churn_round(
    snapshot: Snapshot,
    problem: Problem,
    choice: Ints,
    share: float,
    seed: int = 0,
    family: str = "real",
) -> Snapshot:
    """Return the next round, after 300 s under ``choice``, an answer to ``problem``.

    The share ``share`` of the jobs leaves, whether they run or wait, and as many jobs of the same
    workloads arrive. The rest keep the GPUs that they were given.
    """
    rng = np.random.default_rng([seed, snapshot.round_number])
    decided = _decided(snapshot, problem, choice)
    jobs = decided.jobs
    runs = choice >= 0
    iter_time_s = np.full(len(jobs), np.inf)
    cells = problem.cells
    iter_time_s[runs] = snapshot.global_batch[runs] / cells.rate[problem.cell[choice[runs]]]
    left = np.maximum(jobs.iterations_left - ROUND_S / iter_time_s, 1.0)
    ends = rng.permutation(len(jobs))[: round(share * len(jobs))]
    stays = np.ones(len(jobs), np.bool_)
    stays[ends] = False
    request = np.zeros(len(snapshot.workloads), np.int64)
    request[jobs.workload] = jobs.requested_gpus
    now_s = snapshot.now_s + ROUND_S
    known = np.flatnonzero(request > 0)  # a workload that no job trains has no request
    number = 1 + max((int(name[1:]) for name in jobs.name), default=-1)
    fresh = draw_queued(rng, number + np.arange(len(ends)), request[known], family, now_s)
    fresh = replace(fresh, workload=known[fresh.workload])
    served = np.where(runs, jobs.service_gpu_s + ROUND_S * jobs.current_gpus, jobs.service_gpu_s)
    old = _kept(replace(jobs, iterations_left=left, service_gpu_s=served), stays)
    return replace(
        decided,
        round_number=snapshot.round_number + 1,
        now_s=now_s,
        jobs=_joined(old, fresh),
        allocations=_renumbered(decided.allocations, stays),
    )


def _decided(snapshot: Snapshot, problem: Problem, choice: Ints) -> Snapshot:
    runs, cells = choice >= 0, problem.cells
    cell = np.where(runs, problem.cell[choice], 0) if len(problem.cell) else np.zeros_like(choice)
    if not len(cells):
        return snapshot
    return _on(snapshot, runs, cells.gpu_type[cell], cells.gpus[cell], cells.pipeline_degree[cell])


def _kept(jobs: Jobs, keep: Bools) -> Jobs:
    where = np.flatnonzero(keep).tolist()
    result: dict[str, Any] = {}
    for field in fields(jobs):
        column = getattr(jobs, field.name)
        named = isinstance(column, tuple)
        result[field.name] = tuple(column[j] for j in where) if named else column[keep]
    return Jobs(**result)


def _joined(one: Jobs, other: Jobs) -> Jobs:
    result: dict[str, Any] = {}
    for field in fields(one):
        left, right = getattr(one, field.name), getattr(other, field.name)
        result[field.name] = left + right if isinstance(left, tuple) else np.append(left, right)
    return Jobs(**result)


def _renumbered(allocations: Allocations, keep: Bools) -> Allocations:
    mine = keep[allocations.job]
    return Allocations(
        job=(np.cumsum(keep) - 1)[allocations.job[mine]],
        node=allocations.node[mine],
        gpu=allocations.gpu[mine],
        hold=allocations.hold[mine],
        generation=allocations.generation[mine],
    )
