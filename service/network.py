"""Paths and priorities of the jobs that run: in a round after its placement, and between rounds. Pure."""

from __future__ import annotations

import json
import math
import threading
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Final

import numpy as np

from formulation.decisions import CHANGES_GPUS, Decision
from formulation.errors import InvalidInput
from formulation.lifecycle import ACTIVE
from formulation.network.check import network_violations
from formulation.network.contention import Contention, Demand
from formulation.network.flows import NetworkJob, Note, contention
from formulation.network.measured import Seen, with_bytes, with_times
from formulation.network.outcome import NetworkDecision, NetworkOutcome, Route
from formulation.network.plan import NetworkPlan
from formulation.network.tags import assigned
from formulation.network.traffic import Traffic, cell_traffic
from formulation.placement import Gang, current_gangs
from formulation.policy import Policy
from formulation.snapshot import Snapshot
from formulation.tables import Ints
from formulation.topologies import document
from formulation.topologies.routes import Routes
from formulation.topologies.topology import Topology
from solvers.network.paths import least_comm_s
from solvers.network.replan import Options, replanned

MEETS: Final = 10
"""Jobs that are named as met by a job, those nearest in rank; it may meet more."""

_LOCK: Final = threading.Lock()


@dataclass(frozen=True, slots=True, kw_only=True)
class Running:
    """A job on its GPUs. ``cell``: (GPU type, GPUs, pipeline degree, plan), indices of the snapshot."""

    job: int
    generation: int
    gang: Gang
    cell: tuple[int, int, int, int]
    since_s: float  # when it was given these GPUs


def running_after(snapshot: Snapshot, decisions: Iterable[Decision]) -> list[Running]:
    """Return the jobs that run once a round's decisions are carried out."""
    generation, since_s = snapshot.jobs.generation, snapshot.jobs.since_s
    return [
        Running(
            job=d.job, generation=int(generation[d.job]) + (d.kind in CHANGES_GPUS), gang=d.gang,
            cell=(d.gpu_type, d.gpus, d.pipeline_degree, d.plan),
            since_s=snapshot.now_s if d.kind in CHANGES_GPUS else float(since_s[d.job]),
        )
        for d in decisions if d.gang is not None
    ]  # fmt: skip


def running_now(snapshot: Snapshot) -> list[Running]:
    """Return the jobs that own GPUs."""
    jobs = snapshot.jobs
    active = jobs.among(ACTIVE)
    return [
        Running(
            job=job, generation=int(jobs.generation[job]), gang=gang,
            cell=(int(jobs.current_type[job]), int(jobs.current_gpus[job]),
                  int(jobs.current_degree[job]), int(jobs.current_plan[job])),
            since_s=float(jobs.since_s[job]),
        )
        for job, gang in sorted(current_gangs(snapshot).items()) if active[job]
    ]  # fmt: skip


def measured(snapshot: Snapshot, running: Iterable[Running]) -> dict[int, Seen]:
    """Return what agents measured of the allocations that jobs run on, by job."""
    m = snapshot.measured
    now = {(r.job, r.generation) for r in running}
    rows: defaultdict[int, list[int]] = defaultdict(list)
    for row, key in enumerate(zip(m.job.tolist(), m.generation.tolist(), strict=True)):
        if key in now:
            rows[key[0]].append(row)
    return {job: _seen(snapshot, of_job) for job, of_job in rows.items()}


def _seen(snapshot: Snapshot, rows: list[int]) -> Seen:
    m = snapshot.measured
    own = [row for row in rows if m.unhindered[row]]
    return Seen(
        sent_bytes={snapshot.nodes.name[m.node[row]]: float(m.sent_bytes[row]) for row in rows},
        period_s=float(np.median(m.period_s[own])) if own else None,
    )


def unmeasured(
    snapshot: Snapshot, running: Iterable[Running], policy: Policy
) -> list[tuple[float, int]]:
    """Return (seconds left, job) of those whose traffic is still to be measured, the longest waiting first.

    Those are on several nodes, have no measurement yet, and time left for it. Agents measure a job only where
    no other one on its nodes sends, which nobody here knows: so it is what should be, not what is.
    """
    running = list(running)
    done = measured(snapshot, running)
    found = [
        (r.since_s + policy.network_measure_s - snapshot.now_s, r.job)
        for r in running if r.gang.nodes > 1 and r.job not in done
    ]  # fmt: skip
    return sorted((left_s, job) for left_s, job in found if left_s > 0)


def plan_network(snapshot: Snapshot, running: Sequence[Running], policy: Policy) -> NetworkOutcome:
    """Return paths, levels and tags of the jobs that run on the snapshot's network.

    Jobs of whose Cell nothing is known, or whose hosts the topology lacks, have no part in it; nor has any
    where it has no path between two of a job's GPUs. That is said of each. What was measured of a job
    corrects what its Cell was estimated to send.

    Raises:
        InvalidInput: the topology describes none, or the options are beyond what it has.
    """
    topology, routes = _read(snapshot.topology)
    names, traffics = snapshot.jobs.name, _traffics(snapshot, running)
    unknown = {names[r.job]: _UNKNOWN for r in running if r.job not in traffics}
    jobs = [
        NetworkJob(
            name=names[r.job], traffic=traffics[r.job],
            gang=tuple((snapshot.nodes.name[node], gpus) for node, gpus in r.gang.members),
        )
        for r in running if r.job in traffics
    ]  # fmt: skip
    unplanned: dict[str, str] = {}
    seen = {names[job]: found for job, found in measured(snapshot, running).items()}
    with _LOCK:  # routes remember what they found
        try:
            c, notes = _measured(topology, jobs, seen, routes)
        except InvalidInput as wrong:  # a round must not fail for it
            unplanned = {job.name: f"the network cannot be planned: {wrong}" for job in jobs}
            c, notes = contention(topology, [], routes=routes)
    rank = snapshot.standing.rank
    standing = snapshot.standing.job[np.argsort(rank, kind="stable")].tolist()
    earlier = [names[job] for job in standing if job >= 0]
    found = replanned(
        c, levels=policy.network_levels, options=Options(floor=policy.network_floor),
        earlier=earlier,
        unmeasured=[names[job] for _, job in unmeasured(snapshot, running, policy)],
    )  # fmt: skip
    plan, demand = found.plan, found.demand
    said = unknown | unplanned | {job: note for job, note in notes if job}
    for k in found.holding.tolist():
        said[c.jobs[k]] = f"goes first until measured, {policy.network_measure_s:g} s at most"
    tags, remarks = _tags(snapshot, running, c, demand, plan)
    return NetworkOutcome(
        levels=plan.levels,
        decisions=tuple(_decisions(snapshot, running, topology, c, demand, plan, tags, said)),
        violations=tuple(network_violations(c, plan)),
        notes=(*(note for job, note in notes if not job), *remarks),
    )


_UNKNOWN: Final = (
    "what its Cell sends is not known: let the service estimate its Cells (`tessera models add`), or say it"
    " with them (CellEstimate.traffic)"
)


def _measured(
    topology: Topology, jobs: Sequence[NetworkJob], seen: Mapping[str, Seen], routes: Routes
) -> tuple[Contention, list[Note]]:
    """Return jobs as they were measured, else as estimated, with what they load, and one note on a job."""
    corrected, notes, used = with_bytes(topology, jobs, seen)
    c, others = contention(topology, corrected, routes=routes)
    period_s = [seen[name].period_s if name in used else None for name in c.jobs]
    known_s = np.array([math.nan if value is None else value for value in period_s])
    c, times = with_times(c, least_comm_s(c), known_s)
    of_job = dict(notes)
    for name, note in times:
        of_job[name] += f", {note}"
    return c, [*of_job.items(), *others]


@lru_cache(maxsize=4)
def _read(text: str) -> tuple[Topology, Routes]:
    topology = document.read(json.loads(text))
    return topology, Routes(topology)


@lru_cache(maxsize=10_000)
def _parsed(text: str) -> Traffic:
    return cell_traffic(text).traffic()


def _traffics(snapshot: Snapshot, running: Sequence[Running]) -> dict[int, Traffic]:
    """Return what the Cell of each running job sends, where that is known.

    Of several shapes of a Cell the job's own, else the first: plans differ little between them.
    """
    t, workload = snapshot.traffic, snapshot.jobs.workload
    needed = np.isin(t.workload, workload[[r.job for r in running]] if running else [])
    rows: defaultdict[tuple[int, ...], dict[int, int]] = defaultdict(dict)
    for k in np.flatnonzero(needed).tolist():
        key = (t.workload[k], t.gpu_type[k], t.gpus[k], t.pipeline_degree[k], t.plan[k])
        rows[tuple(map(int, key))][int(t.nodes[k])] = k
    found: dict[int, Traffic] = {}
    for r in running:
        if shapes := rows.get((int(workload[r.job]), *r.cell)):
            k = shapes.get(r.gang.nodes, next(iter(shapes.values())))
            found[r.job] = _parsed(t.document[k])
    return found


def _tags(
    snapshot: Snapshot, running: Sequence[Running], c: Contention, demand: Demand, plan: NetworkPlan
) -> tuple[Mapping[str, int], tuple[str, ...]]:
    """Return the tag of each job with traffic, and remarks; one that a job runs with stays its tag."""
    names, standing = snapshot.jobs.name, snapshot.standing
    generation = {names[r.job]: r.generation for r in running}
    kept: dict[str, int] = {}
    rows = zip(
        standing.job.tolist(), standing.generation.tolist(), standing.tag.tolist(), strict=True
    )
    for row, (job, made_for, tag) in enumerate(rows):
        runs = job >= 0 and generation.get(names[job]) == made_for
        if tag >= 0:  # that of another allocation is nobody's, but was given up only now
            kept[names[job] if runs else f"row {row}"] = tag
    sends = demand.comm_s > 0
    levels = {name: int(plan.level[k]) for k, name in enumerate(c.jobs) if sends[k]}
    settings = assigned(levels, plan.levels, kept)
    return settings.tags, settings.remarks


def _decisions(
    snapshot: Snapshot, running: Sequence[Running], topology: Topology, c: Contention,
    demand: Demand, plan: NetworkPlan, tags: Mapping[str, int], said: Mapping[str, str],
) -> Iterable[NetworkDecision]:  # fmt: skip
    """Yield one decision for each job that runs; those that have no part rank last."""
    at = {name: k for k, name in enumerate(c.jobs)}
    rank = np.empty(len(c.jobs), dtype=np.int64)
    rank[plan.order] = np.arange(len(c.jobs))
    meets, intensity = met_by(demand, plan), demand.intensity
    last = len(c.jobs)
    for r in running:
        name = snapshot.jobs.name[r.job]
        k = at.get(name)
        if k is None:
            yield NetworkDecision(
                job=name, generation=r.generation, rank=last, level=0, tag=-1, priority=math.inf,
                intensity=math.inf, note=said.get(name, ""),
            )  # fmt: skip
            last += 1
            continue
        yield NetworkDecision(
            job=name, generation=r.generation, rank=int(rank[k]), level=int(plan.level[k]),
            tag=tags.get(name, -1), priority=float(plan.priority[k]),
            intensity=float(intensity[k]), meets=tuple(c.jobs[m] for m in meets.get(k, ())),
            routes=tuple(_routes(topology, c, plan, k)), note=said.get(name, ""),
        )  # fmt: skip


def met_by(demand: Demand, plan: NetworkPlan) -> dict[int, list[int]]:
    """Return, by job, the ``MEETS`` jobs nearest in rank with which it shares a link, by rank.

    Those that are served before it or beside it come first, so that where any is, one is named.
    """
    rank = np.empty(demand.jobs, dtype=np.int64)
    rank[plan.order] = np.arange(demand.jobs)
    order = np.lexsort((rank[demand.job], demand.link))
    link, job = demand.link[order], demand.job[order]
    found: defaultdict[int, set[int]] = defaultdict(set)
    for apart in range(1, MEETS + 1):
        same = np.flatnonzero(link[apart:] == link[:-apart])
        for a, b in set(zip(job[same].tolist(), job[same + apart].tolist(), strict=True)):
            found[a].add(b)
            found[b].add(a)
    return {k: _nearest(others, rank, plan.level, k) for k, others in found.items()}


def _nearest(others: Iterable[int], rank: Ints, level: Ints, job: int) -> list[int]:
    """Return the ``MEETS`` of them nearest to the job in rank, those on lower levels last; by rank."""

    def apart(other: int) -> tuple[bool, int, int]:
        return bool(level[other] < level[job]), abs(int(rank[other] - rank[job])), other

    return sorted(sorted(others, key=apart)[:MEETS], key=lambda other: int(rank[other]))


def _routes(topology: Topology, c: Contention, plan: NetworkPlan, job: int) -> Iterable[Route]:
    """Yield the ways of a job's traffic that was given a choice."""
    name, links = topology.vertices.name, topology.links
    for bundle in range(*c.bundle_start[job : job + 2].tolist()):
        path = int(c.candidate[c.candidate_start[bundle] + plan.chosen[bundle]])
        hops = c.path_link[slice(*c.path_start[path : path + 2].tolist())].tolist()
        ends = list[int]()
        for (
            hop
        ) in hops:  # links that all of its candidates have are not among them: there may be gaps
            at, to = int(links.source[hop]), int(links.target[hop])
            ends += [to] if ends and ends[-1] == at else [at, to]
        yield Route(
            source=name[c.bundle_source[bundle]], target=name[c.bundle_target[bundle]],
            via=tuple(name[v] for v in ends), sent_bytes=float(c.bundle_bytes[bundle]),
        )  # fmt: skip
