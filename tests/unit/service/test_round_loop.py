"""The round loop within its caller's deadline, on a clock that the test controls."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest

from tessera.formulation.errors import DeadlineTooShort, InvalidInput, NotFound, TooBusy
from tessera.formulation.proofs import NO_PROOF
from tessera.formulation.records.rounds import RoundCommit, RoundRecord, decision_record
from tessera.formulation.records.store import Request
from tessera.formulation.snapshot import Snapshot
from tessera.service import deciding
from tessera.service.loop import RoundLoop
from tessera.solvers import registry
from tessera.solvers.rounds.plan import RoundOptions, plan_round
from tests.support.builders import a_random_snapshot
from tests.support.hand_clock import HandClock
from tests.support.proving import RecordingSolver

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


def test_a_round_whose_load_used_up_the_deadline_is_not_committed() -> None:
    world = LoopUnderTest()
    world.schedule(60.0)
    world.store.takes = {"snapshot": 5.0}
    with pytest.raises(DeadlineTooShort):
        world.schedule(4.0)
    assert len(world.store.committed) == 1


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


def test_a_cancelled_call_commits_nothing() -> None:
    world = LoopUnderTest()
    with pytest.raises(DeadlineTooShort, match="cancelled"):
        world.schedule(60.0, cancelled=lambda: True)
    assert world.store.committed == []


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


def test_missing_clusters_leave_nothing_in_memory(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
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
