"""Rounds on a given snapshot, of which nothing is stored: how they are decided, and for how long."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import TypeAlias

from tessera.formulation.answer.codec import digest
from tessera.formulation.base.clock import Clock
from tessera.formulation.base.errors import InvalidInput
from tessera.formulation.records.rounds import RoundRecord
from tessera.formulation.state.snapshot import Snapshot
from tessera.service.server.rounds.phase_times import Phases
from tessera.service.server.rounds.round_summary import make_uncommitted_record, summarise_round
from tessera.solvers import registry as solvers
from tessera.solvers.base import Budget, unlimited_time
from tessera.solvers.registry import make_solver
from tessera.solvers.rounds.options import RoundOptions, make_budget
from tessera.solvers.rounds.plan import RoundOutcome, plan_round
from tessera.solvers.schedulers.registry import scheduler_of

PlanFunction: TypeAlias = Callable[
    [Snapshot, RoundOptions, Budget, Phases, Callable[[], float]], RoundOutcome
]


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


def is_over(remaining_s: Callable[[], float], cancelled: Callable[[], bool]) -> Callable[[], bool]:
    """Return a function that returns whether the caller has left or its deadline is over."""
    return lambda: cancelled() or remaining_s() <= 0


def limit_solver(
    options: RoundOptions, clock: Clock, limit_s: Callable[[], float] = unlimited_time
) -> Callable[[], float]:
    """Return a function that returns the seconds that the solver has left.

    They end with ``limit_s``, and with the limit of ``options``, which counts from now on. Recorded
    work replaces the clock.
    """
    started_s = clock.monotonic_s()

    def left_s() -> float:
        if options.work:
            return float("inf")
        return min(limit_s(), options.solve_limit_s - (clock.monotonic_s() - started_s))

    return left_s


def plan_here(
    snapshot: Snapshot,
    options: RoundOptions,
    budget: Budget,
    phases: Phases,
    _remaining_s: Callable[[], float],
) -> RoundOutcome:
    """Return the outcome of a round that this process decides."""
    solver = make_solver(options.solver)
    scheduler = scheduler_of(options.scheduler, options.scheduler_parameters)
    return plan_round(snapshot, options, solver, budget, phases.mark, scheduler)


def decide_again(
    snapshot: Snapshot,
    options: RoundOptions,
    clock: Clock,
    *,
    remaining_s: Callable[[], float],
    cancelled: Callable[[], bool],
    plan: PlanFunction = plan_here,
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
    limit_s = limit_solver(options, clock, solve_s or remaining_s)
    budget = make_budget(options, limit_s, cancelled=cancelled, left_s=left_s)
    phases = Phases(clock)
    outcome = plan(snapshot, options, budget, phases, remaining_s)
    budget.check()
    summary = summarise_round(snapshot, outcome, options, phases.seconds, digest(snapshot))
    return make_uncommitted_record(snapshot, outcome, replace(summary, outcome="replay"))
