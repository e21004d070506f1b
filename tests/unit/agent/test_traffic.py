"""Measured traffic of gangs: the period of bursts, the counters, and windows in which one gang sends."""

from __future__ import annotations

import asyncio
import math
from collections.abc import Mapping
from pathlib import Path

import numpy as np
import pytest

from tessera.formulation.base.errors import InvalidInput, Unavailable
from tessera.formulation.base.tables import Floats
from tessera.formulation.job.runtimes import REPLAY
from tessera.service.agent.network.counters import sample_counter
from tessera.service.agent.network.period import find_period
from tessera.service.agent.network.sampling import (
    MAX_IRREGULAR_WINDOWS,
    MIN_CONFIDENCE,
    Analyse,
    CounterSamples,
    TrafficMeasurement,
    TrafficSampler,
    analysed_apart,
    sent_bytes_reader,
)
from tessera.service.agent.runtimes.protocol import (
    RuntimeChooser,
)
from tessera.service.agent.state import StateDir
from tessera.service.agent.supervisor import Supervisor
from tessera.service.server.convert.agents import to_observed
from tessera.v1 import agents_pb2 as pb
from tests.support.agent_fakes import EndlessRuntime
from tests.support.agents import a_gang, until
from tests.support.logged import logged_lines
from tests.support.patience import PATIENCE_S


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


def test_unequal_halves_and_a_reset_counter_do_not_hide_the_period() -> None:
    times, forward = trace_of(0.5, bursts=(0.0,))
    _, backward = trace_of(0.5, bursts=(0.5,))
    reset = np.where(times > 15, forward - forward[times > 15][0], forward)
    for counts in (forward + 0.4 * backward, reset):
        measurement = find_period(times, counts)
        assert measurement is not None
        assert measurement.period_s == pytest.approx(0.5, rel=0.01)


@pytest.mark.parametrize("seed", range(20))
def test_noise_alone_has_no_period(seed: int) -> None:
    draw = np.random.default_rng(seed)
    times = 0.01 * np.arange(600.0)
    assert find_period(times, np.cumsum(draw.exponential(1e4, 600))) is None
    assert find_period(times, seed * 1e4 * np.arange(600.0)) is None  # steady, or none at all


def test_too_few_samples_and_nonincreasing_times_are_refused() -> None:
    with pytest.raises(InvalidInput, match="at least 32"):
        find_period(np.arange(5.0), np.arange(5.0))
    with pytest.raises(InvalidInput, match="rise"):
        find_period(np.zeros(40), np.arange(40.0))
    with pytest.raises(InvalidInput, match="finite"):
        find_period(np.arange(40.0), np.full(40, np.nan))


def test_sampling_keeps_its_pace_after_a_late_sample() -> None:
    now_s = 0.0

    def sleep(seconds: float) -> None:
        nonlocal now_s
        now_s += seconds

    def read() -> int:
        sleep(0.025 if 0.09 < now_s < 0.11 else 0.001)
        return 1

    times_s, values = sample_counter(read, step_s=0.01, count=20, clock=lambda: now_s, sleep=sleep)
    assert len(values) == 20
    assert times_s[-1] == pytest.approx(0.19)


PERIOD_S, BYTES = 0.52, 3e8


class SimulatedWire:
    """A node's byte counter: bursts of a job, and noise. Only sleeping advances its clock."""

    def __init__(self, period_s: float = PERIOD_S, noise: float = 0.02, seed: int = 1) -> None:
        self.now_s, self.period_s, self._noise = 0.0, period_s, noise
        self._rng = np.random.default_rng(seed)
        self._other = 0.0
        self.failing = ""

    def clock(self) -> float:
        return self.now_s

    def sleep(self, seconds: float) -> None:
        self.now_s += seconds * float(self._rng.uniform(1.0, 1.02))  # it never wakes early

    def read(self) -> int:
        """Return the counter. An iteration's bytes are sent evenly in its last third."""
        if self.failing:
            raise Unavailable(self.failing)
        whole, part = divmod(self.now_s / self.period_s, 1.0)
        self._other += float(self._rng.exponential(self._noise * BYTES * 0.01 / self.period_s))
        return int(BYTES * (whole + max(0.0, 3 * part - 2)) + self._other)


async def analyse_in_process(samples: CounterSamples) -> TrafficMeasurement | None:
    """Analyse samples in this process, as ``period`` does in its own."""
    times_s, counts = samples
    measurement = find_period(np.array(times_s), np.array(counts, np.float64))
    if measurement is None:
        return None
    return TrafficMeasurement(
        period_s=measurement.period_s,
        sent_bytes=measurement.bytes,
        confidence=measurement.confidence,
    )


def a_sampling(
    wire: SimulatedWire, window_s: float = 30.0, analyse: Analyse = analyse_in_process
) -> TrafficSampler:
    return TrafficSampler(
        wire.read, window_s=window_s, clock=wire.clock, sleep=wire.sleep, analyse=analyse
    )


def a_wide_gang(job: str = "a", generation: int = 1) -> pb.DesiredGang:
    """Return a gang on two nodes."""
    return a_gang(job, generation, members=("n0", "n1"))


def reported_traffic(sampling: TrafficSampler, gang: pb.DesiredGang) -> tuple[float, float]:
    report = pb.ObservedGang(job=gang.job, generation=gang.generation, node="n0")
    sampling.add_measurement(report)
    return report.period_s, report.sent_bytes


async def test_the_only_sending_gang_is_measured_once_within_two_percent() -> None:
    wire = SimulatedWire()
    sampling = a_sampling(wire)
    assert reported_traffic(sampling, a_wide_gang()) == (0.0, 0.0)
    assert await sampling.step(lambda: [(a_wide_gang(), True), (a_gang("small"), True)])
    period_s, sent_bytes = reported_traffic(sampling, a_wide_gang())
    assert period_s == pytest.approx(PERIOD_S, rel=0.02)
    assert sent_bytes == pytest.approx(1.02 * BYTES, rel=0.02)  # including the noise
    assert reported_traffic(sampling, a_gang("small")) == (0.0, 0.0)
    end_s = wire.now_s
    assert end_s == pytest.approx(30, rel=0.05)
    assert not await sampling.step(lambda: [(a_wide_gang(), True)])
    assert wire.now_s == end_s


@pytest.mark.parametrize(
    "gangs",
    [
        [],
        [(a_gang("small"), True)],
        [(a_wide_gang(), False)],
        [(a_wide_gang("a"), True), (a_wide_gang("b"), True)],
    ],
)
async def test_nothing_is_sampled_if_no_gang_or_several_gangs_may_send_which_is_logged_once(
    gangs: list[tuple[pb.DesiredGang, bool]], caplog: pytest.LogCaptureFixture
) -> None:
    wire = SimulatedWire()
    sampling = a_sampling(wire)
    for _ in range(3):
        assert not await sampling.step(lambda: gangs)
    assert wire.now_s == 0.0
    causes = [line.partition(" cause=")[2] for line in logged_lines(caplog, "traffic_unmeasured")]
    assert causes == (['"several jobs send from this node: a, b"'] if len(gangs) == 2 else [])


@pytest.mark.parametrize(
    "then", [[], [(a_wide_gang("a"), False)], [(a_wide_gang("a"), True), (a_wide_gang("b"), False)]]
)
async def test_a_window_in_which_the_gang_stops_or_another_sends_is_discarded(
    then: list[tuple[pb.DesiredGang, bool]],
) -> None:
    wire = SimulatedWire()
    sampling = a_sampling(wire)
    assert not await sampling.step(lambda: [(a_wide_gang("a"), True)] if wire.now_s < 10 else then)
    assert 10 <= wire.now_s < 12
    assert reported_traffic(sampling, a_wide_gang("a")) == (0.0, 0.0)
    assert await sampling.step(lambda: [(a_wide_gang("a"), True)])


async def test_a_gang_without_a_period_is_retried_and_then_given_up(
    caplog: pytest.LogCaptureFixture,
) -> None:
    weak = TrafficMeasurement(period_s=1.0, sent_bytes=1.0, confidence=0.9 * MIN_CONFIDENCE)
    answers = [weak, None] * MAX_IRREGULAR_WINDOWS
    left = answers.copy()

    async def find_nothing(_: CounterSamples) -> TrafficMeasurement | None:
        return left.pop()

    sampling = a_sampling(SimulatedWire(), 1.0, find_nothing)
    for _ in range(MAX_IRREGULAR_WINDOWS + 3):
        assert not await sampling.step(lambda: [(a_wide_gang(), True)])
    assert len(answers) - len(left) == MAX_IRREGULAR_WINDOWS
    (line,) = logged_lines(caplog, "traffic_unmeasured")
    assert line.endswith(' cause="a generation 1 has no regular period"')

    async def mistaken(_: CounterSamples) -> TrafficMeasurement | None:
        raise ZeroDivisionError

    caplog.clear()  # an error of our own ends the measuring alone
    await a_sampling(SimulatedWire(), 1.0, mistaken).watch(
        lambda: [(a_wide_gang(), True)], lambda: None
    )
    (record,) = caplog.records
    assert record.getMessage() == "stopped measuring traffic after an unexpected error"


async def test_a_failing_counter_is_logged_once_and_measuring_continues(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("tessera.service.agent.network.sampling.CHUNK_S", 0.001)
    wire = SimulatedWire()
    wire.failing = "the port is gone"
    reads = 0

    def read() -> int:
        nonlocal reads
        reads += 1
        if reads == 3:
            wire.failing = ""
        return wire.read()

    sampling = TrafficSampler(
        read,
        window_s=5.0,
        clock=wire.clock,
        sleep=wire.sleep,
        analyse=analyse_in_process,
        step_s=0.01,
    )
    changed = asyncio.Event()
    watching = asyncio.create_task(sampling.watch(lambda: [(a_wide_gang(), True)], changed.set))
    async with asyncio.timeout(PATIENCE_S):
        await changed.wait()
    watching.cancel()
    await asyncio.gather(watching, return_exceptions=True)
    assert reported_traffic(sampling, a_wide_gang())[0] == pytest.approx(PERIOD_S, rel=0.05)
    (line,) = logged_lines(caplog, "traffic_unmeasured")
    assert line.endswith(' cause="the port is gone"')


async def test_analysis_in_a_separate_process_gives_the_same_result() -> None:
    wire = SimulatedWire()
    samples: CounterSamples = ([], [])
    while wire.now_s < 10:
        samples[0].append(wire.now_s)
        samples[1].append(wire.read())
        wire.sleep(0.01)
    result, expected = await analysed_apart(samples), await analyse_in_process(samples)
    assert result == expected is not None
    assert await analysed_apart(([float(k) for k in range(40)], [0] * 40)) is None
    with pytest.raises(Unavailable, match="at least 32 samples"):
        await analysed_apart(([0.0, 1.0], [0, 1]))


async def test_a_supervisor_reports_measurements_for_leaders_and_other_members(
    tmp_path: Path,
) -> None:
    state = StateDir(tmp_path, tmp_path / "checkpoints")
    state.claim()
    wire = SimulatedWire()
    sampling = a_sampling(wire, 5.0)
    async with asyncio.TaskGroup() as tasks:
        supervisor = Supervisor(
            RuntimeChooser({REPLAY: EndlessRuntime()}, REPLAY),
            state,
            grace_s=1.0,
            spawn=tasks.create_task,
            changed=lambda: None,
            sampling=sampling,
        )
        led, follows = a_wide_gang("led"), a_gang("follows", members=("n0", "n1"), leader="n1")
        for gang in (led, follows):
            supervisor.apply(supervisor.revision + 1, [gang])
            await until(lambda: [r for _, r in supervisor.live()] == [True])
            assert await sampling.step(supervisor.live)
            (report,) = supervisor.reports()
            assert report.period_s == pytest.approx(PERIOD_S, rel=0.05)
            assert report.sent_bytes > 0
            supervisor.apply(supervisor.revision + 1, [])
            await until(lambda: not supervisor.live())
        await supervisor.close()
    state.release()


def test_a_server_accepts_measured_numbers_and_treats_meaningless_ones_as_unknown() -> None:
    reports = [
        pb.ObservedGang(
            job="a",
            generation=1,
            node="n0",
            phase=pb.ObservedGang.RUNNING,
            period_s=p,
            sent_bytes=b,
        )
        for p, b in ((0.5, 3e8), (math.nan, -1.0), (math.inf, math.nan))
    ]
    observed = to_observed("observed", pb.Observed(gangs=reports))
    assert [(g.period_s, g.sent_bytes) for g in observed] == [(0.5, 3e8), (0.0, 0.0), (0.0, 0.0)]


def write_sysfs(tmp_path: Path, files: Mapping[str, int | str]) -> Path:
    for name, value in files.items():
        path = tmp_path / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(f"{value}\n")
    return tmp_path


def a_node(tmp_path: Path, layer: str = "Ethernet") -> Path:
    """Return the /sys of a node with a bridge and a NIC that has an RDMA port."""
    port = "class/infiniband/mlx5_0/ports/1"
    return write_sysfs(
        tmp_path,
        {
            "class/net/eth0/statistics/tx_bytes": 100,
            "class/net/eth0/device/vendor": "x",
            "class/net/docker0/statistics/tx_bytes": 7,
            "class/net/lo/statistics/tx_bytes": 9,
            f"{port}/counters/port_xmit_data": 1000,
            f"{port}/link_layer": layer,
            "class/infiniband/mlx5_0/device/net/eth0/name": "eth0",
        },
    )


def test_hardware_interfaces_are_counted_once_with_their_rdma_ports_unless_others_are_named(
    tmp_path: Path,
) -> None:
    node = a_node(tmp_path)
    assert sent_bytes_reader(sys_=node)() == 100 + 4 * 1000
    assert sent_bytes_reader(["docker0"], node)() == 7
    assert sent_bytes_reader(["eth0", "docker0"], node)() == 107 + 4 * 1000
    a_node(tmp_path, "InfiniBand")
    assert sent_bytes_reader(sys_=node)() == sent_bytes_reader(["eth0"], node)() == 4 * 1000


def test_a_missing_interface_is_refused_and_a_vanished_one_is_named(tmp_path: Path) -> None:
    with pytest.raises(InvalidInput, match="no interface eth9"):
        sent_bytes_reader(["eth9"], a_node(tmp_path))
    bare = write_sysfs(tmp_path / "bare", {"class/net/lo/statistics/tx_bytes": 9})
    with pytest.raises(InvalidInput, match="--interface"):
        sent_bytes_reader(sys_=bare)
    read = sent_bytes_reader(["docker0"], tmp_path)
    (tmp_path / "class/net/docker0/statistics/tx_bytes").unlink()
    with pytest.raises(Unavailable, match="docker0"):
        read()
