"""An agent's data directory: foreign or broken files stop no agent and redirect no writes."""

from __future__ import annotations

import ast
import asyncio
import json
import math
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path

import pytest

from tessera.formulation.errors import InvalidInput
from tessera.service.agent import checkpoint
from tessera.service.agent.files import open_private, read_json, write_json
from tessera.service.agent.gangs import NetworkPart
from tessera.service.agent.main import main
from tessera.service.agent.process import Process, identity_of
from tessera.service.agent.runtimes.handle import ProcessHandle
from tessera.service.agent.runtimes.protocol import ExitOutcome, Progress
from tessera.service.agent.state import StateDir
from tessera.service.agent.stream import AgentLease
from tests.support.agents import a_gang
from tests.support.patience import PATIENCE_S


def a_state(root: Path) -> StateDir:
    state = StateDir(root, root / "checkpoints")
    state.claim()
    return state


def mode_of(path: Path) -> int:
    return path.stat().st_mode & 0o777


def test_the_data_directory_is_accessible_only_to_its_user(tmp_path: Path) -> None:
    a_state(tmp_path / "a" / "data")
    assert mode_of(tmp_path / "a" / "data") == mode_of(tmp_path / "a" / "data" / "gangs") == 0o700
    open_to_all = tmp_path / "old"
    open_to_all.mkdir(mode=0o755)
    a_state(open_to_all)
    assert mode_of(open_to_all) == 0o700


def test_all_files_are_private_under_any_umask(tmp_path: Path) -> None:
    root, store = tmp_path / "a" / "data", tmp_path / "shared" / "checkpoints"
    before = os.umask(0)
    try:
        state = StateDir(root, store)
        state.claim()
        gang = a_gang()
        folder = state.add(gang)
        state.save_lease(1.0, 2.0, 1.0)
        assert checkpoint.open_generation(str(state.checkpoints(gang.job)), 1, 7) == 0
        checkpoint.save_checkpoint(str(state.checkpoints(gang.job)), 1, 5, 7)
        sleep = ["/bin/true"]
        Process.spawn(sleep, "", identity=folder / "process.json", errors=folder / "errors.log")
        state.release()
    finally:
        os.umask(before)
    made = [tmp_path / "a", tmp_path / "shared"]
    made += [path for parent in made for path in parent.rglob("*")]
    assert {"lease.json", "gang.json", "errors.log", "process.json", "checkpoint.json", "lock"} <= {
        path.name for path in made
    }
    assert [path for path in made if mode_of(path) & 0o077] == []


def test_a_link_in_the_place_of_a_file_is_not_written_through(tmp_path: Path) -> None:
    target = tmp_path / "target"
    (tmp_path / "link").symlink_to(target)
    with pytest.raises(OSError, match="symbolic links"):
        open_private(str(tmp_path / "link"))
    with pytest.raises(OSError, match="link"):
        Process.spawn(["/bin/true"], "", identity=tmp_path / "id", errors=tmp_path / "link")
    assert not target.exists()


def test_a_jobs_process_gets_no_secret_of_ours(tmp_path: Path) -> None:
    secrets = {
        "TESSERA_TOKEN": "a",
        "TESSERA_TOKEN_FILE": "/run/token",
        "TESSERA_JOIN_TOKEN": "b",
        "TESSERA_JOIN_TOKEN_FILE": "/run/join",
        "TESSERA_KEY": "/run/key",
        "TESSERA_DATABASE_URL": "postgresql://h/d",
        "PGPASSWORD": "c",
        "UPSTREAM": "postgresql://me:" + "hunter2@" + "h/d",
        "OTHERS": "tessera_join_" + "a" * 12 + "_" + "b" * 43,
    }
    kept = {"PATH": "/usr/bin:/bin", "TESSERA_NETWORK": "/n.json", "NCCL_IB_TC": "106"}
    script = f"import os, sys; open({str(tmp_path / 'env')!r}, 'w').write(repr(dict(os.environ)))"
    process = Process.spawn(
        [sys.executable, "-I", "-S", "-c", script],
        "",
        identity=tmp_path / "id",
        errors=tmp_path / "errors",
        environment=secrets | kept,
    )
    asyncio.run(asyncio.wait_for(process.ended(), PATIENCE_S))
    seen = ast.literal_eval((tmp_path / "env").read_text())
    seen.pop("LC_CTYPE", None)  # Python's own
    assert seen == kept


@pytest.mark.parametrize("below", ["", "deep/er"])
def test_a_directory_writable_by_others_is_refused(
    tmp_path: Path, below: str, caplog: pytest.LogCaptureFixture
) -> None:
    shared = tmp_path / "shared"
    shared.mkdir()
    shared.chmod(0o777)
    with pytest.raises(InvalidInput, match=f"--data-dir.*chmod o-w {shared}"):
        a_state(shared / below)
    assert not (shared / below / "agent.lock").exists()
    flags = ["--server", "127.0.0.1:1", "--cluster", "c", "--node", "n:a100:1"]
    assert main([*flags, "--data-dir", str(shared / below)]) == 2


def test_a_directory_below_a_sticky_one_belongs_to_its_user(tmp_path: Path) -> None:
    shared = tmp_path / "like-tmp"
    shared.mkdir()
    shared.chmod(0o1777)
    a_state(shared / "mine")


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can give a directory to another user")
def test_a_directory_of_another_user_is_refused(tmp_path: Path) -> None:
    (tmp_path / "theirs").mkdir()
    os.chown(tmp_path / "theirs", 12345, 12345)
    with pytest.raises(InvalidInput, match="belongs to another user"):
        a_state(tmp_path / "theirs")


@pytest.mark.parametrize("cluster", ["../x", "a/b", "..", "", "a" * 101, "c\n"])
def test_a_cluster_name_with_a_path_is_refused(tmp_path: Path, cluster: str) -> None:
    flags = ["--server", "127.0.0.1:1", "--node", "n:a100:1", "--data-dir", str(tmp_path / "d")]
    assert main([*flags, "--cluster", cluster]) == 2
    assert not (tmp_path / "d").exists()


def test_links_and_foreign_files_among_the_gangs_are_cleared_and_not_followed(
    tmp_path: Path,
) -> None:
    state, elsewhere = a_state(tmp_path / "d"), tmp_path / "elsewhere"
    (elsewhere / "gangs").mkdir(parents=True)
    write_json(str(elsewhere / "gang.json"), asdict(a_gang("x")))
    gangs = tmp_path / "d" / "gangs"
    (gangs / "x@1").symlink_to(elsewhere)
    (gangs / "file").write_text("what?")
    (gangs / "y@7").mkdir()  # not the directory of the described gang
    write_json(str(gangs / "y@7" / "gang.json"), json.loads((elsewhere / "gang.json").read_text()))
    state.add(a_gang("a"))
    assert list(state.gangs()) == [a_gang("a")]
    assert [path.name for path in gangs.iterdir()] == ["a@1"]
    assert (elsewhere / "gang.json").exists()


@pytest.mark.parametrize(
    "text",
    ["", "{", "[]", "{}", '{"job": 1}', "\0\0\0", '{"shares": 3, "members": [], "command": []}'],
)
def test_a_gang_with_a_broken_description_is_removed_and_its_process_ended(
    tmp_path: Path, text: str
) -> None:
    state = a_state(tmp_path / "d")
    directory = state.add(a_gang("a"))
    (directory / "gang.json").write_text(text)
    with subprocess.Popen([sys.executable, "-c", "import signal; signal.pause()"]) as stray:
        identity = identity_of(stray.pid)
        assert identity is not None
        write_json(str(directory / "process.json"), asdict(identity))
        assert list(state.gangs()) == []
        assert stray.wait(PATIENCE_S) == -signal.SIGKILL
    assert not directory.exists()


@pytest.mark.parametrize(
    "text", ["", 5000 * "x", "{", "[1]", "{}", '{"boot": 3}', '{"heard_s": "x", "boot": "%s"}']
)
def test_a_broken_lease_is_replaced_once_a_server_answers(
    tmp_path: Path, text: str, caplog: pytest.LogCaptureFixture
) -> None:
    boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    state = a_state(tmp_path / "d")
    state.lease_file.write_text(text.replace("%s", boot))
    lease = AgentLease(state, lambda: 100.0)
    assert lease.left_s() == math.inf
    is_of_another_boot = text == '{"boot": 3}'
    assert ("cannot read the lease" in caplog.text) is not is_of_another_boot
    lease.lease_s = 30.0
    lease.renew(105.0)
    assert lease.left_s() == 35.0
    assert state.load_lease() == (105.0, 30.0)


def test_a_program_of_another_user_may_read_its_part_in_the_network_plan(tmp_path: Path) -> None:
    state, gang = a_state(tmp_path / "d"), a_gang()
    state.add(gang)
    assert mode_of(state.write_part(gang.key, NetworkPart(level=1, levels=8, dscp=10))) == 0o644


@pytest.mark.parametrize("heard_s", [100.5, math.nan, -1.0])
def test_a_lease_from_a_moment_that_cannot_be_is_replaced_by_the_next_one(
    tmp_path: Path, heard_s: float
) -> None:
    state = a_state(tmp_path / "d")
    state.save_lease(heard_s, 30.0, 15.0)
    lease = AgentLease(state, lambda: 100.0)
    lease.lease_s = 30.0
    lease.renew(100.0)
    assert lease.left_s() == 30.0
    assert state.load_lease() == (100.0, 30.0)


def test_a_data_directory_that_vanishes_ends_no_process(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    state = a_state(tmp_path / "d")
    lease = AgentLease(state, lambda: 100.0, 30.0)
    (tmp_path / "d").rename(tmp_path / "lost")
    for said_s in (101.0, 103.0, 105.0):
        lease.renew(said_s)
    assert lease.left_s() == 35.0
    messages = [record.message for record in caplog.records]
    assert len(messages) == 1
    assert messages[0].startswith("cannot write the lease to disk")
    assert state.add(a_gang("a")).is_dir()
    lease.renew(107.0)
    assert state.load_lease() == (107.0, 30.0)


PROGRESS: dict[str, str] = {
    "not a number": '{"iterations": "many", "iter_time_s": 1}',
    "not JSON": "{",
    "empty": "",
    "a list": "[1, 2]",
    "nothing": "{}",
    "NaN": '{"iterations": NaN, "iter_time_s": 1.0}',
    "negative": '{"iterations": -5, "iter_time_s": 1.0}',
    "endless": '{"iterations": 1e999, "iter_time_s": 1.0}',
    "too large a whole number": '{"iterations": %s, "iter_time_s": 1}' % ("9" * 400),
    "a truth value": '{"iterations": true, "iter_time_s": 1}',
    "deep": '{"a":' * 20_000,
    "long": '{"iterations": 1, "iter_time_s": 1, "x": "%s"}' % ("y" * 70_000),
    "not text": "\udcff\udcfe",
}


def a_handle(directory: Path) -> ProcessHandle:
    return ProcessHandle(Process(1, None, None), directory)


@pytest.mark.parametrize("text", PROGRESS.values(), ids=PROGRESS)
def test_meaningless_progress_counts_as_unknown_and_is_logged_once(
    tmp_path: Path, text: str, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / "progress.json").write_bytes(text.encode(errors="surrogateescape"))
    handle = a_handle(tmp_path)
    assert [handle.observe() for _ in range(3)] == [None] * 3
    assert len([r for r in caplog.records if "progress.json" in vars(r).values()]) <= 1
    write_json(str(tmp_path / "progress.json"), {"iterations": 3, "iter_time_s": 0.5})
    assert handle.observe() == Progress(iterations=3.0, iter_time_s=0.5)


def link_to_secret(path: Path) -> None:
    path.symlink_to("/etc/passwd")


def make_pipe(path: Path) -> None:
    os.mkfifo(path)


def make_folder(path: Path) -> None:
    path.mkdir()


@pytest.mark.parametrize("make", [link_to_secret, make_pipe, make_folder])
async def test_an_irregular_file_is_not_read_and_blocks_nothing(
    tmp_path: Path, make: Callable[[Path], None]
) -> None:
    for name in ("progress.json", "exit.json", "errors.log"):
        make(tmp_path / name)
    handle = a_handle(tmp_path)
    assert handle.observe() is None
    assert (await handle.ended()).outcome is ExitOutcome.FAILED
    with pytest.raises((ValueError, OSError)):
        read_json(str(tmp_path / "exit.json"))


@pytest.mark.parametrize(
    "text", ["{", "[]", '{"outcome": "glorious"}', '{"outcome": null}', '{"error": "x"}']
)
async def test_a_meaningless_exit_file_counts_as_a_failure(tmp_path: Path, text: str) -> None:
    (tmp_path / "exit.json").write_text(text)
    assert (await a_handle(tmp_path).ended()).outcome is ExitOutcome.FAILED


async def test_only_the_end_of_a_long_log_is_read(tmp_path: Path) -> None:
    script = "import os; os.write(2, b'x' * 1_000_000 + b'\\nlast words\\n'); os._exit(7)"
    process = Process.spawn(
        [sys.executable, "-c", script],
        "go",
        identity=tmp_path / "process.json",
        errors=tmp_path / "errors.log",
    )
    handle = ProcessHandle(process, tmp_path)
    await handle.begun()
    end = await handle.ended()
    assert end.error == "the process exited with status 7: last words"
    assert (tmp_path / "errors.log").stat().st_size > 1_000_000


@pytest.mark.parametrize(
    "stored",
    [{}, {"iterations": "7"}, {"iterations": -1}, {"iterations": 1e300}, {"iterations": None}],
)
def test_a_broken_checkpoint_is_named_and_the_error_says_what_to_do(
    tmp_path: Path, stored: dict[str, object]
) -> None:
    write_json(str(tmp_path / "checkpoint.json"), {"generation": 1, **stored})
    with pytest.raises(ValueError, match=r"checkpoint\.json is broken: iterations .*remove it"):
        checkpoint.open_generation(str(tmp_path), 2, 7)


def test_a_broken_fence_allows_no_writes(tmp_path: Path) -> None:
    write_json(str(tmp_path / "fence.json"), {"unknown": 1})
    with pytest.raises(ValueError, match=r"fence\.json is broken: job is None"):
        checkpoint.open_generation(str(tmp_path), 2, 7)


def test_a_file_that_cannot_be_written_completely_leaves_nothing_behind(tmp_path: Path) -> None:
    (tmp_path / "x.json").mkdir()
    with pytest.raises(OSError, match="directory"):
        write_json(str(tmp_path / "x.json"), {"a": 1})
    assert [path.name for path in tmp_path.iterdir()] == ["x.json"]


def test_a_gang_with_a_broken_process_identity_is_not_adopted(tmp_path: Path) -> None:
    (tmp_path / "process.json").write_text('{"pid": 1}')
    assert ProcessHandle.adopt(tmp_path) is None


@pytest.mark.parametrize(
    ("stored", "value"),
    [
        (rb'{"text": "a\ud800b"}', {"text": "a?b"}),
        (rb'{"\udfff": [{"text": "\ud83d\ude00"}]}', {"?": [{"text": "\N{GRINNING FACE}"}]}),
    ],
)
def test_half_of_a_surrogate_pair_in_a_file_is_replaced(
    tmp_path: Path, stored: bytes, value: object
) -> None:
    path = tmp_path / "file.json"
    path.write_bytes(stored)
    assert read_json(str(path)) == value


@pytest.mark.parametrize(
    "stored", [b'{"text": "\xed\xa0\x80"}', r'{"text": "\ud800"}'.encode("utf-16")]
)
def test_a_file_in_another_encoding_is_not_read(tmp_path: Path, stored: bytes) -> None:
    path = tmp_path / "file.json"
    path.write_bytes(stored)
    with pytest.raises(ValueError, match="does not hold JSON"):
        read_json(str(path))


def test_files_that_take_long_to_delete_do_not_hold_the_agent_up(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    may_delete, deleted = threading.Event(), []

    def delete_slowly(path: str) -> None:
        assert may_delete.wait(PATIENCE_S)
        deleted.append(path)

    monkeypatch.setattr("tessera.service.agent.state.remove_tree", delete_slowly)
    state = StateDir(tmp_path, tmp_path / "checkpoints")
    state.claim()
    directory = state.add(a_gang())
    (directory / "out").mkdir()
    state.remove(a_gang().key)
    assert not directory.exists()
    assert list(state.add(a_gang()).iterdir()) == [directory / "gang.json"]
    state.release()
    state.claim()  # goes on with what was not deleted
    state.release()
    may_delete.set()
    end_s = time.monotonic() + PATIENCE_S
    while len(deleted) < 2 and time.monotonic() < end_s:
        time.sleep(0.01)
    (left,) = (tmp_path / "removed").iterdir()
    assert deleted == 2 * [str(left)]
