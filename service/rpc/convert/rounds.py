"""Rounds, their options and decisions."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any, Final

from formulation.errors import InvalidInput
from formulation.resources import DecisionRecord, RoundRecord, RoundSummary
from service.rounds import RoundOptions
from service.rpc import fields, names
from service.rpc.convert.jobs import of_allocation, of_reason
from tessera.v1 import scheduler_pb2 as pb

MAX_SEED: Final = 2**31 - 1
MIN_HORIZON_S, MAX_HORIZON_S = 1.0, 3.2e9  # a century


def to_options(field: str, message: pb.RoundOptions) -> RoundOptions:
    """Return the options; what is not set takes RoundOptions' own default.

    Raises:
        InvalidInput: a number is out of range; unknown names are found where they are looked up.
    """
    chosen: dict[str, Any] = {
        "raw_throughput": message.raw_throughput,
        "seed": fields.whole(f"{field}.seed", message.seed, 0, MAX_SEED),
    }
    if message.objective:
        chosen["objective"] = message.objective
    if message.solver:
        chosen["solver"] = message.solver
    if message.gap != 0:
        chosen["gap"] = message.gap
    if message.HasField("solve_limit"):
        chosen["solve_limit_s"] = fields.seconds(f"{field}.solve_limit", message.solve_limit)
    if message.HasField("restart_horizon"):
        horizon_s = fields.seconds(f"{field}.restart_horizon", message.restart_horizon)
        chosen["restart_horizon_s"] = fields.real(
            f"{field}.restart_horizon", horizon_s, MIN_HORIZON_S, MAX_HORIZON_S
        )
    if message.HasField("defragment_every_rounds"):
        chosen["defragment_every_rounds"] = fields.whole(
            f"{field}.defragment_every_rounds", message.defragment_every_rounds, 0, 10**6
        )
    try:
        return RoundOptions(**chosen)
    except InvalidInput as wrong:
        raise InvalidInput(f"{field}.{wrong.field}", wrong.problem) from wrong


def of_options(options: Mapping[str, str | float | int | bool]) -> pb.RoundOptions:
    """Return the message of options as recorded with a round."""
    o = RoundOptions(**options)  # type: ignore[arg-type] # they are recorded by field
    message = pb.RoundOptions(
        objective=o.objective, raw_throughput=o.raw_throughput, solver=o.solver, gap=o.gap,
        seed=o.seed, restart_horizon=fields.duration_of(o.restart_horizon_s),
        defragment_every_rounds=o.defragment_every_rounds,
    )  # fmt: skip
    if math.isfinite(o.solve_limit_s):
        message.solve_limit.CopyFrom(fields.duration_of(o.solve_limit_s))
    return message


def of_round(record: RoundRecord, *, summary_only: bool) -> pb.Round:
    """Return the message of a round, without its decisions where only the summary is wanted."""
    message = of_summary(record.summary)
    if not summary_only:
        cluster, number = record.summary.cluster, record.summary.number
        message.decisions.extend(_of_decision(cluster, number, d) for d in record.decisions)
    return message


def of_summary(s: RoundSummary) -> pb.Round:
    """Return the message of a round without decisions."""
    return pb.Round(
        name=names.round_name(s.cluster, s.number), epoch=s.epoch,
        create_time=fields.timestamp_of(s.created_s), options=of_options(s.options),
        status=s.status, outcome=s.outcome, objective=s.objective, bound=s.bound, gap=s.gap,
        placed_score=s.placed_score, greedy_objective=s.greedy_objective, verified=s.verified,
        violations=s.violations, snapshot_digest=s.snapshot_digest, solver=s.solver,
        work=[pb.SolverWork(solver=name, work=work) for name, work in s.work], prices=s.prices,
        running=s.running, waiting=s.waiting, started=s.started, suspended=s.suspended,
        changed=s.changed, used_gpus=s.used_gpus, seconds=s.seconds, unit=s.unit,
        samples_per_s=s.samples_per_s, versions=s.versions,
    )  # fmt: skip


def _of_decision(cluster: str, number: int, d: DecisionRecord) -> pb.Decision:
    message = pb.Decision(
        job=names.job_name(cluster, d.job), kind=d.kind, restart_price=d.restart_price,
        applied=d.applied, skipped=d.skipped,
    )  # fmt: skip
    if d.allocation is not None:
        message.allocation.CopyFrom(of_allocation(cluster, d.allocation))
    if d.reason is not None:
        message.reason.CopyFrom(of_reason(cluster, d.reason, number))
    return message
