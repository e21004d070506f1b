"""The independent checker of schedules that meet deadlines."""

from __future__ import annotations

import math
from collections.abc import Mapping
from types import MappingProxyType
from typing import Final

from tessera.formulation.cells import build_cells, find_narrowest
from tessera.formulation.check import Violation
from tessera.formulation.last_round import Legs
from tessera.formulation.lifecycle import ACTIVE
from tessera.formulation.lookahead.grid import SAME_S
from tessera.formulation.placement import current_gangs
from tessera.formulation.snapshot import STATE_CODE, Snapshot
from tessera.formulation.tables import Bools

WORK_TOLERANCE: Final = 1e-6
"""Share of a job's whole work by which a schedule may fall short, to allow for rounding."""


def find_schedule_violations(
    snapshot: Snapshot,
    legs: Legs,
    promised: Bools,
    reserved_gpus: Mapping[int, int] = MappingProxyType({}),
) -> list[Violation]:
    """Return every way in which ``legs`` fail to meet the deadlines of ``promised`` (bool[jobs]).

    The check uses plain loops over the legs and is independent of the slots. Each job has one Cell
    at a time. Capacity holds at every moment. Each leg that does not continue what runs now is
    charged restart time. All work is done by the deadline. ``reserved_gpus`` maps a GPU type to
    GPUs that others hold throughout.
    """
    violations: list[Violation] = []
    cells, gangs = build_cells(snapshot), current_gangs(snapshot)
    known_cells = find_narrowest(cells)
    disturbed, jobs = snapshot.disturbed(), snapshot.jobs
    active = {STATE_CODE[state] for state in ACTIVE}
    order: dict[int, list[int]] = {}
    for leg in range(len(legs)):
        order.setdefault(int(legs.job[leg]), []).append(leg)
    for job in range(len(jobs)):
        if not promised[job]:
            if job in order:
                violations.append(
                    Violation(rule="promised", detail=f"{jobs.name[job]} has legs but no promise")
                )
            continue
        trained, ends_s = 0.0, -math.inf
        for leg in sorted(order.get(job, []), key=lambda k: float(legs.start_s[k])):
            start_s = max(float(legs.start_s[leg]), snapshot.now_s)
            end_s = float(legs.end_s[leg])
            if start_s < ends_s - SAME_S:
                detail = f"{jobs.name[job]} has two Cells at {start_s:.3f}"
                violations.append(Violation(rule="one Cell at a time", detail=detail))
            ends_s = end_s
            spec = legs.key_at(leg)
            cell = known_cells.get((int(jobs.workload[job]), spec))
            if cell is None:
                violations.append(
                    Violation(rule="Cell exists", detail=f"{jobs.name[job]}: {tuple(spec)}")
                )
                continue
            rate, pause_s = float(cells.rate[cell]), float(jobs.restart_s[job])
            # A leg that continues what runs now pays only the rest of the last restart.
            runs_now = int(jobs.state[job]) in active and not disturbed[job]
            if start_s - snapshot.now_s < SAME_S and jobs.key_at(job) == spec and runs_now:
                if job in gangs:
                    rate = cells.rate_on(cell, gangs[job].nodes)
                since_s = float(jobs.since_s[job])
                pause_s = max(0.0, since_s + pause_s - snapshot.now_s) if since_s > 0 else 0.0
            usable_s = min(end_s, float(jobs.deadline_s[job])) - start_s
            trained += rate * max(0.0, usable_s - pause_s)
        batch = snapshot.workloads[int(jobs.workload[job])].global_batch
        left = float(jobs.iterations_left[job]) * batch
        if trained < left - WORK_TOLERANCE * float(jobs.iterations[job]) * batch:
            detail = (
                f"{jobs.name[job]} trains only {trained:.6g} of {left:.6g} samples by its deadline"
            )
            violations.append(Violation(rule="deadline", detail=detail))
    return [*violations, *_overfull(snapshot, legs, reserved_gpus)]


def _overfull(snapshot: Snapshot, legs: Legs, reserved_gpus: Mapping[int, int]) -> list[Violation]:
    """Return a violation where the legs together need more GPUs than are schedulable.

    There is one for each such moment and type. Use rises only where a leg starts, so only these
    moments are checked.
    """
    violations: list[Violation] = []
    schedulable = snapshot.schedulable_gpus()
    for at in sorted({max(s, snapshot.now_s) for s in legs.start_s.tolist()}):
        for kind, gpu_type in enumerate(snapshot.gpu_types):
            used = reserved_gpus.get(kind, 0)
            for leg in range(len(legs)):
                on = legs.start_s[leg] <= at + SAME_S and at + SAME_S < legs.end_s[leg]
                used += int(legs.gpus[leg]) if on and legs.gpu_type[leg] == kind else 0
            if used > schedulable[kind]:
                detail = (
                    f"{gpu_type.name}: {used} GPUs are used at {at:.3f}, but only"
                    f" {schedulable[kind]} are schedulable"
                )
                violations.append(Violation(rule="capacity", detail=detail))
    return violations
