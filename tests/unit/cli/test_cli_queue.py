"""The views ``queue`` and ``top``, from messages."""

from __future__ import annotations

import io

import pytest
from google.protobuf.timestamp_pb2 import Timestamp
from rich.console import Console

from tessera.service.cli import queue
from tessera.service.cli.render import make_table
from tessera.v1 import clusters_pb2, estimates_pb2, jobs_pb2

NOW = Timestamp(seconds=1_800_000_000)
HOUR_S = 3600


def a_job(name: str, position: int = 0, **fields: object) -> jobs_pb2.Job:
    job = jobs_pb2.Job(
        name=f"clusters/c/jobs/{name}",
        tenant="nlp",
        requested_gpus=8,
        state=jobs_pb2.QUEUED,
        queue_time=Timestamp(seconds=NOW.seconds - 90),
        reason=jobs_pb2.Reason(code="OUTPRICED"),
    )
    if position:
        band = jobs_pb2.TimeBand(
            earliest=Timestamp(seconds=NOW.seconds + HOUR_S),
            latest=Timestamp(seconds=NOW.seconds + 2 * HOUR_S),
        )
        finish = jobs_pb2.TimeBand(earliest=Timestamp(seconds=NOW.seconds + 9 * HOUR_S))
        job.forecast.CopyFrom(
            jobs_pb2.Forecast(position=position, start=band, finish=finish, made_time=NOW)
        )
    job.MergeFrom(jobs_pb2.Job(**fields))  # type: ignore[arg-type] # a test may set any field
    return job


def text_of(*parts: object) -> list[str]:
    console = Console(file=io.StringIO(), width=200)
    for part in parts:
        console.print(part)
    return console.file.getvalue().splitlines()  # type: ignore[attr-defined, no-any-return]


def test_waiting_jobs_are_ordered_by_position_then_submission_and_held_ones_are_last() -> None:
    jobs = [
        a_job("h", state=jobs_pb2.HELD),
        a_job("n1"),
        a_job("p2", 2),
        a_job("n2"),
        a_job("p1", 1),
    ]
    assert [j.name[-2:] for j in queue.order_queue(jobs)] == ["p1", "p2", "n1", "n2", "/h"]


def test_a_row_says_who_waits_for_what_why_and_until_when() -> None:
    job = a_job("j", 3, requested_gpu_type="a100", pinned_gpu_type=True, min_gpus=4)
    head, row = text_of(make_table([job], queue.queue_columns([job], NOW), wide=False))
    titles = "POSITION JOB TENANT WANTS REASON STARTS IN FINISHES IN WAITS"
    assert " ".join(head.split()) == titles
    assert " ".join(row.split()) == "3 j nlp 8 x a100 only (4-) OUTPRICED 1h-2h after 9h 1m30s"


@pytest.mark.parametrize(
    ("fields", "text"),
    [
        ({}, "8"),
        ({"requested_gpu_type": "v100"}, "8 x v100"),
        ({"max_gpus": 16}, "8 (1-16)"),
        ({"min_gpus": 2, "max_gpus": 16}, "8 (2-16)"),
    ],
)
def test_wanted_gpus_show_the_type_and_the_bounds(fields: dict[str, object], text: str) -> None:
    assert queue.wanted_gpus(a_job("j", 0, **fields)) == text


def test_a_held_job_without_a_reason_says_that_it_is_held() -> None:
    held = jobs_pb2.Job(state=jobs_pb2.HELD)
    assert queue.waiting_reason(held) == "HELD"
    assert queue.waiting_reason(jobs_pb2.Job(state=jobs_pb2.QUEUED)) == ""


def a_node(name: str, state: clusters_pb2.Node.State.ValueType, free: int) -> clusters_pb2.Node:
    return clusters_pb2.Node(name=name, gpu_type="a100", gpus=8, free_gpus=free, state=state)


def test_the_use_of_a_type_counts_free_gpus_on_nodes_that_are_away_apart() -> None:
    nodes = [
        a_node("n0", clusters_pb2.Node.READY, 2),
        a_node("n1", clusters_pb2.Node.DRAINING, 8),
        a_node("n2", clusters_pb2.Node.UNREACHABLE, 4),
        clusters_pb2.Node(name="v", gpu_type="v100"),
    ]
    a100, v100 = queue.measure_use(nodes)
    assert (a100.gpus, a100.used, a100.free, a100.away) == (24, 10, 2, 12)
    assert queue.use_bar(a100) == f"[{'#' * 10}{'.' * 2}{'x' * 12}]"
    assert (v100.gpus, v100.used) == (0, 0)
    assert queue.use_bar(v100) == f"[{'.' * queue.BAR_WIDTH}]"


@pytest.mark.parametrize("width", [None, 60])
def test_the_picture_shows_the_largest_jobs_and_how_many_there_are(width: int | None) -> None:
    running = [
        jobs_pb2.Job(
            name=f"clusters/c/jobs/r{gpus}",
            state=jobs_pb2.RUNNING,
            allocation=jobs_pb2.Allocation(cell=estimates_pb2.Cell(gpu_type="a100", gpus=gpus)),
        )
        for gpus in range(1, 11)
    ]
    picture = queue.ClusterPicture(
        cluster="clusters/c",
        nodes=[a_node("n0", clusters_pb2.Node.READY, 2)],
        jobs=[*running, a_job("w")],
        next_round="next round: within seconds",
    )
    lines = text_of(*queue.picture_parts(picture, NOW, width))
    assert lines[0] == "cluster c   next round: within seconds"
    assert "11 jobs: 1 queued, 10 running" in lines
    first = lines.index(f"Running: {queue.LARGEST_JOBS} of 10")
    names = [line.split()[0] for line in lines[first + 2 : first + 2 + queue.LARGEST_JOBS]]
    assert names == [f"r{gpus}" for gpus in range(10, 10 - queue.LARGEST_JOBS, -1)]
    assert "Waiting" in lines
    if width:
        assert max(map(len, lines[first:])) <= width
