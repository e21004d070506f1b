"""The processes of a member's ranks, with their pipes and their output."""

from __future__ import annotations

import os
import selectors
import time
from functools import partial

from tessera.service.agent.files import make_pipe, read_start, read_trusted
from tessera.service.agent.keeper import children
from tessera.service.agent.keeper.output import (
    LineFinder,
    LogFiles,
    ProgressFinder,
    RankOutput,
    ReportFinder,
)

TYPE_CHECKING = False
if TYPE_CHECKING:
    import subprocess
    from collections.abc import Callable, Mapping, Sequence
    from typing import Any

    from tessera.service.agent.keeper.spec import KeeperSpec

MAX_PID_BYTES = 32
RECORD_S = 5.0
"""Seconds after which dead orphans are let go, and the living processes are written down again."""


class Ranks:
    """The program of a member: one process, or a launcher with a process for each GPU."""

    def __init__(
        self,
        spec: KeeperSpec,
        found: Callable[[str, str, str | None], None],
        take_report: Callable[[dict[str, Any]], None],
    ) -> None:
        """Call ``found`` with progress in a rank's output, ``take_report`` with reports.

        The arguments of ``found`` are the rank's name, iterations and loss.
        """
        self._spec, self._found, self._take_report = spec, found, take_report
        self._selector = selectors.DefaultSelector()
        self._outputs: dict[str, RankOutput] = {}  # by name, in order of creation
        self._files: dict[str, LogFiles] = {}  # by name
        self._launcher = f"rank-launcher-{spec.node_rank}"
        self._ended: list[str] = []  # names of ranks, in order of their ends
        self._program: subprocess.Popen[bytes] | None = None
        self._started: set[int] = set()  # processes of the keeper itself
        self._end = -1  # the program's pidfd; -1 before its start
        self._pids: dict[int, int] = {}  # of ranks, by local rank
        self._ends: dict[int, int] = {}  # local rank -> pidfd
        self._record_s = 0.0  # monotonic time at which the processes are written down again
        self._recorded: list[list[int]] = []

    def start(
        self, argv: Sequence[str], environment: Mapping[str, str], directory: str
    ) -> subprocess.Popen[bytes]:
        """Start the program; return its process. Raises ProgramNotStarted, OSError."""
        spec = self._spec
        if spec.ranks_are_gpus:
            for local, rank in enumerate(spec.ranks):
                self._add(f"rank-{rank}", self._make_pipe(local), finds=self._is_searched(rank))
            name = self._launcher
        else:
            name = f"rank-{spec.ranks[0]}"
        self._program = self._spawn(name, argv, environment, directory, spec.arguments.stdin)
        self._end = os.pidfd_open(self._program.pid)
        self.wake_on(self._end)
        return self._program

    def run_staging(
        self, argv: Sequence[str], environment: Mapping[str, str], directory: str
    ) -> subprocess.Popen[bytes]:
        """Start the command before the program. Its output comes before that of the launcher."""
        return self._spawn(self._launcher, argv, environment, directory)

    def wake_on(self, descriptor: int) -> None:
        """Let ``pump`` return early when there is something to read there."""
        self._selector.register(descriptor, selectors.EVENT_READ)

    def are_up(self) -> bool:
        """Return whether all ranks run, as far as it can be known."""
        if not self._spec.ranks_are_gpus:
            return self._program is not None
        self._find_ranks()
        return len(self._pids) == len(self._spec.ranks)

    def processes(self) -> list[int]:
        """Return the processes that are asked to stop: the ranks, or the program without any."""
        if self._spec.ranks_are_gpus:
            self._find_ranks()
            below = set(children.find_descendants())
            if ranks := [pid for pid in self._pids.values() if pid in below]:
                return ranks
        return [self._program.pid] if self._program is not None else []

    def pump(self, patience_s: float) -> None:
        """Read the output that comes within ``patience_s``."""
        for key, _ in self._selector.select(patience_s):
            if isinstance(key.data, RankOutput):
                key.data.pump()
                if not key.data.is_open:
                    self._selector.unregister(key.fileobj)
            elif isinstance(key.data, int):
                self._note_end(key.data)
        if (now_s := time.monotonic()) >= self._record_s:
            self._record_s = now_s + RECORD_S
            children.reap_orphans(self._started)  # a program may leave thousands in a day
            self._record_processes()

    def drain(self) -> None:
        """Read the output that is there now."""
        for output in self._outputs.values():
            while output.is_open and output.pump():
                pass

    def finish(self) -> None:
        """End what the program left behind, then read the rest of the output."""
        children.end_descendants()
        for output in self._outputs.values():
            if output.is_open:
                self._selector.unregister(output.descriptor)
            output.close()

    def close(self) -> None:
        """Close everything. All processes are dead."""
        for output in self._outputs.values():
            if output.is_open:
                output.close()
        for files in self._files.values():
            files.close()
        for descriptor in self._ends.values():
            os.close(descriptor)
        self._ends.clear()
        if self._end >= 0:
            os.close(self._end)
        self._selector.close()

    def tails(self) -> dict[str, str]:
        """Return the end of each output, those of ranks that ended first at the beginning."""
        order = [*self._ended, *(name for name in self._outputs if name not in self._ended)]
        order.sort(key=lambda name: name == self._launcher)
        names = {
            name: name.replace("-", " ").replace("rank launcher", "launcher") for name in order
        }
        return {names[n]: self._outputs[n].tail.decode(errors="replace") for n in order}

    def killed_by_kernel(self) -> bool:
        """Return whether the kernel killed a process because the cgroup's memory ran out."""
        if not self._spec.cgroup:
            return False
        try:
            text = read_trusted(os.path.join(self._spec.cgroup, "memory.events"))
            counts = dict(line.split() for line in text.splitlines())
        except (OSError, ValueError):
            return False
        return int(counts.get("oom_kill", 0)) > 0

    def _spawn(
        self,
        name: str,
        argv: Sequence[str],
        environment: Mapping[str, str],
        directory: str,
        stdin: str = "",
    ) -> subprocess.Popen[bytes]:
        ours, theirs = os.pipe()
        try:
            os.set_blocking(ours, False)
            process = children.start_program(
                self._spec, argv, environment, directory, theirs, stdin
            )
        except children.ProgramNotStarted:
            os.close(ours)
            raise
        finally:
            os.close(theirs)
        self._started.add(process.pid)
        self._add(name, ours, finds=name == "rank-0")
        return process

    def _add(self, name: str, descriptor: int, *, finds: bool) -> None:
        spec = self._spec
        finder = self._make_finder(name) if finds else None
        if name not in self._files:
            self._files[name] = LogFiles(spec.logs, name, spec.log_bytes)
        elif self._outputs[name].is_open:
            self._selector.unregister(self._outputs[name].descriptor)
            self._outputs[name].close()
        output = self._outputs[name] = RankOutput(descriptor, self._files[name], finder)
        self._selector.register(descriptor, selectors.EVENT_READ, output)

    def _is_searched(self, rank: int) -> bool:
        """Return whether the output of ``rank`` is searched. Other nodes' ranks are out of reach."""
        spec = self._spec
        return rank == 0 or (spec.leads and spec.last_rank_reports and rank == spec.ranks[-1])

    def _make_finder(self, name: str) -> LineFinder | None:
        """Return what searches a rank's output. Of a program that reports, only reports count."""
        if self._spec.arguments.report_prefix:
            return ReportFinder(self._spec.arguments.report_prefix, self._take_report)
        if self._spec.launch.progress_pattern:
            return ProgressFinder(self._spec.launch.progress_pattern, partial(self._found, name))
        return None

    def _make_pipe(self, local: int) -> int:
        """Make the named pipe of a rank; return its end, which never reports that it is closed."""
        return make_pipe(os.path.join(self._spec.inbox, f"rank-{local}.pipe"), self._spec.owner)

    def _find_ranks(self) -> None:
        """Read the process ids that ranks have written, and believe those of our descendants."""
        missing = [k for k in range(len(self._spec.ranks)) if k not in self._pids]
        below: set[int] = set()
        for local in missing:
            path = os.path.join(self._spec.outbox, f"rank-{local}.pid")
            try:
                text = read_start(path, MAX_PID_BYTES, owner=self._spec.user.uid).decode()
            except (OSError, ValueError):
                continue
            below = below or set(children.find_descendants())
            if text.isdecimal() and int(text) in below:
                self._pids[local] = int(text)
                self._watch_end(local)

    def _watch_end(self, local: int) -> None:
        try:
            descriptor = os.pidfd_open(self._pids[local])
        except ProcessLookupError:
            self._note_end(local)
            return
        self._ends[local] = descriptor
        self._selector.register(descriptor, selectors.EVENT_READ, local)

    def _note_end(self, local: int) -> None:
        self._ended.append(f"rank-{self._spec.ranks[local]}")
        if (descriptor := self._ends.pop(local, None)) is not None:
            self._selector.unregister(descriptor)
            os.close(descriptor)

    def _record_processes(self) -> None:
        """Write down the member's processes, so that the agent finds them if the keeper dies."""
        identities = children.identify(children.find_descendants())
        if identities != self._recorded:
            self._recorded = identities
            children.record(self._spec.directory, identities)
