"""The effect of hostile callers on the other callers of a server."""

from __future__ import annotations

from typing import Annotated

import typer
from rich.console import Console

from tessera.benchmarks.harness.registry import register_case
from tessera.benchmarks.service.hostile.attacks import KINDS
from tessera.benchmarks.service.hostile.lab import GRACE_S, filled_lab
from tessera.benchmarks.service.hostile.siege import COMBINED_PHASE, Siege
from tessera.benchmarks.service.hostile.verdicts import AttackPhase, sum_up, waived_figures
from tessera.formulation.errors import InvalidInput
from tessera.simulator.figures import Report

_EXAMPLES = 5


@register_case(
    "hostile",
    smoke={"load": 0.01, "seconds": 2.0, "kinds": COMBINED_PHASE},
    health_max_s=("<=", 1.0),
    other_round_excess_s=("<=", 0.0),
    other_failures=("==", 0),
    leases_lost=("==", 0),
    rss_growth_mib=("<=", 256.0),
    threads_stuck=("==", 0),
    transactions_stuck=("==", 0),
    internal_errors=("==", 0),
    invariants_broken=("==", 0),
    servers_ended=("==", 0),
    sigterm_over_grace_s=("<=", 1.0),
)
def attack_server(
    load: Annotated[
        float, typer.Option(help="Share of the full attack to run.", min=0.001, max=1.0)
    ] = 0.25,
    seconds: Annotated[
        float, typer.Option(help="Length of each attack in seconds.", min=1.0)
    ] = 12.0,
    kinds: Annotated[
        str,
        typer.Option(
            help=f"Comma-separated attacks: {', '.join(KINDS)}, {COMBINED_PHASE}. Default: all."
        ),
    ] = "",
    seed: int = 0,
) -> Report:
    """Attack a running server in every known way, and measure what its other callers see.

    A real server with PostgreSQL has two clusters with real agents. Hostile callers, each kind in a process
    of its own, attack in turn and then together, while a well-behaved caller submits, lists and schedules on
    the second cluster and another asks for health. The full attack has 2,000 unread watches, 32 threads that
    submit 10,000 jobs a call, lists of 100,000 jobs and 64 callers of rounds with an hour's deadline.

    Each row of the table is a phase. Health must be answered within 1 s. A round of the other cluster may
    last twice its longest time alone (``other_round_alone_s``) and 1 s. Ten seconds after the callers
    have left, no thread of the server computes (``threads_stuck``) and at most 256 MiB of memory are left.
    No lease runs out, no answer is an internal error, what is stored is consistent, and SIGTERM during the
    attack ends the server within its grace (at most 10 s) and 1 s. A control process that answers health and
    does nothing else runs next to the server. Where it answers later than 0.25 s, the bounds of health and
    rounds are waived.
    """
    err = Console(stderr=True)
    phases: list[AttackPhase] = []
    grace_s = min(GRACE_S, 2 * seconds)
    with (
        filled_lab(load, seed, grace_s) as lab,
        Siege(lab, seconds=seconds, load=load, seed=seed) as siege,
    ):
        err.print("hostile: alone")
        alone = siege.rest()
        for name in chosen_phases(kinds):
            phases.append(siege.attack(name, list(KINDS) if name == COMBINED_PHASE else [name]))
            _tell(err, phases[-1])
        missing = siege.find_missing()
        sigterm_s = siege.terminate()
    figures = sum_up(alone, phases, sigterm_s=sigterm_s, grace_s=grace_s)
    figures["invariants_broken"] += len(missing)
    err.print(
        f"hostile: the server ended {sigterm_s:.1f} s after SIGTERM; {len(missing)} jobs are missing"
    )
    return Report(
        seed=seed,
        figures=figures,
        waived=waived_figures(figures),
        table=[phase.row() for phase in (alone, *phases)],
    )


def chosen_phases(kinds: str) -> list[str]:
    """Return the names of the phases in ``kinds``, or of all phases if it is empty.

    Raises:
        InvalidInput: a name is unknown.
    """
    known = [*KINDS, COMBINED_PHASE]
    chosen = [name.strip() for name in kinds.split(",") if name.strip()] or known
    for name in chosen:
        if name not in known:
            raise InvalidInput("--kinds", f"{name!r} is unknown; choose from {', '.join(known)}")
    return chosen


def _tell(err: Console, phase: AttackPhase) -> None:
    """Print the results of a phase to standard error."""
    row = phase.row()
    shown = {k: f"{v:.2f}" if isinstance(v, float) else v for k, v in row.items() if k != "phase"}
    err.print(
        f"hostile: {phase.name}: " + "; ".join(f"{k} {v}" for k, v in shown.items()),
        highlight=False,
    )
    for line in (
        *phase.tally.examples,
        *list(dict.fromkeys(phase.logged))[:_EXAMPLES],
        *list(dict.fromkeys(phase.failures))[:_EXAMPLES],
        *phase.broken,
    ):
        err.print(f"    {line[:500]}", highlight=False, markup=False)
