"""Two racing replicas commit every round once, and never assign a GPU twice."""

from __future__ import annotations

import threading
import time
from collections.abc import Sequence

import grpc

from tessera.benchmarks.service.fleet import Fleet
from tessera.db.schema.engine import Database
from tessera.estimator.samples import sample_profiles
from tessera.formulation.records.clusters import NodeSpec
from tessera.service.cli.demo.drive import CLUSTER, PARENT, add_estimates, make_cluster, submit_jobs
from tessera.service.cli.demo.stack import Stack, run_stack
from tessera.simulator.clusters import tiny_cluster
from tessera.simulator.workloads.philly_like import philly_like
from tessera.v1 import clusters_pb2, jobs_pb2, scheduler_pb2, scheduler_pb2_grpc
from tests.support.laws import scaled
from tests.support.patience import PATIENCE_S


def list_rounds(stub: scheduler_pb2_grpc.SchedulerStub) -> list[scheduler_pb2.Round]:
    rounds: list[scheduler_pb2.Round] = []
    token = ""
    while True:
        answer = stub.ListRounds(
            scheduler_pb2.ListRoundsRequest(parent=PARENT, page_size=100, page_token=token)
        )
        rounds.extend(answer.rounds)
        token = answer.next_page_token
        if not token:
            return rounds


ROUNDS = scaled(200)


class Race:
    """The race of the replicas. It ends after ``ROUNDS`` rounds, once both have won."""

    def __init__(self, addresses: Sequence[str]) -> None:
        self.replicas = [Replica(address, self) for address in addresses]
        self._end_s = time.monotonic() + PATIENCE_S

    def is_over(self, number: int) -> bool:
        """Return whether round ``number`` may be the last one."""
        has_competed = all(r.won for r in self.replicas)
        return number >= ROUNDS and (has_competed or time.monotonic() > self._end_s)


class Replica(threading.Thread):
    """A thread that calls Schedule on one replica until the race is over."""

    def __init__(self, address: str, race: Race) -> None:
        super().__init__()
        self.address, self.race = address, race
        self.won: list[str] = []

    def run(self) -> None:
        with grpc.insecure_channel(self.address) as channel:
            stub = scheduler_pb2_grpc.SchedulerStub(channel)
            request = scheduler_pb2.ScheduleRequest(
                parent=PARENT, options=scheduler_pb2.RoundOptions(solver="greedy")
            )
            number = 0
            while not self.race.is_over(number):
                name = stub.Schedule(request, timeout=PATIENCE_S).name
                self.won.append(name)
                number = int(name.rpartition("/")[2])


def require_no_gpu_twice(stack: Stack, nodes: Sequence[NodeSpec]) -> int:
    """Check the GPUs that all jobs own at one instant, and return their number.

    One page of jobs is read in one transaction.
    """
    request = jobs_pb2.ListJobsRequest(parent=PARENT, page_size=10_000)
    owners: dict[tuple[str, int], str] = {}
    for job in stack.jobs.ListJobs(request).jobs:
        gpus = [(s.node, gpu) for s in job.allocation.shares for gpu in s.gpu_indices]
        assert len(gpus) == job.allocation.cell.gpus
        for gpu in gpus:
            assert gpu not in owners, f"{gpu} belongs to both {owners[gpu]} and {job.name}"
            owners[gpu] = job.name
    assert owners.keys() <= {(f"{PARENT}/nodes/{n.name}", i) for n in nodes for i in range(n.gpus)}
    return len(owners)


def test_two_racing_replicas_assign_no_gpu_and_no_round_number_twice(
    database: Database,
) -> None:
    types, nodes = tiny_cluster()
    jobs = [spec for _, spec in philly_like(60, seed=1)]
    with run_stack(replicas=2, database_url=database.url) as stack:
        make_cluster(stack, types, nodes)
        add_estimates(stack, sample_profiles())
        submit_jobs(stack, jobs)
        with Fleet(stack.addresses[1], CLUSTER, nodes, "fleet") as fleet:
            replicas = Race(stack.addresses).replicas
            for replica in replicas:
                replica.start()
            max_gpus = 0
            while any(replica.is_alive() for replica in replicas):
                fleet.advance(300.0)
                max_gpus = max(max_gpus, require_no_gpu_twice(stack, nodes))
                replicas[0].join(0.05)
        assert max_gpus, "no job ever had a GPU, so GPUs were not checked"
        won = [name for replica in replicas for name in replica.won]
        assert len(won) == len(set(won)) >= ROUNDS
        assert all(replica.won for replica in replicas)
        rounds = list_rounds(stack.scheduler)
        assert sorted(int(r.name.rpartition("/")[2]) for r in rounds) == list(
            range(1, len(rounds) + 1)
        )
        assert {r.name for r in rounds} == set(won)
        assert all(r.outcome == "committed" and r.verified for r in rounds)
        listed = stack.clusters.ListNodes(
            clusters_pb2.ListNodesRequest(parent=PARENT, page_size=1000)
        )
        assert all(0 <= node.free_gpus <= node.gpus for node in listed.nodes)
