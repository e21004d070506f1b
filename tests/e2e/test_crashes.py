"""Processes that are killed, frozen or cut off: acknowledged changes survive, and none is half done."""

from __future__ import annotations

import os
import signal
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Self

import grpc
import numpy as np
import pytest
import sqlalchemy as sa
from grpc_health.v1 import health_pb2, health_pb2_grpc
from numpy.random import Generator

from tessera.db.schema import embedded
from tessera.db.schema.engine import connect_database
from tessera.service.cli.demo.stack import Stack, run_stack
from tessera.v1 import jobs_pb2, scheduler_pb2
from tests.support.agents import is_running
from tests.support.laws import scaled
from tests.support.patience import PATIENCE_S
from tests.support.system import Agent, Lab, User, a_job_message, kill_postgres, until, uuid

LIVE_JOBS = 12
"""The number of uncancelled jobs above which the canceller works."""

PAUSE_S = 0.02
"""The pause between two calls of one user."""


class Load:
    """Four threads of calls. They keep the acknowledged submissions, cancellations and rounds."""

    def __init__(self, lab: Lab, seed: int) -> None:
        self._lab, self._seed = lab, seed
        self._stop, self._lock = threading.Event(), threading.Lock()
        self._goes_on = threading.Event()
        self._goes_on.set()
        self._threads = [
            threading.Thread(target=self._repeat, args=(number, work))
            for number, work in enumerate(
                (self._submit, self._cancel, self._schedule, self._schedule)
            )
        ]
        self.user = User(lab.stack)
        self.first = 0  # the replica that each call tries first
        self.begun = 0  # calls, each counted once even if it is repeated
        self.submitted: dict[str, str] = {}  # label -> name
        self.cancelled: set[str] = set()
        self.rounds: dict[str, str] = {}  # request id -> name
        self.errors: list[grpc.RpcError | AssertionError] = []

    @property
    def acknowledged(self) -> int:
        """Return the number of answered calls."""
        return len(self.submitted) // 2 + len(self.cancelled) + len(self.rounds)

    def __enter__(self) -> Self:
        for thread in self._threads:
            thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        """Wait until each user has finished its call."""
        self._stop.set()
        self._goes_on.set()
        for thread in self._threads:
            thread.join()
        self.user.__exit__()
        assert not self.errors, self.errors

    @contextmanager
    def paused(self) -> Iterator[None]:
        """Begin no call inside the block, while a test waits for something that needs none."""
        self._goes_on.clear()
        try:
            yield
        finally:
            self._goes_on.set()

    def wait_for_calls(self, begun: int) -> None:
        """Wait until ``begun`` more calls have begun."""
        target = self.begun + begun
        until(lambda: self.begun >= target or self.errors, f"{begun} more calls")

    def wait_for_answers(self, answers: int) -> None:
        """Wait until ``answers`` more calls have been answered."""
        target = self.acknowledged + answers
        until(lambda: self.acknowledged >= target or self.errors, f"{answers} more answers")

    def _repeat(self, number: int, work: Callable[[str, Generator], None]) -> None:
        rng = np.random.default_rng((self._seed, number))
        turn = 0
        while not self._stop.wait(PAUSE_S):
            turn += 1
            self._goes_on.wait()
            try:
                work(f"{number}-{turn}", rng)
            except (grpc.RpcError, AssertionError) as error:
                self.errors.append(error)
                return

    def _begin(self) -> None:
        with self._lock:
            self.begun += 1

    def _submit(self, turn: str, rng: Generator) -> None:
        """Submit two jobs, one under a chosen name and one under a name from the server."""
        if len(self.submitted) - len(self.cancelled) > 2 * LIVE_JOBS:
            return
        labels = [f"{turn}-named", f"{turn}-unnamed"]
        inner = [
            jobs_pb2.SubmitJobRequest(
                job_id=f"job-{label}" if label.endswith("-named") else "",
                job=a_job_message(
                    int(rng.choice([1, 2, 4])), float(rng.integers(1, 9)), {"load": label}
                ),
            )
            for label in labels
        ]
        request = jobs_pb2.SubmitJobsRequest(
            parent=self._lab.parent, requests=inner, request_id=self._id(turn)
        )
        self._begin()
        answer = self.user.insist(lambda r: r.jobs.SubmitJobs(request, timeout=10), self.first)
        self.submitted.update({job.labels["load"]: job.name for job in answer.jobs})

    def _cancel(self, turn: str, rng: Generator) -> None:
        live = sorted(set(self.submitted.copy().values()) - self.cancelled)
        if len(live) <= LIVE_JOBS:
            return
        request = jobs_pb2.CancelJobRequest(name=str(rng.choice(live)), request_id=self._id(turn))
        self._begin()
        self.user.insist(lambda r: r.jobs.CancelJob(request, timeout=10), self.first)
        self.cancelled.add(request.name)

    def _schedule(self, turn: str, rng: Generator) -> None:
        request = scheduler_pb2.ScheduleRequest(
            parent=self._lab.parent,
            request_id=self._id(turn),
            summary_only=True,
            options=scheduler_pb2.RoundOptions(solver="greedy"),
        )
        self._begin()
        answer = self.user.insist(lambda r: r.scheduler.Schedule(request, timeout=10), self.first)
        self.rounds[request.request_id] = answer.name

    def _id(self, turn: str) -> str:
        return uuid(f"{self._lab.parent}/{self._seed}/{turn}")


LEASE_S, MARGIN_S, HEARTBEAT_S = 20.0, 5.0, 0.5  # a busy machine may take long to start a server

SETTINGS = {
    "TESSERA_LEASE_S": str(LEASE_S),
    "TESSERA_MARGIN_S": str(MARGIN_S),
    "TESSERA_HEARTBEAT_S": str(HEARTBEAT_S),
    "TESSERA_INSPECT_S": "0.5",
    "TESSERA_HEALTH_PERIOD_S": "0.5",
    "TESSERA_ROUND_THREADS": "1",
}

KILLS = scaled(11)


@pytest.fixture(scope="module")
def stack() -> Iterator[Stack]:
    with run_stack(replicas=2, settings=SETTINGS) as started:
        yield started


@pytest.fixture(scope="module")
def user(stack: Stack) -> Iterator[User]:
    with User(stack) as caller:
        yield caller


def test_servers_killed_at_any_moment_lose_no_acknowledged_change(stack: Stack, user: User) -> None:
    rng = np.random.default_rng(1)
    with Lab(stack, user, "killed-servers") as lab:
        agents = [lab.agent(("n0", 2), ("n1", 2)), lab.agent(("n2", 2), ("n3", 2))]
        with Load(lab, seed=1) as load, open_connection(stack) as database:
            load.wait_for_answers(10)
            for turn in range(KILLS):
                load.first = turn % 2
                victim = stack.servers[load.first]
                load.wait_for_calls(int(rng.integers(5, 15)))
                if turn % 3:
                    wait_for_a_commit(database)
                else:
                    # A random moment, at which no event is awaited.
                    threading.Event().wait(rng.uniform(0, 0.03))
                victim.kill()
                load.wait_for_answers(5)  # from the other server
                with load.paused():
                    victim.start()
                    victim.wait()
        assert grpc.StatusCode.UNAVAILABLE in load.user.failures, "no call was interrupted"
        check_all_acknowledged(lab, load, agents)


@contextmanager
def open_connection(stack: Stack) -> Iterator[sa.Connection]:
    """Yield a connection that sees each commit at once."""
    database = connect_database(stack.database_url)
    with database.engine.connect() as connection:
        yield connection.execution_options(isolation_level="AUTOCOMMIT")
    database.engine.dispose()


def wait_for_a_commit(connection: sa.Connection) -> None:
    """Wait until the database has a new answer, which its caller may not have received yet."""
    count = sa.text("SELECT count(*) FROM request_ids")
    before = connection.execute(count).scalar_one()
    until(lambda: connection.execute(count).scalar_one() > before, "a commit", every_s=0.0)


def check_all_acknowledged(lab: Lab, load: Load, agents: list[Agent]) -> None:
    """Check that what was acknowledged, what is stored and what runs agree."""
    lab.settle()
    last = lab.schedule()
    lab.settle()
    jobs = {job.name: job for job in lab.jobs()}
    labels = Counter(job.labels["load"] for job in jobs.values())
    assert labels == dict.fromkeys(load.submitted, 1)  # each exactly once, and no others
    assert all(jobs[name].labels["load"] == label for label, name in load.submitted.items())
    assert load.cancelled
    for name, job in jobs.items():
        assert (job.state == jobs_pb2.CANCELLED) == (name in load.cancelled)
        assert job.retries == 0
    rounds = lab.rounds()
    assert [trailing_number(r.name) for r in rounds] == list(range(1, len(rounds) + 1))
    assert sorted([*load.rounds.values(), last.name], key=trailing_number) == [
        r.name for r in rounds
    ]
    assert all(r.verified and r.outcome == "committed" for r in rounds)
    decided = {d.job: d.allocation for r in rounds for d in r.decisions if d.applied}
    for name in jobs.keys() - load.cancelled:
        held = jobs_pb2.Allocation()
        held.CopyFrom(jobs[name].allocation)
        for reported in ("iter_time_s", "iter_time_source"):  # by agents, after the decision
            held.ClearField(reported)
        assert held == decided[name]
    active = {name: job for name, job in jobs.items() if job.HasField("allocation")}
    assert active
    gpus = Counter(
        (share.node, gpu)
        for job in active.values()
        for share in job.allocation.shares
        for gpu in share.gpu_indices
    )
    assert max(gpus.values()) == 1
    assert_processes_match(list(active.values()), agents)


def assert_processes_match(jobs: list[jobs_pb2.Job], agents: list[Agent]) -> None:
    """Check that each agent runs a process for exactly those jobs that its nodes lead."""
    for agent in agents:
        here = {
            (job.name.rpartition("/")[2], job.generation): job.allocation.shares
            for job in jobs
            if any(share.node.rpartition("/")[2] in agent.nodes for share in job.allocation.shares)
        }
        agent.wait_for_gangs(here)
        led = [
            key for key, shares in here.items() if shares[0].node.rpartition("/")[2] in agent.nodes
        ]
        assert agent.children() == {agent.pid_of(*key) for key in led}


def trailing_number(name: str) -> int:
    return int(name.rpartition("/")[2])


def test_a_killed_database_is_reported_clearly_and_costs_no_job(stack: Stack, user: User) -> None:
    folder = stack.folder / "pg"
    with Lab(stack, user, "killed-database") as lab:
        agents = [lab.agent(("n0", 2), ("n1", 2))]
        lab.submit("steady", 2, weight=50)
        first = lab.schedule()
        before = lab.wait_for_state("steady", jobs_pb2.RUNNING)
        pid = agents[0].pid_of("steady", before.generation)
        with Load(lab, seed=2) as load:
            load.wait_for_answers(30)
            kill_postgres(folder)
            health = user.replicas[0].health
            with pytest.raises(grpc.RpcError) as caught:
                user.replicas[0].jobs.GetJob(
                    jobs_pb2.GetJobRequest(name=before.name), timeout=PATIENCE_S
                )
            assert caught.value.code() is grpc.StatusCode.UNAVAILABLE
            assert "cannot be reached or has failed; `tessera up` and" in str(
                caught.value.details()
            )
            until(
                lambda: health_status(health) == health_pb2.HealthCheckResponse.NOT_SERVING,
                "not serving",
            )
            assert is_running(pid)
            embedded.start_server(folder)
            until(
                lambda: health_status(health) == health_pb2.HealthCheckResponse.SERVING,
                "serving again",
            )
            load.wait_for_answers(10)
        assert set(load.user.failures) >= {grpc.StatusCode.UNAVAILABLE}
        after = lab.wait_for_state("steady", jobs_pb2.RUNNING)
        assert (after.generation, after.start_time) == (before.generation, before.start_time)
        assert (agents[0].pid_of("steady"), is_running(pid)) == (pid, True)
        until(lambda: lab.job("steady").iterations_done > after.iterations_done, "more progress")
        load.submitted["steady"], load.rounds["first"] = before.name, first.name
        check_all_acknowledged(lab, load, agents)


def health_status(health: health_pb2_grpc.HealthStub) -> int:
    return int(health.Check(health_pb2.HealthCheckRequest(), timeout=PATIENCE_S).status)


def test_a_frozen_agent_is_replaced_after_lease_and_margin_when_its_processes_have_ended(
    stack: Stack, user: User
) -> None:
    with Lab(stack, user, "frozen-agent") as lab:
        saves = lab.agent(("saves", 2))
        silent = lab.agent(("silent", 2), checkpoint_s=1e9)  # saves only when stopped
        for name in ("a", "b"):
            lab.submit(name, 2)
        lab.schedule()
        jobs = {node_of(lab.wait_for_state(name, jobs_pb2.RUNNING)): name for name in ("a", "b")}
        saved, unsaved = jobs["saves"], jobs["silent"]
        old = {saved: saves.pid_of(saved), unsaved: silent.pid_of(unsaved)}
        until(lambda: lab.checkpoint(saved), "a checkpoint")
        until(
            lambda: all(lab.job(name).iterations_done > 0 for name in old), "progress of both jobs"
        )
        with ProgressWatcher(lab, list(old)) as watched:
            saves.freeze()
            silent.freeze()
            reported = lab.job(saved).iterations_done
            spare = lab.agent(("spare", 4))
            resumable = rounds_until_replaced(lab, jobs)
            new = {name: lab.wait_for_state(name, jobs_pb2.RUNNING) for name in old}
            assert {(node_of(job), job.generation) for job in new.values()} == {("spare", 2)}
            # The old processes went on until the lease of their frozen agents was over.
            assert not any(is_running(pid) for pid in old.values())
            for agent, name in ((saves, saved), (silent, unsaved)):
                assert agent.file_of(name, 1, "exit.json")["outcome"] == "stopped"
            assert resumable[saved] > reported
            for name in old:
                assert (
                    spare.file_of(name, 2, "progress.json")["iterations_done"]
                    >= resumable[name]
                    > 0
                )
            pids = {name: spare.pid_of(name, 2) for name in old}
            saves.thaw()
            silent.thaw()
            silent.wait_for_gangs([])
            saves.wait_for_gangs([])
            until(
                lambda: all(lab.checkpoint(name).get("generation") == 2 for name in old),
                "new checkpoints",
            )
        for name, before in new.items():
            after = lab.job(name)
            assert (after.state, after.generation, after.retries) == (jobs_pb2.RUNNING, 2, 0)
            assert after.iterations_done >= before.iterations_done
            assert (spare.pid_of(name, 2), is_running(pids[name])) == (pids[name], True)
            assert watched.stored[name] == sorted(watched.stored[name])
            assert watched.saved[name] == sorted(watched.saved[name])


def rounds_until_replaced(lab: Lab, jobs: dict[str, str]) -> dict[str, int]:
    """Schedule until the jobs, given by node, have moved, and return their last checkpoints before.

    No job may move before its node has been silent for the lease and the margin.
    """
    waiting, saved, unmoved = dict(jobs), dict.fromkeys(jobs.values(), 0), 0

    def all_moved() -> bool:
        nonlocal unmoved
        for name in waiting.values():
            saved[name] = lab.checkpoint(name).get("iterations", 0)
        lab.schedule()
        nodes = lab.nodes()
        for node, name in list(waiting.items()):
            if lab.job(name).generation == 1:
                unmoved += 1
            else:
                assert nodes[node].silent_s > LEASE_S + MARGIN_S
                del waiting[node]
        return not waiting

    until(all_moved, "all jobs have moved", every_s=0.2)
    assert unmoved
    return saved


def node_of(job: jobs_pb2.Job) -> str:
    return job.allocation.shares[0].node.rpartition("/")[2]


class ProgressWatcher(threading.Thread):
    """A thread that keeps noting jobs' progress in the store and in their checkpoints."""

    def __init__(self, lab: Lab, names: list[str]) -> None:
        super().__init__()
        self._lab, self._over = lab, threading.Event()
        self.stored: dict[str, list[float]] = {name: [] for name in names}
        self.saved: dict[str, list[tuple[int, int]]] = {name: [] for name in names}

    def __enter__(self) -> Self:
        self.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._over.set()
        self.join()

    def run(self) -> None:
        while not self._over.wait(0.1):
            for name in self.stored:
                self.stored[name].append(self._lab.job(name).iterations_done)
                if checkpoint := self._lab.checkpoint(name):
                    self.saved[name].append((checkpoint["generation"], checkpoint["iterations"]))


def test_a_gang_starts_only_after_the_slow_one_before_it_has_ended(
    stack: Stack, user: User
) -> None:
    grace_s = 2.0
    with Lab(stack, user, "handover") as lab:
        agents = [lab.agent(("n0", 2), grace_s=grace_s)]
        lab.submit("old", 2, preemptible=True)
        lab.schedule()
        lab.wait_for_state("old", jobs_pb2.RUNNING)
        old = agents[0].pid_of("old")
        agents.append(lab.agent(("n1", 2)))
        os.kill(old, signal.SIGSTOP)  # so it does not react to the request to stop
        lab.submit("new", 4, weight=10)
        asked_s = time.clock_gettime(time.CLOCK_BOOTTIME)
        lab.schedule()
        states_seen = set()

        def begun() -> bool:
            states = lab.job("old").state, lab.job("new").state
            here = any(("new", 1) in agent.gangs() for agent in agents)
            if is_running(old):
                assert not here
                states_seen.add(states)
            return here and not is_running(old)

        until(begun, "the new gang has begun")
        assert states_seen == {(jobs_pb2.STOPPING, jobs_pb2.STARTING)}
        leader = node_of(lab.wait_for_state("new", jobs_pb2.RUNNING))
        agent = next(agent for agent in agents if leader in agent.nodes)
        began_s = agent.file_of("new", 1, "process.json")["start_ticks"] / os.sysconf("SC_CLK_TCK")
        assert began_s > asked_s + grace_s
        assert lab.job("old").state == jobs_pb2.QUEUED


def test_a_round_whose_deadline_ends_while_it_waits_for_the_lock_writes_nothing(
    stack: Stack, user: User
) -> None:
    turn = sa.text("SELECT FROM clusters WHERE name = :name FOR NO KEY UPDATE")
    scheduler = user.replicas[0].scheduler
    with Lab(stack, user, "late-turn") as lab, open_connection(stack) as database:
        lab.agent(("n0", 2))
        lab.submit("a", 2)
        request = scheduler_pb2.ScheduleRequest(parent=lab.parent, request_id=uuid("late"))
        database.exec_driver_sql("BEGIN")
        database.execute(turn, {"name": lab.cluster})
        with pytest.raises(grpc.RpcError) as caught:
            scheduler.Schedule(request, timeout=1)
        assert caught.value.code() is grpc.StatusCode.DEADLINE_EXCEEDED
        database.exec_driver_sql("COMMIT")
        after = scheduler_pb2.ScheduleRequest(parent=lab.parent, dry_run=True)
        scheduler.Schedule(after, timeout=PATIENCE_S)  # with one thread, the other round is over
        assert lab.rounds() == []
        assert lab.job("a").state == jobs_pb2.QUEUED
        assert scheduler.Schedule(request, timeout=PATIENCE_S).name == f"{lab.parent}/rounds/1"
