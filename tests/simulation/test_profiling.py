"""Profiling tasks in simulated worlds: jobs of the least value on the cluster's own GPUs."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import replace

import numpy as np
import pytest

from tessera.estimator.profiling.tasks import LEAST_WEIGHT, ProfilingOptions, missing_tasks
from tessera.formulation.base.values import GpuType, Workload
from tessera.formulation.records.estimates import (
    ClusterGpuType,
    EstimationInputs,
    UnestimatedWorkload,
)
from tessera.formulation.state.snapshot import Snapshot
from tessera.simulator.executor import ReplayFailed, replay_lines
from tessera.simulator.hazards import Failure
from tessera.simulator.logfile import lines_of, log_of
from tessera.simulator.metrics import reference_of, run_figures
from tessera.simulator.run import Result
from tessera.simulator.store.gpus import AllocationChange
from tessera.simulator.world import World
from tests.support.worlds import (
    BERT,
    COSTLY,
    FCFS,
    FREE,
    ILP,
    a_profile,
    a_scenario,
    a_world,
    an_arrival,
    end_s,
    give,
    iterations_done,
    simulate_scenario,
    some_specs,
    take,
)

PROFILED = replace(FREE, profile_s=400.0)
"""A task takes 400 s, which are 100 s for each of its four sizes, and its starts take no time."""

ONE_GPU = some_specs(("a100", 1, 1))
TWO_TYPES = some_specs(("a100", 1, 1), ("v100", 1, 1))
ON_BOTH = [a_profile(), a_profile(gpu_type="v100", iter_time_s=2.0)]
FIRST, SECOND = ("a100-0", [0]), ("v100-0", [0])


def task_names(world: World) -> list[str]:
    """Return the profiling tasks that a round sees."""
    snapshot = world.snapshot()
    return [snapshot.jobs.name[i] for i in np.flatnonzero(snapshot.profiling())]


def types_seen(snapshot: Snapshot, workload: Workload = BERT) -> set[str]:
    """Return the GPU types on which a round sees estimates of ``workload``."""
    e = snapshot.estimates
    rows = e.gpu_type[e.workload == snapshot.workloads.index(workload)]
    return {snapshot.gpu_types[t].name for t in rows.tolist()}


def task_spans(result: Result) -> list[tuple[float, float, str]]:
    return [(s.start_s, s.end_s, s.ended_by) for s in result.task_segments]


def spans(result: Result) -> list[tuple[float, float, str]]:
    return [(s.start_s, s.end_s, s.ended_by) for s in result.segments]


# the tasks that are created


def test_the_first_job_of_a_model_brings_one_task_for_each_gpu_type_with_nodes() -> None:
    scenario = a_scenario(
        an_arrival("a"),
        an_arrival("b"),
        nodes=TWO_TYPES,
        profiles=ON_BOTH,
        types=("a100", "t4", "v100"),
    )
    snapshot = a_world(scenario, PROFILED).snapshot()
    tasks = np.flatnonzero(snapshot.profiling())
    assert [snapshot.gpu_types[t].name for t in snapshot.jobs.requested_gpu_type[tasks]] == [
        "a100",
        "v100",
    ]
    assert snapshot.jobs.requested_gpus[tasks].tolist() == [1, 1]
    assert snapshot.jobs.weight[tasks].tolist() == [LEAST_WEIGHT] * 2
    assert snapshot.jobs.pinned_gpu_type[tasks].all()


def test_workloads_that_differ_only_in_their_batch_share_tasks_and_their_outcome() -> None:
    larger = replace(BERT, global_batch=20)
    scenario = a_scenario(
        an_arrival("a"),
        an_arrival("b", 50.0, workload=larger),
        nodes=ONE_GPU,
        profiles=[a_profile(), a_profile(workload=larger)],
    )
    world = a_world(scenario, PROFILED)
    (task,) = task_names(world)
    world.advance(50.0)
    assert task_names(world) == [task]
    give(world, task, FIRST)
    world.advance(450.0)
    assert types_seen(world.snapshot()) == types_seen(world.snapshot(), larger) == {"a100"}


def test_the_service_would_create_the_same_tasks() -> None:
    published = Workload(model="bert", params="1.3B", global_batch=256)
    scenario = a_scenario(
        an_arrival("a", workload=published),
        nodes=TWO_TYPES,
        profiles=[a_profile(workload=published)],
    )
    asks = UnestimatedWorkload(
        workload=published, requests=(1,), counts=(1,), derived_from="", profile=True
    )
    kinds = [
        ClusterGpuType(gpu_type=GpuType(name=t, memory_bytes=2**35), node_gpus=1, gpus=1)
        for t in ("a100", "v100")
    ]
    service = EstimationInputs(kinds=tuple(kinds), models=(), measurements=(), wanted=(asks,))
    expected = missing_tasks(service, ("a100", "v100"), ProfilingOptions())
    tasks = a_world(scenario, PROFILED).tasks()
    assert {one.spec.name: one.spec for one in tasks} == expected
    assert len(expected) == 2


def test_a_model_that_nobody_can_estimate_is_not_profiled_and_runs_on_its_request() -> None:
    unknown = Workload(model="unknown", params="", global_batch=10)
    scenario = a_scenario(
        an_arrival("a", workload=unknown, requested_gpu_type="a100"),
        nodes=ONE_GPU,
        profiles=[a_profile(), a_profile(workload=unknown)],
    )
    result = simulate_scenario(scenario, overheads=PROFILED, visible=[a_profile()])
    assert result.tasks == ()
    assert spans(result) == [(0.0, 1000.0, "finish")]


# what rounds see


def test_estimates_appear_type_by_type_as_tasks_end() -> None:
    scenario = a_scenario(an_arrival("a"), nodes=TWO_TYPES, profiles=ON_BOTH)
    world = a_world(scenario, PROFILED)
    on_a100, on_v100 = task_names(world)
    seen = world.snapshot()
    assert types_seen(seen) == set()
    assert not seen.jobs.unestimated.any()
    give(world, on_v100, SECOND)
    world.advance(399.0)
    assert types_seen(world.snapshot()) == set()
    world.advance(400.0)
    assert types_seen(world.snapshot()) == {"v100"}
    assert task_names(world) == [on_a100]
    give(world, on_a100, FIRST)
    world.advance(800.0)
    assert types_seen(world.snapshot()) == {"a100", "v100"}
    e = world.snapshot().estimates
    keys = list(zip(e.workload.tolist(), e.gpu_type.tolist(), e.gpus.tolist(), strict=True))
    assert keys == sorted(keys)


# the GPUs that tasks hold


@pytest.mark.parametrize("options", [ILP, FCFS])
def test_a_task_gives_way_to_a_job_of_value_and_goes_on_from_its_records(options: object) -> None:
    """The task of b begins at 900 s, and another job of a's model takes its GPU at 1200 s."""
    other = Workload(model="other", params="", global_batch=10)
    scenario = a_scenario(
        an_arrival("a", iterations=100),
        an_arrival("b", 800.0, workload=other),
        an_arrival("c", 1100.0, iterations=500),
        nodes=ONE_GPU,
        profiles=[a_profile(), a_profile(workload=other)],
    )
    result = simulate_scenario(scenario, options, overheads=PROFILED)  # type: ignore[arg-type]
    assert task_spans(result) == [
        (0.0, 400.0, "finish"),
        (900.0, 1200.0, "suspend"),
        (1800.0, 1900.0, "finish"),
    ]
    assert [(s.job, s.start_s, s.end_s) for s in result.segments] == [
        (0, 600.0, 700.0),
        (2, 1200.0, 1700.0),
        (1, 2100.0, 3100.0),
    ]
    assert result.profiling_gpu_s == 800.0


def test_each_start_of_a_task_loads_and_neither_saves_nor_searches() -> None:
    scenario = a_scenario(an_arrival("a"), nodes=ONE_GPU, profiles=[a_profile()])
    world = a_world(scenario, replace(COSTLY, profile_s=400.0))
    (task,) = task_names(world)
    give(world, task, FIRST)
    world.advance(111.0)
    take(world, task)
    assert iterations_done(world, task) == 1.0  # of four sizes
    world.advance(200.0)
    give(world, task, FIRST)
    assert end_s(world, task) == 200 + 11 + 300
    assert [s.held_gpu_s for s in world.task_segments] == [111, 311]


def test_a_run_ends_with_its_last_job_although_a_task_still_runs() -> None:
    """A task on the v100 begins with the others and would take until 400 s, like that on the a100."""
    scenario = a_scenario(
        an_arrival("a", iterations=10), nodes=TWO_TYPES, profiles=[a_profile(iter_time_s=1.0)]
    )
    down = Failure(node="v100-0", down_s=100.0, up_s=500.0)
    result = simulate_scenario(scenario, overheads=PROFILED, failures=[down])
    assert result.state == ("succeeded",)
    assert result.ended_s == 900.0
    assert task_spans(result)[-1] == (600.0, 900.0, "finish")


def test_the_network_is_asked_about_jobs_and_not_about_tasks() -> None:
    asked: list[set[int]] = []

    def slow(changes: Mapping[int, AllocationChange]) -> Mapping[int, float]:
        asked.append(set(changes))
        return dict.fromkeys(changes, 2.0)

    scenario = a_scenario(an_arrival("a"), nodes=ONE_GPU, profiles=[a_profile()])
    result = simulate_scenario(scenario, overheads=PROFILED, slowdowns=slow)
    assert task_spans(result) == [(0.0, 400.0, "finish")]
    assert spans(result)[-1] == (600.0, 2600.0, "finish")
    assert set().union(*asked) == {0}


# what is reported


def test_the_share_of_profiling_is_that_of_the_gpu_hours_really_held() -> None:
    scenario = a_scenario(an_arrival("a"), nodes=ONE_GPU, profiles=[a_profile()])
    result = simulate_scenario(scenario, overheads=PROFILED)
    figures = run_figures(result, reference_of(scenario), 1800.0)
    assert figures["profiling_share"] == pytest.approx(400 / 1400)
    assert figures["utilisation"] == pytest.approx(1000 / 1800)
    assert figures["queue_mean_s"] == 600.0
    row = result.rounds[0]
    assert (row.running, row.waiting, row.gpus) == (0, 1, 1)


def a_run_with_tasks() -> Result:
    other = Workload(model="other", params="", global_batch=10)
    scenario = a_scenario(
        an_arrival("a", iterations=100),
        an_arrival("b", 800.0, workload=other),
        an_arrival("c", 1100.0, iterations=500),
        nodes=ONE_GPU,
        profiles=[a_profile(), a_profile(workload=other)],
    )
    return simulate_scenario(scenario, ILP, overheads=replace(COSTLY, profile_s=400.0))


def test_the_log_has_tasks_as_jobs_and_the_executor_replays_them() -> None:
    result = a_run_with_tasks()
    log = log_of(result)
    assert [job.name for job in log.jobs[3:]] == [one.spec.name for one in result.tasks]
    assert len(result.tasks) == 2
    jct_s = replay_lines(lines_of(log))
    assert list(jct_s) == ["a", "b", "c"]
    np.testing.assert_allclose(list(jct_s.values()), result.end_s - result.arrival_s)


@pytest.mark.parametrize(
    ("change", "rule"),
    [({"ready_s": 0.0}, "be ready when"), ({"end_s": 380.0}, "end when its work ends")],
)
def test_the_executor_refuses_a_task_that_breaks_the_rules(
    change: dict[str, float], rule: str
) -> None:
    lines: Sequence[str] = list(lines_of(log_of(a_run_with_tasks())))
    rows = [json.loads(line) for line in lines]
    first = next(r for r in rows if r["kind"] == "segment" and r["job"].startswith("profile-"))
    first.update(change)
    with pytest.raises(ReplayFailed, match=rule):
        replay_lines(map(json.dumps, rows))
