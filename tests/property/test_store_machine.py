"""Users, rounds, agents and failures in any order, on real PostgreSQL against a model of the GPUs.

The model knows what the agents physically run. The law that matters most: no agent is ever told to start
a gang on a GPU where another still runs.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field

import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    invariant,
    precondition,
    rule,
    run_state_machine_as_test,
)

from db.engine import Database
from db.store import PostgresStore
from db.tables import metadata
from db.writer import PostgresWriter
from formulation.check import held_twice
from formulation.decisions import Decision
from formulation.errors import NotAllowed, RoundSuperseded
from formulation.lifecycle import ACTIVE, LEAVING, JobEvent, JobState, advance, allowed
from formulation.placement import current_gangs
from formulation.policy import Policy
from formulation.resources import NodeSpec, ObservedGang, Request
from formulation.snapshot import STATES, Hold, Snapshot
from service.rounds import plan_round
from solvers.base import Budget
from solvers.greedy import Greedy
from tests.support.stored import C, a_cluster, a_spec, commit, do, execute, happen, job, states

NODES, GPUS = 3, 4

TRUNCATE = "TRUNCATE {} CASCADE".format(", ".join(table.name for table in metadata.sorted_tables))

nodes = st.sampled_from([f"a100-{i}" for i in range(NODES)])


@dataclass
class Running:
    """A gang's member on a node: what the agent knows and what occupies GPUs."""

    gpus: frozenset[int]
    phase: str = "running"
    iterations_done: float = -1.0

    @property
    def occupies(self) -> bool:
        return self.phase in ("running", "stopping")


@dataclass
class Agent:
    """An agent as a machine would see it."""

    number: int = 0
    alive: bool = True
    revision: int = 0
    gangs: dict[tuple[str, int], Running] = field(default_factory=dict)

    @property
    def incarnation(self) -> str:
        return "first" if self.number == 0 else f"incarnation-{self.number}"


class StoreMachine(RuleBasedStateMachine):
    """See the module."""

    database: Database

    def __init__(self) -> None:
        super().__init__()
        self.store = PostgresStore(self.database)
        execute(self.database, TRUNCATE)
        a_cluster(self.store, NODES, GPUS)
        self.agents = {f"a100-{i}": Agent() for i in range(NODES)}
        self.requests = 0
        self.jobs: list[str] = []
        self.wanted: dict[str, JobEvent] = {}  # the last that its user asked of a job
        self.planned: tuple[Snapshot, list[Decision], Request] | None = None

    def request(self) -> Request:
        self.requests += 1
        return Request(id=f"r{self.requests}", method="m", digest="d")

    # What users do.

    @rule(gpus=st.sampled_from([1, 2, 4, 8]), guaranteed=st.booleans(), weight=st.floats(0.5, 8))
    def submit(self, gpus: int, guaranteed: bool, weight: float) -> None:
        name, request = f"j{len(self.jobs)}", self.request()
        spec = a_spec(name, requested_gpus=gpus, guaranteed=guaranteed, weight=weight,
                      iterations=100, restart_s=0.0)  # fmt: skip

        def work(writer: PostgresWriter) -> bytes:
            return writer.submit_jobs(C, [spec])[0].spec.name.encode()

        answers = {self.store.write(request, work) for _ in range(2)}  # the reply was lost once
        assert answers == {name.encode()}
        self.jobs.append(name)

    @precondition(lambda self: self.jobs)
    @rule(data=st.data(), event=st.sampled_from([JobEvent.HOLD, JobEvent.RELEASE, JobEvent.CANCEL]))
    def user_event(self, data: st.DataObject, event: JobEvent) -> None:
        name = data.draw(st.sampled_from(self.jobs))
        if allowed(job(self.store, name).state, event):
            happen(self.store, name, event)
            self.wanted[name] = event
        else:
            with pytest.raises(NotAllowed):
                happen(self.store, name, event)

    @precondition(lambda self: self.jobs)
    @rule(data=st.data(), weight=st.floats(0.5, 8))
    def reweigh(self, data: st.DataObject, weight: float) -> None:
        spec = a_spec(data.draw(st.sampled_from(self.jobs)), weight=weight)
        try:
            do(self.store, lambda w: w.update_job(C, spec, ["weight"], None))
        except NotAllowed:
            assert job(self.store, spec.name).ended_s is not None

    @rule(node=nodes, draining=st.booleans())
    def drain(self, node: str, draining: bool) -> None:
        do(self.store, lambda w: w.drain_nodes(C, [node], draining=draining))

    # What rounds do. Between plan and commit anything may happen.

    @rule()
    def plan(self) -> None:
        lost = self.store.expire(C)
        assert all(job(self.store, name).state not in ACTIVE for name in lost)
        snapshot = self.store.snapshot(C)
        outcome = plan_round(snapshot, Policy(), Greedy(), Budget(remaining_s=lambda: math.inf))
        assert not outcome.violations
        self.planned = (snapshot, list(outcome.decisions), self.request())

    @precondition(lambda self: self.planned)
    @rule()
    def commit(self) -> None:
        assert self.planned is not None
        snapshot, decisions, request = self.planned
        cluster = self.store.get_cluster(C)
        if cluster.epoch != snapshot.epoch:
            with pytest.raises(RoundSuperseded):
                commit(self.store, snapshot, *decisions, request=request)
            assert self.store.replayed_round(request) is None
        else:
            record = commit(self.store, snapshot, *decisions, request=request)
            assert commit(self.store, snapshot, *decisions, request=request) == record
            assert self.store.replayed_round(request) == record
            assert self.store.get_cluster(C).last_round == cluster.last_round + 1
        self.planned = None

    @rule()
    def round(self) -> None:
        self.plan()
        self.commit()

    # What agents do.

    @rule(node=nodes)
    def obey(self, node: str) -> None:
        """Fetch the desired state, stop what is not in it, start what is new."""
        agent = self.agents[node]
        if not agent.alive:
            return
        desired = self.store.desired(C, f"agent-{node}")
        agent.revision = desired.revision
        wanted = {
            (gang.spec.name, gang.generation): frozenset(shares[node])
            for gang in desired.gangs
            if node in (shares := dict(gang.allocation.shares))
        }
        for key, gang in list(agent.gangs.items()):
            if key not in wanted:
                if gang.occupies:
                    gang.phase = "stopping"
                else:
                    del agent.gangs[key]  # its end has been taken in
        for key, gpus in wanted.items():
            if key not in agent.gangs:
                busy = {g for r in agent.gangs.values() if r.occupies for g in r.gpus}
                assert not busy & gpus, f"{key} is to start on {node} beside {agent.gangs}"
                agent.gangs[key] = Running(gpus)

    @rule(node=nodes)
    def reap(self, node: str) -> None:
        gangs = self.agents[node].gangs
        for key in [key for key, gang in gangs.items() if gang.phase == "stopping"]:
            del gangs[key]

    @rule(node=nodes, data=st.data())
    def progress(self, node: str, data: st.DataObject) -> None:
        for gang in self.agents[node].gangs.values():
            if gang.phase == "running":
                gang.phase = data.draw(
                    st.sampled_from(["running", "running", "succeeded", "failed"])
                )
                gang.iterations_done = data.draw(st.floats(0, 120))

    @rule(node=nodes)
    def report(self, node: str) -> None:
        agent = self.agents[node]
        if not agent.alive:
            return
        before = {name: job(self.store, name).iterations_done for name, _ in agent.gangs}
        gangs = [
            ObservedGang(job=name, generation=generation, node=node, phase=gang.phase,
                         iterations_done=gang.iterations_done)
            for (name, generation), gang in agent.gangs.items()
        ]  # fmt: skip
        name = f"agent-{node}"
        self.store.observe(C, name, agent.incarnation, gangs, agent.revision)
        again = self.store.observe(C, name, agent.incarnation, gangs, agent.revision)
        assert not again, "the same report twice changed the desired state twice"
        for job_name, done in before.items():
            assert done <= job(self.store, job_name).iterations_done <= 100

    @rule(node=nodes)
    def restart_agent(self, node: str) -> None:
        """The agent's process dies with its gangs and is started again at once."""
        self.agents[node].gangs.clear()
        self.agents[node].alive = False
        self.come_back(node)

    @rule(node=nodes)
    def lose(self, node: str) -> None:
        """The node is cut off until its lease and the margin have run out: its gangs are dead."""
        agent = self.agents[node]
        agent.alive = False
        agent.gangs.clear()
        execute(
            self.database,
            f"UPDATE agents SET heard_at = now() - interval '46 s' WHERE name = 'agent-{node}'",
        )

    @rule(node=nodes)
    def come_back(self, node: str) -> None:
        agent = self.agents[node]
        if not agent.alive:
            before = agent.incarnation
            agent.alive, agent.number = True, agent.number + 1
            spec = NodeSpec(name=node, gpu_type="a100", gpus=GPUS)
            self.store.hello(C, f"agent-{node}", agent.incarnation, [spec])
            with pytest.raises(NotAllowed):
                self.store.heartbeat(C, f"agent-{node}", before)

    # What always holds.

    @invariant()
    def gpus_are_held_once_and_by_who_owns_them(self) -> None:
        snapshot = self.store.snapshot(C)
        assert held_twice(snapshot) == []
        owned, jobs, a = current_gangs(snapshot), snapshot.jobs, snapshot.allocations
        for j in range(len(jobs)):
            active = STATES[int(jobs.state[j])] in ACTIVE
            assert (j in owned) == active
            if active:
                assert owned[j].gpus == jobs.current_gpus[j]
        own = (a.job >= 0) & (a.hold != Hold.RELEASING)
        assert (a.generation[own] == jobs.generation[a.job[own]]).all()

    @invariant()
    def what_occupies_a_gpu_holds_it(self) -> None:
        snapshot = self.store.snapshot(C)
        a = snapshot.allocations
        holders = {
            (snapshot.nodes.name[n], g)
            for n, g, h in zip(a.node.tolist(), a.gpu.tolist(), a.hold.tolist(), strict=True)
            if h != Hold.RESERVED
        }
        for node, agent in self.agents.items():
            for gang in agent.gangs.values():
                if gang.occupies:
                    assert {(node, g) for g in gang.gpus} <= holders

    @invariant()
    def users_get_what_they_asked_for(self) -> None:
        now = states(self.store)
        assert list(now) == self.jobs
        for name, event in self.wanted.items():
            if event is JobEvent.CANCEL:
                assert now[name] in (JobState.CANCELLING, JobState.CANCELLED, JobState.SUCCEEDED)
            elif event is JobEvent.HOLD:
                assert now[name] in (JobState.HOLDING, JobState.HELD, JobState.SUCCEEDED)

    def teardown(self) -> None:
        """Histories are legal; and once agents have caught up nothing is left half-way."""
        for _ in range(3):
            for node in self.agents:
                self.come_back(node)
                for step in (self.obey, self.reap, self.report):
                    step(node)
        assert not [n for n, state in states(self.store).items() if state in LEAVING]
        hold = self.store.snapshot(C).allocations.hold
        assert (hold == Hold.HELD).all()
        for name in self.jobs:
            state = JobState.QUEUED
            for _, event, after in self.store.job_history(C, name):
                state = advance(state, JobEvent(event))
                assert state == after
            assert state is job(self.store, name).state


def test_nothing_that_happens_breaks_the_stores_promises(database: Database) -> None:
    run_state_machine_as_test(
        type("Machine", (StoreMachine,), {"database": database}),
        settings=settings(
            max_examples=25, stateful_step_count=30, deadline=None, derandomize=True,
            suppress_health_check=list(HealthCheck),
        ),
    )  # fmt: skip
