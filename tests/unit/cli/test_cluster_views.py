"""Nodes, tenants, the queue and a whole cluster as the command line shows them."""

from __future__ import annotations

import io
from typing import Any

import pytest
from rich.console import Console

from tessera.service.cli.clusters.nodes import show_nodes
from tessera.service.cli.clusters.tenants import show_tree
from tessera.service.cli.jobs import queue
from tessera.service.cli.options import Output
from tessera.service.cli.render import make_table
from tessera.v1 import clusters_pb2, jobs_pb2
from tessera.v1.tenants_pb2 import Tenant
from tests.support.shown import NOW, a_shown_job, a_shown_node, later

HOUR_S = 3600
Node = clusters_pb2.Node


def test_the_wide_table_of_nodes_has_their_faults_their_labels_and_the_end_of_probation(
    capsys: pytest.CaptureFixture[str],
) -> None:
    drained: dict[str, Any] = {
        "state": Node.DRAINING,
        "drained": True,
        "drained_by": "health",
        "drain_reason": "GPU 1: Xid 79",
    }
    bad = a_shown_node("bad", **drained, faults=["GPU 1: Xid 79", "GPU 0: slowed down by heat"])
    returning = a_shown_node("returning", **drained, probation_end_time=NOW)
    labelled = a_shown_node(labels={"zone": "a"}, agent_labels={"zone": "b", "disk": "ssd"})
    show_nodes([bad, returning, labelled], Output.WIDE)
    head, *rows = capsys.readouterr().out.splitlines()[:4]
    assert "FAULTS" in head
    assert [row.split()[:2] for row in rows[:2]] == [["bad", "DRAINED"], ["returning", "PROBATION"]]
    assert "GPU 1: Xid 79; GPU 0: slowed down by heat" in rows[0]
    assert "2027-01-15T08:00:00Z" in rows[1]
    assert "disk=ssd, zone=a" in rows[2]


def test_cores_and_host_memory_are_shown_as_stated_or_found_or_as_not_stated(
    capsys: pytest.CaptureFixture[str],
) -> None:
    stated = a_shown_node("stated", cpus=64, host_bytes=2**39, reported_cpus=96)
    found = a_shown_node("found", reported_cpus=96, reported_host_bytes=2**40)
    show_nodes([stated, found, a_shown_node("neither")], Output.TABLE)
    head, *rows = (line.split() for line in capsys.readouterr().out.splitlines()[:4])
    assert head[5:8] == ["CPUS", "HOST", "MEMORY"]
    assert rows[0][-3:] == ["64", "512", "GiB"]
    assert rows[1][-5:] == ["96", "(found)", "1,024", "GiB", "(found)"]
    assert rows[2][-4:] == ["not", "stated", "not", "stated"]


def test_the_tree_shows_each_tenant_below_its_parent(capsys: pytest.CaptureFixture[str]) -> None:
    place = "clusters/c/tenants"
    parents = {"chat": "nlp", "lab": "", "nlp": "lab", "orphan": "unseen", "vision": "lab"}
    tenants = [Tenant(name=f"{place}/{name}", parent=p) for name, p in parents.items()]
    show_tree(tenants, Output.TABLE)
    names = [line[:12].rstrip() for line in capsys.readouterr().out.splitlines()[1:]]
    assert names == ["lab", "  nlp", "    chat", "  vision", "orphan"]


def a_waiting_job(name: str, position: int = 0, **fields: Any) -> jobs_pb2.Job:
    """Return a job that has waited for 90 s, with a forecast if it has a position."""
    job = a_shown_job(
        name, queue_time=later(-90), reason=jobs_pb2.Reason(code="OUTPRICED"), **fields
    )
    if position:
        start = jobs_pb2.TimeBand(earliest=later(HOUR_S), latest=later(2 * HOUR_S))
        finish = jobs_pb2.TimeBand(earliest=later(9 * HOUR_S))
        job.forecast.CopyFrom(
            jobs_pb2.Forecast(position=position, start=start, finish=finish, create_time=NOW)
        )
    return job


def lines_of(*parts: object) -> list[str]:
    text = io.StringIO()
    console = Console(file=text, width=200)
    for part in parts:
        console.print(part)
    return text.getvalue().splitlines()


def test_waiting_jobs_are_ordered_by_position_then_submission_and_held_ones_are_last() -> None:
    jobs = [
        a_waiting_job("h", state=jobs_pb2.HELD),
        a_waiting_job("n1"),
        a_waiting_job("p2", 2),
        a_waiting_job("n2"),
        a_waiting_job("p1", 1),
    ]
    assert [j.name[-2:] for j in queue.order_queue(jobs)] == ["p1", "p2", "n1", "n2", "/h"]
    assert queue.waiting_reason(jobs_pb2.Job(state=jobs_pb2.HELD)) == "HELD"
    assert queue.waiting_reason(jobs_pb2.Job(state=jobs_pb2.QUEUED)) == ""


def test_a_row_says_who_waits_for_what_why_and_until_when() -> None:
    job = a_waiting_job("j", 3, requested_gpu_type="a100", pinned_gpu_type=True, min_gpus=4)
    head, row = lines_of(make_table([job], queue.queue_columns([job], NOW), wide=False))
    titles = "POSITION JOB TENANT WANTS REASON STARTS IN FINISHES IN WAITS"
    assert " ".join(head.split()) == titles
    assert " ".join(row.split()) == "3 j nlp 8 x a100 only (4-) OUTPRICED 1h-2h after 9h 1m30s"


def test_a_queue_with_promised_starts_has_a_column_of_them() -> None:
    jobs = [a_waiting_job("p", start_by=later(HOUR_S)), a_waiting_job("n")]
    head, promise_row, new_row = lines_of(
        make_table(jobs, queue.queue_columns(jobs, NOW), wide=False)
    )
    titles = "POSITION JOB TENANT WANTS REASON PROMISED START STARTS IN FINISHES IN WAITS"
    assert " ".join(head.split()) == titles
    assert " ".join(promise_row.split()) == "p nlp 8 OUTPRICED in 1h 1m30s"
    assert " ".join(new_row.split()) == "n nlp 8 OUTPRICED 1m30s"


@pytest.mark.parametrize(
    ("fields", "text"),
    [
        ({}, "8"),
        ({"requested_gpu_type": "v100"}, "8 x v100"),
        ({"max_gpus": 16}, "8 (1-16)"),
        ({"min_gpus": 2, "max_gpus": 16}, "8 (2-16)"),
    ],
)
def test_wanted_gpus_show_the_type_and_the_bounds(fields: dict[str, Any], text: str) -> None:
    assert queue.wanted_gpus(a_waiting_job("j", 0, **fields)) == text


def test_the_use_of_a_type_counts_free_gpus_on_nodes_that_are_away_apart() -> None:
    nodes = [
        a_shown_node("n0", free_gpus=2),
        a_shown_node("n1", state=Node.DRAINING, free_gpus=8),
        a_shown_node("n2", state=Node.UNREACHABLE, free_gpus=4),
        Node(name="v", gpu_type="v100"),
    ]
    a100, v100 = queue.measure_use(nodes)
    assert (a100.gpus, a100.used, a100.free, a100.away) == (24, 10, 2, 12)
    assert queue.use_bar(a100) == f"[{'#' * 10}{'.' * 2}{'x' * 12}]"
    assert (v100.gpus, v100.used) == (0, 0)
    assert queue.use_bar(v100) == f"[{'.' * queue.BAR_WIDTH}]"
