"""Measured traffic of gangs: only if a single gang sends, in windows, without harm to jobs."""

from __future__ import annotations

import asyncio
import math
from collections.abc import Mapping
from pathlib import Path

import numpy as np
import pytest

from tessera.formulation.errors import InvalidInput, Unavailable
from tessera.formulation.runtimes import REPLAY
from tessera.service.agent.gangs import Gang, GangPhase, GangReport, observed_message
from tessera.service.agent.main import main
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
    ExitOutcome,
    Member,
    MemberExit,
    MemberHandle,
    Progress,
    RuntimeChooser,
)
from tessera.service.agent.state import StateDir
from tessera.service.agent.supervisor import Supervisor
from tessera.service.rpc.convert.agents import to_observed
from tests.support.agents import a_gang, until
from tests.support.logged import logged_lines
from tests.support.patience import PATIENCE_S

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


def a_wide_gang(job: str = "a", generation: int = 1) -> Gang:
    """Return a gang on two nodes."""
    return a_gang(job, generation, members=("n0", "n1"))


def reported_traffic(sampling: TrafficSampler, gang: Gang) -> tuple[float, float]:
    job, generation = gang.key
    report = sampling.add_measurement(
        GangReport(job=job, generation=generation, node="n0", phase=GangPhase.RUNNING)
    )
    return report.period_s, report.sent_bytes


async def test_the_only_sending_gang_is_measured_within_two_percent() -> None:
    sampling = a_sampling(SimulatedWire())
    assert reported_traffic(sampling, a_wide_gang()) == (0.0, 0.0)
    assert await sampling.step(lambda: [(a_wide_gang(), True), (a_gang("small"), True)])
    period_s, sent_bytes = reported_traffic(sampling, a_wide_gang())
    assert period_s == pytest.approx(PERIOD_S, rel=0.02)
    assert sent_bytes == pytest.approx(1.02 * BYTES, rel=0.02)  # including the noise
    assert reported_traffic(sampling, a_gang("small")) == (0.0, 0.0)


async def test_a_gang_is_measured_once() -> None:
    wire = SimulatedWire()
    sampling = a_sampling(wire)
    assert await sampling.step(lambda: [(a_wide_gang(), True)])
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
        [(a_wide_gang("a"), True), (a_wide_gang("b"), False)],
    ],
)
async def test_nothing_is_sampled_if_no_gang_or_several_gangs_may_send(
    gangs: list[tuple[Gang, bool]],
) -> None:
    wire = SimulatedWire()
    assert not await a_sampling(wire).step(lambda: gangs)
    assert wire.now_s == 0.0


async def test_several_sending_gangs_are_logged_once(caplog: pytest.LogCaptureFixture) -> None:
    sampling = a_sampling(SimulatedWire())
    for _ in range(3):
        await sampling.step(lambda: [(a_wide_gang("a"), True), (a_wide_gang("b"), True)])
    (line,) = logged_lines(caplog, "traffic_unmeasured")
    assert line.endswith(' cause="several jobs send from this node: a, b"')


@pytest.mark.parametrize(
    "then", [[], [(a_wide_gang("a"), False)], [(a_wide_gang("a"), True), (a_wide_gang("b"), False)]]
)
async def test_a_window_in_which_the_gang_stops_or_another_sends_is_discarded(
    then: list[tuple[Gang, bool]],
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
    wire = SimulatedWire()
    tried = 0

    async def nothing(_: CounterSamples) -> TrafficMeasurement | None:
        nonlocal tried
        tried += 1
        weak = TrafficMeasurement(period_s=1.0, sent_bytes=1.0, confidence=0.9 * MIN_CONFIDENCE)
        return weak if tried % 2 else None

    sampling = a_sampling(wire, 1.0, nothing)
    for _ in range(MAX_IRREGULAR_WINDOWS + 3):
        assert not await sampling.step(lambda: [(a_wide_gang(), True)])
    assert tried == MAX_IRREGULAR_WINDOWS
    (line,) = logged_lines(caplog, "traffic_unmeasured")
    assert line.endswith(' cause="a generation 1 has no regular period"')


async def test_a_gang_that_warms_up_is_measured_in_a_later_window() -> None:
    wire = SimulatedWire()
    wire.period_s = 1e9  # only noise is sent
    sampling = a_sampling(wire)
    assert not await sampling.step(lambda: [(a_wide_gang(), True)])
    wire.period_s = PERIOD_S
    assert await sampling.step(lambda: [(a_wide_gang(), True)])


async def test_a_new_generation_is_measured_again_and_the_old_one_is_forgotten() -> None:
    sampling = a_sampling(SimulatedWire())
    assert await sampling.step(lambda: [(a_wide_gang(), True)])
    assert await sampling.step(lambda: [(a_wide_gang(generation=2), True)])
    assert reported_traffic(sampling, a_wide_gang(generation=2))[0] > 0
    assert reported_traffic(sampling, a_wide_gang(generation=1)) == (0.0, 0.0)


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


async def test_an_error_ends_only_the_measuring(caplog: pytest.LogCaptureFixture) -> None:
    async def mistaken(_: CounterSamples) -> TrafficMeasurement | None:
        raise ZeroDivisionError

    sampling = a_sampling(SimulatedWire(), 1.0, mistaken)
    await sampling.watch(lambda: [(a_wide_gang(), True)], lambda: None)
    assert [r.getMessage() for r in caplog.records] == [
        "stopped measuring traffic after an unexpected error"
    ]


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


class EndlessProcess:
    """A process that runs until it is asked to end."""

    def __init__(self) -> None:
        self.stopped = asyncio.Event()

    async def begun(self) -> None:
        return

    async def ended(self) -> MemberExit:
        await self.stopped.wait()
        return MemberExit(outcome=ExitOutcome.STOPPED)

    def observe(self) -> Progress | None:
        return Progress(iterations=1.0, iter_time_s=1.0)

    def stop(self) -> None:
        self.stopped.set()

    def request_checkpoint(self) -> None:
        raise AssertionError("nobody asks for a checkpoint here")

    kill = stop


class EndlessRuntime:
    leader_only = True

    def prepare(self, member: Member) -> None:
        """Accept every gang."""

    def launch(self, member: Member) -> MemberHandle:
        return EndlessProcess()

    def adopt(self, directory: Path) -> MemberHandle | None:
        return None


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
            message = observed_message([report], 1).observed.gangs[0]
            assert (message.period_s, message.sent_bytes) == (report.period_s, report.sent_bytes)
            supervisor.apply(supervisor.revision + 1, [])
            await until(lambda: not supervisor.live())
        await supervisor.close()
    state.release()


def test_a_server_accepts_measured_numbers_and_treats_meaningless_ones_as_unknown() -> None:
    reports = [
        GangReport(
            job="a", generation=1, node="n0", phase=GangPhase.RUNNING, period_s=p, sent_bytes=b
        )
        for p, b in ((0.5, 3e8), (math.nan, -1.0), (math.inf, math.nan))
    ]
    observed = to_observed("observed", observed_message(reports, 1).observed)
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


def test_hardware_interfaces_and_rdma_ports_are_counted_but_no_bridge_or_loopback(
    tmp_path: Path,
) -> None:
    read = sent_bytes_reader(sys_=a_node(tmp_path))
    assert read() == 100 + 4 * 1000
    write_sysfs(tmp_path, {"class/net/eth0/statistics/tx_bytes": 150})
    assert read() == 150 + 4 * 1000


def test_named_interfaces_are_counted_with_their_rdma_ports(tmp_path: Path) -> None:
    node = a_node(tmp_path)
    assert sent_bytes_reader(["docker0"], node)() == 7
    assert sent_bytes_reader(["eth0", "docker0"], node)() == 107 + 4 * 1000


def test_infiniband_traffic_is_counted_once(tmp_path: Path) -> None:
    assert sent_bytes_reader(sys_=a_node(tmp_path, "InfiniBand"))() == 4 * 1000
    assert sent_bytes_reader(["eth0"], tmp_path)() == 4 * 1000


def test_a_missing_interface_and_a_node_without_interfaces_are_refused(tmp_path: Path) -> None:
    with pytest.raises(InvalidInput, match="no interface eth9"):
        sent_bytes_reader(["eth9"], a_node(tmp_path))
    with pytest.raises(InvalidInput, match="--interface"):
        sent_bytes_reader(
            sys_=write_sysfs(tmp_path / "bare", {"class/net/lo/statistics/tx_bytes": 9})
        )


def test_a_vanished_counter_is_reported_when_it_is_read(tmp_path: Path) -> None:
    read = sent_bytes_reader(["docker0"], a_node(tmp_path))
    (tmp_path / "class/net/docker0/statistics/tx_bytes").unlink()
    with pytest.raises(Unavailable, match="docker0"):
        read()


@pytest.mark.parametrize(
    "wrong",
    [
        ["--measure-traffic", "-1"],
        ["--measure-traffic", "0.2"],
        ["--measure-traffic", "nan"],
        ["--measure-traffic", "30", "--node", "m:t:1"],
        ["--measure-traffic", "30", "--netns", "blue"],
        ["--measure-traffic", "30", "--interface", "nosuch0"],
    ],
)
def test_a_node_that_cannot_be_measured_is_refused_at_startup(
    tmp_path: Path, wrong: list[str]
) -> None:
    options = ["--server", "127.0.0.1:1", "--cluster", "c", "--data-dir", str(tmp_path)]
    assert main([*options, "--node", "n:t:1", *wrong]) == 2
