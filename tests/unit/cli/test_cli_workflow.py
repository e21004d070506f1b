"""Dependencies and arrays on the command line and in job files, and lists that fold arrays."""

from __future__ import annotations

import pytest
from google.protobuf.timestamp_pb2 import Timestamp

from tessera.formulation.errors import InvalidInput
from tessera.service.cli.jobfile import read_jobs
from tessera.service.cli.jobview import show_job, show_jobs
from tessera.service.cli.options import Output
from tessera.service.cli.workflow import fold_arrays, parse_after, parse_array
from tessera.v1 import jobs_pb2

NOW = Timestamp(seconds=1_800_000_000)
PLACE = "clusters/default"
MINIMAL = "model: bert\nparams: 1.3B\nglobal_batch: 256\niterations: 1000\ngpus: 8\n"


def test_conditions_follow_the_name_of_a_job() -> None:
    found = parse_after("--after", ["a", "b:ended", f"{PLACE}/jobs/c:failed"], "default")
    assert [(d.job, d.condition) for d in found] == [
        (f"{PLACE}/jobs/a", jobs_pb2.Dependency.SUCCEEDED),
        (f"{PLACE}/jobs/b", jobs_pb2.Dependency.ENDED),
        (f"{PLACE}/jobs/c", jobs_pb2.Dependency.FAILED),
    ]
    with pytest.raises(InvalidInput, match="JOB:ended"):
        parse_after("--after", ["a:done"], "default")


def test_an_array_has_a_range_a_step_and_a_limit() -> None:
    assert parse_array("--array", "0-99:2%8") == jobs_pb2.ArrayIndices(
        last=99, step=2, max_running=8
    )
    assert parse_array("--array", "5-5") == jobs_pb2.ArrayIndices(first=5, last=5, step=1)


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("7", "FIRST-LAST"),
        ("0-9%", "FIRST-LAST"),
        ("-1-9", "FIRST-LAST"),
        ("9-0", "FIRST <= LAST"),
        ("0-9:0", "at least 1"),
        ("0-9%0", "at least 1"),
        ("0-999999", "1,000,000 members"),
    ],
)
def test_bad_arrays_are_refused(text: str, says: str) -> None:
    with pytest.raises(InvalidInput, match=says):
        parse_array("--array", text)


def test_job_files_have_dependencies_and_arrays() -> None:
    (request,) = read_jobs(
        f'{MINIMAL}name: sweep\nafter: [prepare, "x:ended"]\narray: "1-4%2"\n', "j.yaml", NOW
    )
    assert request.array == jobs_pb2.ArrayIndices(first=1, last=4, step=1, max_running=2)
    assert [d.job for d in request.job.after] == [f"{PLACE}/jobs/prepare", f"{PLACE}/jobs/x"]
    for key in ("after: [x:soon]", "array: many"):
        with pytest.raises(InvalidInput, match=key.partition(":")[0]):
            read_jobs(f"{MINIMAL}{key}\n", "j.yaml", NOW)


def some_jobs() -> list[jobs_pb2.Job]:
    members = [
        jobs_pb2.Job(
            name=f"{PLACE}/jobs/sweep.{i}",
            state=jobs_pb2.RUNNING if i < 2 else jobs_pb2.QUEUED,
            iterations=100,
            iterations_done=50.0 if i < 2 else 0.0,
            array=jobs_pb2.ArrayMember(array=f"{PLACE}/arrays/sweep", index=i, size=4),
        )
        for i in range(4)
    ]
    return [jobs_pb2.Job(name=f"{PLACE}/jobs/alone", state=jobs_pb2.QUEUED), *members]


def test_an_array_is_one_line_of_a_list_for_people() -> None:
    folded = fold_arrays(some_jobs())
    assert [job.name for job in folded.jobs] == [f"{PLACE}/jobs/alone", f"{PLACE}/arrays/sweep"]
    assert folded.states == {f"{PLACE}/arrays/sweep": "2 RUNNING, 2 QUEUED"}
    assert (folded.jobs[1].iterations, folded.jobs[1].iterations_done) == (400, 100.0)


def test_programs_and_expanded_lists_see_every_job(capsys: pytest.CaptureFixture[str]) -> None:
    show_jobs(some_jobs(), NOW, Output.NAME, expand=False)
    assert len(capsys.readouterr().out.splitlines()) == 5
    show_jobs(some_jobs(), NOW, Output.TABLE, expand=False)
    assert "2 RUNNING, 2 QUEUED" in capsys.readouterr().out
    show_jobs(some_jobs(), NOW, Output.TABLE, expand=True)
    assert "sweep.3" in capsys.readouterr().out


def test_a_job_shows_its_array_and_the_jobs_that_it_waits_for(
    capsys: pytest.CaptureFixture[str],
) -> None:
    job = some_jobs()[1]
    job.after.add(job=f"{PLACE}/jobs/a", condition=jobs_pb2.Dependency.ENDED, state="running")
    job.after.add(job=f"{PLACE}/jobs/b", condition=jobs_pb2.Dependency.FAILED, met=True)
    show_job(job, NOW)
    shown = " ".join(capsys.readouterr().out.split())
    assert "index 0 of sweep, 4 jobs" in shown
    assert "a must have ended (running); b must have failed (met)" in shown
