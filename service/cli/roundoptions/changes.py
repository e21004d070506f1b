"""The options on what a round may change."""

from __future__ import annotations

from typing import Annotated, Final

from tessera.formulation import limits
from tessera.formulation.policy import (
    MAX_SPACING,
    NETWORK_LEVELS,
)
from tessera.service.cli.roundoptions.values import (
    Flag,
    Real,
    Text,
    Whole,
    panel_option,
    read_duration,
)
from tessera.v1 import scheduler_pb2

_LIMITS: Final = "Limits on changes"

MAX_FLOOR: Final = 0.99
"""The largest floor, as a share of a job's rate alone. Two jobs that share a link cannot both have 1."""


def change_options(
    *,
    keep_requests: Annotated[
        Flag,
        panel_option(
            _LIMITS,
            "Never suspend or shrink a running job for another's gain while it holds no more than it asked"
            " for. Default: keep.",
            "--keep-requests/--no-keep-requests",
        ),
    ] = None,
    promise_starts: Annotated[
        Flag,
        panel_option(
            _LIMITS,
            "Plan a start for each waiting job, and let no job of the same or a lower priority delay it."
            " Default: promise.",
            "--promise-starts/--no-promise-starts",
        ),
    ] = None,
    change_spacing: Annotated[
        Real,
        panel_option(
            _LIMITS,
            "Number of restart times that a job runs before a round may suspend, move or resize it."
            " 0: no limit. Default: 4.",
            min=0.0,
            max=MAX_SPACING,
        ),
    ] = None,
    default_run: Annotated[
        Text,
        panel_option(
            _LIMITS,
            "Time that a job of unknown rate is taken to run, where rounds promise starts to other jobs."
            " Default: 1d.",
        ),
    ] = None,
    replan_spacing: Annotated[
        Real,
        panel_option(
            _LIMITS,
            "Number of restart times that a job runs before its plan may change on the GPUs that it has. The"
            " change must make up for its restart in that time. 0: no limit. Default: 20.",
            min=0.0,
            max=MAX_SPACING,
        ),
    ] = None,
    max_changes: Annotated[
        Whole,
        panel_option(
            _LIMITS,
            "Maximum number of running jobs that are moved, resized or suspended. -1: no limit. Default: -1.",
            min=-1,
            max=limits.MAX_CHANGES,
        ),
    ] = None,
    defragment_every: Annotated[
        Whole,
        panel_option(
            _LIMITS,
            "Number of rounds between two defragmentation passes. 0: never. Default: 12.",
            min=0,
            max=limits.MAX_DEFRAGMENT_EVERY,
        ),
    ] = None,
    network_levels: Annotated[
        Whole,
        panel_option(
            _LIMITS,
            "Number of network priority levels, if the cluster's network is described. Default: 8.",
            min=1,
            max=NETWORK_LEVELS,
        ),
    ] = None,
    network_floor: Annotated[
        Real,
        panel_option(
            _LIMITS,
            "Share of the rate that a job has alone on the network which each job shall keep. Default: 0.",
            min=0.0,
            max=MAX_FLOOR,
        ),
    ] = None,
    network_measure: Annotated[
        Text,
        panel_option(
            _LIMITS,
            "Longest time for which a job on several nodes has precedence on the network while its traffic"
            " is being measured. Default: 0s, no precedence.",
        ),
    ] = None,
) -> scheduler_pb2.RoundOptions:
    """Return the options on what a round may change."""
    chosen = scheduler_pb2.RoundOptions(
        keep_requests=keep_requests,
        promise_starts=promise_starts,
        change_spacing=change_spacing,
        replan_spacing=replan_spacing,
        max_changes=max_changes,
        defragment_every_rounds=defragment_every,
        network_levels=network_levels,
        network_floor=network_floor,
    )
    read_duration(chosen.default_run, "--default-run", default_run)
    read_duration(chosen.network_measure, "--network-measure", network_measure)
    return chosen
