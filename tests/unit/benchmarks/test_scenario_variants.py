"""Variants of workloads, and runs of them."""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pytest

from tessera.benchmarks.schedulers.bench_load import (
    RunsByPoint,
    common_jct_s,
    points_of,
    sweep_figures,
)
from tessera.benchmarks.schedulers.variants import (
    Variant,
    WorkloadChanges,
    check_variants,
    run_variant,
    seed_run,
    shape_world,
)
from tessera.formulation.base.errors import InvalidInput
from tessera.simulator.comparison.policies import DEFAULT_POLICY
from tessera.simulator.comparison.runs import FinishedRun, RunRequest
from tessera.simulator.comparison.workload import SYNTHETIC, WorkloadSpec, make_scenario
from tessera.simulator.data import MissingData
from tessera.simulator.sweeps.tasks import answer_call
from tessera.simulator.traces.redraw import LARGE_FROM, parameter_count
from tessera.simulator.traces.speeds import ClusterRoom, Speeds, gpu_seconds

NEVER = math.inf
SMALL = WorkloadSpec(trace=SYNTHETIC, gpus_share=0.05, jobs=30, load=2.0)


def test_faster_arrivals_raise_the_load_and_shorten_the_horizon() -> None:
    world = make_scenario(SMALL)
    found = shape_world(world, WorkloadChanges(arrival_factor=4.0), seed=0)
    assert found.load == pytest.approx(4 * world.load)
    assert world.horizon_s / 4 <= found.horizon_s < world.horizon_s / 4 + 300
    assert found.horizon_s >= found.scenario.arrivals[-1].arrival_s


def test_large_models_arrive_with_equal_gpu_hours() -> None:
    world = make_scenario(SMALL)
    speeds = Speeds(world.scenario.profiles, ClusterRoom.of(world.scenario.nodes))
    found = shape_world(world, WorkloadChanges(large_share=0.5), seed=1)
    before, after = (gpu_seconds(w.scenario.arrivals, speeds).sum() for w in (world, found))
    large = [parameter_count(a.spec.workload.params) >= LARGE_FROM for a in found.scenario.arrivals]
    assert sum(large) == round(0.5 * len(large))
    assert after == pytest.approx(before, rel=0.05)  # iterations are whole numbers


def test_depth_applies_only_to_arena_and_changes_its_results() -> None:
    with pytest.raises(InvalidInput, match="depth"):
        check_variants([Variant(asked=RunRequest(work=SMALL, policy="fcfs@depth=2"))], seeds=1)
    dense = WorkloadChanges(arrival_factor=20.0)
    ends = [
        FinishedRun.read(
            run_variant(
                Variant(asked=RunRequest(work=SMALL, policy=f"arena@depth={k}"), shape=dense)
            )
        ).end_s
        for k in (1, 4)
    ]
    assert not np.array_equal(ends[0], ends[1])


def test_seeds_that_draw_nothing_are_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TESSERA_DATA", str(tmp_path))
    fixed = Variant(asked=RunRequest(work=WorkloadSpec(trace="arena-philly"), policy="fcfs"))
    with pytest.raises(MissingData, match="trace_philly"):  # valid seeds, but no trace
        check_variants([fixed], seeds=1)
    with pytest.raises(InvalidInput, match="jobs-share"):
        check_variants([fixed], seeds=2)
    with pytest.raises(InvalidInput, match="unknown"):
        check_variants([Variant(asked=RunRequest(work=SMALL, policy="nobody"))], seeds=1)


def test_a_variant_gives_the_same_result_as_a_task() -> None:
    variant = seed_run(
        Variant(
            asked=RunRequest(work=SMALL, policy="arena@depth=2"),
            shape=WorkloadChanges(arrival_factor=2.0),
        ),
        4,
    )
    assert variant.asked.work.seed == 4
    local, from_task = run_variant(variant), json.loads(answer_call(variant.task("x").call))
    assert local["end_s"] == from_task["end_s"]
    assert local["figures"]["jct_mean_s"] == from_task["figures"]["jct_mean_s"]


def test_lists_of_options_are_read_or_refused() -> None:
    assert points_of("loads", "2,0.5") == (0.5, 2.0)
    assert points_of("larges", "0,1") == (0.0, 1.0)
    for where, text in (("larges", "1.5"), ("loads", "0"), ("loads", "x")):
        with pytest.raises(InvalidInput, match=where):
            points_of(where, text)
    blind = Variant(
        asked=RunRequest(work=SMALL, policy="fcfs", information="a,b"), shape=WorkloadChanges()
    )
    with pytest.raises(InvalidInput, match="information"):
        check_variants([blind], 1)


def a_run(jct_s: Sequence[float], throughput: float = 1.0) -> FinishedRun:
    """Return a run whose jobs all arrive at 100 s."""
    arrival_s = np.full(len(jct_s), 100.0)
    return FinishedRun(
        figures={"throughput": throughput, "horizon_s": 1000.0},
        arrival_s=arrival_s,
        end_s=arrival_s + np.array(jct_s),
        alone_s=arrival_s,
        course={},
        gaps=np.zeros((0, 2)),
        node_gpus=[],
        node_types=[],
        segments=[],
    )


def test_sweeps_are_judged_at_their_last_point_and_at_their_worst_point() -> None:
    found: RunsByPoint = {
        "load": {
            1.0: {
                "arena": [a_run([100, 100])],
                "sia": [a_run([80, 80])],
                DEFAULT_POLICY: [a_run([100, 80])],
            },
            2.0: {
                "arena": [a_run([100, 300], 2.0)],
                "sia": [a_run([300, 300])],
                DEFAULT_POLICY: [a_run([50, NEVER], 3.0)],
            },
        }
    }
    assert sweep_figures(found) == {
        "load_jct_gain_vs_arena": pytest.approx(0.5),
        "load_throughput_gain_vs_arena": pytest.approx(0.5),
        "load_worst_jct_margin": pytest.approx(80 / 90 - 1),
        "load_worst_throughput_margin": pytest.approx(0.0),
    }
    assert sweep_figures({"load": {1.0: {"fcfs": [a_run([1.0])]}}}) == {}


def test_means_of_a_point_are_over_the_jobs_that_all_finished() -> None:
    by = {"a": [a_run([10, 30, 5]), a_run([NEVER])], "b": [a_run([20, NEVER, 5]), a_run([3])]}
    jct_s = common_jct_s(by, "a")
    assert jct_s[0] == pytest.approx(7.5)
    assert math.isnan(jct_s[1])
