"""Rounds that are decided on a stored cluster, and committed to it."""

from __future__ import annotations

import math
from typing import Any

from tessera.db.store.store import Store
from tessera.formulation.answer.decisions import Decision
from tessera.formulation.base.clock import SystemClock
from tessera.formulation.job.execution_plan import ExecutionPlan
from tessera.formulation.records.rounds import RoundRecord
from tessera.service.server.rounds.loop import RoundLoop
from tessera.solvers.base import Budget
from tessera.solvers.exact.portfolio import Portfolio
from tessera.solvers.rounds.options import RoundOptions
from tessera.solvers.rounds.plan import plan_round
from tests.support.stored_cluster import C, commit, job


def decide(store: Store, options: RoundOptions | None = None) -> dict[str, Decision]:
    """Decide a round without violations and commit it; return the decisions by job."""
    snapshot = store.snapshot(C)
    budget = Budget(remaining_s=lambda: math.inf)
    outcome = plan_round(snapshot, options or RoundOptions(), Portfolio(), budget)
    assert not outcome.violations
    commit(store, snapshot, *outcome.decisions)
    return {snapshot.jobs.name[d.job]: d for d in outcome.decisions}


def schedule(
    rounds: RoundLoop | Store, options: RoundOptions | None = None, **more: Any
) -> RoundRecord:
    """Let the service's loop decide and commit a round. ``more`` are arguments of the loop."""
    loop = rounds if isinstance(rounds, RoundLoop) else RoundLoop(rounds, SystemClock())
    usual: dict[str, Any] = {
        "remaining_s": lambda: math.inf,
        "dry_run": False,
        "request": None,
        "cancelled": lambda: False,
    }
    return loop.schedule(more.pop("cluster", C), options or RoundOptions(), **usual | more)


def plan_of(store: Store, name: str) -> ExecutionPlan:
    """Return the execution plan of a job's allocation."""
    held = job(store, name).allocation
    assert held is not None
    assert held.plan is not None
    assert held.rate > 0
    return held.plan
