"""Raw traces in the forms of their publishers: jobs, dropped rows, times, and mistakes with lines."""

from __future__ import annotations

import json
from collections.abc import Callable
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner, Result

from tessera.formulation.base.errors import InvalidInput
from tessera.service.cli.main import app
from tessera.simulator.traces.files import trace_of
from tessera.simulator.traces.raw import philly
from tessera.simulator.traces.raw.formats import RawFormat, read_raw
from tessera.simulator.traces.raw.jobs import zone_of
from tessera.simulator.traces.raw.rows import DroppedRows
from tessera.simulator.traces.trace import DurationJob, read_trace

SERVER = [f"gpu{k}" for k in range(8)]

PHILLY: list[dict[str, Any]] = [
    {  # the example of the trace's README
        "status": "Pass",
        "vc": "ee9e8c",
        "jobid": "application_1506638472019_14199",
        "attempts": [
            {
                "start_time": "2017-10-07 01:12:09",
                "end_time": "2017-10-07 01:13:23",
                "detail": [{"ip": "m47", "gpus": SERVER}],
            },
            {
                "start_time": "2017-10-07 01:13:30",
                "end_time": "2017-10-09 06:53:12",
                "detail": [{"ip": "m412", "gpus": SERVER[:4]}, {"ip": "m413", "gpus": SERVER}],
            },
        ],
        "submitted_time": "2017-10-07 01:11:39",
        "user": "ce2f4c",
    },
    {
        "jobid": "never",
        "vc": "a",
        "attempts": [],
        "submitted_time": "2017-10-07 02:00:00",
    },
    {
        "jobid": "running",
        "vc": "a",
        "attempts": [{"start_time": "2017-12-20 00:00:00", "end_time": None, "detail": []}],
        "submitted_time": "2017-12-19 00:00:00",
    },
    {
        "jobid": "lost",
        "vc": "a",
        "attempts": [{"start_time": None, "end_time": "2017-12-20 00:00:00", "detail": []}],
        "submitted_time": "2017-12-19 00:00:00",
    },
    {
        "jobid": "idle",
        "vc": "a",
        "attempts": [
            {
                "start_time": "2017-12-20 00:00:00",
                "end_time": "2017-12-20 01:00:00",
                "detail": [{"ip": "m1", "gpus": []}],
            }
        ],
        "submitted_time": "2017-12-19 00:00:00",
    },
    {  # clocks went back at 2:00 on 2017-11-05
        "jobid": "autumn",
        "vc": "a",
        "attempts": [
            {
                "start_time": "2017-11-05 00:30:00",
                "end_time": "2017-11-05 03:00:00",
                "detail": [{"ip": "m1", "gpus": ["gpu0"]}],
            },
            {
                "start_time": "2017-11-05 01:50:00",
                "end_time": "2017-11-05 01:10:00",
                "detail": [{"ip": "m1", "gpus": ["gpu0"]}],
            },
        ],
        "submitted_time": "2017-11-05 00:30:00",
    },
]

HELIOS = """\
job_id,user,vc,gpu_num,cpu_num,node_num,state,submit_time,start_time,end_time,duration,queue
1425511,uXBbc,vcJkd,1,1,1,COMPLETED,2020-06-09 18:41:01,2020-06-09 18:41:01,2020-06-10 04:55:09,36848,0
1425512,uVMrF,vchbv,4,16,1,FAILED,2020-06-09 18:41:27,2020-06-09 18:41:27,2020-06-09 18:45:36,249,0
1425514,uVMrF,vchbv,0,16,1,COMPLETED,2020-06-09 18:42:00,2020-06-09 18:42:00,2020-06-09 18:43:00,60,0
1425515,uVMrF,vchbv,8,16,1,CANCELLED,2020-06-09 18:42:00,2020-06-09 18:42:00,2020-06-09 18:42:00,0,0
1425516,uVMrF,vchbv,8,16,1,CANCELLED,2020-06-09 18:42:00,None,None,None,0
"""

PAI_JOBS = """\
j1,8cb3bec23d14,58540f191766,Terminated,4550879.0,4551416.0
j2,a2,58540f191766,Terminated,100.0,900.0
j3,a3,user3,Terminated,100.0,900.0
j4,a4,user4,Running,100.0,
j5,a5,user5,Failed,100.0,200.0
"""
PAI_TASKS = """\
j1,tensorflow,1.0,Terminated,4550900.0,4551410.0,600.0,29.296875,50.0,V100
j2,ps,1.0,Terminated,110.0,900.0,600.0,29.2,,
j2,worker,3.0,Terminated,120.0,800.0,400.0,29.2,50.0,MISC
j2,evaluator,1.0,Terminated,130.0,890.0,400.0,29.2,100.0,MISC
j3,ps,1.0,Terminated,110.0,900.0,600.0,29.2,,
j4,worker,1.0,Running,120.0,,600.0,29.2,100.0,T4
j5,worker,1.0,Failed,,200.0,600.0,29.2,100.0,T4
"""

SACCT = """\
JobID|JobName|Account|User|Partition|Submit|Start|End|State|AllocTRES
101|train|vision|ann|gpu|2026-03-01T08:00:00|2026-03-01T09:00:00|2026-03-02T09:30:00|COMPLETED|billing=8,cpu=8,gres/gpu:a100=4,gres/gpu=4,mem=64G,node=1
101.batch|batch|vision||gpu|2026-03-01T09:00:00|2026-03-01T09:00:00|2026-03-02T09:30:00|COMPLETED|cpu=8,mem=64G,node=1
101.0|python|vision||gpu|2026-03-01T09:00:00|2026-03-01T09:00:00|2026-03-02T09:30:00|COMPLETED|cpu=8,gres/gpu:a100=4,mem=64G,node=1
102_1|array|my lab|bob|gpu|2026-03-01T08:10:00|2026-03-01T09:00:00|2026-03-01T09:00:10|FAILED|cpu=2,gres/gpu:A100=1,gres/gpu:h100=1,node=2
102_[2-9%2]|array|my lab|bob|gpu|2026-03-01T08:10:00|Unknown|Unknown|PENDING|
103+0|het||eve|gpu|2026-03-01T08:20:00|2026-03-01T09:00:00|2026-03-01T10:00:00|CANCELLED by 1000|gres/gpu=2
104|now|vision|ann|gpu|2026-03-01T08:30:00|2026-03-01T09:00:00|Unknown|RUNNING|gres/gpu=2
105|cpu|vision|ann|cpu|2026-03-01T08:30:00|2026-03-01T09:00:00|2026-03-01T10:00:00|COMPLETED|cpu=4,mem=8G,node=1
106|gone|vision|ann|gpu|2026-03-01T08:30:00|2026-03-01T09:00:00|2026-03-01T09:00:00|NODE_FAIL|gres/gpu=2
"""  # noqa: E501 - rows of sacct are long


ACME = """\
job_id,user,node_num,gpu_num,cpu_num,type,state,submit_time,start_time,end_time,duration,queue,gpu_time
5778432,u5907,1,8,128,Other,FAILED,2023-03-01 00:18:22+08:00,2023-03-01 00:18:54+08:00,2023-03-01 00:20:51+08:00,117,32,936.0
dlctk696,uf794,8,64,960,Other,FAILED,2023-05-17 11:00:58+00:00,2023-05-17 11:01:08+00:00,2023-05-17 11:01:16+00:00,18,10.0,1152.0
3,u1,1,0,4,Debug,COMPLETED,2023-03-01 00:18:22+08:00,2023-03-01 00:18:54+08:00,2023-03-01 00:20:51+08:00,117,32,0.0
4,u1,1,1,4,Debug,CANCELLED,2023-03-01 00:18:22+08:00,,2023-03-01 00:20:51+08:00,0,32,0.0
5,u1,1,1,4,Debug,RUNNING,2023-03-01 00:18:22+08:00,2023-03-01 00:18:54+08:00,,0,32,0.0
6,u1,1,1,4,Debug,FAILED,2023-03-01 00:18:22+08:00,2023-03-01 00:18:54+08:00,2023-03-01 00:18:50+08:00,0,32,0.0
"""  # noqa: E501 - rows of the trace are long


def write_acme(folder: Path) -> Path:
    path = folder / "trace_seren.csv"
    path.write_text(ACME)
    return path


def write_philly(folder: Path) -> Path:
    path = folder / "cluster_job_log"
    path.write_text(json.dumps(PHILLY, indent=4))
    return path


def write_helios(folder: Path) -> Path:
    path = folder / "cluster_log.csv"
    path.write_text(HELIOS)
    return path


def write_pai(folder: Path) -> Path:
    (folder / "pai_job_table.csv").write_text(PAI_JOBS)
    (folder / "pai_task_table.csv").write_text(PAI_TASKS)
    return folder


def write_sacct(folder: Path) -> Path:
    path = folder / "sacct.txt"
    path.write_text(SACCT)
    return path


WRITERS: dict[RawFormat, Callable[[Path], Path]] = {
    RawFormat.PHILLY: write_philly,
    RawFormat.HELIOS: write_helios,
    RawFormat.PAI: write_pai,
    RawFormat.SACCT: write_sacct,
    RawFormat.ACME: write_acme,
}


def read(form: RawFormat, path: Path, **options: Any) -> tuple[list[DurationJob], DroppedRows]:
    dropped = DroppedRows()
    return list(read_raw(path, form, dropped, **options)), dropped


def facts(job: DurationJob) -> tuple[Any, ...]:
    spec = job.spec
    return (spec.name, job.duration_s, spec.requested_gpus, spec.requested_gpu_type, spec.tenant)


def test_phillys_attempts_add_up_and_autumn_has_an_hour_more(tmp_path: Path) -> None:
    jobs, dropped = read(RawFormat.PHILLY, write_philly(tmp_path))
    first_s, second_s = 74, 2 * 86_400 + 5 * 3600 + 39 * 60 + 42
    assert list(map(facts, jobs)) == [
        ("application_1506638472019_14199", first_s + second_s, 12, "", "ee9e8c"),
        ("autumn", 3.5 * 3600 + 20 * 60, 1, "", "a"),
    ]
    assert jobs[0].arrival_s == datetime(2017, 10, 7, 8, 11, 39, tzinfo=UTC).timestamp()
    assert dropped.counts == {
        "no attempt to run": 1,
        "no recorded end: still running, or the log was cut": 1,
        "no recorded start of its run": 1,
        "no GPUs": 1,
    }
    plain, _ = read(RawFormat.PHILLY, tmp_path / "cluster_job_log", time_zone="UTC", limit=1)
    assert [job.arrival_s for job in plain] == [jobs[0].arrival_s - 7 * 3600]


@pytest.mark.parametrize("chunk", [1, 7, 4096])
def test_phillys_list_is_read_in_parts_of_any_size(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, chunk: int
) -> None:
    whole, _ = read(RawFormat.PHILLY, write_philly(tmp_path))
    monkeypatch.setattr(philly, "CHUNK", chunk)
    assert read(RawFormat.PHILLY, tmp_path / "cluster_job_log")[0] == whole


def test_helios_jobs_have_their_durations_in_seconds(tmp_path: Path) -> None:
    jobs, dropped = read(RawFormat.HELIOS, write_helios(tmp_path))
    assert list(map(facts, jobs)) == [
        ("1425511", 36848.0, 1, "", "vcJkd"),
        ("1425512", 249.0, 4, "", "vchbv"),
    ]
    assert jobs[1].arrival_s - jobs[0].arrival_s == 26
    assert dropped.counts == {
        "no GPUs": 1,
        "a duration of 0 or less": 1,
        "no recorded end: still running, or the log was cut": 1,
    }


@pytest.mark.parametrize("with_header", [False, True])
def test_pai_joins_jobs_with_their_gpu_tasks(tmp_path: Path, with_header: bool) -> None:
    write_pai(tmp_path)
    if with_header:
        header = "job_name,inst_id,user,status,start_time,end_time\n"
        (tmp_path / "pai_job_table.csv").write_text(header + PAI_JOBS)
    jobs, dropped = read(RawFormat.PAI, tmp_path)
    assert list(map(facts, jobs)) == [
        ("8cb3bec23d14", 510.0, 1, "v100", "58540f191766"),
        ("a2", 770.0, 3, "", "58540f191766"),  # 3 x 0.5 + 1, of older types
    ]
    assert [job.arrival_s for job in jobs] == [4550879.0, 100.0]
    assert dropped.names == {
        "no GPUs": ["a3"],
        "no recorded end: still running, or the log was cut": ["a4"],
        "no recorded start of its run": ["a5"],
    }


def test_slurms_jobs_are_read_without_their_steps(tmp_path: Path) -> None:
    jobs, dropped = read(RawFormat.SACCT, write_sacct(tmp_path), time_zone="Europe/Berlin")
    assert list(map(facts, jobs)) == [
        ("101", 24.5 * 3600, 4, "a100", "vision"),
        ("102_1", 10.0, 2, "", "my-lab"),
        ("103-0", 3600.0, 2, "", "eve"),
    ]
    assert jobs[0].arrival_s == datetime(2026, 3, 1, 7, tzinfo=UTC).timestamp()
    assert dropped.counts == {
        "a step, which is part of its job": 2,
        "not started": 1,
        "no recorded end: still running, or the log was cut": 1,
        "no GPUs": 1,
        "a duration of 0 or less": 1,
    }
    assert dropped.total == 6
    step, *_, last = dropped.lines()
    assert step == "dropped 2 rows (a step, which is part of its job): 101.batch, 101.0"
    assert last == "dropped 1 row (a duration of 0 or less): 106"


def test_acmes_jobs_last_from_their_start_to_their_end(tmp_path: Path) -> None:
    jobs, dropped = read(RawFormat.ACME, write_acme(tmp_path))
    assert list(map(facts, jobs)) == [
        ("5778432", 117.0, 8, "", "u5907"),
        ("dlctk696", 8.0, 64, "", "uf794"),
    ]
    assert jobs[0].arrival_s == datetime(2023, 2, 28, 16, 18, 22, tzinfo=UTC).timestamp()
    assert dropped.names == {
        "no GPUs": ["3"],
        "no recorded start of its run": ["4"],
        "no recorded end: still running, or the log was cut": ["5"],
        "a duration of 0 or less": ["6"],
    }


def an_attempt(start: str | None, end: str | None, gpus: int = 1) -> dict[str, Any]:
    return {"start_time": start, "end_time": end, "detail": [{"ip": "m", "gpus": SERVER[:gpus]}]}


def test_an_attempt_of_unknown_length_is_dropped_and_its_job_is_kept(tmp_path: Path) -> None:
    known = an_attempt("2017-10-07 02:00:00", "2017-10-07 05:00:00", 2)
    backwards = an_attempt("2017-10-07 02:00:00", "2017-10-07 01:00:00", 8)
    attempts = {
        "backwards": [backwards, known],
        "endless": [known, an_attempt("2017-10-07 02:00:00", None, 8)],
        "unstarted": [an_attempt(None, "2017-10-07 02:00:00"), known],
        "nothing": [backwards, an_attempt("2017-10-07 02:00:00", None)],
    }
    path = tmp_path / "cluster_job_log"
    path.write_text(
        json.dumps(
            [
                {"jobid": name, "submitted_time": "2017-10-07 00:00:00", "attempts": tried}
                for name, tried in attempts.items()
            ]
        )
    )
    jobs, dropped = read(RawFormat.PHILLY, path)
    assert [(job.spec.name, job.duration_s, job.spec.requested_gpus) for job in jobs] == [
        ("backwards", 10_800.0, 2),
        ("endless", 10_800.0, 2),
        ("unstarted", 10_800.0, 2),
    ]
    rest = "; the rest of its job is kept"
    assert dropped.names == {
        f"an attempt that ends before it starts{rest}": ["backwards"],
        f"no recorded end: still running, or the log was cut{rest}": ["endless"],
        f"no recorded start of its run{rest}": ["unstarted"],
        "an attempt that ends before it starts": ["nothing"],
    }


def test_a_task_that_ends_before_it_starts_does_not_lengthen_its_job(tmp_path: Path) -> None:
    write_pai(tmp_path)
    with (tmp_path / "pai_task_table.csv").open("a") as table:
        table.write("j2,worker,3.0,Terminated,5000.0,800.0,400.0,29.2,800.0,MISC\n")
    jobs, dropped = read(RawFormat.PAI, tmp_path)
    assert [(job.duration_s, job.spec.requested_gpus) for job in jobs] == [(510.0, 1), (770.0, 3)]
    assert dropped.names["a task that ends before it starts; the rest of its job is kept"] == ["j2"]


@pytest.mark.parametrize(
    "held",
    [
        "gres/gpu:a100.1g.5gb=1,gres/gpu=1",
        "gres/gpu:a100:1g.5gb=1",
        "gres/gpu:a100_1c.3g.20gb=1,gres/gpu=1",
        "gres/gpu:a100_3g.20gb=1,gres/gpu=1",
        "gres/gpu=2,gres/gpu:1g.5gb=2",
        "gres/gpu:nvidia_h100_1g.10gb+me=1",
        "gres/gpu:a100=1,gres/gpu:a100_3g.20gb=1,gres/gpu=2",
    ],
)
def test_a_slice_of_a_gpu_is_not_a_gpu(tmp_path: Path, held: str) -> None:
    path = write_sacct(tmp_path)
    replace_once(path, "gres/gpu:a100=4,gres/gpu=4", held)
    jobs, dropped = read(RawFormat.SACCT, path)
    assert "101" not in {job.spec.name for job in jobs}
    assert dropped.names["MIG slices, which are parts of a GPU"] == ["101"]


@pytest.mark.parametrize("end", ["", "|"])
def test_slurms_documented_fields_need_no_header(tmp_path: Path, end: str) -> None:
    path = tmp_path / "sacct.txt"
    fields = "2026-03-01T08:00:00|2026-03-01T09:00:00|2026-03-01T10:00:00|gres/gpu=2"
    path.write_text(f"101|vision|{fields}{end}\n102_7|speech|{fields}{end}\n")
    jobs, _ = read(RawFormat.SACCT, path)
    assert list(map(facts, jobs)) == [
        ("101", 3600.0, 2, "", "vision"),
        ("102_7", 3600.0, 2, "", "speech"),
    ]
    path.write_text("101|train|gpu|vision|8|COMPLETED|0:0\n")
    with pytest.raises(
        InvalidInput, match="JobID,Account,Submit,Start,End,AllocTRES; print it with"
    ):
        read(RawFormat.SACCT, path)


def replace_once(path: Path, old: str, new: str) -> None:
    text = path.read_text()
    assert old in text
    path.write_text(text.replace(old, new, 1))


@pytest.mark.parametrize(
    ("form", "file", "old", "new", "message"),
    [
        ("philly", "cluster_job_log", "[", "{", "line 1: must begin with"),
        ("philly", "cluster_job_log", '"vc": "ee9e8c",', '"vc": ee9e8c,', "line 4: is not JSON"),
        ("philly", "cluster_job_log", '"user": "ce2f4c"\n    },', "", "is not JSON"),
        ("philly", "cluster_job_log", "01:11:39", "25:11:39", "line 2, column submitted_time"),
        (
            "philly",
            "cluster_job_log",
            "01:12:09",
            "soon",
            "line 2, column start_time: '2017-10-07 so",
        ),
        (
            "philly",
            "cluster_job_log",
            '"jobid": "never"',
            '"id": "never"',
            "line 58: must be a job",
        ),
        ("philly", "cluster_job_log", '"gpus": []', '"gpus": 0', "column detail: must be a list"),
        ("helios", "cluster_log.csv", "gpu_num", "gpus", "column gpu_num: is missing from"),
        ("helios", "cluster_log.csv", ",4,16,1,FAILED", ",x,16,1,FAILED", "line 3, column gpu_num"),
        ("helios", "cluster_log.csv", "36848,0", "36848", "line 2: must have 12 fields"),
        ("helios", "cluster_log.csv", "2020-06-09 18:41:01", "", "line 2, column submit_time"),
        (
            "pai",
            "pai_task_table.csv",
            "50.0,V100",
            "half,V100",
            "pai_task_table.csv line 1, column",
        ),
        ("pai", "pai_job_table.csv", "4550879.0", "noon", "pai_job_table.csv line 1, column start"),
        ("pai", "pai_job_table.csv", ",4551416.0", "", "line 1: must have 6 fields"),
        ("sacct", "sacct.txt", "JobID", "Job", "column JobID: is missing from the header"),
        ("sacct", "sacct.txt", "|train|", "|tr|ain|", "line 2: must have 10 fields"),
        ("sacct", "sacct.txt", "gres/gpu=2", "gpus", "line 7, column AllocTRES"),
        ("sacct", "sacct.txt", "2026-03-01T08:00:00", "Sunday", "line 2, column Submit"),
    ],
)
def test_a_mistake_is_named_with_its_line(
    tmp_path: Path, form: str, file: str, old: str, new: str, message: str
) -> None:
    path = WRITERS[RawFormat(form)](tmp_path)
    replace_once(tmp_path / file, old, new)
    with pytest.raises(InvalidInput, match=message.replace("(", r"\(")):
        read(RawFormat(form), path)


def test_what_is_no_text_or_ends_early_is_refused(tmp_path: Path) -> None:
    path = write_philly(tmp_path)
    path.write_text(path.read_text().rstrip("]\n"))
    with pytest.raises(InvalidInput, match="must end with ']', but the file ends before it"):
        read(RawFormat.PHILLY, path)
    path.write_bytes(b"[\n\xff")
    with pytest.raises(InvalidInput, match="must be UTF-8 text"):
        read(RawFormat.PHILLY, path)
    path.write_text("[" * 100_000)
    with pytest.raises(InvalidInput, match="is nested too deeply"):
        read(RawFormat.PHILLY, path)
    table = write_helios(tmp_path)
    table.write_bytes(table.read_bytes() + b"1,\xff\n")
    with pytest.raises(InvalidInput, match=r"cluster_log\.csv line 7: must be UTF-8 text"):
        read(RawFormat.HELIOS, table)
    table.write_text("")
    with pytest.raises(InvalidInput, match="line 1: must name the columns: job_id, vc"):
        read(RawFormat.HELIOS, table)
    with pytest.raises(InvalidInput, match="'Mars/Olympus' is not a time zone"):
        zone_of("Mars/Olympus")


def run(*arguments: str, code: int = 0) -> Result:
    result = CliRunner().invoke(app, ["import", "trace", *arguments])
    assert result.exit_code == code, (result.output, result.exception)
    return result


PROFILES = """\
model,params,global_batch,gpu_type,num_nodes,gpus_per_node,iter_time_s,status
bert,1.3B,256,a100,1,1,2.0,ok
bert,1.3B,256,a100,1,2,1.1,ok
bert,1.3B,256,a100,1,4,0.6,ok
bert,1.3B,256,a100,3,4,0.3,ok
"""


@pytest.mark.parametrize("form", list(RawFormat))
def test_a_converted_trace_is_read_back_as_the_same_jobs(tmp_path: Path, form: RawFormat) -> None:
    raw, out = WRITERS[form](tmp_path), tmp_path / "out.csv"
    result = run(str(raw), "--from", form.value, "--to", str(out))
    jobs, dropped = read(form, raw)
    notes = " ".join(result.stderr.split())
    assert f"{len(jobs)} jobs written to" in notes
    assert "models, sizes, batches and iterations are not in the trace" in notes
    assert all(f"({reason}):" in notes for reason in dropped.counts)
    first_s = min(job.arrival_s for job in jobs)
    kept = sorted(
        (job._replace(arrival_s=job.arrival_s - first_s) for job in jobs),
        key=lambda job: job.arrival_s,
    )
    assert trace_of(out) == kept


def test_a_raw_trace_is_redrawn_by_the_recipe_of_its_seed(tmp_path: Path) -> None:
    raw, profiles = write_philly(tmp_path), tmp_path / "profiles.csv"
    profiles.write_text(PROFILES)
    shaping = ("--redraw", "--profiles", str(profiles), "--nodes", "a100=4x4")
    texts = []
    for k, seed in enumerate(("1", "1", "2")):
        out = tmp_path / f"{k}.csv"
        run(str(raw), "--from", "philly", "--to", str(out), *shaping, "--seed", seed)
        texts.append(out.read_text())
    assert texts[0] == texts[1]
    jobs = read_trace(tmp_path / "0.csv")
    assert [job.spec.workload.model for job in jobs] == ["bert", "bert"]


def test_a_wrong_trace_leaves_no_file_and_options_say_what_they_need(tmp_path: Path) -> None:
    raw, out = write_sacct(tmp_path), tmp_path / "out.csv"
    out.write_text("kept")
    replace_once(raw, "|train|", "|tr|ain|")
    result = run(str(raw), "--from", "sacct", "--to", str(out), code=2)
    assert "sacct.txt line 2: must have 10 fields" in " ".join(result.stderr.split())
    assert out.read_text() == "kept"
    assert sorted(path.name for path in tmp_path.iterdir()) == ["out.csv", "sacct.txt"]
    result = run(str(tmp_path / "absent"), "--from", "pai", "--to", str(out), code=2)
    assert "cannot be read: No such file or directory" in " ".join(result.stderr.split())
    result = run(str(raw), "--time-zone", "UTC", "--to", str(out), code=2)
    assert "is for raw traces; give --from, too" in " ".join(result.stderr.split())
