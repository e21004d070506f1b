"""Clusters as the command line shows them: nodes, tenants, the queue, topologies, curves, times."""

from __future__ import annotations

import io
import json
from collections.abc import Callable
from datetime import UTC, datetime
from pathlib import Path
from typing import Any
from zoneinfo import ZoneInfo

import numpy as np
import pytest
from google.protobuf.timestamp_pb2 import Timestamp
from rich.console import Console
from typer.testing import CliRunner, Result

from tessera.formulation.base.errors import InvalidInput
from tessera.formulation.base.values import Workload
from tessera.service.cli.clusters.nodes import show_nodes
from tessera.service.cli.clusters.reservations import find_time_zone, format_moment, parse_moment
from tessera.service.cli.clusters.tenants import show_tree
from tessera.service.cli.demo import command as demo
from tessera.service.cli.demo.picture import FREE_BRIGHTNESS, RoundPair, draw_picture, gpu_image
from tessera.service.cli.estimates.curveview import CurveOf, curve_parts, draw_bar
from tessera.service.cli.jobs import queue
from tessera.service.cli.main import app
from tessera.service.cli.options import Output
from tessera.service.cli.render import make_table, show_parts
from tessera.v1 import clusters_pb2, estimates_pb2, jobs_pb2, scheduler_pb2
from tessera.v1 import jobs_pb2 as pb
from tessera.v1.tenants_pb2 import Tenant
from tests.support.execution_plans import a_plan
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


GIB = 2**30
PLAN = a_plan(Workload(model="bert", params="1.3B", global_batch=256), 2)
BATCH_TEXT = "tp2, micro-batch 256"


def a_cell(gpus: int, rate: float, *, nodes: int = 1, plan: str = "", **needs: int) -> pb.CurveCell:
    cell = estimates_pb2.Cell(gpu_type="a100", gpus=gpus, pipeline_degree=1, plan=plan)
    return pb.CurveCell(cell=cell, nodes=nodes, rate=rate, **needs)


def a_point(amount: int, cell: pb.CurveCell, best: float = 0.0, gain: float = 0.0) -> pb.CurvePoint:
    return pb.CurvePoint(amount=amount, cell=cell, best_rate=best or cell.rate, gain=gain)


ONE = a_cell(1, 40.0, cpus=8, host_bytes=64 * GIB)
TWO = a_cell(2, 100.0, plan=PLAN.digest, cpus=4, host_bytes=8 * GIB)
FOUR = a_cell(4, 80.0, cpus=4, host_bytes=8 * GIB)


def some_curves(**changes: Any) -> pb.JobCurves:
    bandwidth = pb.BandwidthPoint(bytes_per_second=2.5e9, cell=a_cell(2, 60.0))
    own = pb.TypeCurves(
        gpu_type="a100",
        gpus=[a_point(1, ONE, gain=60.0), a_point(2, TWO), a_point(4, FOUR, best=100.0)],
        at_gpus=2,
        cpus=[a_point(4, TWO)],
        host_bytes=[a_point(8 * GIB, TWO)],
        shapes=[TWO, a_cell(2, 70.0, nodes=2)],
        minimum_demand=TWO,
        bandwidth=pb.BandwidthCurve(points=[bandwidth]),
    )
    curves = pb.JobCurves(
        name="clusters/c/jobs/j",
        requested_gpus=4,
        requested_gpu_type="a100",
        guaranteed=True,
        guaranteed_rate=80.0,
        reference_rate=100.0,
        current=ONE,
        types=[own],
        execution_plans={PLAN.digest: PLAN.to_json()},
    )
    for field, value in changes.items():
        setattr(curves, field, value)
    return curves


@pytest.fixture
def shown(capsys: pytest.CaptureFixture[str]) -> Callable[..., list[str]]:
    def show(found: pb.JobCurves, of: CurveOf | None = None) -> list[str]:
        show_parts(curve_parts(found, of))
        return capsys.readouterr().out.splitlines()

    return show


def test_the_table_marks_where_the_job_runs_its_request_and_its_minimum(
    shown: Callable[..., list[str]],
) -> None:
    lines = shown(some_curves(), CurveOf.GPUS)
    head, one, two, four = lines[-4:]
    assert head.split()[:4] == ["GPUS", "SAMPLES/S", "BEST", "GAIN/GPU"]
    assert one.split()[:4] == ["1", "40", "40", "60"]
    assert " now " in one
    assert " minimum " in two
    assert " request " in four
    assert four.split()[1:3] == ["80", "100"]
    assert BATCH_TEXT in two
    facts = {line[:16].strip(): line[16:].strip() for line in lines[:5]}
    assert facts["guaranteed"] == "80 samples/s"
    assert facts["minimum demand"] == (
        f"2 x a100, 4 CPU cores, 8 GiB of host memory: 100 samples/s by {BATCH_TEXT}"
    )
    assert facts["runs on"].startswith("1 x a100, pp 1, on 1 node: 40 samples/s")
    bandwidth = [line.strip() for line in shown(some_curves(), CurveOf.BANDWIDTH)]
    assert "Network bandwidth of a node with 2 x a100, as predicted" in bandwidth
    assert bandwidth[-1].split()[:2] == ["2.5", "60"]


def test_what_is_not_known_is_said_with_the_reason(shown: Callable[..., list[str]]) -> None:
    found = some_curves(guaranteed=False, guaranteed_rate=0.0)
    own = found.types[0]
    for field in ("cpus", "host_bytes", "minimum_demand"):
        own.ClearField(field)
    own.gpus[0].cell.cell.plan = "d1ge57" + 64 * "0"  # of a plan that is not recorded
    own.bandwidth.CopyFrom(pb.BandwidthCurve(unknown_reason="the model m is unknown"))
    text = "\n".join(shown(found))
    assert "Nodes with 2 x a100" in text
    assert "Host memory with 2 x a100" in "\n".join(shown(some_curves()))
    assert "d1ge57000000" in text
    assert text.count("The estimates do not state") == 1
    assert "The estimates do not state" in shown(found, CurveOf.CPUS)[-1]
    assert "Not known: the model m is unknown." in text
    assert "not known, because no Cell matches the request, if the job were guaranteed" in text
    assert "none on a100: no Cell within the request is as fast" in text


def test_a_bar_shows_the_rate_the_best_rate_and_the_guaranteed_one(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("tessera.service.cli.estimates.curveview._is_unicode", lambda: False)
    assert draw_bar(50.0, 75.0, 0.0, 100.0) == "#" * 16 + "." * 8
    assert draw_bar(50.0, 50.0, 75.0, 100.0) == "#" * 16 + " " * 7 + "|"
    assert draw_bar(100.0, 100.0, 50.0, 100.0) == "#" * 15 + "|" + "#" * 16
    assert draw_bar(0.0, 0.0, 200.0, 100.0) == ""


NODES = [("a", "a100", 4), ("b", "v100", 2)]


def a_decision(job: str, node: str = "", *gpus: int, kind: str = "keep") -> scheduler_pb2.Decision:
    decision = scheduler_pb2.Decision(job=f"clusters/c/jobs/{job}", kind=kind)
    if node:
        share = jobs_pb2.NodeShare(node=f"clusters/c/nodes/{node}", gpu_indices=gpus)
        decision.allocation.shares.append(share)
    return decision


def test_each_gpu_has_the_colour_of_its_job_in_the_last_round(tmp_path: Path) -> None:
    decisions = [
        a_decision("one", "a", 0, 1),
        a_decision("two", "b", 1, kind="start"),
        a_decision("three", kind="wait"),
    ]
    image, strips = gpu_image(decisions, NODES)
    free = np.full(3, FREE_BRIGHTNESS)
    assert [label for label, _ in strips] == ["a100: 4 GPUs", "v100: 2 GPUs"]
    assert np.array_equal(image[0, 0], image[1, 0])
    assert not np.array_equal(image[0, 0], free)
    assert np.array_equal(image[2, 0], free)
    assert np.array_equal(image[0, 2], free)
    assert not np.array_equal(image[1, 2], free)
    assert not np.array_equal(image[1, 2], image[0, 0])
    file, value = tmp_path / "demo.png", scheduler_pb2.Round(placed_score=2.0, running=1, waiting=1)
    draw_picture(file, [RoundPair(ilp=value, greedy=value, call_s=0.1)], decisions, NODES)
    assert file.read_bytes().startswith(b"\x89PNG")


def test_the_demo_ends_with_commands_to_try_next(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    shown = io.StringIO()
    monkeypatch.setattr(demo, "out", Console(file=shown, width=200))
    greedy = scheduler_pb2.Round(placed_score=2.0, gap=0.6, bound_is_trivial=True)
    exact = scheduler_pb2.Round(name="clusters/c/rounds/1", placed_score=2.5, gap=1e-5)

    demo._show([RoundPair(ilp=exact, greedy=greedy, call_s=0.1)], [], tmp_path / "p.png")

    lines = shown.getvalue().splitlines()
    after = lines[lines.index("Next steps:") + 1 :]
    assert after[0].split()[:2] == ["tessera", "up"]


BERLIN = ZoneInfo("Europe/Berlin")
NOON = datetime(2026, 11, 30, 12, 0, tzinfo=UTC)


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("2026-12-01 09:00", "2026-12-01T08:00:00+00:00"),
        ("2026-12-01T09:00:00Z", "2026-12-01T09:00:00+00:00"),
        ("2026-12-01 09:00+05:00", "2026-12-01T04:00:00+00:00"),
        ("2026-07-01 09:00", "2026-07-01T07:00:00+00:00"),
        ("17:00", "2026-11-30T16:00:00+00:00"),
        ("12:59", "2026-12-01T11:59:00+00:00"),  # it has passed today in Berlin
        ("2h", "2026-11-30T14:00:00+00:00"),
    ],
)
def test_a_time_is_in_the_zone_unless_it_has_one(text: str, expected: str) -> None:
    moment = parse_moment("--from", text, NOON, BERLIN)
    assert moment.astimezone(UTC).isoformat() == expected


def test_times_are_shown_in_the_zone() -> None:
    moment = Timestamp()
    moment.FromDatetime(NOON)
    assert format_moment(moment, BERLIN) == "2026-11-30 13:00 +0100"
    for text in ("", "tuesday", "25:00", "2026-13-01 09:00", "99999999d"):
        with pytest.raises(InvalidInput):
            parse_moment("--from", text, NOON, BERLIN)
    with pytest.raises(InvalidInput, match="Europe/Berlin"):
        find_time_zone("Europe/Nowhere")


CLOS = """
kind: clos
nodes: [{name: "a100-{}", count: 4}]
host: a100
tors: 2
aggregations: 3
tor_bytes_per_s: 100 Gb/s
tor_delay_s: 1e-6
"""
LINGJUN = """
kind: lingjun
file: hosts.csv
host: a100
ports_per_nic: 2
asw_cables: 4
asw_bytes_per_s: 400 Gb/s
psw_cables: 4
psw_bytes_per_s: 50e9
"""
ROWS = "host_id,dsw,psw,asw\nh1,G,P1,S1\nh2,G,P1,S1\nh3,G,P2,S1\n"


@pytest.fixture
def topology(tmp_path: Path) -> Callable[..., Result]:
    """Return a function that runs ``tessera topology show`` on a file with this text."""
    path = tmp_path / "net.yaml"

    def run(text: str, options: str = "", code: int = 0) -> Result:
        path.write_text(text, encoding="utf-8")
        result = CliRunner().invoke(app, ["topology", "show", str(path), *options.split()])
        assert result.exit_code == code, result.output
        return result

    return run


def test_a_topology_is_shown_by_tiers_links_and_paths(topology: Callable[..., Result]) -> None:
    shown = topology(CLOS).stdout
    rows = [row.split() for row in shown.splitlines()]
    for row in (["hosts", "4"], ["ToR", "2"], ["GPU", "32"]):
        assert row in rows
    assert ["ToR", "aggregation", "6", "12.5", "1"] in rows
    assert "37.5 GB/s between halves of the ToRs" in shown
    paths = topology(CLOS, "--paths a100-0 a100-3").stdout
    lines = [text for text in paths.splitlines() if " > " in text]
    assert len(lines) == 3
    assert lines[1] == (
        "a100-0/gpu-0 > a100-0/pcie-0 > a100-0/nic-0 > tor-0 > agg-1 > tor-1 > a100-3/nic-0"
        " > a100-3/pcie-0 > a100-3/gpu-0"
    )
    some = topology(CLOS, "--paths a100-0 a100-3 --most 2")
    assert "2 of 3 equal-cost paths are listed; --most lists more" in some.stderr


def test_a_lingjun_file_is_read_from_the_same_folder_and_assumptions_are_printed(
    topology: Callable[..., Result], tmp_path: Path
) -> None:
    (tmp_path / "hosts.csv").write_text(ROWS, encoding="utf-8")
    output = json.loads(topology(LINGJUN, "--paths h1 h2 --json").stdout)
    assert (output["hosts"], output["vertices"]["tor"]) == (3, 2)
    assert "assumed" in output["assumed"][0]
    shown = topology(LINGJUN, "--paths h1 h2")
    assert "(4 parallel cables)" in shown.stdout
    assert "speeds of cables" in shown.stderr


@pytest.mark.parametrize(
    ("text", "options", "message"),
    [
        (CLOS + "---\n" + CLOS, "", "holds 2 documents; give one"),
        ("", "", "must contain one topology, but is empty"),
        (CLOS, "--paths a100-0 a100-9", "--paths: unknown host 'a100-9'; did you mean"),
        (CLOS, "--paths a100-0 a100-0", "--paths: needs two different hosts"),
        (
            CLOS.replace("100 Gb/s", "1"),
            "",
            "tor_bytes_per_s: must be a number of bytes/s from 1e6",
        ),
        (LINGJUN, "", "hosts.csv: cannot be read"),
        (LINGJUN + "rows: []\n", "", "needs exactly one of 'file' and 'rows'"),
    ],
)
def test_a_mistake_in_a_topology_is_refused_by_name(
    topology: Callable[..., Result], text: str, options: str, message: str
) -> None:
    result = topology(text, options, code=2)
    assert message in result.stderr
    assert result.stdout == ""
