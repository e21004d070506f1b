"""The testbed's records: reading them, fitting overheads to them, and comparing replays with them."""

from __future__ import annotations

import csv
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from tessera.benchmarks.papers.bench_fidelity import (
    FidelityInputs,
    compare_campaign,
    compare_with_testbed,
    read_requests,
)
from tessera.benchmarks.papers.testbed.records import (
    RecordedJob,
    RunSegment,
    fit_overheads,
    read_runs,
    start_of,
)
from tessera.benchmarks.papers.testbed.replay import (
    Campaign,
    as_recorded,
    campaign_of,
    compare_replay,
    each_searched,
    jobs_with_speeds,
    refine_profiles,
    simulator_speeds,
)
from tessera.formulation.errors import InvalidInput
from tessera.formulation.records.estimates import EstimateRecord
from tessera.formulation.records.jobs import JobSpec
from tessera.formulation.values import BEST_FOUND, Cell, EstimateSource, Workload
from tessera.simulator.data import MissingData
from tessera.simulator.overheads import Overheads

MOE = Workload(model="moe", params="1.3B", global_batch=100)
COSTS = Overheads(load_s=50.0, save_s=0.0, search_s={2: 100.0})


def a_row(**overrides: Any) -> dict[str, Any]:
    """Return the record of a job that trained 10 iterations of 10 s on two A40 and ended."""
    fields: dict[str, Any] = {
        "campaign": "c",
        "policy": "fcfs",
        "job": "job_001",
        "try": 1,
        "event": "end",
        "timestamp_s": 1550,
        "model": "moe",
        "params": "1.3B",
        "global_batch": 100,
        "gpu_type": "a40",
        "num_nodes": 1,
        "gpus_per_node": 2,
        "executed_iterations": 10,
        "remaining_iterations": 0,
        "iter_time_s": 10.0,
        "ap_search_s": 100.0,
    }
    return fields | overrides


def read_rows(
    folder: Path, *rows: dict[str, Any], submitted_s: float = 1200.0
) -> list[RecordedJob]:
    """Write these rows to a file and return the jobs read from it."""
    path = folder / "runs.csv"
    with path.open("w", newline="", encoding="utf-8") as file:
        writer = csv.DictWriter(file, list(rows[0]))
        writer.writeheader()
        writer.writerows(rows)
    return read_runs(path, {"job_001": submitted_s})


def a_run(start_s: float = 300.0, iterations: int = 10, **overrides: Any) -> RunSegment:
    """Return a run on two A40 with 50 s of launch, 100 s of search and 10 s for each iteration."""
    fields: dict[str, Any] = {
        "start_s": start_s,
        "end_s": start_s + 150.0 + 10.0 * iterations,
        "gpu_type": "a40",
        "nodes": 1,
        "gpus_per_node": 2,
        "iterations": iterations,
        "iter_time_s": 10.0,
        "search_s": 100.0,
        "last": True,
    }
    return RunSegment(**fields | overrides)


def a_recorded_job(*runs: RunSegment, left: int = 0, **overrides: Any) -> RecordedJob:
    """Return a job with these runs, which ended by default."""
    fields: dict[str, Any] = {
        "campaign": "c",
        "policy": "fcfs",
        "name": "job_001",
        "workload": MOE,
        "origin_s": 0.0,
        "consistent": True,
    }
    return RecordedJob(runs=runs or (a_run(),), left=left, **fields | overrides)


def a_time(iter_time_s: float, gpus: int = 2, nodes: int = 1) -> EstimateRecord:
    """Return a profile of the job on A40."""
    return EstimateRecord(
        workload=MOE,
        cell=Cell(gpu_type="a40", gpus=gpus, pipeline_degree=BEST_FOUND, nodes=nodes),
        iter_time_s=iter_time_s,
        source=EstimateSource.MEASURED,
    )


def a_campaign(
    jobs: Sequence[RecordedJob], profiles: Sequence[EstimateRecord] = (a_time(10.0),)
) -> Campaign:
    """Return a campaign of the jobs, all of which arrived at 100 s."""
    return campaign_of(jobs, {job.name: (100.0, _request(job)) for job in jobs}, profiles)


def _request(job: RecordedJob) -> JobSpec:
    return JobSpec(name=job.name, workload=job.workload, iterations=1, requested_gpus=2)


def test_the_row_of_an_error_is_not_a_run_of_its_own(tmp_path: Path) -> None:
    (job,) = read_rows(tmp_path, a_row(event="error", remaining_iterations=10), a_row())

    assert len(job.runs) == 1
    assert job.iterations == 10
    assert job.done


def test_runs_after_the_end_are_left_out(tmp_path: Path) -> None:
    nothing = {"executed_iterations": 0, "iter_time_s": "", "ap_search_s": "", "timestamp_s": 3000}

    (job,) = read_rows(tmp_path, a_row(), a_row(**{"try": 2} | nothing))

    assert [run.iterations for run in job.runs] == [10]


def test_runs_are_aligned_with_the_rounds_of_their_campaign(tmp_path: Path) -> None:
    (job,) = read_rows(
        tmp_path,
        a_row(timestamp_s=1520, remaining_iterations=5, executed_iterations=3),
        a_row(timestamp_s=2000, executed_iterations=5, **{"try": 2}),
        submitted_s=1000.0,
    )

    # rounds are 20 s after multiples of 300 s, as the preemption is
    assert (job.origin_s - 1520.0) % 300.0 == 0.0
    assert [run.start_s + job.origin_s for run in job.runs] == [1220.0, 1820.0]
    assert [run.launch_s for run in job.runs] == [170.0, 30.0]


@pytest.mark.parametrize(("left", "consistent"), [(5, True), (6, False)])
def test_inconsistent_iterations_are_reported(tmp_path: Path, left: int, consistent: bool) -> None:
    (job,) = read_rows(
        tmp_path,
        a_row(timestamp_s=1500, remaining_iterations=10),
        a_row(timestamp_s=2000, executed_iterations=5, remaining_iterations=left, **{"try": 2}),
    )

    assert job.consistent is consistent
    assert job.left == left
    assert not job.done


def test_a_file_of_another_kind_is_refused(tmp_path: Path) -> None:
    row = {"event": "end", "campaign": "c"}

    with pytest.raises(InvalidInput, match=r"runs\.csv"):
        read_rows(tmp_path, row)


@pytest.mark.parametrize(
    ("end_s", "busy_s", "free_s", "start_s"),
    [
        (1000.0, 350.0, 0.0, 600.0),  # 50 s remain for the launch
        (1000.0, 430.0, 0.0, 600.0),  # 30 s too few, by mean iteration times
        (1000.0, 300.0, 650.0, 900.0),  # not before the GPUs were free
        (900.0, 0.0, 0.0, 600.0),  # unknown work: the shortest possible run
    ],
)
def test_a_run_starts_at_the_last_round_that_leaves_time_for_its_work(
    end_s: float, busy_s: float, free_s: float, start_s: float
) -> None:
    assert start_of(end_s, busy_s, free_s) == start_s


def test_overheads_are_medians_of_the_same_kind_of_search() -> None:
    jobs = [
        a_recorded_job(a_run(300.0, search_s=s, end_s=300.0 + 100.0 + s + launch))
        for s, launch in ((80.0, 40.0), (100.0, 50.0), (500.0, 70.0))
    ]
    again = a_recorded_job(a_run(last=False), a_run(900.0, end_s=900.0 + 200.0 + 75.0))
    pruned = a_recorded_job(a_run(search_s=1.0), policy="crius")

    overheads = fit_overheads([*jobs, again, pruned], pruned=False)

    assert overheads.load_s == 50.0  # the median of 40, 50, 70 and 50
    assert overheads.save_s == 25.0  # the later start took 75
    assert overheads.search_s == {2: 100.0}
    with pytest.raises(InvalidInput, match="too few"):
        fit_overheads(jobs, pruned=True)


def test_a_record_that_follows_the_simulators_rules_has_no_error() -> None:
    errors, replayed = compare_replay(a_campaign([a_recorded_job()]), COSTS)

    assert replayed.end_s.tolist() == [550.0]
    assert errors.jct_recorded_s == errors.jct_replayed_s == 450.0
    assert errors.jct_error == errors.throughput_error == errors.speed_error == 0.0
    assert errors.round_error == pytest.approx(0.0)
    assert (errors.start_recorded_s, errors.start_charged_s) == (150.0, 150.0)


def test_profiles_that_are_too_fast_shorten_the_replay_accordingly() -> None:
    base = a_campaign([a_recorded_job()], [a_time(8.0)])

    errors, _ = compare_replay(base, COSTS)

    assert errors.jct_error == pytest.approx(-20.0 / 450.0)
    assert errors.active_error == pytest.approx(-20.0 / 250.0)
    assert errors.speed_bias == pytest.approx(-0.2)
    # 8 s an iteration while the job held its GPUs, which was for 230 s instead of 250 s
    assert errors.throughput_error == pytest.approx((230.0 / 8.0) / (250.0 / 10.0) - 1.0)
    assert compare_replay(as_recorded(base), COSTS)[0].jct_error == 0.0


def test_with_a_search_at_each_start_the_same_cell_pays_it_too() -> None:
    job = a_recorded_job(a_run(300.0, 15, last=False, end_s=600.0), a_run(900.0, 10))
    base = a_campaign([job])

    kept, searched = compare_replay(base, COSTS)[1], compare_replay(each_searched(base), COSTS)[1]

    assert kept.end_s.tolist() == [1050.0]
    assert searched.end_s.tolist() == [1150.0]
    assert compare_replay(as_recorded(base, searched=True), COSTS)[0].jct_error == 0.0


def test_speeds_measured_under_other_policies_replace_profiled_ones() -> None:
    seen = [
        a_recorded_job(a_run(iter_time_s=t), policy="gavel", name=f"job_{t}")
        for t in (9.0, 12.0, 90.0)
    ]
    profiles = [a_time(10.0), a_time(4.0, gpus=4, nodes=2)]

    found = {(e.cell.gpus, e.cell.nodes): e.iter_time_s for e in refine_profiles(profiles, seen)}

    assert found == {(2, 1): 12.0, (4, 2): 4.0}


def test_jobs_that_the_profiles_cannot_price_are_left_out() -> None:
    wide = a_recorded_job(a_run(nodes=4), name="job_002")
    base = a_campaign([a_recorded_job(), wide])

    assert simulator_speeds(base) == [[0.1], [0.0]]
    assert [job.name for job in jobs_with_speeds(base)] == ["job_001"]


def test_a_job_that_differs_from_the_trace_is_refused() -> None:
    other = JobSpec(
        name="job_001",
        workload=Workload(model="bert", params="1B", global_batch=1),
        iterations=1,
        requested_gpus=1,
    )

    with pytest.raises(InvalidInput, match="a different job_001"):
        campaign_of([a_recorded_job()], {"job_001": (100.0, other)}, [a_time(10.0)])


def test_scored_runs_are_not_used_for_fitting() -> None:
    mine = a_recorded_job(a_run(search_s=290.0, end_s=300.0 + 290.0 + 100.0 + 50.0))
    other = a_recorded_job(policy="gavel")
    requests = {"job_001": (100.0, _request(mine))}

    inputs = FidelityInputs(recorded=[mine, other], requests=requests, profiles=[a_time(10.0)])

    figures = compare_campaign(inputs, "c", "fcfs", decide=False)

    assert figures.overheads.search_s == {2: 100.0}
    assert figures.errors["profiles"].jct_error == pytest.approx(-190.0 / 640.0)


def test_the_case_names_a_missing_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TESSERA_DATA", str(tmp_path))

    with pytest.raises(MissingData, match=r"testbed_runs\.csv does not exist"):
        compare_with_testbed()


def test_job_k_is_row_k_of_the_trace(tmp_path: Path) -> None:
    path = tmp_path / "trace.csv"
    head = "job_id,submit_time_s,model,params,global_batch,num_iterations,num_gpus,gpu_type"
    rows = ["z,1000,moe,1.3B,100,7,2,a40", "a,900,moe,1.3B,100,8,4,a10"]
    path.write_text("\n".join([head, *rows]) + "\n", encoding="utf-8")

    requests = read_requests(path)

    assert [(name, at_s, spec.iterations) for name, (at_s, spec) in requests.items()] == [
        ("job_001", 1000.0, 7),
        ("job_002", 900.0, 8),
    ]
