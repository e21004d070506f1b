"""Named workloads and policies, and runs of both as in simulation benchmarks."""

from __future__ import annotations

import json
import math
from dataclasses import asdict
from pathlib import Path

import numpy as np
import pytest

from tessera.formulation.base.errors import InvalidInput
from tessera.formulation.state.information import all_estimates, searched_optimum
from tessera.simulator.comparison.policies import (
    information_of,
    options_of,
    split_list,
)
from tessera.simulator.comparison.runs import (
    FinishedRun,
    RunRequest,
    check_requests,
    run_data,
    run_request,
)
from tessera.simulator.comparison.workload import (
    SYNTHETIC,
    WorkloadSpec,
    check_trace,
    default_trace,
    make_scenario,
    shrink_nodes,
)
from tessera.simulator.data import MissingData
from tessera.simulator.metrics import alone_seconds
from tessera.simulator.overheads import Overheads
from tessera.simulator.run import Decider
from tessera.simulator.sweeps.tasks import answer_call
from tessera.solvers.rounds.options import RoundOptions
from tests.support.worlds import (
    BERT,
    FREE,
    a_profile,
    a_random_scenario,
    a_scenario,
    an_arrival,
    simulate_scenario,
    some_specs,
)

SMALL = WorkloadSpec(trace=SYNTHETIC, gpus_share=0.05, jobs=8, load=2.0)

TRACE = """job_id,submit_time_s,model,params,global_batch,iterations,num_gpus,gpu_type,deadline_s
a,0,m,1B,8,100,1,a100,500
b,300,m,1B,8,100,2,a100,
c,400,m,1B,8,100,2,v100,
d,9000,m,1B,8,100,1,a100,
"""
PROFILES = """model,params,global_batch,gpu_type,num_nodes,gpus_per_node,iter_time_s,status
m,1B,8,a100,1,1,2.0,ok
m,1B,8,a100,1,2,1.0,ok
"""


@pytest.fixture
def files(tmp_path: Path) -> WorkloadSpec:
    """Return files of four jobs: b requests two GPUs, c a type on which it cannot run; d arrives late."""
    (tmp_path / "trace.csv").write_text(TRACE)
    (tmp_path / "profiles.csv").write_text(PROFILES)
    return WorkloadSpec(
        trace=str(tmp_path / "trace.csv"), profiles=str(tmp_path / "profiles.csv"), rounds=10
    )


def test_our_policies_are_named_by_objective_and_accept_round_options() -> None:
    options = options_of("ilp:0.5*throughput + jct @ max_changes=3 @ restart_horizon_s=7200")
    assert options == RoundOptions(
        objective="0.5*throughput + jct", max_changes=3, restart_horizon_s=7200.0
    )
    assert options_of("greedy:jct").solver == "greedy"
    assert not options_of("ilp:jct@keep_requests=false").keep_requests


def test_scheduler_parameters_are_set_by_name_like_round_options() -> None:
    assert options_of("arena @ depth=5 @ max_changes=3 @ breadth=8", seed=2) == RoundOptions(
        objective="throughput",
        scheduler="arena",
        scheduler_parameters="depth=5,breadth=8",
        max_changes=3,
        seed=2,
    )
    assert options_of("sia@scheduler_parameters=fairness=-1@incentive=2").scheduler_parameters == (
        "fairness=-1,incentive=2"
    )
    assert options_of("arena").scheduler_parameters == ""


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("arena@dpeth=5", r"no parameter of the scheduler \(depth, breadth, max_upgrades"),
        ("fcfs@depth=5", "'depth=5' is not an option of a round; write NAME=VALUE"),
        ("arena@depth=99", "depth must be a whole number from 0 to 16"),
        ("arena@depth=1@depth=2", "sets 'depth' twice"),
        ("ilp:jct@scheduler_parameters=depth=5", "set scheduler, too"),
        ("ilp:jct@depth=5", "'depth=5' is not an option of a round"),
    ],
)
def test_wrong_parameters_of_a_policy_are_refused_with_what_is_right(
    name: str, message: str
) -> None:
    with pytest.raises(InvalidInput, match=message):
        options_of(name)


@pytest.mark.parametrize(
    "name",
    [
        "best",
        "ilp:",
        "ilp:nothing",
        "ilp:jct@max_changes",
        "ilp:jct@max_changes=few",
        "ilp:jct@no_option=1",
        "arena@defragment_every_rounds=-1",
    ],
)
def test_an_unknown_policy_is_refused(name: str) -> None:
    with pytest.raises(InvalidInput):
        options_of(name)


def test_information_is_chosen_by_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert information_of("estimates") is all_estimates
    assert information_of("optimum") is searched_optimum
    with pytest.raises(InvalidInput, match="use one of estimates"):
        information_of("everything")
    monkeypatch.setenv("TESSERA_DATA", str(tmp_path))
    blind = RunRequest(work=SMALL, policy="fcfs", information="data-parallel")
    with pytest.raises(MissingData, match="dp_memory"):
        check_requests([blind], seeds=1)  # before anything runs


def test_a_list_names_each_part_once_and_nothing_unknown() -> None:
    assert split_list(" a, b ,a,") == ["a", "b"]
    with pytest.raises(InvalidInput, match="unknown c"):
        split_list("a,c", ("a", "b"))
    with pytest.raises(InvalidInput, match="at least one"):
        split_list(" ,")


def test_a_trace_file_is_cut_at_the_horizon_and_bad_jobs_are_dropped_and_named(
    files: WorkloadSpec,
) -> None:
    world_scenario = make_scenario(files)
    assert [one.spec.name for one in world_scenario.scenario.arrivals] == ["a", "b"]
    assert world_scenario.dropped == 1
    assert world_scenario.horizon_s == 300.0  # the last job arrives then
    # a and b have 200 GPU-seconds each, on 1,280 GPUs until the last arrival
    assert world_scenario.load == pytest.approx(400 / (1280 * 300))


def test_bad_jobs_can_be_refused_or_kept(files: WorkloadSpec) -> None:
    refusing, keeping = (
        WorkloadSpec(**asdict(files) | {"on_bad": bad}) for bad in ("refuse", "keep")
    )
    with pytest.raises(InvalidInput, match="v100"):
        make_scenario(refusing)
    assert [a.spec.name for a in make_scenario(keeping).scenario.arrivals] == ["a", "b", "c"]


def test_deadlines_are_removed_unless_requested(files: WorkloadSpec) -> None:
    assert math.isinf(make_scenario(files).scenario.arrivals[0].spec.deadline_s)
    spec = WorkloadSpec(**asdict(files) | {"deadlines": True})
    assert make_scenario(spec).scenario.arrivals[0].spec.deadline_s == 500


def test_a_share_of_the_jobs_is_drawn_by_seed(files: WorkloadSpec) -> None:
    whole = asdict(files) | {"rounds": 100, "jobs_share": 2 / 3}
    drawn = {
        tuple(
            a.spec.name
            for a in make_scenario(WorkloadSpec(**whole | {"seed": seed})).scenario.arrivals
        )
        for seed in range(9)
    }
    assert drawn == {("a", "b"), ("a", "d"), ("b", "d")}


@pytest.mark.parametrize("folder", ["none", "empty"])
def test_missing_data_is_reported(
    folder: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "empty").mkdir()
    monkeypatch.setenv("TESSERA_DATA", str(tmp_path / folder))
    assert default_trace(None) == SYNTHETIC
    for trace in ("arena-philly", "morphling-mt", str(tmp_path / "absent.csv")):
        with pytest.raises(
            MissingData, match=r"arena-philly needs|morphling-mt needs|does not exist"
        ):
            make_scenario(WorkloadSpec(trace=trace))
        with pytest.raises(
            MissingData, match=r"arena-philly needs|morphling-mt needs|does not exist"
        ):
            check_requests([RunRequest(work=WorkloadSpec(trace=trace), policy="fcfs")], seeds=1)


def test_a_trace_of_durations_is_refused_with_how_to_draw_its_models(tmp_path: Path) -> None:
    trace = tmp_path / "durations.csv"
    trace.write_text("job_id,submit_time_s,duration_s,num_gpus\na,0,600,2\nb,60,60,1\n")
    for reads in (check_trace, lambda name: make_scenario(WorkloadSpec(trace=name))):
        with pytest.raises(InvalidInput, match="--redraw"):
            reads(str(trace))


def test_a_share_of_a_cluster_keeps_at_least_one_node_of_each_type() -> None:
    nodes = some_specs(("a100", 8, 4), ("v100", 1, 8))
    assert [n.name for n in shrink_nodes(nodes, 0.25)] == ["a100-0", "a100-1", "v100-0"]
    for share in (0.0, 1.5):
        with pytest.raises(InvalidInput, match="gpus_share"):
            shrink_nodes(nodes, share)


def test_a_run_reads_back_unchanged_whether_run_here_or_as_a_task() -> None:
    request = RunRequest(work=SMALL, policy="fcfs")
    local, stored = run_request(request), json.loads(answer_call(request.task("x").call))
    for result in (local, stored):  # wall times differ between runs
        result["figures"] = {k: v for k, v in result["figures"].items() if "decide" not in k}
    assert json.loads(json.dumps(local)) == stored
    ran = FinishedRun.read(stored)
    assert np.isfinite(ran.jct_s).all()
    assert ran.figures["completed"] == len(ran.jct_s) == 8
    assert sum(ran.node_gpus) == 64
    assert ran.segments == []


def test_the_segments_of_a_run_hold_the_gpus_of_its_course() -> None:
    world = make_scenario(SMALL)
    result = simulate_scenario(world.scenario, decide=Decider(options_of("fcfs")), on_events=True)
    ran = FinishedRun.read(run_data(result, world, mapped=True))
    course = ran.course["gpus"]
    assert course.max() <= 64
    until = [(s, min(e, ran.figures["horizon_s"]), on) for _, s, e, on in ran.segments]
    held_gpu_s = sum((e - s) * n for s, e, on in until for _, n in on)
    assert held_gpu_s > 0
    bin_s = np.diff(np.append(ran.course["at_s"], ran.figures["horizon_s"]))
    assert float(course @ bin_s) == pytest.approx(held_gpu_s)


@pytest.mark.parametrize("policy", ["ilp:jct", "arena", "fcfs"])
def test_no_schedule_ends_a_job_sooner_than_alone(policy: str) -> None:
    costs = Overheads(save_s=3.0, load_s=5.0, search_s={1: 20.0, 8: 40.0})
    for seed in range(6):
        scenario = a_random_scenario(seed, jobs=4)
        result = simulate_scenario(
            scenario,
            decide=Decider(options_of(policy)),
            overheads=costs,
            horizon_s=3e5,
            on_events=True,
        )
        ended = np.isfinite(result.end_s) & (np.array(result.state) == "succeeded")
        jct_s = result.end_s - result.arrival_s
        assert (alone_seconds(scenario, costs)[ended] <= jct_s[ended] + 1e-6).all()


def test_a_single_job_on_its_best_cell_takes_exactly_its_time_alone() -> None:
    scenario = a_scenario(
        an_arrival("a", iterations=1000, requested_gpus=1),
        profiles=[a_profile(1, 1.0), a_profile(4, 0.5), a_profile(8, 0.1)],
    )
    costs = Overheads(search_s={1: 10.0, 8: 80.0}, load_s=5.0)
    # 8 GPUs of two nodes; a start on one GPU takes the least time
    assert alone_seconds(scenario, costs).tolist() == [pytest.approx(15.0 + 100.0)]
    too_large = a_scenario(
        an_arrival("a", workload=BERT),
        profiles=[a_profile(16, 1.0)],
    )
    assert np.isinf(alone_seconds(too_large, FREE)).all()
