"""A cluster on a two-layer Clos that is full of jobs, as a snapshot."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any, Final, NamedTuple

import numpy as np

from tessera.formulation.answer.placement import Gang
from tessera.formulation.base.values import GpuType, Hold, Workload
from tessera.formulation.job.lifecycle import JobState
from tessera.formulation.state.network_facts import Traffics
from tessera.formulation.state.snapshot import (
    STATE_CODE,
    Allocations,
    Estimates,
    Jobs,
    Nodes,
    Snapshot,
)
from tessera.formulation.state.topologies import document
from tessera.formulation.state.topologies.described import DescribedTopology
from tessera.formulation.state.topologies.topology import Topology
from tessera.formulation.state.traffic import CellTraffic, intern_traffic
from tests.support.network_families import family_traffic
from tests.support.occupancy import Occupancy, first_fit

GPU_TYPE: Final = "a100-80"
SMALL_FAMILIES: Final = ("bert", "resnet", "resnet-152")
GPU_COUNTS: Final = (1, 2, 4, 8, 16, 32, 64)


class PlacedJob(NamedTuple):
    """A running job: its GPUs, and what it sends."""

    gang: Gang
    sends: CellTraffic


def crowd_network(hosts: int, seed: int = 2) -> Snapshot:
    """Return a snapshot of a Clos with this many hosts of 8 GPUs, which is full of running jobs.

    The usual seed is one of which jobs meet on links.
    """
    network = {
        "kind": "clos",
        "hosts": [f"host-{i}" for i in range(hosts)],
        "host": "a100",
        "tors": max(1, 2 * hosts // 3),
        "aggregations": 16,
        "tor_bytes_per_s": "100 Gb/s",
    }
    topology = document.build_topology(network)
    described = DescribedTopology(document=json.dumps(network), topology=topology)
    return _snapshot_of(described, _fill_cluster(topology, seed))


def _fill_cluster(topology: Topology, seed: int) -> dict[str, PlacedJob]:
    """Return the jobs that arrived before the first that did not fit. Large ones are GPTs."""
    rng, book = np.random.default_rng(seed), Occupancy(topology, first_fit)
    jobs: dict[str, PlacedJob] = {}
    while True:
        gpus = int(rng.choice(GPU_COUNTS))
        family = str(rng.choice(SMALL_FAMILIES)) if gpus < 32 else "gpt"
        name = f"{family}-{len(jobs)}"
        gang = book.allocate(name, gpus)
        if gang is None:
            return jobs
        jobs[name] = PlacedJob(gang=gang, sends=family_traffic(family, GPU_TYPE, gpus))


def _snapshot_of(described: DescribedTopology, placed: Mapping[str, PlacedJob]) -> Snapshot:
    """Return a snapshot of a cluster on which these jobs run, each with its own workload."""
    names, jobs = tuple(placed), list(placed.values())
    zeros, ones = np.zeros(len(jobs), np.int64), np.ones(len(jobs), np.int64)
    return Snapshot(
        cluster="crowded",
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
                for host in described.topology.hosts
            ]
        ),
        workloads=tuple(Workload(model=name, params="", global_batch=256) for name in names),
        plans=("",),
        estimates=Estimates.from_rows([]),
        allocations=Allocations.from_rows(
            [
                {"job": number, "node": node, "gpu": gpu, "hold": int(Hold.HELD), "generation": 1}
                for number, job in enumerate(jobs)
                for node, held in job.gang.members
                for gpu in held
            ]
        ),
        jobs=Jobs.from_rows(
            [_row(name, number, placed[name].gang) for number, name in enumerate(names)]
        ),
        topology=described,
        traffic=Traffics(
            workload=np.arange(len(jobs)),
            gpu_type=zeros,
            gpus=np.array([job.gang.gpus for job in jobs], dtype=np.int64),
            pipeline_degree=ones,
            plan=zeros,
            nodes=np.array([job.gang.nodes for job in jobs], dtype=np.int64),
            document=tuple(intern_traffic(job.sends.to_json()) for job in jobs),
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
