"""Traces whose jobs wait for others: read, written, cut, simulated and submitted."""

from __future__ import annotations

from typing import Any

import pytest
from google.protobuf.timestamp_pb2 import Timestamp

from tessera.formulation.dependencies import Condition, Dependency
from tessera.formulation.errors import InvalidInput
from tessera.service.cli.submissions import drop_dependencies_on_others, make_submissions
from tessera.simulator.traces.csv_writer import trace_csv
from tessera.simulator.traces.dependencies import order_by_dependencies
from tessera.simulator.traces.screening import screen_form
from tessera.simulator.traces.shaping import busiest_jobs, first_hours, sample_jobs
from tessera.simulator.traces.trace import (
    Arrival,
    TraceOptions,
    parse_durations,
    parse_trace,
)
from tests.support.traces import an_arrival
from tests.support.worlds import BERT, FCFS, a_scenario, simulate_scenario

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


def test_jobs_without_models_wait_too() -> None:
    data = b"job_id,submit_time_s,duration_s,num_gpus,after\na,0,5,1,\nb,1,5,1,a\n"
    assert [job.spec.after for job in parse_durations(data, "t.csv")] == [(), (A,)]


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


def test_simulated_jobs_wait_for_others() -> None:
    arrivals = parse(("a", ""), ("b", "a"), ("c", "a:failed"))
    assert arrivals[0].spec.workload == BERT
    result = simulate_scenario(a_scenario(*arrivals), FCFS)
    assert result.first_start_s[1] >= result.end_s[0]
    assert result.state == ("succeeded", "succeeded", "rejected")


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
