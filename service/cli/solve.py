"""``tessera solve``: solve a saved snapshot in this process, without a server or a database."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from tessera.formulation.clock import SystemClock
from tessera.formulation.codec import decode
from tessera.formulation.errors import InvalidInput
from tessera.formulation.snapshot import Snapshot
from tessera.service.cli.options import Output, OutputOption
from tessera.service.cli.roundoptions import with_round_options
from tessera.service.cli.rounds import (
    DEFAULT_TIME_LIMIT,
    Everything,
    OldDeadline,
    TimeLimit,
    limit_s,
    show_decided,
)
from tessera.service.loop import decide_again
from tessera.service.rpc.convert.rounds import of_round, to_options
from tessera.v1 import scheduler_pb2


def add_commands(app: typer.Typer) -> None:
    """Add the command."""
    app.command("solve", rich_help_panel="Rounds")(solve)


@with_round_options
def solve(
    snapshot: Annotated[
        Path,
        typer.Argument(metavar="FILE", help="Snapshot, as written by `replay --save-snapshot`."),
    ],
    named: scheduler_pb2.RoundOptions,
    time_limit: TimeLimit = DEFAULT_TIME_LIMIT,
    deadline: OldDeadline = "",
    everything: Everything = False,
    output: OutputOption = Output.TABLE,
) -> None:
    """Solve a saved snapshot on this machine, without a server, e.g. to try another policy on it."""
    chosen, clock = to_options("options", named), SystemClock()
    end_s = clock.monotonic_s() + limit_s(time_limit, deadline)
    decided = decide_again(
        _read(snapshot),
        chosen,
        clock,
        remaining_s=lambda: end_s - clock.monotonic_s(),
        cancelled=lambda: False,
    )
    show_decided(of_round(decided, summary_only=False), output, everything=everything)


def _read(path: Path) -> Snapshot:
    try:
        saved = decode(path.read_bytes())
        if isinstance(saved, Snapshot):
            saved.traffic.require_readable()
    except OSError as error:
        raise InvalidInput(str(path), f"cannot be read: {error.strerror}") from error
    except InvalidInput as error:
        raise InvalidInput(str(path), f"is not a saved snapshot: {error}") from error
    if not isinstance(saved, Snapshot):
        raise InvalidInput(str(path), f"contains a {type(saved).__name__}, not a snapshot")
    return saved
