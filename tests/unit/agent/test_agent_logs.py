"""The agent's reader of output files, which programs of jobs may have touched, and their deletion."""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tessera.service.agent import logs as agent_logs
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
from tests.support.output_files import RankFiles, rotated_output

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


def noise(size: int) -> bytes:
    return np.random.default_rng(0).bytes(size)


@pytest.mark.parametrize("most", [1, 7, 100, 4096])
def test_rotated_output_is_read_from_any_byte_without_loss_or_repetition(
    tmp_path: Path, most: int
) -> None:
    data, files = noise(1000), RankFiles(tmp_path)
    rotated_output(files, data, 96)
    files.end()
    for begin in (0, 1, 95, 96, 97, 500, 999):
        assert read_all(tmp_path, begin, most) == data[begin:]


def test_a_rank_has_ended_only_where_its_output_ends(tmp_path: Path) -> None:
    files = RankFiles(tmp_path)
    files.write(b"all of it")
    assert read(tmp_path) == OutputPart(data=b"all of it")
    files.end()
    assert read(tmp_path) == OutputPart(data=b"all of it", ended=True)
    assert read(tmp_path, max_bytes=3) == OutputPart(data=b"all")
    assert read(tmp_path, 9) == OutputPart(offset=9, ended=True)


def test_a_negative_offset_counts_from_the_present_end(tmp_path: Path) -> None:
    rotated_output(RankFiles(tmp_path), b"0123456789", 4)
    assert read(tmp_path, -3) == OutputPart(offset=7, data=b"789")
    assert read(tmp_path, -1000) == OutputPart(offset=0, data=b"0123456789")


def test_output_beyond_the_end_is_empty(tmp_path: Path) -> None:
    RankFiles(tmp_path).write(b"four")
    assert read(tmp_path, 2**62) == OutputPart(offset=4)


def test_a_part_is_never_larger_than_the_limit(tmp_path: Path) -> None:
    RankFiles(tmp_path).write(bytes(MAX_READ_BYTES + 1))
    assert len(read(tmp_path, max_bytes=2**31 - 1).data) == MAX_READ_BYTES
    assert read(tmp_path, max_bytes=-1) == OutputPart()


def test_output_that_was_deleted_is_skipped_and_the_offset_says_so(tmp_path: Path) -> None:
    files = RankFiles(tmp_path)
    rotated_output(files, b"0123456789", 2)
    files.file_at(0).unlink()
    files.file_at(4).unlink()
    assert read(tmp_path) == OutputPart(offset=2, data=b"23")
    assert read(tmp_path, 4) == OutputPart(offset=6, data=b"6789")
    assert read(tmp_path, -100) == OutputPart(offset=2, data=b"23")


def test_a_file_that_reaches_into_the_next_is_read_up_to_it(tmp_path: Path) -> None:
    files = RankFiles(tmp_path)
    rotated_output(files, b"0123456789", 5)
    with files.file_at(0).open("ab") as file:
        file.write(b"too much")
    assert read(tmp_path).data == b"0123456789"


def test_ranks_and_launchers_have_files_of_their_own(tmp_path: Path) -> None:
    for name in ("1", "10", "launcher-0", "launcher-1"):
        RankFiles(tmp_path, rank=name).write(name.encode())
    assert [rank_name(rank) for rank in (10, -1, -2)] == ["10", "launcher-0", "launcher-1"]
    for rank in (1, 10, -1, -2):
        assert read(tmp_path, rank=rank).data == rank_name(rank).encode()
    assert read(tmp_path, rank=0) == OutputPart()


def test_output_that_is_not_there_is_empty(tmp_path: Path) -> None:
    assert read(tmp_path / "never") == OutputPart()
    assert read(tmp_path) == OutputPart()
    RankFiles(tmp_path)
    assert read(tmp_path) == OutputPart()
    assert read(tmp_path, generation=2) == OutputPart()


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


def replace_by_link(path: Path, target: Path) -> None:
    path.unlink()
    path.symlink_to(target)


def replace_by_pipe(path: Path, _: Path) -> None:
    path.unlink()
    os.mkfifo(path)


def replace_by_folder(path: Path, _: Path) -> None:
    path.unlink()
    path.mkdir()


def replace_by_hard_link(path: Path, target: Path) -> None:
    path.unlink()
    os.link(target, path)


@pytest.mark.parametrize(
    "replace", [replace_by_link, replace_by_pipe, replace_by_folder, replace_by_hard_link]
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


def test_a_folder_full_of_files_is_not_searched(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(agent_logs, "MAX_FILES", 10)
    rotated_output(RankFiles(tmp_path), bytes(11), 1)
    with pytest.raises(ValueError, match="more than 10 files"):
        read(tmp_path)


def test_positions_beyond_what_messages_hold_are_an_error(tmp_path: Path) -> None:
    files = RankFiles(tmp_path)
    with files.file_at(999_999_999_999_999_999).open("wb") as file:
        file.truncate(2**42)
    assert read(tmp_path, -1).offset == 999_999_999_999_999_999 + 2**42 - 1
    files.file_at(10**18).touch()  # has a digit too many, so nobody wrote it
    assert read(tmp_path, -1).offset == 999_999_999_999_999_999 + 2**42 - 1


def test_files_that_are_deleted_while_they_are_read_are_skipped(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The oldest file is deleted after the files were listed, and before it is opened."""
    files, open_file = RankFiles(tmp_path), os.open
    rotated_output(files, b"0123456789", 5)

    def delete_and_open(path: Any, flags: int, *mode: int, **options: Any) -> int:
        if path == files.file_at(0).name:
            files.file_at(0).unlink(missing_ok=True)
        return open_file(path, flags, *mode, **options)

    monkeypatch.setattr(os, "open", delete_and_open)
    assert read(tmp_path) == OutputPart(offset=5, data=b"56789")


def test_a_file_that_is_deleted_after_it_was_opened_is_still_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    files, open_file = RankFiles(tmp_path), os.open
    rotated_output(files, b"0123456789", 5)

    def open_and_delete(path: Any, flags: int, *mode: int, **options: Any) -> int:
        descriptor = open_file(path, flags, *mode, **options)
        if path == files.file_at(0).name:
            files.file_at(0).unlink()
        return descriptor

    monkeypatch.setattr(os, "open", open_and_delete)
    assert read(tmp_path) == OutputPart(offset=0, data=b"0123456789")


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
