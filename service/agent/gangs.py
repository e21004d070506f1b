"""Gangs that an agent must run: what follows from the messages of servers, and their files."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final

from google.protobuf import json_format
from google.protobuf.duration_pb2 import Duration

from tessera.formulation.base.errors import InvalidInput
from tessera.formulation.job.launch import LaunchSpec, SecretVariable
from tessera.service.agent.isolation import UnsuitableNode
from tessera.v1 import agents_pb2 as pb

LIVE_PHASES: Final = frozenset(
    {pb.ObservedGang.STARTING, pb.ObservedGang.RUNNING, pb.ObservedGang.STOPPING}
)
"""Phases in which a gang occupies its GPUs."""

GANG_FORMAT: Final = 1
"""The format of the files of gangs. A release that could not read an earlier one raises it."""

GangKey = tuple[str, int]
"""A job and its generation."""


def key_of(gang: pb.DesiredGang | pb.ObservedGang) -> GangKey:
    """Return the job and the generation."""
    return gang.job, gang.generation


def nodes_of(gang: pb.DesiredGang) -> list[str]:
    """Return the nodes of this agent on which the gang has members."""
    return [share.node for share in gang.shares]


def devices_of(gang: pb.DesiredGang) -> frozenset[tuple[str, int]]:
    """Return the (node, GPU index) pairs that the gang occupies here."""
    return frozenset((share.node, gpu) for share in gang.shares for gpu in share.gpu_indices)


def to_seconds(duration: Duration) -> float:
    """Return the seconds of a duration. They are 0 if it is not set."""
    return duration.ToNanoseconds() / 1e9


def read_launch(gang: pb.DesiredGang) -> LaunchSpec:
    """Return the way in which the gang's program is started.

    Raises:
        UnsuitableNode: this agent cannot use it, because the server is of a later release.
    """
    m = gang.launch
    try:
        return LaunchSpec(
            runtime=m.runtime,
            env=dict(m.env),
            workdir=m.workdir,
            image=m.image,
            secrets=tuple(SecretVariable(variable=s.variable, name=s.name) for s in m.secrets),
            staging_command=tuple(m.staging_command),
            user=m.user,
            progress_pattern=m.progress_pattern,
            stall_limit_s=to_seconds(m.stall_limit),
            stop_grace_s=to_seconds(m.stop_grace),
            tuning_space=m.tuning_space,
            tuning_budget_s=to_seconds(m.tuning_budget),
            until_exit=m.until_exit,
        )
    except InvalidInput as error:
        raise UnsuitableNode(
            "runtime",
            f"this agent cannot use the job's launch; upgrade tessera on its node: {error}",
        ) from error


def gang_to_json(gang: pb.DesiredGang) -> dict[str, Any]:
    """Return ``gang`` as a JSON object, without what only a start needs or each message repeats.

    These are the plans to try, and the part in the network plan.

    Raises:
        UnsuitableNode: a value of the launch cannot be written.
    """
    message = pb.DesiredGang()
    message.CopyFrom(gang)
    message.ClearField("network")
    message.ClearField("tuning_plans")
    try:
        plain = json_format.MessageToDict(message, preserving_proto_field_name=True)
    except (json_format.Error, ValueError) as error:  # e.g. a duration of a million years
        raise UnsuitableNode("launch", f"{error}; upgrade tessera on this node") from error
    return {"format": GANG_FORMAT, "gang": plain}


def gang_from_json(value: Mapping[str, Any]) -> pb.DesiredGang:
    """Return the gang that ``gang_to_json`` has written.

    Raises:
        ValueError: no agent of this release has written it.
    """
    if value.get("format") != GANG_FORMAT:
        raise ValueError(
            f"its format is {value.get('format')!r}, and this release reads {GANG_FORMAT}; let gangs end"
            " before another release of the agent takes their node over"
        )
    try:
        return json_format.ParseDict(value.get("gang", {}), pb.DesiredGang())
    except json_format.ParseError as error:
        raise ValueError(str(error)) from error
