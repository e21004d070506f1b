"""The lease as the agent keeps it and its processes read it: durations of one machine's boot clock."""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tessera.service.agent import lease
from tessera.service.agent.files import overwrite_json
from tessera.service.agent.lease import LEASE_S, MARGIN_S, WARDEN_SHARE, LeaseWatch, boot_id
from tessera.service.agent.state import StateDir
from tessera.service.agent.stream import AgentLease
from tests.support.agents import a_gang


def a_state(root: Path) -> StateDir:
    state = StateDir(root, root / "checkpoints")
    state.claim()
    return state


def test_the_lease_of_an_agent_runs_out_unless_it_is_renewed_and_outlives_a_restart(
    tmp_path: Path,
) -> None:
    state, now = a_state(tmp_path), [100.0]
    assert AgentLease(state, lambda: now[0]).left_s() == math.inf  # before the first welcome
    lease = AgentLease(state, lambda: now[0], 10.0)
    now[0] = 106.0
    assert lease.left_s() == 4.0
    lease.renew(105.0)
    assert lease.left_s() == 9.0
    lease.renew(103.0)  # a late answer to an earlier message
    assert lease.left_s() == 9.0
    now[0] = 107.0
    assert AgentLease(state, lambda: now[0]).left_s() == 8.0


@pytest.mark.parametrize(
    "text",
    [
        "",
        5000 * "x",
        "{",
        "[1]",
        "{}",
        '{"boot": 3}',
        '{"heard_s": "x", "boot": "BOOT"}',
        '{"heard_s": 90.0, "lease_s": 30.0, "margin_s": 15.0, "boot": "earlier"}',
        '{"heard_s": 100.5, "lease_s": 30.0, "margin_s": 15.0, "boot": "BOOT"}',
        '{"heard_s": NaN, "lease_s": 30.0, "margin_s": 15.0, "boot": "BOOT"}',
        '{"heard_s": -1.0, "lease_s": 30.0, "margin_s": 15.0, "boot": "BOOT"}',
    ],
)
def test_a_broken_lease_or_one_of_an_impossible_moment_is_replaced_once_a_server_answers(
    tmp_path: Path, text: str, caplog: pytest.LogCaptureFixture
) -> None:
    state = a_state(tmp_path)
    state.lease_file.write_text(text.replace("BOOT", boot_id()))
    lease = AgentLease(state, lambda: 100.0)
    assert lease.left_s() == math.inf
    is_readable = '"boot": 3' in text or "margin_s" in text
    assert ("cannot read the lease" in caplog.text) is not is_readable
    lease.lease_s = 30.0
    lease.renew(105.0)
    assert lease.left_s() == 35.0
    assert state.load_lease() == (105.0, 30.0)


def test_a_data_directory_that_vanishes_ends_no_process(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    state = a_state(tmp_path / "d")
    lease = AgentLease(state, lambda: 100.0, 30.0)
    (tmp_path / "d").rename(tmp_path / "lost")
    for sent_at_s in (101.0, 103.0, 105.0):
        lease.renew(sent_at_s)
    assert lease.left_s() == 35.0
    messages = [record.message for record in caplog.records]
    assert len(messages) == 1
    assert messages[0].startswith("cannot write the lease to disk")
    assert state.add(a_gang("a")).is_dir()
    lease.renew(107.0)
    assert state.load_lease() == (107.0, 30.0)


NOW_S = 1000.0


class Boot:
    """A boot clock that only the test moves."""

    def __init__(self) -> None:
        self.now_s = NOW_S

    def __call__(self) -> float:
        return self.now_s


@pytest.fixture
def boot(monkeypatch: pytest.MonkeyPatch) -> Boot:
    clock = Boot()
    monkeypatch.setattr(lease, "read_boot_s", clock)
    return clock


def write(path: Path, **values: Any) -> str:
    stored = {"heard_s": NOW_S, "lease_s": 30.0, "margin_s": 15.0, "boot": boot_id()}
    overwrite_json(str(path), stored | values, 256)
    return str(path)


def test_processes_are_asked_to_stop_at_the_end_and_are_dead_within_half_of_the_margin(
    tmp_path: Path, boot: Boot
) -> None:
    watch = LeaseWatch(write(tmp_path / "lease.json"))
    assert watch.left_s() == 30.0
    boot.now_s += 35.0
    assert (watch.left_s(), watch.must_be_dead()) == (-5.0, False)
    boot.now_s += 1.0
    assert watch.must_be_dead()
    assert not watch.must_be_dead(WARDEN_SHARE)
    boot.now_s += 2.5
    assert watch.must_be_dead(WARDEN_SHARE)
    write(tmp_path / "lease.json", heard_s=boot.now_s)
    assert (watch.left_s(), watch.must_be_dead()) == (30.0, False)


def test_a_clock_of_the_wall_that_is_set_changes_no_lease(
    tmp_path: Path, boot: Boot, monkeypatch: pytest.MonkeyPatch
) -> None:
    watch = LeaseWatch(write(tmp_path / "lease.json"))
    for wall_s in (0.0, 1e10):
        monkeypatch.setattr("time.time", lambda wall_s=wall_s: wall_s)
        assert watch.left_s() == 30.0


def replace_by_link(path: Path) -> None:
    path.unlink()
    path.symlink_to("/dev/zero")


DAMAGES: dict[str, Callable[[Path], object]] = {
    "missing": Path.unlink,
    "empty": lambda path: path.write_text(""),
    "not JSON": lambda path: path.write_text("{"),
    "half written": lambda path: path.write_text(path.read_text()[:40]),
    "without a boot": lambda path: path.write_text(json.dumps({"heard_s": NOW_S})),
    "a link": replace_by_link,
    "in the future": lambda path: write(path, heard_s=1e9),
    "older": lambda path: write(path, heard_s=NOW_S - 500),
    "not a number": lambda path: write(path, heard_s=math.nan),
    "of another boot": lambda path: write(path, boot="another"),
}


@pytest.mark.parametrize("damage", DAMAGES)
def test_after_damage_the_last_good_lease_counts_and_ends(
    tmp_path: Path, boot: Boot, damage: str
) -> None:
    watch = LeaseWatch(write(tmp_path / "lease.json"))
    DAMAGES[damage](tmp_path / "lease.json")
    assert watch.left_s() == 30.0
    boot.now_s += 30.0 + MARGIN_S
    assert watch.must_be_dead()


@pytest.mark.parametrize("damage", ["missing", "not JSON", "in the future"])
def test_a_process_that_never_read_a_lease_has_a_usual_one(
    tmp_path: Path, boot: Boot, damage: str
) -> None:
    write(tmp_path / "lease.json")
    DAMAGES[damage](tmp_path / "lease.json")
    watch = LeaseWatch(str(tmp_path / "lease.json"))
    assert watch.left_s() == LEASE_S
    boot.now_s += LEASE_S
    assert watch.left_s() == 0.0
    write(tmp_path / "lease.json", heard_s=boot.now_s - 1, lease_s=10.0)
    assert watch.left_s() == 9.0


def test_a_lease_of_another_boot_is_over(tmp_path: Path, boot: Boot) -> None:
    watch = LeaseWatch(write(tmp_path / "lease.json", boot="another"))
    assert watch.left_s() == -math.inf
    assert watch.must_be_dead()
    write(tmp_path / "lease.json")
    assert watch.left_s() == 30.0


@pytest.mark.parametrize("path", ["", "lease.json"])
def test_without_a_lease_nothing_ends(tmp_path: Path, boot: Boot, path: str) -> None:
    if path:
        path = write(tmp_path / path, lease_s=math.inf)
    watch = LeaseWatch(path)
    boot.now_s += 1e9
    assert (watch.left_s(), watch.must_be_dead()) == (math.inf, False)
