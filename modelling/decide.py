"""The decision of a stated problem by ``plan_round``, with checked options."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, fields, replace
from typing import Any

from tessera.formulation.base.clock import Clock, SystemClock
from tessera.formulation.base.errors import DeadlineTooShort, InvalidInput
from tessera.formulation.base.plugins import add_plugin, is_reference
from tessera.formulation.round.draft import Draft
from tessera.formulation.round.objectives.values import ColumnValues
from tessera.formulation.state.snapshot import Snapshot
from tessera.modelling.result import RoundResult
from tessera.solvers.base import Budget, SolverFailed
from tessera.solvers.plugins import load_named, require_kept_rules, require_objective
from tessera.solvers.registry import make_solver
from tessera.solvers.rounds.options import RoundOptions
from tessera.solvers.rounds.plan import RoundOutcome, plan_round
from tessera.solvers.schedulers.base import PublishedScheduler, Scheduler
from tessera.solvers.schedulers.registry import scheduler_of


@dataclass(frozen=True, slots=True, kw_only=True)
class _TimedRounds:
    """Rounds that end by a time of the clock. ``scheduler`` decides them if it is not None."""

    scheduler: Scheduler | None
    clock: Clock
    end_s: float

    def plan(self, snapshot: Snapshot, options: RoundOptions) -> RoundOutcome:
        """Decide a round. Raises DeadlineTooShort if no time is left for it."""
        if self.left_s() <= 0:
            raise DeadlineTooShort("no time is left for another round")
        budget = Budget(
            remaining_s=self.left_s,
            seed=options.seed,
            gap=options.gap,
            work=dict(options.work),
        )
        return plan_round(
            snapshot, options, make_solver(options.solver), budget, scheduler=self.scheduler
        )

    def left_s(self) -> float:
        """Return the seconds that are left."""
        return self.end_s - self.clock.monotonic_s()


def decide(
    snapshot: Snapshot,
    objective: str | Callable[[Draft], ColumnValues],
    scheduler: str | PublishedScheduler,
    time_limit_s: float,
    options: Mapping[str, Any],
) -> RoundResult:
    """Return the result of a round on ``snapshot``. ``options`` are fields of ``RoundOptions``.

    Raises:
        InvalidInput: an option is unknown or out of range, or the scheduler breaks a rule.
    """
    if not time_limit_s > 0:
        raise InvalidInput("time_limit_s", f"must be above 0, not {time_limit_s!r}")
    named = scheduler if isinstance(scheduler, str) else ""
    wanted = objective if isinstance(objective, str) else _reference_of(objective)
    load_named(named, wanted)
    chosen = _options({**options, "objective": wanted, "scheduler": named})
    deciding = scheduler_of(chosen.scheduler, chosen.scheduler_parameters)
    if not isinstance(scheduler, str):
        deciding = Scheduler(published=scheduler)
        chosen = replace(chosen, scheduler=scheduler.name)
    clock = SystemClock()
    first = _TimedRounds(scheduler=deciding, clock=clock, end_s=clock.monotonic_s() + time_limit_s)
    outcome = first.plan(snapshot, chosen)
    violations = [f"{v.rule}: {v.detail}" for v in outcome.violations]
    if deciding is not None:
        require_kept_rules(chosen.scheduler, violations)
    elif violations:
        raise SolverFailed(chosen.solver, "; ".join(violations[:3]))

    def plan_within(limit_s: float) -> Callable[[Snapshot, RoundOptions], RoundOutcome]:
        return replace(first, end_s=clock.monotonic_s() + limit_s).plan

    return RoundResult(snapshot=snapshot, options=chosen, outcome=outcome, plan_within=plan_within)


def _options(options: Mapping[str, Any]) -> RoundOptions:
    known = {f.name for f in fields(RoundOptions)}
    if unknown := sorted(options.keys() - known):
        raise InvalidInput(
            "options",
            f"{', '.join(unknown)} is not known; a round has {', '.join(sorted(known))}",
        )
    solve_limit_s = options.get("solve_limit_s", math.inf)
    if not math.isinf(solve_limit_s):
        raise InvalidInput("solve_limit_s", "is for servers; state time_limit_s")
    return RoundOptions(**options)


def _reference_of(values: Callable[[Draft], ColumnValues]) -> str:
    """Return the reference under which a function decides rounds of this process."""
    module, name = getattr(values, "__module__", ""), getattr(values, "__name__", "")
    reference = f"{module}:{name}"
    if not is_reference(reference):
        raise InvalidInput("objective", f"{values!r} must be a function with a name, or a text")
    require_objective(reference, values)
    add_plugin(reference, values)
    return reference
