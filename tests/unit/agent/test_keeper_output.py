"""The output of ranks: bounded files without gaps, a full disk, and the search for progress."""

from __future__ import annotations

import errno
import os
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

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
from tests.support.laws import examples

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


def test_a_full_disk_loses_output_and_nothing_else(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    files = LogFiles(str(tmp_path), "rank-0", 4000)
    files.write(b"one ")

    def refuse(_descriptor: int, _data: bytes) -> int:
        raise OSError(errno.ENOSPC, "No space left on device")

    with monkeypatch.context() as full:
        full.setattr(os, "write", refuse)
        files.write(b"lost")
        files.write(b"lost, too")
    files.write(b"two")
    files.close()
    assert kept(tmp_path) == {0: b"one two"}
    assert files.lost_bytes == 13


def test_a_write_that_the_disk_cuts_short_is_counted(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    files = LogFiles(str(tmp_path), "rank-0", 4000)
    write = os.write
    with monkeypatch.context() as nearly_full:
        nearly_full.setattr(os, "write", lambda descriptor, data: write(descriptor, data[:2]))
        files.write(b"12345")
    files.write(b"6")
    files.close()
    assert (kept(tmp_path), files.lost_bytes) == ({0: b"126"}, 3)


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


def test_a_rank_that_wrote_nothing_has_an_end_only(tmp_path: Path) -> None:
    LogFiles(str(tmp_path), "rank-0", 4000).close()
    assert [path.name for path in tmp_path.iterdir()] == ["rank-0.end"]


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
    text = b"begin\nstep 1 loss 0.5\r\nnoise\rstep 2\rstep 3 loss nan\n\nstep 4 loss 1e-3"
    parts, rest = [], text
    for cut in cuts:
        parts.append(rest[:cut])
        rest = rest[cut:]
    assert found_in(*parts, rest) == [("1", "0.5"), ("2", None), ("3", "nan"), ("4", "1e-3")]


def test_the_end_of_a_very_long_line_is_not_searched() -> None:
    filler = b"x" * MAX_LINE_BYTES
    assert found_in(filler + b"step 1\nstep 2\n") == [("2", None)]
    assert found_in(filler, filler, b"step 1\nstep 2\n") == [("2", None)]
    assert found_in(b"step 3 " + filler, filler, b"\n") == [("3", None)]


def test_of_very_many_lines_the_last_are_searched() -> None:
    lines = b"".join(b"step %d\n" % k for k in range(MAX_LINES_PER_READ + 10))
    assert len(lines) < READ_BYTES
    found = found_in(lines)
    assert (len(found), found[-1]) == (MAX_LINES_PER_READ, (str(MAX_LINES_PER_READ + 9), None))


def test_output_that_is_no_text_is_searched_all_the_same() -> None:
    assert found_in(b"\xff\xfe step 5 loss \xff\n") == [("5", "\N{REPLACEMENT CHARACTER}")]


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
