"""What is committed for each job in a round: the difference between what is and what was chosen."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from enum import StrEnum
from typing import Final, NamedTuple

import numpy as np

from formulation.admission import Admission
from formulation.lifecycle import ACTIVE, SCHEDULABLE, JobState
from formulation.placement import Gang, Placement, current_gangs
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
    reasons: Mapping[int, Reason],
    admission: Admission | None = None,
    now: Mapping[int, Gang] | None = None,
) -> list[Decision]:
    """Return one decision for each job of the snapshot, in its order.

    ``reasons`` says why each job that is not placed does not run. A waiting job that can never run is
    rejected. ``now`` is ``current_gangs``, if that is known already.
    """
    now = current_gangs(snapshot) if now is None else now
    states = [STATES[code] for code in snapshot.jobs.state.tolist()]
    promised = np.array(admission.admitted if admission is not None else snapshot.jobs.admitted)
    promised[list(statement.lapsed)] = False
    kept = promised.tolist()
    runs = _running(snapshot, statement, solution, placement)
    found: list[Decision] = []
    for job, state in enumerate(states):
        cell = runs.get(job)
        if cell is None:
            kind = DecisionKind.SUSPEND if state in ACTIVE else DecisionKind.WAIT
            if job in statement.rejected and state is JobState.QUEUED:
                kind = DecisionKind.REJECT
            found.append(Decision(job=job, kind=kind, reason=reasons[job], admitted=kept[job]))
            continue
        if state not in SCHEDULABLE:  # the checker has refused this already
            raise AssertionError(f"{snapshot.jobs.name[job]} is {state} but was placed")
        kind, before = cell.kind, now.get(job)
        if state not in ACTIVE or before is None:
            kind = DecisionKind.START
        elif kind is DecisionKind.KEEP and cell.gang != before:
            kind = DecisionKind.MOVE
        found.append(
            Decision(
                job=job, kind=kind, gpu_type=cell.gpu_type, gpus=cell.gpus,
                pipeline_degree=cell.pipeline_degree, plan=cell.plan, rate=cell.rate,
                restart_price=cell.restart_price, gang=cell.gang,
                admitted=kept[job] or job in statement.admits,
                opportunistic=cell.opportunistic[kind is DecisionKind.START],
            )
        )  # fmt: skip
    return found


class _Running(NamedTuple):
    """What a job that was placed runs on. ``kind`` is how that differs from its Cell now."""

    kind: DecisionKind
    gpu_type: int
    gpus: int
    pipeline_degree: int
    plan: int
    rate: float
    restart_price: float
    gang: Gang
    opportunistic: tuple[bool, bool]  # as it is, and if it starts


def _running(
    snapshot: Snapshot, statement: Statement, solution: Solution, placement: Placement
) -> dict[int, _Running]:
    """Return what each placed job runs on, by array for all of them."""
    problem, jobs = statement.problem, snapshot.jobs
    job = np.array(list(placement.gangs), dtype=np.int64)
    column = solution.choice[job]
    cells, cell = problem.cells, problem.cell[column]
    price = problem.restart_price[column].astype(np.float64)
    moves = np.array([job in placement.migrated for job in placement.gangs], dtype=np.bool_)
    gross = np.abs(problem.value[column] + problem.restart_price[column]).astype(np.float64)
    price[moves] = (gross * problem.restart_share[job])[moves]
    gpu_type, gpus = cells.gpu_type[cell], cells.gpus[cell]
    degree, plan = cells.pipeline_degree[cell], cells.plan[cell]
    kind = np.select(
        [
            jobs.current_type[job] != gpu_type,
            jobs.current_gpus[job] != gpus,
            (jobs.current_degree[job] != degree) | (jobs.current_plan[job] != plan),
        ],
        [0, 1, 2], 3,
    )  # fmt: skip
    gangs = list(placement.gangs.values())
    rate = cells.rate[cell]
    nodes = np.array([len(gang.members) for gang in gangs], dtype=np.int64)
    for k in np.flatnonzero(nodes != cells.nodes[cell]).tolist():
        rate[k] = cells.rate_on(int(cell[k]), gangs[k].nodes)
    opportunistic = zip(
        jobs.opportunistic[job].tolist(), statement.opportunistic[job].tolist(), strict=True
    )
    kinds = [_KINDS[k] for k in kind.tolist()]
    columns = (gpu_type, gpus, degree, plan, rate, price / problem.scale)
    rows = zip(kinds, *(values.tolist() for values in columns), gangs, opportunistic, strict=True)
    return dict(zip(placement.gangs, map(_Running._make, rows), strict=True))


_KINDS: Final = (
    DecisionKind.RETYPE, DecisionKind.RESIZE, DecisionKind.REPLAN, DecisionKind.KEEP
)  # fmt: skip
"""Kinds of jobs that run on, by the first of type, count, and degree or plan that differs."""
