"""A stored cluster for tests, with a helper for each action of users, rounds and agents."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import sqlalchemy as sa

from tessera.db.agents.agents import load_desired_gangs, record_heartbeats, require_agent
from tessera.db.agents.observe import record_observation
from tessera.db.estimates.workloads import upsert_estimates
from tessera.db.jobs import job_changes
from tessera.db.jobs.submission import submit_jobs
from tessera.db.schema.engine import Database
from tessera.db.store.cluster_changes import upsert_cluster
from tessera.db.store.reads import get_job, list_estimates, list_jobs, list_nodes
from tessera.db.store.store import Store
from tessera.formulation.answer.codec import digest, encode
from tessera.formulation.answer.decisions import Decision, DecisionKind
from tessera.formulation.answer.placement import Gang, current_gangs
from tessera.formulation.base.values import CellKey, EstimateSource, GpuType, Workload
from tessera.formulation.job.lifecycle import SCHEDULABLE, JobEvent, JobState
from tessera.formulation.job.reasons import Reason, ReasonCode
from tessera.formulation.records.agents import Heartbeat, ObservedGang
from tessera.formulation.records.clusters import NodeSpec
from tessera.formulation.records.estimates import EstimateRecord
from tessera.formulation.records.jobs import JobRecord, JobSpec, PlannedStartRecord, SegmentRecord
from tessera.formulation.records.rounds import RoundCommit, RoundRecord, RoundSummary
from tessera.formulation.records.store import Request
from tessera.formulation.state.last_round import (
    NO_EXPECTED_RELEASES,
    NO_SEGMENTS,
    PlannedNodes,
    PlannedStarts,
    ScheduleSegments,
    StartPlan,
)
from tessera.formulation.state.snapshot import STATES, Snapshot
from tests.support.cells import kind_of, with_cell

C = "lab"
"""The name of the cluster."""

BERT = Workload(model="bert", params="1B", global_batch=256)

Members = Sequence[tuple[str, Sequence[int]]]


def a_spec(name: str, **overrides: Any) -> JobSpec:
    fields: dict[str, Any] = {
        "name": name,
        "workload": BERT,
        "iterations": 1000,
        "requested_gpus": 1,
    }
    return JobSpec(**fields | overrides)


def a_record(gpus: int = 1, **overrides: Any) -> EstimateRecord:
    fields: dict[str, Any] = {
        "workload": BERT,
        "gpus": gpus,
        "iter_time_s": 1.0 / gpus,
        "source": EstimateSource.MEASURED,
    }
    return EstimateRecord(**with_cell(fields | overrides))


def record_heartbeat(
    store: Store,
    agent: str,
    incarnation: str = "first",
    remarks: Sequence[str] | None = None,
    *,
    cluster: str = C,
) -> None:
    """Record an agent's heartbeat as the server does, with the errors of ``require_agent``."""
    said = None if remarks is None else tuple(remarks)
    beat = Heartbeat(cluster=cluster, agent=agent, incarnation=incarnation, network_remarks=said)
    if store.update(record_heartbeats, [beat]) != {0}:
        store.read(require_agent, cluster, agent, incarnation)


def execute(database: Database, statement: str) -> None:
    """Change the database behind the store's back."""
    database.write(lambda connection: connection.execute(sa.text(statement)))


def a_cluster(
    store: Store,
    nodes: int = 2,
    gpus: int = 4,
    *,
    types: Sequence[str] = ("a100",),
    name: str = C,
) -> None:
    """Create a cluster with ``nodes`` nodes of each type (a100-0, a100-1, ...), an agent each."""
    kinds = [GpuType(name=t, memory_bytes=2**35) for t in types]
    store.change(upsert_cluster, name, kinds, None)
    for t in types:
        for i in range(nodes):
            node = NodeSpec(name=f"{t}-{i}", gpu_type=t, gpus=gpus)
            store.hello(name, f"agent-{t}-{i}", "first", [node])
    records = [a_record(g, gpu_type=t, nodes=-(-g // gpus)) for t in types for g in (1, 2, 4, 8)]
    store.change(upsert_estimates, name, records)


def a_bare_cluster(store: Store, *types: str, nodes: int = 2, gpus: int = 4) -> None:
    """Create a cluster with ``nodes`` nodes of each type, an agent each, and no estimates."""
    kinds = [GpuType(name=t, memory_bytes=40 * 2**30) for t in types or ("a100",)]
    store.change(upsert_cluster, C, kinds, None)
    for kind in kinds:
        for i in range(nodes):
            node = NodeSpec(name=f"{kind.name}-{i}", gpu_type=kind.name, gpus=gpus)
            store.hello(C, f"agent-{kind.name}-{i}", "first", [node])


def cells_of(store: Store, workload: Workload) -> list[EstimateRecord]:
    """Return all estimates of a workload."""
    return store.read(list_estimates, C, workload, 0, 1000)[0]


def submit(store: Store, *specs: JobSpec) -> None:
    """Queue jobs."""
    store.change(submit_jobs, C, specs)


def apply_event(store: Store, job: str, event: JobEvent) -> None:
    """Apply a user's event."""
    store.change(job_changes.apply_event, C, job, event, None)


def start(
    snapshot: Snapshot, job: str, members: Members, kind: DecisionKind = DecisionKind.START
) -> Decision:
    """Return the decision that ``job`` runs on ``members``."""
    nodes = snapshot.nodes.name
    gang = Gang(members=tuple((nodes.index(n), tuple(gpus)) for n, gpus in members))
    return Decision(
        job=snapshot.jobs.name.index(job),
        kind=kind,
        cell=_some_cell(snapshot, snapshot.jobs.name.index(job), gang),
        rate=256.0 * gang.gpus,
        gang=gang,
    )


def _some_cell(snapshot: Snapshot, job: int, gang: Gang) -> CellKey:
    """Return a Cell of one stage on the gang's GPUs, by an estimated plan if there is one.

    A plan for as many nodes as the gang's comes first.
    """
    e, kind = snapshot.estimates, kind_of(snapshot, gang)
    same = (e.workload == snapshot.jobs.workload[job]) & (e.gpu_type == kind)
    same &= (e.gpus == gang.gpus) & (e.pipeline_degree == 1)
    plans = e.plan[same & (e.nodes == len(gang.members))].tolist() + e.plan[same].tolist() or [
        snapshot.plans.index("") if "" in snapshot.plans else 0
    ]
    return CellKey(kind, gang.gpus, pipeline_degree=1, plan=plans[0])


def wait(snapshot: Snapshot, job: str, kind: DecisionKind = DecisionKind.WAIT) -> Decision:
    """Return the decision that ``job`` does not run."""
    reason = Reason(
        code=ReasonCode.NO_CAPACITY,
        message="no GPU is free",
        next_step="wait",
        evidence=(("gpus", "1"),),
    )
    return Decision(job=snapshot.jobs.name.index(job), kind=kind, reason=reason)


def a_summary(snapshot: Snapshot, **overrides: Any) -> RoundSummary:
    fields: dict[str, Any] = {
        "cluster": snapshot.cluster,
        "number": 0,
        "epoch": snapshot.epoch,
        "created_s": snapshot.now_s,
        "options": {"solver": "greedy", "solve_limit_s": math.inf},
        "status": "feasible",
        "outcome": "",
        "objective": 1.0,
        "bound": math.inf,
        "gap": math.inf,
        "placed_score": 1.0,
        "greedy_objective": 1.0,
        "verified": True,
        "violations": (),
        "snapshot_digest": digest(snapshot),
        "solver": "greedy",
        "work": (("greedy", 1.0),),
        "goals": (),
        "prices": {"a100": 0.5},
        "used_gpus": {"a100": 1},
        "seconds": {"load": 0.1},
        "running": 0,
        "waiting": 0,
        "started": 0,
        "suspended": 0,
        "changed": 0,
        "samples_per_s": 1.0,
        "unit": "samples/s",
        "versions": ("tessera 0",),
    }
    return RoundSummary(**fields | overrides)


def a_segment(**overrides: Any) -> SegmentRecord:
    return SegmentRecord(**with_cell({"start_s": 1e9, "end_s": 2e9} | overrides))


def segments_of(snapshot: Snapshot, **jobs: Sequence[SegmentRecord]) -> ScheduleSegments:
    """Return the segments of jobs' deadline schedules by name."""
    rows = [
        {
            "job": snapshot.jobs.name.index(job),
            "start_s": segment.start_s,
            "end_s": segment.end_s,
            **snapshot.key(segment.cell)._asdict(),
        }
        for job, segments in jobs.items()
        for segment in segments
    ]
    return ScheduleSegments.from_rows(rows)


def a_planned_start(
    nodes: tuple[tuple[str, int], ...] = (("a100-0", 1),), **overrides: Any
) -> PlannedStartRecord:
    """Return a planned start on a GPU of ``a100-0``."""
    fields = {"start_s": 1e9, "end_s": 2e9, "gpus": sum(gpus for _, gpus in nodes)}
    return PlannedStartRecord(nodes=nodes, **with_cell(fields | overrides))


def plan_of(
    snapshot: Snapshot, start_by_s: Mapping[str, float], **jobs: PlannedStartRecord
) -> StartPlan:
    """Return the planned starts of jobs, and the times by which jobs are promised to start, by name."""
    names, places = snapshot.jobs.name, snapshot.nodes.name
    rows = [
        {
            "job": names.index(job),
            "start_s": start.start_s,
            "end_s": start.end_s,
            **snapshot.key(start.cell)._asdict(),
        }
        for job, start in jobs.items()
    ]
    nodes = [
        {"start": i, "node": places.index(name), "gpus": gpus}
        for i, start in enumerate(jobs.values())
        for name, gpus in start.nodes
    ]
    return StartPlan(
        starts=PlannedStarts.from_rows(rows),
        nodes=PlannedNodes.from_rows(nodes),
        start_by_s=np.array([start_by_s.get(name, math.inf) for name in names]),
        expected_releases=NO_EXPECTED_RELEASES,
    )


def commit(
    store: Store,
    snapshot: Snapshot,
    *decisions: Decision,
    request: Request | None = None,
    schedule_segments: ScheduleSegments = NO_SEGMENTS,
    plan: StartPlan | None = None,
) -> RoundRecord:
    """Commit decisions that were made on ``snapshot``."""
    return store.commit(
        a_round(
            snapshot, *decisions, request=request, schedule_segments=schedule_segments, plan=plan
        )
    )


def a_round(snapshot: Snapshot, *decisions: Decision, **overrides: Any) -> RoundCommit:
    """Return the round to commit for these decisions on ``snapshot``."""
    fields: dict[str, Any] = {
        "snapshot": snapshot,
        "encoded": encode(snapshot),
        "decisions": decisions,
        "summary": a_summary(snapshot),
    }
    return RoundCommit(**fields | overrides)


def a_random_round(
    snapshot: Snapshot, rng: np.random.Generator, rejects: float = 0.0
) -> list[Decision]:
    """Return random decisions that are legal for each job.

    A job may get GPUs that jobs release in the same round, including its own. Of the queued jobs
    that get no GPUs, the share ``rejects`` is rejected. Promises are also random.
    """
    decisions: list[Decision] = []
    jobs, gangs = snapshot.jobs, current_gangs(snapshot)
    stays = rng.random(len(jobs)) < 0.3
    kept = {(n, g) for j in gangs if stays[j] for n, gpus in gangs[j].members for g in gpus}
    free = [
        (n, g)
        for n in np.flatnonzero(snapshot.nodes.schedulable).tolist()
        for g in range(int(snapshot.nodes.gpus[n]))
        if (n, g) not in kept
    ]
    free = [free[i] for i in rng.permutation(len(free))]
    for j, name in enumerate(jobs.name):
        want = int(rng.choice([0, 1, 2, 3, 5]))
        if j in gangs and stays[j]:
            members = [(snapshot.nodes.name[n], gpus) for n, gpus in gangs[j].members]
            decisions.append(start(snapshot, name, members, DecisionKind.KEEP))
        elif want and STATES[int(jobs.state[j])] in SCHEDULABLE and len(free) >= want:
            taken, free = free[:want], free[want:]
            nodes = sorted({n for n, _ in taken})
            chosen = [
                (snapshot.nodes.name[n], sorted(g for m, g in taken if m == n)) for n in nodes
            ]
            kind = DecisionKind.RESIZE if j in gangs else DecisionKind.START
            decisions.append(start(snapshot, name, chosen, kind))
        else:
            kind = DecisionKind.SUSPEND if j in gangs else DecisionKind.WAIT
            if STATES[int(jobs.state[j])] is JobState.QUEUED and rng.random() < rejects:
                kind = DecisionKind.REJECT
            decisions.append(wait(snapshot, name, kind))
    return [
        d._replace(
            admitted=bool(rng.random() < 0.5),
            opportunistic=d.gang is not None and bool(rng.random() < 0.5),
        )
        for d in decisions
    ]


def a_random_plan(snapshot: Snapshot, rng: np.random.Generator) -> StartPlan:
    """Return promised starts of about half of the jobs, and planned ones of some of these.

    Jobs that a round starts are among them.
    """
    names, nodes = snapshot.jobs.name, snapshot.nodes.name
    promises = {name: snapshot.now_s + 1e3 for name in names if rng.random() < 0.5}
    starts = {
        name: a_planned_start(start_s=snapshot.now_s, nodes=((str(rng.choice(nodes)), 1),))
        for name in promises
        if rng.random() < 0.5
    }
    return plan_of(snapshot, promises, **starts)


def run(store: Store, **jobs: Members) -> RoundRecord:
    """Start jobs in a round and let the agents report them as running."""
    snapshot = store.snapshot(C)
    record = commit(store, snapshot, *(start(snapshot, j, m) for j, m in jobs.items()))
    assert all(d.applied for d in record.decisions), record.decisions
    agents_report(store)
    return record


def agents_of(store: Store) -> list[str]:
    return [f"agent-{node.spec.name}" for node in store.read(list_nodes, C, "", 100)]


def agent_reports(store: Store, agent: str, **facts: Any) -> bool:
    """Let an agent apply and report its desired state. ``facts`` go into each reported gang.

    A gang that has succeeded has done all of its iterations.
    """
    desired, node = store.read(load_desired_gangs, C, agent), agent.removeprefix("agent-")
    is_over = facts.get("phase") == "succeeded"
    gangs = [
        replace(
            ObservedGang(
                job=gang.spec.name,
                generation=gang.generation,
                node=node,
                phase="running",
                iterations_done=float(gang.spec.iterations) if is_over else -1.0,
            ),
            **facts,
        )
        for gang in desired.gangs
        if node in dict(gang.allocation.shares)
    ]
    return store.update(record_observation, C, agent, "first", gangs, desired.revision)


def agents_report(store: Store, **facts: Any) -> None:
    """Let all agents report until nothing changes."""
    while any([agent_reports(store, agent, **facts) for agent in agents_of(store)]):
        pass


def end_back_off(database: Database) -> None:
    """Let the back-offs of failed jobs end."""
    execute(database, "UPDATE jobs SET retry_at = now() - interval '1 s' WHERE retry_at > now()")


def prolong_back_off(database: Database) -> None:
    """Keep even a slow machine from reaching the end of a back-off within the test."""
    execute(
        database, "UPDATE jobs SET retry_at = now() + interval '1 h' WHERE retry_at IS NOT NULL"
    )


def fail(store: Store, name: str, error: str = "boom") -> None:
    """Let the gang of a job fail, and let the agents of its nodes report its end."""
    record = store.read(get_job, C, name)
    assert record.allocation is not None
    node, _ = record.allocation.shares[0]
    gang = ObservedGang(
        job=name, generation=record.generation, node=node, phase="failed", error=error
    )
    store.update(
        record_observation,
        C,
        f"agent-{node}",
        "first",
        [gang],
        store.read(load_desired_gangs, C, f"agent-{node}").revision,
    )
    agents_report(store)


def job(store: Store, name: str) -> JobRecord:
    return store.read(get_job, C, name)


def states(store: Store) -> dict[str, JobState]:
    return {j.spec.name: j.state for j in store.read(list_jobs, C, [], 0, 1000)[0]}
