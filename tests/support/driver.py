"""A driver from one round to the next: decisions take effect, time passes, jobs end and arrive."""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np

from tessera.formulation.answer.decisions import CHANGES_GPUS, Decision, DecisionKind
from tessera.formulation.base.values import Hold
from tessera.formulation.job.lifecycle import JobState
from tessera.formulation.job.reasons import Reason
from tessera.formulation.round.policy import Policy
from tessera.formulation.round.starts.planner import with_plan
from tessera.formulation.state.last_round import NO_EXPECTED_RELEASES, keep_starts
from tessera.formulation.state.permissions import (
    AllowedGpuTypes,
    AvoidedNodes,
    Selectors,
    UnmatchedNodes,
)
from tessera.formulation.state.snapshot import STATE_CODE, Allocations, Jobs, Snapshot
from tessera.formulation.state.tenants import Quotas, Tenants
from tessera.solvers.base import Budget
from tessera.solvers.registry import make_solver
from tessera.solvers.rounds.plan import RoundOutcome, plan_round

FOREVER = Budget(remaining_s=lambda: math.inf, work={"cp-sat": 0.1, "lp": 9.0})


def decide_round(snapshot: Snapshot, policy: Policy, name: str = "greedy") -> RoundOutcome:
    """Decide a round and return its outcome, which must not break a rule."""
    outcome = plan_round(snapshot, policy, make_solver(name), FOREVER)
    assert outcome.violations == ()
    return outcome


def reason_of(decision: Decision) -> Reason:
    """Return the reason of a decision, which must have one."""
    assert decision.reason is not None
    return decision.reason


def decision_kinds(snapshot: Snapshot, found: RoundOutcome) -> dict[str, DecisionKind]:
    """Return the kind of decision by job name."""
    return {snapshot.jobs.name[d.job]: d.kind for d in found.decisions}


def the_next_round(
    snapshot: Snapshot, found: RoundOutcome, after_s: float, arrivals: Sequence[dict[str, Any]] = ()
) -> Snapshot:
    """Return the next round's snapshot: ended jobs are gone, and suspended jobs wait again."""
    snapshot = with_plan(snapshot, found.plan)
    now_s = snapshot.now_s + after_s
    rows, allocations = list[dict[str, Any]](), list[dict[str, Any]]()
    position = np.full(len(snapshot.jobs), -1)
    for decision in found.decisions:
        row = snapshot.jobs.row(decision.job)
        if decision.kind is DecisionKind.REJECT:
            continue
        if decision.gang is None:
            if decision.kind is DecisionKind.SUSPEND:
                row |= {"queued_s": snapshot.now_s, "since_s": 0.0, "opportunistic": False}
            row |= {"state": STATE_CODE[JobState.QUEUED], "current_type": -1, "current_gpus": 0}
            position[decision.job] = len(rows)
            rows.append(row | {"current_degree": 0, "current_plan": 0})
            continue
        changed = decision.kind in CHANGES_GPUS
        trains_s = max(0.0, after_s - (row["restart_s"] if changed else 0.0))
        batch = int(snapshot.global_batch[decision.job])
        left = row["iterations_left"] - trains_s * decision.rate / batch
        if left <= 0:
            continue
        row |= {
            "state": STATE_CODE[JobState.RUNNING],
            "iterations_left": left,
            **dict(zip(Jobs.CELL, decision.cell, strict=True)),
            "opportunistic": decision.opportunistic,
            "generation": row["generation"] + changed,
            "since_s": snapshot.now_s if changed else row["since_s"],
            "service_gpu_s": row["service_gpu_s"] + decision.cell.gpus * after_s,
        }
        allocations += [
            {"job": len(rows), "node": node, "gpu": gpu, "hold": int(Hold.HELD), "generation": 1}
            for node, gpus in decision.gang.members
            for gpu in gpus
        ]
        rows.append(row)
    rows += [{**job, "queued_s": now_s, "submit_s": now_s} for job in arrivals]
    starts = snapshot.planned_starts
    starts, nodes = keep_starts(starts, snapshot.planned_nodes, position[starts.job] >= 0)
    return replace(
        snapshot,
        round_number=snapshot.round_number + 1,
        now_s=now_s,
        jobs=Jobs.from_rows(rows),
        allocations=Allocations.from_rows(allocations),
        planned_starts=replace(starts, job=position[starts.job]),
        planned_nodes=nodes,
        expected_releases=NO_EXPECTED_RELEASES,
    )


def with_quotas(
    snapshot: Snapshot,
    quotas: Mapping[str, Mapping[int, int]],
    *,
    borrow: Mapping[str, int] | None = None,
    keeps: Sequence[str] = (),
) -> Snapshot:
    """Return the snapshot with tenants that have quotas.

    A quota maps a GPU type, or -1 for any type, to GPUs. Tenants in ``keeps`` do not lend.
    """
    names = sorted(quotas)
    rows = [
        {"tenant": names.index(name), "gpu_type": kind, "gpus": gpus}
        for name in names
        for kind, gpus in quotas[name].items()
    ]
    tenants = [
        {
            "name": name,
            "weight": 1.0,
            "borrow_gpus": (borrow or {}).get(name, -1),
            "keeps_idle_quota": name in keeps,
        }
        for name in names
    ]
    return replace(snapshot, tenants=Tenants.from_rows(tenants), quotas=Quotas.from_rows(rows))


def with_allowed_types(snapshot: Snapshot, *pairs: tuple[int, int]) -> Snapshot:
    """Let jobs run only on the GPU types with which they are paired: (job, GPU type)."""
    rows = [{"job": job, "gpu_type": kind} for job, kind in pairs]
    return replace(snapshot, allowed_gpu_types=AllowedGpuTypes.from_rows(rows))


def with_selectors(
    snapshot: Snapshot, required: Mapping[int, Collection[int]], column: str = "required_selector"
) -> Snapshot:
    """Let jobs require nodes: job -> nodes that its selector matches. Each job has its own selector.

    With another ``column``, they prefer these nodes.
    """
    first = len(snapshot.selectors)
    texts, unmatched = list(snapshot.selectors.text), snapshot.unmatched_nodes
    rows = [unmatched.row(k) for k in range(len(unmatched))]
    chosen = np.array(getattr(snapshot.jobs, column))
    for selector, (job, nodes) in enumerate(required.items(), first):
        texts.append(f"s={selector}")
        chosen[job] = selector
        others = sorted(set(range(len(snapshot.nodes))) - set(nodes))
        rows += [{"selector": selector, "node": node} for node in others]
    columns: dict[str, Any] = {column: chosen}
    return replace(
        snapshot,
        jobs=replace(snapshot.jobs, **columns),
        selectors=Selectors(text=tuple(texts)),
        unmatched_nodes=UnmatchedNodes.from_rows(rows),
    )


def with_avoided_nodes(snapshot: Snapshot, *pairs: tuple[int, int]) -> Snapshot:
    """Return the snapshot in which jobs avoid nodes, given as pairs (job, node)."""
    rows = [{"job": job, "node": node} for job, node in pairs]
    return replace(snapshot, avoided_nodes=AvoidedNodes.from_rows(rows))
