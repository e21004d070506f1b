"""Replacing every certificate and the authority disturbs no job, no call and no stream."""

from __future__ import annotations

import shutil
import signal
import ssl
from collections.abc import Iterator, Sequence
from functools import partial
from pathlib import Path

import grpc
import pytest
from cryptography import x509

from tessera.client import ChannelSettings, open_channel
from tessera.db.schema.engine import Database
from tessera.service.cli.access.authority import (
    make_authority,
    renew_server,
    retire_authority,
    rotate_authority,
)
from tessera.service.cli.demo.stack import Stack, run_stack
from tessera.v1 import access_pb2, access_pb2_grpc, jobs_pb2
from tests.support.rotation import (
    TENANT,
    SteadyCalls,
    load_runs,
    write_join_token,
)
from tests.support.system import QUICK, Agent, Lab, User, a_job_message, until

JOBS = 200
AGENTS, NODES = 2, 5
GPUS = JOBS // (AGENTS * NODES)
ANSWERS = 3
"""Answers of each client between two rotations."""

SETTINGS = {"TESSERA_LEASE_S": "60", "TESSERA_MARGIN_S": "30", "TESSERA_ROUND_THREADS": "1"}


@pytest.fixture
def site(tmp_path: Path) -> Path:
    folder = tmp_path / "tls"
    make_authority(folder, ["localhost", "127.0.0.1", "127.0.0.2"])
    return folder


@pytest.fixture
def stack(site: Path, database: Database) -> Iterator[Stack]:
    with run_stack(2, SETTINGS, database_url=database.url, tls=site) as started:
        yield started


def start_agents(lab: Lab, site: Path) -> list[Agent]:
    """Start agents, each of which is connected to another replica."""
    token = write_join_token(lab, site / "join", "gpu-*", uses=AGENTS)
    flags = [f"--ca={site / 'ca.pem'}", f"--join-token-file={token}"]
    return [
        lab.agent(
            *((f"gpu-{number}-{k}", GPUS) for k in range(NODES)),
            flags=[*flags, f"--server={lab.stack.addresses[number]}"],
        )
        for number in range(AGENTS)
    ]


def start_jobs(lab: Lab) -> list[str]:
    """Start jobs that hold all GPUs and run for ever; return their names."""
    names = [f"steady-{k}" for k in range(JOBS)]
    inner = []
    for name in names:
        job = a_job_message(1, weight=1000.0)
        job.guaranteed, job.tenant = True, TENANT
        inner.append(jobs_pb2.SubmitJobRequest(job_id=name, job=job))
    request = jobs_pb2.SubmitJobsRequest(parent=lab.parent, requests=inner)
    lab.user.replicas[0].jobs.SubmitJobs(request)
    lab.schedule()
    until(lambda: len(lab.jobs(jobs_pb2.RUNNING)) == JOBS, "all jobs run", every_s=0.5)
    return names


def count_lines(agent: Agent, event: str) -> int:
    return agent.log.read_text().count(f" {event} ")


def has_connected(agent: Agent, times: int) -> bool:
    return count_lines(agent, "connected") == times


def renew_agents(agents: Sequence[Agent]) -> None:
    """Let all agents renew their certificates, and wait until they have connected with them."""
    renewals = [count_lines(agent, "certificate_renewed") + 1 for agent in agents]
    for agent in agents:
        agent.process.send_signal(signal.SIGUSR1)
    for agent, number in zip(agents, renewals, strict=True):
        until(
            partial(has_connected, agent, number + 1),
            f"{agent.name} has connected with its certificate number {number + 1}",
        )
        assert count_lines(agent, "certificate_renewed") == number


def served_serials(stack: Stack) -> set[int]:
    """Return the serial numbers of the certificates that all ports show to new connections."""
    serials = set()
    for address in stack.addresses:
        host, _, port = address.rpartition(":")
        for number in (int(port), int(port) + 1):
            pem = ssl.get_server_certificate((host, number))
            serials.add(x509.load_pem_x509_certificate(pem.encode()).serial_number)
    return serials


def serial_in(site: Path) -> int:
    return x509.load_pem_x509_certificate((site / "server.pem").read_bytes()).serial_number


def refusal_of(address: str, settings: ChannelSettings) -> grpc.StatusCode:
    with (
        open_channel(address, settings, QUICK) as channel,
        pytest.raises(grpc.RpcError) as caught,
    ):
        access_pb2_grpc.AccessStub(channel).GetCaller(access_pb2.GetCallerRequest(), timeout=60)
    assert isinstance(caught.value, grpc.Call)
    return caught.value.code()


def agent_port(address: str) -> str:
    host, _, port = address.rpartition(":")
    return f"{host}:{int(port) + 1}"


def files_in(folder: Path) -> ChannelSettings:
    return ChannelSettings(
        authorities=str(folder / "authorities.pem"),
        certificate=folder / "certificate.pem",
        key=folder / "key.pem",
    )


def test_five_rotations_of_certificates_disturb_no_job_no_call_and_no_stream(
    stack: Stack, site: Path, tmp_path: Path
) -> None:
    with User(stack) as user, Lab(stack, user, "rotated") as lab:
        agents = start_agents(lab, site)
        names = start_jobs(lab)
        runs = load_runs(lab, names, agents)
        assert len({run.pid for run in runs.values()}) == JOBS
        first_identity = tmp_path / "first"
        shutil.copytree(agents[0].folder / "identity" / "current", first_identity)
        first_authorities = (site / "ca.pem").read_text()
        with SteadyCalls(lab, watched=names[:4]) as calls:
            calls.wait_for_answers(ANSWERS)

            def require_undisturbed() -> None:
                calls.wait_for_answers(ANSWERS)
                assert load_runs(lab, names, agents) == runs

            renew_server(site)  # 1: the server's certificate
            assert served_serials(stack) == {serial_in(site)}
            require_undisturbed()
            renew_agents(agents)  # 2: the agents' certificates
            require_undisturbed()
            rotate_authority(site)  # 3: the authority, which signs the agents' next certificates
            renew_agents(agents)
            require_undisturbed()
            renew_server(site)  # 4: the server's certificate, by the new authority
            assert served_serials(stack) == {serial_in(site)}
            renew_agents(agents)
            require_undisturbed()
            retire_authority(site)  # 5: the old authority
            renew_agents(agents)
            require_undisturbed()
            calls.check()
        # Nothing trusts the old authority any more, nor is it trusted by anyone.
        old_client = ChannelSettings(authorities=first_authorities, token=stack.channel.token)
        assert refusal_of(stack.addresses[0], old_client) is grpc.StatusCode.UNAVAILABLE
        old_agent = files_in(first_identity)
        (first_identity / "authorities.pem").write_text((site / "ca.pem").read_text())
        for address in stack.addresses:
            assert refusal_of(agent_port(address), old_agent) is grpc.StatusCode.UNAVAILABLE
        for agent in agents:
            trusted = agent.folder / "identity" / "current" / "authorities.pem"
            assert trusted.read_text() == (site / "ca.pem").read_text()
            for trouble in ("disconnected", "lease_expired", "renewal_failed", "enrolment_failed"):
                assert not count_lines(agent, trouble), agent.log.read_text()
        assert calls.answers["watch"] >= 4
        require_no_other_events(lab, names)


def require_no_other_events(lab: Lab, names: Sequence[str]) -> None:
    """Check that the histories of some jobs end with their start."""
    for name in names[:: JOBS // 20]:
        request = jobs_pb2.ListJobEventsRequest(parent=f"{lab.parent}/jobs/{name}")
        events = lab.user.replicas[0].jobs.ListJobEvents(request).events
        assert [event.event for event in events] == ["start", "ran"], (name, events)
