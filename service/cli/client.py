"""The command line's API client: one channel, safe retries, and errors with exit codes."""

from __future__ import annotations

import json
import os
import uuid
from collections.abc import Iterator
from contextlib import contextmanager
from enum import IntEnum
from typing import Final, Protocol, TypeVar

import grpc
from google.protobuf.timestamp_pb2 import Timestamp
from google.rpc import error_details_pb2
from grpc_status import rpc_status

from tessera.client import (
    PLAIN_TEXT,
    ChannelRefused,
    ChannelSettings,
    Login,
    find_settings,
    open_channel,
)
from tessera.formulation.errors import NotFound, TesseraError
from tessera.formulation.secrets import hide_secrets
from tessera.service.cli.channelfailures import advise_caller, explain_channel
from tessera.v1 import (
    access_pb2_grpc,
    clusters_pb2_grpc,
    estimates_pb2_grpc,
    jobs_pb2_grpc,
    networks_pb2_grpc,
    scheduler_pb2_grpc,
    tenants_pb2_grpc,
    webhooks_pb2_grpc,
)

DEADLINE_S: Final = 60.0
"""Time limit, in seconds, of a call without its own ``--time-limit``."""

_RETRY: Final = {
    "methodConfig": [
        {
            "name": [{}],  # every method, because those that change something carry a request id
            "retryPolicy": {
                "maxAttempts": 4,
                "initialBackoff": "0.3s",
                "maxBackoff": "2s",
                "backoffMultiplier": 2,
                "retryableStatusCodes": ["UNAVAILABLE"],
            },
        }
    ]
}

_OPTIONS: Final = (
    ("grpc.service_config", json.dumps(_RETRY)),
    ("grpc.initial_reconnect_backoff_ms", 200),
    ("grpc.max_receive_message_length", 256 << 20),  # a round's decisions, or a page of 10,000 jobs
)

_Q = TypeVar("_Q")
_R = TypeVar("_R")


class Exit(IntEnum):
    """The exit codes of the process, documented in ``tessera --help`` and docs/command-line.md."""

    OK = 0
    REFUSED = 1
    USAGE = 2
    UNREACHABLE = 3
    NOT_FOUND = 4
    JOB_FAILED = 5
    JOB_CANCELLED = 6
    JOB_REJECTED = 7
    INTERRUPTED = 130


class CallFailed(TesseraError):
    """A failed call, with a message for the user and an ``exit_code`` for the shell.

    ``reason`` is the token of the server's error, or else the name of the gRPC code. It is "" if
    there is neither.
    """

    def __init__(self, message: str, exit_code: Exit, reason: str = "") -> None:
        super().__init__(message)
        self.exit_code, self.reason = exit_code, reason


class Paged(Protocol):
    """A request for one page of a list."""

    page_size: int
    page_token: str


class Page(Protocol):
    """One page of a list."""

    @property
    def next_page_token(self) -> str:
        """Return the token of the next page, or "" if this is the last one."""
        ...


_Paged = TypeVar("_Paged", bound=Paged)
_Page = TypeVar("_Page", bound=Page)


class Client:
    """The services of one server, over one channel."""

    def __init__(
        self, channel: grpc.Channel, server: str, settings: ChannelSettings = PLAIN_TEXT
    ) -> None:
        self.server, self._settings = server, settings
        self.access = access_pb2_grpc.AccessStub(channel)
        self.clusters = clusters_pb2_grpc.ClustersStub(channel)
        self.estimates = estimates_pb2_grpc.EstimatesStub(channel)
        self.jobs = jobs_pb2_grpc.JobsStub(channel)
        self.networks = networks_pb2_grpc.NetworksStub(channel)
        self.scheduler = scheduler_pb2_grpc.SchedulerStub(channel)
        self.tenants = tenants_pb2_grpc.TenantsStub(channel)
        self.webhooks = webhooks_pb2_grpc.WebhooksStub(channel)

    def call(
        self,
        method: grpc.UnaryUnaryMultiCallable[_Q, _R],
        request: _Q,
        deadline_s: float = DEADLINE_S,
    ) -> _R:
        """Call ``method`` and return its answer. Raises CallFailed."""
        try:
            return method(request, timeout=deadline_s)
        except grpc.RpcError as error:
            raise explain_failure(error, self.server, deadline_s, self._settings) from error

    def stream(self, method: grpc.UnaryStreamMultiCallable[_Q, _R], request: _Q) -> Iterator[_R]:
        """Yield the answers until the server ends the stream. Raises CallFailed."""
        try:
            yield from method(request)
        except grpc.RpcError as error:
            raise explain_failure(error, self.server, None, self._settings) from error

    def pages(
        self,
        method: grpc.UnaryUnaryMultiCallable[_Paged, _Page],
        request: _Paged,
        page_size: int = 1000,
    ) -> Iterator[_Page]:
        """Yield the pages of a list until its end. Raises CallFailed."""
        request.page_size = page_size
        while True:
            page = self.call(method, request)
            yield page
            if not page.next_page_token:
                return
            request.page_token = page.next_page_token


@contextmanager
def connect(server: str, settings: ChannelSettings | None = None) -> Iterator[Client]:
    """Open a channel to ``server`` (host:port) for the length of the block.

    Its settings are those of the environment and the login file, unless others are given. A login
    that is about to expire is renewed.

    Raises:
        CallFailed: the settings do not allow it.
    """
    try:
        chosen = find_settings(server, os.environ, _renew_login) if settings is None else settings
        if chosen.renew_token is not None:
            chosen.renew_token()  # its errors are clearer here than from within a call
        channel = open_channel(server, chosen, _OPTIONS)
    except ChannelRefused as error:
        raise CallFailed(str(error), Exit.REFUSED) from error
    with channel:
        yield Client(channel, server, chosen)


def _renew_login(address: str, login: Login) -> Login:
    from tessera.service.cli.renewal import renew_login  # noqa: PLC0415 - HTTP starts slowly

    return renew_login(address, login)


def new_request_id() -> str:
    """Return a fresh id. A request sent again with the same id is executed once (AIP-155)."""
    return str(uuid.uuid4())


def current_timestamp() -> Timestamp:
    """Return this machine's present time, for ages and relative deadlines."""
    timestamp = Timestamp()
    timestamp.GetCurrentTime()
    return timestamp


def explain_failure(
    error: grpc.RpcError,
    server: str,
    deadline_s: float | None,
    settings: ChannelSettings = PLAIN_TEXT,
) -> CallFailed:
    """Return ``error`` as one line that explains what went wrong, with its exit code."""
    if not isinstance(error, grpc.Call):
        return CallFailed(str(error), Exit.REFUSED)
    code, text, info = error.code(), hide_secrets(error.details() or ""), _info(error)
    exit_code = {
        grpc.StatusCode.UNAVAILABLE: Exit.UNREACHABLE,
        grpc.StatusCode.NOT_FOUND: Exit.NOT_FOUND,
    }.get(code, Exit.REFUSED)
    if info.reason:
        advice = _hint(info) or advise_caller(code, settings)
        return CallFailed(f"{text}{advice} [{info.reason}]", exit_code, info.reason)
    if problem := explain_channel(code, text, server, settings):
        return CallFailed(problem, Exit.REFUSED, code.name)
    if code is grpc.StatusCode.UNAVAILABLE:
        cause = text.rpartition(": ")[2] or "no answer"
        message = (
            f"no server answers at {server} ({cause}); start one with `tessera up`,"
            " or name another one with --server or TESSERA_SERVER"
        )
    elif code is grpc.StatusCode.DEADLINE_EXCEEDED and deadline_s is not None:
        message = f"{server} did not answer within {deadline_s:g} s"
    elif code is grpc.StatusCode.UNIMPLEMENTED:
        message = (
            f"the server at {server} is older than this command; upgrade it to the same release"
        )
    else:
        advice = advise_caller(code, settings)
        message = f"{text or 'the call failed'}{advice} [{code.name}]"
    return CallFailed(message, exit_code, code.name)


def _hint(info: error_details_pb2.ErrorInfo) -> str:
    """Return advice if the missing resource is a cluster, or else ""."""
    kind, _, rest = info.metadata.get("resource", "").partition("/")
    if info.reason != NotFound.reason or kind != "clusters" or "/" in rest:
        return ""
    return "; create it with `tessera cluster apply -f FILE`, or start with `tessera up`"


def _info(error: grpc.Call) -> error_details_pb2.ErrorInfo:
    """Return google.rpc.ErrorInfo, which is empty if the error carries none."""
    status = rpc_status.from_call(error)
    for detail in status.details if status is not None else ():
        info = error_details_pb2.ErrorInfo()
        if detail.Unpack(info):
            return info
    return error_details_pb2.ErrorInfo()
