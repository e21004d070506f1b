"""The round loop: the only place where a round has effects. Load, plan, commit; nothing is held between."""

from __future__ import annotations

import logging
from collections import defaultdict, deque
from collections.abc import Callable
from dataclasses import asdict, replace
from importlib.metadata import version
from statistics import median
from typing import TypeAlias

from formulation.codec import digest, digest_of, encode
from formulation.decisions import CHANGES_GPUS, DecisionKind
from formulation.errors import DeadlineTooShort
from formulation.resources import (
    Request,
    RoundCommit,
    RoundRecord,
    RoundSummary,
    decision_record,
)
from formulation.snapshot import Snapshot
from service.ports import Clock, Rounds
from service.rounds import Outcome, RoundOptions, plan_round
from service.worker import Workers
from solvers.base import Budget
from solvers.kernels.warm import warm
from solvers.policies.registry import scheduler_of
from solvers.registry import solver as make_solver

log = logging.getLogger(__name__)

RESERVE = 1.5
"""Time kept back for placing, checking and committing, as a multiple of what they take."""

FIRST_S = {"commit": 0.1}
"""Before anything was measured: a commit of 300 jobs took half of this (``tessera bench rpc``)."""

AFTER_SOLVING = ("place", "check", "network", "commit")
NOT_SOLVING = ("load", "build", "greedy", *AFTER_SOLVING)

REMEMBERED = 5
"""Rounds over which the median of a phase's time is taken."""

_LIBRARIES = ("tessera", "ortools", "scipy", "numpy", "numba")
_VERSIONS = tuple(f"{name} {version(name)}" for name in _LIBRARIES)


class _Phases:
    """Seconds by phase, by the given clock."""

    def __init__(self, clock: Clock) -> None:
        self._clock, self._last = clock, clock.monotonic_s()
        self.seconds: dict[str, float] = {}

    def mark(self, phase: str) -> None:
        """Book the time since the last mark under ``phase``."""
        now = self._clock.monotonic_s()
        self.seconds[phase] = self.seconds.get(phase, 0.0) + now - self._last
        self._last = now

    def book(self, phase: str, seconds: float) -> None:
        """Book seconds since the last mark that were measured elsewhere under ``phase``."""
        self.seconds[phase] = self.seconds.get(phase, 0.0) + seconds
        self._last += seconds


class _Measured:
    """What the phases of a cluster's last rounds took."""

    def __init__(self) -> None:
        self._rounds: deque[dict[str, float]] = deque(maxlen=REMEMBERED)

    def remember(self, seconds: dict[str, float]) -> None:
        """Take in a round; what is booked in ``seconds`` later counts too."""
        self._rounds.append(seconds)

    def forget_one(self) -> None:
        """Forget the oldest round: what was slow once must not refuse every later call."""
        if self._rounds:
            self._rounds.popleft()

    def expect_s(self, *phases: str) -> float:
        """Return the sum of the phases' medians, seconds; guesses where nothing was measured."""
        total = 0.0
        for phase in phases:
            took = [seconds[phase] for seconds in self._rounds if phase in seconds]
            total += median(took) if took else FIRST_S.get(phase, 0.0)
        return total


class RoundLoop:
    """Decides and commits rounds. Any number may run at once, in any number of replicas."""

    def __init__(
        self, store: Rounds, clock: Clock, workers: Workers | None = None, from_jobs: int = 0
    ) -> None:
        """``workers`` decide rounds of at least ``from_jobs`` jobs; without them this process does."""
        self._store, self._clock = store, clock
        self._workers, self._from_jobs = workers, from_jobs
        make_solver()  # loads the solver libraries now, not within the first call's deadline,
        warm()  # and compiles what is compiled
        self._measured: defaultdict[str, _Measured] = defaultdict(_Measured)  # by cluster

    def schedule(
        self,
        cluster: str,
        options: RoundOptions,
        *,
        remaining_s: Callable[[], float],
        dry_run: bool,
        request: Request | None,
        cancelled: Callable[[], bool],
    ) -> RoundRecord:
        """Decide a round and, unless ``dry_run``, commit it. Blocks.

        ``remaining_s`` is what is left of the caller's deadline (inf: none).

        Raises:
            NotFound: the cluster. InvalidInput: the options.
            DeadlineTooShort: too little time for loading, greedy, checking and committing; no round was
                written.
            RoundSuperseded: another replica committed first; no round was written.
        """
        _require_known(options)
        if request is not None and (done := self._store.replayed_round(request)) is not None:
            return done
        measured = self._measured[cluster]
        self._require(remaining_s(), measured, *NOT_SOLVING)
        phases = _Phases(self._clock)
        if not dry_run and (lost := self._store.expire(cluster)):
            log.warning("nodes fell silent", extra={"action": "expired", "jobs": lost})
        snapshot = self._store.snapshot(cluster)
        phases.mark("load")
        after = measured.expect_s(*AFTER_SOLVING) * RESERVE
        started_s = self._clock.monotonic_s()

        def solve_s() -> float:
            spent_s = self._clock.monotonic_s() - started_s
            return min(remaining_s() - after, options.solve_limit_s - spent_s)

        budget = Budget(
            remaining_s=solve_s, seed=options.seed, gap=options.gap, work=dict(options.work),
            cancelled=cancelled,
        )  # fmt: skip
        outcome = self._plan(snapshot, options, budget, phases, remaining_s)
        measured.remember(phases.seconds)
        if cancelled():
            raise DeadlineTooShort("the call was cancelled before the round was committed")
        encoded = encode(snapshot)
        summary = summarise(snapshot, outcome, options, phases.seconds, digest_of(encoded))
        if dry_run:
            return _uncommitted(snapshot, outcome, replace(summary, outcome="dry_run"))
        self._require(remaining_s(), measured, "commit")
        record = self._store.commit(
            RoundCommit(
                snapshot=snapshot,
                encoded=encoded,
                decisions=outcome.decisions,
                summary=summary,
                request=request,
                legs=outcome.legs_after(snapshot),
                network=outcome.network,
            ),
            in_time=lambda: remaining_s() > 0 and not cancelled(),
        )
        phases.mark("commit")
        _report(record)
        seconds = record.summary.seconds | {"commit": phases.seconds["commit"]}
        return replace(record, summary=replace(record.summary, seconds=seconds))

    def replay(
        self,
        cluster: str,
        number: int,
        options: RoundOptions | None,
        *,
        remaining_s: Callable[[], float],
        cancelled: Callable[[], bool],
    ) -> tuple[RoundRecord, bool]:
        """Solve a stored round's snapshot again; return it, and whether its decisions are the same.

        Without ``options``, as recorded: the deterministic work at which each solver stopped takes the
        place of the clock, so that the decisions are the same.
        """
        record = self._store.get_round(cluster, number)
        snapshot = self._store.round_snapshot(cluster, number)
        if options is None:
            recorded = RoundOptions(**record.summary.options)  # type: ignore[arg-type]
            options = replace(recorded, work=record.summary.work, solve_limit_s=float("inf"))
        again = decide_again(
            snapshot, options, self._clock, remaining_s=remaining_s, cancelled=cancelled,
            plan=self._plan,
        )  # fmt: skip
        same = [(d.job, d.kind, d.allocation) for d in again.decisions] == [
            (d.job, d.kind, d.allocation) for d in record.decisions
        ]
        return again, same

    def _plan(
        self, snapshot: Snapshot, options: RoundOptions, budget: Budget, phases: _Phases,
        remaining_s: Callable[[], float],
    ) -> Outcome:  # fmt: skip
        """Decide the round here or, if it is large, in a process of its own."""
        if self._workers is None or len(snapshot.jobs) < self._from_jobs:
            return _plan_here(snapshot, options, budget, phases, remaining_s)
        outcome = self._workers.plan(snapshot, options, budget, phases.book, remaining_s)
        phases.mark("transfer")
        return outcome

    @staticmethod
    def _require(remaining_s: float, measured: _Measured, *phases: str) -> None:
        needed_s = measured.expect_s(*phases)
        if remaining_s <= needed_s:
            measured.forget_one()
            raise DeadlineTooShort(
                f"{max(remaining_s, 0.0):.3f} s of the deadline are left, and {', '.join(phases)} take"
                f" {needed_s:.3f} s; no round was committed: call again with a longer deadline"
            )


Plan: TypeAlias = Callable[[Snapshot, RoundOptions, Budget, _Phases, Callable[[], float]], Outcome]


def _plan_here(
    snapshot: Snapshot, options: RoundOptions, budget: Budget, phases: _Phases,
    _remaining_s: Callable[[], float],
) -> Outcome:  # fmt: skip
    solver, scheduler = make_solver(options.solver), scheduler_of(options.scheduler)
    return plan_round(snapshot, options, solver, budget, phases.mark, scheduler)


def _require_known(options: RoundOptions) -> None:
    """Refuse names that no solver or published policy has, before anything is loaded."""
    make_solver(options.solver)
    scheduler_of(options.scheduler)


def decide_again(
    snapshot: Snapshot,
    options: RoundOptions,
    clock: Clock,
    *,
    remaining_s: Callable[[], float],
    cancelled: Callable[[], bool],
    plan: Plan = _plan_here,
) -> RoundRecord:
    """Decide a round on a stored or shared snapshot; nothing is committed, and no store is needed.

    With ``options.work`` that takes the place of the clock.
    """
    started_s = clock.monotonic_s()

    def solve_s() -> float:
        if options.work:
            return float("inf")
        return min(remaining_s(), options.solve_limit_s - (clock.monotonic_s() - started_s))

    phases = _Phases(clock)
    budget = Budget(
        remaining_s=solve_s, seed=options.seed, gap=options.gap, work=dict(options.work),
        cancelled=cancelled,
    )  # fmt: skip
    outcome = plan(snapshot, options, budget, phases, remaining_s)
    summary = summarise(snapshot, outcome, options, phases.seconds, digest(snapshot))
    return _uncommitted(snapshot, outcome, replace(summary, outcome="replay"))


def summarise(
    snapshot: Snapshot, outcome: Outcome, options: RoundOptions, seconds: dict[str, float],
    snapshot_digest: str,
) -> RoundSummary:  # fmt: skip
    """Return the round's summary as it stands before the commit."""
    problem, solution, scale = outcome.problem, outcome.solution, outcome.problem.scale
    kinds = [d.kind for d in outcome.decisions]
    used = problem.used(solution.choice).tolist()
    chosen = asdict(options)
    chosen.pop("work")
    return RoundSummary(
        cluster=snapshot.cluster, number=0, epoch=snapshot.epoch, created_s=snapshot.now_s,
        options=chosen, status=solution.status, outcome="refused" if outcome.violations else "",
        objective=solution.objective / scale, bound=solution.bound / scale, gap=solution.gap,
        placed_score=outcome.placed_score, greedy_objective=outcome.greedy_objective / scale,
        verified=not outcome.violations,
        violations=tuple(f"{v.rule}: {v.detail}" for v in outcome.violations),
        snapshot_digest=snapshot_digest, solver=solution.solver, work=solution.work,
        goals=outcome.goals,
        prices=outcome.prices,
        used_gpus={row.name: n for row, n in zip(problem.rows, used, strict=True)},
        seconds=dict(seconds),
        running=sum(d.gang is not None for d in outcome.decisions),
        waiting=sum(d.gang is None for d in outcome.decisions),
        started=kinds.count(DecisionKind.START), suspended=kinds.count(DecisionKind.SUSPEND),
        changed=sum(k in CHANGES_GPUS and k is not DecisionKind.START for k in kinds),
        samples_per_s=sum(d.rate for d in outcome.decisions), unit=problem.unit,
        versions=_VERSIONS,
    )  # fmt: skip


def _uncommitted(snapshot: Snapshot, outcome: Outcome, summary: RoundSummary) -> RoundRecord:
    return RoundRecord(
        summary=summary, decisions=tuple(decision_record(snapshot, d) for d in outcome.decisions)
    )


def _report(record: RoundRecord) -> None:
    s = record.summary
    facts = {"cluster": s.cluster, "round": s.number, "gap": s.gap, "seconds": s.seconds}
    if s.outcome == "refused":
        log.error(
            "round refused: %s", "; ".join(s.violations), extra={"action": "round_refused", **facts}
        )
    else:
        log.info("round committed", extra={"action": "round_committed", **facts})
