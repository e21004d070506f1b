"""A server with TLS that asks callers who they are, with a cluster that two tenants share."""

from __future__ import annotations

import asyncio
import secrets
from collections.abc import AsyncIterator, Collection
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import grpc
import grpc.aio
from google.protobuf.message import Message
from google.protobuf.message_factory import GetMessageClass
from grpc import StatusCode
from grpc.aio import Metadata

from tessera.client import ChannelSettings, open_async_channel, open_channel
from tessera.db.access.tokens import create_token
from tessera.db.schema.engine import Database
from tessera.db.store.store import Store
from tessera.formulation.base.access import Role
from tessera.formulation.base.secrets import USER_PREFIX, format_token, hash_secret
from tessera.formulation.records.access import TokenSpec
from tessera.service.server.wiring import RunningServer, assemble_server
from tessera.v1 import access_pb2, agents_pb2, clusters_pb2, jobs_pb2, tenants_pb2
from tests.support.certificates import Site, make_site
from tests.support.database import digest_tables
from tests.support.methods import all_methods
from tests.support.patience import PATIENCE_S
from tests.support.running_server import settings
from tests.support.sample_requests import sample_requests

PLACE = "clusters/main"
OWN, FOREIGN = "azure", "crimson"
"""The tenant of callers that are bound to one, and another one."""

OWN_JOB, FOREIGN_JOB = "ours-1", "theirs-1"

FRESH = (("grpc.use_local_subchannel_pool", 1),)  # a connection of its own


@dataclass
class SecuredServer:
    """A running server, the files of its site, and its database."""

    parts: RunningServer
    site: Site
    database: Database
    _channels: dict[tuple[str, ChannelSettings], grpc.aio.Channel] = field(default_factory=dict)

    @property
    def access(self) -> Store:
        return Store(self.database)

    @property
    def address(self) -> str:
        return f"127.0.0.1:{self.parts.port}"

    @property
    def mutual_address(self) -> str:
        return f"127.0.0.1:{self.parts.server.mutual_port}"

    def add_token(
        self,
        name: str,
        role: Role,
        *,
        tenants: Collection[str] | None = None,
        clusters: Collection[str] | None = None,
        expires_s: float = float("inf"),
    ) -> str:
        """Store a token, and return its text."""
        secret = secrets.token_urlsafe(32)
        token_id = secrets.token_hex(6)
        spec = TokenSpec(
            id=token_id,
            name=name,
            secret_hash=hash_secret(secret),
            role=role,
            tenants=None if tenants is None else frozenset(tenants),
            clusters=None if clusters is None else frozenset(clusters),
            expires_s=expires_s,
        )
        self.access.change(create_token, spec, "tests")
        return format_token(USER_PREFIX, token_id, secret)

    def user(self, token: str = "") -> ChannelSettings:
        """Return the settings of a channel of a user."""
        return ChannelSettings(authorities=self.site.authorities, token=token)

    def channel(self, who: ChannelSettings) -> grpc.aio.Channel:
        """Return a channel, to the port for agents if there is a certificate."""
        address = self._address_for(who)
        if (address, who) not in self._channels:
            self._channels[address, who] = open_async_channel(address, who, FRESH)
        return self._channels[address, who]

    def _address_for(self, who: ChannelSettings) -> str:
        return self.address if who.certificate is None else self.mutual_address

    async def call(
        self, who: ChannelSettings, path: str, request: Message, metadata: Any = None
    ) -> Any:
        """Make a call, and return its answer; of a stream, the first. Raises AioRpcError."""
        method, channel = all_methods()[path], self.channel(who)
        codecs: dict[str, Any] = {
            "request_serializer": lambda message: message.SerializeToString(),
            "response_deserializer": _parser_of(method),
        }
        options: dict[str, Any] = {"timeout": PATIENCE_S, "metadata": metadata}
        if method.client_streaming:
            return await asyncio.to_thread(self._first_answer, who, path, request, codecs, options)
        if method.server_streaming:
            return await _first(channel.unary_stream(path, **codecs)(request, **options))
        return await channel.unary_unary(path, **codecs)(request, **options)

    async def outcome(
        self, who: ChannelSettings, path: str, request: Message, metadata: Any = None
    ) -> tuple[StatusCode, str]:
        """Make a call, and return the server's code and message."""
        try:
            await self.call(who, path, request, metadata)
        except grpc.aio.AioRpcError as error:
            return error.code(), error.details() or ""
        return StatusCode.OK, ""

    def _first_answer(
        self,
        who: ChannelSettings,
        path: str,
        request: Message,
        codecs: dict[str, Any],
        options: dict[str, Any],
    ) -> Any:
        """Return the first answer of a stream. It blocks. Raises AioRpcError.

        If the server ends a stream while the client writes to it, the client of asyncio fails with
        an error of its own. This one returns the server's.
        """
        with open_channel(self._address_for(who), who, FRESH) as channel:
            answers = channel.stream_stream(path, **codecs)(iter([request]), **options)
            try:
                return next(answers, None)
            except grpc.RpcError as error:
                raise grpc.aio.AioRpcError(
                    answers.code(), Metadata(), Metadata(), details=answers.details()
                ) from error
            finally:
                answers.cancel()

    def fingerprint(self) -> dict[str, tuple[int, str]]:
        """Return the number of rows and a digest of each table that calls change."""
        return digest_tables(self.database)

    async def close(self) -> None:
        """Close the channels."""
        for channel in self._channels.values():
            await channel.close()


def _parser_of(method: Any) -> Any:
    return GetMessageClass(method.output_type).FromString


async def _first(answers: Any) -> Any:
    async for answer in answers:
        answers.cancel()
        return answer
    return None


def requests_for(job: str = OWN_JOB, cluster: str = "main") -> dict[str, Message]:
    """Return a request for each method, by path, that names ``job`` where it names one."""
    place = f"clusters/{cluster}"
    hello = agents_pb2.Hello(
        parent=place,
        agent_id="agent-1",
        incarnation="first",
        nodes=[agents_pb2.AgentNode(node="n0", gpu_type="a40", gpus=4)],
    )
    reflected = all_methods()["/grpc.reflection.v1alpha.ServerReflection/ServerReflectionInfo"]
    found = dict(sample_requests(cluster, job))
    found["/tessera.v1.Jobs/WatchJob"] = jobs_pb2.WatchJobRequest(name=f"{place}/jobs/{job}")
    found["/tessera.v1.Jobs/ReadLogs"] = jobs_pb2.ReadLogsRequest(name=f"{place}/jobs/{job}")
    found["/tessera.v1.Agents/Sync"] = agents_pb2.AgentMessage(hello=hello)
    for path, method in all_methods().items():
        if path.startswith("/grpc.health"):
            found[path] = GetMessageClass(method.input_type)()
    found[f"/{reflected.containing_service.full_name}/{reflected.name}"] = GetMessageClass(
        reflected.input_type
    )(list_services="*")
    return found


async def fill(server: SecuredServer, admin: ChannelSettings) -> None:
    """Make a cluster with the jobs of two tenants, a round, and a network plan."""
    samples = requests_for()

    async def send(method: str, request: Message | None = None) -> Any:
        path = f"/tessera.v1.{method}"
        return await server.call(admin, path, request or samples[path])

    await send("Clusters/UpsertCluster")
    nodes = [
        clusters_pb2.Node(name=f"{PLACE}/nodes/{name}", gpu_type="a40", gpus=2)
        for name in ("host-0", "host-1", "host-2", "host-3")
    ]
    await send("Clusters/UpsertNodes", clusters_pb2.UpsertNodesRequest(parent=PLACE, nodes=nodes))
    await send("Estimates/UpsertCells")
    tenants = [
        tenants_pb2.Tenant(name=f"{PLACE}/tenants/{name}", weight=1.0, quotas={"": 2})
        for name in (OWN, FOREIGN)
    ]
    await send(
        "Tenants/UpsertTenants", tenants_pb2.UpsertTenantsRequest(parent=PLACE, tenants=tenants)
    )
    base = samples["/tessera.v1.Jobs/SubmitJob"]
    assert isinstance(base, jobs_pb2.SubmitJobRequest)
    for tenant, prefix in ((OWN, "ours"), (FOREIGN, "theirs")):
        for number in range(1, 5):
            request = jobs_pb2.SubmitJobRequest(
                parent=PLACE, job_id=f"{prefix}-{number}", job=base.job
            )
            request.job.tenant = tenant
            request.job.weight = float(number)
            await send("Jobs/SubmitJob", request)
    await send("Networks/UpdateTopology")
    await send("Scheduler/Schedule")


@asynccontextmanager
async def secured_server(
    folder: Path, database: Database, **changes: Any
) -> AsyncIterator[SecuredServer]:
    """Run a server with TLS inside the block."""
    site = make_site(folder)
    config = settings(database, tls_directory=str(folder), estimate_cells=False, **changes)
    async with assemble_server(config) as parts:
        server = SecuredServer(parts, site, database)
        try:
            yield server
        finally:
            await server.close()


GET_CALLER = access_pb2.GetCallerRequest()
CALLER_PATH = "/tessera.v1.Access/GetCaller"
