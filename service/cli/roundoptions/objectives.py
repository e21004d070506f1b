"""The options on what a round maximizes or minimizes."""

from __future__ import annotations

from enum import StrEnum
from typing import Annotated, Final

from tessera.formulation.grammar import parse_objective
from tessera.formulation.parameters import parse_parameters
from tessera.formulation.plugins import references_in
from tessera.formulation.policy import (
    DEFAULT_OBJECTIVE,
    DRF,
    GPU_SHARE,
    MAX_CAUTION,
    Policy,
)
from tessera.service.cli import limits
from tessera.service.cli.roundoptions.values import (
    Flag,
    Real,
    Text,
    Whole,
    check_option,
    panel_option,
    read_duration,
)
from tessera.v1 import scheduler_pb2

_OBJECTIVE: Final = "Objective"


class FairShareMeasure(StrEnum):
    """A choice of the measure of fair shares. ``NONE`` leaves the past out."""

    NONE = "none"
    GPUS = GPU_SHARE
    DRF = DRF


class CostOf(StrEnum):
    """The quantities that the objective ``cost`` can count."""

    DOLLARS = "dollars"
    WATTS = "watts"


def objective_options(
    *,
    objective: Annotated[
        Text,
        panel_option(
            _OBJECTIVE,
            "What to maximize or minimize, e.g. 'deadline then jct'; see above."
            f" Default: {DEFAULT_OBJECTIVE}.",
        ),
    ] = None,
    scheduler: Annotated[
        Text,
        panel_option(
            _OBJECTIVE,
            "A published scheduler that decides the round instead, e.g. fcfs, or a plug-in,"
            " MODULE:CLASS. Default: none ('').",
        ),
    ] = None,
    scheduler_parameters: Annotated[
        Text,
        panel_option(
            _OBJECTIVE,
            "Parameters of that scheduler, e.g. depth=5,breadth=8 for arena. docs/command-line.md lists"
            " them with their defaults.",
        ),
    ] = None,
    raw_throughput: Annotated[
        Flag,
        panel_option(
            _OBJECTIVE,
            "Sum the raw samples/s of the jobs, or each job's normalised rate. Default: normalised.",
            "--raw-throughput/--normalised-throughput",
        ),
    ] = None,
    priority_weights: Annotated[
        Text,
        panel_option(
            _OBJECTIVE,
            "Factors on the weights of the jobs of each priority, e.g. 1:4,2:1. Default: 1.",
        ),
    ] = None,
    restart_horizon: Annotated[
        Text,
        panel_option(_OBJECTIVE, "Time over which the cost of a restart is spread. Default: 1h."),
    ] = None,
    max_restart_share: Annotated[
        Real,
        panel_option(
            _OBJECTIVE,
            "Largest share of a Cell's value that a restart may cost. Default: 0.9.",
            min=0.0,
            max=1.0,
        ),
    ] = None,
    cost_of: Annotated[
        CostOf | None, panel_option(_OBJECTIVE, "Unit of the objective `cost`. Default: dollars.")
    ] = None,
    rate_floor: Annotated[
        Real,
        panel_option(
            _OBJECTIVE,
            "The objective `cost` runs no job below this share of its rate on the requested GPUs."
            " Default: 0.5.",
            min=0.0,
            max=1.0,
        ),
    ] = None,
    fairness_levels: Annotated[
        Whole,
        panel_option(
            _OBJECTIVE,
            "Number of worst-off jobs that a fairness objective settles one by one. Default: 4.",
            min=1,
            max=limits.MAX_FAIRNESS_LEVELS,
        ),
    ] = None,
    fair_share: Annotated[
        FairShareMeasure | None,
        panel_option(
            _OBJECTIVE,
            "Measure of fair shares: gpus, or drf for the dominant resource. Tenants that used more than"
            " their share count for less. Default: none, the past does not count.",
        ),
    ] = None,
    fair_half_life: Annotated[
        Text,
        panel_option(
            _OBJECTIVE,
            "With --fair-share: age at which use counts half as much as present use. Default: 1d.",
        ),
    ] = None,
    caution: Annotated[
        Real,
        panel_option(
            _OBJECTIVE,
            "Number of standard deviations by which uncertain estimates are taken to be slower. Default: 0.",
            min=0.0,
            max=MAX_CAUTION,
        ),
    ] = None,
) -> scheduler_pb2.RoundOptions:
    """Return the options on the objective."""
    if not references_in(objective or ""):  # whoever decides the round knows its plug-ins
        check_option("--objective", lambda: parse_objective(objective or DEFAULT_OBJECTIVE))
    check_option("--scheduler-parameters", lambda: parse_parameters(scheduler_parameters or ""))
    check_option("--priority-weights", lambda: Policy(priority_weights=priority_weights or ""))
    chosen = scheduler_pb2.RoundOptions(
        objective=objective,
        scheduler=scheduler,
        scheduler_parameters=scheduler_parameters,
        raw_throughput=raw_throughput,
        priority_weights=priority_weights,
        max_restart_share=max_restart_share,
        cost_of=cost_of,
        rate_floor=rate_floor,
        fairness_levels=fairness_levels,
        caution=caution,
        fair_share="" if fair_share is FairShareMeasure.NONE else fair_share,
    )
    read_duration(chosen.restart_horizon, "--restart-horizon", restart_horizon)
    read_duration(chosen.fair_half_life, "--fair-half-life", fair_half_life)
    return chosen
