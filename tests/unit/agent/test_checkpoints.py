"""Checkpoints: whole files, fences against older generations, and the choice of the one to start from."""

from __future__ import annotations

import fcntl
import json
import subprocess
import sys
from pathlib import Path

import pytest

from tessera.service.agent import checkpoint
from tessera.service.agent.checkpoint import StaleGeneration
from tessera.service.agent.keeper.store import (
    KEPT_CHECKPOINTS,
    MAX_FAILED_STARTS,
    Checkpoint,
    JobStore,
    NoIntactCheckpoint,
    Rendezvous,
)


def test_the_newest_generation_goes_on_from_the_checkpoint_and_shuts_older_ones_out(
    tmp_path: Path,
) -> None:
    store = str(tmp_path / "job")
    assert checkpoint.open_generation(store, 1, 7) == 0
    checkpoint.save_checkpoint(store, 1, 40, 7)
    for _ in range(2):
        assert checkpoint.open_generation(store, 2, 7) == 40
    with pytest.raises(checkpoint.StaleGeneration, match="generation 2 has taken it over"):
        checkpoint.save_checkpoint(store, 1, 99, 7)
    with pytest.raises(checkpoint.StaleGeneration):
        checkpoint.open_generation(store, 1, 7)
    assert checkpoint.open_generation(store, 2, 7) == 40


WRITER = """
import sys, time
sys.path.insert(0, sys.argv[1])
from tessera.service.agent import checkpoint
store = sys.argv[2]
checkpoint.open_generation(store, 1, 7)
print("open", flush=True)
count = 0
try:
    while True:
        count += 1
        time.sleep(0.001)
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
        resumed_at = checkpoint.open_generation(store, 2, 7)
        checkpoint.save_checkpoint(store, 2, 1_000_000, 7)
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
    checkpoint.open_generation(str(store), 1, 7)
    monkeypatch.setattr(checkpoint, "LOCK_S", 0.1)
    with (store / "lock").open() as held:
        fcntl.flock(held, fcntl.LOCK_EX)
        with pytest.raises(TimeoutError, match="is one of this job frozen on some node"):
            checkpoint.open_generation(str(store), 2, 7)
    assert checkpoint.open_generation(str(store), 2, 7) == 0


@pytest.mark.parametrize(
    ("file", "text", "problem"),
    [
        ("checkpoint", "[1]", r"checkpoint\.json does not hold a JSON object"),
        ("checkpoint", '{"generation": 1}', "is broken: iterations is None.*remove it"),
        ("checkpoint", '{"generation": 1, "iterations": "7"}', "iterations .*remove it"),
        ("checkpoint", '{"generation": 1, "iterations": -1}', "iterations .*remove it"),
        ("checkpoint", '{"generation": 1, "iterations": 1e300}', "iterations .*remove it"),
        ("fence", '{"unknown": 1}', r"fence\.json is broken: \w+ is None"),
    ],
)
def test_a_broken_file_allows_no_writes_and_the_error_says_what_to_do(
    tmp_path: Path, file: str, text: str, problem: str
) -> None:
    (tmp_path / f"{file}.json").write_text(text)
    with pytest.raises(ValueError, match=problem):
        checkpoint.open_generation(str(tmp_path), 2, 7)


def opened(path: Path, generation: int = 1, job: int = 7) -> JobStore:
    """Return the store of a job as a generation's leader has opened it."""
    store = JobStore(str(path), generation, job)
    store.claim()
    store.make_directories(None)
    return store


def saved(store: JobStore, iterations: int, now_s: float = 0.0, text: str = "state") -> Checkpoint:
    """Write a checkpoint of one file, and list it."""
    path = Path(store.own) / f"iteration-{iterations}"
    path.write_text(text)
    return store.add_checkpoint(iterations, str(path), now_s or float(iterations))


def test_the_furthest_checkpoint_is_taken_from_wherever_a_link_leads_to_the_store(
    tmp_path: Path,
) -> None:
    first = opened(tmp_path / "old" / "job")
    assert first.choose_checkpoint() == (None, "")
    saved(first, 10)
    far = saved(first, 30)
    (tmp_path / "old").rename(tmp_path / "new")
    (tmp_path / "old").symlink_to(tmp_path / "new")
    second = opened(tmp_path / "new" / "job", 2)
    saved(second, 20)
    assert second.choose_checkpoint() == (far, "")


def test_a_checkpoint_may_be_a_directory_whose_files_all_count(tmp_path: Path) -> None:
    store = opened(tmp_path / "job")
    path = Path(store.own) / "shards"
    (path / "deep").mkdir(parents=True)
    (path / "0.pt").write_bytes(b"123")
    (path / "deep" / "1.pt").write_bytes(b"45")
    listed = store.add_checkpoint(5, str(path), 1.0)
    assert (listed.files, listed.size_bytes, listed.is_intact()) == (2, 5, True)
    (path / "deep" / "1.pt").write_bytes(b"4")
    assert not listed.is_intact()


def test_a_damaged_checkpoint_is_passed_over_and_named(tmp_path: Path) -> None:
    store = opened(tmp_path / "job")
    good, bad = saved(store, 10), saved(store, 20)
    Path(bad.path).write_text("")
    assert store.choose_checkpoint() == (
        good,
        "went back to iteration 10, because the checkpoint of iteration 20 is damaged or was removed",
    )
    Path(good.path).unlink()
    with pytest.raises(NoIntactCheckpoint, match=f"put back {bad.path}, or remove .*json to start"):
        store.choose_checkpoint()


def test_a_checkpoint_whose_starts_fail_is_passed_over_until_all_do(tmp_path: Path) -> None:
    store = opened(tmp_path / "job")
    old, new = saved(store, 10), saved(store, 20)
    for _ in range(MAX_FAILED_STARTS):
        assert store.choose_checkpoint()[0] == store.checkpoints()[0]
        store.note_start(new, "ValueError: bad shard")
    chosen, remark = store.choose_checkpoint()
    assert (chosen, remark) == (
        old,
        "went back to iteration 10, because 2 starts from iteration 20 failed (ValueError: bad shard)",
    )
    for _ in range(MAX_FAILED_STARTS + 1):
        store.note_start(old, "again")
    chosen, _ = store.choose_checkpoint()
    assert chosen is not None
    assert chosen.iterations == 20  # with the fewest failures
    store.note_start(old)
    assert store.choose_checkpoint()[0] == old  # it went on, so its failures are over


def test_the_oldest_checkpoints_are_deleted_with_their_files_but_never_the_newest(
    tmp_path: Path,
) -> None:
    first = opened(tmp_path / "job")
    for iterations in range(100, 100 + KEPT_CHECKPOINTS + 2):
        saved(first, iterations)
    assert [one.iterations for one in first.checkpoints()] == [104, 103, 102]
    assert {path.name for path in Path(first.own).iterdir()} == {
        "iteration-102",
        "iteration-103",
        "iteration-104",
    }
    second = opened(tmp_path / "job", 2)
    assert saved(second, 50, now_s=1e6) in second.checkpoints()
    assert not (Path(first.own) / "iteration-102").exists()


def test_a_checkpoint_written_again_at_its_path_replaces_the_one_before(tmp_path: Path) -> None:
    store = opened(tmp_path / "job")
    path = Path(store.own) / "last"
    for iterations, text in ((10, "a"), (20, "bb")):
        path.write_text(text)
        store.add_checkpoint(iterations, str(path), float(iterations))
    (only,) = store.checkpoints()
    assert (only.iterations, only.is_intact()) == (20, True)


def test_only_what_is_directly_in_the_generations_directory_is_listed(tmp_path: Path) -> None:
    first = opened(tmp_path / "job")
    other = saved(first, 10)
    store = opened(tmp_path / "job", 2)
    outside = tmp_path / "outside"
    outside.write_text("mine")
    link = Path(store.own) / "link"
    link.symlink_to(outside)
    for path in (outside, link, other.path, Path(store.own) / "a" / "b", store.own):
        with pytest.raises(ValueError, match="is not directly in"):
            store.add_checkpoint(11, str(path), 1.0)
    empty = Path(store.own) / "empty"
    empty.mkdir()
    for path in (empty, Path(store.own) / "absent"):
        with pytest.raises(ValueError, match="has no files"):
            store.add_checkpoint(11, str(path), 1.0)
    assert store.checkpoints() == [other]


def test_a_listed_path_elsewhere_is_never_deleted(tmp_path: Path) -> None:
    store = opened(tmp_path / "job")
    outside = tmp_path / "outside"
    outside.write_text("mine")
    saved(store, 1)
    listing = tmp_path / "job" / "checkpoints.json"
    stored = json.loads(listing.read_text())
    stored["checkpoints"][0] |= {"path": str(outside), "size_bytes": 4}
    listing.write_text(json.dumps(stored))
    for iterations in range(2, KEPT_CHECKPOINTS + 3):
        saved(store, iterations)
    assert str(outside) not in [one.path for one in store.checkpoints()]
    assert outside.read_text() == "mine"


@pytest.mark.parametrize("listed", [False, True])
def test_another_job_of_the_name_finds_nothing_of_the_earlier_one(
    tmp_path: Path, listed: bool
) -> None:
    outside = tmp_path / "outside"
    outside.mkdir()
    (outside / "kept").touch()
    first = opened(tmp_path / "job", 4, job=7)
    (Path(first.files) / "data.txt").write_text("of another tenant")
    (Path(first.files) / "link").symlink_to(outside)
    first.save_stop(1.0, 2.0)
    assert [first.take_stop(), first.take_stop()] == [(1.0, 2.0), (0.0, 0.0)]
    first.save_stop(1.0, 2.0)
    if listed:
        saved(first, 10)
    second = opened(tmp_path / "job", 1, job=8)
    assert list(Path(second.files).iterdir()) == []
    assert second.choose_checkpoint() == (None, "")
    assert second.take_stop() == (0.0, 0.0)
    assert (outside / "kept").exists()
    with pytest.raises(StaleGeneration):
        first.save_stop(1.0, 2.0)
    with pytest.raises(StaleGeneration):
        opened(tmp_path / "job", 5, job=7)


def test_an_older_generation_changes_nothing(tmp_path: Path) -> None:
    old = opened(tmp_path / "job")
    listed = saved(old, 10)
    new = opened(tmp_path / "job", 2)
    meeting = Rendezvous("10.0.0.1", 5, "", 0)
    for change in (
        lambda: saved(old, 20),
        lambda: old.note_start(listed, "error"),
        lambda: old.publish(meeting),
        lambda: old.save_stop(1.0, 1.0),
        old.claim,
    ):
        with pytest.raises(StaleGeneration, match="generation 2 has taken it over"):
            change()
    assert new.checkpoints() == [listed]


def test_a_rendezvous_is_that_of_its_generation_until_it_is_forgotten(tmp_path: Path) -> None:
    store = opened(tmp_path / "job")
    meeting = Rendezvous("10.0.0.1", 29500, "/checkpoints/iteration-5", 5)
    store.publish(meeting)
    follower = JobStore(str(tmp_path / "job"), 1, 7)
    assert follower.find_rendezvous() == meeting
    assert JobStore(str(tmp_path / "job"), 2, 7).find_rendezvous() is None
    store.forget_rendezvous()
    store.forget_rendezvous()
    assert follower.find_rendezvous() is None


ROW = {"iterations": 1, "path": "p", "generation": 1, "files": 1, "size_bytes": 1, "saved_s": 1.0}


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        ("{", "does not hold JSON"),
        ('{"checkpoints": 3}', "is broken"),
        ('{"checkpoints": [{"iterations": 1}]}', "is broken"),
        (json.dumps({"checkpoints": [ROW | {"iterations": "x"}, ROW]}), "is broken"),
    ],
)
def test_a_broken_list_is_an_error_and_not_a_new_beginning(
    tmp_path: Path, text: str, problem: str
) -> None:
    store = opened(tmp_path / "job")
    (tmp_path / "job" / "checkpoints.json").write_text(text)
    for use in (store.choose_checkpoint, lambda: saved(store, 10)):
        with pytest.raises(ValueError, match=problem):
            use()
    assert (tmp_path / "job" / "checkpoints.json").read_text() == text
