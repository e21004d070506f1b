"""The options on deadlines and on the order in which jobs start."""

from __future__ import annotations

from enum import StrEnum
from typing import Annotated, Final

from tessera.service.cli.roundoptions.values import (
    Flag,
    Text,
    panel_option,
    read_duration,
)
from tessera.v1 import scheduler_pb2

_DEADLINES: Final = "Deadlines"
_QUEUES: Final = "Queues"


class DeadlineTreatment(StrEnum):
    """The ways in which deadlines are treated."""

    AUTO = "auto"
    IGNORE = "ignore"
    KEEP = "keep"
    MYOPIC = "myopic"
    LOOK_AHEAD = "look-ahead"
    PLANNED = "planned"


def order_options(
    *,
    deadlines: Annotated[
        DeadlineTreatment | None,
        panel_option(
            _DEADLINES,
            "How deadlines are treated. myopic: promise them round by round. look-ahead: promise them by a"
            " schedule over future rounds. planned: make that schedule without a promise. keep: only keep"
            " promises already made. ignore: ignore deadlines. Default: auto, which is look-ahead if the"
            " objective names deadline, and keep otherwise.",
        ),
    ] = None,
    round_length: Annotated[
        Text,
        panel_option(_DEADLINES, "Time to the next round. Default: the server's period, or 300s."),
    ] = None,
    queue_order: Annotated[
        Flag,
        panel_option(
            _QUEUES,
            "Launch jobs by queue (`--priority`) and arrival instead of by value alone.",
            "--queue-order/--no-queue-order",
        ),
    ] = None,
    promote_after: Annotated[
        Text,
        panel_option(
            _QUEUES,
            "Promote a job by one queue each time it has waited this long, e.g. 2h. Default: never.",
        ),
    ] = None,
    opportunistic: Annotated[
        Flag,
        panel_option(
            _QUEUES,
            "With --queue-order: start jobs ahead of a blocked job, and suspend them once it fits.",
            "--opportunistic/--no-opportunistic",
        ),
    ] = None,
    reserve_after: Annotated[
        Text,
        panel_option(
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
    read_duration(chosen.round, "--round-length", round_length)
    read_duration(chosen.promote_after, "--promote-after", promote_after, never=True)
    read_duration(chosen.reserve_after, "--reserve-after", reserve_after, never=True)
    return chosen
