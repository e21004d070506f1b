"""Explanations of jobs."""

from __future__ import annotations

import math
from collections.abc import Sequence

from tessera.formulation.answer.explanations.records import Displacement, Step
from tessera.formulation.base.texts import SeesTenant, render
from tessera.formulation.job.reasons import CAUSES, ReasonCode
from tessera.formulation.records.explanations import JobExplanation, group_rounds
from tessera.formulation.records.rounds import JobRound
from tessera.service import fields
from tessera.service.server.convert import names
from tessera.service.server.convert.jobs import of_planned_start, of_reason
from tessera.v1 import jobs_pb2 as pb


def of_explanation(
    cluster: str, job: str, found: JobExplanation, sees_tenant: SeesTenant
) -> pb.ExplainJobResponse:
    """Return the answer to ExplainJob, for a caller who ``sees_tenant`` some tenants.

    It names no other tenants and none of their jobs, nor does it say what these are worth.
    """
    explanation = found.explanation
    message = pb.ExplainJobResponse(
        job=names.job_name(cluster, job),
        round=names.round_name(cluster, found.number) if found.number else "",
        kind=found.kind,
        complete=not found.note,
        note=found.note,
        history=[_of_span(span) for span in group_rounds(found.history)],
    )
    if found.created_s:
        message.round_time.CopyFrom(fields.timestamp_of(found.created_s))
    if math.isfinite(found.start_by_s):
        message.start_by.CopyFrom(fields.timestamp_of(found.start_by_s))
    if found.planned_start is not None:
        message.planned_start.CopyFrom(of_planned_start(found.planned_start))
    if explanation is None:
        return message
    message.unit = explanation.unit
    message.cause = CAUSES[explanation.reason.code]
    message.reason.CopyFrom(of_reason(cluster, explanation.reason, found.number, sees_tenant))
    message.displaced_by.extend(
        _of_displacement(cluster, d, sees_tenant) for d in explanation.displaced_by
    )
    message.steps.extend(_of_step(cluster, step, sees_tenant) for step in explanation.steps)
    message.rounds_tried = explanation.rounds_tried
    if math.isfinite(explanation.value_per_gpu):
        message.value_per_gpu = explanation.value_per_gpu
    return message


def _of_displacement(cluster: str, d: Displacement, sees_tenant: SeesTenant) -> pb.Displacement:
    is_seen = sees_tenant(d.job.tenant)
    return pb.Displacement(
        job=names.job_name(cluster, d.job.text) if is_seen else "",
        gpu_type=d.gpu_type,
        gpus=d.gpus,
        taken_gpus=d.taken,
        rule=d.by,
        value_per_gpu=d.value_per_gpu if is_seen and math.isfinite(d.value_per_gpu) else None,
    )


def _of_step(cluster: str, step: Step, sees_tenant: SeesTenant) -> pb.NextStep:
    jobs = [effect.job for effect in step.effects]
    return pb.NextStep(
        actor=step.actor,
        message=render(step.message, sees_tenant),
        changes=[
            pb.StepChange(
                code=c.kind,
                subject=render(c.named_subject, sees_tenant),
                amount=c.amount,
                size=c.size,
            )
            for c in step.changes
        ],
        claim=step.claim,
        next_reason=step.then or "",
        losing_jobs=[names.job_name(cluster, job.text) for job in jobs if sees_tenant(job.tenant)],
    )


def _of_span(span: Sequence[JobRound]) -> pb.RoundSpan:
    last, first = span[0], span[-1]
    return pb.RoundSpan(
        first_round=first.number,
        last_round=last.number,
        first_time=fields.timestamp_of(first.created_s),
        last_time=fields.timestamp_of(last.created_s),
        kind=last.kind,
        code=last.code,
        cause=CAUSES[ReasonCode(last.code)] if last.code else "",
        cell=last.cell,
    )
