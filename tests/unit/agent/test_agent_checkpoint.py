"""The checkpoint store: files are written whole, and older generations cannot write."""

from __future__ import annotations

import fcntl
import json
import subprocess
import sys
from pathlib import Path

import pytest

from tessera.service.agent import checkpoint

JOB = 7


def test_a_checkpoint_is_read_back_by_the_next_generation(tmp_path: Path) -> None:
    store = str(tmp_path / "job")
    assert checkpoint.open_generation(store, 1, JOB) == 0
    checkpoint.save_checkpoint(store, 1, 40, JOB)
    assert checkpoint.open_generation(store, 2, JOB) == 40


def test_a_generation_may_open_its_checkpoint_again(tmp_path: Path) -> None:
    store = str(tmp_path / "job")
    checkpoint.open_generation(store, 3, JOB)
    checkpoint.save_checkpoint(store, 3, 7, JOB)
    assert checkpoint.open_generation(store, 3, JOB) == 7


def test_an_older_generation_cannot_write_after_a_newer_one_opened(tmp_path: Path) -> None:
    store = str(tmp_path / "job")
    checkpoint.open_generation(store, 1, JOB)
    checkpoint.save_checkpoint(store, 1, 10, JOB)
    checkpoint.open_generation(store, 2, JOB)
    with pytest.raises(checkpoint.StaleGeneration, match="generation 2 has taken it over"):
        checkpoint.save_checkpoint(store, 1, 99, JOB)
    assert checkpoint.open_generation(store, 2, JOB) == 10


def test_an_older_generation_cannot_open_again(tmp_path: Path) -> None:
    store = str(tmp_path / "job")
    checkpoint.open_generation(store, 2, JOB)
    with pytest.raises(checkpoint.StaleGeneration):
        checkpoint.open_generation(store, 1, JOB)
    checkpoint.save_checkpoint(store, 2, 1, JOB)


def test_a_foreign_file_is_refused_by_name(tmp_path: Path) -> None:
    (tmp_path / "checkpoint.json").write_text("[1]")
    with pytest.raises(ValueError, match=r"checkpoint\.json does not hold a JSON object"):
        checkpoint.open_generation(str(tmp_path), 1, JOB)


WRITER = """
import sys
sys.path.insert(0, sys.argv[1])
from tessera.service.agent import checkpoint
store = sys.argv[2]
checkpoint.open_generation(store, 1, 7)
print("open", flush=True)
count = 0
try:
    while True:
        count += 1
        checkpoint.save_checkpoint(store, 1, count, 7)
        if count == 5:
            print("writing", flush=True)
except checkpoint.StaleGeneration:
    print(count - 1, flush=True)
"""


def test_a_process_of_an_older_generation_that_keeps_writing_is_shut_out(tmp_path: Path) -> None:
    """Generation 1 writes as fast as it can in its own process while generation 2 opens."""
    root, store = str(Path(checkpoint.__file__).parents[3]), str(tmp_path / "job")
    with subprocess.Popen(
        [sys.executable, "-S", "-E", "-s", "-c", WRITER, root, store],
        stdout=subprocess.PIPE,
        text=True,
    ) as old:
        assert old.stdout is not None
        assert [old.stdout.readline() for _ in range(2)] == ["open\n", "writing\n"]
        resumed_at = checkpoint.open_generation(store, 2, JOB)
        checkpoint.save_checkpoint(store, 2, 1_000_000, JOB)
        last_written = int(old.stdout.readline())
    assert old.returncode == 0
    assert resumed_at == last_written >= 5
    stored = json.loads((tmp_path / "job" / "checkpoint.json").read_text())
    assert stored == {"generation": 2, "iterations": 1_000_000}


def test_a_later_job_of_the_same_name_starts_from_zero_and_locks_the_earlier_one_out(
    tmp_path: Path,
) -> None:
    store = str(tmp_path)
    checkpoint.open_generation(store, 3, job=7)
    checkpoint.save_checkpoint(store, 3, 40, job=7)
    assert checkpoint.open_generation(store, 1, job=9) == 0
    checkpoint.save_checkpoint(store, 1, 5, job=9)
    with pytest.raises(checkpoint.StaleGeneration):
        checkpoint.save_checkpoint(store, 3, 41, job=7)
    with pytest.raises(checkpoint.StaleGeneration):
        checkpoint.open_generation(store, 4, job=7)
    assert checkpoint.open_generation(store, 2, job=9) == 5


def test_a_store_that_a_frozen_process_has_locked_is_given_up(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    store = tmp_path / "job"
    checkpoint.open_generation(str(store), 1, JOB)
    monkeypatch.setattr(checkpoint, "LOCK_S", 0.1)
    with (store / "lock").open() as held:
        fcntl.flock(held, fcntl.LOCK_EX)
        with pytest.raises(TimeoutError, match="is one of this job frozen on some node"):
            checkpoint.open_generation(str(store), 2, JOB)
    assert checkpoint.open_generation(str(store), 2, JOB) == 0
