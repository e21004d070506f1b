"""The loops of a server: rounds, tasks of clusters, and profiling tasks."""

from __future__ import annotations

import asyncio
import math
import threading
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest

from tessera.estimator.profiling.tasks import LAST_PRIORITY, LEAST_WEIGHT, NOMINAL_S, TASK_WORKLOAD
from tessera.formulation.answer.decisions import DecisionKind
from tessera.formulation.answer.placement import Gang
from tessera.formulation.answer.proofs import NO_PROOF
from tessera.formulation.base.errors import (
    DeadlineTooShort,
    InvalidInput,
    NotFound,
    TooBusy,
    Unavailable,
)
from tessera.formulation.job.lifecycle import JobState
from tessera.formulation.records.rounds import RoundCommit, RoundRecord, decision_record
from tessera.formulation.records.store import Request
from tessera.formulation.round.policy import Policy
from tessera.formulation.state.snapshot import Snapshot
from tessera.service.server.rounds import deciding
from tessera.service.server.rounds.cluster_task import ClusterTask
from tessera.service.server.rounds.loop import RoundLoop
from tessera.service.server.tasks.calls import Calls
from tessera.solvers import registry
from tessera.solvers.base import Budget
from tessera.solvers.registry import make_solver
from tessera.solvers.rounds.plan import RoundOptions, plan_round
from tessera.solvers.schedulers.base import Scheduler
from tessera.solvers.schedulers.registry import make_scheduler
from tests.support.builders import a_job, a_random_snapshot, a_snapshot, an_estimate, some_nodes
from tests.support.hand_clock import HandClock
from tests.support.logged import logged_lines
from tests.support.patience import PATIENCE_S
from tests.support.proving import RecordingSolver
from tests.support.store_double import StoreDouble

OPTIONS = RoundOptions(solver="greedy")


class SingleClusterStore:
    """A store of one snapshot. The test sets how long each call takes."""

    def __init__(self, clock: HandClock) -> None:
        self.clock = clock
        self.takes: dict[str, float] = {}
        self.committed: list[RoundCommit] = []
        self.found: Snapshot = a_random_snapshot(1, jobs=5)

    def _spend(self, name: str) -> None:
        self.clock.now_s += self.takes.get(name, 0.0)

    def begin_round(
        self, cluster: str, request: Request | None, use_half_life_s: float = 0.0
    ) -> Snapshot | RoundRecord:
        for number, commit in enumerate(self.committed, 1):
            if request is not None and commit.request == request:
                return self.record(number, commit)
        return self.snapshot(cluster)

    def snapshot(self, cluster: str, use_half_life_s: float = 0.0) -> Snapshot:
        self._spend("snapshot")
        return self.found

    def record(self, number: int, commit: RoundCommit) -> RoundRecord:
        decisions = tuple(decision_record(commit.snapshot, d) for d in commit.decisions)
        return RoundRecord(summary=replace(commit.summary, number=number), decisions=decisions)

    def commit(self, commit: RoundCommit, in_time: Callable[[], bool]) -> RoundRecord:
        self._spend("commit")
        if not in_time():
            raise DeadlineTooShort("too late")
        self.committed.append(commit)
        return self.record(len(self.committed), commit)


class LoopUnderTest:
    """A loop, its store and its clock."""

    def __init__(self) -> None:
        self.clock = HandClock()
        self.store = SingleClusterStore(self.clock)
        self.loop = RoundLoop(self.store, self.clock)  # type: ignore[arg-type] # implements only what schedule() needs

    def schedule(
        self, deadline_s: float = math.inf, options: RoundOptions = OPTIONS, **more: Any
    ) -> RoundRecord:
        end_s = self.clock.now_s + deadline_s
        defaults: dict[str, Any] = {"dry_run": False, "request": None, "cancelled": lambda: False}
        return self.loop.schedule(
            "test", options, remaining_s=lambda: end_s - self.clock.now_s, **defaults | more
        )


def test_a_round_is_committed_with_its_phases() -> None:
    record = LoopUnderTest().schedule(10.0)
    assert record.summary.number == 1
    assert set(record.summary.seconds) >= {
        "load",
        "build",
        "greedy",
        "solve",
        "place",
        "check",
        "commit",
    }


def test_a_replica_without_measurements_refuses_a_deadline_too_short_for_a_commit() -> None:
    world = LoopUnderTest()
    with pytest.raises(DeadlineTooShort, match="no round was committed"):
        world.schedule(0.015)
    assert world.store.committed == []


def test_a_commit_that_ends_after_the_deadline_or_the_call_is_not_made() -> None:
    world = LoopUnderTest()
    world.store.takes = {"commit": 2.0}
    with pytest.raises(DeadlineTooShort, match="too late"):
        world.schedule(1.0)
    with pytest.raises(DeadlineTooShort, match="too late"):
        world.schedule(cancelled=lambda: world.clock.now_s > 3.0)
    assert world.store.committed == []
    assert world.schedule(3.0).summary.number == 1


def test_the_measured_time_of_phases_is_reserved_from_the_next_deadline() -> None:
    world = LoopUnderTest()
    world.store.takes = {"snapshot": 2.0, "commit": 3.0}
    world.schedule(60.0)
    with pytest.raises(DeadlineTooShort, match=r"5\.0\d* s"):
        world.schedule(4.0)
    assert len(world.store.committed) == 1
    assert world.schedule(6.0).summary.number == 2


def test_a_slow_phase_does_not_make_all_later_calls_fail() -> None:
    world = LoopUnderTest()
    world.store.takes = {"commit": 61.0}
    world.schedule(300.0)
    world.store.takes = {}
    for _ in range(3):
        try:
            world.schedule(60.0)
        except DeadlineTooShort:
            continue
    assert len(world.store.committed) > 1


def test_an_unknown_solver_is_refused_before_anything_is_read() -> None:
    world = LoopUnderTest()
    with pytest.raises(InvalidInput, match="portfolio"):
        world.loop.schedule(
            "test",
            replace(OPTIONS, solver="magic"),
            remaining_s=lambda: 1.0,
            dry_run=False,
            request=None,
            cancelled=lambda: False,
        )


def test_missing_clusters_leave_nothing_in_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    world = LoopUnderTest()

    def missing(cluster: str) -> Snapshot:
        raise NotFound(cluster)

    monkeypatch.setattr(world.store, "snapshot", missing)
    for _ in range(3):
        with pytest.raises(NotFound):
            world.schedule()
    assert not world.loop._history


def test_a_deadline_that_ends_during_placement_ends_the_round(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    world, phases = LoopUnderTest(), list[str]()
    monkeypatch.setattr(deciding, "plan_round", _slow(plan_round, world.clock, "greedy", phases))
    with pytest.raises(DeadlineTooShort, match="no round was committed"):
        world.schedule(5.0, dry_run=True)
    assert phases[-1] == "greedy"  # nothing is solved, placed or checked afterwards


def _slow(plan: Any, clock: HandClock, phase: str, phases: list[str]) -> Any:
    """Return ``plan`` with a phase that uses up the deadline."""

    def slowed(*args: Any) -> Any:
        *most, book, scheduler = args

        def book_slowly(name: str) -> None:
            phases.append(name)
            clock.now_s += 100.0 if name == phase else 0.0
            book(name)

        return plan(*most, book_slowly, scheduler)

    return slowed


def test_a_solver_returns_its_best_answer_early_if_others_wait() -> None:
    world = LoopUnderTest()
    record = world.schedule(options=RoundOptions(), fair_s=lambda: 0.0)
    assert record.summary.verified
    assert dict(record.summary.work)["cp-sat"] == 0  # no time was left for it


def test_a_replay_that_cannot_end_early_yields_with_an_error() -> None:
    world = LoopUnderTest()
    record = world.schedule(options=RoundOptions())
    world.store.get_round = lambda cluster, number: record  # type: ignore[attr-defined]
    world.store.round_snapshot = lambda cluster, number: world.store.found  # type: ignore[attr-defined]
    world.store.round_proof = lambda cluster, number: NO_PROOF  # type: ignore[attr-defined]
    limits: dict[str, Any] = {"remaining_s": lambda: 100.0, "cancelled": lambda: False}
    _, same = world.loop.replay("test", 1, None, fair_s=lambda: 1.0, **limits)
    assert same
    with pytest.raises(TooBusy, match="repeat it when the server is less busy"):
        world.loop.replay("test", 1, None, fair_s=lambda: 0.0, **limits)


def test_a_replay_gets_the_recorded_answers_next_to_the_recorded_work(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    world, first, again = LoopUnderTest(), RecordingSolver(), RecordingSolver()
    monkeypatch.setattr(deciding, "make_solver", lambda _name: first)
    record = world.schedule(options=RoundOptions())
    proof = world.store.committed[0].proof
    assert "recorded" not in record.summary.options
    world.store.get_round = lambda cluster, number: record  # type: ignore[attr-defined]
    world.store.round_snapshot = lambda cluster, number: world.store.found  # type: ignore[attr-defined]
    world.store.round_proof = lambda cluster, number: proof  # type: ignore[attr-defined]
    monkeypatch.setattr(deciding, "make_solver", lambda _name: again)
    limits: dict[str, Any] = {"remaining_s": lambda: 100.0, "cancelled": lambda: False}
    _, same = world.loop.replay("test", 1, None, **limits)
    assert same
    assert (first.given, again.given) == ([()], [proof.recorded])
    assert proof.recorded
    world.loop.replay("test", 1, RoundOptions(), **limits)
    assert again.given[1] == ()  # other options are not a repetition


def test_baselines_decide_dry_runs_and_commit_nothing() -> None:
    world = LoopUnderTest()
    for name in registry.baseline_names():
        with pytest.raises(InvalidInput, match=r"only for comparison.*a dry run or a replay"):
            world.schedule(options=RoundOptions(solver=name))
    assert not world.store.committed
    assert world.schedule(
        options=RoundOptions(solver="stock-cp-sat"), dry_run=True
    ).summary.verified


class LeaseStore(StoreDouble):
    """A store of clusters and their leases, which the first holder keeps."""

    def __init__(self, *clusters: str) -> None:
        self.clusters, self.holders = clusters, dict[str, str]()
        self.asked = threading.Event()

    def list_clusters(self, after: str, limit: int) -> list[Any]:
        self.asked.set()
        return [SimpleNamespace(name=n, idle=False) for n in self.clusters if n > after]

    def acquire_lease(self, cluster: str, holder: str, ttl_s: float) -> bool:
        return cluster in self.clusters and self.holders.setdefault(cluster, holder) == holder


class Visits:
    """The visited clusters, and a way to wait for more of them."""

    def __init__(self, error: Exception | None = None) -> None:
        self.clusters: list[str] = []
        self._error = error

    def __call__(self, cluster: str, *_: Any) -> None:
        self.clusters.append(cluster)
        if self._error is not None:
            raise self._error

    async def reach(self, number: int) -> None:
        async with asyncio.timeout(PATIENCE_S):
            while len(self.clusters) < number:
                await asyncio.sleep(0.001)


@asynccontextmanager
async def a_task(
    store: Any, attend: Callable[..., Any], holder: str = "me", **more: Any
) -> AsyncIterator[ClusterTask]:
    calls = Calls(1, "test")
    task = ClusterTask(
        store,
        HandClock(),
        attend,
        calls=calls,
        work=calls,
        holder=holder,
        period_s=60.0,
        fails="nothing",
        event="visit_failed",
        **more,
    )
    yield task
    async with asyncio.timeout(PATIENCE_S):
        await task.stop()
    await calls.close()


async def test_only_the_replica_with_the_lease_visits_a_cluster() -> None:
    store, holding, idle = LeaseStore("c"), Visits(), Visits()
    async with a_task(store, holding, "one") as first, a_task(store, idle, "other") as second:
        for task, woken in ((first, None), (second, None), (second, {"c"}), (first, {"c"})):
            await task.look(woken)
    assert (holding.clusters, idle.clusters) == (["c", "c"], [])


async def test_a_wake_up_visits_only_the_cluster_that_was_woken() -> None:
    visits = Visits()
    async with a_task(LeaseStore("c", "quiet"), visits) as task:
        task.start()
        await visits.reach(2)
        task.wake("c")
        await visits.reach(3)
    assert visits.clusters == ["c", "quiet", "c"]


async def test_an_error_does_not_end_the_task(caplog: pytest.LogCaptureFixture) -> None:
    visits = Visits(RuntimeError("a mistake"))
    async with a_task(LeaseStore("c"), visits) as task:
        task.start()
        await visits.reach(1)
        task.wake("nowhere")
        task.wake("")
        await visits.reach(2)
    assert visits.clusters == ["c", "c"]
    assert ["cluster=c" in line for line in logged_lines(caplog, "visit_failed")] == [True] * 2


async def test_a_store_that_cannot_be_reached_is_logged_and_looked_at_again(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*_: object) -> list[Any]:
        raise Unavailable("no database")

    store, visits = LeaseStore("c"), Visits()
    async with a_task(store, visits) as task:
        with monkeypatch.context() as outage:
            outage.setattr(store, "list_clusters", refuse)
            await task.look(None)
        await task.look(None)
    assert visits.clusters == ["c"]
    (line,) = logged_lines(caplog, "visit_failed")
    assert "no database" in line


@pytest.mark.parametrize("steps", range(5))
async def test_a_wake_up_during_the_end_does_not_outlive_the_task(steps: int) -> None:
    store = LeaseStore()
    async with a_task(store, Visits()) as task:
        task.start()
        assert await asyncio.to_thread(store.asked.wait, PATIENCE_S)
        for _ in range(20):  # it has looked once and then waits
            await asyncio.sleep(0)
        task.wake("c")
        for _ in range(steps):
            await asyncio.sleep(0)


async def test_state_of_a_deleted_cluster_is_dropped() -> None:
    dropped = list[str]()
    async with a_task(LeaseStore(), Visits(), forget=dropped.append) as task:
        await task.look({"gone"})
    assert dropped == ["gone"]


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


def a_profiling_task(name: str = "task", **overrides: Any) -> dict[str, Any]:
    settings = {
        "weight": LEAST_WEIGHT,
        "priority": LAST_PRIORITY,
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


@pytest.mark.parametrize(
    "policy",
    [*(Policy(objective=name) for name in OBJECTIVES), Policy(raw_throughput=True)],
    ids=lambda p: p.objective,
)
def test_a_task_runs_on_an_idle_gpu_and_gives_way_to_a_job_that_needs_it(policy: Policy) -> None:
    snapshot = a_cluster(3, a_job("real"), a_profiling_task())
    assert running_jobs(snapshot, policy) == {"real", "task"}
    snapshot = a_cluster(1, a_profiling_task(), a_job("real", weight=0.01))
    assert running_jobs(snapshot, policy) == {"real"}


@pytest.mark.parametrize(
    "policy",
    [
        *({"objective": objective} for objective in OBJECTIVES),
        {"keep_requests": False},
        {"change_spacing": 1e6},
        {"default_run_s": 1.0},
    ],
)
def test_a_running_task_gives_way_whatever_the_policy_promises(policy: dict[str, Any]) -> None:
    task = a_profiling_task(state=JobState.RUNNING, cell=(0, 1, 1), since_s=999.0, generation=1)
    snapshot = a_cluster(1, task, a_job("real", submit_s=999.0, queued_s=999.0), gangs={0: ONE_GPU})
    assert running_jobs(snapshot, replace(Policy(), **policy)) == {"real"}


def test_a_task_does_not_keep_a_job_from_growing() -> None:
    task = a_profiling_task(state=JobState.RUNNING, cell=(0, 1, 1), since_s=1.0, generation=1)
    snapshot = a_cluster(2, task, a_job("real", requested_gpus=2), gangs={0: ONE_GPU})
    assert running_jobs(snapshot, Policy()) == {"real"}


@pytest.mark.parametrize("name", ["fcfs", "arena"])
def test_published_schedulers_leave_idle_gpus_to_tasks(name: str) -> None:
    scheduler = Scheduler(published=make_scheduler(name))
    snapshot = a_cluster(3, a_profiling_task(), a_job("real"))
    assert running_jobs(snapshot, Policy(), scheduler) == {"real", "task"}
    full = a_cluster(1, a_profiling_task(), a_job("real"))
    assert running_jobs(full, Policy(), scheduler) == {"real"}
    outcome = plan_round(full, Policy(), make_solver(), FOREVER, scheduler=scheduler)
    (waits,) = (d for d in outcome.decisions if d.gang is None)
    assert waits.reason is not None
    assert "published scheduler" in str(waits.reason.message)


@pytest.mark.parametrize("name", ["fcfs", "arena"])
def test_a_running_task_stays_on_its_gpu_or_gives_way_under_a_published_scheduler(
    name: str,
) -> None:
    task = a_profiling_task(state=JobState.RUNNING, cell=(0, 1, 1), since_s=999.0, generation=1)
    scheduler = Scheduler(published=make_scheduler(name))
    two = {"requested_gpus": 2, "min_gpus": 2}
    taken = a_cluster(2, task, a_job("real", **two), gangs={0: ONE_GPU})
    assert running_jobs(taken, Policy(), scheduler) == {"real"}
    snapshot = a_cluster(3, task, gangs={0: ONE_GPU})
    outcome = plan_round(snapshot, Policy(), make_solver(), FOREVER, scheduler=scheduler)
    (kept,) = outcome.decisions
    assert kept.kind is DecisionKind.KEEP
