"""Shadows and their comparison with the policy in force."""

from __future__ import annotations

import math

from tessera.formulation.records.policies import DecisionFigures, ShadowRecord, ShadowRound
from tessera.service.rpc import fields, names
from tessera.service.rpc.convert.policies import all_options, options_message
from tessera.service.shadow_comparison import ComparedFigure, ShadowComparison, Verdicts
from tessera.solvers.rounds.options import RoundOptions
from tessera.v1 import scheduler_pb2 as pb


def of_shadow(cluster: str, record: ShadowRecord, effective: RoundOptions) -> pb.Shadow:
    """Return the message of a shadow."""
    return pb.Shadow(
        name=names.shadow_name(cluster),
        options=options_message("shadow", record.options),
        effective_options=all_options(effective),
        set_by=record.set_by,
        create_time=fields.timestamp_of(record.set_s),
        message=record.message,
    )


def of_comparison(
    cluster: str, shadow: pb.Shadow, compared: ShadowComparison, rounds: list[ShadowRound]
) -> pb.GetShadowResponse:
    """Return the message of a comparison, with single ``rounds``."""
    return pb.GetShadowResponse(
        shadow=shadow,
        compared_rounds=compared.compared,
        failed_rounds=compared.failed,
        problem=compared.problem,
        figures=map(_of_figure, compared.figures),
        by_policy=_of_verdicts(compared.by_policy),
        by_shadow=_of_verdicts(compared.by_shadow),
        rounds=[_of_round(cluster, decided) for decided in rounds],
    )


def _of_figure(figure: ComparedFigure) -> pb.ComparedFigure:
    difference = figure.difference
    known = math.isfinite(difference.low)
    return pb.ComparedFigure(
        name=figure.name,
        policy=figure.policy,
        shadow=figure.shadow,
        difference=difference.value,
        low=difference.low if known else None,
        high=difference.high if known else None,
    )


def _of_verdicts(verdicts: Verdicts) -> pb.ShadowVerdicts:
    return pb.ShadowVerdicts(better=verdicts.better, equal=verdicts.equal, worse=verdicts.worse)


def _of_round(cluster: str, decided: ShadowRound) -> pb.ShadowRound:
    return pb.ShadowRound(
        round=names.round_name(cluster, decided.number),
        create_time=fields.timestamp_of(decided.created_s),
        policy_goals=decided.policy_goals,
        shadow_goals=decided.shadow_goals,
        policy=_of_figures(decided.policy),
        shadow=_of_figures(decided.shadow),
        problem=decided.problem,
    )


def _of_figures(figures: DecisionFigures | None) -> pb.DecisionFigures | None:
    if figures is None:
        return None
    return pb.DecisionFigures(
        by_policy=figures.by_policy,
        by_shadow=figures.by_shadow,
        effective_gpus=figures.effective_gpus,
        used_gpus=figures.used_gpus,
        running=figures.running,
        waiting=figures.waiting,
        started=figures.started,
        suspended=figures.suspended,
        changed=figures.changed,
        solve_seconds=figures.solve_s,
        gap=figures.gap if math.isfinite(figures.gap) else None,
    )
