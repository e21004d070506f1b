"""The view that a caller bound to tenants has of answers about the jobs of all tenants.

The names of other tenants and of their jobs are left out. Totals of the cluster stay.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, MutableMapping
from typing import Any

from tessera.db.clusters import tenants as stored_tenants
from tessera.db.store.store import Store
from tessera.formulation.base.access import Identity
from tessera.formulation.round.problem import CouplingRow
from tessera.v1 import clusters_pb2, networks_pb2, scheduler_pb2

TenantsOfJobs = Callable[[str, Collection[str]], dict[str, str]]
"""A function that returns the tenant of each of a cluster's jobs that exists."""


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
    del message.decisions[:]
    message.decisions.extend(kept)
    for rows in (message.prices, message.used_gpus):
        _keep_own_rows(identity, rows)
    for texts in (message.violations, message.failures):  # they may name any job
        del texts[:]


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
        tenant = CouplingRow.from_name(name, 0).tenant
        if tenant and not identity.sees_tenant(tenant):
            del rows[name]
