"""Priorities and counters on real Linux queues, routes and interfaces, in network namespaces."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tessera.formulation.answer.network.tags import assign_tags
from tessera.formulation.base.errors import NotAllowed, Unavailable
from tessera.service.agent.main import main
from tessera.service.agent.network.backend import MapChange
from tessera.service.agent.network.commands import runner_inside
from tessera.service.agent.network.node import NodeNetwork
from tessera.service.agent.network.tc import TcBackend
from tests.support.bursts import PACKET_BYTES, PACKETS, PERIOD_S
from tests.support.netns import Race, cable, hosts, namespaces, python

__all__ = ["namespaces"]


pytestmark = pytest.mark.usefixtures("namespaces")


LINK_BIT_PER_S = 20_000_000


WINDOW = 1_500_000


@pytest.fixture
def host(namespaces: None) -> Iterator[str]:
    """Yield a host with an interface ``x``."""
    with hosts(1) as (name,):
        runner_inside(name)(["ip", "link", "add", "x", "type", "veth", "peer", "name", "y"])
        yield name


def a_table(host: str, interface: str = "x", **changes: Any) -> TcBackend:
    usual: dict[str, Any] = {
        "link_bit_per_s": LINK_BIT_PER_S,
        "run": runner_inside(host),
        "dry_run": False,
    }
    return TcBackend(interface, **usual | changes)


def test_a_higher_priority_wins_a_shaped_link_and_a_new_map_reverses_the_order() -> None:
    with hosts(2) as (left, right):
        interface, _ = cable(left, right, "10.91.1")
        table = a_table(left, interface)
        table.apply({10: 3, 20: 3})
        with Race(left, right, "10.91.1.2", (10, 20)) as race:
            level = race.shares(WINDOW)
            table.apply({10: 6, 20: 1})
            assert table.read() == {10: 6, 20: 1}
            first = race.shares(WINDOW)
            changes = table.apply({10: 1, 20: 6})
            assert changes == (
                MapChange(interface=interface, tag=10, before=6, after=1),
                MapChange(interface=interface, tag=20, before=1, after=6),
            )
            turned = race.shares(WINDOW)
    assert first[10] > 0.9
    assert turned[20] > 0.9
    assert 0.3 < level[10] < 0.7


def test_a_dry_run_and_the_same_map_again_change_nothing(host: str) -> None:
    commands: list[list[str]] = []

    def run(argv: Any) -> str:
        commands.append(list(argv))
        return runner_inside(host)(argv)

    wanted = {tag: tag % 8 for tag in range(64)}
    assert len(a_table(host, run=run, dry_run=True).apply(wanted)) == 64
    assert all("show" in argv for argv in commands)
    table = a_table(host, run=run)
    assert table.read() == {}
    assert len(table.apply(wanted)) == 64
    commands.clear()
    assert table.apply(wanted) == ()
    assert all("show" in argv for argv in commands)
    assert table.read() == wanted


def test_another_programs_root_discipline_and_a_missing_interface_are_named(host: str) -> None:
    runner_inside(host)(["tc", "qdisc", "add", "dev", "x", "root", "handle", "1:", "htb"])
    with pytest.raises(NotAllowed, match="tc qdisc del dev x root"):
        a_table(host).apply({10: 6})
    with pytest.raises(Unavailable, match=r"tc -j qdisc show dev nowhere.*ip link"):
        a_table(host, "nowhere").read()


def test_a_partly_configured_discipline_is_completed(host: str) -> None:
    table = a_table(host)
    table.apply({10: 6})
    for argv in table.removal():
        runner_inside(host)(argv)
    assert table.read() == {}
    runner_inside(host)(["tc", "qdisc", "add", "dev", "x", "root", "handle", "7e5:", "htb"])
    table.apply({10: 6})
    classes = runner_inside(host)(["tc", "class", "show", "dev", "x"])
    assert classes.count("class htb") == 9


def test_the_prio_discipline_reads_back_as_it_was_set(host: str) -> None:
    table = TcBackend("x", discipline="prio", run=runner_inside(host), dry_run=False)
    try:
        table.apply({10: 6, 20: 0})
    except Unavailable as error:
        if "load the kernel's module" not in str(error):
            raise
        pytest.skip("this kernel has no sch_prio")
    assert table.read() == {10: 6, 20: 0}
    assert table.apply({10: 6, 20: 0}) == ()


def test_new_levels_of_running_jobs_are_carried_out_without_new_tags() -> None:
    with hosts(2) as (left, right):
        interface, _ = cable(left, right, "10.91.2")
        table = a_table(left, interface)
        now_s = [0.0]
        node = NodeNetwork([table], clock=lambda: now_s[0], drain_s=0.1)
        before = assign_tags({"a": 1, "b": 0}, 2)
        node.desired(before)
        tags = before.tags["a"], before.tags["b"]
        with Race(left, right, "10.91.2.2", tags) as race:
            assert race.shares(WINDOW)[tags[0]] > 0.9
            now_s[0] = 1.0
            after = assign_tags({"a": 0, "b": 1}, 2, before.tags)
            assert after.tags == before.tags
            node.desired(after)
            # A level falls at once, and rises after the drain.
            assert table.read()[tags[0]] == table.read()[tags[1]]
            now_s[0] = 1.2
            assert node.advance() is None
            assert race.shares(WINDOW)[tags[1]] > 0.9


def test_the_command_plans_applies_and_shows(
    host: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    settings = tmp_path / "settings.json"
    settings.write_text('{"levels": 2, "jobs": {"a": 1, "b": 0}, "tags": {"b": 30}}')
    options = ["--network-backend=tc", "--interface=x", f"--netns={host}"]
    options += ["--link-bit-per-s=1000000000", f"--settings={settings}"]
    answers = []
    for action in ("plan", "show", "apply", "show", "apply"):
        assert main(["network", action, *options]) == 0
        answers.append(json.loads(capsys.readouterr().out))
    planned, untouched, applied, shown, again = answers
    assert not planned["interfaces"]["x"]["done"]
    assert untouched["x"]["priorities"] == {}
    assert applied["interfaces"]["x"]["changes"] == planned["interfaces"]["x"]["changes"]
    assert shown["x"]["priorities"] == {"2": 1, "30": 0, "40": 7}
    assert applied["jobs"]["b"]["NCCL_IB_TC"] == str(30 * 4 + 2)
    assert again["interfaces"]["x"]["changes"] == []


MEASURES = """
import asyncio, json, sys
from tessera.service.agent.network.sampling import TrafficSampler, sent_bytes_reader
from tessera.v1.agents_pb2 import DesiredGang, ObservedGang
from tests.support.bursts import Bursts
bursts = Bursts("10.97.1.2")
async def measure():
    sent = sent_bytes_reader([sys.argv[1]])
    sampling = TrafficSampler(sent, window_s=4.0, clock=bursts.clock, sleep=bursts.sleep)
    gang = DesiredGang(job="a", generation=1, members=("n0", "n1"))
    measured = await sampling.step(lambda: [(gang, True)])
    report = ObservedGang(job="a", generation=1)
    sampling.add_measurement(report)
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
