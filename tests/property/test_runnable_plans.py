"""Laws of rounds with jobs whose runtime cannot run every execution plan."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from tessera.formulation.decisions import Decision
from tessera.formulation.plan_tables import RefusedPlans, Runtimes
from tessera.formulation.policy import Policy
from tessera.formulation.snapshot import Estimates, Jobs, Snapshot
from tessera.formulation.tables import Ints
from tessera.solvers.base import Budget
from tessera.solvers.registry import make_solver
from tessera.solvers.rounds.plan import RoundOptions, plan_round
from tessera.solvers.schedulers.registry import scheduler_of
from tests.support.laws import examples
from tests.support.snapshots import draw_choices, snapshots

PLANS = ("", "a", "b")
TORCHRUN, MEGATRON = 0, 1
RUNTIMES = Runtimes(name=("torchrun", "megatron"), pipelines=np.array([False, True]))
LAW = examples(100)


def plan_on(gpus: Ints, degree: Ints) -> Ints:
    """Return the plan of each Cell."""
    return (np.asarray(gpus) + np.asarray(degree)) % len(PLANS)


@st.composite
def restricted_rounds(draw: st.DrawFn) -> Snapshot:
    """Draw a snapshot in which runtimes refuse some plans, also those that jobs run by."""
    snapshot = draw(snapshots())
    e, jobs = snapshot.estimates, snapshot.jobs
    runtime = draw_choices(draw, *([(-1, TORCHRUN, MEGATRON)] * len(jobs)))
    pairs = [(TORCHRUN, 1), (TORCHRUN, 2), (MEGATRON, 1), (MEGATRON, 2)]
    refused = draw_choices(draw, *([(False, True)] * len(pairs)))
    rows = [
        {"runtime": of, "plan": plan}
        for (of, plan), is_refused in zip(pairs, refused, strict=True)
        if is_refused
    ]
    runs = jobs.current_gpus > 0
    current_plan = np.where(runs, plan_on(jobs.current_gpus, jobs.current_degree), 0)
    return replace(
        snapshot,
        plans=PLANS,
        estimates=replace(e, plan=plan_on(e.gpus, e.pipeline_degree)),
        jobs=replace(jobs, runtime=np.array(runtime, np.int64), current_plan=current_plan),
        runtimes=RUNTIMES,
        refused_plans=RefusedPlans.from_rows(rows),
    )


def is_refused(snapshot: Snapshot, runtime: int, plan: int, degree: int) -> bool:
    pairs = snapshot.refused_plans
    return (runtime, plan) in zip(pairs.runtime.tolist(), pairs.plan.tolist(), strict=True) or (
        runtime == TORCHRUN and degree > 1
    )


def filter_by_hand(snapshot: Snapshot) -> Snapshot:
    """Return the snapshot with a workload for each job of a restricted runtime, and no runtimes."""
    rows = [snapshot.estimates.row(i) for i in range(len(snapshot.estimates))]
    jobs = [snapshot.jobs.row(i) for i in range(len(snapshot.jobs))]
    lost, workloads = snapshot.disturbed(), list(snapshot.workloads)
    own: list[dict[str, Any]] = []
    for index, job in enumerate(jobs):
        runtime = job["runtime"]
        job["runtime"] = -1
        if runtime < 0:
            continue
        now = job["current_type"], job["current_gpus"], job["current_degree"], job["current_plan"]
        stays = now[1] > 0 and not lost[index] and is_refused(snapshot, runtime, now[3], now[2])
        for row in rows:
            cell = row["gpu_type"], row["gpus"], row["pipeline_degree"], row["plan"]
            if row["workload"] == job["workload"] and (
                not is_refused(snapshot, runtime, cell[3], cell[2]) or (stays and cell == now)
            ):
                own.append(row | {"workload": len(workloads)})
        workloads.append(workloads[job["workload"]])
        job["workload"] = len(workloads) - 1
        job["movable"] = job["movable"] and not stays
    return replace(
        snapshot,
        workloads=tuple(workloads),
        estimates=Estimates.from_rows(rows + own) if rows else snapshot.estimates,
        jobs=Jobs.from_rows(jobs) if jobs else snapshot.jobs,
        runtimes=Runtimes.from_rows([]),
        refused_plans=RefusedPlans.from_rows([]),
    )


def decide(snapshot: Snapshot, policy: Policy | None = None, scheduler: str = "") -> list[Decision]:
    """Return the decisions without their reasons."""
    budget = Budget(remaining_s=lambda: math.inf, work={"cp-sat": 0.1, "lp": 9.0})
    options = policy or RoundOptions(objective="throughput")
    decided = plan_round(
        snapshot,
        options,
        make_solver("portfolio"),
        budget,
        scheduler=scheduler_of(scheduler) if scheduler else None,
    )
    assert decided.violations == ()
    return [decision._replace(reason=None) for decision in decided.decisions]


@LAW
@given(restricted_rounds())
def test_a_round_decides_as_if_its_estimates_had_been_filtered_by_hand(snapshot: Snapshot) -> None:
    assert decide(snapshot) == decide(filter_by_hand(snapshot))


@LAW
@given(restricted_rounds(), st.sampled_from(["fcfs", "sia", "gavel", "arena"]))
def test_so_does_every_published_scheduler(snapshot: Snapshot, scheduler: str) -> None:
    by_hand = filter_by_hand(snapshot)
    assert decide(snapshot, scheduler=scheduler) == decide(by_hand, scheduler=scheduler)
