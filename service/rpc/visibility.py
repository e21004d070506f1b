"""What a caller that is bound to tenants sees of answers about the jobs of all tenants.

The names of other tenants and of their jobs are left out. Totals of the cluster stay.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Collection, MutableMapping
from typing import Any, Final

from tessera.formulation.access import Identity
from tessera.formulation.problem import RowKind
from tessera.v1 import clusters_pb2, jobs_pb2, networks_pb2, scheduler_pb2

TenantsOfJobs = Callable[[str, Collection[str]], dict[str, str]]

OTHERS: Final = "(another tenant)"

_TENANT_ROWS: Final = (RowKind.QUOTA, RowKind.HELD, RowKind.KEPT)
_NAMED_ROW: Final = re.compile(
    rf"\b({'|'.join(_TENANT_ROWS)}|{RowKind.RESERVED})/([A-Za-z0-9][A-Za-z0-9_.-]{{0,99}})(/[a-z0-9_.-]+)?"
)
"""The name of a row for a tenant, or for a job that GPUs are reserved for."""
_BLOCKED: Final = "blocked job"


def own_jobs(
    identity: Identity, cluster: str, names: Collection[str], tenants_of_jobs: TenantsOfJobs
) -> set[str]:
    """Return those of the jobs, by id, that the caller sees. Jobs that are gone are not seen."""
    if identity.tenants is None:
        return set(names)
    tenants = tenants_of_jobs(cluster, names)
    return {name for name, tenant in tenants.items() if identity.sees_tenant(tenant)}


def hide_in_round(
    identity: Identity, cluster: str, message: scheduler_pb2.Round, tenants_of_jobs: TenantsOfJobs
) -> None:
    """Leave the decisions on other tenants' jobs and the rows of other tenants out of a round."""
    if identity.tenants is None:
        return
    ids = [decision.job.rpartition("/")[2] for decision in message.decisions]
    own = own_jobs(identity, cluster, ids, tenants_of_jobs)
    kept = [d for d, job in zip(message.decisions, ids, strict=True) if job in own]
    for decision in kept:
        hide_in_reason(identity, decision.reason, own)
    del message.decisions[:]
    message.decisions.extend(kept)
    for rows in (message.prices, message.used_gpus):
        _keep_own_rows(identity, rows, own)
    del message.violations[:]  # they may name any job


def hide_in_job(identity: Identity, message: jobs_pb2.Job) -> None:
    """Leave the names of other tenants and their jobs out of the reason why a job waits."""
    if identity.tenants is not None and message.HasField("reason"):
        hide_in_reason(identity, message.reason, {message.name.rpartition("/")[2]})


def hide_in_reason(identity: Identity, reason: jobs_pb2.Reason, own: Collection[str]) -> None:
    """Leave the names of other tenants, and of jobs that are not in ``own``, out of a reason."""
    texts = [text for item in reason.evidence.items() for text in item]
    hidden = [
        row[2] + (row[3] or "") for text in texts for row in _foreign_rows(identity, text, own)
    ]
    if (blocked := reason.evidence.get(_BLOCKED, "")) not in own:
        hidden.append(blocked)

    def clean(text: str) -> str:
        text = _NAMED_ROW.sub(
            lambda row: row[0] if _is_own(identity, row, own) else f"{row[1]}/{OTHERS}", text
        )
        for name in filter(None, hidden):
            text = re.sub(rf"(?<![\w.-]){re.escape(name)}(?![\w-])", OTHERS, text)
        return text

    evidence = {clean(key): clean(value) for key, value in reason.evidence.items()}
    reason.evidence.clear()
    reason.evidence.update(evidence)
    reason.message, reason.next_step = clean(reason.message), clean(reason.next_step)


def hide_in_nodes(
    identity: Identity,
    cluster: str,
    nodes: Collection[clusters_pb2.Node],
    tenants_of_jobs: TenantsOfJobs,
) -> None:
    """Leave other tenants' jobs out of the lists of jobs that hold GPUs of nodes."""
    if identity.tenants is None:
        return
    ids = {job.rpartition("/")[2] for node in nodes for job in node.jobs}
    own = own_jobs(identity, cluster, ids, tenants_of_jobs) if ids else set()
    for node in nodes:
        kept = [job for job in node.jobs if job.rpartition("/")[2] in own]
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
    ids = [decision.job.rpartition("/")[2] for decision in plan.decisions]
    own = own_jobs(identity, cluster, ids, tenants_of_jobs)
    kept = [d for d, job in zip(plan.decisions, ids, strict=True) if job in own]
    for decision in kept:
        met = [job for job in decision.meets if job.rpartition("/")[2] in own]
        del decision.meets[:]
        decision.meets.extend(met)
    del plan.decisions[:]
    plan.decisions.extend(kept)
    del plan.notes[:]  # they may name any job


def _keep_own_rows(
    identity: Identity, rows: MutableMapping[str, Any], own: Collection[str]
) -> None:
    for name in list(rows):
        if _foreign_rows(identity, name, own):
            del rows[name]


def _foreign_rows(identity: Identity, text: str, own: Collection[str]) -> list[re.Match[str]]:
    """Return the names of rows in ``text`` that are for a tenant or job that the caller cannot see."""
    return [row for row in _NAMED_ROW.finditer(text) if not _is_own(identity, row, own)]


def _is_own(identity: Identity, row: re.Match[str], own: Collection[str]) -> bool:
    return row[2] in own if row[1] == RowKind.RESERVED else identity.sees_tenant(row[2])
