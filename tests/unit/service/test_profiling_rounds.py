"""Profiling tasks in rounds: they use idle GPUs, under every objective, and no promise binds them."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import pytest

from tessera.estimator.profiling.tasks import LAST_QUEUE, LEAST_WEIGHT, NOMINAL_S, TASK_WORKLOAD
from tessera.formulation.decisions import DecisionKind
from tessera.formulation.lifecycle import JobState
from tessera.formulation.placement import Gang
from tessera.formulation.policy import Policy
from tessera.formulation.snapshot import Snapshot
from tessera.solvers.base import Budget
from tessera.solvers.registry import make_solver
from tessera.solvers.rounds.plan import plan_round
from tessera.solvers.schedulers.base import Scheduler, make_view
from tessera.solvers.schedulers.registry import make_scheduler
from tests.support.builders import a_job, a_snapshot, an_estimate, some_nodes

FOREVER = Budget(remaining_s=lambda: math.inf)
ONE_GPU = Gang(members=((0, (0,)),))
OBJECTIVES = (
    "throughput",
    "jct",
    "balanced",
    "cost",
    "finish-time-fairness",
    "max-min",
    "makespan",
    "deadline then jct",
)


def a_task(name: str = "task", **overrides: Any) -> dict[str, Any]:
    settings = {
        "weight": LEAST_WEIGHT,
        "queue": LAST_QUEUE,
        "iterations": 4.0,
        "iterations_left": 4.0,
    }
    return a_job(name, workload=1, **(settings | overrides))


def a_cluster(gpus: int, *jobs: dict[str, Any], **rest: Any) -> Snapshot:
    """Return a node. Workload 0 trains on 1 or 2 GPUs; workload 1 is a profiling task on one."""
    estimates = [
        an_estimate(0, 0, 1, iter_time_s=1.0),
        an_estimate(0, 0, 2, iter_time_s=0.6),
        an_estimate(1, 0, 1, iter_time_s=NOMINAL_S),
    ]
    snapshot = a_snapshot(
        nodes=some_nodes((0, 1, gpus)), jobs=jobs, estimates=estimates, workloads=2, **rest
    )
    kinds = tuple(replace(t, dollars_per_hour=1.0) for t in snapshot.gpu_types)
    return replace(snapshot, gpu_types=kinds, workloads=(snapshot.workloads[0], TASK_WORKLOAD))


def running_jobs(
    snapshot: Snapshot, policy: Policy, scheduler: Scheduler | None = None
) -> set[str]:
    """Return the jobs that run after a round."""
    outcome = plan_round(snapshot, policy, make_solver(), FOREVER, scheduler=scheduler)
    assert not outcome.violations
    return {snapshot.jobs.name[d.job] for d in outcome.decisions if d.gang is not None}


@pytest.mark.parametrize("objective", OBJECTIVES)
def test_a_task_runs_on_an_idle_gpu(objective: str) -> None:
    snapshot = a_cluster(3, a_job("real"), a_task())
    assert running_jobs(snapshot, Policy(objective=objective)) == {"real", "task"}


def test_a_task_runs_on_an_idle_gpu_also_if_raw_samples_are_summed() -> None:
    snapshot, policy = a_cluster(3, a_job("real"), a_task()), Policy(raw_throughput=True)
    assert running_jobs(snapshot, policy) == {"real", "task"}
    assert running_jobs(a_cluster(1, a_task(), a_job("real", weight=0.01)), policy) == {"real"}


@pytest.mark.parametrize("objective", OBJECTIVES)
def test_a_job_that_needs_the_gpu_gets_it_although_the_task_came_first(objective: str) -> None:
    snapshot = a_cluster(1, a_task(), a_job("real", weight=0.01))
    assert running_jobs(snapshot, Policy(objective=objective)) == {"real"}


@pytest.mark.parametrize(
    "policy",
    [
        *({"objective": objective} for objective in OBJECTIVES),
        {"run_to_completion": True},
        {"min_run_s": 1e6},
        {"queue_order": True, "promote_after_s": 1.0},
        {"reserve_after_s": 1.0},
    ],
)
def test_a_running_task_gives_way_whatever_the_policy_promises(policy: dict[str, Any]) -> None:
    task = a_task(state=JobState.RUNNING, cell=(0, 1, 1), since_s=999.0, generation=1)
    snapshot = a_cluster(1, task, a_job("real", submit_s=999.0, queued_s=999.0), gangs={0: ONE_GPU})
    assert running_jobs(snapshot, replace(Policy(), **policy)) == {"real"}


def test_a_task_does_not_keep_a_job_from_growing() -> None:
    task = a_task(state=JobState.RUNNING, cell=(0, 1, 1), since_s=1.0, generation=1)
    snapshot = a_cluster(2, task, a_job("real", requested_gpus=2), gangs={0: ONE_GPU})
    assert running_jobs(snapshot, Policy()) == {"real"}


@pytest.mark.parametrize("name", ["fcfs", "arena"])
def test_published_schedulers_leave_idle_gpus_to_tasks(name: str) -> None:
    scheduler = Scheduler(published=make_scheduler(name))
    snapshot = a_cluster(3, a_task(), a_job("real"))
    assert running_jobs(snapshot, Policy(), scheduler) == {"real", "task"}
    full = a_cluster(1, a_task(), a_job("real"))
    assert running_jobs(full, Policy(), scheduler) == {"real"}
    outcome = plan_round(full, Policy(), make_solver(), FOREVER, scheduler=scheduler)
    (waits,) = (d for d in outcome.decisions if d.gang is None)
    assert waits.reason is not None
    assert "published scheduler" in waits.reason.message


@pytest.mark.parametrize("name", ["fcfs", "arena"])
def test_a_running_task_gives_way_to_a_job_of_a_published_scheduler(name: str) -> None:
    task = a_task(state=JobState.RUNNING, cell=(0, 1, 1), since_s=999.0, generation=1)
    scheduler = Scheduler(published=make_scheduler(name))
    two = {"requested_gpus": 2, "min_gpus": 2}
    taken = a_cluster(2, task, a_job("real", **two), gangs={0: ONE_GPU})
    assert running_jobs(taken, Policy(), scheduler) == {"real"}


@pytest.mark.parametrize("name", ["fcfs", "arena"])
def test_a_running_task_stays_on_its_gpu_under_a_published_scheduler(name: str) -> None:
    task = a_task(state=JobState.RUNNING, cell=(0, 1, 1), since_s=999.0, generation=1)
    scheduler = Scheduler(published=make_scheduler(name))
    snapshot = a_cluster(3, task, gangs={0: ONE_GPU})
    outcome = plan_round(snapshot, Policy(), make_solver(), FOREVER, scheduler=scheduler)
    (kept,) = outcome.decisions
    assert kept.kind is DecisionKind.KEEP


def test_a_published_scheduler_sees_no_columns_of_tasks() -> None:
    snapshot = a_cluster(3, a_task(), a_job("real"))
    seen = make_view(snapshot, Policy())
    assert seen.draft.has_columns.tolist() == [False, True]
