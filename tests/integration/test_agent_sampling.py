"""What a gang sends, measured for real: bursts over a virtual cable, counters of its interface."""

from __future__ import annotations

from typing import Any

import pytest

from tests.support.netns import cable, hosts, namespaces, python

__all__ = ["namespaces"]
pytestmark = [pytest.mark.usefixtures("namespaces"), pytest.mark.slow]

MEASURES = """
import asyncio, json, socket, sys, threading, time
from service.agent.gangs import Gang, Phase, Report
from service.agent.network.sampling import Sampling, sent
period_s, size, over = 0.12, 150, threading.Event()
def send():
    flow = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
    due_s = time.monotonic()
    while not over.wait(max(0.0, due_s - time.monotonic())):
        due_s += period_s
        for _ in range(size):
            flow.sendto(bytes(1000), ("10.97.1.2", 9))
async def measure():
    sampling = Sampling(sent([sys.argv[1]]), window_s=4.0, clock=time.monotonic, sleep=time.sleep)
    gang = Gang(job="a", generation=1, shares=(("n0", (0,)),), leader="n0", members=("n0", "n1"),
                iter_time_s=1.0, iterations_total=1.0)
    measured = await sampling.step(lambda: [(gang, True)])
    report = sampling.told(Report(job="a", generation=1, node="n0", phase=Phase.RUNNING))
    return measured, report.period_s, report.sent_bytes
sender = threading.Thread(target=send)
sender.start()
try:
    print(json.dumps(asyncio.run(measure())))
finally:
    over.set()
    sender.join()
"""


def test_bursts_over_a_cable_are_measured_by_the_interfaces_counter() -> None:
    """Takes five seconds, as the program that sends does: what is measured here is time."""
    with hosts(2) as (left, right):
        interface, _ = cable(left, right, "10.97.1")
        said: Any = python(left, MEASURES, interface)
    measured, period_s, sent_bytes = said
    assert measured
    assert period_s == pytest.approx(0.12, rel=0.03)
    assert sent_bytes == pytest.approx(150 * 1042, rel=0.05)  # headers of UDP, IP and Ethernet
