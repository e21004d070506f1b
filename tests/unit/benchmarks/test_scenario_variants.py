"""Variants of workloads, and runs of them."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from tessera.benchmarks.schedulers.ablations import with_options
from tessera.benchmarks.schedulers.bench_ablation import parse_whole_numbers
from tessera.benchmarks.schedulers.bench_load import choose_one, points_of, shape_at
from tessera.benchmarks.schedulers.variants import (
    Variant,
    WorkloadChanges,
    check_variants,
    on_fewer_types,
    queue_jobs,
    queue_of,
    run_variant,
    seed_run,
    shape_world,
    types_by_use,
)
from tessera.formulation.errors import InvalidInput
from tessera.formulation.values import Workload
from tessera.simulator.comparison.estimate_rows import rows_of
from tessera.simulator.comparison.runs import FinishedRun, RunRequest, run_in_scenario
from tessera.simulator.comparison.workload import (
    SYNTHETIC,
    PreparedScenario,
    WorkloadSpec,
    make_scenario,
)
from tessera.simulator.data import MissingData
from tessera.simulator.metrics import reference_of
from tessera.simulator.scenario import Scenario
from tessera.simulator.sweeps.tasks import answer_call
from tessera.simulator.traces.redraw import LARGE_FROM, parameter_count
from tessera.simulator.traces.speeds import ClusterRoom, Speeds, gpu_seconds
from tests.support.worlds import (
    BERT,
    a_profile,
    a_scenario,
    an_arrival,
    simulate_scenario,
    some_specs,
)

SMALL = WorkloadSpec(trace=SYNTHETIC, gpus_share=0.05, jobs=30, load=2.0)
MOE = Workload(model="moe", params="7B", global_batch=10)


def a_world(scenario: Scenario | None = None) -> PreparedScenario:
    world_scenario = make_scenario(SMALL)
    return world_scenario if scenario is None else replace(world_scenario, scenario=scenario)


def two_types() -> Scenario:
    """Return two BERT jobs and a MoE job that runs only on A100; a V100 is half as fast."""
    profiles = [
        a_profile(n, factor / n, gpu_type=kind)
        for kind, factor in (("a100", 1.0), ("v100", 2.0))
        for n in (1, 2, 4)
    ]
    return a_scenario(
        an_arrival("a", requested_gpus=2, requested_type="v100", iterations=900),
        an_arrival("b", 5.0, requested_gpus=1, requested_type="a100"),
        an_arrival("c", 9.0, requested_gpus=2, requested_type="a100", workload=MOE),
        nodes=some_specs(("a100", 2, 4), ("v100", 1, 8)),
        profiles=[*profiles, a_profile(2, 3.0, workload=MOE)],
    )


def test_the_default_shape_changes_nothing_relevant() -> None:
    world = a_world()
    found = shape_world(world, WorkloadChanges(), seed=3)
    assert found == world


def test_faster_arrivals_raise_the_load_and_shorten_the_horizon() -> None:
    world = a_world()
    found = shape_world(world, WorkloadChanges(arrival_factor=4.0), seed=0)
    assert found.load == pytest.approx(4 * world.load)
    assert world.horizon_s / 4 <= found.horizon_s < world.horizon_s / 4 + 300
    assert found.horizon_s >= found.scenario.arrivals[-1].arrival_s


def test_large_models_arrive_with_equal_gpu_hours() -> None:
    world = a_world()
    speeds = Speeds(world.scenario.profiles, ClusterRoom.of(world.scenario.nodes))
    found = shape_world(world, WorkloadChanges(large_share=0.5), seed=1)
    before, after = (gpu_seconds(w.scenario.arrivals, speeds).sum() for w in (world, found))
    large = [parameter_count(a.spec.workload.params) >= LARGE_FROM for a in found.scenario.arrivals]
    assert sum(large) == round(0.5 * len(large))
    assert after == pytest.approx(before, rel=0.05)  # iterations are whole numbers


def test_pinned_jobs_run_only_on_their_type() -> None:
    scenario = replace(
        two_types(),
        arrivals=[
            an_arrival("a", requested_gpus=2, requested_type="v100"),
        ],
    )
    free = shape_world(a_world(scenario), WorkloadChanges(), 0)
    pinned = shape_world(a_world(scenario), WorkloadChanges(pinned=True), 0)
    ends = [simulate_scenario(w.scenario).end_s[0] for w in (free, pinned)]
    assert ends == [pytest.approx(250), pytest.approx(500)]  # 4 GPUs, A100 or V100


def test_jobs_at_their_requested_count_keep_their_reference() -> None:
    free, fixed = (
        shape_world(make_scenario(SMALL), WorkloadChanges(at_requested=at), 0).scenario
        for at in (False, True)
    )
    bounds = [(a.spec.min_gpus, a.spec.max_gpus) for a in fixed.arrivals]
    assert bounds == [(a.spec.requested_gpus,) * 2 for a in free.arrivals]
    np.testing.assert_array_equal(reference_of(free).rate, reference_of(fixed).rate)


def test_rounds_see_the_estimates_of_a_request_and_jobs_run_at_the_true_speed() -> None:
    """The truth is 1 s per iteration on one GPU and 0.5 s on two. Rounds see no gain by a second."""
    scenario = a_scenario(an_arrival("a", iterations=600), nodes=some_specs(("a100", 1, 2)))
    flat = rows_of([a_profile(1, 2.0), a_profile(2, 20.0)])
    asked = RunRequest(
        work=SMALL, policy="greedy:throughput", overheads="none", estimates=flat, mapped=True
    )
    run = FinishedRun.read(run_in_scenario(a_world(scenario), asked))
    assert run.end_s.tolist() == [600.0]
    seen = FinishedRun.read(run_in_scenario(a_world(scenario), replace(asked, estimates=None)))
    assert seen.end_s.tolist() == [300.0]


def test_nothing_is_known_of_any_job_if_the_estimates_are_empty() -> None:
    scenario = a_scenario(
        an_arrival("a", iterations=600, requested_type="a100"), nodes=some_specs(("a100", 1, 2))
    )
    asked = RunRequest(work=SMALL, policy="greedy:throughput", overheads="none", estimates=())
    run = FinishedRun.read(run_in_scenario(a_world(scenario), asked))
    assert run.end_s[0] >= 306.0  # on the one GPU that it requests, at least until it is measured


def test_no_job_is_resized_if_only_requested_counts_are_visible() -> None:
    request = RunRequest(work=SMALL, policy="greedy:throughput", mapped=True)
    held = {}
    for fixed in (False, True):
        run = FinishedRun.read(
            run_variant(Variant(asked=request, shape=WorkloadChanges(at_requested=fixed)))
        )
        gpus = {a.spec.name: a.spec.requested_gpus for a in make_scenario(SMALL).scenario.arrivals}
        names = list(gpus)
        held[fixed] = [
            sum(n for _, n in on) == gpus[names[int(job)]] for job, _, _, on in run.segments
        ]
    assert not all(held[False])
    assert held[True]
    assert all(held[True])


def test_fewer_types_keep_the_gpu_total_and_the_jobs_that_the_first_type_can_run() -> None:
    scenario = two_types()
    assert types_by_use(scenario) == ["a100", "v100"]  # three jobs can use it, two the other
    for count in (1, 2):
        found = on_fewer_types(scenario, count, seed=0)
        assert found.gpus == scenario.gpus == 16
        assert {n.gpu_type for n in found.nodes} == {"a100", "v100"} - (
            {"v100"} if count == 1 else set()
        )
        assert [a.spec.name for a in found.arrivals] == ["a", "b", "c"]
    one = on_fewer_types(scenario, 1, seed=0)
    moved = one.arrivals[0].spec
    assert (moved.requested_type, moved.requested_gpus, moved.iterations) == ("a100", 2, 1800)
    assert one.arrivals[1].spec == scenario.arrivals[1].spec
    assert on_fewer_types(scenario, 2, seed=0).arrivals == list(scenario.arrivals)


def test_jobs_that_the_first_type_cannot_run_are_excluded_from_all_counts() -> None:
    scenario = two_types()
    profiles = [
        *(e for e in scenario.profiles if e.cell.gpu_type == "a100" and e.workload == BERT),
        a_profile(2, 2.0, gpu_type="v100"),
        a_profile(2, 3.0, gpu_type="v100", workload=MOE),
    ]
    c = scenario.arrivals[2]
    on_v100 = c._replace(spec=replace(c.spec, requested_type="v100"))
    split = replace(scenario, profiles=profiles, arrivals=[*scenario.arrivals[:2], on_v100])
    # two jobs each (a and b, a and c), so the name decides
    assert types_by_use(split) == ["a100", "v100"]
    for count in (1, 2):
        found = on_fewer_types(split, count, seed=0)
        assert [a.spec.name for a in found.arrivals] == ["a", "b"]
    with pytest.raises(InvalidInput, match="gpu_types"):
        on_fewer_types(scenario, 3, seed=0)


def test_queues_are_drawn_evenly_and_fewer_queues_merge_those_of_many() -> None:
    two, eight = (queue_of(4000, n, seed=5) for n in (2, 8))
    np.testing.assert_array_equal(two, 1 + (eight - 1) // 4)
    assert np.bincount(eight)[1:] == pytest.approx(500, abs=90)
    jobs = make_scenario(SMALL).scenario.arrivals
    found = queue_jobs(jobs, 8, seed=5)
    assert [a.spec.queue for a in found] == queue_of(len(jobs), 8, seed=5).tolist()
    assert [a.spec.queue for a in queue_jobs(jobs, 1, seed=5)] == [1] * len(jobs)
    with pytest.raises(InvalidInput, match="queues"):
        queue_jobs(jobs, 0, seed=5)


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
            shape=WorkloadChanges(queues=3, arrival_factor=2.0),
        ),
        4,
    )
    assert (variant.asked.work.seed, variant.asked.error_seed) == (4, 4)
    local, from_task = run_variant(variant), json.loads(answer_call(variant.task("x").call))
    assert local["end_s"] == from_task["end_s"]
    assert local["figures"]["jct_mean_s"] == from_task["figures"]["jct_mean_s"]


def test_lists_of_options_are_read_or_refused() -> None:
    assert parse_whole_numbers("4,1,2,2") == (1, 2, 4)
    assert points_of("loads", "2,0.5") == (0.5, 2.0)
    assert points_of("larges", "0,1") == (0.0, 1.0)
    for where, text in (("larges", "1.5"), ("loads", "0"), ("loads", "x")):
        with pytest.raises(InvalidInput, match=where):
            points_of(where, text)
    assert choose_one("information", "b", ("a", "b")) == "b"
    with pytest.raises(InvalidInput, match="information"):
        choose_one("information", "a,b", ("a", "b"))
    for text in ("0,1", "x", "1.5"):
        with pytest.raises(InvalidInput, match="whole"):
            parse_whole_numbers(text)
    assert with_options("ilp:jct", "queue_order=true") == "ilp:jct@queue_order=true"
    with pytest.raises(InvalidInput, match="ours"):
        with_options("fcfs", "queue_order=true")


def test_each_sweep_changes_one_thing() -> None:
    assert shape_at("load", 2.0) == WorkloadChanges(arrival_factor=2.0)
    assert shape_at("life", 2.0) == WorkloadChanges(life_factor=2.0)
    assert shape_at("large", 0.5) == WorkloadChanges(large_share=0.5)
