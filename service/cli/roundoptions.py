"""The options of a round, which ``round``, ``replay``, ``solve``, ``policy set`` and ``shadow set`` share."""

from __future__ import annotations

from collections.abc import Callable
from enum import StrEnum
from typing import Annotated, Any, Final, TypeAlias

import typer
from google.protobuf import duration_pb2

from tessera.formulation.errors import InvalidInput
from tessera.formulation.grammar import LEXICOGRAPHIC, OBJECTIVES, parse_objective
from tessera.formulation.parameters import parse_parameters
from tessera.formulation.plugins import references_in
from tessera.formulation.policy import (
    DEFAULT_OBJECTIVE,
    DRF,
    GPU_SHARE,
    MAX_CAUTION,
    MAX_FORESIGHT,
    MAX_REPLAN_SPACING,
    NETWORK_LEVELS,
    Policy,
)
from tessera.service.cli import limits, options
from tessera.v1 import scheduler_pb2

NEVER: Final = "never"
MAX_FLOOR: Final = 0.99
"""The largest floor, as a share of a job's rate alone. Two jobs that share a link cannot both have 1."""

GRAMMAR: Final = f"""\
An objective is a name ({", ".join(OBJECTIVES)}),
a weighted sum of names such as '0.7*throughput + 0.3*jct', or goals in order: 'max-min within 5% then
throughput' first makes the worst-off jobs as well off as possible, then gives up at most 5 % of that for
throughput. {", ".join(LEXICOGRAPHIC)} compare job by job, so they cannot be terms of a
sum.

{{unset}}
"""
"""Part of the help of every command that decides a round. ``unset`` is a sentence of ``UNSET``."""

UNSET: Final = {
    "schedule": "Options that are not given are taken from the cluster's standing policy\n"
    "(`tessera policy show`). If it does not set them either, they have their defaults.",
    "set_shadow": "Options that are not given have their defaults.",
    "set_policy": "Options that are not given stay as in the policy in force.",
    "replay": "Options that are not given stay as they were in the recorded round.",
    "solve": "Options that are not given have their defaults.",
    "ask_what_if": "Options of rounds that are given are those of rounds with the change. All others, and\n"
    "rounds without the change, follow the server's standing policy (`TESSERA_POLICY`).",
}
"""The source of options that are not given, by the name of the command's function."""

EXAMPLES: Final = {
    "set_shadow": "tessera shadow set --objective jct --foresight 64 -m 'would foresight pay?'",
    "set_policy": "tessera policy set --objective 'deadline then jct' -m 'deadlines count now'",
    "schedule": "tessera round --dry-run --objective 'deadline then jct' --queue-order --promote-after 2h",
    "replay": "tessera replay 2 --objective 'deadline then jct'",
    "solve": "tessera solve round.json --objective 'deadline then jct'",
    "ask_what_if": "tessera whatif --add-nodes h100:4 --objective jct --hours 6",
}
"""An example for each command that decides a round, by the name of the command's function."""


class FairShareMeasure(StrEnum):
    """A choice of the measure of fair shares. ``NONE`` leaves the past out."""

    NONE = "none"
    GPUS = GPU_SHARE
    DRF = DRF


class DeadlineTreatment(StrEnum):
    """The ways in which deadlines are treated."""

    AUTO = "auto"
    IGNORE = "ignore"
    KEEP = "keep"
    MYOPIC = "myopic"
    LOOK_AHEAD = "look-ahead"
    PLANNED = "planned"


class CostOf(StrEnum):
    """The quantities that the objective ``cost`` can count."""

    DOLLARS = "dollars"
    WATTS = "watts"


def _option(panel: str, text: str, *names: str, **rest: Any) -> Any:
    return typer.Option(*names, help=text, rich_help_panel=panel, show_default=False, **rest)


_OBJECTIVE, _DEADLINES, _QUEUES = "Objective", "Deadlines", "Queues"
_LIMITS, _SOLVING = "Limits on changes", "Solving"

Text: TypeAlias = str | None
Flag: TypeAlias = bool | None
Whole: TypeAlias = int | None
Real: TypeAlias = float | None


def _objective_options(
    *,
    objective: Annotated[
        Text,
        _option(
            _OBJECTIVE,
            "What to maximize or minimize, e.g. 'deadline then jct'; see above."
            f" Default: {DEFAULT_OBJECTIVE}.",
        ),
    ] = None,
    scheduler: Annotated[
        Text,
        _option(
            _OBJECTIVE,
            "A published scheduler that decides the round instead, e.g. fcfs, or a plug-in,"
            " MODULE:CLASS. Default: none ('').",
        ),
    ] = None,
    scheduler_parameters: Annotated[
        Text,
        _option(
            _OBJECTIVE,
            "Parameters of that scheduler, e.g. depth=5,breadth=8 for arena. docs/command-line.md lists"
            " them with their defaults.",
        ),
    ] = None,
    raw_throughput: Annotated[
        Flag,
        _option(
            _OBJECTIVE,
            "Sum the raw samples/s of the jobs, or each job's normalised rate. Default: normalised.",
            "--raw-throughput/--normalised-throughput",
        ),
    ] = None,
    queue_weights: Annotated[
        Text,
        _option(
            _OBJECTIVE,
            "Factors on the weights of the jobs in each queue, e.g. 1:4,2:1. Default: 1.",
        ),
    ] = None,
    restart_horizon: Annotated[
        Text, _option(_OBJECTIVE, "Time over which the cost of a restart is spread. Default: 1h.")
    ] = None,
    max_restart_share: Annotated[
        Real,
        _option(
            _OBJECTIVE,
            "Largest share of a Cell's value that a restart may cost. Default: 0.9.",
            min=0.0,
            max=1.0,
        ),
    ] = None,
    cost_of: Annotated[
        CostOf | None, _option(_OBJECTIVE, "Unit of the objective `cost`. Default: dollars.")
    ] = None,
    rate_floor: Annotated[
        Real,
        _option(
            _OBJECTIVE,
            "The objective `cost` runs no job below this share of its rate on the requested GPUs."
            " Default: 0.5.",
            min=0.0,
            max=1.0,
        ),
    ] = None,
    fairness_levels: Annotated[
        Whole,
        _option(
            _OBJECTIVE,
            "Number of worst-off jobs that a fairness objective settles one by one. Default: 4.",
            min=1,
            max=limits.MAX_FAIRNESS_LEVELS,
        ),
    ] = None,
    fair_share: Annotated[
        FairShareMeasure | None,
        _option(
            _OBJECTIVE,
            "Measure of fair shares: gpus, or drf for the dominant resource. Tenants that used more than"
            " their share count for less. Default: none, the past does not count.",
        ),
    ] = None,
    fair_half_life: Annotated[
        Text,
        _option(
            _OBJECTIVE,
            "With --fair-share: age at which use counts half as much as present use. Default: 1d.",
        ),
    ] = None,
    caution: Annotated[
        Real,
        _option(
            _OBJECTIVE,
            "Number of standard deviations by which uncertain estimates are taken to be slower. Default: 0.",
            min=0.0,
            max=MAX_CAUTION,
        ),
    ] = None,
    foresight: Annotated[
        Whole,
        _option(
            _OBJECTIVE,
            "Number of answers that the round may roll forward to the end of their jobs. It takes the one"
            " after which jobs end soonest. 0: the objective alone decides. Default: 0.",
            min=0,
            max=MAX_FORESIGHT,
        ),
    ] = None,
) -> scheduler_pb2.RoundOptions:
    """Return the options on the objective."""
    if not references_in(objective or ""):  # whoever decides the round knows its plug-ins
        _check("--objective", lambda: parse_objective(objective or DEFAULT_OBJECTIVE))
    _check("--scheduler-parameters", lambda: parse_parameters(scheduler_parameters or ""))
    _check("--queue-weights", lambda: Policy(queue_weights=queue_weights or ""))
    chosen = scheduler_pb2.RoundOptions(
        objective=objective,
        scheduler=scheduler,
        scheduler_parameters=scheduler_parameters,
        raw_throughput=raw_throughput,
        queue_weights=queue_weights,
        max_restart_share=max_restart_share,
        cost_of=cost_of,
        rate_floor=rate_floor,
        fairness_levels=fairness_levels,
        caution=caution,
        foresight=foresight,
        fair_share="" if fair_share is FairShareMeasure.NONE else fair_share,
    )
    _read(chosen.restart_horizon, "--restart-horizon", restart_horizon)
    _read(chosen.fair_half_life, "--fair-half-life", fair_half_life)
    return chosen


def _deadline_options(
    *,
    deadlines: Annotated[
        DeadlineTreatment | None,
        _option(
            _DEADLINES,
            "How deadlines are treated. myopic: promise them round by round. look-ahead: promise them by a"
            " schedule over future rounds. planned: make that schedule without a promise. keep: only keep"
            " promises already made. ignore: ignore deadlines. Default: auto, which is look-ahead if the"
            " objective names deadline, and keep otherwise.",
        ),
    ] = None,
    round_length: Annotated[
        Text,
        _option(_DEADLINES, "Time to the next round. Default: the server's period, or 300s."),
    ] = None,
    queue_order: Annotated[
        Flag,
        _option(
            _QUEUES,
            "Launch jobs by queue (`--priority`) and arrival instead of by value alone.",
            "--queue-order/--no-queue-order",
        ),
    ] = None,
    promote_after: Annotated[
        Text,
        _option(
            _QUEUES,
            "Promote a job by one queue each time it has waited this long, e.g. 2h. Default: never.",
        ),
    ] = None,
    opportunistic: Annotated[
        Flag,
        _option(
            _QUEUES,
            "With --queue-order: start jobs ahead of a blocked job, and suspend them once it fits.",
            "--opportunistic/--no-opportunistic",
        ),
    ] = None,
    reserve_after: Annotated[
        Text,
        _option(
            _QUEUES, "Reserve GPUs for the first job that has waited this long. Default: never."
        ),
    ] = None,
) -> scheduler_pb2.RoundOptions:
    """Return the options on promised deadlines and on the order of jobs."""
    chosen = scheduler_pb2.RoundOptions(
        deadlines="" if deadlines is DeadlineTreatment.AUTO else deadlines,
        queue_order=queue_order,
        opportunistic=opportunistic,
    )
    _read(chosen.round, "--round-length", round_length)
    _read(chosen.promote_after, "--promote-after", promote_after, never=True)
    _read(chosen.reserve_after, "--reserve-after", reserve_after, never=True)
    return chosen


def _limit_options(
    *,
    run_to_completion: Annotated[
        Flag,
        _option(
            _LIMITS,
            "Never suspend a job once it is launched. Default: preempt.",
            "--run-to-completion/--preempt",
        ),
    ] = None,
    min_run: Annotated[
        Text,
        _option(
            _LIMITS,
            "Time for which a job must have run before it may be moved, resized or suspended. Default: 0s.",
        ),
    ] = None,
    replan_spacing: Annotated[
        Real,
        _option(
            _LIMITS,
            "Number of restart times that a job runs before its plan may change on the GPUs that it has. The"
            " change must make up for its restart in that time. 0: no limit. Default: 20.",
            min=0.0,
            max=MAX_REPLAN_SPACING,
        ),
    ] = None,
    max_changes: Annotated[
        Whole,
        _option(
            _LIMITS,
            "Maximum number of running jobs that are moved, resized or suspended. -1: no limit. Default: -1.",
            min=-1,
            max=limits.MAX_CHANGES,
        ),
    ] = None,
    defragment_every: Annotated[
        Whole,
        _option(
            _LIMITS,
            "Number of rounds between two defragmentation passes. 0: never. Default: 12.",
            min=0,
            max=limits.MAX_DEFRAGMENT_EVERY,
        ),
    ] = None,
    network_levels: Annotated[
        Whole,
        _option(
            _LIMITS,
            "Number of network priority levels, if the cluster's network is described. Default: 8.",
            min=1,
            max=NETWORK_LEVELS,
        ),
    ] = None,
    network_floor: Annotated[
        Real,
        _option(
            _LIMITS,
            "Share of the rate that a job has alone on the network which each job shall keep. Default: 0.",
            min=0.0,
            max=MAX_FLOOR,
        ),
    ] = None,
    network_measure: Annotated[
        Text,
        _option(
            _LIMITS,
            "Longest time for which a job on several nodes has precedence on the network while its traffic"
            " is being measured. Default: 0s, no precedence.",
        ),
    ] = None,
    solver: Annotated[
        Text,
        _option(
            _SOLVING, "portfolio, pricing, greedy, cp-sat, lp, cbc or cvxpy. Default: portfolio."
        ),
    ] = None,
    gap: Annotated[
        Real, _option(_SOLVING, "Relative gap to the bound at which solving stops. Default: 1e-4.")
    ] = None,
    seed: Annotated[
        Whole,
        _option(_SOLVING, "Seed of all random choices. Default: 0.", min=0, max=limits.MAX_SEED),
    ] = None,
    solve_limit: Annotated[
        Text,
        _option(_SOLVING, "Longest solving time, e.g. 5s. Default: the time that the call leaves."),
    ] = None,
) -> scheduler_pb2.RoundOptions:
    """Return the options on changes and on how the round is solved."""
    chosen = scheduler_pb2.RoundOptions(
        run_to_completion=run_to_completion,
        replan_spacing=replan_spacing,
        max_changes=max_changes,
        defragment_every_rounds=defragment_every,
        solver=solver,
        gap=gap,
        seed=seed,
        network_levels=network_levels,
        network_floor=network_floor,
    )
    _read(chosen.min_run, "--min-run", min_run)
    _read(chosen.network_measure, "--network-measure", network_measure)
    _read(chosen.solve_limit, "--solve-limit", solve_limit)
    return chosen


def _merge_options(
    *,
    best: scheduler_pb2.RoundOptions,
    timely: scheduler_pb2.RoundOptions,
    bounded: scheduler_pb2.RoundOptions,
) -> scheduler_pb2.RoundOptions:
    """Return the options that were given, and no others.

    Raises:
        InvalidInput: an option is invalid. The error names it as on the command line.
    """
    for part in (timely, bounded):
        best.MergeFrom(part)
    return best


round_options: Callable[..., scheduler_pb2.RoundOptions] = _merge_options
for _parameter, _group in (
    ("best", _objective_options),
    ("timely", _deadline_options),
    ("bounded", _limit_options),
):
    round_options = options.with_options(round_options, _parameter, _group)


def override_options(
    recorded: scheduler_pb2.RoundOptions, named: scheduler_pb2.RoundOptions
) -> None:
    """Replace the ``recorded`` options by those that are ``named``.

    If another scheduler is named, the recorded parameters are dropped, which belong to theirs.
    """
    if named.HasField("scheduler") and named.scheduler != recorded.scheduler:
        recorded.ClearField("scheduler_parameters")
    for field, value in named.ListFields():
        if field.message_type is not None:  # otherwise a Duration would be merged field by field
            getattr(recorded, field.name).CopyFrom(value)
    recorded.MergeFrom(named)


def with_round_options(command: Callable[..., None]) -> Callable[..., None]:
    """Return ``command`` with the options of a round in place of its parameter ``named``."""
    example = EXAMPLES[command.__name__]
    epilog = GRAMMAR.format(unset=UNSET[command.__name__])
    return options.with_options(command, "named", round_options, f"{epilog}\nExample: {example}\n")


def _check(option: str, read: Callable[[], object]) -> None:
    try:
        read()
    except InvalidInput as wrong:
        raise InvalidInput(option, wrong.problem) from wrong


def _read(
    duration: duration_pb2.Duration, option: str, text: str | None, never: bool = False
) -> None:
    """Set ``duration`` from ``text``, if given. If ``never``, the text may be "never"."""
    if never and text == NEVER:
        duration.FromSeconds(limits.MAX_DURATION_S)
    elif text:
        duration.CopyFrom(options.to_duration(options.parse_seconds(option, text)))
