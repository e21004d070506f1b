"""Rounds, their options and decisions."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import replace
from typing import Any, Final

from google.protobuf.descriptor import FieldDescriptor
from google.protobuf.duration_pb2 import Duration
from google.protobuf.json_format import ParseDict, ParseError

from tessera.estimator.documents import is_number, read_document, text_of
from tessera.formulation import limits
from tessera.formulation.documents import POLICY
from tessera.formulation.errors import InvalidInput
from tessera.formulation.goals import GoalResult
from tessera.formulation.parameters import PARAMETERS_FIELD
from tessera.formulation.policy import MAX_FAIRNESS_LEVELS
from tessera.formulation.records.rounds import DecisionRecord, RoundRecord, RoundSummary
from tessera.service import durations
from tessera.service.rpc import fields, names
from tessera.service.rpc.convert.jobs import of_allocation, of_reason
from tessera.solvers.rounds.options import RoundOptions, recorded_options
from tessera.solvers.rounds.proofs import GoalCheck
from tessera.v1 import scheduler_pb2 as pb

MIN_HORIZON_S, MAX_HORIZON_S = 1.0, 3.2e9  # a century
MAX_TEXT: Final = 1000
DEFAULTS: Final = RoundOptions()

_NUMBERS: Final = (
    FieldDescriptor.CPPTYPE_DOUBLE,
    FieldDescriptor.CPPTYPE_INT32,
    FieldDescriptor.CPPTYPE_INT64,
)
_DURATION: Final = Duration.DESCRIPTOR.full_name

_SECONDS: Final = {
    "restart_horizon": (MIN_HORIZON_S, MAX_HORIZON_S),
    "fair_half_life": (MIN_HORIZON_S, MAX_HORIZON_S),
    "round": (MIN_HORIZON_S, MAX_HORIZON_S),
    "default_run": (MIN_HORIZON_S, MAX_HORIZON_S),
    "network_measure": (0.0, MAX_HORIZON_S),
}
"""Smallest and largest seconds of the durations that must be finite."""

_COUNTS: Final = {
    "seed": (0, limits.MAX_SEED),
    "defragment_every_rounds": (0, limits.MAX_DEFRAGMENT_EVERY),
    "max_changes": (-1, limits.MAX_CHANGES),
    "fairness_levels": (1, MAX_FAIRNESS_LEVELS),
}

_EMPTY_IS_UNSET: Final = frozenset({"objective", "solver", "gap", "cost_of", "fairness_levels"})
"""Fields whose zero value means that they are not set."""


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
    chosen: dict[str, Any] = {}
    for known, value in message.ListFields():
        if value or known.name not in _EMPTY_IS_UNSET:
            chosen[_attribute(known)] = _value(f"{field}.{known.name}", known.name, value)
    if chosen.get("scheduler", standing.scheduler) != standing.scheduler:
        chosen.setdefault(PARAMETERS_FIELD, "")
    try:
        options = replace(standing, **chosen)
        options.require_bounded()
        return options
    except InvalidInput as wrong:
        name = wrong.field.removesuffix("_s")
        raise InvalidInput(f"{field}.{name}", wrong.problem) from wrong


def read_options(field: str, text: str, standing: RoundOptions = DEFAULTS) -> RoundOptions:
    """Return the options in ``text``, which is YAML or JSON with the API's names of fields.

    Durations are written as in options of the command line: ``2h``, ``1h30m`` or ``never``.

    Raises:
        InvalidInput: it is not such a mapping, or a value is out of range.
    """
    message = pb.RoundOptions()
    try:
        found = read_document(field, text, POLICY)
        if not isinstance(found, dict | None):
            raise InvalidInput(
                field, "must map names to values, e.g. {objective: jct, default_run: 2h}"
            )
        _refuse_other_numbers(field, found or {})
        ParseDict(_with_durations(field, found or {}), message)
    except ParseError as error:
        raise InvalidInput(field, " ".join(str(error).split())) from error
    return to_options(field, message, standing)


def _refuse_other_numbers(field: str, options: Mapping[Any, Any]) -> None:
    """Refuse texts such as ``010`` for numbers, which Python reads, but not as YAML and JSON do.

    Proto JSON writes long whole numbers as texts.
    """
    for option in pb.RoundOptions.DESCRIPTOR.fields:
        for name in (option.name, option.json_name):
            value = options.get(name)
            if option.cpp_type in _NUMBERS and isinstance(value, str) and not is_number(value):
                raise InvalidInput(f"{field}.{option.name}", f"must be a number, not {value!r}")


def _with_durations(field: str, options: Mapping[Any, Any]) -> dict[Any, Any]:
    """Return ``options`` with durations in the notation of proto JSON, e.g. ``7200s``."""
    known: dict[str, str] = {}
    for option in pb.RoundOptions.DESCRIPTOR.fields:
        if option.message_type is not None and option.message_type.full_name == _DURATION:
            known |= {option.name: option.name, option.json_name: option.name}
    return {
        name: _proto_duration(f"{field}.{known[name]}", value) if name in known else value
        for name, value in options.items()
    }


def _proto_duration(path: str, value: Any) -> Any:
    """Return a duration in proto JSON's notation, which refuses values of other types later."""
    if isinstance(value, bool) or not isinstance(text := text_of(value), str | float):
        return value
    if text == durations.NEVER:
        length_s = float(limits.MAX_DURATION_S)
    else:
        length_s = durations.parse_duration_s(path, str(text))
    return fields.duration_of(length_s).ToJsonString()


def _attribute(known: FieldDescriptor) -> str:
    """Return the name of the field of RoundOptions for a field of the message."""
    return f"{known.name}_s" if known.message_type is not None else known.name


def _value(path: str, name: str, value: Any) -> Any:
    if isinstance(value, Duration):
        length_s = fields.seconds_of_duration(path, value)
        length_s = length_s if length_s < limits.MAX_DURATION_S else math.inf
        return (
            fields.require_real(path, length_s, *_SECONDS[name]) if name in _SECONDS else length_s
        )
    if isinstance(value, str):
        return fields.require_text(path, value, MAX_TEXT)
    return fields.require_whole(path, value, *_COUNTS[name]) if name in _COUNTS else value


def of_options(options: Mapping[str, str | float | int | bool]) -> pb.RoundOptions:
    """Return the message of options that were recorded with a round."""
    o = recorded_options(options)
    message = pb.RoundOptions()
    for known in pb.RoundOptions.DESCRIPTOR.fields:
        value = getattr(o, _attribute(known))
        if known.message_type is None:
            setattr(message, known.name, value)
        elif math.isfinite(value):
            getattr(message, known.name).CopyFrom(fields.duration_of(value))
    return message


def of_round(record: RoundRecord, *, summary_only: bool) -> pb.Round:
    """Return the message of a round, without its decisions if ``summary_only``."""
    message = of_summary(record.summary)
    if not summary_only:
        cluster, number = record.summary.cluster, record.summary.number
        message.decisions.extend(_of_decision(cluster, number, d) for d in record.decisions)
    return message


def of_summary(s: RoundSummary) -> pb.Round:
    """Return the message of a round without decisions."""
    return pb.Round(
        name=names.round_name(s.cluster, s.number),
        epoch=s.epoch,
        create_time=fields.timestamp_of(s.created_s),
        options=of_options(s.options),
        status=s.status,
        outcome=s.outcome,
        objective=s.objective,
        bound=s.bound,
        gap=s.gap,
        placed_score=s.placed_score,
        greedy_objective=s.greedy_objective,
        verified=s.verified,
        violations=s.violations,
        snapshot_digest=s.snapshot_digest,
        solver=s.solver,
        work=[pb.SolverWork(solver=name, work=work) for name, work in s.work],
        prices=s.prices,
        running=s.running,
        waiting=s.waiting,
        started=s.started,
        suspended=s.suspended,
        changed=s.changed,
        replanned=s.replanned,
        used_gpus=s.used_gpus,
        seconds=s.seconds,
        unit=s.unit,
        samples_per_s=s.samples_per_s,
        versions=s.versions,
        goals=map(_of_goal, s.goals),
        bound_is_trivial=s.bound_is_trivial,
        proved_by=s.proved_by,
        has_certificate=s.has_certificate,
        policy_version=s.policy_version,
        failures=s.failures,
    )


def of_check(check: GoalCheck) -> pb.GoalCheck:
    """Return the message of the check of a goal's certificate."""
    return pb.GoalCheck(
        goal=_of_goal(check.result), proven=check.proven, problem=check.problem, note=check.note
    )


def _of_goal(goal: GoalResult) -> pb.GoalResult:
    return pb.GoalResult(
        name=goal.name,
        unit=goal.unit,
        objective=goal.objective,
        bound=goal.bound,
        gap=goal.gap,
        bound_is_trivial=goal.bound_is_trivial,
        proved_by=goal.proved_by,
        certified=goal.certified,
    )


def _of_decision(cluster: str, number: int, d: DecisionRecord) -> pb.Decision:
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
        message.reason.CopyFrom(of_reason(cluster, d.reason, number))
    return message
