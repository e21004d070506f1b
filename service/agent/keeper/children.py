"""The processes below a keeper: started as the job's user, known to the last one, and ended.

The keeper is a subreaper: a process whose parent has ended becomes its child. All processes of the
member are therefore its descendants, whatever sessions and groups they have made.
"""

from __future__ import annotations

import ctypes
import os
import signal
import subprocess
import time
from collections import defaultdict

from tessera.service.agent.files import (
    enter_folder,
    read_start,
    write_json,
    write_setting,
)

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Container, Iterable, Mapping, Sequence
    from typing import IO

    from tessera.service.agent.keeper.spec import KeeperSpec

PR_SET_PDEATHSIG, PR_SET_CHILD_SUBREAPER = 1, 36
"""Options of prctl(2)."""

MAX_PROC_BYTES = 2**20
"""The largest number of bytes that are read from a file of /proc."""

PAUSE_S = 0.02
"""Seconds between two looks at processes that were killed and are not dead yet."""

_LIBC = ctypes.CDLL(None, use_errno=True)


class ProgramNotStarted(RuntimeError):
    """The program, or the command before it, could not be started or failed."""


def become_subreaper() -> None:
    """Become the parent of all descendants whose own parent ends."""
    if _LIBC.prctl(PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0):
        raise OSError(ctypes.get_errno(), "prctl(PR_SET_CHILD_SUBREAPER) failed")


def confine(spec: KeeperSpec) -> None:
    """Bind this process to its cores and its cgroup. Children inherit both."""
    if spec.cores:
        os.sched_setaffinity(0, spec.cores)
    if spec.cgroup:
        write_setting(os.path.join(spec.cgroup, "cgroup.procs"), str(os.getpid()))


def start_program(
    spec: KeeperSpec,
    argv: Sequence[str],
    environment: Mapping[str, str],
    directory: str,
    output: int | IO[bytes],
    stdin: str = "",
) -> subprocess.Popen[bytes]:
    """Start ``argv`` as the job's user, in a session of its own, with both outputs in one pipe.

    It is killed if the keeper dies. Its standard input is the text ``stdin``. It enters
    ``directory`` only after it has become that user.

    Raises:
        ProgramNotStarted: it does not exist or must not be run, or its directory cannot be entered.
    """
    keeper = os.getpid()

    def become_program() -> None:
        """Die with the keeper, and enter the directory. The process is the job's user already."""
        _LIBC.prctl(PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
        if os.getppid() != keeper:  # it died in between
            os._exit(1)
        signal.pthread_sigmask(signal.SIG_SETMASK, ())
        try:
            enter_folder(directory)
        except OSError as error:
            os.write(refusing, (error.strerror or str(error)).encode())
            raise

    refused, refusing = os.pipe()
    os.set_blocking(refused, False)
    source = _open_text(stdin) if stdin else None
    try:
        return subprocess.Popen(
            list(argv),
            stdin=subprocess.DEVNULL if source is None else source,
            stdout=output,
            stderr=subprocess.STDOUT,
            env=dict(environment),
            start_new_session=True,
            umask=0o077,
            preexec_fn=become_program,  # other threads of the keeper begin later
            user=spec.user.uid if spec.switches_user else None,
            group=spec.user.gid if spec.switches_user else None,
            extra_groups=spec.user.groups if spec.switches_user else None,
        )
    except (OSError, subprocess.SubprocessError, ValueError) as error:
        if reason := _read_waiting(refused):
            raise ProgramNotStarted(
                f"cannot enter {directory} as {spec.user.name}: {reason}; does it exist on every node, and"
                " may this user enter it?"
            ) from error
        raise ProgramNotStarted(
            f"cannot start {argv[0]} in {directory}: {error}; does it exist on every node, and may the"
            " job's user run it?"
        ) from error
    finally:
        for descriptor in (refused, refusing, source):
            if descriptor is not None:
                os.close(descriptor)


def _read_waiting(pipe: int) -> str:
    """Return the text that waits in a pipe, or "" without any."""
    try:
        return os.read(pipe, 1000).decode()
    except BlockingIOError:
        return ""


def _open_text(text: str) -> int:
    """Return a descriptor from which ``text`` can be read, however long it is. Raises OSError."""
    descriptor = os.memfd_create("stdin")
    with os.fdopen(descriptor, "wb", closefd=False) as file:
        file.write(text.encode())
    os.lseek(descriptor, 0, os.SEEK_SET)
    return descriptor


def find_descendants(root: int | None = None) -> list[int]:
    """Return the ids of all processes below ``root``, by default below this one."""
    top = os.getpid() if root is None else root
    children_of = _children_of if _HAS_CHILDREN_FILES else _read_parents().__getitem__
    found: list[int] = []
    waiting = [top]
    while waiting:
        below = children_of(waiting.pop())
        found += below
        waiting += below
    return found


def identify(pids: Iterable[int]) -> list[list[int]]:
    """Return [pid, start in ticks since boot] of each process that still exists."""
    identities = []
    for pid in pids:
        try:
            stat = read_start(f"/proc/{pid}/stat", MAX_PROC_BYTES)
            ticks = int(stat.rpartition(b")")[2].split()[19])
        except (FileNotFoundError, ProcessLookupError):
            continue
        identities.append([pid, ticks])
    return identities


def record(directory: str, identities: list[list[int]]) -> None:
    """Write down the member's processes. On a full disk, their environment must do."""
    try:
        write_json(os.path.join(directory, "processes.json"), {"processes": identities})
    except OSError:
        return


def end_descendants() -> None:
    """Kill all descendants; return once all are dead."""
    while pids := find_descendants():
        for pid in pids:
            try:
                os.kill(pid, signal.SIGKILL)
            except ProcessLookupError:
                continue
        reap_orphans()
        if find_descendants():
            time.sleep(PAUSE_S)


def reap_orphans(spared: Container[int] = ()) -> None:
    """Let dead children vanish, until one comes that is ``spared``: its status is still to be read."""
    while True:
        try:
            ended = os.waitid(os.P_ALL, 0, os.WEXITED | os.WNOHANG | os.WNOWAIT)
            if ended is None or ended.si_pid in spared:
                return
            os.waitpid(ended.si_pid, 0)
        except ChildProcessError:
            return


def send_signal(pids: Iterable[int], number: signal.Signals) -> None:
    """Send a signal to processes, of which some may have ended."""
    for pid in pids:
        try:
            os.kill(pid, number)
        except ProcessLookupError:
            continue


def _children_of(pid: int) -> list[int]:
    """Return the children of all threads of a process, without those that are dead already."""
    children = []
    try:
        threads = os.listdir(f"/proc/{pid}/task")
    except (FileNotFoundError, ProcessLookupError):
        return []
    for thread in threads:
        try:
            text = read_start(f"/proc/{pid}/task/{thread}/children", MAX_PROC_BYTES)
            children += [int(word) for word in text.split()]
        except (FileNotFoundError, ProcessLookupError):
            continue
    return children


def _read_parents() -> defaultdict[int, list[int]]:
    """Return the children of each process, for kernels that do not list them."""
    children: defaultdict[int, list[int]] = defaultdict(list)
    for entry in os.listdir("/proc"):
        if not entry.isdecimal():
            continue
        try:
            stat = read_start(f"/proc/{entry}/stat", MAX_PROC_BYTES)
            parent = int(stat.rpartition(b")")[2].split()[1])
        except (FileNotFoundError, ProcessLookupError):
            continue
        children[parent].append(int(entry))
    return children


_HAS_CHILDREN_FILES = os.path.exists(f"/proc/self/task/{os.getpid()}/children")
"""Whether the kernel lists the children of a process (CONFIG_PROC_CHILDREN)."""
