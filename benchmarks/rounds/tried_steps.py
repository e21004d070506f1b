"""An independent trial of a step: its changes, applied to the rows of a snapshot, and another round.

It shares no code with ``tessera.formulation.answer.explanations.applying``: rows are plain dictionaries,
jobs that have ended are really gone, and decisions are found by name.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from tessera.formulation.answer.decisions import Decision
from tessera.formulation.answer.explanations.changes import Change
from tessera.formulation.answer.explanations.records import Step
from tessera.formulation.base.resources import HOST_RESOURCES, NO_NEEDS, name_amounts
from tessera.formulation.base.tables import Table
from tessera.formulation.state.permissions import AllowedGpuTypes, AvoidedNodes, UnmatchedNodes
from tessera.formulation.state.snapshot import STATES, Allocations, Estimates, Jobs, Nodes, Snapshot
from tessera.formulation.state.tenants import Quotas, Tenants
from tessera.solvers.base import Budget
from tessera.solvers.registry import make_solver
from tessera.solvers.rounds.options import RoundOptions
from tessera.solvers.rounds.plan import RoundOutcome, plan_round
from tessera.solvers.schedulers.registry import scheduler_of

Rows = list[dict[str, Any]]


def decide_without_limit(snapshot: Snapshot, options: RoundOptions) -> RoundOutcome:
    """Decide a round without a time limit."""
    scheduler = scheduler_of(options.scheduler, options.scheduler_parameters)
    budget = Budget(remaining_s=lambda: math.inf, seed=options.seed, gap=options.gap)
    return plan_round(snapshot, options, make_solver(options.solver), budget, scheduler=scheduler)


def find_decisions(snapshot: Snapshot, outcome: RoundOutcome) -> dict[str, Decision]:
    """Return the decisions of a round by the name of the job."""
    return {snapshot.jobs.name[d.job]: d for d in outcome.decisions}


def find_fault(
    snapshot: Snapshot,
    options: RoundOptions,
    job: str,
    before: Decision,
    rate_before: float,
    step: Step,
) -> str:
    """Return what a round after the step's changes shows to be untrue of it, or "" if it is true."""
    changed, policy = _apply(snapshot, options, job, step.changes)
    outcome = decide_without_limit(changed, policy)
    if outcome.violations:
        return f"the round breaks a rule: {outcome.violations[0].detail}"
    decisions = find_decisions(changed, outcome)
    after = decisions[job]
    code = after.reason.code.value if after.reason and after.gang is None else ""
    true = {
        "RUNS": after.gang is not None,
        "KEEPS_RATE": after.gang is not None and after.rate >= rate_before * (1 - 1e-9),
        "STAYS": after.kind == "keep",
        "OTHER_REASON": code == step.then
        and before.reason is not None
        and code != before.reason.code,
    }
    if not true[step.claim.value]:
        return f"claims {step.claim} {step.then or ''}, but the round decides {after.kind} {code}"
    for effect in step.effects:
        theirs = decisions[effect.job.text]
        if theirs.kind != effect.kind:
            return f"says {effect}, but the round decides {theirs.kind}"
    return ""


def _rows(table: Table) -> Rows:
    return [table.row(k) for k in range(len(table))]


def _apply(
    snapshot: Snapshot, options: RoundOptions, name: str, changes: Sequence[Change]
) -> tuple[Snapshot, RoundOptions]:
    """Return the changed snapshot, built from rows, and the changed options."""
    for change in changes:
        snapshot, options = _apply_one(snapshot, options, name, change)
    return snapshot, options


def _apply_one(
    snapshot: Snapshot, options: RoundOptions, name: str, change: Change
) -> tuple[Snapshot, RoundOptions]:
    kind, amount, subject = change.kind.value, change.amount, change.subject
    types = [t.name for t in snapshot.gpu_types]
    if kind == "POLICY":
        if subject == "scheduler":
            return snapshot, replace(options, scheduler="", scheduler_parameters="")
        before = getattr(options, subject)
        return snapshot, replace(options, **{subject: type(before)(amount)})
    if kind == "WAIT":
        return replace(snapshot, now_s=amount), options
    if kind == "END":
        return _without_job(snapshot, subject), options
    nodes, tenants = _rows(snapshot.nodes), _rows(snapshot.tenants)
    if kind == "UNDRAIN":
        _named(nodes, subject)["schedulable"] = True
        return replace(snapshot, nodes=Nodes.from_rows(nodes)), options
    if kind in (names := {resource.change: resource.name for resource in HOST_RESOURCES}):
        _named(nodes, subject)[names[kind]] = int(amount)
        return replace(snapshot, nodes=Nodes.from_rows(nodes)), options
    if kind == "ADD_GPUS":
        like, left = nodes[0] | {"gpu_type": types.index(subject), "schedulable": True}, int(amount)
        while left:
            gpus = min(left, int(change.size))
            nodes.append(like | {"name": f"more-{len(nodes)}", "gpus": gpus})
            left -= gpus
        # The new nodes have the labels of the first node of their type.
        first = next((i for i, n in enumerate(nodes) if n["gpu_type"] == types.index(subject)), -1)
        unmatched = _rows(snapshot.unmatched_nodes)
        unmatched += [
            {"selector": row["selector"], "node": node}
            for row in unmatched
            if row["node"] == first
            for node in range(len(snapshot.nodes), len(nodes))
        ]
        changed = replace(snapshot, nodes=Nodes.from_rows(nodes))
        return replace(changed, unmatched_nodes=UnmatchedNodes.from_rows(unmatched)), options
    if kind in ("BORROW", "LEND", "TENANT_WEIGHT"):
        column = {"BORROW": "borrow_gpus", "LEND": "keeps_idle_quota", "TENANT_WEIGHT": "weight"}[
            kind
        ]
        _named(tenants, subject)[column] = amount
        return replace(snapshot, tenants=Tenants.from_rows(tenants)), options
    if kind == "QUOTA":
        tenant, _, gpu_type = subject.partition("/")
        owner = [t["name"] for t in tenants].index(tenant)
        quotas = _rows(snapshot.quotas)
        for quota in quotas:
            on = types.index(gpu_type) if gpu_type else -1
            if (quota["tenant"], quota["gpu_type"]) == (owner, on):
                quota["gpus"] = int(amount)
        return replace(snapshot, quotas=Quotas.from_rows(quotas)), options
    jobs = _rows(snapshot.jobs)
    job = _named(jobs, name)
    if kind == "ANY_NODE":
        index = jobs.index(job)
        kept = [row for row in _rows(snapshot.avoided_nodes) if row["job"] != index]
        return replace(snapshot, avoided_nodes=AvoidedNodes.from_rows(kept)), options
    if kind == "ALLOW_TYPE":
        allowed = [r for r in _rows(snapshot.allowed_gpu_types) if r["job"] != jobs.index(job)]
        for name_of_type in subject.split(","):
            allowed.append({"job": jobs.index(job), "gpu_type": types.index(name_of_type)})
        return replace(snapshot, allowed_gpu_types=AllowedGpuTypes.from_rows(allowed)), options
    if kind == "ADD_CELL":
        return _with_cell(snapshot, job["workload"], types.index(subject), change), options
    job.update(_JOB_CHANGES[kind](amount, subject, types))
    return replace(snapshot, jobs=Jobs.from_rows(jobs)), options


_JOB_CHANGES: dict[str, Any] = {
    "WEIGHT": lambda amount, *_: {"weight": amount},
    "PRIORITY": lambda amount, *_: {"priority": int(amount)},
    "DEADLINE": lambda amount, *_: {"deadline_s": amount},
    "ANY_TYPE": lambda *_: {"pinned_gpu_type": False},
    "ANY_LABELS": lambda *_: {"required_selector": -1},
    "MIN_GPUS": lambda amount, *_: {"min_gpus": int(amount)},
    "MAX_GPUS": lambda amount, *_: {"max_gpus": int(amount)},
    "STAY": lambda *_: {"pinned": True},
    "RELEASE": lambda *_: {"state": [s.value for s in STATES].index("queued")},
    "RETRY": lambda *_: {"retry_s": 0.0},
    "REQUEST": lambda amount, *_: {"requested_gpus": int(amount)},
    "REQUEST_TYPE": lambda _, subject, types: {"requested_gpu_type": types.index(subject)},
    "BEST_EFFORT": lambda *_: {"guaranteed": False},
    "ANY_PLAN": lambda *_: {"plan": -1, "plan_first": False},
}
"""Kind of a change of the job itself -> the new values of its row."""


def _named(rows: Rows, name: str) -> dict[str, Any]:
    return next(row for row in rows if row["name"] == name)


def _without_job(snapshot: Snapshot, name: str) -> Snapshot:
    jobs = _rows(snapshot.jobs)
    gone = [job["name"] for job in jobs].index(name)

    def left(table: Table) -> Rows:
        return [
            row | {"job": row["job"] - (row["job"] > gone)}
            for row in _rows(table)
            if row["job"] != gone
        ]

    return replace(
        snapshot,
        jobs=Jobs.from_rows(jobs[:gone] + jobs[gone + 1 :]),
        allocations=Allocations.from_rows(left(snapshot.allocations)),
        avoided_nodes=AvoidedNodes.from_rows(left(snapshot.avoided_nodes)),
        allowed_gpu_types=AllowedGpuTypes.from_rows(left(snapshot.allowed_gpu_types)),
    )


def _with_cell(snapshot: Snapshot, workload: int, gpu_type: int, change: Change) -> Snapshot:
    nodes = _rows(snapshot.nodes)
    size = max(n["gpus"] for n in nodes if n["gpu_type"] == gpu_type)
    rows = _rows(snapshot.estimates)
    rows.append(
        {
            "workload": workload,
            "gpu_type": gpu_type,
            "gpus": int(change.amount),
            "nodes": math.ceil(change.amount / size),
            "pipeline_degree": 1,
            "plan": 0,
            "iter_time_s": snapshot.workloads[workload].global_batch / change.size,
            "source": rows[0]["source"],
            "sd": math.nan,
            "complete": False,
            **name_amounts(NO_NEEDS),
        }
    )
    keys = ("workload", "gpu_type", "gpus", "pipeline_degree", "plan", "nodes")
    rows.sort(key=lambda row: tuple(row[key] for key in keys))
    return replace(snapshot, estimates=Estimates.from_rows(rows))
