"""Back ends that write the tag map of an interface: ``dcb``, ``mlnx_qos`` and ``tc``."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass, field

import pytest

from tessera.formulation.errors import InvalidInput, NotAllowed, Unavailable
from tessera.service.agent.network.backend import (
    AdviceBackend,
    MapChange,
    find_differences,
    split_stages,
)
from tessera.service.agent.network.commands import run_command
from tessera.service.agent.network.dcb import DcbBackend, parse_scheduling
from tessera.service.agent.network.dcb import parse_priorities as parse_dcb
from tessera.service.agent.network.mlnx import MlnxQosBackend
from tessera.service.agent.network.mlnx import parse_state as parse_mlnx
from tessera.service.agent.network.scheduling import TransmissionSelection, find_shortcomings
from tessera.service.agent.network.tc import TcBackend, parse_filters

TRUSTED = """\
DCBX mode: OS controlled
Priority trust state: dscp
dscp2prio mapping:
\tprio:0 dscp:07,06,05,04,03,02,01,00,
\tprio:3 dscp:31,30,29,28,27,25,24,
\tprio:6 dscp:26,55,54,53,52,51,50,49,
\tprio:6 dscp:48,
default priority:
Receive buffer size (bytes): 130944,130944,0,0,0,0,0,0,
Cable len: 7
PFC configuration:
\tpriority    0   1   2   3   4   5   6   7
\tenabled     0   0   0   1   0   0   0   0   
\tbuffer      0   0   0   1   0   0   0   0   
tc: 0 ratelimit: unlimited, tsa: vendor
\t priority:  1
\t priority:  0
tc: 3 ratelimit: unlimited, tsa: ets, bw: 50%
\t priority:  3
\t priority:  6
"""  # noqa: W291 - as the tool prints it
PCP = TRUSTED.replace("state: dscp", "state: pcp")


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


def test_only_differing_entries_are_written_and_none_the_second_time() -> None:
    driver = FakeDcb({10: 3, 11: 4, 50: 5})
    table = DcbBackend("eth1", run=driver, dry_run=False)
    assert table.apply({10: 3, 11: 5, 12: 0}) == (a_change(11, 4, 5), a_change(12, None, 0))
    assert ["dcb", "app", "replace", "dev", "eth1", "dscp-prio", "11:5", "12:0"] in driver.ran
    assert driver.table == {10: 3, 11: 5, 12: 0, 50: 5}
    driver.ran.clear()
    assert table.apply({10: 3, 11: 5, 12: 0}) == ()
    assert [argv[:4] for argv in driver.ran] == [["dcb", "-j", "app", "show"]]


def test_a_dry_run_is_the_default_and_writes_nothing() -> None:
    driver = FakeDcb()
    assert DcbBackend("eth1", run=driver).apply({10: 3}) == (a_change(10, None, 3),)
    assert driver.table == {}


def test_a_map_that_does_not_read_back_is_an_error_that_shows_the_actual_map() -> None:
    driver = FakeDcb({10: 1}, obeys=False)
    with pytest.raises(Unavailable, match="tag 10 is 1, not 3, tag 11 is not mapped, not 2"):
        DcbBackend("eth1", run=driver, dry_run=False).apply({10: 3, 11: 2})


def test_a_tag_with_two_priorities_counts_as_unmapped_and_is_replaced() -> None:
    assert parse_dcb('{"dscp_prio":[[0,0],[24,2],[24,3],[48,6]]}') == {0: 0, 48: 6}


@pytest.mark.parametrize(("text", "expected"), [("", {}), ("{}", {}), ('{"default_prio":[1]}', {})])
def test_an_empty_table_maps_nothing(text: str, expected: dict[int, int]) -> None:
    assert parse_dcb(text) == expected


@pytest.mark.parametrize("text", ["dscp-prio 0:0", "[]", '{"dscp_prio":[["x"]]}'])
def test_malformed_dcb_output_is_refused(text: str) -> None:
    with pytest.raises(Unavailable, match="cannot read"):
        parse_dcb(text)


def test_maps_with_invalid_tags_or_priorities_are_refused() -> None:
    with pytest.raises(InvalidInput, match="0 to 63"):
        find_differences("eth1", {}, {64: 0})
    with pytest.raises(InvalidInput, match="0 to 7"):
        find_differences("eth1", {}, {1: 8})


def test_promotions_follow_new_entries_and_demotions() -> None:
    new, down, up = a_change(1, None, 7), a_change(2, 5, 3), a_change(3, 3, 5)
    assert split_stages([up, new, down]) == ((new, down), (up,))


def test_mlnx_qos_output_with_continued_rows_and_shared_classes_is_parsed() -> None:
    state = parse_mlnx(TRUSTED)
    assert state.trust == "dscp"
    assert (state.priorities[26], state.priorities[48], state.priorities[7]) == (6, 6, 0)
    assert len(state.priorities) == 24
    assert state.scheduling == TransmissionSelection(
        class_of={1: 0, 0: 0, 3: 3, 6: 3},
        algorithm={0: "vendor", 3: "ets"},
        lossless=frozenset({3}),
    )


def test_nonstrict_shared_or_lossy_priorities_are_reported_with_the_command_that_fixes_them() -> (
    None
):
    findings = MlnxQosBackend("eth1", run=lambda _: TRUSTED).findings()
    assert findings[:3] == (
        "eth1: priorities [0, 3, 6] are scheduled by ets, vendor, not strictly",
        "eth1: priorities 3 and 6 share traffic class 3",
        "eth1: priorities [0, 6] have no flow control: RoCE there must tolerate loss",
    )
    assert "mlnx_qos -i eth1 -p 0,1,2,3,4,5,6,7 -s strict,strict" in findings[3]


def test_priorities_with_swapped_classes_are_reported() -> None:
    swapped = TransmissionSelection(class_of={0: 1, 1: 0}, algorithm={0: "strict", 1: "strict"})
    assert find_shortcomings([1, 0, 1], swapped) == [
        "priority 0 is in traffic class 1, which is served before class 0 of priority 1"
    ]


def test_a_strict_ordered_lossless_nic_has_no_shortcomings() -> None:
    names = ", ".join(['"strict"'] * 8)
    ets = f'{{"willing": false, "tc_tsa": [{names}], "prio_tc": [0, 1, 2, 3, 4, 5, 6, 7]}}'
    pfc = '{"pfc_cap": 8, "prio_pfc": [false, false, true, true, false, false, false, false]}'
    scheduling = parse_scheduling(ets, pfc)
    assert scheduling.lossless == {2, 3}
    assert find_shortcomings([2, 3], scheduling) == []
    answers = {"app": '{"dscp_prio": [[10, 2], [11, 5]]}', "ets": ets, "pfc": pfc}
    findings = DcbBackend("eth1", run=lambda argv: answers[argv[2]]).findings()
    assert findings[0] == "eth1: priorities [5] have no flow control: RoCE there must tolerate loss"
    assert len(findings) == 2
    with pytest.raises(Unavailable, match="dcb -j ets show"):
        parse_scheduling("[]", "")


def test_an_interface_that_trusts_pcp_counts_as_unmapped_and_is_set_to_dscp_first() -> None:
    table = MlnxQosBackend("eth1", run=lambda _: PCP)
    assert table.read() == {}
    assert table.findings() == ("eth1: trusts pcp, so DSCP tags have no effect yet",)
    base = ["mlnx_qos", "-i", "eth1"]
    assert table.commands([a_change(26, None, 3), a_change(27, None, 4)]) == [
        [*base, "--trust", "dscp"],
        [*base, "--dscp2prio", "set,26,3", "--dscp2prio", "set,27,4"],
    ]


def test_an_interface_that_trusts_dscp_gets_only_the_entries() -> None:
    table = MlnxQosBackend("eth1", run=lambda _: TRUSTED)
    assert table.commands(table.apply({26: 3, 27: 3})) == [
        ["mlnx_qos", "-i", "eth1", "--dscp2prio", "set,26,3"]
    ]


def test_output_of_another_tool_than_mlnx_qos_is_refused() -> None:
    with pytest.raises(Unavailable, match="no trust state"):
        parse_mlnx("Interface name is required")


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


def test_htb_without_the_links_rate_is_refused() -> None:
    with pytest.raises(InvalidInput, match="the link's rate"):
        TcBackend("eth1")


def test_the_none_back_end_reports_the_requested_changes_once() -> None:
    none = AdviceBackend("eth1")
    assert none.apply({10: 3}) == (a_change(10, None, 3),)
    assert none.apply({10: 3}) == ()
    assert none.commands([a_change(10, None, 3)]) == []
    assert "applies nothing" in none.findings()[0]


def test_a_missing_tool_and_a_failed_command_are_named_with_what_to_do() -> None:
    with pytest.raises(Unavailable, match="no-such-tool is not installed"):
        run_command(["no-such-tool", "x"])
    with pytest.raises(
        Unavailable, match=r"`sh -c .* ended with 3: not permitted; run the agent as root"
    ):
        run_command(["sh", "-c", "echo not permitted >&2; exit 3"])
