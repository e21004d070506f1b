"""Random snapshots, for laws of rounds."""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from dataclasses import replace
from typing import Any, Final

from hypothesis import strategies as st

from tessera.formulation.answer.placement import Gang
from tessera.formulation.base.values import Hold
from tessera.formulation.job.lifecycle import JobState
from tessera.formulation.state.snapshot import Allocations, Snapshot
from tests.support.builders import a_job, a_snapshot, an_estimate, some_nodes

SPEEDS: Final = (0.5, 1.0, 1.3, 2.0, math.inf)
GPU_COUNTS: Final = (1, 2, 3, 4, 8, 16)
NODE_GROUPS: Final = st.tuples(st.integers(1, 4), st.integers(0, 2))
JOB_COUNTS: Final = st.integers(0, 7)
SCHEDULABLE: Final = (False, True, True, True, True)

JOB_OPTIONS: Final = {
    "workload": (0, 1),
    "requested_gpus": (1, 2, 4, 8),
    "restart_s": (0.0, 60.0, 600.0),
    "weight": (0.5, 1.0, 4.0),
    "guaranteed": (False, True),
    "pinned": (False, True),
    "iterations_left": (10.0, 1e5),
}
WAITING_STATES: Final = (JobState.QUEUED, JobState.QUEUED, JobState.HELD, JobState.STOPPING)
RUNNING_STATES: Final = (JobState.RUNNING, JobState.STARTING)


DIGITS: Final = st.binary(min_size=8, max_size=8)


def draw_choices(draw: st.DrawFn, *options: Sequence[Any]) -> list[Any]:
    """Draw an element of each of the sequences, all in one draw, because each draw is slow."""
    number = int.from_bytes(draw(DIGITS), "little")  # large integers would rarely be drawn
    chosen = []
    for values in options:
        number, index = divmod(number, len(values))
        chosen.append(values[index])
    return chosen


@st.composite
def snapshots(draw: st.DrawFn) -> Snapshot:
    """Draw a small cluster with running, guaranteed and pinned jobs, draining nodes and holes."""
    small, large = draw(NODE_GROUPS)
    nodes = some_nodes((0, small, 4), (1, large, 8))
    estimates = []
    for w, (t, size), gpus in itertools.product(range(2), ((0, 4), (1, 8)), GPU_COUNTS):
        cells = draw_choices(draw, (False, True), SPEEDS, (False, True), SPEEDS)
        for degree, is_estimated, speed in ((1, *cells[:2]), (2, *cells[2:])):
            if is_estimated:
                estimates.append(
                    an_estimate(
                        w, t, gpus, -(-gpus // size), degree=degree, iter_time_s=speed / gpus
                    )
                )
    free = {n: list(range(node["gpus"])) for n, node in enumerate(nodes)}
    jobs: list[dict[str, Any]] = []
    gangs: dict[int, Gang] = {}
    for j in range(draw(JOB_COUNTS)):
        *values, state, running_state, may_run = draw_choices(
            draw, *JOB_OPTIONS.values(), WAITING_STATES, RUNNING_STATES, (False, True)
        )
        fields = dict(zip(JOB_OPTIONS, values, strict=True))
        job = a_job(f"j{j}", **fields, state=state)
        runs_on = [e for e in estimates if e["workload"] == job["workload"]]
        if len(runs_on) > 0 and may_run:
            (cell,) = draw_choices(draw, runs_on)
            share = cell["gpus"] // cell["nodes"]
            place = [
                n
                for n, node in enumerate(nodes)
                if node["gpu_type"] == cell["gpu_type"] and len(free[n]) >= share
            ][: cell["nodes"]]
            if len(place) == cell["nodes"] and share * cell["nodes"] == cell["gpus"]:
                taken = {n: tuple(sorted(free[n].pop(0) for _ in range(share))) for n in place}
                gangs[j] = Gang(members=tuple(taken.items()))
                job = a_job(
                    f"j{j}",
                    **fields,
                    state=running_state,
                    cell=(cell["gpu_type"], cell["gpus"], cell["pipeline_degree"]),
                )
        jobs.append(job)
    flags = draw_choices(draw, *([SCHEDULABLE] * len(nodes)))
    for node, is_schedulable in zip(nodes, flags, strict=True):
        node["schedulable"] = is_schedulable
    hold, round_number, *is_leaving = draw_choices(
        draw, (Hold.HELD, Hold.RESERVED), (1, 12), *([(False, True)] * len(nodes))
    )
    snapshot = a_snapshot(
        nodes=nodes,
        jobs=jobs,
        estimates=estimates,
        gangs=gangs,
        workloads=2,
        hold=hold,
        round_number=round_number,
    )
    leaving = [  # GPUs that ended jobs have not yet released
        {"job": -1, "node": n, "gpu": gpus[0], "hold": int(Hold.RELEASING), "generation": 1}
        for n, gpus in free.items()
        if len(gpus) > 0 and is_leaving[n]
    ]
    rows = [snapshot.allocations.row(i) for i in range(len(snapshot.allocations))]
    return replace(snapshot, allocations=Allocations.from_rows(rows + leaving))
