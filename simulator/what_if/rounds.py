"""The comparison of the next rounds without and with a change."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass
from typing import Final

import numpy as np

from tessera.formulation.answer.decisions import Decision, DecisionKind
from tessera.formulation.answer.unknown_rates import assume_rates
from tessera.formulation.base.tables import Floats
from tessera.formulation.records.what_if import (
    ClusterOutlook,
    JobDifference,
    JobEffect,
    JobOutlook,
    RoundDifference,
)
from tessera.formulation.round.rates import effective_weight, unit_rate
from tessera.formulation.state.cell_cache import cached_cells
from tessera.formulation.state.snapshot import Snapshot
from tessera.solvers.rounds.options import RoundOptions
from tessera.solvers.rounds.plan import RoundOutcome

RATE_TOLERANCE: Final = 1e-9
"""Relative difference of rates that is rounding."""

_GRAVITY: Final = {effect: place for place, effect in enumerate(JobEffect)}


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class DecidedRound:
    """A round that was decided on ``snapshot`` with ``options``, and broke no rule."""

    snapshot: Snapshot
    options: RoundOptions
    outcome: RoundOutcome


def unit_rates(snapshot: Snapshot) -> Floats:
    """Return the rate of one effective GPU of each job, samples/s, float64[jobs].

    It is that of the jobs' workloads at the pace of their estimates, NaN without any.
    """
    real = assume_rates(snapshot)
    return unit_rate(real, cached_cells(real)[0])


def describe_cluster(decided: DecidedRound, gone: Collection[str] = ()) -> ClusterOutlook:
    """Return the state of the cluster after a round. Jobs that are ``gone`` do not wait."""
    snapshot, outcome = decided.snapshot, decided.outcome
    nodes, types = snapshot.nodes, [kind.name for kind in snapshot.gpu_types]
    held = np.zeros(len(types), dtype=np.int64)
    for decision in outcome.decisions:
        if decision.gang is not None:
            held[decision.cell.gpu_type] += decision.gang.gpus
    there = np.bincount(
        nodes.gpu_type, weights=nodes.gpus * nodes.schedulable, minlength=len(types)
    )
    rate = np.array([decision.rate for decision in outcome.decisions])
    running = sum(decision.gang is not None for decision in outcome.decisions)
    there_to_run = sum(name not in gone for name in snapshot.jobs.name)
    effective = rate / unit_rates(snapshot) if len(rate) else rate
    return ClusterOutlook(
        running=running,
        waiting=there_to_run - running,
        gpus=dict(zip(types, there.astype(np.int64).tolist(), strict=True)),
        used_gpus=dict(zip(types, held.tolist(), strict=True)),
        effective_gpus=float(np.nansum(effective)),
        samples_per_s=float(rate.sum()),
        objective=outcome.placed_score,
        unit=outcome.problem.unit,
    )


def compare_rounds(
    before: DecidedRound, after: DecidedRound, removed: Sequence[str] = ()
) -> RoundDifference:
    """Return the difference between two rounds. ``removed`` are jobs that the change removes.

    Jobs of ``before`` have the same indices in ``after``, in which others may follow.
    """
    gone, differences = set(removed), list[JobDifference]()
    old = before.outcome.decisions
    for decision in after.outcome.decisions:
        job = decision.job
        name, tenant = after.snapshot.jobs.name[job], after.snapshot.jobs.tenant[job]
        was = _outlook(before.snapshot, old[job]) if job < len(old) else None
        then = None if name in gone else _outlook(after.snapshot, decision)
        effect = _effect(was, then)
        if effect is not JobEffect.NONE:
            differences.append(
                JobDifference(job=name, tenant=tenant, effect=effect, before=was, after=then)
            )
    differences.sort(key=lambda d: _GRAVITY[d.effect])
    return RoundDifference(
        before=describe_cluster(before),
        after=describe_cluster(after, gone),
        jobs=tuple(differences),
        unchanged=len(after.outcome.decisions) - len(differences),
        same_objective=_value_alike(before, after, gone),
    )


def _value_alike(before: DecidedRound, after: DecidedRound, gone: Collection[str]) -> bool:
    """Return whether both rounds value the jobs that are in both in the same way."""
    one, other = before.options, after.options
    names = ("objective", "raw_throughput", "cost_of", "caution", "restart_horizon_s")
    if any(getattr(one, name) != getattr(other, name) for name in names):
        return False
    stays = np.array([name not in gone for name in before.snapshot.jobs.name], dtype=np.bool_)
    old = effective_weight(before.snapshot, one)
    new = effective_weight(after.snapshot, other)[: len(old)]
    return bool(np.array_equal(old[stays], new[stays]))


def _outlook(snapshot: Snapshot, decision: Decision) -> JobOutlook:
    waits = decision.gang is None
    return JobOutlook(
        kind=decision.kind,
        cell=None if waits else snapshot.cell(decision.cell),
        rate=decision.rate,
        reason=decision.reason if waits else None,
    )


def _effect(before: JobOutlook | None, after: JobOutlook | None) -> JobEffect:
    """Return the difference between two decisions on a job, of which at least one is known."""
    if before is None or after is None:
        return JobEffect.ADDED if before is None else JobEffect.REMOVED
    if before.cell is None or after.cell is None:
        if before.cell is None and after.cell is None:
            same = (before.code, before.kind) == (after.code, after.kind)
            return JobEffect.NONE if same else JobEffect.REASON
        return JobEffect.STARTS if before.cell is None else JobEffect.STOPS
    return _effect_on_running(before, after, before.cell != after.cell)


def _effect_on_running(before: JobOutlook, after: JobOutlook, other_cell: bool) -> JobEffect:
    old, new = before.cell, after.cell
    assert old is not None and new is not None  # noqa: S101, PT018 - the caller has checked it
    if old.gpu_type != new.gpu_type:
        return JobEffect.RETYPES
    if old.gpus != new.gpus:
        return JobEffect.RESIZES
    if other_cell:
        return JobEffect.REPLANS
    if DecisionKind.MOVE in (before.kind, after.kind) and before.kind != after.kind:
        return JobEffect.MOVES
    slower = abs(before.rate - after.rate) > RATE_TOLERANCE * max(before.rate, after.rate)
    return JobEffect.RATE if slower else JobEffect.NONE
