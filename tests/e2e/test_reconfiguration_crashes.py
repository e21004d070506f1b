"""Processes that are killed while a job that trains is moved: nothing is lost, repeated or left."""

from __future__ import annotations

import fcntl
import os
import signal
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from tessera.v1 import jobs_pb2
from tests.support.agents import is_running
from tests.support.lockstep.job import LockstepJob
from tests.support.system import Agent, until
from tests.support.training_lab import TrainingLab, run_training_lab

NODES = ("n0", "n1", "n2")

TRAIN = "while it trains"
STOP = "between SIGTERM and its checkpoint"
SAVED = "between its checkpoint and its end"
MEETING = "while a member waits for its leader"
STAGING = "while data is staged"
LAUNCHED = "between launch and the first iteration"
LAST = "at its last iteration"

GATES = {
    TRAIN: "1-train",
    STOP: "1-stop",
    SAVED: "1-saved",
    MEETING: "2-meeting",
    STAGING: "2-staging",
    LAUNCHED: "2-launched",
    LAST: "2-last",
}
"""The generation and the point at which processes are killed, by phase."""

LISTED = {SAVED: 6, LAST: 8}
"""The checkpoint that is complete before the kill. Keepers look for one twice a second."""

AGENTS = ("the leader's agent", "the other agent")
KEEPERS = ("the leader's keeper", "the other keeper")
PROGRAMS = ("the leader's program", "the other program")
SERVICES = ("the server", "the database")
VICTIMS = (*AGENTS, *KEEPERS, *PROGRAMS, *SERVICES)
"""The first of two is rank 0's."""

IMPORTANT = {
    (TRAIN, "the leader's keeper"),
    (TRAIN, "the other program"),
    (STOP, "the leader's agent"),
    (STOP, "the leader's program"),
    (STOP, "the other keeper"),
    (STOP, "the server"),
    (SAVED, "the leader's keeper"),
    (SAVED, "the database"),
    (MEETING, "the leader's agent"),
    (MEETING, "the other keeper"),
    (STAGING, "the other agent"),
    (STAGING, "the leader's program"),
    (LAUNCHED, "the server"),
    (LAUNCHED, "the other program"),
    (LAST, "the other agent"),
    (LAST, "the leader's program"),
}
"""The cases of `make test`. `make test-full` has all."""


@dataclass(frozen=True)
class Site:
    """A cluster of three agents with one GPU each, which all cases share."""

    lab: TrainingLab
    agents: dict[str, Agent]


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Site]:
    with run_training_lab("crashes") as lab:
        claims = tmp_path_factory.mktemp("gpus")
        agents = {
            node: lab.program_agent(
                node, 1, environment={"TEST_NODE": node, "TEST_GPUS": str(claims)}
            )
            for node in NODES
        }
        yield Site(lab, agents)


def all_cases() -> list[Any]:
    """Return all combinations. While the members gather, there is no program yet."""
    cases = []
    for phase in GATES:
        for victim in VICTIMS:
            if phase == MEETING and victim in PROGRAMS:
                continue
            marks = () if (phase, victim) in IMPORTANT else (pytest.mark.night,)
            name = f"{victim}-{phase}".replace(" ", "_")
            cases.append(pytest.param(phase, victim, marks=marks, id=name))
    return cases


@pytest.mark.parametrize(("phase", "victim"), all_cases())
def test_a_kill_during_a_reconfiguration_loses_nothing(
    site: Site, phase: str, victim: str, tmp_path: Path
) -> None:
    generation, point = int(GATES[phase][0]), GATES[phase][2:]
    name = f"job-{GATES[phase]}-{VICTIMS.index(victim)}"
    job = LockstepJob(site.lab, site.agents, name, tmp_path, GATES[phase])
    job.wait_at(1, "train")
    job.wait_until_listed(4)
    moves = {TRAIN: no_move, MEETING: held_back}.get(phase, drained_node)
    with moves(job):
        if phase == MEETING:
            job.member(generation, 0)
            job.member(generation, 1)
            assert not job.has_met(generation)
            ranks = {}
        else:
            ranks = job.wait_at(generation, point)
        if phase in LISTED:
            job.wait_until_listed(LISTED[phase])
        kill(job, generation, victim, ranks)
        job.open_gate()
        if phase == TRAIN and victim in (*AGENTS, *SERVICES):
            with drained_node(job):
                finish(job, generations=2, resumed=[0, 6], retries=0)
            return
    generations, resumed, retries = expected_course(phase, victim)
    finish(job, generations=generations, resumed=resumed, retries=retries)


def expected_course(phase: str, victim: str) -> tuple[int, list[int], int]:
    """Return the generations of the job, the iterations at which they begin, and the failures."""
    ends_job = victim in (*KEEPERS, *PROGRAMS)
    if phase == TRAIN:
        return 2, [0, 4], 1
    if phase in (STOP, SAVED):
        return 2, [0, 4 if phase == STOP and ends_job else 6], 0
    if not ends_job:
        return 2, [0, 6], 0
    return 3, [0, 6, 8] if phase == LAST else [0, 6], 1


def kill(job: LockstepJob, generation: int, victim: str, ranks: dict[int, int]) -> None:
    """Kill a process with SIGKILL. An agent, a server and a database are started again."""
    rank = 0 if "leader" in victim else 1
    lab = job.lab
    if victim in AGENTS:
        agent, _ = job.member(generation, rank)
        agent.kill()
        agent.launch()
    elif victim in KEEPERS:
        _, keeper = job.member(generation, rank)
        end(keeper, *([ranks[rank]] if ranks else []))
    elif victim in PROGRAMS:
        end(ranks[rank])
    elif victim == "the server":
        (server,) = lab.stack.servers
        server.kill()
        server.start()
        server.wait()
    else:
        lab.kill_database()


def end(victim: int, *dependent: int) -> None:
    """Kill a process, and wait until it and those that must die with it are dead."""
    os.kill(victim, signal.SIGKILL)
    pids = [victim, *dependent]
    until(lambda: not any(is_running(pid) for pid in pids), f"processes {pids} are dead")


def finish(job: LockstepJob, *, generations: int, resumed: list[int], retries: int) -> None:
    """Wait for the job's success, and check everything that it did and left."""
    if retries:
        job.lab.wait_for_failure(job.name)
        job.lab.try_again(job.name)
    done = job.lab.wait_for_state(job.name, jobs_pb2.SUCCEEDED)
    assert (done.generation, done.retries) == (generations, retries)
    job.check_ledger(generations, resumed)
    job.check_nothing_left()


@contextmanager
def no_move(_: LockstepJob) -> Iterator[None]:
    yield


@contextmanager
def drained_node(job: LockstepJob) -> Iterator[None]:
    """Drain the node of the second rank, so that the job moves, and undrain it in the end."""
    agent, _ = job.member(1, 1)
    job.lab.drain(agent.name)
    yield
    job.lab.undrain(agent.name)


@contextmanager
def held_back(job: LockstepJob) -> Iterator[None]:
    """Start the job again, while its leader waits for the lock of the job's store."""
    job.lab.hold(job.name)
    with (job.lab.store(job.name) / "lock").open() as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        job.lab.release(job.name)
        yield
