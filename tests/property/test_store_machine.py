"""Users, rounds, agents and failures in any order: the store on real PostgreSQL against a model of the GPUs.

The model knows what the agents physically run. The most important law: no agent is ever instructed
to start a gang on a GPU on which another gang still runs.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, field, replace

import numpy as np
import pytest
from hypothesis import HealthCheck, given
from hypothesis import strategies as st

from tessera.db.agents.agents import load_desired_gangs
from tessera.db.agents.observe import record_observation
from tessera.db.clusters.drains import drain_nodes
from tessera.db.clusters.tenants import delete_tenants, list_tenants, upsert_tenants
from tessera.db.jobs.job_changes import update_job
from tessera.db.jobs.submission import submit_jobs
from tessera.db.schema.engine import Database
from tessera.db.schema.tables import metadata
from tessera.db.store.reads import get_cluster, get_node, job_history
from tessera.db.store.store import Connection, Store
from tessera.formulation.answer.check import find_doubly_held
from tessera.formulation.answer.decisions import Decision, DecisionKind
from tessera.formulation.answer.placement import current_gangs
from tessera.formulation.base.errors import InvalidInput, NotAllowed, RoundSuperseded
from tessera.formulation.base.values import Hold
from tessera.formulation.job.exit_reasons import ExitReason
from tessera.formulation.job.lifecycle import (
    ACTIVE,
    LEAVING,
    WAITING,
    JobEvent,
    JobState,
    advance_state,
    is_allowed,
)
from tessera.formulation.records.agents import (
    DesiredState,
    HealthFault,
    NodeHealth,
    ObservedGang,
)
from tessera.formulation.records.clusters import NodeSpec, TenantSpec
from tessera.formulation.records.store import Request
from tessera.formulation.state.last_round import StartPlan
from tessera.formulation.state.snapshot import STATES, Snapshot
from tests.support.laws import examples
from tests.support.stored_cluster import (
    C,
    a_cluster,
    a_random_plan,
    a_random_round,
    a_spec,
    apply_event,
    commit,
    execute,
    job,
    record_heartbeat,
    states,
)

NODES, GPUS = 3, 4

LATE_S = 4e9
"""The deadline that every job has when it is submitted, in seconds since 1970."""

USERS_EVENTS = (JobEvent.RELEASE, JobEvent.HOLD, JobEvent.CANCEL)

OFTEN = {
    "obey": 4,
    "fetch": 1,
    "act": 2,
    "reap": 3,
    "report": 5,
    "catch_up": 4,
    "progress": 2,
    "train": 3,
    "late": 2,
    "round": 4,
    "plan": 2,
    "commit": 2,
    "user_event": 2,
    "reweigh": 1,
    "hurry": 1,
    "drain": 1,
    "health": 2,
    "lose": 1,
    "come_back": 2,
    "restart_agent": 1,
    "submit": 1,
    "tenants": 1,
}
"""The relative frequency of each event."""

HAPPENINGS = st.tuples(
    st.sampled_from([name for name, weight in OFTEN.items() for _ in range(weight)]),
    st.sampled_from([f"a100-{i}" for i in range(NODES)]),
    st.integers(0, 2**16),
)

OVER = "UPDATE nodes SET probation_until = now() WHERE probation_until IS NOT NULL"
"""The statement that ends all probations."""

TRUNCATE = "TRUNCATE {} CASCADE".format(
    ", ".join(table.name for table in metadata.sorted_tables if table.name != "audit_log")
)


@dataclass
class Running:
    """A gang's member on a node, as its agent knows it and as it occupies GPUs."""

    gpus: frozenset[int]
    phase: str = "running"
    iterations_done: float = -1.0
    resumed_iterations: float | None = None  # None if the job is replayed, or does not train yet
    exit_reason: ExitReason | None = None

    @property
    def occupies(self) -> bool:
        return self.phase in ("running", "stopping")


@dataclass
class Agent:
    """An agent, as seen from its machine."""

    number: int = 0
    alive: bool = True
    revision: int = 0  # of the desired state that was last carried out
    fetched: DesiredState | None = None
    gangs: dict[tuple[str, int], Running] = field(default_factory=dict)

    @property
    def incarnation(self) -> str:
        return "first" if self.number == 0 else f"incarnation-{self.number}"


class World:
    """A stored cluster, with users' requests and the gangs that agents physically run."""

    def __init__(self, database: Database) -> None:
        self.database, self.store = database, Store(database)
        execute(database, TRUNCATE)
        a_cluster(self.store, NODES, GPUS)
        self.agents = {f"a100-{i}": Agent() for i in range(NODES)}
        self.requests = 0
        self.jobs: list[str] = []
        self.wanted: dict[str, JobEvent] = {}  # the user's last request for each job
        self.planned: tuple[Snapshot, list[Decision], StartPlan | None, Request] | None = None
        self.avoids: dict[str, tuple[str, ...]] = {}
        self.promised: dict[str, bool] = {}  # as by the last round that decided on the job
        self.served: dict[str, float] = {}
        self.tenants: dict[str, TenantSpec] = {}

    def request(self) -> Request:
        self.requests += 1
        return Request(id=f"r{self.requests}", method="m", digest="d")

    def happens(self, name: str, node: str, pick: int) -> None:
        """Perform one event; ``pick`` decides its details."""
        calls: dict[str, Callable[[], None]] = {
            "progress": lambda: self.progress(node, pick),
            "train": lambda: self.train(node, pick),
            "plan": lambda: self.plan(pick),
            "round": lambda: self.round(pick),
            "commit": self.commit,
            "user_event": lambda: self.user_event(pick, USERS_EVENTS[pick % 3]),
            "late": lambda: self.late(node, pick),
            "reweigh": lambda: self.reweigh(pick),
            "submit": lambda: self.submit(1 + pick % 8, node),
            "hurry": lambda: self.hurry(pick),
            "tenants": lambda: self.set_tenants(pick),
            "drain": lambda: self.drain(node, draining=pick % 3 == 0),
            "health": lambda: self.report_health(node, pick),
        }
        on_node: dict[str, Callable[[str], None]] = {
            "obey": self.obey,
            "fetch": self.fetch,
            "act": self.act,
            "reap": self.reap,
            "report": self.report,
            "lose": self.lose,
            "catch_up": self.catch_up,
            "come_back": self.come_back,
            "restart_agent": self.restart_agent,
        }
        if name in calls:
            calls[name]()
        else:
            on_node[name](node)

    # Actions of users.

    def submit(self, gpus: int, avoids: str = "") -> None:
        name, request = f"j{len(self.jobs)}", self.request()
        self.avoids[name] = (avoids,) if avoids else ()
        spec = a_spec(
            name,
            requested_gpus=gpus,
            iterations=100,
            deadline_s=LATE_S,
            avoid_nodes=self.avoids[name],
        )

        def work(connection: Connection) -> bytes:
            return submit_jobs(connection, C, [spec])[0].spec.name.encode()

        # as if the first reply was lost
        answers = {self.store.write(request, work) for _ in range(2)}
        assert answers == {name.encode()}
        self.jobs.append(name)

    def user_event(self, pick: int, event: JobEvent) -> None:
        name = self.jobs[pick % len(self.jobs)]
        if is_allowed(job(self.store, name).state, event):
            apply_event(self.store, name, event)
            self.wanted[name] = event
        else:
            with pytest.raises(NotAllowed):
                apply_event(self.store, name, event)

    def hurry(self, pick: int) -> None:
        """Change a deadline as a user; an earlier deadline ends the promise of a later one."""
        name = self.jobs[pick % len(self.jobs)]
        stored, deadline_s = job(self.store, name), LATE_S - pick
        spec = a_spec(name, deadline_s=deadline_s)
        if stored.ended_s is None:
            self.store.change(update_job, C, spec, ["deadline_s"], None)
            kept = deadline_s >= stored.spec.deadline_s
            self.promised[name] = kept and self.promised.get(name, False)

    def set_tenants(self, pick: int) -> None:
        """Set the quotas of one of three tenants as an administrator, or delete the tenant."""
        name, gpus = f"t{pick % 3}", pick % (NODES * GPUS + 2)
        if pick % 5 == 0 and name in self.tenants:
            self.store.change(delete_tenants, C, [name])
            del self.tenants[name]
        else:
            tenant = TenantSpec(name=name, weight=pick % 4, quotas={("", "a100")[pick % 2]: gpus})
            changed = self.tenants | {name: tenant}
            typed = sum(t.quotas.get("a100", 0) for t in changed.values())
            everything = typed + sum(t.quotas.get("", 0) for t in changed.values())
            if max(typed, everything) > NODES * GPUS:
                with pytest.raises(InvalidInput, match=f"{NODES * GPUS}"):
                    self.store.change(upsert_tenants, C, [tenant])
            else:
                self.store.change(upsert_tenants, C, [tenant])
                self.tenants = changed
        stored = self.store.read(list_tenants, C)
        assert stored == [self.tenants[key] for key in sorted(self.tenants)]

    def reweigh(self, pick: int) -> None:
        spec = a_spec(self.jobs[pick % len(self.jobs)], weight=2.0)
        try:
            self.store.change(update_job, C, spec, ["weight"], None)
        except NotAllowed:
            assert job(self.store, spec.name).ended_s is not None

    def drain(self, node: str, draining: bool) -> None:
        self.store.change(drain_nodes, C, [node], draining=draining)

    # Actions of rounds. Anything may happen between plan and commit.

    def plan(self, seed: int) -> None:
        lost = self.store.expire(C)
        assert all(job(self.store, name).state not in ACTIVE for name in lost)
        snapshot = self.store.snapshot(C)
        rng = np.random.default_rng(seed)
        decisions = a_random_round(snapshot, rng, rejects=0.05)
        plan = a_random_plan(snapshot, rng) if seed % 2 else None
        self.planned = (snapshot, decisions, plan, self.request())

    def commit(self) -> None:
        if self.planned is None:
            return
        snapshot, decisions, plan, request = self.planned
        cluster = self.store.read(get_cluster, C)
        if cluster.epoch != snapshot.epoch:
            with pytest.raises(RoundSuperseded):
                commit(self.store, snapshot, *decisions, request=request, plan=plan)
            assert isinstance(self.store.begin_round(C, request), Snapshot)
        else:
            record = commit(self.store, snapshot, *decisions, request=request, plan=plan)
            assert commit(self.store, snapshot, *decisions, request=request, plan=plan) == record
            assert self.store.begin_round(C, request) == record
            assert self.store.read(get_cluster, C).last_round == cluster.last_round + 1
            for d in record.decisions:
                if d.applied and plan is not None:
                    waits = job(self.store, d.job).state in WAITING
                    start_by_s = float(plan.start_by_s[snapshot.jobs.name.index(d.job)])
                    assert job(self.store, d.job).start_by_s == (start_by_s if waits else math.inf)
                if d.applied:
                    self.promised[d.job] = d.admitted and d.kind != DecisionKind.REJECT
        self.planned = None

    def round(self, pick: int) -> None:
        """Plan and commit a round; sometimes a user changes a running job in between."""
        self.plan(pick)
        running = [i for i, s in enumerate(states(self.store).values()) if s in ACTIVE]
        if pick % 3 == 0 and running:
            self.reweigh(running[pick % len(running)])
        self.commit()

    # Actions of agents.

    def catch_up(self, node: str) -> None:
        for step in (self.obey, self.reap, self.report):
            step(node)

    def obey(self, node: str) -> None:
        self.fetch(node)
        self.act(node)

    def fetch(self, node: str) -> None:
        if self.agents[node].alive:
            self.agents[node].fetched = self.store.read(load_desired_gangs, C, f"agent-{node}")

    def act(self, node: str) -> None:
        """Stop gangs that are not in the last fetched state, however old that is, and start new ones."""
        agent = self.agents[node]
        if not agent.alive or agent.fetched is None:
            return
        agent.revision = agent.fetched.revision
        desired = {
            (gang.spec.name, gang.generation): frozenset(shares[node])
            for gang in agent.fetched.gangs
            if node in (shares := dict(gang.allocation.shares))
        }
        for key, gang in list(agent.gangs.items()):
            if key not in desired:
                if gang.occupies:
                    gang.phase = "stopping"
                else:
                    del agent.gangs[key]  # the server knows of its end
        for key, gpus in desired.items():
            if key not in agent.gangs:
                busy = {g for r in agent.gangs.values() if r.occupies for g in r.gpus}
                assert not busy & gpus, f"{key} is to start on {node} next to {agent.gangs}"
                agent.gangs[key] = Running(gpus)

    def late(self, node: str, pick: int) -> None:
        """Commit a round and report, while the agent's fetched state is still on its way."""
        self.fetch(node)
        self.round(pick)
        self.report(node)
        self.act(node)

    def reap(self, node: str) -> None:
        gangs = self.agents[node].gangs
        for key in [key for key, gang in gangs.items() if gang.phase == "stopping"]:
            del gangs[key]

    def progress(self, node: str, pick: int) -> None:
        for (name, _), gang in self.agents[node].gangs.items():
            if gang.phase == "running":
                gang.phase = ("running", "running", "running", "succeeded", "failed")[pick % 5]
                gang.iterations_done = float(pick % 120)
                gang.exit_reason = (None, *ExitReason)[pick % 9] if gang.phase == "failed" else None
                if self.trains(name):
                    gang.resumed_iterations = float(pick % 120 // 2)

    def train(self, node: str, pick: int) -> None:
        """Let an agent obey, and report twice, the second time perhaps with less progress."""
        self.catch_up(node)
        for step in (pick // 120 * 5, pick):  # a multiple of 5 ends no gang
            self.progress(node, step)
            self.report(node)

    def trains(self, name: str) -> bool:
        """Return whether a job trains, as every other one does. The rest are replayed."""
        return self.jobs.index(name) % 2 == 0

    def report(self, node: str) -> None:
        agent = self.agents[node]
        if not agent.alive:
            return
        before = {name: job(self.store, name) for name, _ in agent.gangs}
        gangs = [
            ObservedGang(
                job=name,
                generation=generation,
                node=node,
                phase=gang.phase,
                iterations_done=gang.iterations_done,
                resumed_iterations=gang.resumed_iterations,
                exit_reason=gang.exit_reason,
                runtime="command" if self.trains(name) else "replay",
            )
            for (name, generation), gang in agent.gangs.items()
        ]
        name = f"agent-{node}"
        self.store.update(record_observation, C, name, agent.incarnation, gangs, agent.revision)
        again = self.store.update(
            record_observation, C, name, agent.incarnation, gangs, agent.revision
        )
        assert not again, "a repeated report changed the desired state again"
        for (job_name, generation), gang in agent.gangs.items():
            then, done = before[job_name], job(self.store, job_name).iterations_done
            assert 0 <= done <= 100
            if gang.resumed_iterations is None:
                assert self.trains(job_name) or then.iterations_done <= done
            elif then.allocation is None or then.generation != generation:
                pass  # another gang of the job counts, or none does
            elif gang.phase == "running" and then.allocation.shares[0][0] == node:
                assert done == min(gang.iterations_done, 100.0)

    def report_health(self, node: str, pick: int) -> None:
        """Report none to two faults; the probation of the node may be over before that."""
        if not self.agents[node].alive:
            return
        if pick % 5 == 0:
            execute(self.database, OVER)
        faults = tuple(
            HealthFault(gpu=gpu, kind="ecc", detail="x") for gpu in range(2) if pick >> gpu & 1
        )
        before = self.store.read(get_node, C, node)
        health = [NodeHealth(node=node, faults=faults)]
        report = (C, f"agent-{node}", self.agents[node].incarnation, health)
        self.store.record_health(*report)
        after = self.store.read(get_node, C, node)
        assert after.faults == tuple(fault.sentence for fault in faults)
        assert (after.drained_by == "health") >= (after.probation_end_s is not None)
        if before.draining and before.drained_by != "health":
            assert after.draining, "health has undone an operator's drain"
        self.store.record_health(*report)
        again = self.store.read(get_node, C, node)
        assert replace(again, silent_s=after.silent_s) == after

    def restart_agent(self, node: str) -> None:
        """Kill the agent's process with its gangs, and restart it at once."""
        self.agents[node].gangs.clear()
        self.agents[node].alive = False
        self.come_back(node)

    def lose(self, node: str) -> None:
        """Disconnect the node until its lease and the margin have expired; its gangs are dead."""
        agent = self.agents[node]
        agent.alive = False
        agent.gangs.clear()
        execute(
            self.database,
            f"UPDATE agents SET heard_at = now() - interval '46 s' WHERE name = 'agent-{node}'",
        )

    def come_back(self, node: str) -> None:
        agent = self.agents[node]
        if not agent.alive:
            before = agent.incarnation
            agent.alive, agent.number = True, agent.number + 1
            agent.fetched, agent.revision = None, 0
            spec = NodeSpec(name=node, gpu_type="a100", gpus=GPUS)
            self.store.hello(C, f"agent-{node}", agent.incarnation, [spec])
            with pytest.raises(NotAllowed):
                record_heartbeat(self.store, f"agent-{node}", before)

    # Invariants.

    def gpus_are_held_once_and_by_who_owns_them(self) -> None:
        snapshot = self.store.snapshot(C)
        assert find_doubly_held(snapshot) == []
        owned, jobs, a = current_gangs(snapshot), snapshot.jobs, snapshot.allocations
        for j in range(len(jobs)):
            active = STATES[int(jobs.state[j])] in ACTIVE
            assert (j in owned) == active
            if active:
                assert owned[j].gpus == jobs.current_gpus[j]
        own = (a.job >= 0) & (a.hold != Hold.RELEASING)
        assert (a.generation[own] == jobs.generation[a.job[own]]).all()
        rows = np.column_stack([a.node, a.gpu, a.hold, a.job]).tolist()
        leaving = {(n, g) for n, g, hold, _ in rows if hold == Hold.RELEASING}
        leavers = {j for _, _, hold, j in rows if hold == Hold.RELEASING and j >= 0}
        waiters = {j for n, g, hold, j in rows if hold == Hold.RESERVED and (n, g) not in leaving}
        assert waiters <= leavers, "a job waits, but not for GPUs that are being released"
        held = {j for _, _, hold, j in rows if hold == Hold.HELD}
        assert not held & leavers, "a job has a gang before its former one is gone"
        holders = {
            (snapshot.nodes.name[n], g)
            for n, g in zip(a.node.tolist(), a.gpu.tolist(), strict=True)
        }
        for node, agent in self.agents.items():
            for gang in agent.gangs.values():
                if gang.occupies:  # the store must know it
                    assert {(node, g) for g in gang.gpus} <= holders

    def promises_and_service_are_remembered(self) -> None:
        """Check that only rounds make promises, and that service grows exactly while a job has GPUs."""
        jobs = self.store.snapshot(C).jobs
        active = np.array([STATES[state] in ACTIVE for state in jobs.state.tolist()], np.bool_)
        assert ((jobs.since_s > 0) == active).all()
        assert (jobs.queued_s >= jobs.submit_s).all()
        assert not (jobs.opportunistic & ~active).any()
        for name, admitted, served, runs in zip(
            jobs.name,
            jobs.admitted.tolist(),
            jobs.service_gpu_s.tolist(),
            active.tolist(),
            strict=True,
        ):
            assert admitted == self.promised.get(name, False), name
            assert served > self.served.get(name, -1.0) or (
                not runs and served == self.served[name]
            )
            self.served[name] = served

    def users_get_what_they_asked_for(self) -> None:
        now = states(self.store)
        assert list(now) == self.jobs, now
        for name, event in self.wanted.items():
            if event is JobEvent.CANCEL:
                assert now[name] in (JobState.CANCELLING, JobState.CANCELLED, JobState.SUCCEEDED)
            elif event is JobEvent.HOLD:
                assert now[name] in (JobState.HOLDING, JobState.HELD, JobState.SUCCEEDED)

    def catches_up(self) -> None:
        """Check that histories are legal, and that nothing is left half-done once agents have caught up."""
        for _ in range(3):
            for node in self.agents:
                self.come_back(node)
                for step in (self.obey, self.reap, self.report):
                    step(node)
        assert not [n for n, state in states(self.store).items() if state in LEAVING]
        hold = self.store.snapshot(C).allocations.hold
        assert (hold == Hold.HELD).all()
        snapshot = self.store.snapshot(C)
        avoided = zip(
            snapshot.avoided_nodes.job.tolist(), snapshot.avoided_nodes.node.tolist(), strict=True
        )
        assert [(snapshot.jobs.name[j], snapshot.nodes.name[n]) for j, n in avoided] == [
            (name, node) for name in snapshot.jobs.name for node in self.avoids[name]
        ]
        for name in self.jobs:
            state = JobState.QUEUED
            for entry in self.store.read(job_history, C, name):
                event, after = entry.event, entry.state
                state = advance_state(state, JobEvent(event))
                assert state == after
            assert state is job(self.store, name).state


@examples(30, HealthCheck.function_scoped_fixture)
@given(happenings=st.lists(HAPPENINGS, min_size=30, max_size=60))
def test_nothing_that_happens_breaks_the_stores_promises(
    database: Database, happenings: list[tuple[str, str, int]]
) -> None:
    world = World(database)
    for gpus in (1, 2, 3, 4):
        world.submit(gpus)
    for name, node, pick in happenings:
        world.happens(name, node, pick)
        world.gpus_are_held_once_and_by_who_owns_them()
        world.users_get_what_they_asked_for()
        world.promises_and_service_are_remembered()
    world.catches_up()
