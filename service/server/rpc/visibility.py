"""The view that a caller bound to tenants has of answers about the jobs of all tenants.

The names of other tenants and of their jobs are left out. Totals of the cluster stay.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Collection, Iterable, MutableMapping
from typing import Any, Final

from tessera.db.clusters import tenants as stored_tenants
from tessera.db.store.store import Store
from tessera.formulation.answer.explanations.changes import ChangeKind
from tessera.formulation.base.access import Identity
from tessera.formulation.round.problem import RowKind
from tessera.v1 import clusters_pb2, jobs_pb2, networks_pb2, scheduler_pb2, what_if_pb2

TenantsOfJobs = Callable[[str, Collection[str]], dict[str, str]]
"""A function that returns the tenant of each of a cluster's jobs that exists."""

OTHERS: Final = "(another tenant)"

_OF_TENANTS: Final = frozenset({RowKind.QUOTA, RowKind.HELD, RowKind.KEPT})
"""The kinds of rows that are for a tenant. Their subject is ``TENANT`` or ``TENANT/TYPE``."""

_ROW: Final = "row"
_FREE: Final = "free "
"""The key of evidence that names a row, and the start of those with a row in the key."""


def find_tenants(store: Store) -> TenantsOfJobs:
    """Return a function that reads the tenants of jobs from the store."""
    return lambda cluster, names: store.read(stored_tenants.tenants_of_jobs, cluster, names)


def own_jobs(
    identity: Identity, cluster: str, names: Collection[str], tenants_of_jobs: TenantsOfJobs
) -> set[str]:
    """Return those of the jobs, by id, that the caller sees. Jobs that are gone are not seen."""
    if identity.tenants is None or not names:
        return set(names)
    tenants = tenants_of_jobs(cluster, names)
    return {name for name, tenant in tenants.items() if identity.sees_tenant(tenant)}


def hide_in_round(
    identity: Identity, cluster: str, message: scheduler_pb2.Round, tenants_of_jobs: TenantsOfJobs
) -> None:
    """Leave the decisions on other tenants' jobs and the rows of other tenants out of a round."""
    if identity.tenants is None:
        return
    own = own_jobs(identity, cluster, _jobs_of(message.decisions), tenants_of_jobs)
    kept = [decision for decision in message.decisions if short_id(decision.job) in own]
    for decision in kept:
        if decision.HasField("reason"):
            hide_in_reason(identity, decision.reason)
    del message.decisions[:]
    message.decisions.extend(kept)
    for rows in (message.prices, message.used_gpus):
        _keep_own_rows(identity, rows)
    for texts in (message.violations, message.failures):  # they may name any job
        del texts[:]


def hide_in_job(identity: Identity, message: jobs_pb2.Job, others: Collection[str] = ()) -> None:
    """Leave the names of other tenants and their jobs out of the reason why a job waits.

    ``others`` are the jobs of other tenants that it waits for.
    """
    for dependency in message.after:
        if short_id(dependency.job) in others:
            dependency.job = OTHERS
    if identity.tenants is not None and message.HasField("reason"):
        hide_in_reason(identity, message.reason, others)


def hide_in_reason(
    identity: Identity, reason: jobs_pb2.Reason, others: Collection[str] = ()
) -> None:
    """Leave the names of other tenants, and of their jobs ``others``, out of a reason."""
    hidden = set(others)
    for key, value in reason.evidence.items():
        row = key.removeprefix(_FREE) if key.startswith(_FREE) else value if key == _ROW else ""
        if not _is_own(identity, row):
            subject = row.partition("/")[2]
            hidden |= {subject, subject.rpartition("/")[0]}
    hidden.discard("")
    if not hidden:
        return
    clean = _cleaner(hidden)
    evidence = {clean(key): clean(value) for key, value in reason.evidence.items()}
    reason.evidence.clear()
    reason.evidence.update(evidence)
    reason.message, reason.next_step = clean(reason.message), clean(reason.next_step)


def _cleaner(hidden: Collection[str]) -> Callable[[str], str]:
    """Return a function that replaces the names ``hidden`` (at least one) in a text."""
    # The longest goes first, because it may contain another.
    names = "|".join(re.escape(name) for name in sorted(hidden, key=len, reverse=True))
    pattern = re.compile(rf"(?<![\w.-])(?:{names})(?![\w-])")
    return lambda text: pattern.sub(OTHERS, text)


def hide_in_explanation(
    identity: Identity,
    cluster: str,
    message: jobs_pb2.ExplainJobResponse,
    tenants_of_jobs: TenantsOfJobs,
) -> None:
    """Leave the names of other tenants and of their jobs, and what these are worth, out."""
    if identity.tenants is None:
        return
    changes = [change for step in message.steps for change in step.changes]
    jobs = {short_id(d.job) for d in message.displaced_by}
    jobs |= {short_id(job) for step in message.steps for job in step.losing_jobs}
    jobs |= {change.subject for change in changes if change.code == ChangeKind.END}
    own = own_jobs(identity, cluster, jobs, tenants_of_jobs) | {short_id(message.job)}
    tenants = {change.subject for change in changes if change.code == ChangeKind.LEND}
    hidden = (jobs - own) | {name for name in tenants if not identity.sees_tenant(name)}
    hide_in_reason(identity, message.reason)
    _hide_in_steps(message.steps, hidden, own)
    for displacement in message.displaced_by:
        if short_id(displacement.job) not in own:
            displacement.ClearField("job")
            displacement.ClearField("value_per_gpu")
    if hidden:
        clean = _cleaner(hidden)
        message.reason.message = clean(message.reason.message)
        message.reason.next_step = clean(message.reason.next_step)


def _hide_in_steps(
    steps: Iterable[jobs_pb2.NextStep], hidden: Collection[str], own: Collection[str]
) -> None:
    """Leave the names ``hidden``, and jobs that are not in ``own``, out of steps."""
    if not hidden:
        return
    clean = _cleaner(hidden)
    for step in steps:
        step.message = clean(step.message)
        kept = [job for job in step.losing_jobs if short_id(job) in own]
        del step.losing_jobs[:]
        step.losing_jobs.extend(kept)
        for change in step.changes:
            if change.subject in hidden:
                change.subject = OTHERS


def hide_in_what_if(identity: Identity, message: what_if_pb2.WhatIfResponse) -> None:
    """Leave the names of other tenants and of their jobs out of reasons.

    Their jobs are already left out of the lists of jobs, and counted.
    """
    if identity.tenants is None:
        return
    reasons = [offer.reason for offer in message.offers if offer.HasField("reason")]
    for job in message.now.jobs:
        for outlook in (job.before, job.after):
            reasons += [outlook.reason] if outlook.HasField("reason") else []
    for reason in reasons:
        hide_in_reason(identity, reason)


def hide_in_nodes(
    identity: Identity,
    cluster: str,
    nodes: Collection[clusters_pb2.Node],
    tenants_of_jobs: TenantsOfJobs,
) -> None:
    """Leave other tenants' jobs out of the lists of jobs that hold GPUs of nodes."""
    if identity.tenants is None:
        return
    ids = {short_id(job) for node in nodes for job in node.jobs}
    own = own_jobs(identity, cluster, ids, tenants_of_jobs) if ids else set()
    for node in nodes:
        kept = [job for job in node.jobs if short_id(job) in own]
        del node.jobs[:]
        node.jobs.extend(kept)


def hide_in_plan(
    identity: Identity,
    cluster: str,
    plan: networks_pb2.NetworkPlan,
    tenants_of_jobs: TenantsOfJobs,
) -> None:
    """Leave the decisions on other tenants' jobs, and their names, out of a network plan."""
    if identity.tenants is None:
        return
    own = own_jobs(identity, cluster, _jobs_of(plan.decisions), tenants_of_jobs)
    kept = [decision for decision in plan.decisions if short_id(decision.job) in own]
    for decision in kept:
        met = [job for job in decision.contending_jobs if short_id(job) in own]
        del decision.contending_jobs[:]
        decision.contending_jobs.extend(met)
    del plan.decisions[:]
    plan.decisions.extend(kept)
    del plan.notes[:]  # they may name any job


def short_id(name: str) -> str:
    """Return the last part of a resource name, e.g. ``a`` of ``clusters/main/jobs/a``."""
    return name.rpartition("/")[2]


def _jobs_of(
    decisions: Iterable[scheduler_pb2.Decision | networks_pb2.NetworkDecision],
) -> list[str]:
    return [short_id(decision.job) for decision in decisions]


def _keep_own_rows(identity: Identity, rows: MutableMapping[str, Any]) -> None:
    for name in list(rows):
        if not _is_own(identity, name):
            del rows[name]


def _is_own(identity: Identity, row: str) -> bool:
    """Return whether a row, by name, is for no tenant that the caller cannot see."""
    kind, _, subject = row.partition("/")
    if kind not in _OF_TENANTS:
        return True
    tenant, has_type, _ = subject.rpartition("/")
    return identity.sees_tenant(subject) or (bool(has_type) and identity.sees_tenant(tenant))
