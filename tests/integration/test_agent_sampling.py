"""The traffic of a gang, measured on a real counter: bursts over a virtual cable."""

from __future__ import annotations

from typing import Any

import pytest

from tests.support.bursts import PACKET_BYTES, PACKETS, PERIOD_S
from tests.support.netns import cable, hosts, namespaces, python

__all__ = ["namespaces"]
pytestmark = pytest.mark.usefixtures("namespaces")

MEASURES = """
import asyncio, json, sys
from tessera.formulation.values import Cell
from tessera.service.agent.gangs import Gang, GangPhase, GangReport
from tessera.service.agent.network.sampling import TrafficSampler, sent_bytes_reader
from tests.support.bursts import Bursts
bursts = Bursts("10.97.1.2")
async def measure():
    sent = sent_bytes_reader([sys.argv[1]])
    sampling = TrafficSampler(sent, window_s=4.0, clock=bursts.clock, sleep=bursts.sleep)
    gang = Gang(job="a", generation=1, shares=(("n0", (0,)),), leader="n0", members=("n0", "n1"),
                cell=Cell(gpu_type="a100", gpus=2, pipeline_degree=1), iter_time_s=1.0, iterations_total=1.0)
    measured = await sampling.step(lambda: [(gang, True)])
    report = sampling.add_measurement(GangReport(job="a", generation=1, node="n0", phase=GangPhase.RUNNING))
    return measured, report.period_s, report.sent_bytes
print(json.dumps(asyncio.run(measure())))
"""


def test_bursts_over_a_cable_are_measured_by_the_interfaces_counter() -> None:
    with hosts(2) as (left, right):
        interface, _ = cable(left, right, "10.97.1")
        output: Any = python(left, MEASURES, interface)
    measured, period_s, sent_bytes = output
    assert measured
    assert period_s == pytest.approx(PERIOD_S, rel=0.03)
    assert sent_bytes == pytest.approx(PACKETS * PACKET_BYTES, rel=0.05)
