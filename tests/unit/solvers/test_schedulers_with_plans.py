"""Published schedulers where plans need CPUs and host memory, and jobs were submitted with a plan."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from tessera.formulation.plan_tables import PlanKinds
from tessera.formulation.policy import Policy
from tessera.formulation.snapshot import Snapshot
from tessera.solvers.schedulers.base import make_view
from tessera.solvers.schedulers.registry import make_scheduler
from tests.support.builders import a_job, a_node, a_snapshot, an_estimate
from tests.support.published_schedulers import BATCH, RUNNING

GIB = 1 << 30
DP, OFFLOAD, TP1, TP2 = 1, 2, 3, 4
PLANS = ("", "dp", "offload", "141", "142")


def a_cell(
    gpus: int, rate: float, plan: int = DP, *, workload: int = 0, nodes: int = 1, **needs: int
) -> dict[str, Any]:
    return an_estimate(workload, 0, gpus, nodes, plan=plan, iter_time_s=BATCH / rate, **needs)


def a_plan_round(
    jobs: Sequence[dict[str, Any]],
    cells: Sequence[dict[str, Any]],
    *,
    cpus: int = 16,
    host_bytes: int = 64 * GIB,
) -> Snapshot:
    """Return a round on one node of 8 GPUs. The plans 141 and 142 are of one kind."""
    snapshot = a_snapshot(
        nodes=[a_node("n", 0, 8, cpus=cpus, host_bytes=host_bytes)],
        jobs=jobs,
        estimates=cells,
        plans=PLANS,
    )
    return replace(
        snapshot, plan_kinds=PlanKinds(plan=np.array([TP1, TP2]), kind=("3d-pp1-tp4",) * 2)
    )


def choose_plans(name: str, snapshot: Snapshot) -> dict[str, tuple[int, str] | None]:
    """Return the (GPUs, execution plan) of each job, or None for a job that waits."""
    view = make_view(snapshot, Policy())
    choice = make_scheduler(name).choose(view)
    cells, cell = view.draft.cells, view.draft.cell
    return {
        job: None if c < 0 else (int(cells.gpus[cell[c]]), PLANS[int(cells.plan[cell[c]])])
        for job, c in zip(snapshot.jobs.name, choice.tolist(), strict=True)
    }


MENU = [
    a_cell(1, 10.0),
    a_cell(1, 25.0, OFFLOAD, cpus=8),
    a_cell(2, 20.0),
    a_cell(2, 40.0, OFFLOAD, cpus=16),
    a_cell(4, 30.0),
]


def test_a_guaranteed_job_needs_the_fewest_gpus_with_which_any_plan_is_fast_enough() -> None:
    rivals = [
        a_job(f"rival-{k}", 1, requested_gpus=1, state=RUNNING, cell=(0, 1, 1), guaranteed=True)
        for k in range(7)
    ]
    jobs = [*rivals, a_job("owed", 0, requested_gpus=2, submitted_plan=DP, guaranteed=True)]
    jobs[-1] |= {"requested_cpus": 8}
    snapshot = a_plan_round(
        [job | {"current_plan": DP} if job["state"] else job for job in jobs],
        [*MENU, a_cell(1, 10.0, workload=1)],
    )

    assert choose_plans("morphling", snapshot)["owed"] == (1, "offload")


def test_the_minimum_takes_no_more_cpus_than_were_requested() -> None:
    owed = a_job("owed", 0, requested_gpus=2, submitted_plan=DP, guaranteed=True)
    blocks = a_job("effort", 1, requested_gpus=4)
    cells = [*MENU[:3], a_cell(6, 600.0, workload=1)]

    def plan(requested_cpus: int) -> tuple[int, str] | None:
        owed["requested_cpus"] = requested_cpus
        return choose_plans("morphling", a_plan_round([owed, blocks], cells))["owed"]

    assert plan(8) == (1, "offload")
    assert plan(7) == (2, "dp")


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("morphling", (2, "offload")),
        ("morphling-r", (4, "dp")),
        ("morphling-e", (2, "offload")),
        ("morphling-n", (2, "dp")),
        ("synergy", (2, "dp")),
        ("antman", (2, "dp")),
        ("srt", (2, "offload")),
    ],
)
def test_schedulers_without_choice_of_plans_run_the_submitted_one(
    name: str, expected: tuple[int, str]
) -> None:
    snapshot = a_plan_round([a_job("j", 0, requested_gpus=2, submitted_plan=DP)], MENU)

    assert choose_plans(name, snapshot) == {"j": expected}


def test_morphling_r_changes_only_the_data_parallel_degree_of_a_3d_plan() -> None:
    cells = [a_cell(4, 20.0, TP1), a_cell(8, 30.0, TP2), a_cell(8, 50.0, DP)]
    snapshot = a_plan_round([a_job("j", 0, requested_gpus=4, submitted_plan=TP1)], cells)

    assert choose_plans("morphling-r", snapshot) == {"j": (8, "142")}
    assert choose_plans("morphling", snapshot) == {"j": (8, "dp")}


def test_a_plan_that_was_measured_on_more_nodes_than_others_is_not_lost() -> None:
    snapshot = a_snapshot(
        nodes=[a_node("n", 0, 8), a_node("m", 0, 8)],
        jobs=[a_job("j", 0, requested_gpus=4, submitted_plan=OFFLOAD)],
        estimates=[a_cell(4, 20.0), a_cell(4, 30.0, OFFLOAD, nodes=2)],
        plans=PLANS,
    )

    assert choose_plans("synergy", snapshot) == {"j": (4, "offload")}
    assert choose_plans("srt", snapshot) == {"j": (4, "dp")}


@pytest.mark.parametrize("name", ["synergy", "antman", "morphling-n"])
def test_a_submitted_plan_that_does_not_run_on_the_request_leaves_the_best_one(name: str) -> None:
    cells = [a_cell(2, 20.0), a_cell(2, 40.0, OFFLOAD), a_cell(4, 20.0, TP1)]
    snapshot = a_plan_round([a_job("j", 0, requested_gpus=2, submitted_plan=TP1)], cells)

    assert choose_plans(name, snapshot) == {"j": (2, "offload")}


def test_morphling_takes_cpus_from_the_job_that_gains_least_by_them() -> None:
    def cells(workload: int, plain: float, offloaded: float) -> list[dict[str, Any]]:
        return [
            a_cell(1, plain, workload=workload, cpus=1),
            a_cell(1, offloaded, OFFLOAD, workload=workload, cpus=8),
        ]

    jobs = [
        a_job("flat", 0, requested_gpus=1, state=RUNNING, cell=(0, 1, 1), current_plan=OFFLOAD),
        a_job("steep", 1, requested_gpus=1),
    ]
    snapshot = a_plan_round(jobs, [*cells(0, 10.0, 11.0), *cells(1, 10.0, 30.0)], cpus=9)

    assert choose_plans("morphling", snapshot) == {"flat": (1, "dp"), "steep": (1, "offload")}


def test_morphling_allocates_host_memory_last_and_stops_jobs_that_lack_it() -> None:
    jobs = [
        a_job(f"j-{k}", 0, requested_gpus=1, guaranteed=not k, submit_s=float(k)) for k in range(2)
    ]
    cells = [a_cell(1, 10.0, OFFLOAD, host_bytes=40 * GIB)]

    assert choose_plans("morphling", a_plan_round(jobs, cells, host_bytes=79 * GIB)) == {
        "j-0": (1, "offload"),
        "j-1": None,
    }
