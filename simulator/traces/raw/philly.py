"""Microsoft's Philly trace (Jeon et al., USENIX ATC 2019): ``cluster_job_log``, one JSON list.

Each job has ``jobid``, ``vc``, ``submitted_time`` and ``attempts``; an attempt has ``start_time``,
``end_time`` and ``detail``, with the ``gpus`` on each server (the README of msr-fiddle/philly-traces).
"""

from __future__ import annotations

import codecs
import json
import re
from collections.abc import Iterator
from datetime import tzinfo
from pathlib import Path
from typing import Any, Final

from tessera.formulation.base.errors import InvalidInput
from tessera.simulator.traces.csvfile import CsvRow, Mistakes
from tessera.simulator.traces.raw.jobs import MAX_JOB_GPUS, raw_job, read_time, seconds_between
from tessera.simulator.traces.raw.rows import (
    NO_DURATION,
    NO_END,
    NO_GPUS,
    NO_START,
    OF_ITS_JOB,
    DroppedRows,
)
from tessera.simulator.traces.trace import DurationJob

ZONE: Final = "America/Los_Angeles"
"""The zone of the trace: its tables of utilisation state PDT and PST."""
NO_ATTEMPT: Final = "no attempt to run"
ENDS_FIRST: Final = "an attempt that ends before it starts"
CHUNK: Final = 2**20
"""Bytes of the file that are read at once."""
MAX_RECORD: Final = 2**24
"""Characters of one job. The longest jobs have thousands of attempts."""
_DECODER: Final = json.JSONDecoder()
_BLANKS: Final = re.compile(r"[ \t\r\n]*")


def read_philly(path: Path, zone: tzinfo, dropped: DroppedRows) -> Iterator[DurationJob]:
    """Yield the jobs. A job's duration is the sum of its attempts, and its GPUs the most of one.

    An attempt whose length is not known is dropped, and not its job, if that has another.

    Raises:
        InvalidInput: the first 20 mistakes, with their lines.
        OSError: the file cannot be read.
    """
    mistakes = Mistakes(path.name)
    for line, record in _records(path):
        if (job := _job(line, record, mistakes, zone, dropped)) is not None:
            yield job
    mistakes.check()


def _job(
    line: int, record: Any, mistakes: Mistakes, zone: tzinfo, dropped: DroppedRows
) -> DurationJob | None:
    texts = record if isinstance(record, dict) else {}
    row = CsvRow(line, {k: v for k, v in texts.items() if isinstance(v, str)}, mistakes)
    name, attempts = row.get("jobid"), texts.get("attempts")
    if not name or not isinstance(attempts, list):
        row.wrong("", "must be a job with a text jobid and a list of attempts")
        return None
    submitted = read_time(row, "submitted_time", zone)
    if submitted is None:
        if row.ok:
            row.wrong("submitted_time", "must be the time of submission")
        return None
    if not attempts:
        dropped.add(NO_ATTEMPT, name)
        return None
    duration_s, gpus, faults = 0.0, 0, list[str]()
    for attempt in attempts:
        times = attempt if isinstance(attempt, dict) else {}
        tried = CsvRow(
            line,
            {k: "" if v is None else str(v) for k, v in times.items() if k != "detail"},
            mistakes,
        )
        start, end = read_time(tried, "start_time", zone), read_time(tried, "end_time", zone)
        if not tried.ok:
            return None
        held_gpus = _gpus(tried, times.get("detail"))
        if start is None or end is None:
            faults.append(NO_START if start is None else NO_END)
        elif (length_s := seconds_between(start, end)) < 0:
            faults.append(ENDS_FIRST)
        else:
            duration_s, gpus = duration_s + length_s, max(gpus, held_gpus)
    if len(faults) == len(attempts):
        dropped.add(faults[0], name)
        return None
    for fault in faults:
        dropped.add(f"{fault}{OF_ITS_JOB}", name)
    if not 0 < gpus <= MAX_JOB_GPUS or duration_s <= 0:
        dropped.add(NO_DURATION if gpus else NO_GPUS, name)
        return None
    return raw_job(name, submitted.timestamp(), duration_s, gpus, tenant=row.get("vc"))


def _gpus(row: CsvRow, detail: Any) -> int:
    """Return the GPUs of an attempt, on all its servers."""
    servers = detail if isinstance(detail, list) else None
    if servers is None or not all(
        isinstance(server, dict) and isinstance(server.get("gpus"), list) for server in servers
    ):
        row.wrong("detail", "must be a list of servers, each with a list of gpus")
        return 0
    return sum(len(server["gpus"]) for server in servers)


def _records(path: Path) -> Iterator[tuple[int, Any]]:
    """Yield the values of a JSON list one by one, each with the line on which it begins.

    Raises:
        InvalidInput: the file is not a JSON list, with the line on which it stops being one.
    """
    text, at, line, begun = "", 0, 1, False

    def wrong(problem: str) -> InvalidInput:
        return InvalidInput("", f"{path.name} line {line}: {problem}")

    def pass_to(end: int) -> None:
        nonlocal at, line
        line += text.count("\n", at, end)
        at = end

    with path.open("rb") as file:
        decode, ended = codecs.getincrementaldecoder("utf-8-sig")(), False
        while True:
            # Pass blanks, the bracket, and the comma before the next value.
            blanks = _BLANKS.match(text, at)
            pass_to(blanks.end() if blanks else at)
            following = text[at : at + 1]
            if following and not begun:
                if following != "[":
                    raise wrong("must begin with '[', as a JSON list of jobs does")
                begun, at = True, at + 1
                continue
            if following == "]":
                return
            if following == ",":
                at += 1
                continue
            try:
                value, end = _DECODER.raw_decode(text, at)
            except RecursionError:
                raise wrong("is nested too deeply") from None
            except ValueError as error:
                if (
                    not ended and len(text) - at < MAX_RECORD
                ):  # the value may go on in the next part
                    chunk = file.read(CHUNK)
                    try:
                        text, at = text[at:] + decode.decode(chunk, final=not chunk), 0
                    except UnicodeDecodeError:
                        raise wrong("must be UTF-8 text") from None
                    ended = not chunk
                    continue
                if not following:
                    raise wrong("must end with ']', but the file ends before it") from None
                place = getattr(error, "pos", at)
                line += text.count("\n", at, place)
                raise wrong(f"is not JSON ({getattr(error, 'msg', error)})") from None
            yield line, value
            pass_to(end)
