"""Trace files: our own, durations without models, Morphling's, and jobs that wait for others."""

from __future__ import annotations

import math
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
from google.protobuf.timestamp_pb2 import Timestamp

from tessera.formulation.base.errors import InvalidInput
from tessera.formulation.job.dependencies import Condition, Dependency
from tessera.service.cli.simulation.submissions import drop_dependencies_on_others, make_submissions
from tessera.simulator.data import data_dir
from tessera.simulator.traces.csv_writer import trace_csv
from tessera.simulator.traces.dependencies import order_by_dependencies
from tessera.simulator.traces.files import profiles_of, trace_of
from tessera.simulator.traces.morphling import (
    PlanResources,
    parse_measured,
    parse_workload,
    read_measured,
    read_resources,
    read_workload,
)
from tessera.simulator.traces.redraw import count_sizes
from tessera.simulator.traces.screening import screen_form
from tessera.simulator.traces.shaping import busiest_jobs, first_hours, sample_jobs
from tessera.simulator.traces.speeds import Speeds, gpu_seconds, requested_load
from tessera.simulator.traces.trace import (
    PLAN_LABEL,
    Arrival,
    DurationJob,
    TraceOptions,
    parse_durations,
    parse_trace,
)
from tests.support.traces import an_arrival

OURS = "job_id,submit_time_s,model,params,global_batch,iterations,num_gpus,tenant,guaranteed,plan"

DURATIONS = "job_id,submit_time_s,duration_s,num_gpus,gpu_type"

MEASURED = "model,exec_plan_raw,pp,placement,num_nodes,num_gpus,global_batch,feasible,iter_time_s"

WORKLOAD = "job_id,submit_s,model,num_gpus,exec_plan_raw,steps,guaranteed"

SCREENED = TraceOptions(screened=True)


def a_file(*lines: str) -> bytes:
    return "\n".join([*lines, ""]).encode()


def published(name: str) -> Path:
    folder = data_dir()
    if folder is None or not (folder / "morphling" / name).is_file():
        pytest.skip(f"{name} is not there; set TESSERA_DATA to the folder that has morphling/")
    return folder / "morphling" / name


def test_iterations_are_never_divided_and_tenants_and_plans_are_read() -> None:
    data = a_file(OURS, "a,0,bert,1.3B,256,1003,8,nlp,1,248", "b,5,bert,1.3B,256,7,8,,,")
    first, second = (a.spec for a in parse_trace(data, "t.csv"))
    assert (first.iterations, first.tenant, first.guaranteed) == (1003, "nlp", True)
    assert (first.submitted_plan, first.labels) == ("248", {PLAN_LABEL: "248"})
    assert (second.iterations, second.tenant, second.guaranteed, second.labels) == (
        7,
        "",
        False,
        {},
    )


def test_on_request_checks_of_jobs_are_left_to_screening() -> None:
    header = OURS.replace("iterations", "num_iterations")
    data = a_file(header, "a,9,bert,1.3B,256,0,8,,,", "a,3,bert,1.3B,256,4,8,,,")
    arrivals = parse_trace(data, "t.csv", SCREENED)
    assert [(a.arrival_s, a.spec.name, a.spec.iterations) for a in arrivals] == [
        (6.0, "a", 0),
        (0.0, "a", 1),
    ]
    with pytest.raises(InvalidInput, match="num_iterations: must be a whole number from 1"):
        parse_trace(data, "t.csv")


def test_a_trace_of_durations_has_only_gpus_and_times() -> None:
    data = a_file(DURATIONS, "a,100,36848,1,", "b,50,249,4,v100")
    later, first = parse_durations(data, "t.csv", SCREENED)
    assert (first.arrival_s, first.duration_s) == (0.0, 249.0)
    assert (first.spec.requested_gpus, first.spec.requested_gpu_type) == (4, "v100")
    assert later.arrival_s == 50.0
    assert parse_durations(data, "t.csv") == [first, later]
    zero = a_file(DURATIONS, "a,100,0,1,")
    assert parse_durations(zero, "t.csv", SCREENED)[0].duration_s == 0.0
    with pytest.raises(InvalidInput, match="duration_s: must be a number above 0"):
        parse_durations(zero, "t.csv")
    with pytest.raises(InvalidInput, match="draw models with --redraw"):
        parse_trace(data, "t.csv")


def test_the_header_determines_the_form_of_a_file(tmp_path: Path) -> None:
    def kinds(*lines: str) -> set[type]:
        (tmp_path / "t.csv").write_bytes(a_file(*lines))
        return {type(one) for one in trace_of(tmp_path / "t.csv")}

    assert kinds(OURS, "a,0,bert,1.3B,256,3,8,,,") == {Arrival}
    assert kinds(DURATIONS, "a,0,9,8,") == {DurationJob}
    assert kinds(WORKLOAD, "a,0,vit,2,ga,5,0") == {Arrival}
    (tmp_path / "p.csv").write_bytes(a_file(MEASURED, "vit,ga,1,1,1,1,64,1,0.15"))
    assert profiles_of(tmp_path / "p.csv")[0].cell.gpu_type == "a800"


def test_of_placements_with_equal_gpus_and_nodes_the_most_even_counts() -> None:
    rows = ["17", "44", "35"]
    data = a_file(
        MEASURED,
        *(f"vit,ga,1,{p},2,8,64,1,{s}" for p, s in zip(rows, (0.4, 0.07, 0.05), strict=True)),
    )
    (found,) = parse_measured(data, "m.csv")
    assert (found.cell.gpus, found.cell.nodes, found.iter_time_s) == (8, 2, 0.07)


def test_repeated_measurements_keep_the_fastest_and_failures_are_infinite() -> None:
    data = a_file(
        MEASURED,
        "llama7,zero-offload+gc,1,1,1,1,8,1,66",
        "llama7,zero-offload+gc,1,1,1,1,8,1,46",
        "llama7,111,1,1,1,1,8,0,",
    )
    records = parse_measured(data, "m.csv")
    assert [(e.cell.plan, e.iter_time_s) for e in records] == [
        ("zero-offload-gc", 46.0),
        ("111", math.inf),
    ]
    assert records[0].workload.params == "7B"


def test_offloading_with_more_cpu_threads_is_another_plan_with_more_cpus() -> None:
    header = f"{MEASURED},cpu_threads_per_gpu"
    data = a_file(
        header,
        "llama7,zero-offload+gc,1,2,1,2,8,1,66,2",
        "llama7,zero-offload+gc,1,2,1,2,8,1,46,4",
        "llama7,221,2,2,1,2,8,1,9,2",
        "llama7,221,2,2,1,2,8,1,8,4",
    )

    records = parse_measured(data, "m.csv")

    assert [(e.cell.plan, e.cpus, e.iter_time_s) for e in records] == [
        ("zero-offload-gc-cpu2", 4, 66.0),
        ("zero-offload-gc-cpu4", 8, 46.0),
        ("221", 8, 8.0),
    ]
    assert records[2].plan_kind == "3d-pp2-tp2"


def test_plans_need_the_cpus_and_memory_that_the_artifact_states() -> None:
    stated = PlanResources(
        of_plan={
            ("vit", "zero-offload"): (8, 3 * 10**9),
            ("llama7", "zero-offload"): (8, 5 * 10**9),
            ("bert", "3D"): (1, 2 * 10**9),
        }
    )
    data = a_file(
        MEASURED,
        "vit,zero-offload,1,2,1,2,64,1,1",
        "llama7,zero-offload,1,2,1,2,8,1,1",
        "llama7,221,2,2,1,2,8,1,1",
        "vit,gc,1,2,1,2,64,1,1",
    )

    records = parse_measured(data, "m.csv", stated)

    # 16 bytes for each of 7 billion parameters are more than 2 x 5 GB; 3D is as another model's
    assert [(e.cpus, e.host_bytes) for e in records] == [
        (16, 6 * 10**9),
        (16, 112 * 10**9),
        (2, 4 * 10**9),
        (0, 0),
    ]


def test_a_submitted_plan_and_the_requested_cpus_are_read() -> None:
    data = a_file(f"{WORKLOAD},num_cpus", "a,0,vit,2,zero-offload+gc,5,0,16")

    (job,) = parse_workload(data, "w.csv")

    assert (job.spec.submitted_plan, job.spec.requested_cpus) == ("zero-offload-gc", 16)


def test_the_published_resources_are_read() -> None:
    resources = read_resources(published("plan_resources.csv"))

    assert resources.needs("vit", "zero-offload") == (8, 3 * 10**9)
    assert resources.needs("llama7", "248") == (1, 2 * 10**9)  # the neediest other model's
    assert resources.needs("t5", "zero-offload-gc") == (8, 1_500_000_000)


def test_mistakes_in_morphlings_files_are_named() -> None:
    with pytest.raises(InvalidInput, match=r"line 2, column model: must be one of vit.*"):
        parse_measured(a_file(MEASURED, "gpt9,ga,1,1,1,1,64,1,0.15"), "m.csv")
    with pytest.raises(InvalidInput, match="line 2, column placement"):
        parse_measured(a_file(MEASURED, "vit,ga,1,4-4,2,8,64,1,0.15"), "m.csv")
    with pytest.raises(InvalidInput, match="job_id: must be unique; line 2 has the same"):
        parse_workload(a_file(WORKLOAD, "a,0,vit,2,ga,5,0", "a,3,vit,2,ga,5,0"), "w.csv")


def test_the_published_measurements_are_read() -> None:
    records = read_measured(published("measured.csv"))
    assert len(records) == 406  # of 539 rows: one placement is kept for each shape
    assert sum(math.isinf(e.iter_time_s) for e in records) == 3
    assert (
        len(
            {
                (e.workload, e.cell.plan, e.cell.gpus, e.cell.nodes, e.cell.pipeline_degree)
                for e in records
            }
        )
        == 406
    )
    vit = [e for e in records if (e.workload.model, e.cell.plan, e.cell.gpus) == ("vit", "ga", 8)]
    assert {e.cell.nodes: round(e.iter_time_s, 3) for e in vit}[2] == 0.066


@pytest.mark.parametrize("name", ["workload_base.csv", "workload_bp.csv"])
def test_the_published_workloads_are_readable_and_have_the_stated_load_of_64_gpus(
    name: str,
) -> None:
    jobs = read_workload(published(name))
    speeds = Speeds(read_measured(published("measured.csv")))
    assert (len(jobs), jobs[0].arrival_s, jobs[-1].arrival_s) == (406, 0.0, 47_550.0)
    assert count_sizes(jobs) == Counter(
        {
            ("gpt2", "1.5B"): 69,
            ("bert", "336M"): 64,
            ("t5", "1.2B"): 62,
            ("roberta", "355M"): 58,
            ("llama7", "7B"): 54,
            ("llama30", "30B"): 51,
            ("vit", "86M"): 48,
        }
    )
    assert requested_load(jobs, speeds, 64) == pytest.approx(0.73, abs=0.01)
    assert gpu_seconds(jobs, speeds).sum() / 3600 == pytest.approx(617.8, rel=0.01)
    assert {a.spec.requested_gpu_type for a in jobs} == {"a800"}
    assert all(a.spec.labels[PLAN_LABEL] for a in jobs)


HEADER = "job_id,submit_time_s,model,params,global_batch,iterations,num_gpus,after"

A = Dependency(job="a")


def parse(*rows: tuple[str, str], **options: Any) -> list[Arrival]:
    """Return the jobs of a file with a row for each name and its field ``after``."""
    lines = [f"{name},{i},bert,1B,10,10,1,{after}" for i, (name, after) in enumerate(rows)]
    return parse_trace("\n".join([HEADER, *lines]).encode(), "t.csv", TraceOptions(**options))


def waits(jobs: list[Arrival]) -> dict[str, tuple[Dependency, ...]]:
    return {job.spec.name: job.spec.after for job in jobs}


def test_jobs_name_those_that_they_wait_for_in_any_order_of_rows() -> None:
    found = parse(("a", "c:ended"), ("b", " a   c:failed "), ("c", ""))
    assert waits(found) == {
        "a": (Dependency(job="c", condition=Condition.ENDED),),
        "b": (A, Dependency(job="c", condition=Condition.FAILED)),
        "c": (),
    }
    assert parse_trace(trace_csv(found).encode(), "t.csv") == found


@pytest.mark.parametrize(
    ("after", "message"),
    [
        (
            "a:done",
            "line 3, column after: must be jobs with blanks between them, each JOB or JOB:succeeded",
        ),
        ("a:", "line 3, column after: must be jobs with blanks"),
        ("a;b", "line 3, column after: must be jobs with blanks"),
        ("a a:ended", "line 3, column after: must name at most 100 jobs, each only once"),
        ("a x", "line 3, column after: must name jobs of the file; it has no x"),
        ("b", "t.csv: jobs wait for each other: b"),
    ],
)
@pytest.mark.parametrize("screened", [False, True])
def test_a_bad_dependency_is_refused(after: str, message: str, *, screened: bool) -> None:
    with pytest.raises(InvalidInput, match=message):
        parse(("a", ""), ("b", after), screened=screened)


def test_a_circle_is_refused() -> None:
    with pytest.raises(InvalidInput, match="jobs wait for each other: a, c, b"):
        parse(("a", "c"), ("b", "a"), ("c", "b"))


def test_no_job_waits_for_one_that_is_left_out() -> None:
    rows = (("a", ""), ("b", "c a"), ("c", ""))
    assert waits(parse(*rows, limit=2)) == {"a": (), "b": (A,)}
    jobs = [
        an_arrival("a", 0.0, after=(Dependency(job="b"),)),
        an_arrival("b", 3600.0, after=(A,)),
        an_arrival("c", 3601.0, after=(A, Dependency(job="b"))),
    ]
    assert waits(first_hours(jobs, 1)) == {"a": ()}
    kept_b = {"b": (), "c": (Dependency(job="b"),)}
    assert waits(busiest_jobs(jobs, 0.5)) == kept_b
    jobs[0] = an_arrival("a", iterations=0)
    assert waits(screen_form(jobs, "drop").arrivals) == kept_b
    chain = [an_arrival("0")]
    chain += [an_arrival(f"{i}", after=(Dependency(job=f"{i - 1}"),)) for i in range(1, 20)]
    drawn = waits(sample_jobs(chain, 0.5, seed=1))
    assert {d.job for after in drawn.values() for d in after} <= set(drawn)
    assert sum(map(len, drawn.values())) == sum(f"{int(name) - 1}" in drawn for name in drawn)


def test_jobs_are_submitted_behind_those_that_they_wait_for() -> None:
    jobs = [
        an_arrival("a", 0.0, after=(Dependency(job="d"), Dependency(job="c"))),
        an_arrival("b", 1.0),
        an_arrival("c", 2.0, after=(Dependency(job="d", condition=Condition.ENDED),)),
        an_arrival("d", 3.0),
    ]
    assert [job.spec.name for job in order_by_dependencies(jobs)] == ["d", "c", "a", "b"]
    requests = make_submissions("clusters/lab", jobs, "", Timestamp(seconds=1))
    assert [(d.job, d.condition) for d in requests[1].job.after] == [
        ("clusters/lab/jobs/d", requests[1].job.after[0].ENDED)
    ]
    checked = drop_dependencies_on_others(requests[1:3])
    assert [[d.job for d in one.job.after] for one in checked] == [[], ["clusters/lab/jobs/c"]]
    assert len(requests[2].job.after) == 2  # the submission itself is unchanged
