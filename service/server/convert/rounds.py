"""Rounds, their options and decisions."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import replace
from functools import partial
from typing import Final

from tessera.estimator.files.documents import read_document
from tessera.formulation.base.documents import POLICY
from tessera.formulation.base.errors import InvalidInput
from tessera.formulation.base.texts import SeesTenant
from tessera.formulation.records.rounds import DecisionRecord, RoundRecord, RoundSummary
from tessera.formulation.round.goals import GoalResult
from tessera.formulation.round.parameters import PARAMETERS_FIELD
from tessera.service import fields
from tessera.service.roundvalues import attribute_of, make_message, name_option, read_attributes
from tessera.service.server.convert import names
from tessera.service.server.convert.generic import to_message
from tessera.service.server.convert.jobs import of_allocation, of_reason
from tessera.solvers.rounds.options import RoundOptions, recorded_options
from tessera.solvers.rounds.proofs import GoalCheck
from tessera.v1 import scheduler_pb2 as pb

DEFAULTS: Final = RoundOptions()


def to_options(
    field: str, message: pb.RoundOptions, standing: RoundOptions = DEFAULTS
) -> RoundOptions:
    """Return the options. Those that are not set are taken from ``standing``.

    Parameters belong to their scheduler. If another scheduler is set, those of ``standing`` are
    dropped.

    Raises:
        InvalidInput: a value is out of range. Unknown solvers and schedulers, and parameters that a
            scheduler does not accept, are found later, when they are looked up.
    """
    place = partial(_place, field)
    chosen = read_attributes(message, place)
    if chosen.get("scheduler", standing.scheduler) != standing.scheduler:
        chosen.setdefault(PARAMETERS_FIELD, "")
    try:
        options = replace(standing, **chosen)
        options.require_bounded()
        return options
    except InvalidInput as wrong:
        raise name_option(wrong, place) from wrong


def read_options(field: str, text: str, standing: RoundOptions = DEFAULTS) -> RoundOptions:
    """Return the options in ``text``, which is YAML or JSON with the API's names of fields.

    Durations are written as in options of the command line: ``2h``, ``1h30m`` or ``never``.

    Raises:
        InvalidInput: it is not such a mapping, or a value is out of range.
    """
    values = read_document(field, text, POLICY)
    if not isinstance(values, dict | None):
        raise InvalidInput(
            field, "must map names to values, e.g. {objective: jct, default_run: 2h}"
        )
    message = make_message(values or {}, partial(_place, field))
    return to_options(field, message, standing)


def _place(field: str, option: str) -> str:
    return f"{field}.{option}"


def of_options(options: Mapping[str, str | float | int | bool]) -> pb.RoundOptions:
    """Return the message of options that were recorded with a round."""
    o = recorded_options(options)
    message = pb.RoundOptions()
    for known in pb.RoundOptions.DESCRIPTOR.fields:
        value = getattr(o, attribute_of(known))
        if known.message_type is None:
            setattr(message, known.name, value)
        elif math.isfinite(value):
            getattr(message, known.name).CopyFrom(fields.duration_of(value))
    return message


def of_round(record: RoundRecord, sees_tenant: SeesTenant, *, summary_only: bool) -> pb.Round:
    """Return the message of a round, without its decisions if ``summary_only``.

    The caller ``sees_tenant`` some tenants. Reasons do not name others, but all jobs have decisions.
    """
    message = of_summary(record.summary)
    if not summary_only:
        cluster, number = record.summary.cluster, record.summary.number
        message.decisions.extend(
            _of_decision(cluster, number, d, sees_tenant) for d in record.decisions
        )
    return message


def of_summary(s: RoundSummary) -> pb.Round:
    """Return the message of a round without decisions."""
    return to_message(
        s,
        pb.Round,
        name=names.round_name(s.cluster, s.number),
        options=of_options(s.options),
        work=[pb.SolverWork(solver=name, work=work) for name, work in s.work],
    )


def of_check(check: GoalCheck) -> pb.GoalCheck:
    """Return the message of the check of a goal's certificate."""
    return pb.GoalCheck(
        goal=_of_goal(check.result), proven=check.proven, problem=check.problem, note=check.note
    )


def _of_goal(goal: GoalResult) -> pb.GoalResult:
    return to_message(goal, pb.GoalResult)


def _of_decision(
    cluster: str, number: int, d: DecisionRecord, sees_tenant: SeesTenant
) -> pb.Decision:
    message = pb.Decision(
        job=names.job_name(cluster, d.job),
        kind=d.kind,
        restart_price=d.restart_price,
        applied=d.applied,
        skipped=d.skipped,
        admitted=d.admitted,
        opportunistic=d.opportunistic,
    )
    if d.allocation is not None:
        message.allocation.CopyFrom(of_allocation(cluster, d.allocation))
    if d.reason is not None:
        message.reason.CopyFrom(of_reason(cluster, d.reason, number, sees_tenant))
    return message
