"""The round loop, the only place where a round has effects.

It loads a snapshot, plans and commits. It holds no lock or transaction in between.
"""

from __future__ import annotations

import logging
import threading
from collections import deque
from collections.abc import Callable
from dataclasses import asdict, replace
from importlib.metadata import version
from statistics import median
from typing import TypeAlias

from tessera.formulation.clock import Clock
from tessera.formulation.codec import digest, digest_of, encode
from tessera.formulation.decisions import CHANGES_GPUS, DecisionKind
from tessera.formulation.errors import DeadlineTooShort, InvalidInput, TooBusy
from tessera.formulation.records.rounds import (
    RoundCommit,
    RoundRecord,
    RoundSummary,
    decision_record,
)
from tessera.formulation.records.store import Request
from tessera.formulation.release import installed_version
from tessera.formulation.snapshot import Snapshot
from tessera.service.ports.rounds import Rounds
from tessera.service.worker import SolveProcesses
from tessera.solvers import registry as solvers
from tessera.solvers.base import Budget, require_wanted, unlimited_time
from tessera.solvers.kernels.warm import run_every_loop
from tessera.solvers.registry import make_solver as make_solver
from tessera.solvers.rounds.due import due_s, next_leg_s
from tessera.solvers.rounds.options import recorded_options
from tessera.solvers.rounds.plan import RoundOptions, RoundOutcome, plan_round
from tessera.solvers.schedulers import registry as policies
from tessera.solvers.schedulers.registry import scheduler_of

log = logging.getLogger(__name__)

RESERVE = 1.5
"""Time reserved for placing, checking and committing, as a multiple of their expected duration."""

RESERVED = 0.1
"""Share of its time that a replay keeps for the steps after the solver if none was measured yet."""

FIRST_GUESS_S = {"commit": 0.1}
"""Seconds that a phase is expected to take before anything was measured. A commit of 300 jobs took
half of this (``tessera bench rpc``).
"""

AFTER_SOLVING = ("place", "check", "network", "commit")
NOT_SOLVING = ("load", "build", "greedy", *AFTER_SOLVING)

REMEMBERED_ROUNDS = 5
"""Number of rounds over which the median of a phase's time is taken."""

MAX_REMEMBERED_CLUSTERS = 4096
"""Number of clusters whose times are remembered: those with the latest rounds."""

_LIBRARIES = ("ortools", "scipy", "numpy", "numba")
_VERSIONS = (f"tessera {installed_version()}", *(f"{name} {version(name)}" for name in _LIBRARIES))


class _Phases:
    """Seconds by phase, measured with the given clock."""

    def __init__(self, clock: Clock) -> None:
        self._clock, self._last = clock, clock.monotonic_s()
        self.seconds: dict[str, float] = {}

    def mark(self, phase: str) -> None:
        """Add the time since the last mark to ``phase``."""
        now = self._clock.monotonic_s()
        self.seconds[phase] = self.seconds.get(phase, 0.0) + now - self._last
        self._last = now

    def book(self, phase: str, seconds: float) -> None:
        """Add seconds since the last mark that were measured elsewhere to ``phase``."""
        self.seconds[phase] = self.seconds.get(phase, 0.0) + seconds
        self._last += seconds


class _PhaseTimes:
    """The times that the phases of a cluster's last rounds took."""

    def __init__(self) -> None:
        self._rounds: deque[dict[str, float]] = deque(maxlen=REMEMBERED_ROUNDS)

    def remember(self, seconds: dict[str, float]) -> None:
        """Add a round. Seconds that are added to ``seconds`` later count, too."""
        self._rounds.append(seconds)

    def forget_one(self) -> None:
        """Forget the oldest round, so that one slow round does not refuse all later calls."""
        if self._rounds:
            self._rounds.popleft()

    def expect_s(self, *phases: str) -> float:
        """Return the sum of the phases' medians in seconds.

        A guess is used if nothing was measured.
        """
        total = 0.0
        for phase in phases:
            took = [seconds[phase] for seconds in self._rounds if phase in seconds]
            total += median(took) if took else FIRST_GUESS_S.get(phase, 0.0)
        return total


class RoundLoop:
    """A loop that decides and commits rounds.

    Any number may run at the same time, in any number of replicas.
    """

    def __init__(
        self,
        store: Rounds,
        clock: Clock,
        workers: SolveProcesses | None = None,
        from_jobs: int = 0,
        clock_factor: float = 1.0,
    ) -> None:
        """Prepare the solvers and remember the settings.

        Rounds of at least ``from_jobs`` jobs are decided by ``workers``. If it is None, this
        process decides them. Agents replay ``clock_factor`` seconds of training in one second.
        """
        self._clock_factor = clock_factor
        self._store, self._clock = store, clock
        self._workers, self._from_jobs = workers, from_jobs
        make_solver()  # load the solver libraries now, not within the first call's deadline,
        run_every_loop()  # and compile the kernels
        self._isolated = SolveProcesses(on_demand=True)
        self._measured: dict[str, _PhaseTimes] = {}  # by cluster, the latest last

    def close(self) -> None:
        """End the processes that decide rounds for this loop only."""
        self._isolated.close()

    def schedule(
        self,
        cluster: str,
        options: RoundOptions,
        *,
        remaining_s: Callable[[], float],
        dry_run: bool,
        request: Request | None,
        cancelled: Callable[[], bool],
        fair_s: Callable[[], float] = unlimited_time,
        policy_version: int = 0,
    ) -> RoundRecord:
        """Decide a round and, unless ``dry_run``, commit it. Blocks.

        ``policy_version`` is that of the standing policy, which the round records.
        ``remaining_s`` returns what is left of the caller's deadline (inf if it has no deadline).
        ``fair_s`` returns the time that waiting calls leave to the solver. After it the solver ends
        with its best answer.

        Raises:
            NotFound: the cluster. InvalidInput: the options.
            DeadlineTooShort: too little time for loading, greedy, checking and committing; no round
                was written.
            RoundSuperseded: another replica committed first; no round was written.
        """
        require_known_options(options, commits=not dry_run)
        measured = self._measured.get(cluster) or _PhaseTimes()
        over = _over(remaining_s, cancelled)
        self._require(remaining_s(), measured, *NOT_SOLVING)
        phases = _Phases(self._clock)
        begun = (
            self._store.snapshot(cluster, options.use_half_life_s)
            if dry_run
            else self._store.begin_round(cluster, request, options.use_half_life_s)
        )
        if isinstance(begun, RoundRecord):
            return begun
        snapshot = replace(begun, clock_factor=self._clock_factor)
        phases.mark("load")
        # The solver must leave time for the steps after it.
        after = measured.expect_s(*AFTER_SOLVING) * RESERVE
        started_s = self._clock.monotonic_s()

        def solve_s() -> float:
            spent_s = self._clock.monotonic_s() - started_s
            return min(remaining_s() - after, options.solve_limit_s - spent_s, fair_s())

        budget = Budget(
            remaining_s=solve_s,
            seed=options.seed,
            gap=options.gap,
            work=dict(options.work),
            recorded=options.recorded,
            cancelled=over,
            left_s=remaining_s,
        )
        try:
            outcome = self._plan(snapshot, options, budget, phases, remaining_s)
        except DeadlineTooShort:
            if "solve" in phases.seconds:  # the next step takes at least this long
                phases.mark("place")
                self._remember(cluster, measured, phases)
            raise
        self._remember(cluster, measured, phases)
        # From here on nothing is done for a caller that has left.
        require_wanted(over)
        encoded = encode(snapshot)
        summary = replace(
            summarise_round(snapshot, outcome, options, phases.seconds, digest_of(encoded)),
            policy_version=policy_version,
        )
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
                proof=outcome.proof,
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
        fair_s: Callable[[], float] = unlimited_time,
    ) -> tuple[RoundRecord, bool]:
        """Solve the snapshot of a stored round again.

        Return the round, and whether its decisions are the same. If ``options`` is None, the round
        is decided as recorded: each solver stops at the recorded deterministic work instead of a
        time, so that the decisions are the same. Such a replay cannot end early with another
        answer. It is refused if others wait and ``fair_s`` is over.

        Raises:
            NotFound: the cluster or the round. InvalidInput: the options.
            DeadlineTooShort: the deadline ended, or the call was cancelled.
            TooBusy: others wait for the thread.
        """
        if options is not None:
            require_known_options(options, commits=False)
        record = self._store.get_round(cluster, number)
        snapshot = self._store.round_snapshot(cluster, number)
        if options is None:
            recorded = recorded_options(record.summary.options)
            options = replace(
                recorded,
                work=record.summary.work,
                recorded=self._store.round_proof(cluster, number).recorded,
                solve_limit_s=float("inf"),
            )
        gave_way, by_work = threading.Event(), bool(options.work)
        over, measured = _over(remaining_s, cancelled), self._measured.get(cluster) or _PhaseTimes()
        after_s = measured.expect_s(*AFTER_SOLVING) * RESERVE or RESERVED * remaining_s()

        def gives_way() -> bool:
            if by_work and fair_s() <= 0:
                gave_way.set()
            return gave_way.is_set() or over()

        try:
            again = decide_again(
                snapshot,
                options,
                self._clock,
                remaining_s=remaining_s,
                cancelled=gives_way,
                plan=self._plan,
                solve_s=lambda: min(remaining_s() - after_s, fair_s()),
                left_s=remaining_s,
            )
        except DeadlineTooShort:
            if not gave_way.is_set():
                raise
            raise TooBusy(
                "this replay repeats recorded work and cannot end early, but other calls wait for its thread"
                " or its time is over; repeat it when the server is less busy"
            ) from None
        same = [(d.job, d.kind, d.allocation) for d in again.decisions] == [
            (d.job, d.kind, d.allocation) for d in record.decisions
        ]
        return again, same

    def load(self, cluster: str, options: RoundOptions) -> Snapshot:
        """Return the state of a cluster as a round with ``options`` would see it. Raises NotFound."""
        snapshot = self._store.snapshot(cluster, options.use_half_life_s)
        return replace(snapshot, clock_factor=self._clock_factor)

    def decide(
        self,
        snapshot: Snapshot,
        options: RoundOptions,
        *,
        remaining_s: Callable[[], float],
        cancelled: Callable[[], bool],
    ) -> RoundOutcome:
        """Return the outcome of a round on ``snapshot``, of which nothing is stored.

        With recorded work in ``options``, the round is decided as recorded.

        Raises:
            DeadlineTooShort: the call was cancelled, or no time is left.
        """
        started_s = self._clock.monotonic_s()

        def limit_s() -> float:
            spent_s = self._clock.monotonic_s() - started_s
            return float("inf") if options.work else options.solve_limit_s - spent_s

        budget = Budget(
            remaining_s=limit_s,
            seed=options.seed,
            gap=options.gap,
            work=dict(options.work),
            recorded=options.recorded,
            cancelled=_over(remaining_s, cancelled),
            left_s=remaining_s,
        )
        return self._plan(snapshot, options, budget, _Phases(self._clock), remaining_s)

    def _plan(
        self,
        snapshot: Snapshot,
        options: RoundOptions,
        budget: Budget,
        phases: _Phases,
        remaining_s: Callable[[], float],
    ) -> RoundOutcome:
        """Decide the round here, or in another process if it is large or uninterruptible."""
        workers = self._workers if len(snapshot.jobs) >= self._from_jobs else None
        if not (
            solvers.is_interruptible(options.solver)
            and policies.is_interruptible(options.scheduler)
        ):
            workers = self._workers or self._isolated
        if workers is None:
            return _plan_here(snapshot, options, budget, phases, remaining_s)
        outcome = workers.plan(snapshot, options, budget, phases.book, remaining_s)
        phases.mark("transfer")
        return outcome

    def _remember(self, cluster: str, measured: _PhaseTimes, phases: _Phases) -> None:
        """Keep the times of the phases, for the clusters with the latest rounds."""
        measured.remember(phases.seconds)
        self._measured.pop(cluster, None)
        self._measured[cluster] = measured
        for oldest in list(self._measured)[:-MAX_REMEMBERED_CLUSTERS]:
            self._measured.pop(oldest, None)

    @staticmethod
    def _require(remaining_s: float, measured: _PhaseTimes, *phases: str) -> None:
        needed_s = measured.expect_s(*phases)
        if remaining_s <= needed_s:
            measured.forget_one()
            raise DeadlineTooShort(
                f"{max(remaining_s, 0.0):.3f} s of the deadline are left, but {', '.join(phases)} take"
                f" {needed_s:.3f} s; no round was committed: call again with a longer deadline"
            )


PlanFunction: TypeAlias = Callable[
    [Snapshot, RoundOptions, Budget, _Phases, Callable[[], float]], RoundOutcome
]


def _plan_here(
    snapshot: Snapshot,
    options: RoundOptions,
    budget: Budget,
    phases: _Phases,
    _remaining_s: Callable[[], float],
) -> RoundOutcome:
    solver, scheduler = (
        make_solver(options.solver),
        scheduler_of(options.scheduler, options.scheduler_parameters),
    )
    return plan_round(snapshot, options, solver, budget, phases.mark, scheduler)


def _over(remaining_s: Callable[[], float], cancelled: Callable[[], bool]) -> Callable[[], bool]:
    """Return a function that returns whether the caller has left or its deadline is over."""
    return lambda: cancelled() or remaining_s() <= 0


def require_known_options(options: RoundOptions, *, commits: bool) -> None:
    """Refuse unknown solvers, schedulers and parameters before anything is loaded.

    Baselines, which exist for comparison, decide no round that is committed.
    """
    try:
        if commits:
            solvers.require_product(options.solver)
        make_solver(options.solver)
        scheduler_of(options.scheduler, options.scheduler_parameters)
    except InvalidInput as wrong:
        raise InvalidInput(f"options.{wrong.field}", wrong.problem) from wrong


def decide_again(
    snapshot: Snapshot,
    options: RoundOptions,
    clock: Clock,
    *,
    remaining_s: Callable[[], float],
    cancelled: Callable[[], bool],
    plan: PlanFunction = _plan_here,
    solve_s: Callable[[], float] | None = None,
    left_s: Callable[[], float] = unlimited_time,
) -> RoundRecord:
    """Decide a round on a stored or shared snapshot.

    Nothing is committed, and no store is needed. If ``options.work`` is given, it replaces the
    clock. Otherwise the solver has ``solve_s``, or ``remaining_s`` if that is None. ``left_s`` is
    the time until ``cancelled`` becomes true without an action of the caller.

    Raises:
        DeadlineTooShort: ``cancelled`` has become true.
    """
    started_s, in_time_s = clock.monotonic_s(), solve_s or remaining_s

    def limit_s() -> float:
        if options.work:
            return float("inf")
        return min(in_time_s(), options.solve_limit_s - (clock.monotonic_s() - started_s))

    phases = _Phases(clock)
    budget = Budget(
        remaining_s=limit_s,
        seed=options.seed,
        gap=options.gap,
        work=dict(options.work),
        recorded=options.recorded,
        cancelled=cancelled,
        left_s=left_s,
    )
    outcome = plan(snapshot, options, budget, phases, remaining_s)
    budget.check()
    summary = summarise_round(snapshot, outcome, options, phases.seconds, digest(snapshot))
    return _uncommitted(snapshot, outcome, replace(summary, outcome="replay"))


def summarise_round(
    snapshot: Snapshot,
    outcome: RoundOutcome,
    options: RoundOptions,
    seconds: dict[str, float],
    snapshot_digest: str,
) -> RoundSummary:
    """Return the round's summary before the commit."""
    problem, solution, scale = outcome.problem, outcome.solution, outcome.problem.scale
    kinds = [d.kind for d in outcome.decisions]
    used = problem.used(solution.choice).tolist()
    chosen = asdict(options)
    del chosen["work"], chosen["recorded"]
    return RoundSummary(
        cluster=snapshot.cluster,
        number=0,
        epoch=snapshot.epoch,
        created_s=snapshot.now_s,
        options=chosen,
        status=solution.status,
        outcome="refused" if outcome.violations else "",
        objective=solution.objective / scale,
        bound=solution.bound / scale,
        gap=solution.gap,
        placed_score=outcome.placed_score,
        greedy_objective=outcome.greedy_objective / scale,
        verified=not outcome.violations,
        violations=tuple(f"{v.rule}: {v.detail}" for v in outcome.violations),
        snapshot_digest=snapshot_digest,
        solver=solution.solver,
        work=solution.work,
        goals=outcome.goals,
        prices=outcome.prices,
        used_gpus={row.name: n for row, n in zip(problem.rows, used, strict=True)},
        seconds=dict(seconds),
        running=sum(d.gang is not None for d in outcome.decisions),
        waiting=sum(d.gang is None for d in outcome.decisions),
        started=kinds.count(DecisionKind.START),
        suspended=kinds.count(DecisionKind.SUSPEND),
        changed=sum(k in CHANGES_GPUS and k is not DecisionKind.START for k in kinds),
        replanned=kinds.count(DecisionKind.REPLAN),
        samples_per_s=sum(d.rate for d in outcome.decisions),
        unit=problem.unit,
        versions=_VERSIONS,
        bound_is_trivial=outcome.bound_is_trivial,
        proved_by=outcome.goals[-1].proved_by,
        has_certificate=outcome.proof.has_certificate,
        foresight=outcome.foresight,
        promises_due_s=min(
            due_s(snapshot, outcome, options.round_s), next_leg_s(snapshot, outcome)
        ),
    )


def _uncommitted(snapshot: Snapshot, outcome: RoundOutcome, summary: RoundSummary) -> RoundRecord:
    return RoundRecord(
        summary=summary, decisions=tuple(decision_record(snapshot, d) for d in outcome.decisions)
    )


def _report(record: RoundRecord) -> None:
    s = record.summary
    gap = None if s.bound_is_trivial else s.gap
    facts = {"cluster": s.cluster, "round": s.number, "gap": gap, "seconds": s.seconds}
    if s.outcome == "refused":
        log.error(
            "the checker refused the round: %s",
            "; ".join(s.violations),
            extra={"action": "round_refused", **facts},
        )
    else:
        log.info("round committed", extra={"action": "round_committed", **facts})
