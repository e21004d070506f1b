"""An agent's messages: its enrolment, its stream on a clock that the test controls, and its heartbeats."""

from __future__ import annotations

import asyncio
import math
import threading
from collections import Counter
from collections.abc import AsyncIterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, cast

import numpy as np
import pytest

from tessera.db.store.store import Store
from tessera.formulation.answer.network.descriptions import MAX_MET_JOBS, find_met_jobs
from tessera.formulation.answer.network.outcome import NetworkDecision, Route
from tessera.formulation.answer.network.plan import NetworkPlan
from tessera.formulation.answer.network.tags import MAX_NAMED_JOBS, FabricCapabilities, assign_tags
from tessera.formulation.base.access import IDENTITY, LOCAL, Identity, Role
from tessera.formulation.base.errors import (
    Conflict,
    InvalidInput,
    NotAllowed,
    PermissionDenied,
    TooBusy,
    Unavailable,
)
from tessera.formulation.job.exit_reasons import ExitReason
from tessera.formulation.job.lifecycle import JobState
from tessera.formulation.records.agents import (
    DesiredGang,
    DesiredState,
    HealthFault,
    Heartbeat,
    NodeHealth,
    ObservedGang,
)
from tessera.formulation.records.jobs import RestartTimes, TrainingRecord
from tessera.formulation.records.logs import LogRead
from tessera.service.server.convert import agents, jobs
from tessera.service.server.convert.agents import MAX_DETAIL_CHARS, MAX_FAULTS_A_NODE, to_health
from tessera.service.server.rpc.agents.agentinbox import AgentInbox
from tessera.service.server.rpc.agents.agentsession import AgentCalls, AgentSession
from tessera.service.server.rpc.agents.enrolment import Enrolment, EnrolmentSettings
from tessera.service.server.rpc.agents.heartbeats import MAX_HEARTBEATS, HeartbeatRecorder
from tessera.service.server.settings.streams import AgentTiming
from tessera.service.server.tasks.calls import Calls, Subscription
from tessera.service.server.tasks.lanes import CALLER, FairCalls, Lane, LaneLimits, Share
from tessera.v1 import agents_pb2, launch_pb2
from tessera.v1 import agents_pb2 as pb
from tests.support.execution_plans import a_plan
from tests.support.hand_clock import HandClock
from tests.support.job_records import a_desired_gang, a_job_record
from tests.support.networks import FluidJob, a_demand
from tests.support.patience import PATIENCE_S
from tests.support.store_double import StoreDouble

RECORD = a_job_record(state=JobState.RUNNING)


def observed_gang(**fields: Any) -> ObservedGang:
    """Return a gang as a server reads it from an agent's message."""
    message = agents_pb2.ObservedGang(
        job="j", node="n", phase=agents_pb2.ObservedGang.RUNNING, **fields
    )
    (gang,) = agents.to_observed("observed", agents_pb2.Observed(gangs=[message]))
    return gang


def test_reports_are_read_with_all_their_facts_of_training_or_none() -> None:
    times = launch_pb2.RestartTimes(checkpoint_s=2, stop_s=6, launch_s=20, first_iteration_s=15)
    gang = observed_gang(
        loss=-0.5,
        memory_bytes=2**36,
        checkpoint_iterations=400.0,
        checkpoint_age_s=35.0,
        resumed_iterations=0.0,
        restart_times=times,
        exit_reason=launch_pb2.EXIT_BAD_CHECKPOINT,
        remark="it passed over a checkpoint",
    )
    assert (gang.loss, gang.memory_bytes, gang.resumed_iterations) == (-0.5, 2**36, 0.0)
    assert (gang.checkpoint_iterations, gang.checkpoint_age_s) == (400.0, 35.0)
    assert gang.restart_times is not None
    assert gang.restart_times.total_s == 41.0
    assert (gang.exit_reason, gang.remark) == (
        ExitReason.BAD_CHECKPOINT,
        "it passed over a checkpoint",
    )
    gang = observed_gang()
    facts = (gang.loss, gang.checkpoint_iterations, gang.resumed_iterations, gang.restart_times)
    assert facts == (None,) * 4
    assert (gang.memory_bytes, gang.exit_reason, gang.remark) == (0, None, "")


def test_the_plan_by_which_a_program_runs_is_read_with_its_times() -> None:
    plan = a_plan(RECORD.spec.workload, 2)
    gang = observed_gang(
        executed_plan=plan.to_json(), executed_iter_time_s=0.5, planned_iter_time_s=math.inf
    )
    assert gang.executed_plan == plan
    assert (gang.executed_iter_time_s, gang.planned_iter_time_s) == (0.5, math.inf)


def test_a_plan_that_cannot_be_read_does_not_end_the_stream() -> None:
    for text in ("", "{}", "[1]", "no JSON", '{"stages":[]}'):
        gang = observed_gang(
            executed_plan=text, executed_iter_time_s=-1.0, planned_iter_time_s=math.nan, loss=0.5
        )
        assert gang.executed_plan is None
        assert (gang.executed_iter_time_s, gang.planned_iter_time_s, gang.loss) == (0, 0, 0.5)


def test_meaningless_numbers_and_reasons_of_training_are_unknown_each_alone() -> None:
    for lie in (math.nan, math.inf, -math.inf, -1e300, 1e300):
        gang = observed_gang(
            loss=lie,
            checkpoint_iterations=lie,
            checkpoint_age_s=lie,
            resumed_iterations=lie,
            restart_times=launch_pb2.RestartTimes(stop_s=lie, launch_s=20.0, first_iteration_s=lie),
            iterations_done=7.0,
        )
        assert (gang.loss, gang.checkpoint_iterations, gang.resumed_iterations) == (None,) * 3
        assert (gang.checkpoint_age_s, gang.iterations_done) == (None, 7.0)
        assert gang.restart_times == RestartTimes(launch_s=20.0)
        assert gang.restart_times.total_s is None
    for memory in (-1, 2**50 + 1, 2**63 - 1):
        assert observed_gang(memory_bytes=memory).memory_bytes == 0
    gang = observed_gang(checkpoint_iterations=1.0, checkpoint_age_s=-3.0)  # clocks differ
    assert (gang.checkpoint_iterations, gang.checkpoint_age_s) == (1.0, 0.0)
    later = agents_pb2.ObservedGang(job="j", node="n", phase=agents_pb2.ObservedGang.FAILED)
    later.MergeFromString(b"\x88\x01\x63")  # field 17 is 99, as from a later release
    (gang,) = agents.to_observed("observed", agents_pb2.Observed(gangs=[later]))
    assert (gang.phase, gang.exit_reason) == ("failed", None)


def test_texts_of_agents_are_short_and_printable() -> None:
    for text in ("x" * 5_000_000, "\x1b[31mred\x1b[0m\0\x07", "a\u202eb\u2028c"):
        gang = observed_gang(remark=text, error=text)
        assert gang.remark.isprintable()
        assert gang.error.isprintable()
        assert 0 < len(gang.remark) <= agents.MAX_REMARK_CHARS
        assert 0 < len(gang.error) <= agents.MAX_ERROR_CHARS
    gang = observed_gang(error="Traceback:\n\tx", remark="two\nlines")
    assert (gang.error, gang.remark) == ("Traceback:\n\tx", "two lines")


def test_a_job_is_sent_with_what_its_program_reported() -> None:
    record = replace(
        RECORD,
        training=TrainingRecord(
            loss=0.0,
            memory_bytes=2**30,
            checkpoint_iterations=0.0,
            checkpoint_s=1.5,
            restart_times=RestartTimes(stop_s=6.0, launch_s=20.0, first_iteration_s=15.0),
            restart_s=40.0,
            exit_reason=ExitReason.REFUSED,
            remark="r",
        ),
    )
    training = jobs.of_job(record, LOCAL.sees_tenant).training
    assert training.HasField("loss")
    assert training.HasField("checkpoint_iterations")
    assert (training.loss, training.memory_bytes, training.checkpoint_iterations) == (0, 2**30, 0)
    assert training.checkpoint_time.ToNanoseconds() == 1_500_000_000
    assert (training.restart_times.launch_s, training.restart_seconds) == (20.0, 40.0)
    assert (training.exit_reason, training.remark) == (launch_pb2.EXIT_REFUSED, "r")
    assert not jobs.of_job(replace(record, training=None), LOCAL.sees_tenant).HasField("training")
    empty = jobs.of_job(replace(record, training=TrainingRecord()), LOCAL.sees_tenant).training
    assert not empty.HasField("loss")
    assert not empty.HasField("checkpoint_iterations")
    assert not empty.HasField("checkpoint_time")
    assert not empty.HasField("restart_times")


def test_every_exit_reason_of_the_api_has_one_of_ours() -> None:
    numbers = {n for name, n in launch_pb2.ExitReason.items() if name.startswith("EXIT_") and n}
    assert set(jobs.EXIT_NUMBERS.values()) == numbers
    assert {reason for reason in ExitReason if reason.sentence} == jobs.EXIT_NUMBERS.keys()


def _gang_with_routes(*sources: str) -> DesiredGang:
    part = NetworkDecision(
        job="j",
        generation=3,
        rank=0,
        level=2,
        tag=9,
        priority=1.0,
        intensity=1.0,
        routes=tuple(
            Route(source=s, target="n1/gpu-0", via=("t",), sent_bytes=1.0) for s in sources
        ),
    )
    return a_desired_gang(network=part)


@pytest.mark.parametrize(
    ("nodes", "expected"), [({"n2"}, ["n2/gpu-2", "rank 7"]), ({"n1", "n2"}, None)]
)
def test_an_agent_receives_only_the_routes_of_its_own_nodes(
    nodes: set[str], expected: list[str] | None
) -> None:
    sources = ["n1/gpu-0", "n2/gpu-2", "rank 7"]
    desired = DesiredState(revision=5, gangs=(_gang_with_routes(*sources),), network_levels=8)
    (gang,) = agents.of_desired(desired, nodes).gangs
    assert [route.source for route in gang.network.routes] == (expected or sources)
    assert (gang.network.level, gang.network.dscp) == (2, 9)


def test_a_remark_on_thousands_of_jobs_with_one_tag_names_a_few_of_them() -> None:
    assignment = assign_tags({f"j{n:04d}": n % 8 for n in range(3000)}, 8)
    assert set(assignment.tags.values()) <= set(FabricCapabilities().free_tags)
    assert assignment.remarks
    for remark in assignment.remarks:
        assert remark.count("j0") + remark.count("j1") + remark.count("j2") <= 2 * MAX_NAMED_JOBS
        assert " more" in remark


def test_each_job_is_served_at_its_own_level_or_above_if_tags_are_short() -> None:
    levels = np.random.default_rng(0).integers(0, 8, 400).tolist()
    jobs = {f"j{n}": level for n, level in enumerate(levels)}
    assignment = assign_tags(jobs, 8)
    again = assign_tags({**jobs, "new": 3}, 8, assignment.tags)
    for settings in (assignment, again):
        assert all(settings.priorities[settings.tags[job]] >= level for job, level in jobs.items())
    assert all(again.tags[job] == tag for job, tag in assignment.tags.items())


def test_jobs_served_before_a_job_are_named_however_many_come_after_it() -> None:
    """One job on link 0 is far more urgent; many less urgent ones on link 1 are nearer in rank."""
    far = [FluidJob(busy_s={2: 1.0})] * 30
    job = FluidJob(busy_s={0: 1.0, 1: 1.0})
    demand = a_demand(FluidJob(busy_s={0: 1.0}), *far, job, *[FluidJob(busy_s={1: 1.0})] * 20)
    count = demand.jobs
    level = np.where(np.arange(count) == 0, 7, np.where(np.arange(count) <= 31, 3, 0))
    plan = NetworkPlan(
        chosen=np.zeros(0, np.int64),
        priority=np.ones(count),
        order=np.arange(count),
        level=level,
        levels=8,
    )
    met_jobs = find_met_jobs(demand, plan)
    assert met_jobs[31] == [0, *range(32, 32 + MAX_MET_JOBS - 1)]
    assert met_jobs[0] == [31]


class NoThreads:
    """Threads that count what they are asked to do, and do nothing."""

    def __init__(self) -> None:
        self.works = 0

    async def run(self, *_: Any) -> pb.EnrolResponse:
        self.works += 1
        return pb.EnrolResponse()


def an_enrolment(calls: NoThreads) -> Enrolment:
    settings = EnrolmentSettings(
        ca_certificate=Path("ca.pem"), ca_key=Path("ca.key"), hours=1.0, port=lambda: 1
    )
    store: Any = object()
    threads: Any = calls
    return Enrolment(store, settings, threads, lambda: 0.0, lambda: 0.0)


async def test_ten_thousand_enrolments_of_one_host_take_few_threads_and_leave_others_alone() -> (
    None
):
    calls = NoThreads()
    enrolment, outcomes = an_enrolment(calls), Counter[str]()
    CALLER.set(Share(client="10.0.0.1", cluster="c"))
    for _ in range(10_000):
        try:
            await enrolment.enrol(pb.EnrolRequest())
        except TooBusy as error:
            outcomes[str(error).partition(";")[0]] += 1
    assert outcomes == {"enrolments of 10.0.0.1 may not exceed 1,200 a minute": 9_800}
    assert calls.works == 200
    CALLER.set(Share(client="10.0.0.2", cluster="c"))
    await enrolment.enrol(pb.EnrolRequest())


async def test_only_an_agent_with_a_certificate_renews_it() -> None:
    enrolment = an_enrolment(NoThreads())
    for identity in (
        Identity(subject="root", role=Role.ADMIN, key="token/r"),
        Identity(subject="local", role=Role.ADMIN, key="local", is_verified=False),
    ):
        IDENTITY.set(identity)
        with pytest.raises(PermissionDenied, match="only an agent that calls with its certificate"):
            await enrolment.renew(pb.RenewCertificateRequest())


async def test_a_server_without_an_authority_signs_nothing() -> None:
    threads: Any = NoThreads()
    enrolment = Enrolment(None, None, threads, lambda: 0.0)
    with pytest.raises(NotAllowed, match="signs no certificates"):
        await enrolment.enrol(pb.EnrolRequest())
    with pytest.raises(NotAllowed, match="signs no certificates"):
        await enrolment.renew(pb.RenewCertificateRequest())


Phase = pb.ObservedGang
TIMING = AgentTiming(lease_s=30.0, margin_s=15.0, heartbeat_s=5.0)
HELLO = pb.AgentMessage(
    hello=pb.Hello(
        parent="clusters/c",
        agent_id="a",
        incarnation="1",
        nodes=[pb.AgentNode(node="n", gpu_type="a100", gpus=1)],
    ),
    sent_at_s=7.0,
)


class QuietStore(StoreDouble):
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

    def record_heartbeats(self, beats: Sequence[Heartbeat]) -> set[int]:
        if self.down:
            raise Unavailable("down")
        self.remarks += [beat.network_remarks for beat in beats]
        return set(range(len(beats)))

    def record_health(self, _c: str, _a: str, _i: str, reported: tuple[NodeHealth, ...]) -> float:
        if self.down:
            raise Unavailable("down")
        self.health.append(reported)
        return self.again_in_s

    def record_observation(
        self, _c: str, _a: str, _i: str, _gangs: tuple[ObservedGang, ...], revision: int
    ) -> bool:
        assert self.turn.wait(PATIENCE_S)
        self.observed.append(revision)
        return False

    def load_desired_gangs(self, _cluster: str, _agent: str) -> DesiredState:
        return DesiredState(revision=1, gangs=())

    def find_pending(self, _cluster: str, _agent: str) -> list[LogRead]:
        return []


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
    assert session.lease_start_s == 7.0
    clock.now_s += 5.0
    # a reply, although the agent has sent nothing since
    assert await session.step(stream) is not None
    assert session.lease_start_s == 7.0
    quiet.down = True
    beat = pb.AgentMessage(heartbeat=pb.Heartbeat(), sent_at_s=9.0)
    await session.inbox.fill(stream_of(beat), stream, clock)
    assert await session.step(stream) is None
    assert session.lease_start_s == 7.0
    quiet.down = False
    await session.step(stream)
    assert session.lease_start_s == 9.0


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
    beat = pb.AgentMessage(heartbeat=pb.Heartbeat(), sent_at_s=9.0)
    await session.inbox.fill(stream_of(beat), stream, clock)
    clock.now_s += 5.0
    assert await session.step(stream) is not None
    assert (session.lease_start_s, quiet.observed) == (9.0, [])
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


@pytest.mark.full
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


def heartbeat_of(agent: str) -> Heartbeat:
    return Heartbeat(cluster="c", agent=agent, incarnation="1")


class SlowStore(StoreDouble):
    """Knows all agents except the ``unknown`` ones. Batches wait until ``go`` is set."""

    def __init__(self) -> None:
        self.batches: list[list[str]] = []
        self.unknown, self.replaced = set[str](), set[str]()
        self.failure: Exception | None = None
        self.go = threading.Event()

    def record_heartbeats(self, beats: Sequence[Heartbeat]) -> set[int]:
        self.batches.append([beat.agent for beat in beats])
        assert self.go.wait(PATIENCE_S)
        if self.failure:
            raise self.failure
        return {k for k, beat in enumerate(beats) if beat.agent not in self.unknown}

    def require_agent(self, _cluster: str, agent: str, _incarnation: str) -> None:
        if agent in self.replaced:
            raise NotAllowed("another process has taken over")


async def record_all(
    store: SlowStore, agents: Sequence[str]
) -> tuple[HeartbeatRecorder, list[BaseException | None]]:
    """Record a heartbeat of each agent; the others arrive while the first is recorded."""
    calls = Calls(1, "heartbeat")
    beats = HeartbeatRecorder(cast(Store, store), calls)
    tasks = [asyncio.create_task(beats.record(heartbeat_of(agents[0])))]
    while not store.batches:
        await asyncio.sleep(0.001)
    tasks += [asyncio.create_task(beats.record(heartbeat_of(agent))) for agent in agents[1:]]
    await asyncio.sleep(0)
    store.go.set()
    ended = await asyncio.gather(*tasks, return_exceptions=True)
    await calls.close()
    return beats, ended


async def test_heartbeats_received_during_a_write_are_recorded_together() -> None:
    store = SlowStore()
    agents = [f"a{k}" for k in range(MAX_HEARTBEATS + 2)]
    _, ended = await record_all(store, agents)
    assert ended == [None] * len(agents)
    assert store.batches == [
        agents[:1],
        agents[1 : MAX_HEARTBEATS + 1],
        agents[MAX_HEARTBEATS + 1 :],
    ]


async def test_an_unknown_agent_fails_without_affecting_others() -> None:
    store = SlowStore()
    store.unknown, store.replaced = {"b", "c"}, {"b"}
    _, ended = await record_all(store, ["a", "b", "c", "d"])
    assert [type(error) for error in ended] == [type(None), NotAllowed, Conflict, type(None)]


async def test_an_unavailable_store_fails_all_waiting_heartbeats_and_is_asked_again() -> None:
    store = SlowStore()
    store.failure = Unavailable("down")
    _, ended = await record_all(store, ["a", "b"])
    assert [str(error) for error in ended] == ["down", "down"]


async def test_an_error_in_the_store_leaves_no_stream_waiting() -> None:
    store = SlowStore()
    store.failure = ZeroDivisionError()
    _, ended = await record_all(store, ["a", "b"])
    assert [type(error) for error in ended] == [ZeroDivisionError] * 2


async def test_a_stream_that_left_does_not_affect_the_others() -> None:
    store, calls = SlowStore(), Calls(1, "heartbeat")
    beats = HeartbeatRecorder(cast(Store, store), calls)
    left, stays = (asyncio.create_task(beats.record(heartbeat_of(agent))) for agent in "ab")
    await asyncio.sleep(0)
    left.cancel()
    store.go.set()
    with pytest.raises(asyncio.CancelledError):
        await left
    await stays
    await calls.close()
