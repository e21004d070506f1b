"""A benchmark of the deadlines met by myopic admission and by look-ahead, on random overload."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import Annotated, Any, Final

import numpy as np
import typer

from tessera.benchmarks.harness.progress import track_steps
from tessera.benchmarks.harness.registry import register_case
from tessera.formulation.answer.decisions import CHANGES_GPUS, Decision, DecisionKind
from tessera.formulation.answer.placement import Gang
from tessera.formulation.base.values import (
    NO_CELL,
    CellKey,
    EstimateSource,
    GpuType,
    Hold,
    Workload,
)
from tessera.formulation.job.lifecycle import JobState
from tessera.formulation.round.policy import DeadlineMode, Policy
from tessera.formulation.state.last_round import ScheduleSegments
from tessera.formulation.state.snapshot import (
    STATE_CODE,
    Allocations,
    Estimates,
    Jobs,
    Nodes,
    Snapshot,
)
from tessera.simulator.figures import Report
from tessera.simulator.statistics import total_interval
from tessera.solvers.base import Budget
from tessera.solvers.exact.portfolio import Portfolio
from tessera.solvers.rounds.plan import RoundOutcome, plan_round

ROUND_S: Final = 300.0
BATCH: Final = 256
GPUS_PER_TYPE: Final = (12, 8)
"""The number of GPUs of each type."""
GPU_COUNTS: Final = (1, 2, 4, 8)
OVERLOAD: Final = 2.0
"""Requested GPU time relative to the available GPU time."""
BEGIN_S: Final = 1000 * ROUND_S
"""The time at which the drive begins. In a snapshot, 0 would mean "never"."""
LATE_S: Final = 1.0
"""Seconds by which a finish may be late and still count as in time: certificates are exact to a
millionth of a job's work."""


@dataclass(frozen=True, slots=True, kw_only=True)
class FutureJob:
    """A job that has not arrived yet. ``work`` is in samples; times are in seconds since 1970."""

    name: str
    workload: int
    work: float
    arrival_s: float
    deadline_s: float
    restart_s: float
    weight: float = 1.0
    guaranteed: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class OverloadCase:
    """A cluster, the rates of its workloads, and the jobs that arrive."""

    nodes: tuple[tuple[int, int], ...]  # (GPU type, GPUs) of each node
    rate: dict[tuple[int, int, int], float]  # (workload, type, GPUs) -> samples/s
    jobs: tuple[FutureJob, ...]


@dataclass(slots=True)
class DrivenJob:
    """The state of a job in the drive."""

    job: FutureJob
    left: float
    gang: Gang | None = None
    cell: CellKey = NO_CELL
    rate: float = 0.0
    since_s: float = 0.0
    generation: int = 0
    admitted: bool = False
    promised: bool = False  # it was admitted at some time
    rejected: bool = False
    finish_s: float = math.inf

    @property
    def open(self) -> bool:
        """Return whether the job still wants GPUs."""
        return not self.rejected and math.isinf(self.finish_s)

    @property
    def met(self) -> bool:
        """Return whether the job finished by its deadline."""
        return self.finish_s <= self.job.deadline_s + LATE_S


@dataclass(frozen=True, slots=True, kw_only=True)
class DriveOutcome:
    """The outcome of a load. ``missed`` counts unkept promises, given-up ones too."""

    met: int
    admitted: int
    missed: int
    violations: int
    rounds: int
    unproven: int  # rounds whose admission was not proven best


@register_case(
    "deadlines",
    smoke={"seeds": 2, "jobs": 8},
    admitted_missed=("==", 0),
    violations=("==", 0),
    met_difference_low=(">=", 0),
)
def compare_admissions(
    seeds: Annotated[
        int, typer.Option(help="Number of random loads, each run in both modes.")
    ] = 20,
    jobs: Annotated[int, typer.Option(help="Number of jobs of a load.")] = 16,
    seed: int = 0,
) -> Report:
    """Compare myopic admission and look-ahead under random overload, in rounds of 300 s.

    Both modes use the same solver, see the same exact rates and pay for the same restarts.
    Deadlines are 1.2 to 6 times a job's shortest time after its arrival. ``met_difference`` is
    look-ahead's total of met deadlines less myopic's. Its interval is 95 % by paired bootstrap over
    loads. ``admitted_missed`` counts promises that either mode did not keep; none may be broken,
    because the estimates are exact. Each GPU type is one node, because schedules count GPUs and not
    blocks. The bound on the interval needs many loads and is waived below 20.
    """
    table: list[dict[str, float | str]] = []
    missed, broken = 0, 0
    for index in track_steps(seeds, "loads"):
        load = draw_overload(seed + index, jobs, OVERLOAD)
        result = {mode: drive_load(load, mode) for mode in ("myopic", "look-ahead")}
        missed += sum(d.missed for d in result.values())
        broken += sum(d.violations for d in result.values())
        table.append(
            {
                "load": seed + index,
                "myopic": result["myopic"].met,
                "lookahead": result["look-ahead"].met,
                "admitted_myopic": result["myopic"].admitted,
                "admitted_lookahead": result["look-ahead"].admitted,
                "rounds": result["look-ahead"].rounds,
                "unproven": result["look-ahead"].unproven,
            }
        )
    myopic = np.array([row["myopic"] for row in table], dtype=np.int64)
    lookahead = np.array([row["lookahead"] for row in table], dtype=np.int64)
    low, high = total_interval(lookahead - myopic, seed)
    figures = {
        "seeds": seeds,
        "jobs": seeds * jobs,
        "myopic_met": int(myopic.sum()),
        "lookahead_met": int(lookahead.sum()),
        "met_difference": int((lookahead - myopic).sum()),
        "met_difference_low": low,
        "met_difference_high": high,
        "admitted_missed": missed,
        "violations": broken,
        "unproven_rounds": sum(int(row["unproven"]) for row in table),
        "rounds": sum(int(row["rounds"]) for row in table),
    }
    waived = {"met_difference_low"} if seeds < 20 else set()
    return Report(seed=seed, figures=figures, waived=frozenset(waived), table=table)


def draw_overload(seed: int, jobs: int, overload: float) -> OverloadCase:
    """Return a random load on a node of each of two types, which have ``GPUS_PER_TYPE``."""
    rng = np.random.default_rng(seed)
    nodes = tuple(enumerate(GPUS_PER_TYPE))
    rate: dict[tuple[int, int, int], float] = {}
    for workload in range(4):
        base, power = rng.uniform(5, 50), rng.uniform(0.7, 0.95)
        speed = (base, base * rng.uniform(0.4, 1.6))
        for kind, count in ((k, n) for k in (0, 1) for n in GPU_COUNTS):
            rate[workload, kind, count] = speed[kind] * count**power
    # GPU-seconds on the Cell with the highest rate per GPU
    wanted = rng.uniform(0.3, 1.7, jobs) * ROUND_S * 16
    horizon_s = float(wanted.sum()) / sum(GPUS_PER_TYPE) / overload
    arrivals = BEGIN_S + np.sort(rng.uniform(0, horizon_s, jobs))
    result = []
    for j in range(jobs):
        workload, restart_s = int(rng.integers(4)), float(rng.choice([0, 30, 90]))
        lean = max(rate[workload, k, n] / n for k in (0, 1) for n in GPU_COUNTS)
        work = float(wanted[j] * lean)
        quickest_s = (
            work / max(rate[workload, k, n] for k in (0, 1) for n in GPU_COUNTS) + restart_s
        )
        # the job is seen in the first round after its arrival
        ready_s = math.ceil(arrivals[j] / ROUND_S) * ROUND_S
        result.append(
            FutureJob(
                name=f"job-{j}",
                workload=workload,
                work=work,
                arrival_s=float(arrivals[j]),
                deadline_s=ready_s + quickest_s * float(rng.uniform(1.2, 6.0)),
                restart_s=restart_s,
            )
        )
    return OverloadCase(nodes=nodes, rate=rate, jobs=tuple(result))


def drive_load(
    load: OverloadCase, mode: DeadlineMode, *, every_s: float = ROUND_S, **options: Any
) -> DriveOutcome:
    """Run ``load`` until every job has finished, was rejected, or is past its deadline.

    A round takes no time, and the next comes ``every_s`` later; deadline schedules assume one every
    ``ROUND_S``. Between rounds each job trains at the rate that it was given, once its restart is
    over. GPUs of a job that finishes stay idle until the next round.
    """
    policy = replace(Policy(deadlines=mode, round_s=ROUND_S), **options)
    runs = [DrivenJob(job=job, left=job.work) for job in load.jobs]
    segments: dict[str, list[dict[str, Any]]] = {}
    now_s, rounds, broken, unproven = BEGIN_S, 0, 0, 0
    last_s = max(job.deadline_s for job in load.jobs if math.isfinite(job.deadline_s))
    while now_s <= last_s and any(run.open for run in runs):
        there = [run for run in runs if run.open and run.job.arrival_s <= now_s]
        if there:
            rounds += 1
            snapshot = snapshot_of(load, there, segments, now_s, rounds)
            outcome = plan_round(
                snapshot, policy, Portfolio(), Budget(remaining_s=lambda: math.inf, gap=1e-3)
            )
            broken += len(outcome.violations)
            unproven += outcome.admission is not None and not outcome.admission.proven
            segments = _commit(there, outcome, now_s)
        for run in there:
            _train(run, now_s, now_s + every_s)
        now_s += every_s
    promised = [run for run in runs if run.promised]
    return DriveOutcome(
        met=sum(run.met for run in runs),
        admitted=len(promised),
        missed=sum(not run.met for run in promised),
        violations=broken,
        rounds=rounds,
        unproven=unproven,
    )


def _commit(
    there: list[DrivenJob], outcome: RoundOutcome, now_s: float
) -> dict[str, list[dict[str, Any]]]:
    for run, decision in zip(there, outcome.decisions, strict=True):
        _decided(run, decision, now_s)
    result: dict[str, list[dict[str, Any]]] = {}
    if outcome.admission is not None:
        segments = outcome.admission.schedule_segments
        for index in range(len(segments)):
            row = segments.row(index)
            result.setdefault(there[row.pop("job")].job.name, []).append(row)
    return result


def _decided(run: DrivenJob, decision: Decision, now_s: float) -> None:
    run.admitted = decision.admitted
    run.promised |= decision.admitted
    if decision.kind is DecisionKind.REJECT:
        run.rejected = True
    elif decision.gang is None:
        run.gang, run.cell, run.rate, run.since_s = None, NO_CELL, 0.0, 0.0
    else:
        if decision.kind in CHANGES_GPUS:
            run.since_s = now_s
            run.generation += 1
        run.gang, run.cell, run.rate = decision.gang, decision.cell, decision.rate


def _train(run: DrivenJob, start_s: float, end_s: float) -> None:
    """Record the progress of ``run`` from ``start_s`` to ``end_s``, and its finish."""
    if run.gang is None:
        return
    begins_s = max(start_s, run.since_s + run.job.restart_s)
    if run.left <= run.rate * max(0.0, end_s - begins_s):
        run.finish_s = begins_s + run.left / run.rate
    else:
        run.left -= run.rate * max(0.0, end_s - begins_s)


def snapshot_of(
    load: OverloadCase,
    runs: list[DrivenJob],
    segments: dict[str, list[dict[str, Any]]],
    now_s: float,
    number: int,
) -> Snapshot:
    """Return the snapshot of ``runs`` that a round sees at ``now_s``."""
    workloads = 1 + max(w for w, _, _ in load.rate)
    held = [
        {"job": j, "node": node, "gpu": gpu, "hold": int(Hold.HELD), "generation": run.generation}
        for j, run in enumerate(runs)
        for node, gpus in (run.gang.members if run.gang else ())
        for gpu in gpus
    ]
    size = dict(load.nodes)
    names = {run.job.name: j for j, run in enumerate(runs)}
    return Snapshot(
        cluster="bench",
        epoch=1,
        round_number=number,
        now_s=now_s,
        gpu_types=tuple(
            GpuType(name=f"t{t}", memory_bytes=2**35) for t in range(len(GPUS_PER_TYPE))
        ),
        nodes=Nodes(
            name=tuple(f"n{n}" for n in range(len(load.nodes))),
            gpu_type=np.array([t for t, _ in load.nodes]),
            gpus=np.array([n for _, n in load.nodes]),
            rack=("r",) * len(load.nodes),
            schedulable=np.ones(len(load.nodes), np.bool_),
            version=np.ones(len(load.nodes), np.int64),
        ),
        workloads=tuple(
            Workload(model="m", params=str(w), global_batch=BATCH) for w in range(workloads)
        ),
        plans=("",),
        estimates=Estimates.from_rows(
            [
                {
                    "workload": w,
                    "gpu_type": t,
                    "gpus": n,
                    "nodes": -(-n // size[t]),
                    "pipeline_degree": 1,
                    "plan": 0,
                    "iter_time_s": BATCH / rate,
                    "source": int(EstimateSource.MEASURED),
                }
                for (w, t, n), rate in sorted(load.rate.items())
            ]
        ),
        jobs=Jobs.from_rows([_row(run) for run in runs]),
        allocations=Allocations.from_rows(held),
        schedule_segments=ScheduleSegments.from_rows(
            [
                {"job": names[name], **segment}
                for name, mine in segments.items()
                if name in names
                for segment in mine
            ]
        ),
    )


def _row(run: DrivenJob) -> dict[str, Any]:
    job = run.job
    state = JobState.RUNNING if run.gang else JobState.QUEUED
    return {
        "name": job.name,
        "tenant": "t",
        "state": STATE_CODE[state],
        "workload": job.workload,
        "iterations": job.work / BATCH,
        "iterations_left": run.left / BATCH,
        "requested_gpus": 4,
        "weight": job.weight,
        "guaranteed": job.guaranteed,
        "deadline_s": job.deadline_s,
        "admitted": run.admitted,
        "submit_s": job.arrival_s,
        "queued_s": job.arrival_s,
        "since_s": run.since_s,
        "restart_s": job.restart_s,
        "generation": run.generation,
        **dict(zip(Jobs.CELL, run.cell, strict=True)),
    }
