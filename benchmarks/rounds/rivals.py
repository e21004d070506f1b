"""A contest of our solver with baselines on the same rounds, each in its own process."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Final

from tessera.benchmarks.harness.progress import track_steps
from tessera.benchmarks.rounds.contest import ProcessOutcome, SolvedRound, run_entry
from tessera.benchmarks.rounds.entries import ContestEntry
from tessera.formulation.base.errors import InvalidInput
from tessera.formulation.round.policy import Policy
from tessera.simulator.figures import Figure
from tessera.solvers.registry import make_solver

STOCK_SOLVERS: Final = ("cp-sat", "cbc", "highs")
"""The solvers that are used unchanged; the others are methods of peers."""
EQUALITY_TOLERANCE: Final = 1e-9
"""The relative difference within which two objectives count as equally good."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SolverRow:
    """A row of the table.

    ``reached_s`` is the time until the solver was at least as good as ours; if it never was, it is
    NaN.
    """

    solver: str
    ended: str
    round: SolvedRound | None
    reached_s: float
    peak_mib: float

    def shown(self, ours: SolvedRound) -> dict[str, Figure | str]:
        """Return the row as figures."""
        result = self.round
        row: dict[str, Figure | str] = {"solver": self.solver, "ended": self.ended}
        if result is not None:
            row["ended"] = result.status if self.ended == "done" else self.ended
        names = ("objective", "bound", "gap", "build_s", "solve_s", "total_s")
        row |= {name: getattr(result, name) if result else math.nan for name in names}
        row["of_ours"] = (
            result.objective / ours.objective if result and ours.objective else math.nan
        )
        row |= {"reached_s": self.reached_s, "peak_mib": self.peak_mib}
        row["cpu_s"] = result.cpu_s if result else math.nan
        row["proved_by"] = result.proved_by if result else ""
        row["verified"] = bool(result and result.verified)
        return row


def baselines_of(versus: str) -> tuple[str, ...]:
    """Return the baselines' names. Raises InvalidInput if there is no such solver."""
    names = tuple(filter(None, (name.strip() for name in versus.split(","))))
    for name in names:
        make_solver(name)
    return names


def compares_levels(objective: str) -> bool:
    """Return whether a stage of the objective compares the worst-off jobs."""
    return any(stage.lexicographic for stage in Policy(objective=objective).stages)


def hold_contest(
    entry: ContestEntry, baselines: Sequence[str]
) -> tuple[ProcessOutcome, list[SolverRow]]:
    """Return the outcome of our solver, and a line for it and for each baseline."""
    make_solver(entry.solver)
    mine = run_entry(entry)
    ours = all_rounds(mine, entry)
    lines = [
        SolverRow(
            solver=entry.solver,
            ended=mine.ended,
            round=ours[0],
            reached_s=ours[0].total_s,
            peak_mib=mine.peak_mib,
        )
    ]
    for k in track_steps(len(baselines), "baselines"):
        baseline = replace(entry, solver=baselines[k], repeats=1)
        result = run_entry(baseline)
        first = result.rounds[0] if result.rounds else None
        reached_s = seconds_to_reach(ours[0], result)
        short = first is not None and math.isnan(reached_s) and first.gap <= entry.gap
        if short and baselines[k] in STOCK_SOLVERS:
            reached_s = seconds_to_reach(ours[0], run_entry(replace(baseline, gap=0.0)))
        lines.append(
            SolverRow(
                solver=baselines[k],
                ended=result.ended,
                round=first,
                reached_s=reached_s,
                peak_mib=result.peak_mib,
            )
        )
    return mine, lines


def all_rounds(mine: ProcessOutcome, entry: ContestEntry) -> tuple[SolvedRound, ...]:
    """Return the rounds of our process. Raises InvalidInput if it did not solve all of them."""
    if mine.ended != "done":
        raise InvalidInput(
            "solver", f"{entry.solver} {mine.ended} in {len(mine.rounds)} of {entry.repeats} rounds"
        )
    return mine.rounds


def seconds_to_reach(ours: SolvedRound, baseline: ProcessOutcome) -> float:
    """Return the seconds until the baseline was at least as good as ours by the first goal.

    If it never was, return NaN.
    """
    least = ours.sign * ours.objective - EQUALITY_TOLERANCE * abs(ours.objective)
    result = baseline.rounds[0] if baseline.rounds else None
    build_s = result.build_s if result else ours.build_s
    told = result.answers if result else baseline.early
    for at_s, objective in told:
        if ours.sign * objective >= least:
            return build_s + at_s
    if result is not None and result.verified and ours.sign * result.objective >= least:
        return result.total_s
    return math.nan
