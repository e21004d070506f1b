"""The options of a round, for ``round``, ``replay``, ``solve``, ``policy set`` and ``whatif``.

They are the fields of the API's RoundOptions. Ten of them have a flag.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Annotated, Any, Final

import typer

from tessera.formulation.base.documents import POLICY
from tessera.formulation.base.errors import InvalidInput
from tessera.formulation.round.grammar import LEXICOGRAPHIC, OBJECTIVES
from tessera.formulation.round.policy import DEFAULT_OBJECTIVE
from tessera.service import roundvalues
from tessera.service.cli import options, yamlfile
from tessera.v1 import scheduler_pb2

SET: Final = "--set"

EMPTY_WORDS: Final = {"deadlines": "auto", "fair_share": "none"}
"""The words for the empty value of options, which is their default."""

GRAMMAR: Final = f"""\
An objective is a name ({", ".join(OBJECTIVES)}),
a weighted sum of names such as '0.7*throughput + 0.3*jct', or goals in order: 'max-min within 5% then
throughput' first makes the worst-off jobs as well off as possible, then gives up at most 5 % of that for
throughput. {", ".join(LEXICOGRAPHIC)} compare job by job, so they cannot be terms of a
sum.

{SET} and --options take every option of a round: {", ".join(roundvalues.OPTIONS)}.
docs/command-line.md explains them.

{{unset}}
"""
"""Part of the help of every command that decides a round. ``unset`` is a sentence of ``UNSET``."""

UNSET: Final = {
    "schedule": "Options that are not given are taken from the cluster's standing policy\n"
    "(`tessera policy show`). If it does not set them either, they have their defaults.",
    "set_policy": "Options that are not given stay as in the policy in force.",
    "replay": "Options that are not given stay as they were in the recorded round.",
    "solve": "Options that are not given have their defaults.",
    "ask_what_if": "Options of rounds that are given are for rounds with the change. All others, and\n"
    "rounds without the change, follow the cluster's standing policy (`tessera policy show`).",
}
"""The source of options that are not given, by the name of the command's function."""

EXAMPLES: Final = {
    "set_policy": "tessera policy set --objective 'deadline then jct' -m 'deadlines count now'",
    "schedule": "tessera round --dry-run --objective 'deadline then jct' --set change_spacing=10",
    "replay": "tessera replay 2 --objective 'deadline then jct'",
    "solve": "tessera solve round.json --objective 'deadline then jct'",
    "ask_what_if": "tessera whatif --add-nodes h100:4 --objective jct --hours 6",
}
"""An example for each command that decides a round, by the name of the command's function."""


def _option(text: str, *names: str, **settings: Any) -> Any:
    """Return an option of the help's panel on rounds, whose text names its default."""
    return typer.Option(
        *names, help=text, rich_help_panel="Options of the round", show_default=False, **settings
    )


def read_round_options(
    *,
    objective: Annotated[
        str | None,
        _option(
            "What to maximize or minimize, e.g. 'deadline then jct'; see above."
            f" Default: {DEFAULT_OBJECTIVE}."
        ),
    ] = None,
    scheduler: Annotated[
        str | None,
        _option(
            "A published scheduler that decides the round instead, e.g. fcfs, or a plug-in,"
            " MODULE:CLASS. Default: none ('')."
        ),
    ] = None,
    scheduler_parameters: Annotated[
        str | None,
        _option(
            "Parameters of that scheduler, e.g. depth=5,breadth=8 for arena. docs/command-line.md lists"
            " them with their defaults."
        ),
    ] = None,
    deadlines: Annotated[
        str | None,
        _option(
            "How deadlines are treated. myopic: promise them round by round. look-ahead: promise them by a"
            " schedule over future rounds. planned: make that schedule without a promise. keep: only keep"
            " promises already made. ignore: ignore deadlines. Default: auto, which is look-ahead if the"
            " objective names deadline, and keep otherwise."
        ),
    ] = None,
    fair_share: Annotated[
        str | None,
        _option(
            "Measure of fair shares: gpus, or drf for the dominant resource. Tenants that used more than"
            " their share count for less. Default: none, the past does not count."
        ),
    ] = None,
    keep_requests: Annotated[
        bool | None,
        _option(
            "Never suspend or shrink a running job for another's gain while it holds no more than it asked"
            " for. Default: keep.",
            "--keep-requests/--no-keep-requests",
        ),
    ] = None,
    promise_starts: Annotated[
        bool | None,
        _option(
            "Plan a start for each waiting job, and let no job of the same or a lower priority delay it."
            " Default: promise.",
            "--promise-starts/--no-promise-starts",
        ),
    ] = None,
    max_changes: Annotated[
        int | None,
        _option(
            "Maximum number of running jobs that are moved, resized or suspended. -1: no limit. Default: -1."
        ),
    ] = None,
    solver: Annotated[
        str | None,
        _option("portfolio, pricing, greedy, cp-sat, lp, cbc or cvxpy. Default: portfolio."),
    ] = None,
    seed: Annotated[int | None, _option("Seed of all random choices. Default: 0.")] = None,
    settings: Annotated[
        list[str] | None,
        _option("Any option of a round; see above. Repeatable.", SET, metavar="NAME=VALUE"),
    ] = None,
    file: Annotated[
        str,
        _option(
            "YAML file of options, e.g. {objective: jct, change_spacing: 10}. Other options here take"
            " precedence.",
            "--options",
            metavar="FILE",
        ),
    ] = "",
) -> scheduler_pb2.RoundOptions:
    """Return the options that were given, and no others.

    Raises:
        InvalidInput: an option is unknown or invalid. The error names it as on the command line.
    """
    flags = {
        "objective": objective,
        "scheduler": scheduler,
        "scheduler_parameters": scheduler_parameters,
        "deadlines": deadlines,
        "fair_share": fair_share,
        "keep_requests": keep_requests,
        "promise_starts": promise_starts,
        "max_changes": max_changes,
        "solver": solver,
        "seed": seed,
    }
    values = {name: value for name, value in flags.items() if value is not None}
    places = {name: f"--{name.replace('_', '-')}" for name in values}
    for text in settings or ():
        name, equals, value = text.partition("=")
        if not equals:
            raise InvalidInput(SET, f"{text!r} must be NAME=VALUE, e.g. max_changes=20")
        if name in values:
            raise InvalidInput(f"{SET} {name}", "has a value already; give it once")
        values[name], places[name] = value, f"{SET} {name}"
    for name, word in EMPTY_WORDS.items():
        if values.get(name) == word:
            values[name] = ""
    file_values = _read_file(file) if file else {}

    def place(name: str) -> str:
        return places.get(name, f"{file}: {name}")

    message = roundvalues.make_message({**file_values, **values}, place)
    roundvalues.check_message(message, place)
    return message


def _read_file(path: str) -> Mapping[Any, Any]:
    """Return the options in a YAML file. Raises InvalidInput."""
    documents = yamlfile.read_documents(yamlfile.read_text(path), path, POLICY)
    if len(documents) != 1 or not isinstance(documents[0], dict):
        raise InvalidInput(path, "must map names of options to values, e.g. objective: jct")
    return documents[0]


def override_options(
    message: scheduler_pb2.RoundOptions, changes: scheduler_pb2.RoundOptions
) -> None:
    """Replace options of ``message`` by ``changes``.

    If these name another scheduler, its parameters are dropped, which belong to the former one.
    """
    if changes.HasField("scheduler") and changes.scheduler != message.scheduler:
        message.ClearField("scheduler_parameters")
    for field, value in changes.ListFields():
        if field.message_type is not None:  # otherwise a Duration would be merged field by field
            getattr(message, field.name).CopyFrom(value)
    message.MergeFrom(changes)


def with_round_options(command: Callable[..., None]) -> Callable[..., None]:
    """Return ``command`` with the options of a round in place of its parameter ``named``."""
    example = EXAMPLES[command.__name__]
    epilog = GRAMMAR.format(unset=UNSET[command.__name__])
    return options.with_options(
        command, "named", read_round_options, f"{epilog}\nExample: {example}\n"
    )
