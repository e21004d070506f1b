"""Paths and priorities of the running jobs, in a round after its placement and between rounds.

These functions are pure.
"""

from __future__ import annotations

import math
import threading
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from typing import Final

import numpy as np

from tessera.formulation.answer.network.check import find_network_violations
from tessera.formulation.answer.network.contention import Contention, LinkDemand
from tessera.formulation.answer.network.descriptions import find_met_jobs, routes_of
from tessera.formulation.answer.network.flows import NetworkJob, Note, build_contention
from tessera.formulation.answer.network.measured import (
    TrafficMeasurement,
    correct_bytes,
    correct_times,
)
from tessera.formulation.answer.network.outcome import NetworkDecision, NetworkOutcome
from tessera.formulation.answer.network.plan import NetworkPlan
from tessera.formulation.answer.network.running import RunningJob, observe_traffic, traffic_by_job
from tessera.formulation.answer.network.tags import TagSettings, assign_tags
from tessera.formulation.base.cancellation import never_cancelled
from tessera.formulation.base.errors import InvalidInput
from tessera.formulation.round.policy import Policy
from tessera.formulation.state.snapshot import Snapshot
from tessera.formulation.state.topologies.described import DescribedTopology
from tessera.formulation.state.topologies.routes import Routes
from tessera.formulation.state.topologies.topology import Topology
from tessera.solvers.base import require_wanted
from tessera.solvers.network.paths import least_comm_s
from tessera.solvers.network.replan import PlanningOptions, replan

_UNKNOWN: Final = (
    "the traffic of its Cell is not known: let the service estimate its Cells (`tessera models add`), or"
    " give the traffic with them (CellEstimate.traffic)"
)


def plan_network(
    snapshot: Snapshot,
    running: Sequence[RunningJob],
    policy: Policy,
    cancelled: Callable[[], bool] = never_cancelled,
) -> NetworkOutcome:
    """Return paths, priority levels and tags of the jobs that run on the snapshot's network.

    A job has no part in it if the traffic of its Cell is not known, if the topology lacks its
    hosts, or if no path joins its GPUs. Its decision has a note about that. A measurement of a job
    corrects the estimated traffic of its Cell.

    Raises:
        InvalidInput: the network is not described, or the options exceed its limits.
        DeadlineTooShort: ``cancelled`` has become true.
    """
    if snapshot.topology is None:
        raise InvalidInput("topology", "the network is not described")
    topology, known_routes = snapshot.topology.topology, _routes(snapshot.topology)
    names, known = snapshot.jobs.name, traffic_by_job(snapshot, running)
    jobs = [
        NetworkJob(
            name=names[r.job],
            traffic=known[r.job],
            gang=tuple((snapshot.nodes.name[node], gpus) for node, gpus in r.gang.members),
        )
        for r in running
        if r.job in known
    ]
    observed = observe_traffic(snapshot, running, policy)
    by_name = {names[job]: measurement for job, measurement in observed.seen.items()}
    with known_routes.lock:
        c, notes = _measured(topology, jobs, by_name, known_routes.routes)
    require_wanted(cancelled)
    standing = snapshot.network_plan.job[
        np.argsort(snapshot.network_plan.rank, kind="stable")
    ].tolist()
    result = replan(
        c,
        levels=policy.network_levels,
        options=PlanningOptions(floor=policy.network_floor, cancelled=cancelled),
        earlier=[names[job] for job in standing if job >= 0],
        unmeasured=[names[job] for _, job in observed.unmeasured],
    )
    plan, demand = result.plan, result.demand
    note_of = {names[r.job]: _UNKNOWN for r in running if r.job not in known}
    note_of |= {job: note for job, note in notes if job}
    for k in result.holding.tolist():
        note_of[c.jobs[k]] = (
            f"has the highest level until it is measured, for at most {policy.network_measure_s:g} s"
        )
    tags = _tags(snapshot, running, c, demand, plan)
    return NetworkOutcome(
        levels=plan.levels,
        decisions=tuple(
            _decisions(snapshot, running, topology, c, demand, plan, tags.tags, note_of)
        ),
        violations=tuple(find_network_violations(c, plan)),
        notes=(*(note for job, note in notes if not job), *tags.remarks),
    )


def _measured(
    topology: Topology,
    jobs: Sequence[NetworkJob],
    seen: Mapping[str, TrafficMeasurement],
    routes: Routes,
) -> tuple[Contention, list[Note]]:
    """Return the jobs' load, as measured or else as estimated, and one note for each job."""
    corrected, notes, used = correct_bytes(topology, jobs, seen)
    c, others = build_contention(topology, corrected, routes=routes)
    period_s = [seen[name].period_s if name in used else None for name in c.jobs]
    known_s = np.array([math.nan if value is None else value for value in period_s])
    c, times = correct_times(c, least_comm_s(c), known_s)
    of_job = dict(notes)
    for name, note in times:
        of_job[name] += f"; {note}"
    return c, [*of_job.items(), *others]


@dataclass(frozen=True, slots=True, kw_only=True)
class _KnownRoutes:
    """Routes with a lock. They cache their results, so only one thread may use them at a time."""

    routes: Routes
    lock: threading.Lock = field(default_factory=threading.Lock)


@lru_cache(maxsize=4)
def _routes(described: DescribedTopology) -> _KnownRoutes:
    return _KnownRoutes(routes=Routes(described.topology))


def _tags(
    snapshot: Snapshot,
    running: Sequence[RunningJob],
    c: Contention,
    demand: LinkDemand,
    plan: NetworkPlan,
) -> TagSettings:
    """Return the tag of each job with traffic, and remarks.

    A job keeps the tag that it runs with.
    """
    names, standing = snapshot.jobs.name, snapshot.network_plan
    generation = {names[r.job]: r.generation for r in running}
    kept: dict[str, int] = {}
    rows = zip(
        standing.job.tolist(), standing.generation.tolist(), standing.tag.tolist(), strict=True
    )
    for row, (job, made_for, tag) in enumerate(rows):
        runs = job >= 0 and generation.get(names[job]) == made_for
        if tag >= 0:  # the tag of another allocation belongs to no job, but was only just released
            kept[names[job] if runs else f"row {row}"] = tag
    sends = demand.comm_s > 0
    levels = {name: int(plan.level[k]) for k, name in enumerate(c.jobs) if sends[k]}
    return assign_tags(levels, plan.levels, kept)


def _decisions(
    snapshot: Snapshot,
    running: Sequence[RunningJob],
    topology: Topology,
    c: Contention,
    demand: LinkDemand,
    plan: NetworkPlan,
    tags: Mapping[str, int],
    note_of: Mapping[str, str],
) -> Iterable[NetworkDecision]:
    """Yield one decision for each running job; those that have no part rank last."""
    index_of = {name: k for k, name in enumerate(c.jobs)}
    rank, meets, intensity = plan.rank, find_met_jobs(demand, plan), demand.intensity
    last = len(c.jobs)
    for r in running:
        name = snapshot.jobs.name[r.job]
        k = index_of.get(name)
        if k is None:
            yield NetworkDecision(
                job=name,
                generation=r.generation,
                rank=last,
                level=0,
                tag=-1,
                priority=math.inf,
                intensity=math.inf,
                note=note_of.get(name, ""),
            )
            last += 1
            continue
        yield NetworkDecision(
            job=name,
            generation=r.generation,
            rank=int(rank[k]),
            level=int(plan.level[k]),
            tag=tags.get(name, -1),
            priority=float(plan.priority[k]),
            intensity=float(intensity[k]),
            contending_jobs=tuple(c.jobs[m] for m in meets.get(k, ())),
            routes=tuple(routes_of(topology, c, plan, k)),
            note=note_of.get(name, ""),
        )
