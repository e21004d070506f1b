"""The way in which a job's program is started, as users state it and as agents get it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

from google.protobuf.duration_pb2 import Duration

from tessera.formulation.base.errors import InvalidInput
from tessera.formulation.base.secrets import holds_secret
from tessera.formulation.job.execution_plan import ExecutionPlan
from tessera.formulation.job.launch import LaunchSpec, SecretVariable, check_pattern
from tessera.formulation.job.runtimes import RUNTIMES
from tessera.formulation.job.stated_secrets import refuse_variables, refuse_words
from tessera.formulation.job.techniques import refuse_techniques
from tessera.formulation.records.jobs import JobSpec
from tessera.service import fields
from tessera.service.server.convert.generic import Reader, read_values, to_message, usual_readers
from tessera.v1 import launch_pb2 as pb

MAX_LAUNCH_CHARS: Final = 65_536
"""The largest number of characters of all texts of a launch. Agents get those of all their gangs."""

MAX_SHOWN_CHARS: Final = 80
"""The number of characters of a text of the caller's that an error repeats."""

USERS_RUNTIMES: Final = tuple(
    sorted(name for name, abilities in RUNTIMES.items() if abilities.is_for_users)
)
"""The names of the runtimes that a job may name."""


def to_launch(field: str, message: pb.Launch) -> LaunchSpec:
    """Return the launch that a user states. Raises InvalidInput."""
    m = message
    if m.runtime and m.runtime not in USERS_RUNTIMES:
        raise InvalidInput(
            f"{field}.runtime",
            f"{m.runtime[:MAX_SHOWN_CHARS]!r} is not a runtime of users' jobs; name one of"
            f" {', '.join(USERS_RUNTIMES)}",
        )
    if m.image:
        raise InvalidInput(
            f"{field}.image",
            "is for engines that run containers, and the runtimes of this release start programs of the"
            " node; leave it out, and install the program on the nodes",
        )
    _require_few_characters(field, m)
    values = read_values(field, m, LaunchSpec, _READERS)
    try:
        launch = LaunchSpec(**values)
        check_pattern("progress_pattern", launch.progress_pattern)
    except InvalidInput as wrong:
        raise InvalidInput(f"{field}.{wrong.field}", wrong.problem) from wrong
    refuse_variables(launch.env, f"{field}.env", f"{field}.secrets or --secret")
    refuse_words(launch.staging_command, f"{field}.staging_command", f"{field}.secrets or --secret")
    if launch.staging_command and not launch.staging_command[0]:
        raise InvalidInput(f"{field}.staging_command[0]", "must name the program to run")
    return launch


def require_runnable(field: str, spec: JobSpec) -> None:
    """Check that a user's job can run its command and its plans, can tune, and can decide its end.

    Its plans, stated or submitted, need nothing but the job's runtime and techniques.

    Raises InvalidInput.
    """
    runtime = RUNTIMES[spec.runtime]
    runtime.check_command(f"{field}.command", spec.command)
    if spec.launch.until_exit and not runtime.trains:
        raise InvalidInput(
            f"{field}.launch.until_exit",
            f"needs a program that decides, and the runtime {spec.runtime!r} starts none; leave it out, or"
            " state a command",
        )
    if spec.launch.tuning_space:
        _require_tuning(f"{field}.launch.tuning_space", spec)
    for name, plan in (("plan", spec.plan), ("submitted_plan", spec.submitted_plan)):
        if isinstance(plan, ExecutionPlan):
            _require_plan(f"{field}.{name}", spec, plan)


def of_launch(spec: JobSpec) -> pb.Launch:
    """Return the message of a job's launch, which always names the runtime."""
    return to_message(spec.launch, pb.Launch, runtime=spec.runtime)


def _require_plan(field: str, spec: JobSpec, plan: ExecutionPlan) -> None:
    if problem := RUNTIMES[spec.runtime].refuse_plan(plan):
        raise InvalidInput(
            field,
            f"{problem}; the runtime {spec.runtime!r} cannot run it, so state another plan or another"
            " runtime",
        )
    if problem := refuse_techniques(plan, spec.techniques):
        raise InvalidInput(
            field, f"{problem}; state another plan, or name all techniques that the script can use"
        )


def _require_tuning(field: str, spec: JobSpec) -> None:
    if not RUNTIMES[spec.runtime].tunes:
        names = ", ".join(name for name, runtime in RUNTIMES.items() if runtime.tunes)
        raise InvalidInput(
            field,
            f"needs a runtime whose programs try plans ({names}), and the job has {spec.runtime!r};"
            " leave it out, or name such a runtime",
        )
    if spec.plan is not None:
        raise InvalidInput(
            field,
            "contradicts plan, which is the only plan of the job; leave one of them out",
        )


def _to_secrets(field: str, messages: Sequence[pb.Secret]) -> tuple[SecretVariable, ...]:
    secrets = []
    for index, message in enumerate(messages):
        if holds_secret(message.name):
            raise InvalidInput(
                f"{field}[{index}].name",
                "must be the name of a file on the nodes, and not the secret",
            )
        try:
            secrets.append(SecretVariable(variable=message.variable, name=message.name))
        except InvalidInput as wrong:
            raise InvalidInput(f"{field}[{index}].{wrong.field}", wrong.problem) from wrong
    return tuple(secrets)


def _to_seconds(field: str, value: Duration) -> float:
    """Return the seconds of a duration that is set."""
    length_s = fields.seconds_of_duration(field, value)
    if not length_s:
        raise InvalidInput(field, "must be longer than 0 s; leave it out for the default")
    return length_s


_READERS: Final[dict[str, Reader | None]] = {
    **usual_readers(pb.Launch, LaunchSpec),
    "secrets": _to_secrets,
    "stall_limit": _to_seconds,
    "stop_grace": _to_seconds,
    "tuning_budget": _to_seconds,
}


def _require_few_characters(field: str, message: pb.Launch) -> None:
    """Check the size of a launch before its parts, some of which take long to check."""
    count = (
        sum(len(name) + len(value) for name, value in message.env.items())
        + sum(len(secret.variable) + len(secret.name) for secret in message.secrets)
        + sum(map(len, message.staging_command))
        + len(message.workdir)
        + len(message.progress_pattern)
    )
    if count > MAX_LAUNCH_CHARS:
        raise InvalidInput(
            field, f"must have at most {MAX_LAUNCH_CHARS:,} characters in total; it has {count:,}"
        )
