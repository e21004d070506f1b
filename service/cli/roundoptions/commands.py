"""The options of a round as parameters of a command, with their help."""

from __future__ import annotations

from collections.abc import Callable
from typing import Final

from tessera.formulation.grammar import LEXICOGRAPHIC, OBJECTIVES
from tessera.service.cli import options
from tessera.service.cli.roundoptions.changes import change_options
from tessera.service.cli.roundoptions.objectives import objective_options
from tessera.service.cli.roundoptions.order import order_options
from tessera.service.cli.roundoptions.solving import solving_options
from tessera.v1 import scheduler_pb2

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
    "set_policy": "Options that are not given stay as in the policy in force.",
    "replay": "Options that are not given stay as they were in the recorded round.",
    "solve": "Options that are not given have their defaults.",
    "ask_what_if": "Options of rounds that are given are those of rounds with the change. All others, and\n"
    "rounds without the change, follow the cluster's standing policy (`tessera policy show`).",
}
"""The source of options that are not given, by the name of the command's function."""

EXAMPLES: Final = {
    "set_policy": "tessera policy set --objective 'deadline then jct' -m 'deadlines count now'",
    "schedule": "tessera round --dry-run --objective 'deadline then jct' --max-changes 20",
    "replay": "tessera replay 2 --objective 'deadline then jct'",
    "solve": "tessera solve round.json --objective 'deadline then jct'",
    "ask_what_if": "tessera whatif --add-nodes h100:4 --objective jct --hours 6",
}
"""An example for each command that decides a round, by the name of the command's function."""


def _merge_options(
    *,
    best: scheduler_pb2.RoundOptions,
    timely: scheduler_pb2.RoundOptions,
    bounded: scheduler_pb2.RoundOptions,
    solved: scheduler_pb2.RoundOptions,
) -> scheduler_pb2.RoundOptions:
    """Return the options that were given, and no others.

    Raises:
        InvalidInput: an option is invalid. The error names it as on the command line.
    """
    for part in (timely, bounded, solved):
        best.MergeFrom(part)
    return best


round_options: Callable[..., scheduler_pb2.RoundOptions] = _merge_options
for _parameter, _group in (
    ("best", objective_options),
    ("timely", order_options),
    ("bounded", change_options),
    ("solved", solving_options),
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
