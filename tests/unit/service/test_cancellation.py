"""Rounds whose caller has left: each stops the next time it checks, whatever it is doing."""

from __future__ import annotations

import asyncio
import math
import threading
from collections.abc import Mapping
from dataclasses import replace
from functools import cache
from typing import Any

import numpy as np
import pytest

from tessera.benchmarks.rounds.instances import make_instance
from tessera.formulation.errors import DeadlineTooShort
from tessera.formulation.policy import Policy
from tessera.formulation.snapshot import Snapshot
from tessera.formulation.statement import build_problem
from tessera.service import memory
from tessera.solvers import registry
from tessera.solvers.base import Budget
from tessera.solvers.cpsat import CpSat
from tessera.solvers.network.swaps import PlayEffort
from tessera.solvers.rounds.plan import RoundOptions, RoundOutcome, plan_round
from tessera.solvers.schedulers.registry import scheduler_of

JOBS = 100


@cache
def a_crowded_snapshot() -> Snapshot:
    """Return many jobs with deadlines on a few GPUs, half of which are taken."""
    snapshot = make_instance(JOBS, JOBS // 2, 4, seed=1, running=0.5)
    deadline_s = np.linspace(3600.0, 3600.0 + 60.0 * (JOBS - 1), JOBS)
    return replace(snapshot, jobs=replace(snapshot.jobs, deadline_s=deadline_s))


class LeavingCaller:
    """A caller that leaves at the ``leaves_at``-th check. It counts the checks.

    Only those of the thread that decides count. CP-SAT's watcher has its own, and their number
    depends on how busy the machine is.
    """

    def __init__(self, leaves_at: float = math.inf) -> None:
        self.leaves_at, self.asked = leaves_at, 0
        self._decides = threading.current_thread()

    def has_left(self) -> bool:
        self.asked += threading.current_thread() is self._decides
        return self.asked >= self.leaves_at


def plan_crowd(options: RoundOptions, caller: LeavingCaller, **budget: Any) -> RoundOutcome:
    limits: dict[str, Any] = {"remaining_s": lambda: math.inf, "gap": 1e-2} | budget
    return plan_round(
        a_crowded_snapshot(),
        options,
        registry.make_solver(options.solver),
        Budget(cancelled=caller.has_left, **limits),
        scheduler=scheduler_of(options.scheduler),
    )


@pytest.mark.parametrize(
    ("options", "per_job"),
    [
        ({"objective": "throughput", "solver": "greedy"}, 0),
        ({"objective": "max-min", "fairness_levels": 8}, 0),
        ({"objective": "makespan then jct", "fairness_levels": 8}, 0),
        ({"objective": "deadline then jct", "solver": "greedy"}, 0.5),
        ({"queue_order": True, "max_changes": 10, "solver": "greedy"}, 0.5),
        ({"scheduler": "arena"}, 0.5),
        ({"scheduler": "morphling"}, 0.5),
        ({"scheduler": "antman"}, 0.5),
        ({"scheduler": "sia"}, 0),
    ],
)
def test_a_round_ends_when_its_caller_leaves(options: Mapping[str, Any], per_job: float) -> None:
    stays = LeavingCaller()
    plan_crowd(RoundOptions(**options), stays)
    assert stays.asked > 3 + per_job * JOBS
    for share in (0.0, 0.3, 0.6, 0.9):
        leaves = LeavingCaller(leaves_at=1 + share * (stays.asked - 4))
        with pytest.raises(DeadlineTooShort, match="no round was committed"):
            plan_crowd(RoundOptions(**options), leaves)
        # Searches that only look whether time is left end one after the other before the round.
        assert leaves.asked <= leaves.leaves_at + 20


def test_cp_sat_can_be_stopped_during_its_search() -> None:
    searching = threading.Event()

    def has_left() -> bool:
        if threading.current_thread().name == "cp-sat-watcher":
            searching.set()
        return searching.is_set()

    problem = build_problem(make_instance(400, 200, 4, seed=1, family="tight"), Policy())
    with pytest.raises(DeadlineTooShort):
        CpSat().solve(problem, Budget(remaining_s=lambda: math.inf, gap=0.0, cancelled=has_left))
    assert searching.is_set()


def test_the_calls_time_limits_the_library_but_expires_no_answer() -> None:
    budget = Budget(remaining_s=lambda: math.inf, left_s=lambda: 7.0)
    assert budget.time_limit_s() == 7.0
    assert not budget.expired()
    assert budget.share(0.5).time_limit_s() == 7.0


def test_a_network_search_stops_when_its_caller_leaves() -> None:
    effort = PlayEffort(2, cancelled=lambda: True)
    for use in (effort.share, lambda: effort.spend(1.0), effort.check):
        with pytest.raises(DeadlineTooShort):
            use()


class Countdown:
    """A remaining time that falls by one second whenever it is read."""

    def __init__(self, questions: int) -> None:
        self.left = questions

    def __call__(self) -> float:
        self.left -= 1
        return float(self.left)


@pytest.mark.parametrize("questions", [1, 5, 20, 80])
@pytest.mark.parametrize("objective", ["max-min", "makespan then max-min then jct"])
def test_a_round_cut_short_by_time_can_be_repeated(objective: str, questions: int) -> None:
    options = RoundOptions(objective=objective, fairness_levels=16)
    first = plan_crowd(options, LeavingCaller(), remaining_s=Countdown(questions))
    again = plan_crowd(options, LeavingCaller(), work=dict(first.solution.work))
    assert again.decisions == first.decisions
    assert again.goals == first.goals


def test_levels_without_time_leave_the_solution_valid() -> None:
    options = RoundOptions(objective="max-min", fairness_levels=64)
    cut = plan_crowd(options, LeavingCaller(), remaining_s=Countdown(1))
    assert dict(cut.solution.work)["over:1"] == 1.0
    assert not cut.violations


def test_memory_is_given_back_after_growth_only(monkeypatch: pytest.MonkeyPatch) -> None:
    releases: list[int] = []
    sizes = [2**20, 2**21, 2**30, 2**20, 2**21]
    last = iter([*sizes, *([sizes[-1]] * 1000)])
    readings: list[int] = []

    def resident() -> int:
        readings.append(next(last))
        return readings[-1]

    monkeypatch.setattr(memory, "give_back", lambda: releases.append(len(readings)))

    async def test() -> None:
        task = asyncio.create_task(memory.give_back_repeatedly(lambda: False, resident, 0.0))
        while len(readings) < len(sizes) + 4:
            await asyncio.sleep(0)
        task.cancel()

    asyncio.run(test())
    assert releases == [3]


def test_memory_of_a_busy_process_is_released_once_it_is_idle(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    releases: list[int] = []
    rests_from = memory.MAX_BUSY_PERIODS + 3
    looks = 0

    def is_busy() -> bool:
        nonlocal looks
        looks += 1
        return looks < rests_from

    def resident() -> int:
        return 2**30 if looks else 2**20

    async def test() -> None:
        monkeypatch.setattr(memory, "give_back", lambda: releases.append(looks))
        task = asyncio.create_task(memory.give_back_repeatedly(is_busy, resident, 0.0))
        while looks < rests_from + 5:
            await asyncio.sleep(0)
        task.cancel()

    asyncio.run(test())
    assert releases == [memory.MAX_BUSY_PERIODS, rests_from]


def test_free_memory_is_returned_to_the_system() -> None:
    memory.give_back()
    before = memory.resident_bytes()
    objects = [bytes(1000) for _ in range(200_000)]
    grown = memory.resident_bytes()
    del objects
    memory.give_back()
    assert memory.resident_bytes() < before + (grown - before) // 2
