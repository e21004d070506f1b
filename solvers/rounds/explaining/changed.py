"""The reason of a job that runs: it started, stayed, gained, gave way, or had to leave its node."""

from __future__ import annotations

import numpy as np

from tessera.formulation.answer.decisions import Decision, DecisionKind
from tessera.formulation.answer.explanations.records import Displacement
from tessera.formulation.answer.explanations.words import join_names
from tessera.formulation.base.texts import Text, fill, join
from tessera.formulation.base.values import CellKey
from tessera.formulation.job.reasons import Reason, ReasonCode
from tessera.formulation.round.promises.nodes import sits_elsewhere
from tessera.formulation.state.snapshot import Snapshot
from tessera.solvers.rounds.explaining.trials import RATE_TOLERANCE
from tessera.solvers.rounds.plan import RoundOutcome

_NOTHING_TO_DO = "nothing to do"


def cell_in_words(snapshot: Snapshot, cell: CellKey) -> str:
    """Return a Cell in words, e.g. ``4 x a100``."""
    return f"{cell.gpus} x {snapshot.gpu_types[cell.gpu_type].name}"


def rate_before(snapshot: Snapshot, outcome: RoundOutcome, job: int) -> float:
    """Return samples/s of a running job before the round, on the nodes that it owned.

    It is 0 if the job did not run, or if nothing is known of its Cell any more.
    """
    jobs, cells = snapshot.jobs, outcome.problem.cells
    if jobs.current_gpus[job] <= 0:
        return 0.0
    same = cells.workload == jobs.workload[job]
    for name, value in jobs.key_at(job)._asdict().items():
        same &= getattr(cells, name) == value
    rows, nodes = np.flatnonzero(same), int(snapshot.nodes_owned()[job])
    if not len(rows):
        return 0.0
    return cells.rate_on(int(rows[0]), nodes) if nodes else float(cells.rate[rows].max())


def is_slower(snapshot: Snapshot, outcome: RoundOutcome, decision: Decision) -> bool:
    """Return whether a job that ran runs more slowly after the round, or not at all."""
    before = rate_before(snapshot, outcome, decision.job)
    return decision.rate < before * (1 - RATE_TOLERANCE)


def explain_running(
    snapshot: Snapshot,
    outcome: RoundOutcome,
    decision: Decision,
    displaced_by: tuple[Displacement, ...],
    *,
    by_scheduler: bool,
) -> Reason:
    """Return the reason of a decision that lets a job run. ``displaced_by`` took its GPUs.

    If a published scheduler decides, what a Cell is worth does not explain its choice.
    """
    cell, kind = cell_in_words(snapshot, decision.cell), decision.kind
    if kind is DecisionKind.START:
        return _reason(ReasonCode.STARTED, f"the job starts on {cell}")
    if kind is DecisionKind.KEEP:
        return _reason(ReasonCode.UNCHANGED, f"the job stays on {cell}")
    job, jobs, problem = decision.job, snapshot.jobs, outcome.problem
    before = cell_in_words(snapshot, jobs.key_at(job))
    same_cell = jobs.key_at(job) == decision.cell
    change = f"the job goes from {before} to {cell}"
    if before == cell and not same_cell:
        change = f"the job goes to other GPUs, {cell}, by another execution plan"
    evidence = (
        ("before", before),
        ("after", cell),
        ("samples/s before", f"{rate_before(snapshot, outcome, job):.6g}"),
        ("samples/s after", f"{decision.rate:.6g}"),
        ("restart price", f"{decision.restart_price:.6g}"),
    )
    if _leaves_node(snapshot, job):
        return Reason(
            code=ReasonCode.NODE_LEFT,
            message=f"{change}, because it may not stay on a node that it ran on",
            next_step=_NOTHING_TO_DO,
            evidence=evidence,
        )
    takers = [d.job for d in displaced_by]
    cause: Text = ""
    if takers:
        cause = fill(", because {jobs} got GPUs that it held", jobs=join_names(takers))
    if kind is DecisionKind.MOVE and same_cell:
        return Reason(
            code=ReasonCode.GAVE_WAY if takers else ReasonCode.MADE_ROOM,
            message=fill(
                "the job goes to other GPUs of the same Cell, {cell}{cause}",
                cell=cell,
                cause=cause or ", which reduces fragmentation",
            ),
            next_step=_NOTHING_TO_DO,
            evidence=evidence,
        )
    now, chosen = int(problem.current[job]), int(outcome.solution.choice[job])
    gross = problem.value + problem.restart_price
    if now < 0:
        return Reason(
            code=ReasonCode.CELL_EXCLUDED,
            message=f"{change}, because a promise, a pin or a bound excludes the Cell that it ran on",
            next_step="change the job's pin or bounds on GPUs if it shall run on that Cell",
            evidence=evidence,
        )
    loses = is_slower(snapshot, outcome, decision) if by_scheduler else gross[chosen] < gross[now]
    if loses:
        return Reason(
            code=ReasonCode.GAVE_WAY,
            message=join("", (change, cause or ", which leaves more to other jobs")),
            next_step="raise the job's weight",
            evidence=evidence,
        )
    return Reason(
        code=ReasonCode.GAINED,
        message=f"{change}, which is worth more than its restart costs",
        next_step=_NOTHING_TO_DO,
        evidence=evidence,
    )


def _reason(code: ReasonCode, message: str) -> Reason:
    return Reason(code=code, message=message, next_step=_NOTHING_TO_DO)


def _leaves_node(snapshot: Snapshot, job: int) -> bool:
    """Return whether the job owns GPUs of a node that is not schedulable, or that it may not use."""
    return bool(snapshot.disturbed()[job] or sits_elsewhere(snapshot)[job])
