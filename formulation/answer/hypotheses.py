"""Hypothetical changes of a cluster: their consistency, and their application to a snapshot."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, Final, TypeVar

import numpy as np

from tessera.formulation.answer.explanations.applying import apply_changes
from tessera.formulation.answer.explanations.changes import Change, ChangeKind
from tessera.formulation.base.errors import InvalidInput, NotFound
from tessera.formulation.base.tables import Bools, array_columns
from tessera.formulation.job.lifecycle import WAITING
from tessera.formulation.round.policy import Policy
from tessera.formulation.state.last_round import NO_SEGMENTS, keep_starts
from tessera.formulation.state.snapshot import Jobs, Snapshot
from tessera.formulation.state.tenants import Quotas, Tenants

PolicyT = TypeVar("PolicyT", bound=Policy)

ANY_TYPE: Final = -1
"""The GPU type of a quota that counts GPUs of all types."""

_LIVE_JOBS = "`tessera jobs` lists the jobs that have not ended"
_NODES = "`tessera nodes` lists the nodes"
_TENANTS = "`tessera tenants` lists those with settings; others need a job that has not ended"
_TYPES = "`tessera cluster` lists the GPU types"

_PROPERTIES: Final = {
    ChangeKind.WEIGHT: "the weight",
    ChangeKind.PRIORITY: "the priority",
    ChangeKind.DEADLINE: "the deadline",
    ChangeKind.MIN_GPUS: "the least GPUs",
    ChangeKind.MAX_GPUS: "the most GPUs",
    ChangeKind.QUOTA: "the quota",
    ChangeKind.TENANT_WEIGHT: "the weight",
}
"""The property that a change sets, by its kind."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Hypothesis:
    """A change that nobody has made.

    ``job`` is the job that it is for; "" if it is for none. ``field`` is its place in the request,
    which errors name.
    """

    change: Change
    job: str = ""
    field: str = "changes"

    @property
    def target(self) -> str:
        """Return the thing that it changes, in words."""
        kind, subject = self.change.kind, self.change.subject
        if self.job:
            return f"job {self.job}"
        if kind is ChangeKind.END:
            return f"job {subject}"
        if kind in (ChangeKind.QUOTA, ChangeKind.TENANT_WEIGHT):
            return f"tenant {subject}"
        return f"node {subject}"


def apply_hypotheses(
    snapshot: Snapshot, policy: PolicyT, hypotheses: Sequence[Hypothesis]
) -> tuple[Snapshot, PolicyT]:
    """Return the snapshot and the policy after all ``hypotheses``.

    Jobs keep their indices. A promised deadline is withdrawn as in an update of the job, if the job
    then asks for more than the promise was made for. So is a planned or promised start.

    Raises:
        NotFound: a job, node, tenant or GPU type. InvalidInput: two of the changes contradict each
            other, or one contradicts the job that it is for.
    """
    require_consistent(snapshot, hypotheses)
    changed = snapshot
    for stated in hypotheses:
        one = _with_node_size(snapshot, stated)
        if one.change.kind is ChangeKind.QUOTA:
            changed = _with_quota(changed, one)
        elif one.change.kind is ChangeKind.TENANT_WEIGHT:
            changed = _with_tenant(changed, one.change.subject)
        job = changed.jobs.name.index(one.job) if one.job else -1
        changed, policy = apply_changes(changed, policy, job, [one.change])
    _require_bounds(changed, hypotheses)
    return _withdraw_starts(snapshot, _withdraw_promises(snapshot, changed)), policy


def require_consistent(snapshot: Snapshot, hypotheses: Sequence[Hypothesis]) -> None:
    """Check that every subject exists and that no two changes contradict each other.

    Raises:
        NotFound: a job, node, tenant or GPU type. InvalidInput: a contradiction, or a deadline that
            has passed.
    """
    seen: dict[tuple[str, ChangeKind], Hypothesis] = {}
    ended: dict[str, Hypothesis] = {}
    for one in hypotheses:
        _require_known(snapshot, one)
        kind = one.change.kind
        if kind is ChangeKind.DEADLINE and not one.change.amount > snapshot.now_s:
            raise InvalidInput(
                one.field, f"sets a deadline of {one.target} that has passed; set a later one"
            )
        if kind is ChangeKind.ADD_GPUS:
            continue
        key = one.target, kind
        if (first := seen.get(key)) is not None:
            raise InvalidInput(one.field, f"{_clash(one)} as {first.field} does; keep one of them")
        seen[key] = one
        if kind is ChangeKind.END:
            ended[one.change.subject] = one
    for one in hypotheses:
        if (removal := ended.get(one.job)) is not None:
            raise InvalidInput(
                one.field,
                f"changes {one.target}, which {removal.field} removes; leave out one of the two",
            )


def _clash(one: Hypothesis) -> str:
    kind = one.change.kind
    if kind is ChangeKind.END:
        return f"removes {one.target}"
    if kind is ChangeKind.LOSE:
        return f"loses {one.target}"
    return f"sets {_PROPERTIES.get(kind, kind.value)} of {one.target}"


def _require_known(snapshot: Snapshot, one: Hypothesis) -> None:
    kind, subject, cluster = one.change.kind, one.change.subject, f"clusters/{snapshot.cluster}"
    job = one.job or (subject if kind is ChangeKind.END else "")
    if job and job not in snapshot.jobs.name:
        raise NotFound(f"{cluster}/jobs/{job}", f"{one.field} needs a live job; {_LIVE_JOBS}")
    if kind is ChangeKind.LOSE and subject not in snapshot.nodes.name:
        raise NotFound(f"{cluster}/nodes/{subject}", f"{one.field} needs a node; {_NODES}")
    if kind in (ChangeKind.QUOTA, ChangeKind.TENANT_WEIGHT):
        tenant, _, gpu_type = subject.partition("/")
        if tenant not in (*snapshot.tenants.name, *snapshot.jobs.tenant):
            raise NotFound(f"{cluster}/tenants/{tenant}", f"{one.field} needs a tenant; {_TENANTS}")
        if gpu_type:
            _require_type(snapshot, gpu_type, one.field)
    if kind is ChangeKind.ADD_GPUS:
        _require_type(snapshot, subject, one.field)


def _require_type(snapshot: Snapshot, name: str, field: str) -> None:
    if name not in [kind.name for kind in snapshot.gpu_types]:
        cluster = f"clusters/{snapshot.cluster}"
        raise NotFound(f"GPU type {name} of {cluster}", f"{field} needs a known one; {_TYPES}")


def _with_node_size(snapshot: Snapshot, one: Hypothesis) -> Hypothesis:
    """Return an addition of nodes without a size as one of nodes like the largest of their type."""
    if one.change.kind is not ChangeKind.ADD_GPUS or one.change.size:
        return one
    kind = [kind.name for kind in snapshot.gpu_types].index(one.change.subject)
    size = int(snapshot.nodes.gpus[snapshot.nodes.gpu_type == kind].max(initial=0))
    if not size:
        raise InvalidInput(
            one.field,
            f"adds nodes of {one.change.subject}, of which the cluster has none, so state their GPUs",
        )
    change = replace(one.change, amount=one.change.amount * size, size=float(size))
    return replace(one, change=change)


def _with_tenant(snapshot: Snapshot, tenant: str) -> Snapshot:
    """Return the snapshot with the usual settings of ``tenant``, unless it has its own."""
    own = snapshot.tenants
    if tenant in own.name:
        return snapshot
    rows = [own.row(i) for i in range(len(own))]
    usual = {"name": tenant, "weight": 1.0, "borrow_gpus": -1, "keeps_idle_quota": False}
    return replace(snapshot, tenants=Tenants.from_rows([*rows, usual]))


def _with_quota(snapshot: Snapshot, one: Hypothesis) -> Snapshot:
    """Return the snapshot with a row for the quota that the change sets."""
    tenant, _, gpu_type = one.change.subject.partition("/")
    snapshot = _with_tenant(snapshot, tenant)
    index = snapshot.tenants.name.index(tenant)
    types = [kind.name for kind in snapshot.gpu_types]
    kind = types.index(gpu_type) if gpu_type else ANY_TYPE
    quotas = snapshot.quotas
    if ((quotas.tenant == index) & (quotas.gpu_type == kind)).any():
        return snapshot
    rows = [quotas.row(i) for i in range(len(quotas))]
    added = {"tenant": index, "gpu_type": kind, "gpus": int(one.change.amount)}
    return replace(snapshot, quotas=Quotas.from_rows([*rows, added]))


def _require_bounds(changed: Snapshot, hypotheses: Sequence[Hypothesis]) -> None:
    """Check the bounds on GPUs of changed jobs against their requests, as an update does."""
    jobs = changed.jobs
    for one in hypotheses:
        if one.change.kind not in (ChangeKind.MIN_GPUS, ChangeKind.MAX_GPUS):
            continue
        job = jobs.name.index(one.job)
        asks, least, most = (
            int(column[job]) for column in (jobs.requested_gpus, jobs.min_gpus, jobs.max_gpus)
        )
        if least > asks or 0 < most < asks:
            raise InvalidInput(
                one.field,
                f"gives job {one.job} bounds of {least} and {most or 'any number of'} GPUs, but it requests"
                f" {asks}; the bounds must include that",
            )


def _withdraw_promises(before: Snapshot, after: Snapshot) -> Snapshot:
    """Return ``after`` without promises for jobs that ask for more than ``before``."""
    old, new, count = before.jobs, after.jobs, len(before.jobs)
    keeps = np.isfinite(new.deadline_s[:count]) & (new.deadline_s[:count] >= old.deadline_s)
    lost = np.flatnonzero(old.admitted & ~(keeps & _keep_bounds(old, new)))
    if not len(lost):
        return after
    admitted = np.array(new.admitted)
    admitted[lost] = False
    kept = ~np.isin(after.schedule_segments.job, lost)
    segments = after.schedule_segments.at(kept) if kept.any() else NO_SEGMENTS
    return replace(after, jobs=replace(new, admitted=admitted), schedule_segments=segments)


def _withdraw_starts(source: Snapshot, target: Snapshot) -> Snapshot:
    """Return ``target`` without starts of jobs that are removed, served later, or ask for more."""
    old, new, count = source.jobs, target.jobs, len(source.jobs)
    keeps = target.jobs.among(WAITING)
    keeps[:count] &= (new.priority[:count] <= old.priority) & _keep_bounds(old, new)
    starts, nodes = keep_starts(
        target.planned_starts, target.planned_nodes, keeps[target.planned_starts.job]
    )
    jobs = replace(new, start_by_s=np.where(keeps, new.start_by_s, np.inf))
    return replace(target, jobs=jobs, planned_starts=starts, planned_nodes=nodes)


def _keep_bounds(old: Jobs, new: Jobs) -> Bools:
    """Return whether each job of ``old`` may have all numbers of GPUs in ``new`` that it had."""
    min_gpus, max_gpus = new.min_gpus[: len(old)], new.max_gpus[: len(old)]
    keeps: Bools = (min_gpus <= old.min_gpus) & (
        (max_gpus == 0) | ((old.max_gpus > 0) & (old.max_gpus <= max_gpus))
    )
    return keeps


def append_jobs(snapshot: Snapshot, added: Jobs) -> Snapshot:
    """Return the snapshot with the jobs ``added`` after all others.

    Raises:
        InvalidInput: a job of that name exists.
    """
    if taken := sorted(set(added.name) & set(snapshot.jobs.name)):
        raise InvalidInput("changes", f"adds job {taken[0]}, which exists; choose another name")
    own = snapshot.jobs
    columns: dict[str, Any] = {
        name: np.concatenate([getattr(own, name), getattr(added, name)])
        for name in array_columns(Jobs)
    }
    jobs = Jobs(**columns, name=(*own.name, *added.name), tenant=(*own.tenant, *added.tenant))
    return replace(snapshot, jobs=jobs)


def without_last_jobs(snapshot: Snapshot, count: int) -> Snapshot:
    """Return the snapshot without its last ``count`` jobs, which own no GPUs."""
    if not count:
        return snapshot
    left = len(snapshot.jobs) - count
    starts, nodes = keep_starts(
        snapshot.planned_starts, snapshot.planned_nodes, snapshot.planned_starts.job < left
    )
    return replace(
        snapshot,
        jobs=snapshot.jobs.at(np.arange(left)),
        avoided_nodes=snapshot.avoided_nodes.at(snapshot.avoided_nodes.job < left),
        allowed_gpu_types=snapshot.allowed_gpu_types.at(snapshot.allowed_gpu_types.job < left),
        entitlements=snapshot.entitlements.at(snapshot.entitlements.job < left),
        dependencies=snapshot.dependencies.at(snapshot.dependencies.job < left),
        planned_starts=starts,
        planned_nodes=nodes,
    )
