"""The views of a job's sensitivity curves: tables with bars, and JSON."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from tessera.formulation.base.values import Workload
from tessera.service.cli.estimates.curveview import CurveOf, curve_parts, draw_bar
from tessera.service.cli.render import show_parts
from tessera.v1 import estimates_pb2
from tessera.v1 import jobs_pb2 as pb
from tests.support.execution_plans import a_plan

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
