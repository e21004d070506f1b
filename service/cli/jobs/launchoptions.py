"""The options and file entries that say how a job's program is started."""

from __future__ import annotations

import shlex
from collections.abc import Iterable, Mapping, Sequence
from typing import Annotated, Any, Final

import typer

from tessera.estimator.files.userfiles import read_text
from tessera.formulation.base.errors import InvalidInput
from tessera.formulation.base.secrets import holds_secret
from tessera.formulation.job.stated_secrets import refuse_variables
from tessera.service.cli import options
from tessera.v1 import jobs_pb2, launch_pb2

MAX_FILE_BYTES: Final = 2**20
"""The size of a file of variables, far beyond what a job may have."""

COMMENT: Final = "#"
"""The beginning of a line of a file of variables that is skipped."""

_PANEL: Final = "The job's program"


def _option(text: str, *names: str, metavar: str) -> Any:
    return typer.Option(*names, help=text, metavar=metavar, rich_help_panel=_PANEL)


def program_options(
    command: Annotated[
        str,
        _option(
            "Command that starts the job's program, quoted as in a shell. It runs without a shell, on each"
            " node. --runtime torchrun, deepspeed or megatron runs the script that it names on each GPU,"
            " and --runtime jax on each node.",
            "--command",
            metavar="COMMAND",
        ),
    ] = "",
    runtime: Annotated[
        str,
        _option(
            "Runtime that starts the program: command, torchrun, deepspeed, megatron, jax, alpa, or"
            " replay, which trains nothing. Default: command if there is a --command, otherwise replay.",
            metavar="NAME",
        ),
    ] = "",
    env: Annotated[
        list[str] | None,
        _option(
            "Variable of the program's environment. Everyone who sees the job sees its value."
            " Repeatable.",
            metavar="NAME=VALUE",
        ),
    ] = None,
    env_from_file: Annotated[
        str,
        _option(
            "File of variables, each on a line as NAME=VALUE. Lines that are empty or begin with # are"
            " skipped. --env has precedence.",
            metavar="FILE",
        ),
    ] = "",
    workdir: Annotated[
        str,
        _option(
            "Absolute path of the directory in which the program starts. Default: a directory of the job"
            " that its nodes share.",
            metavar="DIR",
        ),
    ] = "",
    secret: Annotated[
        list[str] | None,
        _option(
            "Variable that holds a secret, and the name of the tenant's file on the nodes that contains it"
            " (`tessera-agent --secrets-dir`). Never write the secret here. Repeatable.",
            metavar="VARIABLE=NAME",
        ),
    ] = None,
    staging_command: Annotated[
        str,
        _option(
            "Command that runs on each node before the program starts, e.g. to copy data. It is quoted as"
            " in a shell, and runs without one.",
            metavar="COMMAND",
        ),
    ] = "",
    user: Annotated[
        str,
        _option(
            "User of the nodes' operating system that the program runs as. The agents must allow it.",
            metavar="USER",
        ),
    ] = "",
    progress_pattern: Annotated[
        str,
        _option(
            "Regular expression that finds progress in the output of the first rank. It has the group"
            " (?P<iteration>...), and may have the group (?P<loss>...).",
            metavar="REGEX",
        ),
    ] = "",
    stall_limit: Annotated[
        str,
        _option(
            "Time without progress after which the program is ended as hanging, e.g. 30m. Default: the"
            " longer of 10 min and 20 iterations. The staging command has as long. Default for it: 30 min.",
            metavar="DURATION",
        ),
    ] = "",
    stop_grace: Annotated[
        str,
        _option(
            "Time that the program has after SIGTERM to write a checkpoint and exit, e.g. 2m. Default: that"
            " of the agents.",
            metavar="DURATION",
        ),
    ] = "",
    until_exit: Annotated[
        bool,
        typer.Option(
            "--until-exit",
            help="Let the program decide when the job is done: by exiting with status 0. --iterations is then"
            " the expected number. Default: the job is done once its program has reported all iterations"
            " and exits with status 0.",
            rich_help_panel=_PANEL,
        ),
    ] = False,
    tuning_space: Annotated[
        str,
        _option(
            "Execution plans that the program tries at launch: halves, arena or full. The fastest one is"
            " used from then on. Default: none.",
            metavar="SPACE",
        ),
    ] = "",
    tuning_budget: Annotated[
        str,
        _option(
            "Time for which the program may try plans at launch, e.g. 20m. Default: 10m.",
            metavar="DURATION",
        ),
    ] = "",
) -> jobs_pb2.Job:
    """Return a job that has only the command and the launch that the options state."""
    variables = _read_variables("--env-from-file", env_from_file) if env_from_file else {}
    variables |= options.unique_pairs(
        "--env", (_parse_variable("--env", text) for text in env or ())
    )
    launch = make_launch(
        "--env",
        "--secret",
        env=variables,
        secrets=[_parse_variable("--secret", text, "VARIABLE=NAME") for text in secret or ()],
        runtime=runtime,
        workdir=workdir,
        staging_command=_split_words("--staging-command", staging_command),
        user=user,
        progress_pattern=progress_pattern,
        tuning_space=tuning_space,
        until_exit=until_exit,
    )
    if stall_limit:
        length_s = options.parse_seconds("--stall-limit", stall_limit)
        launch.stall_limit.CopyFrom(options.to_duration(length_s))
    if stop_grace:
        length_s = options.parse_seconds("--stop-grace", stop_grace)
        launch.stop_grace.CopyFrom(options.to_duration(length_s))
    if tuning_budget:
        length_s = options.parse_seconds("--tuning-budget", tuning_budget)
        launch.tuning_budget.CopyFrom(options.to_duration(length_s))
    job = jobs_pb2.Job(command=_split_words("--command", command))
    set_launch(job, launch)
    return job


def make_launch(
    variables_at: str,
    secrets_at: str,
    *,
    env: Mapping[str, str],
    secrets: Iterable[tuple[str, str]],
    **values: Any,
) -> launch_pb2.Launch:
    """Return the launch with these variables and (variable, name) pairs of secrets.

    Raises:
        InvalidInput: a value looks like a secret. It does not repeat the value.
    """
    refuse_variables(env, variables_at, secrets_at.rpartition(": ")[2])
    messages = [launch_pb2.Secret(variable=variable, name=name) for variable, name in secrets]
    for message in messages:
        if holds_secret(message.name):
            raise InvalidInput(
                secrets_at,
                f"{message.variable} needs the name of a file on the nodes, and not the secret",
            )
    return launch_pb2.Launch(env=env, secrets=messages, **values)


def set_launch(job: jobs_pb2.Job, launch: launch_pb2.Launch) -> None:
    """Set the launch of ``job``, unless it states nothing."""
    if launch != launch_pb2.Launch():
        job.launch.CopyFrom(launch)


def _parse_variable(where: str, text: str, form: str = "NAME=VALUE") -> tuple[str, str]:
    """Return the parts of ``NAME=VALUE``. The error does not repeat the text, which may be a secret."""
    name, equals, value = text.partition("=")
    if not name or not equals:
        raise InvalidInput(where, f"must have the form {form}")
    return name, value


def _read_variables(where: str, path: str) -> dict[str, str]:
    """Return the variables of a file. Raises InvalidInput."""
    try:
        text = read_text(path, MAX_FILE_BYTES)
    except InvalidInput as error:
        raise InvalidInput(where, f"{path} {error.problem}") from error
    variables: dict[str, str] = {}
    for number, ending in enumerate(text.split("\n"), 1):
        line = ending.removesuffix("\r")
        if not line.strip() or line.lstrip().startswith(COMMENT):
            continue
        name, value = _parse_variable(f"{where}: {path}, line {number}", line)
        variables[name.strip()] = value
    return variables


def _split_words(option: str, command: str) -> Sequence[str]:
    try:
        return shlex.split(command)
    except ValueError as error:
        raise InvalidInput(option, f"must be quoted as in a shell: {error}") from error
