"""A node's network: when tag maps are written, which remarks are made, and the command."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path

import pytest

from tessera.formulation.errors import InvalidInput, Unavailable
from tessera.formulation.network.tags import TagSettings
from tessera.service.agent.main import main
from tessera.service.agent.network.backend import AdviceBackend, MapChange, find_differences
from tessera.service.agent.network.devices import (
    find_steering,
    forced_traffic_classes,
    rdma_devices,
)
from tessera.service.agent.network.launch import LaunchSettings
from tessera.service.agent.network.node import NodeNetwork
from tests.support.logged import logged_lines


class RecordingBackEnd:
    """A back end that accepts every map and records it in ``writes``."""

    interface = "eth1"
    dry_run = False

    def __init__(self, **found: int) -> None:
        self.table = {int(tag[1:]): priority for tag, priority in found.items()}
        self.writes: list[dict[int, int]] = []
        self.broken = False

    def read(self) -> dict[int, int]:
        return dict(self.table)

    def apply(self, wanted: Mapping[int, int]) -> tuple[MapChange, ...]:
        if self.broken:
            raise Unavailable("the driver refused")
        changes = find_differences(self.interface, self.table, wanted)
        self.table |= wanted
        self.writes.append(dict(wanted))
        return changes

    def commands(self, changes: Sequence[MapChange]) -> list[list[str]]:
        return []

    def findings(self) -> tuple[str, ...]:
        return ()


class ManualClock:
    now_s = 0.0

    def __call__(self) -> float:
        return self.now_s


def settings_of(**priorities: int) -> TagSettings:
    return TagSettings(tags={}, priorities={int(tag[1:]): p for tag, p in priorities.items()})


def node_of(table: RecordingBackEnd, clock: ManualClock) -> NodeNetwork:
    return NodeNetwork([table], clock=clock, drain_s=0.5)


def test_promotions_wait_for_a_drain_after_demotions() -> None:
    clock, table = ManualClock(), RecordingBackEnd(t1=5, t2=3)
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


def test_applying_the_same_settings_again_writes_nothing() -> None:
    clock, table = ManualClock(), RecordingBackEnd()
    node = node_of(table, clock)
    node.desired(settings_of(t1=3))
    clock.now_s = 9.0
    node.desired(settings_of(t1=3))
    assert table.writes == [{1: 3}]
    assert node.advance() is None


def test_newer_settings_within_the_drain_replace_pending_promotions() -> None:
    clock, table = ManualClock(), RecordingBackEnd(t1=5, t2=3)
    node = node_of(table, clock)
    node.desired(settings_of(t1=3, t2=5))
    clock.now_s = 0.1
    node.desired(settings_of(t1=3, t2=3))
    clock.now_s = 1.0
    assert node.advance() is None
    assert table.writes == [{1: 3}]


def test_foreign_changes_are_reverted() -> None:
    clock, table = ManualClock(), RecordingBackEnd()
    node = node_of(table, clock)
    node.desired(settings_of(t1=3))
    table.table[1] = 0
    clock.now_s = 1.0
    assert node.advance() is None
    assert table.table == {1: 3}


def test_a_refusal_reaches_the_caller_and_is_tried_again_after_a_drain() -> None:
    clock, table = ManualClock(), RecordingBackEnd()
    node = node_of(table, clock)
    table.broken = True
    with pytest.raises(Unavailable, match="refused"):
        node.desired(settings_of(t1=3))
    table.broken = False
    assert node.advance() == pytest.approx(0.5)
    clock.now_s = 0.5
    assert node.advance() is None
    assert table.table == {1: 3}


def test_advice_is_logged_once_and_leaves_nothing_pending(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level("INFO")
    node = NodeNetwork([AdviceBackend("eth1")], clock=ManualClock())
    node.desired(settings_of(t1=3))
    node.desired(settings_of(t1=3))
    assert node.advance() is None
    (line,) = logged_lines(caplog)
    assert line.endswith(' changes="eth1: DSCP 1 to priority 3"')


def test_a_negative_drain_is_refused() -> None:
    with pytest.raises(InvalidInput, match="drain_s"):
        NodeNetwork([], clock=ManualClock(), drain_s=-1)


def make_rdma_device(
    sys: Path, *, driver: str = "mlx5_core", layer: str = "Ethernet", tclass: str = ""
) -> Path:
    base = sys / "class/infiniband/mlx5_0"
    (base / "device/net/eth1").mkdir(parents=True)
    (sys / "drivers" / driver).mkdir(parents=True)
    (base / "device/driver").symlink_to(sys / "drivers" / driver)
    (base / "ports/1").mkdir(parents=True)
    (base / "ports/1/link_layer").write_text(layer + "\n")
    (base / "tc/1").mkdir(parents=True)
    (base / "tc/1/traffic_class").write_text(tclass)
    return sys


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("Global tclass=106\n", 106),
        ("236\n", 236),
        ("Global tclass=0\n", 0),
        ("", None),
        ("Global tclass=-1\n", None),
    ],
)
def test_a_forced_traffic_class_is_found(tmp_path: Path, text: str, value: int | None) -> None:
    sys = make_rdma_device(tmp_path, tclass=text)
    assert rdma_devices("eth1", sys) == ("mlx5_0",)
    assert forced_traffic_classes("eth1", sys) == ({} if value is None else {"mlx5_0": value})
    assert forced_traffic_classes("eth2", sys) == {}


def test_the_node_reports_jobs_whose_mark_a_forced_class_hides(tmp_path: Path) -> None:
    table = RecordingBackEnd()
    node = NodeNetwork(
        [table], clock=ManualClock(), sys=make_rdma_device(tmp_path, tclass="Global tclass=106")
    )
    node.desired(TagSettings(tags={"a": 12}, priorities={12: 3}, remarks=("said",)))
    remark, hidden = node.findings()
    assert remark == "said"
    assert "mlx5_0 forces traffic class 106, so the traffic of job a" in hidden
    assert node.environment("a")["NCCL_IB_TC"] == "50"
    assert node.environment("b") == {}


def test_jobs_are_not_marked_if_no_back_end_maps_marks() -> None:
    node = NodeNetwork([], clock=ManualClock(), launch=LaunchSettings(marks=False))
    node.desired(TagSettings(tags={"a": 12}, priorities={12: 3}))
    assert node.environment("a") == {}


def test_a_path_can_be_steered_only_if_nic_fabric_and_transport_allow_it(tmp_path: Path) -> None:
    sys = make_rdma_device(tmp_path)
    good = find_steering("mlx5_0", adaptive_routing=False, transport_moves_ports=True, sys=sys)
    assert (good.steerable, good.reason) == (True, "mlx5dv_modify_qp_udp_sport")
    for adaptive, moves, why in (
        (True, True, "adaptive routing"),
        (False, False, "transport does not"),
    ):
        steering = find_steering(
            "mlx5_0", adaptive_routing=adaptive, transport_moves_ports=moves, sys=sys
        )
        assert not steering.steerable
        assert steering.reason.startswith("not steerable: ")
        assert why in steering.reason


@pytest.mark.parametrize(
    ("driver", "layer", "why"),
    [("irdma", "Ethernet", "driver irdma"), ("mlx5_core", "InfiniBand", "InfiniBand routes")],
)
def test_other_nics_and_infiniband_cannot_be_steered(
    tmp_path: Path, driver: str, layer: str, why: str
) -> None:
    sys = make_rdma_device(tmp_path, driver=driver, layer=layer)
    steering = find_steering("mlx5_0", adaptive_routing=False, transport_moves_ports=True, sys=sys)
    assert not steering.steerable
    assert why in steering.reason
    gone = find_steering("mlx5_9", adaptive_routing=False, transport_moves_ports=True, sys=sys)
    assert "no such RDMA device" in gone.reason


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
