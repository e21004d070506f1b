"""The summary of a decided round, and the record of one of which nothing is stored."""

from __future__ import annotations

from dataclasses import asdict
from importlib.metadata import version
from typing import Final

from tessera.formulation.answer.decisions import CHANGES_GPUS, DecisionKind
from tessera.formulation.base.release import installed_version
from tessera.formulation.records.rounds import RoundRecord, RoundSummary, decision_record
from tessera.formulation.state.snapshot import Snapshot
from tessera.solvers.rounds.due import due_s, next_segment_s
from tessera.solvers.rounds.options import RoundOptions
from tessera.solvers.rounds.plan import RoundOutcome

_LIBRARIES: Final = ("ortools", "scipy", "numpy", "numba")
_VERSIONS: Final = (
    f"tessera {installed_version()}",
    *(f"{name} {version(name)}" for name in _LIBRARIES),
)


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
        has_certificate=any(goal.certified for goal in outcome.goals),
        failures=solution.failures,
        promises_due_s=min(
            due_s(snapshot, outcome, options.round_s),
            next_segment_s(snapshot, outcome),
        ),
    )


def make_uncommitted_record(
    snapshot: Snapshot, outcome: RoundOutcome, summary: RoundSummary
) -> RoundRecord:
    """Return the record of a round of which nothing is stored."""
    return RoundRecord(
        summary=summary, decisions=tuple(decision_record(snapshot, d) for d in outcome.decisions)
    )
