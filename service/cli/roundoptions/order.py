"""The options on deadlines."""

from __future__ import annotations

from enum import StrEnum
from typing import Annotated, Final

from tessera.service.cli.roundoptions.values import (
    Text,
    panel_option,
    read_duration,
)
from tessera.v1 import scheduler_pb2

_DEADLINES: Final = "Deadlines"


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
) -> scheduler_pb2.RoundOptions:
    """Return the options on promised deadlines."""
    chosen = scheduler_pb2.RoundOptions(
        deadlines="" if deadlines is DeadlineTreatment.AUTO else deadlines,
    )
    read_duration(chosen.round, "--round-length", round_length)
    return chosen
