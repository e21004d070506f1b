"""The application of changes to a snapshot and a policy: pure functions, one for each kind."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from dataclasses import replace
from typing import Any, Final, TypeVar

import numpy as np

from tessera.formulation.answer.explanations.changes import Change, ChangeKind
from tessera.formulation.base.errors import InvalidInput
from tessera.formulation.base.resources import HOST_RESOURCES, NO_NEEDS, name_amounts
from tessera.formulation.base.values import EstimateSource
from tessera.formulation.job.lifecycle import JobState
from tessera.formulation.round.policy import Policy
from tessera.formulation.state.last_round import keep_starts
from tessera.formulation.state.permissions import AllowedGpuTypes, UnmatchedNodes
from tessera.formulation.state.snapshot import STATE_CODE, WITHOUT_CELL, Estimates, Nodes, Snapshot

PolicyT = TypeVar("PolicyT", bound=Policy)


def apply_changes(
    snapshot: Snapshot, policy: PolicyT, job: int, changes: Iterable[Change]
) -> tuple[Snapshot, PolicyT]:
    """Return the snapshot and the policy after ``changes``, which are for ``job``.

    Jobs keep their indices: one that has ended stays as a job that leaves without GPUs.

    Raises:
        InvalidInput: the snapshot lacks the subject of a change.
    """
    for change in changes:
        if change.kind is ChangeKind.POLICY:
            policy = _with_option(policy, change)
        else:
            snapshot = _APPLY[change.kind](snapshot, job, change)
    return snapshot, policy


def _with_option(policy: PolicyT, change: Change) -> PolicyT:
    value: Any = change.amount
    if change.subject == "scheduler":  # no published scheduler decides
        none: dict[str, Any] = {change.subject: "", "scheduler_parameters": ""}
        return replace(policy, **none)
    if change.subject in ("keep_requests", "promise_starts"):
        value = bool(value)
    elif change.subject == "max_changes":
        value = int(value)
    return replace(policy, **{change.subject: value})


def _with_job(snapshot: Snapshot, job: int, **values: Any) -> Snapshot:
    columns: dict[str, Any] = {}
    for name, value in values.items():
        columns[name] = np.array(getattr(snapshot.jobs, name))
        columns[name][job] = value
    return replace(snapshot, jobs=replace(snapshot.jobs, **columns))


def _index(names: Iterable[str], change: Change) -> int:
    try:
        return list(names).index(change.subject)
    except ValueError:
        raise InvalidInput(change.kind, f"the snapshot has no {change.subject}") from None


def _type_index(snapshot: Snapshot, change: Change) -> int:
    return _index((kind.name for kind in snapshot.gpu_types), change)


def _set_amount(column: str) -> Callable[[Snapshot, int, Change], Snapshot]:
    return lambda snapshot, job, change: _with_job(snapshot, job, **{column: change.amount})


def _set_to(**values: Any) -> Callable[[Snapshot, int, Change], Snapshot]:
    return lambda snapshot, job, _change: _with_job(snapshot, job, **values)


def _use_any_labels(snapshot: Snapshot, job: int, _change: Change) -> Snapshot:
    """Drop the job's requirements on labels. Its nodes must still offer its runtime."""
    selector = int(snapshot.jobs.required_selector[job])
    return _with_job(snapshot, job, required_selector=snapshot.selectors.without_labels(selector))


def _use_any_node(snapshot: Snapshot, job: int, _change: Change) -> Snapshot:
    avoids = snapshot.avoided_nodes
    keep = avoids.job != job
    return replace(
        snapshot, avoided_nodes=replace(avoids, job=avoids.job[keep], node=avoids.node[keep])
    )


def _allow_types(snapshot: Snapshot, job: int, change: Change) -> Snapshot:
    kept = snapshot.allowed_gpu_types.job != job
    names = [kind.name for kind in snapshot.gpu_types]
    types = [_index(names, replace(change, subject=name)) for name in change.subject.split(",")]
    allowed = AllowedGpuTypes(
        job=np.append(snapshot.allowed_gpu_types.job[kept], np.full(len(types), job)),
        gpu_type=np.append(snapshot.allowed_gpu_types.gpu_type[kept], types),
    )
    return replace(snapshot, allowed_gpu_types=allowed)


def _request_type(snapshot: Snapshot, job: int, change: Change) -> Snapshot:
    return _with_job(snapshot, job, requested_gpu_type=_type_index(snapshot, change))


def _set_quota(snapshot: Snapshot, _job: int, change: Change) -> Snapshot:
    quotas, kinds = snapshot.quotas, snapshot.gpu_types
    names = [
        snapshot.tenants.name[t] + (f"/{kinds[k].name}" if k >= 0 else "")
        for t, k in zip(quotas.tenant.tolist(), quotas.gpu_type.tolist(), strict=True)
    ]
    gpus = np.array(quotas.gpus)
    gpus[_index(names, change)] = change.amount
    return replace(snapshot, quotas=replace(quotas, gpus=gpus))


def _set_tenant(column: str) -> Callable[[Snapshot, int, Change], Snapshot]:
    def apply(snapshot: Snapshot, _job: int, change: Change) -> Snapshot:
        values = np.array(getattr(snapshot.tenants, column))
        values[_index(snapshot.tenants.name, change)] = change.amount
        changed: dict[str, Any] = {column: values}
        return replace(snapshot, tenants=replace(snapshot.tenants, **changed))

    return apply


def _with_node(snapshot: Snapshot, change: Change, column: str, value: Any) -> Snapshot:
    values = np.array(getattr(snapshot.nodes, column))
    values[_index(snapshot.nodes.name, change)] = value
    changed: dict[str, Any] = {column: values}
    return replace(snapshot, nodes=replace(snapshot.nodes, **changed))


def _set_schedulable(value: bool) -> Callable[[Snapshot, int, Change], Snapshot]:
    return lambda snapshot, _job, change: _with_node(snapshot, change, "schedulable", value)


def _set_capacity(column: str) -> Callable[[Snapshot, int, Change], Snapshot]:
    return lambda snapshot, _job, change: _with_node(snapshot, change, column, change.amount)


def _add_gpus(snapshot: Snapshot, _job: int, change: Change) -> Snapshot:
    """Add nodes of ``change.size`` GPUs, of which the last may be smaller, to the snapshot.

    They have the labels of the first node of the type.
    """
    kind, nodes = _type_index(snapshot, change), snapshot.nodes
    own = np.flatnonzero(nodes.gpu_type == kind)
    same = own[nodes.gpus[own] == change.size]  # a node of that size states what such nodes have
    own = same if len(same) else own
    like = nodes.row(int(own[0])) if len(own) else nodes.row(0) | {"gpu_type": kind}
    rows, left = [nodes.row(n) for n in range(len(nodes))], int(change.amount)
    while left > 0:
        gpus = min(left, int(change.size))
        name = f"new-{change.subject}-{len(rows)}"
        rows.append(like | {"name": name, "gpus": gpus, "schedulable": True})
        left -= gpus
    unmatched, new = snapshot.unmatched_nodes, np.arange(len(nodes), len(rows))
    alike = (
        unmatched.selector[unmatched.node == int(own[0])] if len(own) else unmatched.selector[:0]
    )
    unmatched = UnmatchedNodes(
        selector=np.append(unmatched.selector, np.repeat(alike, len(new))),
        node=np.append(unmatched.node, np.tile(new, len(alike))),
    )
    return replace(snapshot, nodes=Nodes.from_rows(rows), unmatched_nodes=unmatched)


def _add_cell(snapshot: Snapshot, job: int, change: Change) -> Snapshot:
    """Add a measured Cell of the job's workload, which gives ``change.size`` samples/s."""
    kind, gpus, e = _type_index(snapshot, change), int(change.amount), snapshot.estimates
    size = max(1, int(snapshot.nodes.gpus[snapshot.nodes.gpu_type == kind].max(initial=0)))
    workload = int(snapshot.jobs.workload[job])
    plans = snapshot.plans if "" in snapshot.plans else (*snapshot.plans, "")
    added = {
        "workload": workload,
        "gpu_type": kind,
        "gpus": gpus,
        "nodes": -(-gpus // size),
        "pipeline_degree": 1,
        "plan": plans.index(""),
        "iter_time_s": snapshot.workloads[workload].global_batch / change.size,
        "source": int(EstimateSource.MEASURED),
        "sd": math.nan,
        "complete": False,
        **name_amounts(NO_NEEDS),
    }
    rows = e.followed_by(Estimates.from_rows([added]))
    return replace(snapshot, estimates=rows.in_order(), plans=plans)


def _end(snapshot: Snapshot, _job: int, change: Change) -> Snapshot:
    ended = _index(snapshot.jobs.name, change)
    held, segments, starts = (
        snapshot.allocations,
        snapshot.schedule_segments,
        snapshot.planned_starts,
    )
    starts, nodes = keep_starts(starts, snapshot.planned_nodes, starts.job != ended)
    snapshot = replace(
        snapshot,
        allocations=held.at(held.job != ended),
        schedule_segments=segments.at(segments.job != ended),
        planned_starts=starts,
        planned_nodes=nodes,
    )
    return _with_job(
        snapshot,
        ended,
        state=STATE_CODE[JobState.CANCELLING],
        admitted=False,
        since_s=0.0,
        start_by_s=np.inf,
        **WITHOUT_CELL,
    )


def _wait(snapshot: Snapshot, _job: int, change: Change) -> Snapshot:
    return replace(snapshot, now_s=change.amount)


_APPLY: Final[dict[ChangeKind, Callable[[Snapshot, int, Change], Snapshot]]] = {
    ChangeKind.WEIGHT: _set_amount("weight"),
    ChangeKind.PRIORITY: _set_amount("priority"),
    ChangeKind.DEADLINE: _set_amount("deadline_s"),
    ChangeKind.ANY_TYPE: _set_to(pinned_gpu_type=False),
    ChangeKind.ANY_NODE: _use_any_node,
    ChangeKind.ANY_LABELS: _use_any_labels,
    ChangeKind.ALLOW_TYPE: _allow_types,
    ChangeKind.MIN_GPUS: _set_amount("min_gpus"),
    ChangeKind.MAX_GPUS: _set_amount("max_gpus"),
    ChangeKind.STAY: _set_to(pinned=True),
    ChangeKind.RELEASE: _set_to(state=STATE_CODE[JobState.QUEUED]),
    ChangeKind.RETRY: _set_to(retry_s=0.0),
    ChangeKind.REQUEST: _set_amount("requested_gpus"),
    ChangeKind.REQUEST_TYPE: _request_type,
    ChangeKind.BEST_EFFORT: _set_to(guaranteed=False),
    ChangeKind.ANY_PLAN: _set_to(plan=-1, plan_first=False),
    ChangeKind.QUOTA: _set_quota,
    ChangeKind.BORROW: _set_tenant("borrow_gpus"),
    ChangeKind.LEND: _set_tenant("keeps_idle_quota"),
    ChangeKind.TENANT_WEIGHT: _set_tenant("weight"),
    ChangeKind.UNDRAIN: _set_schedulable(True),
    ChangeKind.LOSE: _set_schedulable(False),
    ChangeKind.ADD_GPUS: _add_gpus,
    **{ChangeKind(resource.change): _set_capacity(resource.name) for resource in HOST_RESOURCES},
    ChangeKind.ADD_CELL: _add_cell,
    ChangeKind.END: _end,
    ChangeKind.WAIT: _wait,
}
