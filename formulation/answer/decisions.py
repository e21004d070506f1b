"""The decision of a round for each job: the difference between its current and its chosen state."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from enum import StrEnum
from operator import attrgetter
from typing import Final, NamedTuple

import numpy as np

from tessera.formulation.answer.placement import Gang, Placement, changed_gangs, current_gangs
from tessera.formulation.answer.solution import Solution
from tessera.formulation.base.resources import amounts_of, name_amounts
from tessera.formulation.base.tables import Bools, Floats, Ints
from tessera.formulation.base.values import NO_CELL, CellKey
from tessera.formulation.job.lifecycle import ACTIVE, JobState
from tessera.formulation.job.reasons import Reason
from tessera.formulation.round.admission import Admission
from tessera.formulation.round.problem import Problem, migration_price
from tessera.formulation.round.statement import Statement
from tessera.formulation.state.replans import Replan, start_duration_s, unsaved_s
from tessera.formulation.state.snapshot import Snapshot


class DecisionKind(StrEnum):
    """The effect of a round on a job."""

    START = "start"  # waited, now runs
    KEEP = "keep"  # continues unchanged
    RESIZE = "resize"  # other GPU count, same type
    RETYPE = "retype"  # other GPU type
    REPLAN = "replan"  # the very same GPUs, other pipeline degree or execution plan
    MOVE = "move"  # other GPUs, as many of the same type
    SUSPEND = "suspend"  # ran, now waits
    REJECT = "reject"  # can never run
    WAIT = "wait"  # waited, keeps waiting


CHANGES_GPUS = frozenset(
    {
        DecisionKind.START,
        DecisionKind.RESIZE,
        DecisionKind.RETYPE,
        DecisionKind.REPLAN,
        DecisionKind.MOVE,
    }
)
"""Kinds that give the job a new allocation, and so a new generation. Its program restarts."""


class Decision(NamedTuple):
    """The outcome of a round for one job. It is a tuple because a round makes one for every job.

    ``cell``, ``rate`` (samples/s on the shape it was given) and ``gang`` describe what the job runs
    on after the round. If it does not run, they are ``NO_CELL``, 0 and None. ``restart_price`` is
    the restart cost that was charged, in units of the objective. ``reason`` says why the job does
    not run, or why it is replanned, and is None otherwise. ``admitted`` is true if its deadline is promised.
    ``opportunistic`` is true if it was started past a blocked job and gives way to it later.
    """

    job: int
    kind: DecisionKind
    cell: CellKey = NO_CELL
    rate: float = 0.0
    restart_price: float = 0.0
    gang: Gang | None = None
    reason: Reason | None = None
    admitted: bool = False
    opportunistic: bool = False


def make_decisions(
    snapshot: Snapshot,
    statement: Statement,
    solution: Solution,
    placement: Placement,
    reasons: Mapping[int, Reason],
    admission: Admission | None = None,
    now: Mapping[int, Gang] | None = None,
) -> list[Decision]:
    """Return one decision for each job of the snapshot, in its order.

    ``reasons`` says why each job that is not placed does not run. A waiting job that can never run
    is rejected. ``now`` is ``current_gangs(snapshot)``; if it is None, it is computed here.
    """
    now = current_gangs(snapshot) if now is None else now
    promised = np.array(admission.admitted if admission is not None else snapshot.jobs.admitted)
    promised[list(statement.lapsed)] = False
    stuck = ~snapshot.jobs.may_run()
    for job in placement.gangs.keys() & np.flatnonzero(stuck).tolist():
        # The checker has already refused this.
        raise AssertionError(f"{snapshot.jobs.name[job]} may not run but was placed")
    runs = _running(snapshot, statement, solution, placement, promised, now)
    waits = np.ones(len(snapshot.jobs), dtype=np.bool_)
    waits[list(placement.gangs)] = False
    idle = np.flatnonzero(waits)
    kinds = _kinds_of_waiting(snapshot, statement, idle)
    waiting = (
        Decision(job=who, kind=kind, reason=reasons[who], admitted=admitted)
        for who, kind, admitted in zip(idle.tolist(), kinds, promised[idle].tolist(), strict=True)
    )
    return sorted([*runs, *waiting], key=attrgetter("job"))


def _kinds_of_waiting(snapshot: Snapshot, statement: Statement, job: Ints) -> list[DecisionKind]:
    """Return the decision for each ``job`` (int64[waiting]), none of which runs."""
    rejected = np.zeros(len(snapshot.jobs), dtype=np.bool_)
    rejected[list(statement.rejected)] = True
    rejected &= snapshot.jobs.among([JobState.QUEUED])
    kinds = (DecisionKind.WAIT, DecisionKind.SUSPEND, DecisionKind.REJECT)
    which = np.where(rejected, 2, snapshot.jobs.among(ACTIVE))
    return [kinds[k] for k in which[job].tolist()]


def _running(
    snapshot: Snapshot,
    statement: Statement,
    solution: Solution,
    placement: Placement,
    promised: Bools,
    now: Mapping[int, Gang],
) -> Iterator[Decision]:
    """Return the decision for each job that is placed."""
    problem, jobs = statement.problem, snapshot.jobs
    job = np.array(list(placement.gangs), dtype=np.int64)
    column = solution.choice[job]
    cell = _placed_cells(problem, placement, job, column, now)
    kind = _kinds(snapshot, problem, placement, job, cell, now)
    starts = np.array([its is DecisionKind.START for its in kind], dtype=np.bool_)
    rates = _rates(problem, placement, cell).tolist()
    past = np.where(starts, statement.opportunistic[job], jobs.opportunistic[job])
    admits = np.zeros(len(jobs), dtype=np.bool_)
    admits[list(statement.admits)] = True
    return map(
        Decision,
        job.tolist(),
        kind,
        problem.cells.keys(cell),
        rates,
        _prices(problem, placement, job, column).tolist(),
        placement.gangs.values(),
        _whys(snapshot, problem, job, cell, kind, rates, now),
        (promised[job] | admits[job]).tolist(),
        past.tolist(),
    )


_KINDS: Final = (
    DecisionKind.START,
    DecisionKind.RETYPE,
    DecisionKind.RESIZE,
    DecisionKind.MOVE,
    DecisionKind.REPLAN,
    DecisionKind.KEEP,
)
"""Kinds of running jobs. The first that applies is taken."""


def _kinds(
    snapshot: Snapshot,
    problem: Problem,
    placement: Placement,
    job: Ints,
    cell: Ints,
    now: Mapping[int, Gang],
) -> list[DecisionKind]:
    jobs, cells = snapshot.jobs, problem.cells
    moved = changed_gangs(placement.gangs, now)
    owns = np.array([one in now for one in placement.gangs], dtype=np.bool_)
    applies = [
        ~(owns & jobs.among(ACTIVE)[job]),
        jobs.current_type[job] != cells.gpu_type[cell],
        jobs.current_gpus[job] != cells.gpus[cell],
        np.array([one in moved for one in placement.gangs], dtype=np.bool_),
        (jobs.current_degree[job] != cells.pipeline_degree[cell])
        | (jobs.current_plan[job] != cells.plan[cell]),
    ]
    return [_KINDS[k] for k in np.select(applies, range(5), 5).tolist()]


def _whys(
    snapshot: Snapshot,
    problem: Problem,
    job: Ints,
    cell: Ints,
    kinds: Sequence[DecisionKind],
    rates: Sequence[float],
    now: Mapping[int, Gang],
) -> list[Reason | None]:
    """Return why each placed job is replanned, or None.

    The restart seconds of the snapshot include the training that is repeated.
    """
    whys: list[Reason | None] = [None] * len(kinds)
    jobs, cells, plans = snapshot.jobs, problem.cells, snapshot.plans
    replanned = [k for k, kind in enumerate(kinds) if kind is DecisionKind.REPLAN]
    repeated_s, takes_s = unsaved_s(snapshot), start_duration_s(snapshot)
    for k in replanned:
        j, row, gang = int(job[k]), int(cell[k]), now[int(job[k])]
        # Without a current column, the job could not have stayed as it was.
        own = int(problem.cell[problem.current[j]]) if problem.current[j] >= 0 else -1
        replan = Replan(
            plan=plans[int(cells.plan[row])],
            pipeline_degree=int(cells.pipeline_degree[row]),
            former_plan=plans[int(jobs.current_plan[j])],
            gpus=gang.gpus,
            restart_s=float(takes_s[j]),
            unsaved_s=float(repeated_s[j]),
            former_rate=cells.rate_on(own, gang.nodes) if own >= 0 else 0.0,
            rate=rates[k],
            **name_amounts(
                int(needs[row] - needs[own]) if own >= 0 else 0 for needs in amounts_of(cells)
            ),
        )
        whys[k] = replan.explain()
    return whys


def _placed_cells(
    problem: Problem, placement: Placement, job: Ints, column: Ints, now: Mapping[int, Gang]
) -> Ints:
    """Return the row of Cells that each placed job really runs on, int64[placed].

    On another shape than that of its column, a job gets the fastest Cell for it. A job that stays
    as it is keeps its Cell.
    """
    cell: Ints = problem.cell[column]
    nodes = np.array([len(gang.members) for gang in placement.gangs.values()], dtype=np.int64)
    moved = changed_gangs(placement.gangs, now)
    for k in np.flatnonzero(nodes != problem.cells.nodes[cell]).tolist():
        if job[k] in moved or problem.current[job[k]] != column[k]:
            cell[k] = problem.cells.row_on(int(cell[k]), int(nodes[k]))
    return cell


def _rates(problem: Problem, placement: Placement, cell: Ints) -> Floats:
    """Return samples/s of each placed job on the shape that it was given, float64[placed]."""
    rates: Floats = problem.cells.rate[cell]
    nodes = np.array([len(gang.members) for gang in placement.gangs.values()], dtype=np.int64)
    for k in np.flatnonzero(nodes != problem.cells.nodes[cell]).tolist():
        rates[k] = problem.cells.rate_on(int(cell[k]), int(nodes[k]))
    return rates


def _prices(problem: Problem, placement: Placement, job: Ints, column: Ints) -> Floats:
    """Return the restart cost that each placed job is charged, float64[placed]."""
    price = problem.restart_price[column].astype(np.float64)
    fewest = problem.cells.nodes[problem.cell[column]].tolist()
    for k, (moved, gang) in enumerate(placement.gangs.items() if placement.migrated else ()):
        if moved in placement.migrated:
            nodes = 0 if gang.nodes == fewest[k] else gang.nodes
            price[k] = migration_price(problem, int(job[k]), int(column[k]), nodes)
    return price / problem.scale
