"""The agent as a process that talks to a server over a real socket, also through failures."""

from __future__ import annotations

import json
import os
import signal
import time
from pathlib import Path

from tessera.v1 import agents_pb2 as pb
from tessera.v1 import launch_pb2
from tests.support.agent_server import LONG, RUNNING, AgentProcess, FakeServer, MakeAgent
from tests.support.agents import a_gang, is_running, until
from tests.support.output_files import RankFiles


def checkpoint_of(agent: AgentProcess, job: str) -> int:
    path = agent.data_dir / "checkpoints" / "c" / f"job-{job}" / "checkpoint.json"
    return int(json.loads(path.read_text())["iterations"])


async def test_a_job_starts_runs_succeeds_and_is_forgotten(
    server: FakeServer, make_agent: MakeAgent
) -> None:
    server.want(1, a_gang(iterations_total=10_000.0))
    make_agent("--clock-factor", "10000")
    await server.sees(1, ("a", 1, "n0", "SUCCEEDED"))
    assert server.observed is not None
    assert server.observed.gangs[0].iterations_done == 10_000
    assert server.observed.gangs[0].iter_time_s == 1.0
    hello = server.hellos[0]
    assert (hello.parent, hello.agent_id, len(hello.nodes)) == ("clusters/c", "agent", 2)
    server.want(2)
    await server.sees(2)


async def test_a_job_that_fails_says_why_and_is_not_started_again(
    server: FakeServer, make_agent: MakeAgent
) -> None:
    wrong = a_gang("b", command=("train",), shares=(("n1", (0,)),), leader="n1")
    server.want(1, a_gang(command=("fail-at", "5")), wrong)
    make_agent("--clock-factor", "10000")
    await server.sees(1, ("a", 1, "n0", "FAILED"), ("b", 1, "n1", "FAILED"))
    assert server.observed is not None
    errors = [gang.error for gang in server.observed.gangs]
    assert errors[0] == "failed at iteration 5, as requested"
    assert "submit the job with the runtime 'command'" in errors[1]


async def test_a_resized_job_continues_from_its_checkpoint_once_the_old_process_is_dead(
    server: FakeServer, make_agent: MakeAgent
) -> None:
    other = a_gang("b", shares=(("n1", (0,)),), leader="n1", iterations_total=LONG)
    server.want(1, a_gang(iterations_total=LONG), other)
    agent = make_agent("--clock-factor", "1000")
    await server.sees(1, RUNNING, ("b", 1, "n1", "RUNNING"))
    old, pid = agent.pid_of("a"), agent.pid_of("b")
    wide = a_gang(generation=2, iterations_total=LONG, shares=(("n0", (0, 1, 2, 3)),))
    server.want(2, wide, other)
    await until(lambda: set(server.seen(2) or ()) >= {("a", 2, "n0", "RUNNING")})
    assert not is_running(old)
    assert is_running(pid)
    assert server.observed is not None
    (gang,) = (gang for gang in server.observed.gangs if gang.job == "a")
    assert gang.iterations_done >= checkpoint_of(agent, "a") > 0


async def test_a_process_that_does_not_stop_is_killed_after_the_grace(
    server: FakeServer, make_agent: MakeAgent
) -> None:
    server.want(1, a_gang(iterations_total=LONG))
    agent = make_agent("--grace-s", "0.2")
    await server.sees(1, RUNNING)
    pid = agent.pid_of("a")
    os.kill(pid, signal.SIGSTOP)
    server.want(2)
    await server.sees(2, ("a", 1, "n0", "STOPPING"))
    await server.sees(2)
    assert not is_running(pid)


async def test_each_member_is_reported_and_only_the_leader_has_a_process(
    server: FakeServer, make_agent: MakeAgent
) -> None:
    both = (("n0", (0,)), ("n1", (0,)))
    led_here = a_gang("a", shares=both, leader="n0", iterations_total=LONG)
    led_elsewhere = a_gang("b", shares=(("n1", (5,)),), leader="far", iterations_total=LONG)
    server.want(1, led_here, led_elsewhere)
    agent = make_agent()
    await server.sees(1, RUNNING, ("a", 1, "n1", "RUNNING"), ("b", 1, "n1", "RUNNING"))
    assert server.observed is not None
    progress_known = [gang.iterations_done >= 0 for gang in server.observed.gangs]
    assert progress_known == [True, False, False]
    assert agent.pid_of("a")
    assert not (agent.data_dir / "gangs" / "b@1" / "process.json").exists()


async def test_a_restarted_server_disturbs_nothing_and_an_older_revision_is_ignored(
    server: FakeServer, make_agent: MakeAgent
) -> None:
    server.want(7, a_gang(iterations_total=LONG))
    agent = make_agent("--server", "127.0.0.1:1")  # nobody listens there
    await server.sees(7, RUNNING)
    pid = agent.pid_of("a")
    await server.stop()
    server.want(6)  # what a server that lags behind would send
    await server.start()
    await server.sees(7, RUNNING)
    beats = server.heartbeats
    await until(lambda: server.heartbeats > beats + 2)
    assert server.seen(7) == [RUNNING]
    assert agent.pid_of("a") == pid
    assert is_running(pid)
    assert len({hello.incarnation for hello in server.hellos}) == 1


async def test_an_agent_without_contact_for_its_lease_stops_its_gangs(
    server: FakeServer, make_agent: MakeAgent
) -> None:
    server.lease_s = 5.0  # a busy machine may delay the agent's first heartbeats
    server.want(1, a_gang(iterations_total=LONG))
    agent = make_agent("--clock-factor", "1000")
    await server.sees(1, RUNNING)
    pid = agent.pid_of("a")
    await server.stop()
    await until(lambda: not is_running(pid))
    await until(lambda: not (agent.data_dir / "gangs" / "a@1").exists())
    reached = checkpoint_of(agent, "a")
    server.want(2)
    await server.start()
    await server.sees(2)
    server.want(3, a_gang(iterations_total=LONG))
    await server.sees(3, RUNNING)
    assert server.observed is not None
    assert server.observed.gangs[0].iterations_done >= reached > 0


async def test_a_late_message_does_not_prolong_the_lease_of_an_agent(
    server: FakeServer, make_agent: MakeAgent
) -> None:
    server.lease_s, server.heartbeat_s = 10.0, 1.0
    server.want(1, a_gang(iterations_total=LONG))
    agent = make_agent()
    await server.sees(1, RUNNING)
    pid = agent.pid_of("a")
    agent.send(signal.SIGSTOP)
    frozen_s, sent, beats = time.monotonic(), server.sent, server.heartbeats
    await until(lambda: server.sent > sent)  # a message waits in the agent's socket
    server.mute = True
    await until(lambda: time.monotonic() > frozen_s + 1.8)
    agent.send(signal.SIGCONT)
    await until(lambda: server.heartbeats > beats)
    await server.stop()
    await until(lambda: not is_running(pid))
    lease = json.loads((agent.data_dir / "lease.json").read_text())
    assert lease["heard_s"] <= frozen_s


async def test_a_job_that_ends_while_no_agent_runs_is_reported_by_the_next_agent(
    server: FakeServer, make_agent: MakeAgent
) -> None:
    server.want(1, a_gang(command=("fail-at", "1500"), iterations_total=LONG))
    agent = make_agent("--clock-factor", "1000")
    await server.sees(1, RUNNING)
    pid = agent.pid_of("a")
    await agent.end(signal.SIGKILL)
    await until(lambda: not is_running(pid))
    agent.start()
    await server.sees(1, ("a", 1, "n0", "FAILED"))
    assert server.observed is not None
    assert server.observed.gangs[0].error == "failed at iteration 1500, as requested"


async def test_a_terminated_agent_leaves_its_children_running_unless_asked_to_stop_them(
    server: FakeServer, make_agent: MakeAgent
) -> None:
    server.want(1, a_gang(iterations_total=LONG))
    agent = make_agent()
    await server.sees(1, RUNNING)
    pid = agent.pid_of("a")
    assert await agent.end(signal.SIGTERM) == 0
    assert is_running(pid)
    agent.flags = ("--stop-on-exit",)
    server.observed = None
    agent.start()
    await server.sees(1, RUNNING)
    assert await agent.end(signal.SIGINT) == 0
    assert not is_running(pid)


async def test_an_agent_logs_once_which_of_its_nodes_were_deleted_and_continues(
    server: FakeServer, make_agent: MakeAgent
) -> None:
    server.want(1, a_gang())
    agent = make_agent()
    await server.sees(1, RUNNING)
    gangs = server.desired.gangs
    server.desired = pb.Desired(revision=2, gangs=gangs, deleted_nodes=["n1"])
    await server.sees(2, RUNNING)
    sent = server.sent
    await until(lambda: server.sent > sent + 2)
    log = agent.log.read_text()
    (line,) = [line for line in log.splitlines() if " nodes_deleted " in line]
    assert " nodes=n1 " in line
    assert "restart the agent" in log
    server.desired = pb.Desired(revision=3, gangs=gangs)
    await until(lambda: " nodes_returned " in agent.log.read_text())


async def test_an_agent_without_a_cluster_logs_it_once_and_waits_for_the_cluster(
    server: FakeServer, make_agent: MakeAgent
) -> None:
    server.has_cluster = False
    agent = make_agent()
    await until(lambda: len(server.hellos) > 3)
    server.has_cluster = True
    server.want(1, a_gang())
    await server.sees(1, RUNNING)
    assert agent.log.read_text().count(" cluster_unknown ") == 1


async def test_output_is_sent_once_while_it_is_asked_for_and_again_on_the_next_stream(
    server: FakeServer, make_agent: MakeAgent, tmp_path: Path
) -> None:
    RankFiles(tmp_path / "agent-0" / "logs", number=3).write(b"hello")
    server.ask(pb.LogRead(read_id="r", job="j", generation=1, max_bytes=9, job_number=3))
    make_agent()
    await until(lambda: server.log_answers)
    assert server.log_answers == [pb.LogAnswer(read_id="r", data=b"hello")]
    sent, beats = server.sent, server.heartbeats
    await until(lambda: server.sent > sent + 2 and server.heartbeats > beats)
    assert len(server.log_answers) == 1
    await server.stop()
    await server.start()
    await until(lambda: len(server.log_answers) == 2)
    server.ask()
    server.ask(pb.LogRead(read_id="s", job="j", generation=1, max_bytes=9, job_number=4))
    await until(lambda: len(server.log_answers) == 3)
    assert server.log_answers[-1] == pb.LogAnswer(read_id="s")


async def test_an_agent_on_an_open_connection_refuses_programs_and_replays(
    server: FakeServer, tmp_path: Path
) -> None:
    shares = (("n1", (0,)),)
    program = a_gang("b", command=("train",), shares=shares, leader="n1", runtime="command")
    server.want(1, a_gang(iterations_total=LONG), program)
    # An address that is not of the loopback interface, and leads to this machine all the same.
    agent = AgentProcess(tmp_path / "open", [], "--server", f"0.0.0.0:{server.port}")
    try:
        agent.start()
        await server.sees(1, RUNNING, ("b", 1, "n1", "FAILED"))
        assert server.observed is not None
        refused = server.observed.gangs[1]
        assert refused.exit_reason == launch_pb2.EXIT_NOT_STARTED
        assert "this agent's connection to the server is not encrypted" in refused.error
        assert "start the agent with --ca and a join token" in refused.error
    finally:
        agent.clean()
