"""Paths and turns for programs of users: source ports, steering, and turns on shared links."""

from __future__ import annotations

import math
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path

import numpy as np
import pytest

from tessera.formulation.errors import InvalidInput
from tessera.service.agent.network.devices import (
    find_steering,
)
from tessera.service.agent.network.paths import (
    FIRST_PORT,
    PORT_COUNT,
    candidate_ports,
    flow_label_for,
    flow_label_of,
    port_for,
    ports_by_path,
    source_port,
)
from tessera.service.agent.network.turns import LinkTurns, make_turn_directory
from tests.support.rdma import make_rdma_device


def test_ports_follow_the_kernels_rule() -> None:
    # By hand: 0x123 * 0x456 = 0x4EDC2 is below 2^20, so folding changes nothing. The
    # low 14 bits 0x2DC2 xor the high 6 bits 0x13 are 0x2DD1; with 0xC000 set: 0xEDD1.
    assert flow_label_of(0x123, 0x456) == 0x4EDC2
    assert source_port(0, 0x123, 0x456) == 0xEDD1
    # 0xFFFFFF squared is 0xFFFFFE000001. Xor with its bits from 20 up, 0xFFFFFE0, is
    # 0xFFFFF1FFFFE1. Xor with its bits from 40 up, 0xFF, is 0xFFFFF1FFFF1E; 20 bits remain.
    assert flow_label_of(0xFFFFFF, 0xFFFFFF) == 0xFFF1E
    assert source_port(5, 0x123, 0x456) == FIRST_PORT + 5


def test_both_ends_derive_the_same_port_and_each_port_has_a_flow_label() -> None:
    numbers = np.random.default_rng(3).integers(0, 1 << 24, (200, 2))
    for local, remote in numbers.tolist():
        port = source_port(0, local, remote)
        assert port == source_port(0, remote, local)
        assert FIRST_PORT <= port < FIRST_PORT + PORT_COUNT
    for port in range(FIRST_PORT, FIRST_PORT + PORT_COUNT, 7):
        assert flow_label_for(port) != 0
        assert source_port(flow_label_for(port)) == port
    assert sorted(candidate_ports(PORT_COUNT)) == list(range(FIRST_PORT, FIRST_PORT + PORT_COUNT))


@pytest.mark.parametrize(
    "wrong",
    [
        lambda: source_port(1 << 20),
        lambda: flow_label_of(1 << 24, 0),
        lambda: flow_label_for(4791),
        lambda: candidate_ports(PORT_COUNT + 1),
    ],
)
def test_numbers_out_of_range_are_refused(wrong: Callable[[], object]) -> None:
    with pytest.raises(InvalidInput):
        wrong()


def test_a_port_is_found_that_hashes_onto_the_wanted_path() -> None:
    def probe(port: int) -> str | None:
        return None if port % 3 == 0 else f"spine{port % 5}"

    ports = candidate_ports(60)
    port_of_path = ports_by_path(probe, ports)
    assert sum(map(len, port_of_path.values())) == sum(port % 3 != 0 for port in ports)
    for path, of_it in port_of_path.items():
        assert port_for(path, probe, ports) == of_it[0]
    assert port_for("spine9", probe, ports) is None


def test_a_port_with_an_unstable_path_is_not_used() -> None:
    probed: list[int] = []

    def probe(port: int) -> int:
        probed.append(port)
        return probed.count(port) % 2 if port == FIRST_PORT else 1

    assert port_for(1, probe, [FIRST_PORT, FIRST_PORT + 1]) == FIRST_PORT + 1


class SleepingClock:
    """A clock that advances only when its ``sleep`` is called, and wakes something once."""

    def __init__(self) -> None:
        self.now_s = 0.0
        self.wakes: tuple[float, Callable[[], object]] = (math.inf, lambda: None)

    def clock(self) -> float:
        return self.now_s

    def sleep(self, seconds: float) -> None:
        self.now_s += seconds
        if self.now_s > self.wakes[0]:
            self.wakes[1]()


def make_turns(directory: Path, level: int, time: SleepingClock) -> LinkTurns:
    return LinkTurns(
        directory=directory,
        level=level,
        levels=3,
        clock=time.clock,
        sleep=time.sleep,
        patience_s=0.01,
    )


def test_a_link_in_the_place_of_the_turns_is_refused_and_its_target_stays_closed(
    tmp_path: Path,
) -> None:
    target = tmp_path / "target"
    target.mkdir(mode=0o700)
    (tmp_path / "pcie").symlink_to(target)
    with pytest.raises(OSError, match="pcie"):
        make_turn_directory(tmp_path / "pcie")
    assert target.stat().st_mode & 0o7777 == 0o700


def test_a_lower_level_waits_while_a_higher_one_holds_but_not_for_ever(tmp_path: Path) -> None:
    time = SleepingClock()
    directory = make_turn_directory(tmp_path / "pcie")
    low, middle, high = (make_turns(directory, level, time) for level in range(3))
    with high.hold("0000:17:00.0"):
        with middle.hold("0000:17:00.0") as waited_s:
            assert 0.01 <= waited_s < 0.02
        with low.hold("0000:3d:00.0") as elsewhere_s, high.hold("0000:17:00.0") as together_s:
            assert (elsewhere_s, together_s) == (0, 0)
    with low.hold("0000:17:00.0") as waited_s, middle.hold("0000:17:00.0") as above_s:
        assert (waited_s, above_s) == (0, 0)
    with ExitStack() as higher:
        higher.enter_context(high.hold("x"))
        time.wakes = (time.now_s + 0.003, higher.close)  # it is done before the patience ends
        with low.hold("x") as waited_s:
            assert 0.003 < waited_s < 0.004
    with pytest.raises(InvalidInput, match="level"):
        make_turns(tmp_path, 3, time)


@pytest.mark.parametrize(
    ("device", "changes", "reason"),
    [
        ({}, {}, ""),
        ({}, {"adaptive_routing": True}, "adaptive routing"),
        ({}, {"transport_moves_ports": False}, "transport does not"),
        ({"driver": "irdma"}, {}, "driver irdma"),
        ({"layer": "InfiniBand"}, {}, "InfiniBand routes"),
    ],
)
def test_a_path_can_be_steered_only_if_nic_fabric_and_transport_allow_it(
    tmp_path: Path, device: dict[str, str], changes: dict[str, bool], reason: str
) -> None:
    usual = {"adaptive_routing": False, "transport_moves_ports": True}
    steering = find_steering("mlx5_0", **usual | changes, sys=make_rdma_device(tmp_path, **device))
    assert steering.steerable is not bool(reason)
    assert (reason or "mlx5dv_modify_qp_udp_sport") in steering.reason
    assert steering.reason.startswith("not steerable: ") is bool(reason)
    gone = find_steering("mlx5_9", **usual, sys=tmp_path)
    assert "no such RDMA device" in gone.reason
