"""What is committed for each job in a round: the difference between what is and what was chosen."""

from __future__ import annotations

from dataclasses import dataclass, replace
from enum import StrEnum

import numpy as np

from formulation.admission import Admission
from formulation.lifecycle import ACTIVE, SCHEDULABLE, JobState
from formulation.placement import Gang, Placement, current_gangs
from formulation.problem import Problem
from formulation.reasons import Reason
from formulation.snapshot import STATES, Snapshot
from formulation.solution import Solution
from formulation.statement import Statement


class DecisionKind(StrEnum):
    """What a round does to a job."""

    START = "start"  # waited, now runs
    KEEP = "keep"  # goes on as it is
    RESIZE = "resize"  # other GPU count, same type
    RETYPE = "retype"  # other GPU type
    REPLAN = "replan"  # same GPUs in number and type, other pipeline degree or plan
    MOVE = "move"  # same Cell, other GPUs
    SUSPEND = "suspend"  # ran, now waits
    REJECT = "reject"  # can never run
    WAIT = "wait"  # waited, goes on waiting


CHANGES_GPUS = frozenset(
    {
        DecisionKind.START,
        DecisionKind.RESIZE,
        DecisionKind.RETYPE,
        DecisionKind.REPLAN,
        DecisionKind.MOVE,
    }
)
"""Kinds that give the job a new allocation, hence a new generation."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Decision:
    """One job's fate in a round.

    ``gpu_type`` (index into ``Snapshot.gpu_types``, -1: none), ``gpus``, ``pipeline_degree``, ``plan``
    (index into ``Snapshot.plans``), ``rate`` (samples/s on the shape it was given) and ``gang`` describe
    the Cell it runs on after the round; ``restart_price`` (units of the objective) is what was charged.
    ``reason`` says why it does not run; None where it does. ``admitted``: its deadline is promised.
    ``opportunistic``: it was started past a blocked job and gives way to it later.
    """

    job: int
    kind: DecisionKind
    gpu_type: int = -1
    gpus: int = 0
    pipeline_degree: int = 0
    plan: int = 0
    rate: float = 0.0
    restart_price: float = 0.0
    gang: Gang | None = None
    reason: Reason | None = None
    admitted: bool = False
    opportunistic: bool = False


def decide(
    snapshot: Snapshot,
    statement: Statement,
    solution: Solution,
    placement: Placement,
    reasons: dict[int, Reason],
    admission: Admission | None = None,
) -> list[Decision]:
    """Return one decision for each job of the snapshot, in its order.

    ``reasons`` says why each job that is not placed does not run. A waiting job that can never run is
    rejected.
    """
    now, problem = current_gangs(snapshot), statement.problem
    promised = np.array(admission.admitted if admission is not None else snapshot.jobs.admitted)
    promised[list(statement.lapsed)] = False
    found: list[Decision] = []
    for job in range(len(snapshot.jobs)):
        gang = placement.gangs.get(job)
        state = STATES[int(snapshot.jobs.state[job])]
        if gang is None:
            kind = DecisionKind.SUSPEND if state in ACTIVE else DecisionKind.WAIT
            if job in statement.rejected and state is JobState.QUEUED:
                kind = DecisionKind.REJECT
            found.append(
                Decision(job=job, kind=kind, reason=reasons[job], admitted=bool(promised[job]))
            )
            continue
        if state not in SCHEDULABLE:  # the checker has refused this already
            raise AssertionError(f"{snapshot.jobs.name[job]} is {state} but was placed")
        runs = _run(snapshot, problem, solution, placement, job, gang, now.get(job))
        past = bool(
            statement.opportunistic[job]
            if runs.kind is DecisionKind.START
            else snapshot.jobs.opportunistic[job]
        )
        met = bool(promised[job]) or job in statement.admits
        found.append(replace(runs, admitted=met, opportunistic=past))
    return found


def _run(
    snapshot: Snapshot, problem: Problem, solution: Solution, placement: Placement,
    job: int, gang: Gang, before: Gang | None,
) -> Decision:  # fmt: skip
    column = int(solution.choice[job])
    cell, cells, jobs = int(problem.cell[column]), problem.cells, snapshot.jobs
    price = float(problem.restart_price[column])
    if job in placement.migrated:
        gross = float(problem.value[column] + problem.restart_price[column])
        price = abs(gross) * float(problem.restart_share[job])
    if STATES[int(jobs.state[job])] not in ACTIVE or before is None:
        kind = DecisionKind.START
    elif jobs.current_type[job] != cells.gpu_type[cell]:
        kind = DecisionKind.RETYPE
    elif jobs.current_gpus[job] != cells.gpus[cell]:
        kind = DecisionKind.RESIZE
    elif (
        jobs.current_degree[job] != cells.pipeline_degree[cell]
        or jobs.current_plan[job] != cells.plan[cell]
    ):
        kind = DecisionKind.REPLAN
    else:
        kind = DecisionKind.KEEP if gang == before else DecisionKind.MOVE
    return Decision(
        job=job, kind=kind, gpu_type=int(cells.gpu_type[cell]), gpus=int(cells.gpus[cell]),
        pipeline_degree=int(cells.pipeline_degree[cell]), plan=int(cells.plan[cell]),
        rate=cells.rate_on(cell, gang.nodes), restart_price=price / problem.scale, gang=gang,
    )  # fmt: skip
