"""The output of jobs on this node's disk: where it is, parts of it, and its deletion.

    LOGS/JOB/GENERATION/rank-RANK.OFFSET.log    JOB is quoted as in a URL
    LOGS/JOB/GENERATION/rank-RANK.end           exists once the rank has ended
    LOGS/JOB/job.json                           the number of the job

OFFSET is the position of the file's first byte in the whole output of the rank. RANK is the rank
within the gang, or launcher-K for the launcher on the gang's K-th node, counted from 0.

Keepers import this module, too, so it needs only the standard library. Programs of jobs may be able
to write here, so nothing found here may stop the agent or lead it elsewhere. A link, a pipe, or a
file that also has another name is an error of that file.
"""

from __future__ import annotations

import logging
import os
import re
import stat
from collections.abc import Collection, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Final
from urllib.parse import quote, unquote

from tessera.service.agent.files import (
    make_private,
    open_folder,
    open_regular,
    read_json,
    remove_file,
    remove_folder,
    remove_tree,
    write_json,
)

log = logging.getLogger(__name__)

MAX_READ_BYTES: Final = 256 * 1024
"""Largest number of bytes that are read at a time."""

MAX_FILES: Final = 10_000
"""Largest number of files of a generation. With more, none is read."""

_ATTEMPTS: Final = 3  # at reading while files are deleted
_END_OF_POSITIONS: Final = 2**62  # more than can be written, and fits a message
_NUMBER_FILE: Final = "job.json"


@dataclass(frozen=True, slots=True, kw_only=True)
class OutputPart:
    """A part of a rank's output. If ``ended``, the rank has ended and nothing follows."""

    offset: int = 0  # of the first byte in the rank's whole output
    data: bytes = b""
    ended: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class StoredOutput:
    """The output of a generation of a job on this node."""

    job: str
    generation: int
    size_bytes: int  # on the disk
    written_s: float  # when it last grew, in seconds since 1970


def rank_name(rank: int) -> str:
    """Return a rank's part of the names of its files. -1 is the launcher on the first node."""
    return str(rank) if rank >= 0 else f"launcher-{-rank - 1}"


def folder_of(logs: Path, job: str, generation: int) -> Path:
    """Return the folder of a generation's output. Raises ValueError if no job has such a name."""
    return logs / _quoted(job) / str(generation)


def claim_folder(logs: Path, job: str, job_number: int) -> None:
    """Prepare the folder of a job, before its first output on this node is written.

    Output of an earlier job of the same name is deleted: it may be another tenant's. So is output of
    which nobody knows the job, because the file with its number is damaged. Raises OSError, and
    ValueError if no job has such a name.
    """
    folder = logs / _quoted(job)
    try:
        earlier = _stored_number(folder)
    except ValueError:
        earlier = -1
    if earlier not in (None, job_number):
        remove_tree(str(folder))
    make_private(str(folder))
    if earlier != job_number:
        write_json(str(folder / _NUMBER_FILE), {"job_number": job_number})


def read_output(
    logs: Path,
    job: str,
    generation: int,
    rank: int,
    offset: int,
    max_bytes: int,
    job_number: int,
) -> OutputPart:
    """Return a part of a rank's output. Without output at ``offset``, the part is empty.

    A negative ``offset`` counts from the present end. If the output at ``offset`` was deleted, the
    part begins later. Output of an earlier job of the same name is not there.

    Raises:
        ValueError: something there is not what a keeper writes.
        OSError: a file cannot be read.
    """
    name = rank_name(rank)
    most = min(max(0, max_bytes), MAX_READ_BYTES)
    if _stored_number(logs / _quoted(job)) != job_number:
        return OutputPart()
    with suppress(FileNotFoundError), _opened(logs, job, generation) as folder:
        for _ in range(_ATTEMPTS):
            ended = _exists(folder, f"rank-{name}.end")  # first: if it exists, no file is added
            part = _read_part(folder, name, offset, most, ended=ended)
            if part is not None:
                return part
    return OutputPart()


def choose_old(
    outputs: Sequence[StoredOutput], now_s: float, keep_s: float, keep_bytes: int
) -> list[StoredOutput]:
    """Return the outputs to delete: those that are old, then the oldest of too many bytes."""
    chosen, left_bytes = [], sum(output.size_bytes for output in outputs)
    for output in sorted(outputs, key=lambda o: (o.written_s, o.job, o.generation)):
        if now_s - output.written_s > keep_s or left_bytes > keep_bytes:
            chosen.append(output)
            left_bytes -= output.size_bytes
    return chosen


def prune_logs(
    logs: Path,
    keep_s: float,
    keep_bytes: int,
    *,
    now_s: float,
    live: Collection[tuple[str, int]] = (),
) -> list[StoredOutput]:
    """Delete old output on this node, and return what was deleted.

    The output of ``live`` generations, as (job, generation), is kept, but its bytes count. They are
    those that run here or are about to be started. ``now_s`` is the time in seconds since 1970.
    """
    outputs = list(_stored_outputs(logs))
    kept = [output for output in outputs if (output.job, output.generation) in live]
    ended = [output for output in outputs if (output.job, output.generation) not in live]
    free_bytes = max(0, keep_bytes - sum(output.size_bytes for output in kept))
    live_jobs, deleted = {job for job, _ in live}, []
    for output in choose_old(ended, now_s, keep_s, free_bytes):
        folder = folder_of(logs, output.job, output.generation)
        try:
            remove_tree(str(folder))
        except OSError as error:
            log.warning(
                "cannot delete old output",
                extra={"event": "output_not_pruned", "folder": folder, "error": error},
            )
            continue
        deleted.append(output)
        if output.job not in live_jobs:
            _remove_if_empty(folder.parent)
    return deleted


def _quoted(job: str) -> str:
    quoted = quote(job, safe="")
    if quoted in ("", ".", "..") or len(quoted) > 255:
        raise ValueError(f"no job can have the name {job[:100]!r}")
    return quoted


def _stored_number(folder: Path) -> int | None:
    """Return the number of the job that ``folder`` belongs to, or None if it is not known.

    Raises OSError, ValueError.
    """
    stored = read_json(str(folder / _NUMBER_FILE), 1000)
    number = None if stored is None else stored.get("job_number")
    return number if isinstance(number, int) else None


@contextmanager
def _opened(logs: Path, job: str, generation: int) -> Iterator[int]:
    """Yield a descriptor of a generation's folder, which is reached without following links."""
    descriptor = open_folder(str(folder_of(logs, job, generation)))
    try:
        yield descriptor
    finally:
        os.close(descriptor)


def _exists(folder: int, name: str) -> bool:
    try:
        os.stat(name, dir_fd=folder, follow_symlinks=False)
    except FileNotFoundError:
        return False
    return True


def _read_part(folder: int, name: str, offset: int, most: int, *, ended: bool) -> OutputPart | None:
    """Return the part at ``offset``, or None if its file was deleted meanwhile."""
    pieces = _pieces(folder, name)
    end = pieces[-1][1] if pieces else 0
    at = max(pieces[0][0] if pieces else 0, end + offset) if offset < 0 else min(offset, end)
    following = [piece for piece in pieces if piece[1] > at]
    if following:
        at = max(at, following[0][0])
    begin, data = at, bytearray()
    for first, last in following:
        if first > at or len(data) >= most:
            break  # what is between two files was deleted
        read = _read_file(
            folder, _file_name(name, first), at - first, min(most - len(data), last - at)
        )
        if read is None:
            break
        data += read
        at += len(read)
    if following and most and not data:
        return None
    return OutputPart(offset=begin, data=bytes(data), ended=ended and at >= end)


def _pieces(folder: int, name: str) -> list[tuple[int, int]]:
    """Return (first byte, end) of each file of a rank in order, none reaching into the next."""
    pattern = re.compile(rf"rank-{re.escape(name)}\.(0|[1-9][0-9]{{0,17}})\.log")
    ends: dict[int, int] = {}
    with os.scandir(folder) as entries:
        for number, entry in enumerate(entries):
            if number >= MAX_FILES:
                raise ValueError(f"there are more than {MAX_FILES:,} files; remove some")
            if match := pattern.fullmatch(entry.name):
                ends[int(match[1])] = 0
    for first in list(ends):
        file = _file_name(name, first)
        try:
            status = os.stat(file, dir_fd=folder, follow_symlinks=False)
        except FileNotFoundError:  # it was deleted meanwhile
            del ends[first]
        else:
            ends[first] = first + _require_plain(file, status)
            if ends[first] >= _END_OF_POSITIONS:
                raise ValueError(f"{file} is too large; remove it")
    return [
        (first, min(ends[first], following))
        for first, following in pairwise([*sorted(ends), _END_OF_POSITIONS])
    ]


def _file_name(name: str, first: int) -> str:
    return f"rank-{name}.{first}.log"


def _require_plain(name: str, status: os.stat_result) -> int:
    """Return the size of a file that has one name. Raises ValueError for anything else."""
    if not stat.S_ISREG(status.st_mode) or status.st_nlink > 1:
        raise ValueError(f"{name} is not a regular file with one name; remove it")
    return status.st_size


def _read_file(folder: int, name: str, skip: int, most: int) -> bytes | None:
    """Return bytes of a file, or None if it was deleted. Raises OSError, ValueError."""
    try:
        file = open_regular(name, folder)
    except FileNotFoundError:
        return None
    with file:
        status = os.fstat(file.fileno())
        if status.st_nlink:  # not deleted since it was opened
            _require_plain(name, status)
        file.seek(skip)
        return file.read(most)


def _stored_outputs(logs: Path) -> Iterator[StoredOutput]:
    """Yield all output on this node."""
    for folder in _folders(logs):
        job = unquote(folder.name)
        for generation in _folders(folder.path):
            if not (generation.name.isascii() and generation.name.isdecimal()):
                continue
            statuses = []
            with suppress(FileNotFoundError):  # it is being deleted
                statuses = [generation.stat(follow_symlinks=False)]
                with os.scandir(generation) as files:
                    for file in files:
                        statuses.append(file.stat(follow_symlinks=False))
            if statuses:
                yield StoredOutput(
                    job=job,
                    generation=int(generation.name),
                    size_bytes=sum(status.st_blocks * 512 for status in statuses),
                    written_s=max(status.st_mtime for status in statuses),
                )


def _folders(path: str | Path) -> Iterator[os.DirEntry[str]]:
    """Yield the folders in ``path``, which may be missing, without links to folders."""
    with suppress(FileNotFoundError), os.scandir(path) as entries:
        for entry in entries:
            if entry.is_dir(follow_symlinks=False):
                yield entry


def _remove_if_empty(folder: Path) -> None:
    """Remove the folder of a job without output."""
    if any(_folders(folder)):
        return
    try:
        remove_file(str(folder / _NUMBER_FILE))
        remove_folder(str(folder))
    except OSError as error:
        log.warning(
            "cannot remove the folder of a job without output",
            extra={"event": "output_not_pruned", "folder": folder, "error": error},
        )
