"""``tessera solve``: solve a saved snapshot in this process, without a server or a database."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from tessera.formulation.base.access import LOCAL
from tessera.formulation.base.clock import SystemClock
from tessera.formulation.base.plugins import is_reference
from tessera.modelling.files import read_snapshot
from tessera.service.cli.options import Output, OutputOption
from tessera.service.cli.rounds.roundoptions import with_round_options
from tessera.service.cli.rounds.rounds import (
    DEFAULT_TIME_LIMIT,
    Everything,
    OldDeadline,
    TimeLimit,
    limit_s,
    show_decided,
)
from tessera.service.server.convert.rounds import of_round, to_options
from tessera.service.server.rounds.deciding import decide_again
from tessera.solvers.plugins import load_named, require_kept_rules
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
    """Solve a saved snapshot on this machine, without a server, e.g. to try another policy on it.

    The scheduler, and objectives, may be plug-ins, MODULE:NAME, from the current folder or PYTHONPATH.
    """
    load_named(named.scheduler, named.objective)
    chosen, clock = to_options("options", named), SystemClock()
    end_s = clock.monotonic_s() + limit_s(time_limit, deadline)
    decided = decide_again(
        read_snapshot(snapshot),
        chosen,
        clock,
        remaining_s=lambda: end_s - clock.monotonic_s(),
        cancelled=lambda: False,
    )
    if is_reference(chosen.scheduler):
        require_kept_rules(chosen.scheduler, decided.summary.violations)
    message = of_round(decided, LOCAL.sees_tenant, summary_only=False)
    show_decided(message, output, everything=everything)
