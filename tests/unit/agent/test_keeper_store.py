"""The store that generations of a job share: the choice of a checkpoint, and who may list one."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tessera.service.agent.checkpoint import StaleGeneration
from tessera.service.agent.keeper.store import (
    KEPT_CHECKPOINTS,
    MAX_FAILED_STARTS,
    Checkpoint,
    JobStore,
    NoIntactCheckpoint,
    Rendezvous,
)


def opened(path: Path, generation: int = 1, job: int = 7) -> JobStore:
    """Return the store of a job as a generation's leader has opened it."""
    store = JobStore(str(path), generation, job)
    store.claim()
    store.make_directories(-1, -1)
    return store


def saved(store: JobStore, iterations: int, now_s: float = 0.0, text: str = "state") -> Checkpoint:
    """Write a checkpoint of one file, and list it."""
    path = Path(store.own) / f"iteration-{iterations}"
    path.write_text(text)
    return store.add_checkpoint(iterations, str(path), now_s or float(iterations))


def test_the_furthest_checkpoint_is_taken(tmp_path: Path) -> None:
    first = opened(tmp_path / "job")
    assert first.choose_checkpoint() == (None, "")
    saved(first, 10)
    far = saved(first, 30)
    second = opened(tmp_path / "job", 2)
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


def test_a_store_may_move_if_a_link_leads_from_its_old_place(tmp_path: Path) -> None:
    far = saved(opened(tmp_path / "old" / "job"), 10)
    (tmp_path / "old").rename(tmp_path / "new")
    (tmp_path / "old").symlink_to(tmp_path / "new")
    assert opened(tmp_path / "new" / "job", 2).choose_checkpoint() == (far, "")


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


def test_the_oldest_checkpoints_are_deleted_with_their_files(tmp_path: Path) -> None:
    store = opened(tmp_path / "job")
    for iterations in range(1, KEPT_CHECKPOINTS + 3):
        saved(store, iterations)
    kept = [one.iterations for one in store.checkpoints()]
    assert kept == [5, 4, 3]
    assert sorted(path.name for path in Path(store.own).iterdir()) == [
        "iteration-3",
        "iteration-4",
        "iteration-5",
    ]


def test_a_new_checkpoint_is_kept_although_it_has_fewer_iterations(tmp_path: Path) -> None:
    first = opened(tmp_path / "job")
    for iterations in (100, 200, 300):
        saved(first, iterations)
    second = opened(tmp_path / "job", 2)
    new = saved(second, 50, now_s=1e6)
    assert new in second.checkpoints()
    assert not (Path(first.own) / "iteration-100").exists()


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


def test_the_durations_of_a_stop_are_reported_once(tmp_path: Path) -> None:
    opened(tmp_path / "job").save_stop(2.5, 4.0)
    second = opened(tmp_path / "job", 2)
    assert [second.take_stop(), second.take_stop()] == [(2.5, 4.0), (0.0, 0.0)]


ROW = {"path": "p", "generation": 1, "files": 1, "size_bytes": 1, "saved_s": 1.0}


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        ("{", "does not hold JSON"),
        ('{"checkpoints": 3}', "is broken"),
        ('{"checkpoints": [{"iterations": 1}]}', "is broken"),
        (
            json.dumps({"checkpoints": [ROW | {"iterations": "x"}, ROW | {"iterations": 1}]}),
            "is broken",
        ),
    ],
)
def test_a_broken_list_is_an_error_and_not_a_new_beginning(
    tmp_path: Path, text: str, problem: str
) -> None:
    store = opened(tmp_path / "job")
    (tmp_path / "job" / "checkpoints.json").write_text(text)
    with pytest.raises(ValueError, match=problem):
        store.choose_checkpoint()
    with pytest.raises(ValueError, match=problem):
        saved(store, 10)
    assert (tmp_path / "job" / "checkpoints.json").read_text() == text
