"""Tag maps of interfaces: the tools that write them, when a node writes one, and what jobs see of it."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

from tessera.formulation.answer.network.tags import CONTROL_TAG, TagSettings
from tessera.formulation.base.errors import InvalidInput, NotAllowed, Unavailable
from tessera.formulation.job.runtimes import REPLAY
from tessera.service.agent.main import main
from tessera.service.agent.network.backend import (
    AdviceBackend,
    MapChange,
    find_differences,
)
from tessera.service.agent.network.commands import run_command
from tessera.service.agent.network.dcb import DcbBackend, parse_scheduling
from tessera.service.agent.network.dcb import parse_priorities as parse_dcb
from tessera.service.agent.network.devices import (
    forced_traffic_classes,
    rdma_devices,
)
from tessera.service.agent.network.launch import (
    LaunchSettings,
    marking_environment,
    traffic_class,
)
from tessera.service.agent.network.map_worker import (
    RECHECK_S,
    NetworkMapWorker,
    settings_from_message,
)
from tessera.service.agent.network.node import NodeNetwork
from tessera.service.agent.network.scheduling import TransmissionSelection, find_shortcomings
from tessera.service.agent.network.tc import TcBackend, parse_filters
from tessera.service.agent.runtimes.protocol import (
    RuntimeChooser,
)
from tessera.service.agent.state import StateDir
from tessera.service.agent.supervisor import PART_VARIABLE, Supervisor
from tessera.v1 import agents_pb2 as pb
from tests.support.agent_fakes import EndlessRuntime, FakeInterface
from tests.support.agents import a_gang, until
from tests.support.logged import logged_lines
from tests.support.rdma import make_rdma_device


@dataclass
class FakeDcb:
    """Answers as ``dcb`` does. If it ``obeys``, the driver accepts what is written."""

    table: dict[int, int] = field(default_factory=dict)
    obeys: bool = True
    ran: list[list[str]] = field(default_factory=list)

    def __call__(self, argv: Sequence[str]) -> str:
        self.ran.append(list(argv))
        if "show" in argv:
            return json.dumps({"dscp_prio": sorted(self.table.items())} if self.table else {})
        for entry in argv[argv.index("dscp-prio") + 1 :]:
            tag, _, priority = entry.partition(":")
            if self.obeys:
                self.table[int(tag)] = int(priority)
        return ""


def a_change(tag: int, before: int | None, after: int) -> MapChange:
    return MapChange(interface="eth1", tag=tag, before=before, after=after)


PATH = ("gpu-0", "gpu-1", ("tor-0", "agg-1", "tor-1"))


def test_only_differing_entries_are_written_and_none_the_second_time_or_in_a_dry_run() -> None:
    driver = FakeDcb({10: 3, 11: 4, 50: 5})
    wanted = {10: 3, 11: 5, 12: 0}
    changes = a_change(11, 4, 5), a_change(12, None, 0)
    assert DcbBackend("eth1", run=driver).apply(wanted) == changes  # a dry run is the default
    assert driver.table == {10: 3, 11: 4, 50: 5}
    table = DcbBackend("eth1", run=driver, dry_run=False)
    assert table.apply(wanted) == changes
    assert ["dcb", "app", "replace", "dev", "eth1", "dscp-prio", "11:5", "12:0"] in driver.ran
    assert driver.table == {10: 3, 11: 5, 12: 0, 50: 5}
    driver.ran.clear()
    assert table.apply(wanted) == ()
    assert [argv[:4] for argv in driver.ran] == [["dcb", "-j", "app", "show"]]


def test_a_map_that_does_not_read_back_is_an_error_that_shows_the_actual_map() -> None:
    driver = FakeDcb({10: 1}, obeys=False)
    with pytest.raises(Unavailable, match="tag 10 is 1, not 3, tag 11 is not mapped, not 2"):
        DcbBackend("eth1", run=driver, dry_run=False).apply({10: 3, 11: 2})


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("", {}),
        ("{}", {}),
        ('{"default_prio":[1]}', {}),
        ('{"dscp_prio":[[0,0],[24,2],[24,3],[48,6]]}', {0: 0, 48: 6}),
    ],
)
def test_a_tag_without_a_priority_of_its_own_counts_as_unmapped(
    text: str, expected: dict[int, int]
) -> None:
    assert parse_dcb(text) == expected


@pytest.mark.parametrize(
    ("refused", "error", "text"),
    [
        (lambda: parse_dcb("dscp-prio 0:0"), Unavailable, "cannot read"),
        (lambda: parse_dcb("[]"), Unavailable, "cannot read"),
        (lambda: parse_dcb('{"dscp_prio":[["x"]]}'), Unavailable, "cannot read"),
        (lambda: parse_scheduling("[]", ""), Unavailable, "dcb -j ets show"),
        (lambda: find_differences("eth1", {}, {64: 0}), InvalidInput, "0 to 63"),
        (lambda: find_differences("eth1", {}, {1: 8}), InvalidInput, "0 to 7"),
        (lambda: TcBackend("eth1"), InvalidInput, "the link's rate"),
        (lambda: NodeNetwork([], clock=ManualClock(), drain_s=-1), InvalidInput, "drain_s"),
        (lambda: LaunchSettings(ecn=4), InvalidInput, "ecn"),
        (lambda: LaunchSettings(queue_pairs=129), InvalidInput, "queue_pairs"),
        (lambda: traffic_class(64, 0), InvalidInput, "0 to 63"),
        (lambda: run_command(["no-such-tool", "x"]), Unavailable, "no-such-tool is not installed"),
        (
            lambda: run_command(["sh", "-c", "echo not permitted >&2; exit 3"]),
            Unavailable,
            r"`sh -c .* ended with 3: not permitted; run the agent as root",
        ),
    ],
)
def test_wrong_output_values_and_tools_are_refused(
    refused: Callable[[], object], error: type[Exception], text: str
) -> None:
    with pytest.raises(error, match=text):
        refused()


def test_nonstrict_shared_or_lossy_priorities_are_reported_with_the_command_that_fixes_them() -> (
    None
):
    ets = '{"tc_tsa": ["vendor", "vendor", "vendor", "ets"], "prio_tc": [0, 0, 1, 3, 2, 2, 3, 3]}'
    pfc = '{"prio_pfc": [false, false, false, true, false, false, false, false]}'
    app = '{"dscp_prio": [[10, 0], [26, 3], [48, 6]]}'
    answers = {"app": app, "ets": ets, "pfc": pfc}
    findings = DcbBackend("eth1", run=lambda argv: answers[argv[2]]).findings()
    assert findings[:3] == (
        "eth1: priorities [0, 3, 6] are scheduled by ets, vendor, not strictly",
        "eth1: priorities 3 and 6 share traffic class 3",
        "eth1: priorities [0, 6] have no flow control: RoCE there must tolerate loss",
    )
    assert "dcb ets set dev eth1 prio-tc 0:0 1:1" in findings[3]


def test_only_strict_ordered_and_lossless_priorities_have_no_shortcomings() -> None:
    names = ", ".join(['"strict"'] * 8)
    ets = f'{{"willing": false, "tc_tsa": [{names}], "prio_tc": [0, 1, 2, 3, 4, 5, 6, 7]}}'
    pfc = '{"pfc_cap": 8, "prio_pfc": [false, false, true, true, false, false, false, false]}'
    scheduling = parse_scheduling(ets, pfc)
    assert scheduling.lossless == {2, 3}
    assert find_shortcomings([2, 3], scheduling) == []
    answers = {"app": '{"dscp_prio": [[10, 2], [11, 5]]}', "ets": ets, "pfc": pfc}
    (lossy, _) = DcbBackend("eth1", run=lambda argv: answers[argv[2]]).findings()
    assert lossy == "eth1: priorities [5] have no flow control: RoCE there must tolerate loss"
    swapped = TransmissionSelection(class_of={0: 1, 1: 0}, algorithm={0: "strict", 1: "strict"})
    assert find_shortcomings([1, 0, 1], swapped) == [
        "priority 0 is in traffic class 1, which is served before class 0 of priority 1"
    ]


def filter_row(protocol: str, value: str, mask: str, flow: str) -> dict[str, object]:
    match = {"value": value, "mask": mask, "offmask": "", "off": 0}
    return {"protocol": protocol, "kind": "u32", "options": {"flowid": flow, "match": match}}


def test_filters_count_only_if_both_ip_versions_agree() -> None:
    rows = [
        {"protocol": "ip", "pref": 10, "kind": "u32", "chain": 0},
        filter_row("ip", "680000", "fc0000", "7e5:2"),
        filter_row("ipv6", "6800000", "fc00000", "7e5:2"),
        filter_row("ip", "280000", "fc0000", "7e5:8"),
        filter_row("ipv6", "2800000", "fc00000", "7e5:7"),
        filter_row("ip", "500000", "ff0000", "7e5:1"),
    ]
    assert parse_filters(json.dumps(rows)) == {26: 6}


def test_tc_commands_create_the_discipline_and_filter_both_ip_versions() -> None:
    table = TcBackend("eth1", discipline="prio", unmarked=0, run=lambda _: "[]")
    discipline, ipv4, ipv6 = table.commands([a_change(26, None, 6)])
    assert (
        discipline
        == ("tc qdisc replace dev eth1 root handle 7e5: prio bands 8 priomap" + " 7" * 16).split()
    )
    assert " ".join(ipv4).endswith("u32 match ip dsfield 0x68 0xfc flowid 7e5:2")
    assert " ".join(ipv6).endswith("u32 match ip6 priority 0x68 0xfc flowid 7e5:2")


def test_another_discipline_and_output_that_is_not_json_are_refused() -> None:
    foreign = json.dumps([{"kind": "cake", "handle": "1:", "root": True}])
    with pytest.raises(NotAllowed, match="cake that Tessera did not make"):
        TcBackend("eth1", discipline="prio", run=lambda _: foreign).apply({1: 1})
    with pytest.raises(Unavailable, match="no JSON"):
        TcBackend("eth1", discipline="prio", run=lambda _: "qdisc").read()


class ManualClock:
    now_s = 0.0

    def __call__(self) -> float:
        return self.now_s


def settings_of(**priorities: int) -> TagSettings:
    return TagSettings(tags={}, priorities={int(tag[1:]): p for tag, p in priorities.items()})


def node_of(table: FakeInterface, clock: ManualClock) -> NodeNetwork:
    return NodeNetwork([table], clock=clock, drain_s=0.5)


def test_promotions_wait_for_a_drain_after_demotions() -> None:
    clock, table = ManualClock(), FakeInterface(t1=5, t2=3)
    node = node_of(table, clock)
    node.desired(settings_of(t1=3, t2=5, t3=4))
    assert table.writes == [{1: 3, 3: 4}]
    assert node.advance() == pytest.approx(0.5)
    clock.now_s = 0.4
    assert node.advance() == pytest.approx(0.1)
    assert len(table.writes) == 1
    clock.now_s = 0.5
    assert node.advance() is None
    assert table.writes == [{1: 3, 3: 4}, {2: 5}]


def test_a_refusal_reaches_the_caller_and_is_tried_again_after_a_drain() -> None:
    clock, table = ManualClock(), FakeInterface()
    node = node_of(table, clock)
    table.refuses = "it refused"
    with pytest.raises(Unavailable, match="refused"):
        node.desired(settings_of(t1=3))
    table.refuses = ""
    assert node.advance() == pytest.approx(0.5)
    clock.now_s = 0.5
    assert node.advance() is None
    assert table.table == {1: 3}


def test_advice_is_logged_once_and_leaves_nothing_pending(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level("INFO")
    backend = AdviceBackend("eth1")
    node = NodeNetwork([backend], clock=ManualClock())
    node.desired(settings_of(t1=3))
    node.desired(settings_of(t1=3))
    assert node.advance() is None
    (line,) = logged_lines(caplog)
    assert line.endswith(' changes="eth1: DSCP 1 to priority 3"')
    assert backend.commands([a_change(10, None, 3)]) == []
    assert "applies nothing" in backend.findings()[0]


@pytest.mark.parametrize(
    ("text", "tclass"),
    [("Global tclass=106\n", 106), ("236\n", 236), ("", None), ("Global tclass=-1\n", None)],
)
def test_the_node_reports_jobs_whose_mark_a_forced_class_hides(
    tmp_path: Path, text: str, tclass: int | None
) -> None:
    sys = make_rdma_device(tmp_path, tclass=text)
    assert rdma_devices("eth1", sys) == ("mlx5_0",)
    assert forced_traffic_classes("eth1", sys) == ({} if tclass is None else {"mlx5_0": tclass})
    assert forced_traffic_classes("eth2", sys) == {}
    node = NodeNetwork([FakeInterface()], clock=ManualClock(), sys=sys)
    tags = {"a": 12, "b": 26}
    node.desired(TagSettings(tags=tags, priorities={12: 3, 26: 3}, remarks=("said",)))
    remark, *hidden = node.findings()
    assert remark == "said"
    jobs = {None: "", 106: "a", 236: "ab"}[tclass]  # 106 is the mark of b
    assert [
        f"so the traffic of job {job}" in text for job, text in zip(jobs, hidden, strict=True)
    ] == [True for _ in jobs]
    assert node.environment("a")["NCCL_IB_TC"] == "50"
    assert node.environment("c") == {}
    unmarked = NodeNetwork([], clock=ManualClock(), launch=LaunchSettings(marks=False))
    unmarked.desired(TagSettings(tags=tags, priorities={12: 3, 26: 3}))
    assert unmarked.environment("a") == {}


def test_by_default_the_command_only_advises(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    settings = tmp_path / "s.json"
    settings.write_text('{"levels": 2, "jobs": {"a": 1, "b": 0}}')
    assert main(["network", "apply", "--settings", str(settings)]) == 0
    report = json.loads(capsys.readouterr().out)
    assert not report["interfaces"][""]["done"]
    assert report["jobs"]["a"]["NCCL_IB_SL"] == "1"


@pytest.mark.parametrize(
    ("text", "options", "why"),
    [
        ("{}", (), "must hold"),
        ('{"levels": 9, "jobs": {}}', (), "1 to 8"),
        ('{"levels": 1, "jobs": {}}', ("--network-backend", "dcb"), "name at least one"),
        ('{"levels": 1, "jobs": {}}', ("--priorities", "x"), "numbers separated by commas"),
    ],
)
def test_invalid_settings_of_the_command_are_refused(
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    text: str,
    options: tuple[str, ...],
    why: str,
) -> None:
    settings = tmp_path / "s.json"
    settings.write_text(text)
    assert main(["network", "plan", "--settings", str(settings), *options]) == 2
    assert why in capsys.readouterr().err


def test_the_environment_marks_a_job_and_its_control_messages_with_their_tags() -> None:
    settings = TagSettings(tags={"a": 26}, priorities={26: 3, CONTROL_TAG: 7})
    marks = {
        "NCCL_IB_TC": "106",  # the value that NVIDIA's guides give for DSCP 26
        "NCCL_IB_SL": "3",
        "NCCL_IB_FIFO_TC": str(CONTROL_TAG * 4 + 2),
    }
    assert marking_environment("a", settings) == marks
    assert marking_environment("b", settings) == {}
    launch = LaunchSettings(queue_pairs=4, ucx=True, hccl=True)
    others = marking_environment("a", settings, launch).items() - marks.items()
    assert dict(others) == {
        "NCCL_IB_QPS_PER_CONNECTION": "4",
        "UCX_IB_TRAFFIC_CLASS": "106",
        "UCX_IB_SL": "3",
        "HCCL_RDMA_TC": "104",  # without the bits of ECN
        "HCCL_RDMA_SL": "3",
    }


class NetworkSupervisor:
    """A supervisor with a network, on a stopped clock."""

    def __init__(self, folder: Path, *nics: Any, patience_s: float = 20.0) -> None:
        self.now_s, self.notifications = 0.0, 0
        self.runtime, self.state = EndlessRuntime(), StateDir(folder, folder / "checkpoints")
        self.state.claim()
        self._tasks: set[asyncio.Task[None]] = set()
        self.carrying = NetworkMapWorker(
            [NodeNetwork([nic], clock=lambda: self.now_s, drain_s=0.0) for nic in nics],
            clock=lambda: self.now_s,
            spawn=self._spawn,
            patience_s=patience_s,
        )
        self.supervisor = Supervisor(
            RuntimeChooser({REPLAY: self.runtime}, REPLAY),
            self.state,
            grace_s=9.0,
            spawn=self._spawn,
            changed=self._changed,
            network=self.carrying,
        )
        self._revision = 0

    def _spawn(self, work: Any) -> None:
        task = asyncio.ensure_future(work)
        self._tasks.add(task)

    def _changed(self) -> None:
        self.notifications += 1

    def hears(self, *gangs: pb.DesiredGang, **priorities: int) -> None:
        """Apply a desired state. ``t10=3`` gives tag 10 priority 3."""
        self._revision += 1
        priority_by_tag = {int(tag[1:]): p for tag, p in priorities.items()}
        tags = {g.job: g.network.dscp for g in gangs if g.HasField("network")}
        settings = TagSettings(tags=tags, priorities=priority_by_tag | {CONTROL_TAG: 7})
        self.supervisor.apply(self._revision, gangs, settings if priorities else None)

    def part(self, job: str) -> dict[str, Any]:
        """Return the part of the plan that a job's processes can read."""
        document: dict[str, Any] = json.loads(
            Path(self.runtime.started[job][PART_VARIABLE]).read_text(encoding="utf-8")
        )
        return document

    def phases(self) -> dict[str, int]:
        return {report.job: report.phase for report in self.supervisor.reports()}


def a_tagged_gang(job: str = "a", level: int = 1, dscp: int = 10, **rest: Any) -> pb.DesiredGang:
    route = pb.GangRoute(source=PATH[0], target=PATH[1], via=PATH[2])
    part = pb.GangNetwork(level=level, levels=8, dscp=dscp, routes=[route])
    return a_gang(job, network=part, **rest)


async def test_a_gang_starts_once_the_map_is_in_force_and_finds_its_mark(tmp_path: Path) -> None:
    nic = FakeInterface()
    nic.free.clear()
    agent = NetworkSupervisor(tmp_path, nic)
    agent.hears(a_tagged_gang(), t10=1)
    assert agent.runtime.started == {}
    assert agent.phases() == {}
    nic.free.set()
    await until(lambda: agent.runtime.started)
    assert nic.table == {10: 1, CONTROL_TAG: 7}
    environment = agent.runtime.started["a"]
    assert (environment["NCCL_IB_TC"], environment["NCCL_IB_SL"]) == (str(10 * 4 + 2), "1")
    assert agent.part("a") == {
        "level": 1,
        "levels": 8,
        "dscp": 10,
        "routes": [["gpu-0", "gpu-1", ["tor-0", "agg-1", "tor-1"]]],
    }


async def test_a_refusing_interface_stops_no_job_and_no_other_interface(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    bad, good = FakeInterface("eth1"), FakeInterface("eth2")
    bad.refuses = "the driver refused"
    agent = NetworkSupervisor(tmp_path, bad, good)
    agent.hears(a_tagged_gang(), t10=1)
    await until(lambda: agent.runtime.started)
    assert good.table == {10: 1, CONTROL_TAG: 7}
    assert agent.supervisor.network_remarks == ("the driver refused",)
    assert agent.notifications
    agent.hears(a_tagged_gang(level=2), t10=2)
    await until(lambda: good.table[10] == 2)
    await until(lambda: agent.carrying.settled)
    assert "\n".join(logged_lines(caplog)).count("the driver refused") == 1
    bad.refuses = ""
    agent.hears(a_tagged_gang(level=3), t10=3)
    await until(lambda: agent.supervisor.network_remarks == ())


async def test_gangs_start_without_the_map_when_a_tool_hangs(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    nic = FakeInterface()
    nic.free.clear()
    agent = NetworkSupervisor(tmp_path, nic, patience_s=0.5)
    agent.hears(a_tagged_gang(), t10=1)
    await until(lambda: agent.runtime.started)
    assert "NCCL_IB_TC" in agent.runtime.started["a"]
    assert "jobs start without it" in caplog.text
    nic.free.set()
    await until(lambda: nic.table)


async def test_without_a_topology_maps_stay_and_no_further_gang_is_marked(tmp_path: Path) -> None:
    nic = FakeInterface()
    agent = NetworkSupervisor(tmp_path, nic)
    agent.hears(a_gang())
    assert agent.runtime.started == {"a": {}}
    assert (nic.reads, agent.supervisor.network_remarks) == (0, ())
    assert not (agent.state.directory(("a", 1)) / "network.json").exists()
    agent.hears(a_gang(), a_tagged_gang("b", shares=(("n0", (4,)),)), t10=1)
    await until(lambda: "b" in agent.runtime.started)
    agent.hears(a_gang(), a_gang("c", shares=(("n0", (5,)),)))
    await until(lambda: "c" in agent.runtime.started)
    assert agent.runtime.started["c"] == {}
    assert nic.table[10] == 1


async def test_an_unchanged_map_is_checked_again_only_after_a_while(tmp_path: Path) -> None:
    nic = FakeInterface()
    agent = NetworkSupervisor(tmp_path, nic)
    agent.hears(a_tagged_gang(), t10=1)
    await until(lambda: agent.runtime.started)
    reads = nic.reads
    agent.hears(a_tagged_gang(), t10=1)
    assert agent.carrying.settled
    nic.table[10] = 5  # by another program
    agent.now_s = RECHECK_S
    agent.hears(a_tagged_gang(), t10=1)
    assert agent.carrying.settled  # nothing waits for a second check
    await until(lambda: nic.table[10] == 1)
    assert nic.reads > reads


def a_message(tag: int, **priorities: int) -> pb.Desired:
    part = pb.GangNetwork(level=2, levels=8, dscp=tag)
    return pb.Desired(
        gangs=[pb.DesiredGang(job="a", generation=1, network=part)],
        network=pb.NetworkMap(
            priorities={int(t[1:]): p for t, p in priorities.items()}, control_dscp=40
        ),
    )


def test_network_settings_are_read_from_messages_and_missing_ones_are_none() -> None:
    assert settings_from_message(pb.Desired()) is None
    assert settings_from_message(a_message(10, t10=2, t40=7)) == TagSettings(
        tags={"a": 10}, priorities={10: 2, 40: 7}, control_tag=40
    )
    assert settings_from_message(a_message(-1, t40=7)) == TagSettings(
        tags={}, priorities={40: 7}, control_tag=40
    )


@pytest.mark.parametrize("tag", [11, 64])
def test_a_tag_without_a_priority_is_left_out_and_logged(tag: int) -> None:
    settings = settings_from_message(a_message(tag, t10=2, t64=3, t12=9))
    assert settings is not None
    assert (dict(settings.tags), dict(settings.priorities)) == ({}, {10: 2})
    assert settings.remarks == (
        f"job a has DSCP tag {tag}, but the servers sent no priority for this tag",
    )
