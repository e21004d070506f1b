"""The allocation log of a run as a file.

The log has the GPUs that each job held and the times, but no computed progress. The format is JSON
Lines in UTF-8. Each line is an object whose ``kind`` says what it describes. ``docs/internals/simulator.md``
describes every field.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from tessera.formulation.base.values import Cell, Workload
from tessera.formulation.records.clusters import NodeSpec
from tessera.formulation.records.estimates import EstimateRecord
from tessera.simulator.log import Segment
from tessera.simulator.overheads import Overheads
from tessera.simulator.profiling import true_estimates
from tessera.simulator.run import Result

FORMAT: Final = "tessera-allocations/2"


@dataclass(frozen=True, slots=True, kw_only=True)
class LoggedJob:
    """A job of the log, with the iterations after which it ends."""

    name: str
    arrival_s: float
    iterations: int
    workload: Workload


@dataclass(frozen=True, slots=True, kw_only=True)
class LoggedSegment:
    """A segment of the log, which refers to jobs and nodes by name.

    At its end, a failure undid ``lost`` iterations.
    """

    job: str
    start_s: float
    ready_s: float
    end_s: float
    cell: Cell
    members: tuple[tuple[str, tuple[int, ...]], ...]
    slowdown: float
    ended_by: str
    lost: float


@dataclass(frozen=True, slots=True, kw_only=True)
class AllocationLog:
    """The contents of a run's log."""

    ended_s: float
    overheads: Overheads
    nodes: tuple[NodeSpec, ...]
    profiles: tuple[EstimateRecord, ...]
    jobs: tuple[LoggedJob, ...]
    segments: tuple[LoggedSegment, ...]


def log_of(result: Result) -> AllocationLog:
    """Return the log of a run. Its profiles are the true ones of its jobs' workloads.

    Profiling tasks are jobs of the log, after the others, with profiles of their own.
    """
    scenario, overheads = result.scenario, result.conditions.overheads
    arrivals = (*scenario.arrivals, *result.tasks)
    ended_early = result.conditions.ended_early
    trained = {one.spec.workload for one in arrivals}
    profiles = (*scenario.profiles, *true_estimates(scenario.gpu_types, overheads.profile_s))
    jobs = [one.spec.name for one in scenario.arrivals]
    tasks = [one.spec.name for one in result.tasks]
    return AllocationLog(
        ended_s=result.ended_s,
        overheads=overheads,
        nodes=tuple(
            NodeSpec(name=n.name, gpu_type=n.gpu_type, gpus=n.gpus) for n in scenario.nodes
        ),
        profiles=tuple(
            EstimateRecord(
                workload=e.workload,
                cell=e.cell,
                iter_time_s=e.iter_time_s,
                source=e.source,
                complete=e.complete,
            )
            for e in profiles
            if e.workload in trained
        ),
        jobs=tuple(
            LoggedJob(
                name=one.spec.name,
                arrival_s=float(one.arrival_s),
                workload=one.spec.workload,
                iterations=max(1, round(one.spec.iterations * ended_early.get(one.spec.name, 1.0))),
            )
            for one in arrivals
        ),
        segments=tuple(
            [_named(result.nodes, jobs, s) for s in result.segments]
            + [_named(result.nodes, tasks, s) for s in result.task_segments]
        ),
    )


def write_log(log: AllocationLog, path: Path) -> None:
    """Write the log to a file."""
    path.write_text("".join(f"{line}\n" for line in lines_of(log)), encoding="utf-8")


def lines_of(log: AllocationLog) -> Iterator[str]:
    """Yield the lines: the header, nodes, profiles, jobs, and segments.

    Segments of jobs come in order of their ends, then those of profiling tasks.
    """
    o = log.overheads
    table = {
        "save_s": o.save_s,
        "load_s": o.load_s,
        "search_s": sorted(o.search_s.items()),
        "profile_s": o.profile_s,
        "checkpoint_every_s": _finite(o.checkpoint_every_s),
    }
    yield _line("run", {"format": FORMAT, "ended_s": log.ended_s, "overheads": table})
    for n in log.nodes:
        yield _line("node", {"name": n.name, "type": n.gpu_type, "gpus": n.gpus})
    for e in log.profiles:
        c = e.cell
        cell = {
            "workload": _workload(e.workload),
            "type": c.gpu_type,
            "gpus": c.gpus,
            "nodes": c.nodes,
            "degree": c.pipeline_degree,
            "plan": c.plan,
        }
        known = {"iter_time_s": _finite(e.iter_time_s), "source": e.source.name.lower()}
        yield _line("profile", cell | known | ({"complete": True} if e.complete else {}))
    for j in log.jobs:
        fields = {"name": j.name, "arrival_s": j.arrival_s, "iterations": j.iterations}
        yield _line("job", fields | {"workload": _workload(j.workload)})
    for s in log.segments:
        c = s.cell
        yield _line(
            "segment",
            {
                "job": s.job,
                "start_s": s.start_s,
                "ready_s": s.ready_s,
                "end_s": s.end_s,
                "type": c.gpu_type,
                "gpus": c.gpus,
                "degree": c.pipeline_degree,
                "plan": c.plan,
                "on": s.members,
                "slowdown": s.slowdown,
                "ended_by": s.ended_by,
                "lost": s.lost,
            },
        )


def _line(kind: str, fields: dict[str, Any]) -> str:
    return json.dumps({"kind": kind} | fields, allow_nan=False, ensure_ascii=False)


def _finite(value: float) -> float | None:
    return value if math.isfinite(value) else None


def _workload(w: Workload) -> list[str | int]:
    return [w.model, w.params, w.global_batch]


def _named(nodes: Sequence[str], jobs: Sequence[str], s: Segment) -> LoggedSegment:
    return LoggedSegment(
        job=jobs[s.job],
        start_s=float(s.start_s),
        ready_s=float(s.ready_s),
        end_s=float(s.end_s),
        cell=s.cell,
        members=tuple((nodes[n], tuple(map(int, gpus))) for n, gpus in s.members),
        slowdown=float(s.slowdown),
        ended_by=s.ended_by,
        lost=float(s.lost),
    )
