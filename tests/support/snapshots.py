"""Random snapshots, for laws of rounds."""

from __future__ import annotations

import itertools
import math
from dataclasses import replace
from typing import Any

from hypothesis import strategies as st

from tessera.formulation.lifecycle import JobState
from tessera.formulation.placement import Gang
from tessera.formulation.snapshot import Allocations, Snapshot
from tessera.formulation.values import Hold
from tests.support.builders import a_job, a_snapshot, an_estimate, some_nodes


@st.composite
def snapshots(draw: st.DrawFn) -> Snapshot:
    """Draw a small cluster with running, guaranteed and pinned jobs, draining nodes and holes."""
    nodes = some_nodes((0, draw(st.integers(1, 4)), 4), (1, draw(st.integers(0, 2)), 8))
    speed = st.sampled_from([0.5, 1.0, 1.3, 2.0, math.inf])
    estimates = []
    for w, (t, size), gpus, degree in itertools.product(
        range(2), ((0, 4), (1, 8)), (1, 2, 3, 4, 8, 16), (1, 2)
    ):
        if draw(st.booleans()):
            seconds = draw(speed) / gpus
            estimates.append(
                an_estimate(w, t, gpus, -(-gpus // size), degree=degree, iter_time_s=seconds)
            )
    free = {n: list(range(node["gpus"])) for n, node in enumerate(nodes)}
    jobs: list[dict[str, Any]] = []
    gangs: dict[int, Gang] = {}
    for j in range(draw(st.integers(0, 7))):
        job = a_job(
            f"j{j}",
            draw(st.integers(0, 1)),
            requested_gpus=draw(st.sampled_from([1, 2, 4, 8])),
            restart_s=draw(st.sampled_from([0.0, 60.0, 600.0])),
            weight=draw(st.sampled_from([0.5, 1.0, 4.0])),
            guaranteed=draw(st.booleans()),
            movable=draw(st.booleans()),
            iterations_left=draw(st.sampled_from([10.0, 1e5])),
            state=draw(
                st.sampled_from(
                    [JobState.QUEUED, JobState.QUEUED, JobState.HELD, JobState.STOPPING]
                )
            ),
        )
        runs_on = [e for e in estimates if e["workload"] == job["workload"]]
        if len(runs_on) > 0 and draw(st.booleans()):
            cell = draw(st.sampled_from(runs_on))
            share = cell["gpus"] // cell["nodes"]
            place = [
                n
                for n, node in enumerate(nodes)
                if node["gpu_type"] == cell["gpu_type"] and len(free[n]) >= share
            ][: cell["nodes"]]
            if len(place) == cell["nodes"] and share * cell["nodes"] == cell["gpus"]:
                taken = {n: tuple(sorted(free[n].pop(0) for _ in range(share))) for n in place}
                gangs[j] = Gang(members=tuple(taken.items()))
                job |= a_job(
                    f"j{j}",
                    state=draw(st.sampled_from([JobState.RUNNING, JobState.STARTING])),
                    cell=(cell["gpu_type"], cell["gpus"], cell["pipeline_degree"]),
                ) | {
                    k: job[k]
                    for k in (
                        "workload",
                        "guaranteed",
                        "movable",
                        "restart_s",
                        "weight",
                        "iterations_left",
                        "requested_gpus",
                    )
                }
        jobs.append(job)
    for node in nodes:
        node["schedulable"] = draw(st.integers(0, 4)) > 0
    snapshot = a_snapshot(
        nodes=nodes,
        jobs=jobs,
        estimates=estimates,
        gangs=gangs,
        workloads=2,
        hold=draw(st.sampled_from([Hold.HELD, Hold.RESERVED])),
        round_number=draw(st.sampled_from([1, 12])),
    )
    leaving = [  # GPUs that ended jobs have not yet released
        {"job": -1, "node": n, "gpu": gpus[0], "hold": int(Hold.RELEASING), "generation": 1}
        for n, gpus in free.items()
        if len(gpus) > 0 and draw(st.booleans())
    ]
    rows = [snapshot.allocations.row(i) for i in range(len(snapshot.allocations))]
    return replace(snapshot, allocations=Allocations.from_rows(rows + leaving))
