"""The options of a round, which ``round``, ``replay`` and ``solve`` share."""

from __future__ import annotations

from collections.abc import Callable
from enum import StrEnum
from typing import Annotated, Any, Final, TypeAlias

import typer
from google.protobuf import duration_pb2

from tessera.formulation.errors import InvalidInput
from tessera.formulation.grammar import LEXICOGRAPHIC, OBJECTIVES, parse
from tessera.formulation.policy import MAX_CAUTION, NETWORK_LEVELS, Policy
from tessera.service.cli import limits, options
from tessera.v1 import scheduler_pb2

NEVER: Final = "never"
MAX_FLOOR: Final = 0.99
"""The largest floor, as a share of a job's rate alone. Two jobs that meet cannot both have all."""

GRAMMAR: Final = f"""\
An objective is a name ({", ".join(OBJECTIVES)}),
a sum of names such as '0.7*throughput + 0.3*jct', or stages in order: 'max-min within 5% then throughput'
makes the worst-off jobs as well off as can be, then gives away up to 5 % of that for throughput. The names
{", ".join(LEXICOGRAPHIC)} compare job by job and have no sum.

An option that is not given is taken from the recorded round (`replay`), else from the server's standing
policy (`TESSERA_POLICY`), else it has its default.
"""
"""Part of the help of every command that decides a round."""

EXAMPLES: Final = {
    "schedule": "tessera round --dry-run --objective 'deadline then jct' --queue-order --promote-after 2h",
    "replay": "tessera replay 2 --objective 'deadline then jct'",
    "solve": "tessera solve round.json --objective 'deadline then jct'",
}
"""An example for each command that decides a round, by the function's name."""


class Deadlines(StrEnum):
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


def _best(
    *,
    objective: Annotated[
        Text,
        _option(
            _OBJECTIVE, "What is best, e.g. throughput (default) or 'deadline then jct'; see above."
        ),
    ] = None,
    scheduler: Annotated[
        Text,
        _option(_OBJECTIVE, "A published policy decides instead, e.g. fcfs; '': none (default)."),
    ] = None,
    raw_throughput: Annotated[
        Flag,
        _option(
            _OBJECTIVE,
            "Sum samples/s as they are, or normalised by job (default).",
            "--raw-throughput/--normalised-throughput",
        ),
    ] = None,
    queue_weights: Annotated[
        Text, _option(_OBJECTIVE, "Factors on weights by queue, e.g. 1:4,2:1; others have 1.")
    ] = None,
    restart_horizon: Annotated[
        Text, _option(_OBJECTIVE, "Over what a restart must pay off; by default 1h.")
    ] = None,
    max_restart_share: Annotated[
        Real,
        _option(
            _OBJECTIVE,
            "A restart never costs more of a Cell's value; by default 0.9.",
            min=0.0,
            max=1.0,
        ),
    ] = None,
    cost_of: Annotated[
        CostOf | None, _option(_OBJECTIVE, "What cost counts; by default dollars.")
    ] = None,
    rate_floor: Annotated[
        Real,
        _option(
            _OBJECTIVE,
            "cost runs no job below this share of its usual rate; by default 0.5.",
            min=0.0,
            max=1.0,
        ),
    ] = None,
    fairness_levels: Annotated[
        Whole,
        _option(
            _OBJECTIVE,
            "How many of the worst-off jobs a fairness objective settles; by default 4.",
            min=1,
            max=limits.MAX_FAIRNESS_LEVELS,
        ),
    ] = None,
    caution: Annotated[
        Real,
        _option(
            _OBJECTIVE,
            "Take uncertain estimates to be slower by so many standard deviations; by default 0.",
            min=0.0,
            max=MAX_CAUTION,
        ),
    ] = None,
) -> scheduler_pb2.RoundOptions:
    """Return the options on the objective."""
    _check("--objective", lambda: parse(objective or "throughput"))
    _check("--queue-weights", lambda: Policy(queue_weights=queue_weights or ""))
    found = scheduler_pb2.RoundOptions(
        objective=objective,
        scheduler=scheduler,
        raw_throughput=raw_throughput,
        queue_weights=queue_weights,
        max_restart_share=max_restart_share,
        cost_of=cost_of,
        rate_floor=rate_floor,
        fairness_levels=fairness_levels,
        caution=caution,
    )
    _read(found.restart_horizon, "--restart-horizon", restart_horizon)
    return found


def _timely(
    *,
    deadlines: Annotated[
        Deadlines | None,
        _option(
            _DEADLINES,
            "Promise jobs' deadlines round by round (myopic) or by a plan over rounds to come"
            " (look-ahead), plan without a promise (planned), or only keep what was promised (keep)."
            " Default: auto, which is look-ahead if the objective names deadline, else keep.",
        ),
    ] = None,
    round_length: Annotated[
        Text,
        _option(_DEADLINES, "Time to the next round; by default the server's period, else 300s."),
    ] = None,
    queue_order: Annotated[
        Flag,
        _option(
            _QUEUES,
            "Launch by queue (`--priority`) and arrival, not by value alone.",
            "--queue-order/--no-queue-order",
        ),
    ] = None,
    promote_after: Annotated[
        Text,
        _option(
            _QUEUES,
            "A job that has waited so long, e.g. 2h, counts as one queue higher; never (default).",
        ),
    ] = None,
    opportunistic: Annotated[
        Flag,
        _option(
            _QUEUES,
            "With --queue-order: start jobs past a blocked one, suspend them once it fits.",
            "--opportunistic/--no-opportunistic",
        ),
    ] = None,
    reserve_after: Annotated[
        Text,
        _option(
            _QUEUES, "Reserve GPUs for the first job that has waited so long; never (default)."
        ),
    ] = None,
) -> scheduler_pb2.RoundOptions:
    """Return the options on promised deadlines and on the order of jobs."""
    found = scheduler_pb2.RoundOptions(
        deadlines="" if deadlines is Deadlines.AUTO else deadlines,
        queue_order=queue_order,
        opportunistic=opportunistic,
    )
    _read(found.round, "--round-length", round_length)
    _read(found.promote_after, "--promote-after", promote_after, never=True)
    _read(found.reserve_after, "--reserve-after", reserve_after, never=True)
    return found


def _bounded(
    *,
    run_to_completion: Annotated[
        Flag, _option(_LIMITS, "No launched job is suspended.", "--run-to-completion/--preempt")
    ] = None,
    min_run: Annotated[
        Text, _option(_LIMITS, "No job is moved, resized or suspended before it has run so long.")
    ] = None,
    max_changes: Annotated[
        Whole,
        _option(
            _LIMITS,
            "At most so many running jobs are moved, resized or suspended; -1: any number.",
            min=-1,
            max=limits.MAX_CHANGES,
        ),
    ] = None,
    defragment_every: Annotated[
        Whole,
        _option(
            _LIMITS,
            "Rounds between defragmentations; 0: never.",
            min=0,
            max=limits.MAX_DEFRAGMENT_EVERY,
        ),
    ] = None,
    network_levels: Annotated[
        Whole,
        _option(
            _LIMITS,
            "Levels of network priority, where the cluster's network is described; by default 8.",
            min=1,
            max=NETWORK_LEVELS,
        ),
    ] = None,
    network_floor: Annotated[
        Real,
        _option(
            _LIMITS,
            "Share of its rate alone that each job shall have on the network; by default 0.",
            min=0.0,
            max=MAX_FLOOR,
        ),
    ] = None,
    network_measure: Annotated[
        Text,
        _option(
            _LIMITS,
            "A job on several nodes goes first on the network until its traffic is measured, at most so"
            " long; by default 0s: not.",
        ),
    ] = None,
    solver: Annotated[
        Text, _option(_SOLVING, "portfolio (default), cp-sat, greedy, lp, cbc or cvxpy.")
    ] = None,
    gap: Annotated[
        Real, _option(_SOLVING, "Stop at this gap to the bound; by default 1e-4.")
    ] = None,
    seed: Annotated[
        Whole, _option(_SOLVING, "Seed of whatever is random.", min=0, max=limits.MAX_SEED)
    ] = None,
    solve_limit: Annotated[Text, _option(_SOLVING, "Solve for at most this long, e.g. 5s.")] = None,
) -> scheduler_pb2.RoundOptions:
    """Return the options on changes and on how the round is solved."""
    found = scheduler_pb2.RoundOptions(
        run_to_completion=run_to_completion,
        max_changes=max_changes,
        defragment_every_rounds=defragment_every,
        solver=solver,
        gap=gap,
        seed=seed,
        network_levels=network_levels,
        network_floor=network_floor,
    )
    _read(found.min_run, "--min-run", min_run)
    _read(found.network_measure, "--network-measure", network_measure)
    _read(found.solve_limit, "--solve-limit", solve_limit)
    return found


def _asked(
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


asked: Callable[..., scheduler_pb2.RoundOptions] = _asked
for _parameter, _group in (("best", _best), ("timely", _timely), ("bounded", _bounded)):
    asked = options.with_options(asked, _parameter, _group)


def over(recorded: scheduler_pb2.RoundOptions, named: scheduler_pb2.RoundOptions) -> None:
    """Replace the ``recorded`` options by those that are ``named``."""
    for known, value in named.ListFields():
        if known.message_type is not None:  # otherwise a Duration would be merged part by part
            getattr(recorded, known.name).CopyFrom(value)
    recorded.MergeFrom(named)


def with_round_options(command: Callable[..., None]) -> Callable[..., None]:
    """Return ``command`` with all options of ``asked`` in place of its parameter ``named``."""
    example = EXAMPLES[command.__name__]
    return options.with_options(command, "named", asked, f"{GRAMMAR}\nExample: {example}\n")


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
        duration.CopyFrom(options.duration(options.seconds(option, text)))
