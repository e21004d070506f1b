"""The traffic of network plans to agents, compared with the traffic of the jobs."""

from __future__ import annotations

import json
import time
from collections.abc import Mapping, Sequence
from typing import Annotated, Any, Final

import numpy as np
import typer

from tessera.benchmarks.harness.registry import register_case
from tessera.benchmarks.network.fabrics import two_layer
from tessera.benchmarks.network.workload import DAY_S, GPU_TYPE, TraceWorkload, jobs_of
from tessera.estimator.families import family_traffic
from tessera.formulation.lifecycle import JobState
from tessera.formulation.network.contention import demand_of
from tessera.formulation.network.facts import Traffics
from tessera.formulation.network.flows import NetworkJob, build_contention
from tessera.formulation.network.outcome import NetworkDecision
from tessera.formulation.network.running import RunningJob, running_now
from tessera.formulation.network.traffic import CellTraffic, intern_traffic
from tessera.formulation.placement import Gang
from tessera.formulation.records.agents import DesiredGang, DesiredState
from tessera.formulation.records.jobs import AllocationRecord, JobSpec
from tessera.formulation.snapshot import STATE_CODE, Allocations, Estimates, Jobs, Nodes, Snapshot
from tessera.formulation.topologies import document
from tessera.formulation.topologies.described import DescribedTopology
from tessera.formulation.topologies.topology import Tier, Topology
from tessera.formulation.values import Cell, GpuType, Hold
from tessera.formulation.values import Workload as Trained
from tessera.service.rpc.convert.agents import of_desired
from tessera.simulator.figures import Report
from tessera.solvers.network.fluid import simulate_fluid
from tessera.solvers.network.jobs.placers import Occupancy, first_fit
from tessera.solvers.rounds.network import plan_network
from tessera.solvers.rounds.options import RoundOptions
from tessera.v1 import agents_pb2

FRAMES_BYTES: Final = 5 + 9
"""The overhead of a message: gRPC's prefix and the header of an HTTP/2 data frame."""
WINDOW_S: Final = 60.0
EVENTS_PER_JOB: Final = 2
"""The start and the end of a job."""


@register_case("network-control", smoke={"hosts": 24}, control_share=("<=", 1e-4))
def network_control(
    hosts: Annotated[
        int, typer.Option(help="Number of hosts with 8 GPUs and an agent each.", min=2)
    ] = 250,
    jobs_a_day: Annotated[
        float, typer.Option(help="Number of jobs that start, and end, in a day.", min=1.0)
    ] = 360.0,
    seed: int = 0,
) -> Report:
    """Compare the messages of a re-plan with the traffic of the jobs that it concerns.

    Jobs of the trace's workload (``benchmarks/network/workload.py``) fill a two-layer Clos, first
    come, first served. The network is planned for all of them, then without the last one. The
    messages to agents for the second plan are those of a re-plan. Its bytes are every agent's whole
    desired state, because its revision changes, and every agent's answer, with the frames around
    each. A user's job carries no command here. The jobs' traffic is what leaves their hosts through
    NICs, at the rates that the fluid engine gives them under this plan.

    ``control_share`` (at most 0.01 %, as in Crux 5) is the share of bytes a second, with a re-plan
    at each start and each end. ``each_second_share`` assumes a re-plan each second.
    ``network_bytes`` is the part of a re-plan's messages that the network adds.
    """
    topology = two_layer(hosts)
    gangs, sends = fill_cluster(topology, seed)
    snapshot = snapshot_of(topology, gangs, sends)
    running = running_now(snapshot)
    began_s = time.perf_counter()
    outcome = plan_network(snapshot, running[:-1], RoundOptions())
    took_s = time.perf_counter() - began_s
    parts = {d.job: d for d in outcome.decisions}
    sent, plain = (
        sum(map(_bytes, _messages(topology, snapshot, running[:-1], result, outcome.levels)))
        for result in (parts, None)
    )
    traffic = _sent_bytes_per_s(topology, gangs, sends, parts)
    share = sent / traffic
    return Report(
        seed=seed,
        figures={
            "control_share": share * EVENTS_PER_JOB * jobs_a_day / DAY_S,
            "each_second_share": share,
            "replan_bytes": sent,
            "network_bytes": sent - plain,
            "agents": hosts,
            "jobs": len(parts),
            "traffic_bytes_per_s": traffic,
            "plan_s": took_s,
        },
    )


def fill_cluster(topology: Topology, seed: int) -> tuple[dict[str, Gang], dict[str, CellTraffic]]:
    """Return the gangs and traffic of the jobs that arrived before the first that did not fit."""
    book = Occupancy(topology, first_fit)
    gangs: dict[str, Gang] = {}
    sends: dict[str, CellTraffic] = {}
    for job in jobs_of(TraceWorkload(gpus=8 * len(topology.hosts), seed=seed)):
        gang = book.allocate(job.name, job.gpus)
        if gang is None:
            break
        gangs[job.name] = gang
        sends[job.name] = family_traffic(job.name.rpartition("-")[0], GPU_TYPE, job.gpus)
    return gangs, sends


def snapshot_of(
    topology: Topology, gangs: Mapping[str, Gang], sends: Mapping[str, CellTraffic]
) -> Snapshot:
    """Return a snapshot of a cluster on which these jobs run, each with its own workload."""
    names, numbers = tuple(gangs), np.arange(len(gangs))
    gpus = np.array([gang.gpus for gang in gangs.values()], dtype=np.int64)
    zeros, ones = np.zeros(len(gangs), np.int64), np.ones(len(gangs), np.int64)
    return Snapshot(
        cluster="bench",
        epoch=1,
        round_number=1,
        now_s=1e9,
        gpu_types=(GpuType(name=GPU_TYPE, memory_bytes=80 << 30),),
        nodes=Nodes.from_rows(
            [
                {
                    "name": host,
                    "gpu_type": 0,
                    "gpus": 8,
                    "rack": "",
                    "schedulable": True,
                    "version": 1,
                }
                for host in topology.hosts
            ]
        ),
        workloads=tuple(Trained(model=name, params="", global_batch=256) for name in names),
        plans=("",),
        estimates=Estimates.from_rows([]),
        allocations=Allocations.from_rows(
            [
                {"job": job, "node": node, "gpu": gpu, "hold": int(Hold.HELD), "generation": 1}
                for job, gang in enumerate(gangs.values())
                for node, held in gang.members
                for gpu in held
            ]
        ),
        jobs=Jobs.from_rows([_row(name, k, gang) for k, (name, gang) in enumerate(gangs.items())]),
        topology=DescribedTopology(
            document=json.dumps(document.write_columns(topology)),
            topology=topology,
        ),
        traffic=Traffics(
            workload=numbers,
            gpu_type=zeros,
            gpus=gpus,
            pipeline_degree=ones,
            plan=zeros,
            nodes=np.array([gang.nodes for gang in gangs.values()], dtype=np.int64),
            document=tuple(intern_traffic(sends[name].to_json()) for name in names),
        ),
    )


def _row(name: str, number: int, gang: Gang) -> dict[str, Any]:
    return {
        "name": name,
        "state": STATE_CODE[JobState.RUNNING],
        "workload": number,
        "iterations": 1e6,
        "iterations_left": 1e6,
        "requested_gpus": gang.gpus,
        "submit_s": 0.0,
        "queued_s": 0.0,
        "generation": 1,
        "current_type": 0,
        "current_gpus": gang.gpus,
        "current_degree": 1,
    }


def _messages(
    topology: Topology,
    snapshot: Snapshot,
    running: Sequence[RunningJob],
    parts: Mapping[str, NetworkDecision] | None,
    levels: int,
) -> list[agents_pb2.ServerMessage | agents_pb2.AgentMessage]:
    """Return the messages to each agent and its answers.

    If ``parts`` is None, the messages have no network part.
    """
    here: list[list[DesiredGang]] = [[] for _ in topology.hosts]
    for r in running:
        name = snapshot.jobs.name[r.job]
        gang = DesiredGang(
            spec=JobSpec(
                name=name,
                workload=snapshot.workloads[r.job],
                iterations=10**6,
                requested_gpus=r.gang.gpus,
            ),
            generation=r.generation,
            iterations_done=1e5,
            network=parts[name] if parts else None,
            allocation=AllocationRecord(
                cell=Cell(gpu_type=GPU_TYPE, gpus=r.gang.gpus, pipeline_degree=1),
                rate=100.0,
                generation=1,
                shares=tuple((topology.hosts[node], gpus) for node, gpus in r.gang.members),
            ),
        )
        for node, _ in r.gang.members:
            here[node].append(gang)
    result: list[agents_pb2.ServerMessage | agents_pb2.AgentMessage] = []
    for host, gangs in zip(topology.hosts, here, strict=True):
        state = DesiredState(
            revision=10**6, gangs=tuple(gangs), network_levels=levels if parts else 0
        )
        result.append(agents_pb2.ServerMessage(desired=of_desired(state, {host}), lease_from_s=1e6))
        seen = [
            agents_pb2.ObservedGang(
                job=gang.spec.name,
                generation=1,
                node=host,
                phase=agents_pb2.ObservedGang.RUNNING,
                iterations_done=1e5,
                iter_time_s=1.0,
            )
            for gang in gangs
        ]
        result.append(
            agents_pb2.AgentMessage(
                observed=agents_pb2.Observed(gangs=seen, revision=10**6), said_s=1e6
            )
        )
    return result


def _bytes(message: agents_pb2.ServerMessage | agents_pb2.AgentMessage) -> int:
    return message.ByteSize() + FRAMES_BYTES


def _sent_bytes_per_s(
    topology: Topology,
    gangs: Mapping[str, Gang],
    sends: Mapping[str, CellTraffic],
    parts: Mapping[str, NetworkDecision],
) -> float:
    """Return the bytes per second that leave hosts by NICs.

    First paths are assumed, since the choice of paths does not change this sum.
    """
    jobs = [
        NetworkJob(
            name=name,
            traffic=sends[name].traffic(),
            gang=tuple((topology.hosts[node], gpus) for node, gpus in gangs[name].members),
        )
        for name in parts
    ]
    c, _ = build_contention(topology, jobs)
    demand = demand_of(c, np.zeros(len(c.bundle_bytes), dtype=np.int64))
    level = np.array([parts[name].level for name in c.jobs], dtype=np.int64)
    rate = simulate_fluid(demand, level, horizon_s=WINDOW_S, warm_s=WINDOW_S).iterations
    tier, e = topology.vertices.tier, topology.links
    outward = (tier[e.source] == Tier.NIC) & (tier[e.target] == Tier.TOR)
    each = demand.busy_s * e.bytes_per_s[demand.link] * outward[demand.link]
    return float(each @ rate[demand.job])
