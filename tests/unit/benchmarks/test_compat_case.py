"""A small case that compares the artifact's stored results with ours, and the rigid schedulers."""

from __future__ import annotations

import numpy as np
import pytest

from tessera.benchmarks.papers.arena.arena import CompatResult
from tessera.benchmarks.papers.arena.oddities import LOOP_POLICIES
from tessera.benchmarks.papers.arena.rigid import RigidScheduler
from tessera.benchmarks.papers.bench_arena_compat import (
    ARTIFACT_POLICIES,
    PADDED_JOBS,
    PADDED_S,
    arena_compat,
    result_row,
)
from tessera.formulation.errors import InvalidInput
from tessera.formulation.policy import Policy
from tessera.simulator.data import data_dir
from tessera.solvers.schedulers.base import make_view
from tests.support.builders import a_job, a_snapshot, an_estimate, some_nodes


def a_result(jct_s: list[float], samples_s: list[float]) -> CompatResult:
    count = len(jct_s)
    return CompatResult(
        entered_s=np.zeros(count),
        ended_s=np.array(jct_s),
        queued_s=np.zeros(count),
        gains=np.ones(count, dtype=np.int64),
        samples_s=np.array(samples_s),
        decided=1,
        refused=0,
    )


def test_the_mean_throughput_ignores_idle_rounds() -> None:
    line = result_row(
        "fcfs", a_result([300.0], [0.0, 100.0, 101.0, 301.0]), (1, 0.0), same_work=False
    )
    assert line["mean_throughput"] == 201.0
    assert line["peak_throughput"] == 301.0


def test_padding_adds_missing_jobs_with_the_longest_time_and_no_job_twice() -> None:
    result = a_result([300.0, 900.0, np.inf], [1.0])
    assert result_row("fcfs", result, (4, 1200.0), same_work=False)["padded_jct_s"] == 900.0
    assert result_row("fcfs", result, (1, 1200.0), same_work=False)["padded_jct_s"] == 600.0
    assert result_row("fcfs", result, (1, 1200.0), same_work=False)["mean_jct_s"] == 600.0


def test_stored_padded_times_match_padding_of_the_other_stored_figures() -> None:
    for one in ARTIFACT_POLICIES.values():
        s = one.stored
        missing = PADDED_JOBS - s.finished
        padded_s = (s.finished * s.mean_jct_s + missing * PADDED_S) / PADDED_JOBS
        assert padded_s == pytest.approx(s.padded_jct_s, rel=1e-4)


def test_an_unknown_policy_is_refused_with_the_known_ones() -> None:
    with pytest.raises(InvalidInput, match="elasticflow-ls"):
        arena_compat(policies="fcfs,nobody")


def test_the_figures_come_from_the_first_policy() -> None:
    folder = data_dir()
    if folder is None or not (folder / "arena" / "trace_philly.csv").is_file():
        pytest.skip("trace_philly.csv is not there; set TESSERA_DATA to the folder that has arena/")
    report = arena_compat(rounds=30, policies="fcfs,arena", honest="all")
    assert [line["policy"] for line in report.table] == ["fcfs", "arena"]
    assert report.figures["finished"] == report.table[0]["finished"]
    assert {"finished_deviation", "mean_jct_deviation"} <= report.waived


def test_every_contestant_is_listed_by_name_in_the_oddities() -> None:
    known = set().union(*LOOP_POLICIES.values())
    for name, one in ARTIFACT_POLICIES.items():
        assert one.policy().name == name
        assert name in known
        assert one.rigid is None or one.rigid.name in known


def chosen_cells(policy: RigidScheduler) -> list[tuple[int, int] | None]:
    """Return (type, GPUs) for a job that runs on one GPU of type 0 and a job that requests 2 of type 0."""
    estimates = [
        an_estimate(0, kind, gpus, iter_time_s=(2.0 - kind) / gpus)
        for kind in (0, 1)
        for gpus in (1, 2, 4)
    ]
    snapshot = a_snapshot(
        nodes=some_nodes((0, 1, 4), (1, 1, 4)),
        estimates=estimates,
        jobs=[
            a_job("a", requested_gpus=1, requested_gpu_type=0),
            a_job("b", requested_gpus=2, requested_gpu_type=0),
        ],
    )
    view = make_view(snapshot, Policy())
    choice = policy.choose(view).tolist()
    return [
        None if c < 0 else (int(view.draft.gpu_type[c]), int(view.draft.gpus[c])) for c in choice
    ]


def test_rigid_schedulers_give_each_job_in_turn_the_fastest_allowed_cell() -> None:
    assert chosen_cells(RigidScheduler(name="r")) == [(0, 1), (0, 2)]
    assert chosen_cells(RigidScheduler(name="r", any_type=True)) == [(1, 1), (1, 2)]
    assert chosen_cells(RigidScheduler(name="r", any_type=True, any_count=True)) == [(1, 4), (0, 4)]
