"""The Python client for commands, and its errors in words and exit codes."""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from enum import IntEnum
from typing import Final

from google.protobuf.timestamp_pb2 import Timestamp

from tessera.client import (
    CallError,
    ChannelRefused,
    ChannelSettings,
    Client,
    DeadlineExceeded,
    Login,
    NotFound,
    ServerTooOld,
    Unavailable,
    find_settings,
)
from tessera.formulation.base.errors import TesseraError
from tessera.formulation.base.secrets import hide_secrets
from tessera.service.cli.channelfailures import advise_caller, explain_channel

RETRY_S: Final = 2.0
"""Seconds for which a call is tried again that finds no server: three times, for people wait."""


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
    """A command that failed, with a message for the user and an ``exit_code`` for the shell."""

    def __init__(self, message: str, exit_code: Exit) -> None:
        super().__init__(message)
        self.exit_code = exit_code


_EXIT_CODES: Final[Mapping[type[CallError], Exit]] = {
    Unavailable: Exit.UNREACHABLE,
    NotFound: Exit.NOT_FOUND,
}
"""The exit codes of errors that are not merely refusals."""


@contextmanager
def connect(server: str, settings: ChannelSettings | None = None) -> Iterator[Client]:
    """Yield a client of ``server`` (host:port) for the length of the block.

    Its settings are those of the environment and the login file, unless others are given. A login
    that is about to expire is renewed.

    Raises:
        CallFailed: the settings do not allow it, or the block does not catch the error of a call.
    """
    try:
        chosen = find_settings(server, os.environ, _renew_login) if settings is None else settings
        if chosen.renew_token is not None:
            chosen.renew_token()  # its errors are clearer here than from within a call
        client = Client(server, settings=chosen, retry_s=RETRY_S)
    except ChannelRefused as error:
        raise CallFailed(str(error), Exit.REFUSED) from error
    with client:
        try:
            yield client
        except CallError as error:
            raise explain_failure(error, client) from error


def _renew_login(address: str, login: Login) -> Login:
    from tessera.service.cli.access.renewal import renew_login  # noqa: PLC0415 - HTTP starts slowly

    return renew_login(address, login)


def current_timestamp() -> Timestamp:
    """Return this machine's present time, for ages and relative deadlines."""
    timestamp = Timestamp()
    timestamp.GetCurrentTime()
    return timestamp


def explain_failure(error: CallError, client: Client, hint: str = "") -> CallFailed:
    """Return ``error`` as one line that explains what went wrong, with its exit code.

    ``hint`` is the end of the line.
    """
    if not error.reason and (problem := explain_channel(error, client.address, client.settings)):
        return CallFailed(problem, Exit.REFUSED)
    text = hide_secrets(str(error))
    if error.reason or not isinstance(error, Unavailable | DeadlineExceeded | ServerTooOld):
        advice = _hint(error) or advise_caller(error.code, client.settings)
        text = f"{text}{advice} [{error.reason or error.code.name}]"
    elif isinstance(error, Unavailable):
        text += "; start one with `tessera up`, or name another one with --server or TESSERA_SERVER"
    return CallFailed(text + hint, _EXIT_CODES.get(type(error), Exit.REFUSED))


def _hint(error: CallError) -> str:
    """Return advice if the missing resource is a cluster, or else ""."""
    kind, _, rest = error.facts.get("resource", "").partition("/")
    if not isinstance(error, NotFound) or kind != "clusters" or "/" in rest:
        return ""
    return "; create it with `tessera cluster apply -f FILE`, or start with `tessera up`"
