"""The network from end to end: a server, agents and two jobs that share links, as processes."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import grpc
import pytest

from tessera.service.cli.demo.stack import Stack, run_stack
from tessera.v1 import estimates_pb2, jobs_pb2, networks_pb2_grpc, scheduler_pb2
from tessera.v1 import networks_pb2 as pb
from tests.support.agents import is_running
from tests.support.database import a_database
from tests.support.patience import PATIENCE_S
from tests.support.system import Agent, Lab, User, until

GPUS = 4
"""The GPUs of a job, which fill two nodes of two."""

JOBS = ("one", "two")
RUNNING = jobs_pb2.RUNNING


@pytest.fixture(scope="module")
def stack(server_url: str) -> Iterator[Stack]:
    """Run a server process on a database of its own."""
    with a_database(server_url) as database, run_stack(database_url=database.url) as stack:
        yield stack


@pytest.fixture
def user(stack: Stack) -> Iterator[User]:
    """Yield a user of the server."""
    with User(stack) as user:
        yield user


class NetworkLab(Lab):
    """A cluster of four nodes under two agents, with the calls of its network."""

    def __init__(self, stack: Stack, user: User, cluster: str) -> None:
        super().__init__(stack, user, cluster)
        self._channel = grpc.insecure_channel(stack.addresses[0])
        self.networks = networks_pb2_grpc.NetworksStub(self._channel)
        nodes = (("n0", 2), ("n1", 2)), (("n2", 2), ("n3", 2))
        self.agents = [self.agent(*some, flags=["--mark-traffic"]) for some in nodes]

    def __exit__(self, *_: object) -> None:
        super().__exit__()
        self._channel.close()

    def say_what_is_sent(self) -> None:
        """Set traffic: every replica of a job of ``GPUS`` sends to the next in its ring."""
        stage = estimates_pb2.StageTraffic(
            data_parallel=GPUS, tensor_parallel=1, data=estimates_pb2.Sent(bytes=2e9, messages=6)
        )
        traffic = estimates_pb2.CellTraffic(
            work_flop=1e14, compute_s=0.5, start_s=0.25, stages=[stage]
        )
        cell = estimates_pb2.CellEstimate(
            workload=estimates_pb2.Workload(model="m", params=f"{GPUS}B", global_batch=64),
            cell=estimates_pb2.Cell(gpu_type="a40", gpus=GPUS, pipeline_degree=1),
            nodes=2,
            iter_time_s=1.0,
            source=estimates_pb2.MEASURED,
            traffic=traffic,
        )
        request = estimates_pb2.UpsertCellsRequest(parent=self.parent, cells=[cell])
        self.user.insist(lambda r: r.estimates.UpsertCells(request))

    def decide(self, *, dry_run: bool = False, **options: Any) -> scheduler_pb2.Round:
        request = scheduler_pb2.ScheduleRequest(
            parent=self.parent, dry_run=dry_run, options=scheduler_pb2.RoundOptions(**options)
        )
        return self.user.insist(lambda r: r.scheduler.Schedule(request, timeout=PATIENCE_S))

    def describe(self, decided: scheduler_pb2.Round, aggregations: int = 1) -> None:
        """Describe a network of two ToRs. With one path between them, the jobs of a round share it."""
        gangs = [[short_name(s.node) for s in d.allocation.shares] for d in decided.decisions]
        (a, b), (c, d) = gangs
        document = {
            "kind": "clos",
            "nodes": [a, c, b, d],
            "tors": 2,
            "aggregations": aggregations,
            "tor_bytes_per_s": 12.5e9,
            "host": {
                "gpus": 2,
                "nics": 1,
                "pcie_switches": 1,
                "nic_bytes_per_s": 25e9,
                "pcie_bytes_per_s": 25e9,
                "nvlink_bytes_per_s": 300e9,
            },
        }
        name = f"{self.parent}/topology"
        topology = pb.Topology(name=name, document=json.dumps(document))
        self.networks.UpdateTopology(
            pb.UpdateTopologyRequest(topology=topology), timeout=PATIENCE_S
        )

    def plan(self) -> pb.NetworkPlan:
        request = pb.GetNetworkPlanRequest(name=f"{self.parent}/networkPlans/-")
        return self.networks.GetNetworkPlan(request, timeout=PATIENCE_S)

    def planned(self, cause: str, jobs: int) -> pb.NetworkPlan:
        """Return the plan in force once it was made for ``cause`` and has this number of jobs."""

        def made() -> pb.NetworkPlan | None:
            try:
                plan = self.plan()
            except grpc.RpcError as error:
                if error.code() is not grpc.StatusCode.NOT_FOUND:
                    raise
                return None
            return plan if plan.cause == cause and len(plan.decisions) == jobs else None

        return until(made, f"a plan at {cause} of {jobs} jobs")

    def leader(self, job: str) -> Agent:
        """Return the agent that runs a job's process."""
        node = short_name(self.job(job).allocation.shares[0].node)
        return next(agent for agent in self.agents if node in agent.nodes)

    def told(self, job: str) -> dict[str, Any]:
        """Return what a job's process can read of its part in the plan."""
        return self.leader(job).file_of(job, 1, "network.json")

    def hears_of(self, job: str, levels: int) -> None:
        """Wait until a job's processes can read this number of levels."""
        until(lambda: self.told(job)["levels"] == levels, f"{job} can read of {levels} levels")


def short_name(name: str) -> str:
    return name.rpartition("/")[2]


def placement_texts(decided: scheduler_pb2.Round) -> list[str]:
    return [f"{d.job} {d.kind} {d.allocation}" for d in decided.decisions]


def environment_of(pid: int) -> dict[str, str]:
    """Return a process's environment as it was started."""
    words = Path(f"/proc/{pid}/environ").read_bytes().decode().split("\0")
    return dict(word.split("=", 1) for word in words if word)


def decisions_by_job(plan: pb.NetworkPlan) -> dict[str, pb.NetworkDecision]:
    return {short_name(d.job): d for d in plan.decisions}


def test_contending_jobs_are_marked_at_start_and_replanned_without_a_restart(
    stack: Stack, user: User
) -> None:
    with NetworkLab(stack, user, "meets") as lab:
        lab.say_what_is_sent()
        for job in JOBS:
            lab.submit(job, GPUS)
        before = lab.decide(dry_run=True)
        lab.describe(before)
        decided = lab.decide()
        # The network changes no placement.
        assert placement_texts(decided) == placement_texts(before)
        for job in JOBS:
            lab.wait_for_state(job, RUNNING)
        plan = lab.plan()
        assert (plan.cause, plan.levels) == ("round", 8)
        parts = decisions_by_job(plan)
        assert [short_name(d) for d in parts["one"].contending_jobs] == ["two"]
        assert parts["one"].level != parts["two"].level
        pids = {job: lab.leader(job).pid_of(job) for job in JOBS}
        for job in JOBS:
            environment = environment_of(pids[job])
            assert environment["NCCL_IB_TC"] == str(parts[job].dscp * 4 + 2)
            assert environment["NCCL_IB_SL"] == str(parts[job].level)
            part = json.loads(Path(environment["TESSERA_NETWORK"]).read_text())
            assert part == lab.told(job)
            assert (part["level"], part["levels"], part["dscp"]) == (
                parts[job].level,
                8,
                parts[job].dscp,
            )

        one_level = lab.decide(network_levels=1)
        assert {d.kind for d in one_level.decisions} == {"keep"}
        again = decisions_by_job(lab.plan())
        assert {(d.level, d.dscp) for d in again.values()} == {
            (0, parts[job].dscp) for job in JOBS
        }  # their tags stay
        for job in JOBS:
            lab.hears_of(job, levels=1)

        first, second = (short_name(d.job) for d in plan.decisions)
        cancel = jobs_pb2.CancelJobRequest(name=f"{lab.parent}/jobs/{first}")
        user.insist(lambda r: r.jobs.CancelJob(cancel))
        ended = lab.planned("end", 1)
        assert (len(ended.decisions[0].contending_jobs), ended.levels) == (0, 8)
        lab.hears_of(second, levels=8)
        assert lab.told(second)["level"] == ended.decisions[0].level
        assert (lab.job(second).generation, lab.job(second).state) == (1, RUNNING)
        assert is_running(pids[second])
        assert lab.leader(second).pid_of(second) == pids[second]


def test_jobs_started_before_their_network_is_set_are_planned_later_and_not_marked(
    stack: Stack, user: User
) -> None:
    with NetworkLab(stack, user, "later") as lab:
        lab.say_what_is_sent()
        for job in JOBS:
            lab.submit(job, GPUS)
        decided = lab.decide()
        for job in JOBS:
            lab.wait_for_state(job, RUNNING)
        pids = {job: lab.leader(job).pid_of(job) for job in JOBS}
        assert all("NCCL_IB_TC" not in environment_of(pid) for pid in pids.values())
        lab.describe(decided, aggregations=2)
        plan = lab.planned("start", 2)
        for job in JOBS:
            folder = lab.leader(job).folder / "gangs" / f"{job}@1"
            until((folder / "network.json").exists, f"{job} can read its part")
            routes = [[r.source, r.target, list(r.via)] for r in decisions_by_job(plan)[job].routes]
            assert routes
            assert lab.told(job)["routes"] == routes
            assert lab.job(job).generation == 1
            assert is_running(pids[job])
        advice = "applies nothing: priorities are advice only"
        until(lambda: advice in lab.leader("one").log.read_text(), "the agent's remark in its log")
        until(
            lambda: all("advice only" in "".join(n.network_remarks) for n in lab.nodes().values()),
            "nodes show the remarks of their agents",
        )
        until(lambda: advice in stack.servers[0].log.read_text(), "the remark in the server's log")
        name = f"{lab.parent}/topology"
        lab.networks.DeleteTopology(pb.DeleteTopologyRequest(name=name), timeout=PATIENCE_S)
        with pytest.raises(grpc.RpcError):
            lab.plan()
        assert all(is_running(pid) for pid in pids.values())
