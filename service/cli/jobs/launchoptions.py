"""The options that say how a job's program is started."""

from __future__ import annotations

from typing import Annotated, Any, Final, TypedDict

import typer

_PANEL: Final = "The job's program"


def _option(text: str, *names: str, metavar: str) -> Any:
    return typer.Option(*names, help=text, metavar=metavar, rich_help_panel=_PANEL)


class ProgramOptions(TypedDict):
    """The options of `submit` on a job's program, by the names of the fields that they state.

    An option that was not given is None.
    """

    command: Annotated[
        str | None,
        _option(
            "Command that starts the job's program, quoted as in a shell. It runs without a shell, on each"
            " node. --runtime torchrun, deepspeed or megatron runs the script that it names on each GPU,"
            " and --runtime jax on each node.",
            "--command",
            metavar="COMMAND",
        ),
    ]
    runtime: Annotated[
        str | None,
        _option(
            "Runtime that starts the program: command, torchrun, deepspeed, megatron, jax, alpa, or"
            " replay, which trains nothing. Default: command if there is a --command, otherwise replay.",
            metavar="NAME",
        ),
    ]
    env: Annotated[
        list[str] | None,
        _option(
            "Variable of the program's environment. Everyone who sees the job sees its value."
            " Repeatable.",
            metavar="NAME=VALUE",
        ),
    ]
    env_from_file: Annotated[
        str | None,
        _option(
            "File of variables, each on a line as NAME=VALUE. Lines that are empty or begin with # are"
            " skipped. --env has precedence.",
            metavar="FILE",
        ),
    ]
    workdir: Annotated[
        str | None,
        _option(
            "Absolute path of the directory in which the program starts. Default: a directory of the job"
            " that its nodes share.",
            metavar="DIR",
        ),
    ]
    secrets: Annotated[
        list[str] | None,
        _option(
            "Variable that holds a secret, and the name of the tenant's file on the nodes that contains it"
            " (`tessera-agent --secrets-dir`). Never write the secret here. Repeatable.",
            "--secret",
            metavar="VARIABLE=NAME",
        ),
    ]
    staging_command: Annotated[
        str | None,
        _option(
            "Command that runs on each node before the program starts, e.g. to copy data. It is quoted as"
            " in a shell, and runs without one.",
            metavar="COMMAND",
        ),
    ]
    user: Annotated[
        str | None,
        _option(
            "User of the nodes' operating system that the program runs as. The agents must allow it.",
            metavar="USER",
        ),
    ]
    progress_pattern: Annotated[
        str | None,
        _option(
            "Regular expression that finds progress in the output of the first rank. It has the group"
            " (?P<iteration>...), and may have the group (?P<loss>...).",
            metavar="REGEX",
        ),
    ]
    stall_limit: Annotated[
        str | None,
        _option(
            "Time without progress after which the program is ended as hanging, e.g. 30m. Default: the"
            " longer of 10 min and 20 iterations. The staging command has as long. Default for it: 30 min.",
            metavar="DURATION",
        ),
    ]
    stop_grace: Annotated[
        str | None,
        _option(
            "Time that the program has after SIGTERM to write a checkpoint and exit, e.g. 2m. Default: that"
            " of the agents.",
            metavar="DURATION",
        ),
    ]
    until_exit: Annotated[
        bool | None,
        typer.Option(
            "--until-exit",
            help="Let the program decide when the job is done: by exiting with status 0. --iterations is then"
            " the expected number. Default: the job is done once its program has reported all iterations"
            " and exits with status 0.",
            rich_help_panel=_PANEL,
        ),
    ]
    tuning_space: Annotated[
        str | None,
        _option(
            "Execution plans that the program tries at launch: halves, arena or full. The fastest one is"
            " used from then on. Default: none.",
            metavar="SPACE",
        ),
    ]
    tuning_budget: Annotated[
        str | None,
        _option(
            "Time for which the program may try plans at launch, e.g. 20m. Default: 10m.",
            metavar="DURATION",
        ),
    ]
