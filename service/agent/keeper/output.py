"""The output of a member's processes: read from pipes, kept in bounded files, searched for progress.

A rank's output lies in ``rank-R.OFFSET.log``, where OFFSET is the position of the file's first byte
in the whole output. The oldest files are deleted. ``rank-R.end`` exists once the rank has ended. The
output of the staging command and of the launcher has ``launcher-NODE`` in place of R.
"""

from __future__ import annotations

import errno
import json
import os
import re

from tessera.service.agent.files import make_private, open_private, remove_file

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable
    from typing import Any

SEGMENTS = 4
"""Number of files among which a rank's output is divided."""

READ_BYTES = 1 << 18
"""The largest number of bytes that are read from a pipe in one go."""

TAIL_BYTES = 1 << 16
"""The number of bytes at the end of the output that are kept for explaining a failure."""

MAX_LINE_BYTES = 4096
"""The number of bytes of a line that are searched for progress."""

MAX_LINES_PER_READ = 2000
"""The number of lines of one read that are searched. Of more, the last ones are."""


class LogFiles:
    """The bounded files of one rank's output. A full disk loses output, and nothing else."""

    def __init__(self, folder: str, name: str, most_bytes: int) -> None:
        self._folder, self._name = folder, name
        self._segment_bytes = max(1, most_bytes // SEGMENTS)
        self._file = -1
        self._size = 0  # of the present file
        self._offset = 0  # of the whole output
        self._kept: list[str] = []  # oldest first
        self.lost_bytes = 0

    def write(self, data: bytes) -> None:
        """Append output, and begin another file if the present one is full."""
        try:
            if self._file < 0 or self._size >= self._segment_bytes:
                self._begin_file()
            written = os.write(self._file, data)
        except OSError:  # e.g. the disk is full: try again with the next output
            written = 0
        self.lost_bytes += len(data) - written
        self._size += written
        self._offset += written  # what was lost leaves no gap

    def close(self) -> None:
        """Mark the output as complete."""
        if self._file >= 0:
            os.close(self._file)
            self._file = -1
        try:
            make_private(self._folder)
            os.close(open_private(os.path.join(self._folder, f"{self._name}.end")))
        except OSError:
            return  # readers then learn the end from the job's state

    def _begin_file(self) -> None:
        if self._file >= 0:
            os.close(self._file)
            self._file = -1
        make_private(self._folder)
        path = os.path.join(self._folder, f"{self._name}.{self._offset}.log")
        self._file, self._size = open_private(path), 0
        self._kept.append(path)
        while len(self._kept) > SEGMENTS:
            remove_file(self._kept.pop(0))


class RankOutput:
    """The output of one rank, or of the launcher, and the pipe that it comes through."""

    def __init__(self, descriptor: int, files: LogFiles, find: LineFinder | None) -> None:
        """Read from ``descriptor``, which does not block. ``find`` searches the lines."""
        self.descriptor = descriptor
        self._files, self._find = files, find
        self.tail = b""
        self.is_open = True

    def pump(self) -> bool:
        """Read what is there; return whether there may be more at once."""
        try:
            data = os.read(self.descriptor, READ_BYTES)
        except BlockingIOError:
            return False
        except OSError as error:
            if error.errno != errno.EIO:
                raise
            data = b""
        if not data:
            self.is_open = False
            return False
        self._files.write(data)
        self.tail = (self.tail + data)[-TAIL_BYTES:]
        if self._find is not None:
            self._find.feed(data)
        return len(data) == READ_BYTES

    def close(self) -> None:
        """Read the rest, then close the pipe."""
        while self.is_open and self.pump():
            pass
        os.close(self.descriptor)
        self.is_open = False
        if self._find is not None:
            self._find.finish()


class LineFinder:
    """A search in lines of output, the last of which need not have ended."""

    def __init__(self) -> None:
        self._rest = b""

    def feed(self, data: bytes) -> None:
        """Search the lines that ``data`` completes."""
        *lines, rest = (self._rest + data).replace(b"\r", b"\n").split(b"\n")
        self._rest = self._clip(rest)
        for line in self._choose(lines):
            self._search(self._clip(line).decode(errors="replace"))

    def finish(self) -> None:
        """Search the last line, which no newline ended."""
        self._search(self._rest.decode(errors="replace"))
        self._rest = b""

    def _clip(self, line: bytes) -> bytes:
        """Return the part of a line that is searched."""
        return line[:MAX_LINE_BYTES]

    def _choose(self, lines: list[bytes]) -> list[bytes]:
        """Return the lines of one read that are searched."""
        return lines[-MAX_LINES_PER_READ:]

    def _search(self, line: str) -> None:
        raise NotImplementedError


class ProgressFinder(LineFinder):
    """A search for progress in lines of output, by the user's regular expression."""

    def __init__(self, pattern: str, found: Callable[[str, str | None], None]) -> None:
        """Call ``found`` with the texts of the groups "iteration" and "loss"."""
        super().__init__()
        self._pattern, self._found = re.compile(pattern), found

    def _search(self, line: str) -> None:
        match = self._pattern.search(line)
        if match is not None:
            groups = match.groupdict()
            self._found(groups["iteration"] or "", groups.get("loss"))


class ReportFinder(LineFinder):
    """A search for the reports of a program of ours: a prefix, and a JSON object after it.

    Output of the user's code without a newline may come before the prefix, however long it is. No
    report is lost, because it may be the only one of a checkpoint.
    """

    def __init__(self, prefix: str, take: Callable[[dict[str, Any]], None]) -> None:
        """Call ``take`` with each report. Lines of any other form are left out."""
        super().__init__()
        self._prefix, self._take = prefix, take

    def _clip(self, line: bytes) -> bytes:
        return line[-MAX_LINE_BYTES:]

    def _choose(self, lines: list[bytes]) -> list[bytes]:
        prefix = self._prefix.encode()
        return [line for line in lines if prefix in line]

    def _search(self, line: str) -> None:
        _, prefix, text = line.rpartition(self._prefix)
        if not prefix:
            return
        try:
            report = json.loads(text)
        except (ValueError, RecursionError):
            return
        if isinstance(report, dict):
            self._take(report)
