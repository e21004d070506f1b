"""An agent's stream: the messages it accepts and sends, on a clock that the test controls."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import AsyncIterator, Sequence
from typing import Any, cast

import pytest

from tessera.formulation.errors import InvalidInput, Unavailable
from tessera.formulation.records.agents import (
    DesiredState,
    HealthFault,
    Heartbeat,
    NodeHealth,
    ObservedGang,
)
from tessera.service.ports.store import Store
from tessera.service.rpc.agentinbox import AgentInbox
from tessera.service.rpc.agentsession import AgentCalls, AgentSession
from tessera.service.rpc.calls import Calls, Subscription
from tessera.service.rpc.convert.agents import MAX_DETAIL_CHARS, MAX_FAULTS_A_NODE, to_health
from tessera.service.rpc.heartbeats import HeartbeatRecorder
from tessera.service.rpc.lanes import FairCalls, Lane, LaneLimits
from tessera.service.settings.streams import AgentTiming
from tessera.v1 import agents_pb2 as pb
from tests.support.hand_clock import HandClock
from tests.support.patience import PATIENCE_S

Phase = pb.ObservedGang
TIMING = AgentTiming(lease_s=30.0, margin_s=15.0, heartbeat_s=5.0)
HELLO = pb.AgentMessage(
    hello=pb.Hello(
        parent="clusters/c",
        agent_id="a",
        incarnation="1",
        nodes=[pb.AgentNode(node="n", gpu_type="a100", gpus=1)],
    ),
    said_s=7.0,
)


class QuietStore:
    """Accepts every report and wants no gang to run."""

    def __init__(self) -> None:
        self.down = False
        self.turn = threading.Event()
        self.turn.set()
        self.observed: list[int] = []
        self.remarks: list[tuple[str, ...] | None] = []
        self.health: list[tuple[NodeHealth, ...]] = []
        self.again_in_s = float("inf")

    def hello(self, *_: Any) -> None:
        """Accept any agent."""

    def heartbeats(self, beats: Sequence[Heartbeat]) -> set[int]:
        if self.down:
            raise Unavailable("down")
        self.remarks += [beat.network_remarks for beat in beats]
        return set(range(len(beats)))

    def record_health(self, _c: str, _a: str, _i: str, reported: tuple[NodeHealth, ...]) -> float:
        if self.down:
            raise Unavailable("down")
        self.health.append(reported)
        return self.again_in_s

    def observe(
        self, _c: str, _a: str, _i: str, _gangs: tuple[ObservedGang, ...], revision: int
    ) -> bool:
        assert self.turn.wait(PATIENCE_S)
        self.observed.append(revision)
        return False

    def desired(self, _cluster: str, _agent: str) -> DesiredState:
        return DesiredState(revision=1, gangs=())


def an_observed_message(revision: int, **jobs: Phase.Phase.ValueType) -> pb.AgentMessage:
    gangs = [Phase(job=job, generation=1, node="n", phase=phase) for job, phase in jobs.items()]
    return pb.AgentMessage(observed=pb.Observed(revision=revision, gangs=gangs))


async def stream_of(*messages: pb.AgentMessage) -> AsyncIterator[pb.AgentMessage]:
    for message in messages:
        yield message


@pytest.fixture
def clock() -> HandClock:
    return HandClock(1000.0)


@pytest.fixture
def quiet() -> QuietStore:
    return QuietStore()


@pytest.fixture
async def session(clock: HandClock, quiet: QuietStore) -> AsyncIterator[AgentSession]:
    store, beats = cast(Store, quiet), Calls(1, "heartbeat")
    turns, reads = (
        FairCalls(Lane(1, "test", LaneLimits(client=1, cluster=1, share=1))) for _ in range(2)
    )
    threads = AgentCalls(
        store=store,
        heartbeats=HeartbeatRecorder(store, beats),
        turns=turns,
        reads=reads,
        log_calls=reads,
    )
    session = AgentSession(HELLO, threads, clock, TIMING)
    await session.register()
    yield session
    await asyncio.gather(turns.close(), reads.close(), beats.close())


async def test_only_the_newest_of_a_burst_of_observations_is_kept(clock: HandClock) -> None:
    inbox = AgentInbox(spoke_s=0.0)
    burst = [an_observed_message(k, j=Phase.RUNNING) for k in range(50)]
    await inbox.fill(stream_of(*burst), Subscription(), clock)
    assert [o.revision for o in inbox.observed] == [49]


async def test_an_end_that_the_agent_has_forgotten_is_still_taken_in(
    session: AgentSession, quiet: QuietStore, clock: HandClock
) -> None:
    messages = [
        an_observed_message(1, j=Phase.RUNNING),
        an_observed_message(2, j=Phase.SUCCEEDED),
        an_observed_message(3, j=Phase.SUCCEEDED, k=Phase.RUNNING),
        an_observed_message(4, k=Phase.RUNNING),
        an_observed_message(5, k=Phase.FAILED),
        an_observed_message(6),
        an_observed_message(7),
    ]
    await session.inbox.fill(stream_of(*messages), Subscription(), clock)
    await session.step(Subscription())
    assert quiet.observed == [3, 5, 7]
    assert not session.inbox.observed


async def test_a_second_hello_is_refused(clock: HandClock) -> None:
    with pytest.raises(InvalidInput, match="first message"):
        await AgentInbox(spoke_s=0.0).fill(stream_of(HELLO), Subscription(), clock)


async def test_the_desired_state_is_repeated_at_each_heartbeat(
    session: AgentSession, clock: HandClock
) -> None:
    stream = Subscription()
    assert await session.step(stream) is not None
    clock.now_s += 4.9
    assert await session.step(stream) is None
    assert session.pause_s() == pytest.approx(0.1)
    clock.now_s += 0.1
    assert await session.step(stream) is not None


async def test_the_lease_counts_from_the_newest_recorded_message(
    session: AgentSession, quiet: QuietStore, clock: HandClock
) -> None:
    stream = Subscription()
    assert session.lease_from_s == 7.0
    clock.now_s += 5.0
    # a reply, although the agent has sent nothing since
    assert await session.step(stream) is not None
    assert session.lease_from_s == 7.0
    quiet.down = True
    beat = pb.AgentMessage(heartbeat=pb.Heartbeat(), said_s=9.0)
    await session.inbox.fill(stream_of(beat), stream, clock)
    assert await session.step(stream) is None
    assert session.lease_from_s == 7.0
    quiet.down = False
    await session.step(stream)
    assert session.lease_from_s == 9.0


async def test_an_agents_network_report_is_recorded_if_new_and_cut_to_size(
    session: AgentSession, quiet: QuietStore, clock: HandClock
) -> None:
    stream = Subscription()

    async def says(*remarks: str) -> None:
        message = pb.AgentMessage(observed=pb.Observed(network_remarks=remarks))
        await session.inbox.fill(stream_of(message), stream, clock)
        await session.step(stream)

    await says()
    quiet.down = True
    await says("eth1: not strict")
    quiet.down = False
    await says("eth1: not strict")
    await says("eth1: not strict")
    await says()
    await says("x\n" * 200, *["y"] * 40)
    assert quiet.remarks[:4] == [None, ("eth1: not strict",), None, ()]
    cut = quiet.remarks[4]
    assert cut is not None
    assert (cut[0], len(cut)) == ("x " * 150, 32)


async def test_a_heartbeat_that_could_not_be_recorded_is_recorded_later(
    session: AgentSession, quiet: QuietStore, clock: HandClock
) -> None:
    stream = Subscription()
    clock.now_s += 7.5
    await session.inbox.fill(stream_of(an_observed_message(1)), stream, clock)
    quiet.down = True
    assert await session.step(stream) is None
    assert session.pause_s() == TIMING.retry_s
    assert quiet.observed == []
    quiet.down = False
    assert await session.step(stream) is not None
    assert quiet.observed == [1]


async def test_a_lease_is_renewed_while_a_report_waits_for_the_clusters_lock(
    session: AgentSession, quiet: QuietStore, clock: HandClock
) -> None:
    stream = Subscription()
    quiet.turn.clear()
    await session.inbox.fill(stream_of(an_observed_message(1)), stream, clock)
    assert await session.step(stream) is not None
    beat = pb.AgentMessage(heartbeat=pb.Heartbeat(), said_s=9.0)
    await session.inbox.fill(stream_of(beat), stream, clock)
    clock.now_s += 5.0
    assert await session.step(stream) is not None
    assert (session.lease_from_s, quiet.observed) == (9.0, [])
    quiet.turn.set()
    await stream.wait(PATIENCE_S)
    await session.step(stream)
    assert quiet.observed == [1]
    session.leave()


async def test_an_agent_silent_for_longer_than_its_lease_is_disconnected(
    session: AgentSession, clock: HandClock
) -> None:
    clock.now_s += 30.1
    with pytest.raises(Unavailable, match="sent nothing"):
        await session.step(Subscription())


def a_health_message(*faults: pb.HealthFault, node: str = "n") -> pb.AgentMessage:
    health = [pb.NodeHealth(node=node, faults=faults)]
    return pb.AgentMessage(observed=pb.Observed(revision=1, health=health))


HOT = pb.HealthFault(gpu=0, kind="thermal", detail="slowed down by heat")


async def test_health_is_recorded_when_it_changes_and_again_when_time_may_change_it(
    session: AgentSession, quiet: QuietStore, clock: HandClock
) -> None:
    stream = Subscription()

    async def says(message: pb.AgentMessage) -> int:
        await session.inbox.fill(stream_of(message), stream, clock)
        await session.step(stream)
        return len(quiet.health)

    assert await says(an_observed_message(1)) == 1
    assert quiet.health[0] == ()  # the node is not watched
    clock.now_s += 1000.0
    assert await says(an_observed_message(2)) == 1
    assert await says(a_health_message(HOT)) == 2
    assert await says(a_health_message(HOT)) == 2
    quiet.again_in_s = 20.0
    assert await says(a_health_message()) == 3
    clock.now_s += 19.0
    assert await says(a_health_message()) == 3
    clock.now_s += 1.0
    assert await says(a_health_message()) == 4
    quiet.again_in_s = float("inf")
    clock.now_s += 20.0
    assert await says(a_health_message()) == 5
    clock.now_s += 299.0
    assert await says(a_health_message()) == 5
    clock.now_s += 1.0
    assert await says(a_health_message()) == 6


async def test_health_that_could_not_be_recorded_is_recorded_later_and_before_the_gangs(
    session: AgentSession, quiet: QuietStore, clock: HandClock
) -> None:
    stream = Subscription()
    quiet.down = True
    await session.inbox.fill(stream_of(a_health_message(HOT)), stream, clock)
    assert await session.step(stream) is None
    assert (quiet.health, quiet.observed) == ([], [])
    quiet.down = False
    await session.step(stream)
    fault = HealthFault(gpu=0, kind="thermal", detail="slowed down by heat")
    assert quiet.health == [(NodeHealth(node="n", faults=(fault,)),)]
    assert quiet.observed == [1]


def test_a_lying_agents_faults_are_bounded_and_foreign_nodes_are_left_out() -> None:
    wild = pb.HealthFault(gpu=2**31 - 1, kind="DROP TABLE", detail="x\n\0" * 10_000)
    faults = [wild, *(pb.HealthFault(gpu=k % 64, kind="xid", detail=f"{k}") for k in range(10**5))]
    entry = pb.NodeHealth(node="n", faults=faults)
    observed = pb.Observed(
        health=[
            pb.NodeHealth(node="foreign", faults=faults[:2]),
            entry,
            pb.NodeHealth(node="n"),  # a second entry cannot hide the first
            pb.NodeHealth(node="m", faults=[pb.HealthFault(gpu=-7)]),
        ]
    )
    (m, n) = to_health(observed, {"n", "m"})
    assert (m.node, n.node) == ("m", "n")
    assert m.faults == (HealthFault(gpu=-1, kind="other", detail="a fault of the kind other"),)
    assert len(n.faults) == MAX_FAULTS_A_NODE
    assert (n.faults[0].gpu, n.faults[0].kind) == (-1, "other")
    assert n.faults[0].detail.isprintable()
    assert len(n.faults[0].detail) <= MAX_DETAIL_CHARS
