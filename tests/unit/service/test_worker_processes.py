"""Worker processes, their channels, and work in a process of its own."""

from __future__ import annotations

import math
import os
import signal
import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path

import psutil
import pytest

from tessera.benchmarks.rounds.instances import make_instance
from tessera.client import PLAIN_TEXT, ChannelSettings
from tessera.formulation.base.errors import DeadlineTooShort, ProblemTooLarge, Unavailable
from tessera.formulation.records.rounds import RoundCommit
from tessera.formulation.records.store import Request
from tessera.formulation.state.snapshot import Snapshot
from tessera.service.profiling.task import channel_settings
from tessera.service.server.rounds.background import run_in_process
from tessera.service.server.rounds.loop import RoundLoop
from tessera.service.server.rounds.worker import SolveProcesses
from tessera.service.server.settings.config import Config
from tessera.service.server.settings.sources import load_config
from tessera.solvers.base import Budget
from tessera.solvers.registry import make_solver
from tessera.solvers.rounds.options import RoundOptions
from tessera.solvers.rounds.plan import plan_round
from tests.support.builders import a_random_snapshot
from tests.support.worlds import StoppedClock

OPTIONS = RoundOptions(solver="pricing")
FOREVER = Budget(remaining_s=lambda: math.inf)


def infinite_time() -> float:
    return math.inf


@pytest.fixture(scope="module")
def workers() -> Iterator[SolveProcesses]:
    processes = SolveProcesses()
    yield processes
    processes.close()


class SnapshotStore:
    """The part of a store that ``schedule`` needs: one snapshot, and the committed rounds."""

    def __init__(self, snapshot: Snapshot) -> None:
        self.found = snapshot
        self.committed: list[RoundCommit] = []

    def begin_round(
        self, cluster: str, _request: Request | None, _use_half_life_s: float = 0.0
    ) -> Snapshot:
        return self.found

    def commit(self, commit: RoundCommit, in_time: Callable[[], bool]) -> None:
        self.committed.append(commit)
        raise DeadlineTooShort("the test has seen what would be committed")


def schedule(
    store: SnapshotStore,
    workers: SolveProcesses | None,
    from_jobs: int = 1,
    cancelled: Callable[[], bool] = lambda: False,
    options: RoundOptions = OPTIONS,
) -> None:
    loop = RoundLoop(store, StoppedClock(), workers, from_jobs)  # type: ignore[arg-type] # as above
    loop.schedule(
        "test", options, remaining_s=infinite_time, dry_run=False, request=None, cancelled=cancelled
    )


def kill_while_solving(workers: SolveProcesses) -> Callable[[], bool]:
    """Return a check for cancellation that kills all worker processes when first called."""
    killed: list[int] = []

    def cancelled() -> bool:
        if not killed:
            killed.extend(workers.pids())
            for pid in killed:
                os.kill(pid, signal.SIGKILL)
        return False

    return cancelled


LONG = RoundOptions(solver="cp-sat", gap=1e-9)


@cache
def a_long_round() -> Snapshot:
    """Return a round that takes CP-SAT at least a minute."""
    return make_instance(1500, 1500, 6, 1)


def test_a_worker_process_decides_like_the_server_process(workers: SolveProcesses) -> None:
    snapshot, phases = make_instance(50, 60, 3, 2, running=0.5), []
    here = plan_round(snapshot, OPTIONS, make_solver("pricing"), FOREVER)
    there = workers.plan(
        snapshot, OPTIONS, FOREVER, lambda phase, s: phases.append((phase, s)), infinite_time
    )
    assert there.decisions == here.decisions
    assert there.solution.objective == here.solution.objective
    assert [phase for phase, _ in phases] == ["build", "greedy", "solve", "place", "check"]
    assert all(seconds >= 0 for _, seconds in phases)


def test_a_worker_process_gives_a_scheduler_its_parameters(workers: SolveProcesses) -> None:
    snapshot = make_instance(20, 60, 2, 2)
    few, many = (
        workers.plan(
            snapshot,
            RoundOptions(scheduler="arena", scheduler_parameters=f"max_upgrades={upgrades}"),
            FOREVER,
            lambda phase, s: None,
            infinite_time,
        )
        for upgrades in (0, 1000)
    )
    assert few.decisions != many.decisions


def test_a_worker_process_is_reused_for_the_next_round(workers: SolveProcesses) -> None:
    snapshot = a_random_snapshot(1, jobs=4)
    before = workers.pids()
    for _ in range(2):
        workers.plan(snapshot, OPTIONS, FOREVER, lambda phase, s: None, infinite_time)
    assert workers.pids() == before


def test_an_error_in_the_worker_is_raised_in_the_server(workers: SolveProcesses) -> None:
    snapshot = a_random_snapshot(1, jobs=2)
    heavy = replace(snapshot, jobs=replace(snapshot.jobs, weight=snapshot.jobs.weight * 1e308))
    options = replace(OPTIONS, priority_weights="1:100")
    with pytest.raises(ProblemTooLarge) as here:
        plan_round(heavy, options, make_solver("pricing"), FOREVER)
    with pytest.raises(ProblemTooLarge) as there:
        workers.plan(heavy, options, FOREVER, lambda phase, s: None, infinite_time)
    assert (str(there.value), there.value.field) == (str(here.value), here.value.field)
    assert "plan_round" in "".join(there.value.__notes__)


@pytest.mark.full
def test_a_worker_killed_while_solving_fails_its_round_and_is_replaced(
    workers: SolveProcesses,
) -> None:
    store, old = SnapshotStore(a_long_round()), workers.pids()
    with pytest.raises(Unavailable, match=r"exit code -9.*nothing was committed"):
        schedule(store, workers, cancelled=kill_while_solving(workers), options=LONG)
    assert store.committed == []
    small = SnapshotStore(a_random_snapshot(1, jobs=4))
    with pytest.raises(DeadlineTooShort, match="has seen"):
        schedule(small, workers)
    assert len(small.committed) == 1
    assert not set(workers.pids()) & set(old)


@pytest.mark.full
def test_a_process_that_died_while_idle_is_replaced(workers: SolveProcesses) -> None:
    snapshot = a_random_snapshot(1, jobs=4)
    workers.plan(snapshot, OPTIONS, FOREVER, lambda phase, s: None, infinite_time)
    for pid in workers.pids():
        os.kill(pid, signal.SIGKILL)
        os.waitid(os.P_PID, pid, os.WEXITED | os.WNOWAIT)
    outcome = workers.plan(snapshot, OPTIONS, FOREVER, lambda phase, s: None, infinite_time)
    assert outcome.violations == ()


@pytest.mark.full
def test_cancelling_the_call_ends_its_process_and_commits_nothing(workers: SolveProcesses) -> None:
    store, polled = SnapshotStore(a_long_round()), threading.Event()
    old = workers.pids()

    def cancelled() -> bool:  # first called while the process works
        before = polled.is_set()
        polled.set()
        return before

    with pytest.raises(DeadlineTooShort, match="cancelled"):
        schedule(store, workers, cancelled=cancelled, options=LONG)
    assert store.committed == []
    assert not set(workers.pids()) & set(old)
    for pid in old:
        with pytest.raises(ProcessLookupError):
            os.kill(pid, 0)


def test_a_deadline_that_ends_during_the_solve_ends_it(workers: SolveProcesses) -> None:
    seconds_left = iter([1.0] * 3)
    with pytest.raises(DeadlineTooShort, match="call again with a longer one"):
        workers.plan(
            a_long_round(), LONG, FOREVER, lambda phase, s: None, lambda: next(seconds_left, 0.0)
        )


def test_the_solver_gets_the_time_left_by_the_budget(workers: SolveProcesses) -> None:
    brief = replace(FOREVER, remaining_s=lambda: 0.0)
    outcome = workers.plan(a_long_round(), LONG, brief, lambda phase, s: None, infinite_time)
    assert dict(outcome.solution.work).get("cp-sat", 0.0) == 0.0
    assert outcome.violations == ()


@dataclass(frozen=True, slots=True, kw_only=True)
class ClosedProcesses:
    """Solve processes that were closed, and whether their process had ended right after that."""

    workers: SolveProcesses
    has_ended: bool


@pytest.fixture(scope="module")
def closed() -> ClosedProcesses:
    workers = SolveProcesses()
    (pid,) = workers.pids()
    workers.close()
    return ClosedProcesses(workers=workers, has_ended=not psutil.pid_exists(pid))


@pytest.mark.full
def test_rounds_with_fewer_jobs_are_decided_in_the_server(closed: ClosedProcesses) -> None:
    store = SnapshotStore(a_random_snapshot(1, jobs=4))
    with pytest.raises(DeadlineTooShort, match="has seen"):
        schedule(store, closed.workers, from_jobs=5)
    with pytest.raises(Unavailable, match="shutting down"):
        schedule(store, closed.workers, from_jobs=4)


def test_closing_ends_every_process(closed: ClosedProcesses) -> None:
    assert closed.has_ended


@pytest.mark.full
def test_a_process_started_on_demand_ends_once_it_is_idle() -> None:
    workers, snapshot = SolveProcesses(on_demand=True, idle_s=0.0), a_random_snapshot(1, jobs=4)
    pids = set[int]()

    def look_at_processes() -> float:
        pids.update(workers.pids())
        return math.inf

    for _ in range(2):  # the second starts while the first one's process ends
        outcome = workers.plan(snapshot, OPTIONS, FOREVER, lambda phase, s: None, look_at_processes)
        assert outcome.decisions
    while any(map(psutil.pid_exists, pids)):
        threading.Event().wait(0.01)
    assert pids
    assert not workers.pids()
    workers.close()


@pytest.mark.full
def test_worker_processes_are_off_by_default() -> None:
    assert Config().solve_process_from_jobs == 0
    set_to = load_config(None, {"TESSERA_SOLVE_PROCESS_FROM_JOBS": "5000"})
    assert set_to.solve_process_from_jobs == 5000


def test_a_task_shows_the_files_of_its_agent() -> None:
    files = {name: f"/agent/current/{name}.pem" for name in ("authorities", "certificate", "key")}
    assert channel_settings(files) == ChannelSettings(
        authorities="/agent/current/authorities.pem",
        certificate=Path("/agent/current/certificate.pem"),
        key=Path("/agent/current/key.pem"),
    )


def test_a_task_of_an_agent_without_tls_sends_plain_text() -> None:
    assert channel_settings({}) == PLAIN_TEXT


def divide_by(divisor: int) -> float:
    return 1 / divisor


def die(code: int) -> None:
    os._exit(code)


@pytest.mark.parametrize(
    ("work", "order", "error"),
    [(divide_by, 0, "ZeroDivisionError: division by zero"), (die, 7, "exit code 7")],
)
def test_a_failure_in_the_process_is_an_error_that_says_why(
    work: Callable[[int], object], order: int, error: str
) -> None:
    with pytest.raises(Unavailable, match=error):
        run_in_process(work, order, lambda: False, name="test")
