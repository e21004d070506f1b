"""The two kinds of stores of rounds behind one interface: PostgreSQL's and a simulated world's.

The world is the clock of both. It determines the progress and ends of jobs, and the nodes that are
away. The simulated agents of PostgreSQL report the same to their store.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Protocol

from tessera.db.agents.agents import load_desired_gangs
from tessera.db.agents.observe import record_observation
from tessera.db.clusters.tenants import upsert_tenants
from tessera.db.estimates.workloads import upsert_estimates
from tessera.db.jobs.submission import submit_jobs
from tessera.db.schema.engine import Database
from tessera.db.store.cluster_changes import upsert_cluster
from tessera.db.store.store import Store
from tessera.formulation.answer.proofs import RoundProof
from tessera.formulation.base.errors import (
    DeadlineTooShort,
    NotFound,
    RequestIdReused,
    RoundSuperseded,
)
from tessera.formulation.records.agents import ObservedGang
from tessera.formulation.records.rounds import RoundCommit, RoundRecord, decision_record
from tessera.formulation.records.store import Request
from tessera.formulation.state.decayed_use import NO_DECAYED_USE
from tessera.formulation.state.snapshot import STATES, Snapshot
from tessera.service.server.ports.rounds import Rounds
from tessera.service.server.rounds.loop import RoundLoop
from tessera.simulator.hazards import Failure
from tessera.simulator.overheads import Overheads
from tessera.simulator.scenario import Scenario
from tessera.simulator.world import World
from tessera.solvers.rounds.options import RoundOptions
from tests.support.stored_cluster import (
    execute,
    record_heartbeat,
)
from tests.support.worlds import FREE, StoppedClock


@dataclass(frozen=True, slots=True, kw_only=True)
class _Kept:
    record: RoundRecord
    snapshot: Snapshot
    request: Request | None
    proof: RoundProof


class WorldRounds:
    """A world's store with the behaviour of the database.

    It checks epochs, answers repeated requests, and stores rounds. Time passes only in calls of the
    world. Nothing changes while a round is decided, so no decision is skipped. The world releases
    the GPUs of silent nodes immediately, so no lease has to expire.
    """

    def __init__(self, world: World) -> None:
        self._world = world
        self._kept: list[_Kept] = []  # of rounds 1, 2, ...

    def begin_round(
        self, cluster: str, request: Request | None, use_half_life_s: float = 0.0
    ) -> Snapshot | RoundRecord:
        """Return the snapshot for a round now, or the round that the request committed."""
        if request is not None and (done := self._replayed(request)) is not None:
            return done
        return self.snapshot(cluster, use_half_life_s)

    def snapshot(self, cluster: str, use_half_life_s: float = 0.0) -> Snapshot:
        """Return the snapshot for a round now. The world must count use by the same half-life."""
        self._require(cluster)
        snapshot = self._world.snapshot()
        if use_half_life_s == 0.0:
            return replace(snapshot, decayed_use=NO_DECAYED_USE, use_half_life_s=0.0)
        assert snapshot.use_half_life_s == use_half_life_s
        return snapshot

    def commit(
        self, commit: RoundCommit, in_time: Callable[[], bool] = lambda: True
    ) -> RoundRecord:
        """Carry out a round, and store it."""
        request, store = commit.request, self._world.store
        self._require(commit.snapshot.cluster)
        if request is not None and (done := self._replayed(request)) is not None:
            return done
        if commit.snapshot.epoch != store.rounds + 1:
            raise RoundSuperseded(f"clusters/{store.cluster}/rounds/{store.rounds}")
        if not in_time():
            raise DeadlineTooShort("the deadline ended; nothing was changed: call again with more")
        refused = commit.summary.outcome == "refused"
        if refused:
            store.pass_round()
        else:
            self._world.carry_out(
                commit.decisions, commit.schedule_segments, commit.summary.prices, commit.plan
            )
        self._world.check()
        summary = replace(
            commit.summary,
            number=store.rounds,
            epoch=store.rounds + 1,
            outcome=commit.summary.outcome or "committed",
            running=len(store.gpus.gangs),
            waiting=len(store.jobs.live) - len(store.gpus.gangs),
        )
        decisions = tuple(decision_record(commit.snapshot, d) for d in commit.decisions)
        record = RoundRecord(summary=summary, decisions=decisions)
        self._kept.append(
            _Kept(record=record, snapshot=commit.snapshot, request=request, proof=commit.proof)
        )
        return record

    def _replayed(self, request: Request) -> RoundRecord | None:
        """Return the round that the request committed, if any.

        Raises:
            RequestIdReused: the id belongs to another request.
        """
        for stored in self._kept:
            if stored.request is not None and stored.request.id == request.id:
                if stored.request != request:
                    problem = f"{request.id} was used for another request; use a new id for each"
                    raise RequestIdReused("request_id", problem)
                return stored.record
        return None

    def get_round(self, cluster: str, number: int) -> RoundRecord:
        """Return a round.

        Raises:
            NotFound: there is no such round.
        """
        return self._find(cluster, number).record

    def round_snapshot(self, cluster: str, number: int) -> Snapshot:
        """Return the snapshot on which a round was decided.

        Raises:
            NotFound: there is no such round.
        """
        return self._find(cluster, number).snapshot

    def round_proof(self, cluster: str, number: int) -> RoundProof:
        """Return what is kept of the proof of a round.

        Raises:
            NotFound: there is no such round.
        """
        return self._find(cluster, number).proof

    def _find(self, cluster: str, number: int) -> _Kept:
        if cluster != self._world.store.cluster or not 1 <= number <= len(self._kept):
            raise NotFound(f"clusters/{cluster}/rounds/{number}")
        return self._kept[number - 1]

    def _require(self, cluster: str) -> None:
        if cluster != self._world.store.cluster:
            raise NotFound(f"clusters/{cluster}")


C = "simulated"


PASS_S = 10_000.0
"""The simulated seconds of a step. The step is long enough that real time does not matter."""


class Stored(Protocol):
    """A store with its cluster, driven by a script."""

    @property
    def rounds(self) -> Rounds:
        """Return the interface for the round loop."""
        ...

    def pass_time(self) -> None:
        """Let ``PASS_S`` pass, and report the events of that time."""
        ...

    def settle(self) -> None:
        """Let agents carry out and report the decisions."""
        ...


def decide(stored: Stored, options: RoundOptions) -> RoundRecord:
    """Let the service's round loop decide and commit a round."""
    loop = RoundLoop(stored.rounds, StoppedClock())
    record = loop.schedule(
        C,
        options,
        remaining_s=lambda: math.inf,
        dry_run=False,
        request=None,
        cancelled=lambda: False,
    )
    stored.settle()
    return record


@dataclass
class InMemory:
    """A world and its store."""

    world: World
    now_s: float = 0.0

    @property
    def rounds(self) -> WorldRounds:
        return self._rounds

    def __post_init__(self) -> None:
        self._rounds = WorldRounds(self.world)
        self.world.advance(0.0)

    def pass_time(self) -> None:
        self.now_s += PASS_S
        self.world.advance(self.now_s)
        self.world.check()

    def settle(self) -> None:
        """Do nothing, since the world's agents answer immediately."""


@dataclass
class InPostgres:
    """A database with agents that report the state of the world to it."""

    store: Store
    database: Database
    world: World
    scenario: Scenario
    submitted: int = 0
    present: list[str] = field(default_factory=list)  # nodes whose agents are present

    @property
    def rounds(self) -> Store:
        return self.store

    def __post_init__(self) -> None:
        s = self.scenario
        self.store.change(upsert_cluster, C, s.gpu_types, None)
        for node in s.nodes:
            self.store.hello(C, f"agent-{node.name}", "first", [node])
        self.store.change(upsert_estimates, C, s.profiles)
        if s.tenants:
            self.store.change(upsert_tenants, C, s.tenants)
        self._tell_nodes()
        self._submit_due()

    def pass_time(self) -> None:
        """Make everything stored older by ``PASS_S``, and report the world's events.

        This is called after the world's own ``pass_time``.
        """
        for statement in _OLDER:
            execute(self.database, statement.format(s=PASS_S))
        self._report()  # including agents that become silent now
        self._tell_nodes()
        self.store.expire(C)
        self._report()
        self._submit_due()

    def settle(self) -> None:
        self._report()

    def _submit_due(self) -> None:
        """Submit the jobs that have arrived in the world, with deadlines relative to now."""
        now_s = self.store.snapshot(C).now_s
        due = [one for one in self.scenario.arrivals if one.arrival_s <= self.world.now_s]
        specs = [one.spec for one in due[self.submitted :]]
        self.submitted = len(due)
        specs = [replace(spec, deadline_s=now_s + spec.deadline_s) for spec in specs]
        self.store.change(submit_jobs, C, specs)

    def _tell_nodes(self) -> None:
        names, there = self.world.store.node_names, self.world.store.schedulable.tolist()
        self.present = [name for name, ok in zip(names, there, strict=True) if ok]
        for name in names:
            if name in self.present:
                record_heartbeat(self.store, f"agent-{name}", cluster=C)
            else:
                silent = (
                    "UPDATE agents SET heard_at = now() - interval '1 h' WHERE name = 'agent-{}'"
                )
                execute(self.database, silent.format(name))

    def _report(self) -> None:
        """Let the agents of present nodes report until nothing changes."""
        while any([self._node_reports(node) for node in self.present]):
            pass

    def _node_reports(self, node: str) -> bool:
        desired = self.store.read(load_desired_gangs, C, f"agent-{node}")
        gangs = [
            self._observed(gang.spec.name, gang.generation, node)
            for gang in desired.gangs
            if node in dict(gang.allocation.shares)
        ]
        return self.store.update(
            record_observation, C, f"agent-{node}", "first", gangs, desired.revision
        )

    def _observed(self, name: str, generation: int, node: str) -> ObservedGang:
        known = self.world.store
        job = [spec.name for spec in known.specs].index(name)
        over = math.isfinite(known.jobs.ended_s[job])
        return ObservedGang(
            job=name,
            generation=generation,
            node=node,
            phase="succeeded" if over else "running",
            iterations_done=float(known.jobs.done[job]),
        )


_OLDER = (
    "UPDATE stints SET began_at = began_at - interval '{s} s', ended_at = ended_at - interval '{s} s'",
    """
UPDATE jobs SET created_at = created_at - interval '{s} s', queued_at = queued_at - interval '{s} s',
    since_at = since_at - interval '{s} s', started_at = started_at - interval '{s} s',
    deadline_s = deadline_s - {s}, start_by_s = start_by_s - {s},
    planned_start = planned_start || jsonb_build_object(
        'start_s', (planned_start->>'start_s')::float8 - {s},
        'end_s', (planned_start->>'end_s')::float8 - {s}
    )
""",
    """
UPDATE jobs SET schedule = (
    SELECT jsonb_agg(segment || jsonb_build_object(
        'start_s', (segment->>'start_s')::float8 - {s}, 'end_s', (segment->>'end_s')::float8 - {s}
    )) FROM jsonb_array_elements(schedule) AS segment
) WHERE jsonb_array_length(schedule) > 0
""",
)
"""Statements that let time pass in the database, by moving the times of jobs back."""


def make_both_stores(
    store: Store,
    database: Database,
    scenario: Scenario,
    failures: Sequence[Failure] = (),
    overheads: Overheads = FREE,
) -> tuple[InMemory, InPostgres]:
    """Return both stores of a scenario. The agents of the second report the state of the first."""
    world = World(scenario, overheads=overheads, failures=failures)
    memory = InMemory(world)
    return memory, InPostgres(store, database, world, scenario)


Row = tuple[object, ...]


def view(snapshot: Snapshot) -> dict[str, list[Row] | int]:
    """Return a round's snapshot by names, with times as ages in steps of ``PASS_S``.

    Rows keep their order.
    """
    s, jobs, a, segments = snapshot, snapshot.jobs, snapshot.allocations, snapshot.schedule_segments
    starts = s.planned_starts
    types = [*(kind.name for kind in s.gpu_types), ""]
    live = {s.workloads[w] for w in jobs.workload.tolist()}
    e = s.estimates

    def steps(seconds: float) -> int | None:
        return math.floor((seconds + PASS_S / 100) / PASS_S) if math.isfinite(seconds) else None

    def age(at_s: float) -> int | None:
        return steps(s.now_s - at_s)

    def cell(table: object, i: int) -> Row:
        pick = table.row(i)  # type: ignore[attr-defined]
        return pick["gpus"], pick["pipeline_degree"], types[pick["gpu_type"]], s.plans[pick["plan"]]

    return {
        "round": s.round_number,
        "types": [(t.name, t.memory_bytes) for t in s.gpu_types],
        "nodes": [
            (r["name"], types[r["gpu_type"]], r["gpus"], r["rack"], r["schedulable"])
            for r in map(s.nodes.row, range(len(s.nodes)))
        ],
        "estimates": [
            (s.workloads[r["workload"]].key, *cell(e, i), r["nodes"], r["iter_time_s"], r["source"])
            for i, r in enumerate(map(e.row, range(len(e))))
            if s.workloads[r["workload"]] in live
        ],
        "jobs": [
            (
                r["name"],
                r["version"],
                STATES[r["state"]].value,
                s.workloads[r["workload"]].key,
                r["iterations"],
                round(r["iterations_left"], 6),
                r["requested_gpus"],
                types[r["requested_gpu_type"]],
                r["pinned_gpu_type"],
                r["tenant"],
                r["priority"],
                r["weight"],
                r["guaranteed"],
                r["pinned"],
                r["admitted"],
                r["opportunistic"],
                r["restart_s"],
                r["generation"],
                types[r["current_type"]],
                r["current_gpus"],
                r["current_degree"],
                s.plans[r["current_plan"]] if r["current_gpus"] else "",
                age(r["submit_s"]),
                age(r["queued_s"]),
                r["since_s"] > 0 and age(r["since_s"]),
                steps(r["service_gpu_s"]),
                steps(r["deadline_s"] - s.now_s + PASS_S / 2),
                r["preemptible"],
                steps(r["start_by_s"] - s.now_s + PASS_S / 2),
            )
            for r in map(jobs.row, range(len(jobs)))
        ],
        "allocations": [
            (jobs.name[r["job"]], s.nodes.name[r["node"]], r["gpu"], r["hold"], r["generation"])
            for r in map(a.row, range(len(a)))
        ],
        "tenants": [tuple(s.tenants.row(i).values()) for i in range(len(s.tenants))],
        "quotas": [
            (s.tenants.name[r["tenant"]], types[r["gpu_type"]], r["gpus"])
            for r in map(s.quotas.row, range(len(s.quotas)))
        ],
        "avoided_nodes": [
            (jobs.name[r["job"]], s.nodes.name[r["node"]])
            for r in map(s.avoided_nodes.row, range(len(s.avoided_nodes)))
        ],
        "allowed types": [
            (jobs.name[r["job"]], types[r["gpu_type"]])
            for r in map(s.allowed_gpu_types.row, range(len(s.allowed_gpu_types)))
        ],
        "selectors": [
            (jobs.name[job], name, s.selectors.text[selector])
            for name in ("required_selector", "preferred_selector")
            for job, selector in enumerate(getattr(jobs, name).tolist())
            if selector >= 0
        ],
        "unmatched nodes": [
            (s.selectors.text[r["selector"]], s.nodes.name[r["node"]])
            for r in map(s.unmatched_nodes.row, range(len(s.unmatched_nodes)))
            if r["selector"] in {*jobs.required_selector, *jobs.preferred_selector}
        ],
        "segments": [
            (
                jobs.name[r["job"]],
                *cell(segments, i),
                steps(r["start_s"] - s.now_s),
                steps(r["end_s"] - s.now_s + PASS_S / 2),
            )
            for i, r in enumerate(map(segments.row, range(len(segments))))
        ],
        "planned starts": [
            (
                jobs.name[r["job"]],
                *cell(starts, i),
                steps(r["start_s"] - s.now_s + PASS_S / 2),
                steps(r["end_s"] - s.now_s + PASS_S / 2),
            )
            for i, r in enumerate(map(starts.row, range(len(starts))))
        ],
        "planned nodes": [
            (jobs.name[starts.job[r["start"]]], s.nodes.name[r["node"]], r["gpus"])
            for r in map(s.planned_nodes.row, range(len(s.planned_nodes)))
        ],
        "prices": [
            (name, round(price, 6))
            for name, price in zip(s.prices.name, s.prices.price.tolist(), strict=True)
        ],
    }


def decision_rows(record: RoundRecord) -> list[Row]:
    """Return the decisions of a round by names, in their order."""
    return [
        (
            d.job,
            d.kind,
            d.applied,
            d.admitted,
            d.opportunistic,
            d.allocation and (d.allocation.cell, d.allocation.generation, d.allocation.shares),
        )
        for d in record.decisions
    ]
