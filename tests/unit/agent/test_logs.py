"""Output of ranks: bounded files, their reading although programs touch them, answers, and deletion."""

from __future__ import annotations

import asyncio
import errno
import json
import os
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tessera.service.agent import logreads
from tessera.service.agent import logs as agent_logs
from tessera.service.agent.keeper.output import (
    MAX_LINE_BYTES,
    MAX_LINES_PER_READ,
    READ_BYTES,
    SEGMENTS,
    TAIL_BYTES,
    LogFiles,
    ProgressFinder,
    RankOutput,
    ReportFinder,
)
from tessera.service.agent.logreads import READ_THREADS, LogAnswers, answer_read
from tessera.service.agent.logs import (
    MAX_READ_BYTES,
    OutputPart,
    StoredOutput,
    choose_old,
    claim_folder,
    folder_of,
    prune_logs,
    rank_name,
    read_output,
)
from tessera.v1 import agents_pb2 as pb
from tests.support.agents import until
from tests.support.laws import examples
from tests.support.output_files import RankFiles, rotated_output
from tests.support.patience import PATIENCE_S

PATTERN = r"step (?P<iteration>\d+)(?: loss (?P<loss>\S+))?"


def kept(folder: Path) -> dict[int, bytes]:
    """Return the contents of the files of rank 0 by their offsets."""
    files = {int(path.name.split(".")[1]): path for path in folder.glob("rank-0.*.log")}
    return {offset: files[offset].read_bytes() for offset in sorted(files)}


def found_in(*parts: bytes) -> list[tuple[str, str | None]]:
    """Return the progress that is found in parts of output."""
    progress: list[tuple[str, str | None]] = []
    finder = ProgressFinder(PATTERN, lambda *groups: progress.append(groups))
    for part in parts:
        finder.feed(part)
    finder.finish()
    return progress


@examples(100)
@given(st.lists(st.binary(min_size=1, max_size=60), max_size=40), st.integers(4, 200))
def test_the_files_are_the_end_of_the_output_without_gaps(
    tmp_path_factory: pytest.TempPathFactory, parts: list[bytes], most_bytes: int
) -> None:
    folder = tmp_path_factory.mktemp("logs") / "a" / "1"
    files = LogFiles(str(folder), "rank-0", most_bytes)
    for part in parts:
        files.write(part)
    files.close()
    stored, whole = kept(folder), b"".join(parts)
    assert len(stored) <= SEGMENTS
    joined = b"".join(stored.values())
    assert whole.endswith(joined)
    offsets = [len(whole) - len(joined)]
    for text in stored.values():
        offsets.append(offsets[-1] + len(text))
    assert list(stored) == offsets[:-1]
    assert len(joined) <= most_bytes + SEGMENTS * 60  # a part may reach beyond a file's size
    assert len(joined) >= min(len(whole), (SEGMENTS - 1) * (most_bytes // SEGMENTS))
    assert (folder / "rank-0.end").exists()


def test_a_full_disk_loses_output_and_nothing_else_and_what_is_lost_is_counted(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    files, write = LogFiles(str(tmp_path), "rank-0", 4000), os.write

    def refuse(_descriptor: int, _data: bytes) -> int:
        raise OSError(errno.ENOSPC, "No space left on device")

    files.write(b"one ")
    with monkeypatch.context() as full:
        full.setattr(os, "write", refuse)
        files.write(b"lost")
    with monkeypatch.context() as nearly_full:
        nearly_full.setattr(os, "write", lambda descriptor, data: write(descriptor, data[:2]))
        files.write(b"twxyz")
    files.write(b"o")
    files.close()
    assert (kept(tmp_path), files.lost_bytes) == ({0: b"one two"}, 7)


def test_files_that_others_delete_or_a_folder_that_is_missing_do_no_harm(tmp_path: Path) -> None:
    folder = tmp_path / "logs"
    files = LogFiles(str(folder), "rank-0", SEGMENTS * 4)
    for part in (b"aaaa", b"bbbb"):
        files.write(part)
    for path in folder.iterdir():
        path.unlink()
    folder.rmdir()
    for part in (b"cccc", b"dddd", b"eeee", b"ffff"):
        files.write(part)
    files.close()
    assert kept(folder) == {8: b"cccc", 12: b"dddd", 16: b"eeee", 20: b"ffff"}


def test_a_link_in_place_of_a_file_is_not_followed(tmp_path: Path) -> None:
    target = tmp_path / "target"
    target.write_text("precious")
    folder = tmp_path / "logs"
    folder.mkdir()
    (folder / "rank-0.0.log").symlink_to(target)
    files = LogFiles(str(folder), "rank-0", 4000)
    files.write(b"lost")
    files.close()
    assert target.read_text() == "precious"
    assert files.lost_bytes == 4


def test_a_pipe_is_read_to_its_end_and_the_tail_is_bounded(tmp_path: Path) -> None:
    ours, theirs = os.pipe()
    os.set_blocking(ours, False)
    output = RankOutput(ours, LogFiles(str(tmp_path), "rank-0", 1 << 30), None)
    assert not output.pump()
    assert output.is_open
    data = b"".join(b"%07d\n" % k for k in range(20_000))
    left = memoryview(data)
    os.set_blocking(theirs, False)
    while left:
        try:
            left = left[os.write(theirs, left) :]
        except BlockingIOError:
            output.pump()
    os.close(theirs)
    output.close()
    assert not output.is_open
    assert output.tail == data[-TAIL_BYTES:]
    assert b"".join(kept(tmp_path).values()) == data


@examples(100)
@given(st.lists(st.integers(1, 40), max_size=30))
def test_lines_are_found_however_reads_cut_them(cuts: list[int]) -> None:
    text = b"begin\nstep 1 loss 0.5\r\nnoise\rstep 2\rstep 3 loss nan\n\nstep 4 loss \xff"
    parts, rest = [], text
    for cut in cuts:
        parts.append(rest[:cut])
        rest = rest[cut:]
    assert found_in(*parts, rest) == [
        ("1", "0.5"),
        ("2", None),
        ("3", "nan"),
        ("4", "\N{REPLACEMENT CHARACTER}"),
    ]


def test_the_end_of_a_very_long_line_and_the_first_of_very_many_are_not_searched() -> None:
    filler = b"x" * MAX_LINE_BYTES
    assert found_in(filler + b"step 1\nstep 2\n") == [("2", None)]
    assert found_in(filler, filler, b"step 1\nstep 2\n") == [("2", None)]
    assert found_in(b"step 3 " + filler, filler, b"\n") == [("3", None)]
    lines = b"".join(b"step %d\n" % k for k in range(MAX_LINES_PER_READ + 10))
    assert len(lines) < READ_BYTES
    found = found_in(lines)
    assert (len(found), found[-1]) == (MAX_LINES_PER_READ, (str(MAX_LINES_PER_READ + 9), None))


@examples(200)
@given(
    st.lists(st.sampled_from([b"x", b"x" * MAX_LINE_BYTES, b"\n" * MAX_LINES_PER_READ, b"\xff"])),
    st.integers(1, 60),
)
def test_no_report_is_lost_whatever_the_program_writes_before_it(
    rubbish: list[bytes], size: int
) -> None:
    reports: list[dict[str, int]] = []
    finder = ReportFinder("@report ", reports.append)
    for number, part in enumerate(rubbish):
        data = part + f'@report {{"n": {number}}}\n'.encode()
        for start in range(0, len(data), size * 100):
            finder.feed(data[start : start + size * 100])
    finder.finish()
    assert [report["n"] for report in reports] == list(range(len(rubbish)))


DAY_S = 86_400.0


def read(logs: Path, offset: int = 0, **changes: Any) -> OutputPart:
    values: dict[str, Any] = {"job": "j", "generation": 1, "rank": 0, "job_number": 0}
    return read_output(logs, offset=offset, **{"max_bytes": MAX_READ_BYTES} | values | changes)


def read_all(logs: Path, offset: int, most: int) -> bytes:
    """Read piece by piece until the end, as a reader does."""
    data = b""
    while True:
        part = read(logs, offset, max_bytes=most)
        assert part.offset == offset
        data += part.data
        offset += len(part.data)
        if part.ended or not part.data:
            return data


@pytest.mark.parametrize("most", [7, 100, 4096])
def test_rotated_output_is_read_from_any_byte_without_loss_or_repetition(
    tmp_path: Path, most: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    data, files = np.random.default_rng(0).bytes(1000), RankFiles(tmp_path)
    rotated_output(files, data, 96)
    with files.file_at(0).open("ab") as file:
        file.write(b"what reaches into the next file")
    files.end()
    for begin in (0, 1, 95, 96, 97, 500, 999):
        assert read_all(tmp_path, begin, most) == data[begin:]
    monkeypatch.setattr(agent_logs, "MAX_FILES", 10)
    with pytest.raises(ValueError, match="more than 10 files"):
        read(tmp_path)


def test_a_rank_has_ended_only_where_its_output_ends(tmp_path: Path) -> None:
    files = RankFiles(tmp_path)
    files.write(b"all of it")
    assert read(tmp_path) == OutputPart(data=b"all of it")
    files.end()
    assert read(tmp_path) == OutputPart(data=b"all of it", ended=True)
    assert read(tmp_path, max_bytes=3) == OutputPart(data=b"all")
    assert read(tmp_path, 9) == OutputPart(offset=9, ended=True)


def test_a_part_is_bounded_and_an_offset_before_or_beyond_the_output_is_put_right(
    tmp_path: Path,
) -> None:
    files = RankFiles(tmp_path)
    rotated_output(files, b"0123456789", 4)
    assert read(tmp_path, -3) == OutputPart(offset=7, data=b"789")
    assert read(tmp_path, -1000) == OutputPart(offset=0, data=b"0123456789")
    assert read(tmp_path, 2**62) == OutputPart(offset=10)
    assert read(tmp_path, max_bytes=-1) == OutputPart()
    files.write(bytes(MAX_READ_BYTES + 1))
    assert len(read(tmp_path, max_bytes=2**31 - 1).data) == MAX_READ_BYTES


def test_output_that_was_deleted_is_skipped_and_the_offset_says_so(tmp_path: Path) -> None:
    files = RankFiles(tmp_path)
    rotated_output(files, b"0123456789", 2)
    files.file_at(0).unlink()
    files.file_at(4).unlink()
    assert read(tmp_path) == OutputPart(offset=2, data=b"23")
    assert read(tmp_path, 4) == OutputPart(offset=6, data=b"6789")
    assert read(tmp_path, -100) == OutputPart(offset=2, data=b"23")


def test_ranks_and_launchers_have_files_of_their_own_and_what_is_not_there_is_empty(
    tmp_path: Path,
) -> None:
    assert read(tmp_path / "never") == read(tmp_path) == OutputPart()
    for name in ("1", "10", "launcher-0", "launcher-1"):
        RankFiles(tmp_path, rank=name).write(name.encode())
    assert [rank_name(rank) for rank in (10, -1, -2)] == ["10", "launcher-0", "launcher-1"]
    for rank in (1, 10, -1, -2):
        assert read(tmp_path, rank=rank).data == rank_name(rank).encode()
    assert read(tmp_path, rank=0) == read(tmp_path, rank=1, generation=2) == OutputPart()


def test_names_of_jobs_do_not_lead_out_of_the_folder(tmp_path: Path) -> None:
    logs = tmp_path / "logs"
    outside = RankFiles(tmp_path, job="secret")
    outside.write(b"secret")
    inside = RankFiles(logs, job="../secret")
    inside.write(b"harmless")
    assert inside.folder.parent.parent == logs
    assert read(logs, job="../secret").data == b"harmless"
    for job in ("", ".", "..", "x" * 256):
        with pytest.raises(ValueError, match="no job can have the name"):
            read(logs, job=job)


def put(place: Callable[[Path, Path], object]) -> Callable[[Path, Path], None]:
    """Return a function that replaces a file by what ``place`` makes of its path and a target."""

    def replace(path: Path, target: Path) -> None:
        path.unlink()
        place(path, target)

    return replace


@pytest.mark.parametrize(
    "replace",
    [
        put(Path.symlink_to),
        put(Path.hardlink_to),
        put(lambda path, _: os.mkfifo(path)),
        put(lambda path, _: path.mkdir()),
    ],
)
def test_what_is_not_an_output_file_is_an_error_and_not_read(
    tmp_path: Path, replace: Callable[[Path, Path], None]
) -> None:
    secret = tmp_path / "secret"
    secret.write_text("secret")
    files = RankFiles(tmp_path / "logs")
    replace(files.current, secret)
    with pytest.raises(ValueError, match="remove it"):
        read(tmp_path / "logs")


def test_output_of_a_job_whose_number_is_damaged_is_deleted_and_the_next_job_starts(
    tmp_path: Path,
) -> None:
    files = RankFiles(tmp_path)
    files.write(b"of somebody")
    (files.folder.parent / "job.json").write_text("[")
    claim_folder(tmp_path, "j", 8)
    assert not files.folder.exists()
    assert json.loads((files.folder.parent / "job.json").read_text()) == {"job_number": 8}


def test_links_in_place_of_folders_are_not_followed(tmp_path: Path) -> None:
    logs = tmp_path / "logs"
    outside = RankFiles(tmp_path / "elsewhere")
    outside.write(b"secret")
    logs.mkdir()
    (logs / "j").symlink_to(tmp_path / "elsewhere" / "j")
    with pytest.raises(NotADirectoryError, match="symbolic link or a file, not a directory"):
        read(logs)
    (logs / "j").unlink()
    claim_folder(logs, "j", 0)
    (logs / "j" / "1").symlink_to(outside.folder)
    with pytest.raises(NotADirectoryError, match="symbolic link or a file, not a directory"):
        read(logs)


@pytest.mark.parametrize("is_open", [False, True])
def test_files_that_are_deleted_before_they_are_opened_are_skipped(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, is_open: bool
) -> None:
    """The oldest file is deleted after the files were listed, and before or after it is opened."""
    files, open_file = RankFiles(tmp_path), os.open
    rotated_output(files, b"0123456789", 5)

    def open_and_delete(path: Any, flags: int, *mode: int, **options: Any) -> int:
        if path != files.file_at(0).name:
            return open_file(path, flags, *mode, **options)
        if not is_open:
            files.file_at(0).unlink()
        descriptor = open_file(path, flags, *mode, **options)
        files.file_at(0).unlink()
        return descriptor

    monkeypatch.setattr(os, "open", open_and_delete)
    whole, left = OutputPart(offset=0, data=b"0123456789"), OutputPart(offset=5, data=b"56789")
    assert read(tmp_path) == (whole if is_open else left)


def test_a_rank_that_ends_while_its_files_are_listed_has_not_ended_yet(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It may write another file between the listing and its end."""
    files, scan = RankFiles(tmp_path), os.scandir
    files.write(b"first")

    def scan_then_end(folder: Any) -> Any:
        entries = scan(folder)
        files.rotate()
        files.write(b"last")
        files.end()
        return entries

    monkeypatch.setattr(os, "scandir", scan_then_end)
    assert not read(tmp_path).ended


def test_output_of_an_earlier_job_of_the_same_name_is_not_there(tmp_path: Path) -> None:
    RankFiles(tmp_path, number=7).write(b"of another tenant")
    assert read(tmp_path, job_number=7).data == b"of another tenant"
    assert read(tmp_path, job_number=8) == OutputPart()
    claim_folder(tmp_path, "j", 7)
    assert read(tmp_path, job_number=7).data == b"of another tenant"
    claim_folder(tmp_path, "j", 8)
    assert not folder_of(tmp_path, "j", 1).exists()
    RankFiles(tmp_path, number=8).write(b"new")
    assert read(tmp_path, job_number=8).data == b"new"


def test_old_output_is_deleted_and_then_the_oldest_of_too_much() -> None:
    def stored(job: str, age_days: float, size_bytes: int) -> StoredOutput:
        written_s = 1e9 - age_days * DAY_S
        return StoredOutput(job=job, generation=1, size_bytes=size_bytes, written_s=written_s)

    outputs = [stored("new", 0, 10), stored("old", 20, 10), stored("mid", 5, 10)]

    def chosen(keep_days: float, keep_bytes: int) -> list[str]:
        return [o.job for o in choose_old(outputs, 1e9, keep_days * DAY_S, keep_bytes)]

    assert chosen(100, 30) == []
    assert chosen(10, 100) == ["old"]
    assert chosen(100, 29) == ["old"]
    assert chosen(100, 10) == ["old", "mid"]
    assert chosen(10, 0) == ["old", "mid", "new"]


def test_pruning_deletes_folders_and_spares_what_is_live(tmp_path: Path) -> None:
    now_s = 2e9
    for job, generation, age_days in (("a", 1, 30), ("a", 2, 1), ("b", 1, 30), ("c", 1, 30)):
        files = RankFiles(tmp_path, job, generation, number=1)
        files.write(b"x" * 100)
        moment_s = now_s - age_days * DAY_S
        for path in (files.current, files.folder):
            os.utime(path, (moment_s, moment_s))
    (tmp_path / "notes").write_text("not a job's")
    outside = tmp_path.parent / "outside"
    outside.mkdir()
    (outside / "kept").touch()
    (tmp_path / "c" / "3").symlink_to(outside)
    deleted = prune_logs(tmp_path, 14 * DAY_S, 2**40, now_s=now_s, live={("b", 1)})
    assert sorted((o.job, o.generation) for o in deleted) == [("a", 1), ("c", 1)]
    assert not folder_of(tmp_path, "a", 1).exists()
    assert folder_of(tmp_path, "a", 2).exists()
    assert folder_of(tmp_path, "b", 1).exists()
    assert (outside / "kept").exists()
    assert prune_logs(tmp_path, 14 * DAY_S, 0, now_s=now_s, live={("b", 1)}) != []
    assert not (tmp_path / "a").exists()
    assert folder_of(tmp_path, "b", 1).exists()
    assert prune_logs(tmp_path / "never", 0.0, 0, now_s=now_s) == []


def a_request(read_id: str = "r", **changes: Any) -> pb.LogRead:
    values: dict[str, Any] = {"job": "j", "generation": 1, "max_bytes": 100}
    return pb.LogRead(read_id=read_id, **values | changes)


@pytest.fixture
def threads() -> Iterator[ThreadPoolExecutor]:
    with ThreadPoolExecutor(READ_THREADS) as pool:
        yield pool


def test_output_that_cannot_be_read_is_answered_with_the_reason(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    files = RankFiles(tmp_path)
    files.current.unlink()
    files.current.mkdir()
    assert "is not a regular file" in answer_read(tmp_path, a_request()).error
    assert answer_read(tmp_path, a_request(job="..")).error.startswith("no job can have the name")

    def fail(*_: Any) -> None:
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr(os, "scandir", fail)
    assert "Permission denied" in answer_read(tmp_path, a_request()).error


async def test_a_request_is_answered_once_while_it_is_repeated(
    tmp_path: Path, threads: ThreadPoolExecutor
) -> None:
    RankFiles(tmp_path).write(b"hello")
    answers = LogAnswers(tmp_path, threads)
    for _ in range(3):
        answers.take([a_request("one")])
    assert (await answers.next_answer()).read_id == "one"
    answers.take([a_request("one"), a_request("two")])
    assert (await answers.next_answer()).read_id == "two"
    answers.take([])  # the server has both answers
    answers.take([a_request("one")])
    assert (await answers.next_answer()).read_id == "one"


async def test_few_requests_are_worked_on_at_a_time_and_the_loop_never_waits(
    tmp_path: Path, threads: ThreadPoolExecutor, monkeypatch: pytest.MonkeyPatch
) -> None:
    begun, free = list[str](), threading.Event()

    def hang(_logs: Path, request: pb.LogRead) -> pb.LogAnswer:
        begun.append(request.read_id)
        assert free.wait(PATIENCE_S)
        return pb.LogAnswer(read_id=request.read_id)

    monkeypatch.setattr(logreads, "answer_read", hang)
    answers = LogAnswers(tmp_path, threads)
    requests = [a_request(f"r{number}") for number in range(10)]
    answers.take(requests)
    await until(lambda: len(begun) == READ_THREADS)
    answers.take(requests[:8])  # the last two were given up before they began
    free.set()
    async with asyncio.timeout(PATIENCE_S):
        done = {(await answers.next_answer()).read_id for _ in range(8)}
    assert done == set(begun) == {f"r{number}" for number in range(8)}


async def test_a_flood_of_requests_is_bounded(tmp_path: Path, threads: ThreadPoolExecutor) -> None:
    answers = LogAnswers(tmp_path, threads)
    answers.take(a_request(f"r{number}") for number in range(1000))
    async with asyncio.timeout(PATIENCE_S):
        for _ in range(logreads.MAX_REQUESTS):
            await answers.next_answer()
    assert answers._ready.empty()
