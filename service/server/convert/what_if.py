"""The question what would happen, and the answer to it."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Collection, Mapping
from typing import Final

from tessera.formulation.answer.explanations.changes import Change, ChangeKind
from tessera.formulation.answer.hypotheses import Hypothesis
from tessera.formulation.base import limits
from tessera.formulation.base.access import Identity
from tessera.formulation.base.errors import InvalidInput
from tessera.formulation.base.values import Cell
from tessera.formulation.records.what_if import (
    ClusterOutlook,
    HoursDifference,
    JobDifference,
    JobHours,
    JobOffer,
    JobOutlook,
    PairedFigure,
    RoundDifference,
    WhatIfAnswer,
)
from tessera.service import fields
from tessera.service.server.convert import jobs as convert_jobs
from tessera.service.server.convert import names
from tessera.service.server.convert.estimates import of_cell
from tessera.service.server.convert.tenants import to_quotas, to_tenant_id
from tessera.simulator.what_if.hours import COVERAGE
from tessera.v1 import estimates_pb2, jobs_pb2
from tessera.v1 import what_if_pb2 as pb

MAX_NODES: Final = 10_000
MAX_NODE_GPUS: Final = 1024
"""The largest numbers of nodes that are added by one change, and of GPUs of each."""


def to_hypotheses(
    field: str, cluster: str, message: pb.HypotheticalChange
) -> tuple[Hypothesis, ...]:
    """Return a change as hypotheses: several if it sets several fields. An added job has none.

    Raises:
        InvalidInput: it changes nothing, or a value is wrong.
    """
    match message.WhichOneof("change"):
        case "nodes_added":
            return (_nodes_added(f"{field}.nodes_added", message.nodes_added),)
        case "node_lost":
            parent, node = names.parse_node(f"{field}.node_lost", message.node_lost)
            names.require_parent(f"{field}.node_lost", parent, cluster)
            return (_of(field, ChangeKind.LOSE, subject=node),)
        case "job_added":
            return ()
        case "job_removed":
            job = _job(f"{field}.job_removed", cluster, message.job_removed)
            return (_of(field, ChangeKind.END, subject=job),)
        case "job_changed":
            return _job_changed(field, cluster, message.job_changed)
        case "tenant_changed":
            return _tenant_changed(field, cluster, message.tenant_changed)
        case _:
            raise InvalidInput(field, "changes nothing; set one of its fields")


def _of(field: str, kind: ChangeKind, job: str = "", **values: str | float) -> Hypothesis:
    change = Change(kind=kind, **values)  # type: ignore[arg-type]
    return Hypothesis(change=change, job=job, field=field)


def _job(field: str, cluster: str, name: str) -> str:
    parent, job = names.parse_job(field, name)
    names.require_parent(field, parent, cluster)
    return job


def _nodes_added(field: str, message: pb.AddedNodes) -> Hypothesis:
    name = names.require_gpu_type(f"{field}.gpu_type", message.gpu_type)
    count = fields.require_whole(f"{field}.count", message.count, 1, MAX_NODES)
    gpus = fields.require_whole(f"{field}.gpus_per_node", message.gpus_per_node, 0, MAX_NODE_GPUS)
    # Without a size, the amount is the number of nodes until the snapshot says what a node has.
    amount = count * gpus if gpus else count
    return _of(field, ChangeKind.ADD_GPUS, subject=name, amount=amount, size=gpus)


def _job_changed(field: str, cluster: str, message: pb.JobChange) -> tuple[Hypothesis, ...]:
    field = f"{field}.job_changed"
    job = _job(f"{field}.job", cluster, message.job)
    amounts: dict[ChangeKind, tuple[str, float]] = {}
    if message.HasField("weight"):
        low, high = limits.MIN_WEIGHT, limits.MAX_WEIGHT
        weight = fields.require_real(f"{field}.weight", message.weight, low, high)
        amounts[ChangeKind.WEIGHT] = "weight", weight
    if message.HasField("priority"):
        priority = fields.require_whole(
            f"{field}.priority", message.priority, 1, limits.MAX_PRIORITY
        )
        amounts[ChangeKind.PRIORITY] = "priority", priority
    if message.HasField("deadline"):
        if message.no_deadline:
            raise InvalidInput(
                f"{field}.no_deadline", f"contradicts {field}.deadline; set only one of the two"
            )
        deadline_s = fields.seconds_since_1970(f"{field}.deadline", message.deadline)
        amounts[ChangeKind.DEADLINE] = "deadline", deadline_s
    elif message.no_deadline:
        amounts[ChangeKind.DEADLINE] = "no_deadline", math.inf
    for kind, name, is_set, gpus in (
        (ChangeKind.MIN_GPUS, "min_gpus", message.HasField("min_gpus"), message.min_gpus),
        (ChangeKind.MAX_GPUS, "max_gpus", message.HasField("max_gpus"), message.max_gpus),
    ):
        if is_set:
            amounts[kind] = name, fields.require_whole(f"{field}.{name}", gpus, 0, limits.MAX_GPUS)
    if not amounts:
        raise InvalidInput(field, "changes no field of the job; set one")
    return tuple(
        _of(f"{field}.{name}", kind, job, amount=amount) for kind, (name, amount) in amounts.items()
    )


def _tenant_changed(field: str, cluster: str, message: pb.TenantChange) -> tuple[Hypothesis, ...]:
    field = f"{field}.tenant_changed"
    tenant = to_tenant_id(f"{field}.tenant", cluster, message.tenant)
    found = []
    if message.HasField("weight"):
        weight = fields.require_real(
            f"{field}.weight", message.weight, 0.0, limits.MAX_TENANT_WEIGHT
        )
        kind = ChangeKind.TENANT_WEIGHT
        found.append(_of(f"{field}.weight", kind, subject=tenant, amount=weight))
    for gpu_type, gpus in to_quotas(f"{field}.quotas", message.quotas).items():
        subject = f"{tenant}/{gpu_type}" if gpu_type else tenant
        place = f"{field}.quotas[{gpu_type or 'any'}]"
        found.append(_of(place, ChangeKind.QUOTA, subject=subject, amount=gpus))
    if not found:
        raise InvalidInput(field, "changes no setting of the tenant; set its weight or quotas")
    return tuple(found)


def of_answer(
    cluster: str, answer: WhatIfAnswer, identity: Identity, max_jobs: int
) -> pb.WhatIfResponse:
    """Return the message of an answer, with the jobs that the caller sees, at most ``max_jobs``."""
    message = pb.WhatIfResponse(
        create_time=fields.timestamp_of(answer.created_s),
        offers=[_of_offer(cluster, offer, identity) for offer in answer.offers],
        now=_of_round(cluster, answer.now, identity, max_jobs),
        notes=answer.notes,
    )
    if answer.hours is not None:
        hidden = {d.job for d in answer.now.jobs if not identity.sees_tenant(d.tenant)}
        message.hours.CopyFrom(_of_hours(cluster, answer.hours, hidden))
    return message


def _of_round(
    cluster: str, found: RoundDifference, identity: Identity, max_jobs: int
) -> pb.RoundDifference:
    visible = [one for one in found.jobs if identity.sees_tenant(one.tenant)]
    shown = visible[:max_jobs]
    others = Counter(one.effect.value for one in found.jobs)
    others.subtract(one.effect.value for one in shown)
    return pb.RoundDifference(
        before=_of_cluster(found.before),
        after=_of_cluster(found.after),
        jobs=[_of_difference(cluster, one, identity) for one in shown],
        other_jobs={effect: count for effect, count in others.items() if count},
        unchanged_jobs=found.unchanged,
        same_objective=found.same_objective,
    )


def _of_cluster(found: ClusterOutlook) -> pb.ClusterOutlook:
    return pb.ClusterOutlook(
        running=found.running,
        waiting=found.waiting,
        gpus=found.gpus,
        used_gpus=found.used_gpus,
        effective_gpus=found.effective_gpus,
        samples_per_s=found.samples_per_s,
        objective=found.objective,
        unit=found.unit,
    )


def _of_difference(cluster: str, found: JobDifference, identity: Identity) -> pb.JobDifference:
    return pb.JobDifference(
        job=names.job_name(cluster, found.job),
        effect=found.effect,
        before=_of_outlook(cluster, found.before, identity),
        after=_of_outlook(cluster, found.after, identity),
    )


def _of_outlook(cluster: str, found: JobOutlook | None, identity: Identity) -> pb.JobOutlook | None:
    if found is None:
        return None
    return pb.JobOutlook(
        kind=found.kind,
        cell=_of_cell(found.cell),
        rate=found.rate,
        reason=None
        if found.reason is None
        else convert_jobs.of_reason(cluster, found.reason, 0, identity.sees_tenant),
    )


def _of_cell(cell: Cell | None) -> estimates_pb2.Cell | None:
    return None if cell is None else of_cell(cell)


def _of_figure(found: PairedFigure) -> pb.PairedFigure:
    return pb.PairedFigure(
        before=found.before,
        after=found.after,
        change=found.change,
        low=found.low,
        high=found.high,
    )


def _of_hours(
    cluster: str, found: HoursDifference, hidden: Collection[str] = ()
) -> pb.HoursDifference:
    """Return the message of a difference over hours, without the jobs ``hidden``."""
    return pb.HoursDifference(
        horizon=fields.duration_of(found.horizon_s),
        futures=found.futures,
        coverage=COVERAGE,
        soon_effective_gpus=_of_figure(found.soon_throughput),
        soon_waiting_jobs=_of_figure(found.soon_waiting),
        mean_wait_seconds=_of_figure(found.mean_wait_s),
        work_gpu_hours=_of_figure(found.work),
        finished_jobs=_of_figure(found.finished),
        jobs=[_of_job_hours(cluster, job) for job in found.jobs if job.job not in hidden],
    )


def _of_job_hours(cluster: str, found: JobHours) -> pb.JobHours:
    bands: Mapping[str, jobs_pb2.TimeBand] = {
        name: convert_jobs.of_band(band)
        for name in ("start_before", "start_after", "finish_before", "finish_after")
        if (band := getattr(found, name)) is not None
    }
    return pb.JobHours(job=names.job_name(cluster, found.job), **bands)


def _of_offer(cluster: str, found: JobOffer, identity: Identity) -> pb.JobOffer:
    def seen(losers: tuple[tuple[str, str], ...]) -> list[str]:
        return [names.job_name(cluster, j) for j, tenant in losers if identity.sees_tenant(tenant)]

    stopped, slowed = seen(found.stopped), seen(found.slowed)
    return pb.JobOffer(
        job=names.job_name(cluster, found.job),
        cell=_of_cell(found.cell),
        rate=found.rate,
        runner_up=_of_cell(found.runner_up),
        runner_up_rate=found.runner_up_rate,
        worse_by=_known(found.worse_by),
        price=_known(found.price),
        value=_known(found.value),
        unit=found.unit,
        stopped=stopped,
        slowed=slowed,
        other_losers=len(found.stopped) + len(found.slowed) - len(stopped) - len(slowed),
        reason=None
        if found.reason is None
        else convert_jobs.of_reason(cluster, found.reason, 0, identity.sees_tenant),
    )


def _known(value: float) -> float | None:
    return value if math.isfinite(value) else None
