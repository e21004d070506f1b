"""Figures and plots of ablations and sweeps, against hand-computed values."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import pytest

from tessera.benchmarks.schedulers.ablations import (
    ESTIMATE_ERROR,
    AblationPlan,
    AblationRow,
)
from tessera.benchmarks.schedulers.bench_ablation import (
    _figures,
    _plots,
    first_queue_s,
    reference_runs,
    relative_results,
    unfinished_share,
)
from tessera.benchmarks.schedulers.bench_load import RunsByPoint, common_jct_s, sweep_figures
from tessera.benchmarks.schedulers.knowledge import KNOWLEDGE
from tessera.benchmarks.schedulers.variants import (
    Variant,
    WorkloadChanges,
    check_variants,
    queue_of,
)
from tessera.simulator.comparison.estimate_rows import rows_of
from tessera.simulator.comparison.policies import DEFAULT_POLICY
from tessera.simulator.comparison.runs import FinishedRun, RunRequest
from tessera.simulator.comparison.workload import SYNTHETIC, WorkloadSpec
from tests.support.worlds import a_profile

NEVER = math.inf
WORK = WorkloadSpec(trace=SYNTHETIC)


def a_run(jct_s: Sequence[float], throughput: float = 1.0) -> FinishedRun:
    """Return a run whose jobs all arrive at 100 s."""
    arrival_s = np.full(len(jct_s), 100.0)
    return FinishedRun(
        figures={"throughput": throughput, "horizon_s": 1000.0},
        said="",
        arrival_s=arrival_s,
        end_s=arrival_s + np.array(jct_s),
        alone_s=arrival_s,
        course={},
        gaps=np.zeros((0, 2)),
        node_gpus=[],
        node_types=[],
        segments=[],
    )


def a_row(part: str, policy: str, variant: str, against: str, x: float = 0.0) -> AblationRow:
    run = Variant(asked=RunRequest(work=WORK, policy=policy))
    return AblationRow(part=part, policy=policy, variant=variant, against=against, x=x, run=run)


EVERY = ("components", "alone", "depth", "queues", "types")
ROWS = {
    name: rows_of([a_profile(iter_time_s=time_s)]) for time_s, name in enumerate(KNOWLEDGE, start=1)
}


def a_plan() -> AblationPlan:
    return AblationPlan(
        base=RunRequest(work=WORK, policy="arena"),
        ours="ilp:jct",
        others=("fcfs", "sia"),
        heavy=4.0,
        depths=(1, 3),
        queues=(1, 8),
        types=(1, 2),
        rows_of=ROWS,
    )


def test_losses_are_relative_to_the_full_policy_which_has_none_itself() -> None:
    full = a_row("components", "arena", "full", "arena, full")
    rigid = a_row("components", "arena", "no elasticity", "arena, full")
    runs = {full: [a_run([100, 300], 2.0)], rigid: [a_run([200, 300], 1.5)]}
    assert relative_results(rigid, runs)[0].value == pytest.approx(250 / 200)
    assert _figures(runs) == {
        "jct_loss_arena_no_elasticity": pytest.approx(0.25),
        "throughput_loss_arena_no_elasticity": pytest.approx(0.25),
    }


def test_jobs_unfinished_in_one_run_are_counted_instead_of_a_mean() -> None:
    full = a_row("components", "arena", "full", "arena, full")
    blind = a_row("components", "arena", "no planner", "arena, full")
    runs = {
        full: [a_run([100, 300, 50]), a_run([1, 1, NEVER])],
        blind: [a_run([10, NEVER, 50]), a_run([1, 1, NEVER])],
    }
    assert unfinished_share(runs[blind], runs[full]) == pytest.approx(1 / 6)
    assert _figures(runs) == {
        "unfinished_arena_no_planner": pytest.approx(1 / 6),
        "throughput_loss_arena_no_planner": 0.0,
    }


def test_depth_is_compared_with_its_first_point_and_types_with_arena() -> None:
    deep = [a_row("depth", "arena", "all", "arena, all", x) for x in (3.0, 1.0)]
    types = [
        a_row("types", policy, "all", "arena, all", x)
        for policy in ("arena", "sia")
        for x in (1.0, 2.0)
    ]
    runs = {row: [a_run([10.0 * (k + 1)])] for k, row in enumerate([*deep, *types])}
    assert reference_runs(deep[0], runs) is runs[deep[1]]
    assert reference_runs(types[2], runs) is runs[types[0]]
    assert reference_runs(types[3], runs) is runs[types[1]]
    assert reference_runs(a_row("alone", "sia", "all", "arena, all"), runs) is None
    assert {name for name in _figures(runs) if "jct" in name} == {
        "jct_loss_arena_depth_3",
        "jct_loss_sia_types_1",
        "jct_loss_sia_types_2",
    }


def test_every_row_has_a_reference_and_can_run() -> None:
    plan = a_plan()
    rows = plan.rows(EVERY)
    assert len(set(rows)) == len(rows)
    assert {row.part for row in rows} == set(EVERY)
    runs = {row: [a_run([1.0])] for row in rows}
    assert all(reference_runs(row, runs) is not None for row in rows)
    check_variants([row.run for row in rows], seeds=1)


def test_each_variant_differs_from_the_full_policy_in_one_thing() -> None:
    rows = {row.name: row.run for row in a_plan().rows(["components"])}
    full = Variant(
        asked=RunRequest(
            work=WORK,
            policy="ilp:jct",
            estimates=ROWS["planned"],
            overheads="testbed-pruned-profiled",
        )
    )
    assert rows["ilp:jct, full"] == full
    assert rows["ilp:jct, no elasticity"] == Variant(
        asked=full.asked, shape=WorkloadChanges(at_requested=True)
    )
    assert rows["ilp:jct, no heterogeneity"] == Variant(
        asked=full.asked, shape=WorkloadChanges(pinned=True)
    )
    assert rows["arena, no elasticity"].asked.policy == "arena-no-elasticity"
    asked = {name: row.asked for name, row in rows.items()}
    arena = asked["arena, full"]
    assert asked["arena, no pruning"] == replace(arena, overheads="testbed-full-profiled")
    assert asked["arena, no planner"] == replace(arena, estimates=ROWS["data-parallel"])
    assert asked["arena, no profiler"] == replace(
        arena, estimates=ROWS["unprofiled"], overheads="testbed-pruned"
    )
    assert asked["arena, estimates off"] == replace(arena, error=ESTIMATE_ERROR)


def test_rounds_know_the_true_speeds_where_nothing_is_taken_from_the_estimator() -> None:
    plan = replace(a_plan(), rows_of={})
    assert all(row.run.asked.estimates is None for row in plan.rows(["depth", "queues", "types"]))


def test_depths_are_set_as_parameters_of_the_scheduler() -> None:
    rows = a_plan().rows(("depth",))
    assert [(row.x, row.policy, row.run.asked.policy) for row in rows] == [
        (1, "arena", "arena@depth=1"),
        (3, "arena", "arena@depth=3"),
    ]


def test_the_first_queue_is_reported_separately() -> None:
    jobs, row = 6, a_row("queues", "arena", "all", "arena, all", 2.0)
    two = AblationRow(
        part=row.part,
        policy=row.policy,
        variant=row.variant,
        against=row.against,
        x=2.0,
        run=Variant(asked=row.run.asked, shape=WorkloadChanges(queues=2)),
    )
    queue = queue_of(jobs, 2, 0)
    assert 0 < (queue == 1).sum() < jobs
    run = a_run(np.where(queue == 1, 7.0, 100.0).tolist())
    assert first_queue_s(two, [run]) == pytest.approx(7.0)


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


def test_plots_have_no_jct_if_the_finished_jobs_differ() -> None:
    full = a_row("components", "arena", "full", "arena, full")
    blind = a_row("components", "arena", "no planner", "arena, full")
    slow = a_row("components", "arena", "no pruning", "arena, full")
    deep = [a_row("depth", "arena", "all", "arena, all", x) for x in (1.0, 2.0)]
    runs = {
        full: [a_run([100, 300])],
        blind: [a_run([10, NEVER])],
        slow: [a_run([200, 300])],
        **{row: [a_run([100, 100 * row.x])] for row in deep},
    }
    bars, jct, throughput = _plots(runs)
    assert "arena, no pruning: 1.25" in bars.alt
    assert bars.alt.count("no planner") == 1  # only its throughput
    assert "arena, no planner 1" in bars.caption
    assert "arena 1 to 1.5" in jct.alt
    assert "arena 1 to 1" in throughput.alt
