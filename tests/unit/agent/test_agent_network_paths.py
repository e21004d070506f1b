"""Source ports that select paths, turns on shared links, and the period of traffic."""

from __future__ import annotations

from contextlib import ExitStack
from pathlib import Path

import numpy as np
import pytest

from tessera.formulation.errors import InvalidInput, Unavailable
from tessera.formulation.tables import Floats
from tessera.service.agent.network.counters import find_counters, sample_counter
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
from tessera.service.agent.network.period import find_period
from tessera.service.agent.network.turns import LinkTurns, make_turn_directory


def test_ports_follow_the_kernels_rule() -> None:
    # By hand: 0x123 * 0x456 = 0x4EDC2 is below 2^20, so folding changes nothing. The
    # low 14 bits 0x2DC2 xor the high 6 bits 0x13 are 0x2DD1; with 0xC000 set: 0xEDD1.
    assert flow_label_of(0x123, 0x456) == 0x4EDC2
    assert source_port(0, 0x123, 0x456) == 0xEDD1
    # 0xFFFFFF squared is 0xFFFFFE000001. Xor with its bits from 20 up, 0xFFFFFE0, is
    # 0xFFFFF1FFFFE1. Xor with its bits from 40 up, 0xFF, is 0xFFFFF1FFFF1E; 20 bits remain.
    assert flow_label_of(0xFFFFFF, 0xFFFFFF) == 0xFFF1E
    assert source_port(5, 0x123, 0x456) == FIRST_PORT + 5


def test_both_ends_derive_the_same_port() -> None:
    numbers = np.random.default_rng(3).integers(0, 1 << 24, (200, 2))
    for local, remote in numbers.tolist():
        port = source_port(0, local, remote)
        assert port == source_port(0, remote, local)
        assert FIRST_PORT <= port < FIRST_PORT + PORT_COUNT


def test_each_port_has_a_flow_label_that_leads_to_it() -> None:
    for port in range(FIRST_PORT, FIRST_PORT + PORT_COUNT, 7):
        assert flow_label_for(port) != 0
        assert source_port(flow_label_for(port)) == port


def test_candidate_ports_are_distinct() -> None:
    assert sorted(candidate_ports(PORT_COUNT)) == list(range(FIRST_PORT, FIRST_PORT + PORT_COUNT))
    with pytest.raises(InvalidInput, match="count"):
        candidate_ports(PORT_COUNT + 1)


@pytest.mark.parametrize(
    "wrong",
    [lambda: source_port(1 << 20), lambda: flow_label_of(1 << 24, 0), lambda: flow_label_for(4791)],
)
def test_numbers_out_of_range_are_refused(wrong: object) -> None:
    with pytest.raises(InvalidInput):
        wrong()  # type: ignore[operator]


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
    """A clock that advances only when its ``sleep`` is called."""

    def __init__(self) -> None:
        self.now_s = 0.0

    def clock(self) -> float:
        return self.now_s

    def sleep(self, seconds: float) -> None:
        self.now_s += seconds


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
        with low.hold("0000:3d:00.0") as elsewhere_s:
            assert elsewhere_s == 0
        with high.hold("0000:17:00.0") as together_s:
            assert together_s == 0
    with low.hold("0000:17:00.0") as waited_s:
        assert waited_s == 0
        with middle.hold("0000:17:00.0") as above_s:
            assert above_s == 0


def test_a_lower_level_continues_as_soon_as_the_higher_one_is_done(tmp_path: Path) -> None:
    time = SleepingClock()
    directory = make_turn_directory(tmp_path / "pcie")
    higher = ExitStack()
    higher.enter_context(make_turns(directory, 2, time).hold("x"))

    def sleep(seconds: float) -> None:
        time.sleep(seconds)
        if time.now_s > 0.003:
            higher.close()

    low = LinkTurns(
        directory=directory, level=0, levels=3, clock=time.clock, sleep=sleep, patience_s=1.0
    )
    with low.hold("x") as waited_s:
        assert 0.003 < waited_s < 0.004


def test_meaningless_turns_are_refused(tmp_path: Path) -> None:
    with pytest.raises(InvalidInput, match="level"):
        make_turns(tmp_path, 3, SleepingClock())


def trace_of(
    period_s: float,
    *,
    bursts: tuple[float, ...] = (0.0,),
    jitter: float = 0.0,
    noise: float = 0.0,
    step_s: float = 0.01,
    seconds: float = 30.0,
    seed: int = 1,
) -> tuple[Floats, Floats]:
    """Return times and a counter of 1e6 bytes an iteration.

    Each of ``bursts`` starts at that share of an iteration and lasts a fifth of it.
    """
    draw = np.random.default_rng(seed)
    count = round(seconds / step_s)
    times = np.cumsum(step_s * (1 + 0.2 * draw.uniform(-1, 1, count)))
    lengths = period_s * (1 + jitter * draw.standard_normal(count))
    starts = np.concatenate([[0.0], np.cumsum(np.maximum(lengths, 0.1 * period_s))])
    sent = np.zeros(count)
    for share in bursts:
        begun = (starts + share * period_s)[:, None]
        sent_share = np.clip((times - begun[starts < times[-1]]) / (0.2 * period_s), 0, 1)
        sent += 1e6 / len(bursts) * sent_share.sum(axis=0)
    background = np.cumsum(noise * 1e6 / period_s * step_s * draw.exponential(1.0, count))
    return times, np.floor(sent + background)


@pytest.mark.parametrize(
    ("period_s", "bursts", "jitter", "noise"),
    [
        (0.5, (0.0,), 0.0, 0.0),
        (0.5, (0.0, 0.5), 0.0, 0.1),  # equal bursts forward and backward: half the period repeats
        (1.37, (0.0, 0.3, 0.6), 0.0, 0.3),
        (0.237, (0.0, 0.31), 0.02, 0.2),
        (2.9, (0.1, 0.45), 0.01, 0.2),
    ],
)
def test_the_period_and_bytes_of_an_iteration_are_found(
    period_s: float, bursts: tuple[float, ...], jitter: float, noise: float
) -> None:
    measurement = find_period(*trace_of(period_s, bursts=bursts, jitter=jitter, noise=noise))
    assert measurement is not None
    whole = 0.25 if bursts == (0.0, 0.5) else period_s
    assert measurement.period_s == pytest.approx(whole, rel=0.01)
    assert measurement.bytes == pytest.approx(1e6 * (1 + noise) * whole / period_s, rel=0.03)
    assert measurement.confidence > 0.5


def test_unequal_halves_of_an_iteration_are_not_mistaken_for_the_period() -> None:
    times, forward = trace_of(0.5, bursts=(0.0,))
    _, backward = trace_of(0.5, bursts=(0.5,))
    measurement = find_period(times, forward + 0.4 * backward)
    assert measurement is not None
    assert measurement.period_s == pytest.approx(0.5, rel=0.01)


@pytest.mark.parametrize("seed", range(20))
def test_noise_alone_has_no_period(seed: int) -> None:
    draw = np.random.default_rng(seed)
    times = 0.01 * np.arange(600.0)
    assert find_period(times, np.cumsum(draw.exponential(1e4, 600))) is None


def test_steady_or_absent_traffic_has_no_period() -> None:
    times = 0.01 * np.arange(600.0)
    assert find_period(times, 1e4 * np.arange(600.0)) is None
    assert find_period(times, np.zeros(600)) is None


def test_a_counter_that_is_reset_does_not_hide_the_period() -> None:
    times, counts = trace_of(0.5)
    counts = np.where(times > 15, counts - counts[times > 15][0], counts)
    measurement = find_period(times, counts)
    assert measurement is not None
    assert measurement.period_s == pytest.approx(0.5, rel=0.01)


def test_too_few_samples_and_nonincreasing_times_are_refused() -> None:
    with pytest.raises(InvalidInput, match="at least 32"):
        find_period(np.arange(5.0), np.arange(5.0))
    with pytest.raises(InvalidInput, match="rise"):
        find_period(np.zeros(40), np.arange(40.0))
    with pytest.raises(InvalidInput, match="finite"):
        find_period(np.arange(40.0), np.full(40, np.nan))


def test_counters_of_interfaces_and_rdma_ports_are_read_in_bytes(tmp_path: Path) -> None:
    net = tmp_path / "class/net/eth1/statistics"
    port = tmp_path / "class/infiniband/mlx5_0/ports/1/counters"
    for folder, name, text in (
        (net, "tx_bytes", "7\n"),
        (net, "rx_bytes", "9\n"),
        (port, "port_xmit_data", "5\n"),
        (port, "port_rcv_data", "6\n"),
    ):
        folder.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text(text)
    assert {c.name: c.read() for c in find_counters(tmp_path)} == {"eth1": 7, "mlx5_0/1": 20}
    received = find_counters(tmp_path, received=True)
    assert {c.name: c.read() for c in received} == {"eth1": 9, "mlx5_0/1": 24}
    (net / "rx_bytes").unlink()
    with pytest.raises(Unavailable, match="rx_bytes"):
        received[0].read()


def test_sampling_keeps_its_pace_after_a_late_sample() -> None:
    time = SleepingClock()

    def read() -> int:
        time.now_s += 0.025 if 0.09 < time.now_s < 0.11 else 0.001
        return 1

    times_s, values = sample_counter(
        read, step_s=0.01, count=20, clock=time.clock, sleep=time.sleep
    )
    assert len(values) == 20
    assert times_s[-1] == pytest.approx(0.19)
