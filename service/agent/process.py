"""A process that outlives its parent, is found by id and start time, and is not polled."""

from __future__ import annotations

import asyncio
import logging
import os
import select
import signal
import sys
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from types import MappingProxyType
from typing import Final

from tessera.formulation.base.secrets import hide_secrets
from tessera.service.agent.files import (
    open_private,
    read_json,
    read_start,
    write_json,
)
from tessera.service.agent.lease import boot_id

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True, kw_only=True)
class ProcessIdentity:
    """The properties that distinguish a process from a later one with the same id."""

    pid: int
    start_ticks: int  # since boot, field 22 of /proc/PID/stat
    boot: str  # boot id


MAX_STAT_BYTES: Final = 4096
"""More than the bytes of /proc/PID/stat."""

ALLOWED_VARIABLES: Final = frozenset({"TESSERA_NETWORK"})
"""Our variables that a job's processes get. Others may be, or name, a secret of ours."""

SECRET_VARIABLES: Final = frozenset({"PGPASSWORD", "PGPASSFILE", "PGSERVICEFILE"})
"""Variables of others with which a program of ours reaches the database."""


def remove_secrets(environment: Mapping[str, str]) -> dict[str, str]:
    """Return the variables that a job's processes may see: none of ours, and none with a secret."""
    return {
        name: value
        for name, value in environment.items()
        if name in ALLOWED_VARIABLES
        or not (
            name.startswith("TESSERA_") or name in SECRET_VARIABLES or hide_secrets(value) != value
        )
    }


def identity_of(pid: int) -> ProcessIdentity | None:
    """Return the identity of the process that has the id ``pid`` now, or None if no such process exists."""
    try:
        stat = read_start(f"/proc/{pid}/stat", MAX_STAT_BYTES)
    except (FileNotFoundError, ProcessLookupError):
        return None
    start_ticks = int(stat.rpartition(b")")[2].split()[19])
    return ProcessIdentity(pid=pid, start_ticks=start_ticks, boot=boot_id())


def read_identity(file: Path) -> ProcessIdentity | None:
    """Return the process that is recorded in ``file``, or None if there is no such file.

    Raises:
        OSError, TypeError, ValueError: the file cannot be read, or holds something else.
    """
    stored = read_json(str(file))
    return None if stored is None else ProcessIdentity(**stored)


class Process:
    """A process in its own session, started by this agent or by an earlier one."""

    def __init__(self, pid: int, pidfd: int | None, output: int | None) -> None:
        self._pid = pid
        self._pidfd = pidfd  # None once it is dead
        self._output = output  # read end of its standard output; None if not ours, or closed

    @classmethod
    def spawn(
        cls,
        argv: list[str],
        message: str,
        *,
        identity: Path,
        errors: Path,
        blocked: Iterable[int] = (),
        environment: Mapping[str, str] = MappingProxyType({}),
    ) -> Process:
        """Start ``argv`` with ``message`` on its standard input.

        The process's identity is written to the file ``identity`` before the message is sent. If
        the agent dies before that, the process reads an empty message and must end. ``blocked``
        lists the signals that the process waits for.
        """
        child_errors = open_private(str(errors), keep=True)
        child_in, our_out = os.pipe()
        our_in, child_out = os.pipe()
        try:
            pid = os.posix_spawn(
                argv[0],
                argv,
                remove_secrets(environment),
                file_actions=(
                    (os.POSIX_SPAWN_DUP2, child_in, 0),
                    (os.POSIX_SPAWN_DUP2, child_out, 1),
                    (os.POSIX_SPAWN_DUP2, child_errors, 2),
                ),
                setsid=True,
                setsigmask=blocked,
            )
        except OSError:
            os.close(our_in)
            os.close(our_out)
            raise
        finally:
            for descriptor in (child_in, child_out, child_errors):
                os.close(descriptor)
        process = cls(pid, os.pidfd_open(pid), our_in)
        process._introduce(identity, message, our_out)
        return process

    def _introduce(self, identity: Path, message: str, pipe: int) -> None:
        """Record the child's identity, then send it the message. Close ``pipe``."""
        try:
            found = identity_of(self._pid)
            if found is None:  # impossible before the child was waited for
                raise ProcessLookupError(f"child {self._pid} vanished")
            write_json(str(identity), asdict(found))
            data = message.encode()
            while data:  # a pipe takes a part of a long message
                data = data[os.write(pipe, data) :]
        except BrokenPipeError:  # it died already; ``ended`` will return how
            log.warning(
                "a process did not read its specification",
                extra={"event": "specification_unread", "pid": self._pid},
            )
        except OSError:
            self.signal(signal.SIGKILL)
            os.waitpid(self._pid, 0)
            raise
        finally:
            os.close(pipe)

    @classmethod
    def adopt(cls, identity: Path) -> Process | None:
        """Return the process recorded in the file ``identity``, dead or alive.

        If there is no such file, return None.
        """
        wanted = read_identity(identity)
        if wanted is None:
            return None
        try:
            pidfd = os.pidfd_open(wanted.pid)
        except ProcessLookupError:
            return cls(wanted.pid, None, None)
        if identity_of(wanted.pid) == wanted and not _is_dead(pidfd):
            return cls(wanted.pid, pidfd, None)
        os.close(pidfd)
        return cls(wanted.pid, None, None)

    async def spoke(self) -> None:
        """Return at the first output or the end of the process."""
        if self._output is not None:
            await _readable(self._output)
            os.close(self._output)
            self._output = None
        elif self._pidfd is not None:
            await _readable(self._pidfd)

    async def ended(self) -> int | None:
        """Return the exit status once the process is dead.

        The status is negative for a signal, and None if the process is not this agent's child.
        """
        if self._pidfd is None:
            return None
        await _readable(self._pidfd)
        os.close(self._pidfd)
        self._pidfd = None
        try:
            _, status = os.waitpid(self._pid, 0)
        except ChildProcessError:  # adopted: its status goes to its actual parent
            return None
        return os.waitstatus_to_exitcode(status)

    def leave(self) -> None:
        """Watch the process no more. It notices that nobody reads its output."""
        for descriptor in (self._output, self._pidfd):
            if descriptor is not None:
                os.close(descriptor)
        self._output = self._pidfd = None

    def signal(self, number: signal.Signals) -> None:
        """Send a signal, unless the process is dead."""
        if self._pidfd is None:
            return
        try:
            signal.pidfd_send_signal(self._pidfd, number)
        except ProcessLookupError:
            log.debug(
                "the process is dead already", extra={"event": "signal_late", "pid": self._pid}
            )


def python_argv(script: Path, *arguments: str) -> list[str]:
    """Return a command that runs a script on the standard library, without site or environment."""
    return [sys.executable, "-S", "-E", "-s", str(script), *arguments]


def _is_dead(pidfd: int) -> bool:
    poll = select.poll()
    poll.register(pidfd, select.POLLIN)
    return bool(poll.poll(0))


async def _readable(descriptor: int) -> None:
    loop = asyncio.get_running_loop()
    ready: asyncio.Future[None] = loop.create_future()

    def wake() -> None:
        if not ready.done():
            ready.set_result(None)

    loop.add_reader(descriptor, wake)
    try:
        await ready
    finally:
        loop.remove_reader(descriptor)
