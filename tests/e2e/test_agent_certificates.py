"""Real agents that enrol at a real server with TLS, renew their certificates, and start again."""

from __future__ import annotations

import asyncio
import json
import signal
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from typing import Any

import pytest

from tessera.db.access.enrolment import create_join_token, list_certificates, list_join_tokens
from tessera.db.schema.engine import Database
from tessera.formulation.base.access import Role
from tessera.formulation.base.secrets import JOIN_PREFIX, format_token, hash_secret
from tessera.formulation.records.access import JoinTokenSpec
from tessera.v1 import clusters_pb2, jobs_pb2, scheduler_pb2
from tests.support.access import LATER_S
from tests.support.agent_server import AgentProcess
from tests.support.agents import until
from tests.support.secured_server import PLACE, SecuredServer, requests_for, secured_server

SECRET = 43 * "s"
SHORT_HOURS = 0.02
"""The shortest lifetime of a certificate that a server signs, 72 s."""


class EnrollingAgent(AgentProcess):
    """An agent that enrols with a token in a file."""

    def __init__(self, server: SecuredServer, folder: Path) -> None:
        self._access, self.token_file = server.access, folder / "join-token"
        flags = ["--cluster=main", "--clock-factor=100", f"--server={server.address}"]
        flags += [f"--ca={server.site.authorities}", f"--join-token-file={self.token_file}"]
        super().__init__(folder / "data", (), *flags, nodes=["n0:a40:2"])

    def give_token(self, *nodes: str, mode: int = 0o600) -> None:
        """Write a file with a join token for ``nodes``."""
        number = len(self._access.read(list_join_tokens, "main", with_ended=True))
        spec = JoinTokenSpec(
            id=f"j{number:011d}",
            secret_hash=hash_secret(SECRET),
            cluster="main",
            nodes=nodes,
            uses=1,
            expires_s=LATER_S,
        )
        self._access.change(create_join_token, spec, "tests")
        self.token_file.write_text(format_token(JOIN_PREFIX, spec.id, SECRET) + "\n")
        self.token_file.chmod(mode)

    def identity(self) -> Any:
        """Return what the agent stored of its certificate, or None."""
        path = self.data_dir / "identity" / "identity.json"
        return json.loads(path.read_text())["held"] if path.exists() else None

    def folders(self) -> list[str]:
        folder = self.data_dir / "identity"
        assert (folder / "current").resolve().name == self.identity()["folder"]
        return [path.name for path in folder.iterdir() if path.is_dir() and not path.is_symlink()]


class User:
    """An administrator of the server."""

    def __init__(self, server: SecuredServer) -> None:
        self._server, self._who = server, server.user(server.add_token("ada", Role.ADMIN))

    async def call(self, method: str, request: Any = None) -> Any:
        path = f"/tessera.v1.{method}"
        return await self._server.call(self._who, path, request or requests_for()[path])

    async def is_ready(self, node: str = "n0") -> bool:
        request = clusters_pb2.ListNodesRequest(parent=PLACE)
        nodes = (await self.call("Clusters/ListNodes", request)).nodes
        ready = clusters_pb2.Node.READY
        return any(n.name.endswith(f"/{node}") and n.state == ready for n in nodes)

    async def job(self) -> Any:
        return await self.call("Jobs/GetJob", jobs_pb2.GetJobRequest(name=f"{PLACE}/jobs/long"))

    async def run_job(self) -> Any:
        """Submit a job that runs for very long, and return it once it runs."""
        text = requests_for()["/tessera.v1.Jobs/SubmitJob"].SerializeToString()
        request = jobs_pb2.SubmitJobRequest.FromString(text)
        request.job_id = "long"
        await self.call("Jobs/SubmitJob", request)
        schedule = scheduler_pb2.ScheduleRequest(parent=PLACE)
        await self.call("Scheduler/Schedule", schedule)
        return await self.wait_for_job()

    async def wait_for_job(self, iterations: float = 0.0) -> Any:
        while True:
            job = await self.job()
            if job.state == jobs_pb2.RUNNING and job.iterations_done > iterations:
                return job
            await asyncio.sleep(0.2)

    async def wait_until_ready(self, node: str = "n0") -> None:
        while not await self.is_ready(node):
            await asyncio.sleep(0.1)


@pytest.fixture
async def server(database: Database, tmp_path: Path) -> AsyncIterator[SecuredServer]:
    folder = tmp_path / "site"
    folder.mkdir()
    short: dict[str, Any] = {"agent_certificate_hours": SHORT_HOURS, "inspect_s": 1.0}
    async with secured_server(folder, database, heartbeat_s=2.0, **short) as server:
        yield server


@pytest.fixture
async def user(server: SecuredServer) -> User:
    user = User(server)
    await user.call("Clusters/UpsertCluster")
    await user.call("Estimates/UpsertCells")
    return user


@pytest.fixture
def agent(server: SecuredServer, user: User, tmp_path: Path) -> Iterator[EnrollingAgent]:
    agent = EnrollingAgent(server, tmp_path)
    yield agent
    agent.clean()


async def test_a_renewal_does_not_disturb_a_job_and_a_restart_needs_no_token(
    server: SecuredServer, user: User, agent: EnrollingAgent
) -> None:
    agent.give_token("n*")
    agent.start()
    await user.wait_until_ready()
    first = agent.identity()
    assert (await asyncio.to_thread(agent.token_file.stat)).st_mode & 0o777 == 0o600
    agent.token_file.unlink()
    before = await user.run_job()
    # The agent starts again with the certificate that it has stored.
    await agent.end(signal.SIGKILL)
    agent.start()
    restarted = await user.wait_for_job(before.iterations_done + 50)
    assert agent.identity() == first
    # It renews the certificate, and the job goes on.
    await until(lambda: agent.identity() != first)
    await until(lambda: agent.log.read_text().count(" connected ") == 3)
    after = await user.wait_for_job(restarted.iterations_done + 50)
    assert (after.generation, after.retries) == (before.generation, 0)
    assert agent.folders() == [agent.identity()["folder"]]
    assert await user.is_ready()
    records = server.access.read(list_certificates, "main")
    assert [(record.agent, record.nodes) for record in records] == [("agent", ("n0",))] * 2
    assert SECRET not in agent.log.read_text()


async def test_an_agent_with_other_nodes_or_without_a_token_does_not_start(
    user: User, agent: EnrollingAgent
) -> None:
    agent.start()
    assert await agent.ended() == 2
    assert "must name a file with a join token" in agent.log.read_text()
    agent.give_token("n0", mode=0o644)
    agent.start()
    assert await agent.ended() == 2
    assert "other users can read" in agent.log.read_text()
    agent.token_file.chmod(0o600)
    agent.start()
    await user.wait_until_ready()
    await agent.end(signal.SIGKILL)
    agent.nodes = ["n0:a40:2", "n1:a40:2"]
    agent.start()
    assert await agent.ended() == 2
    assert "refused to enrol this agent" in agent.log.read_text()
    assert SECRET not in agent.log.read_text()
