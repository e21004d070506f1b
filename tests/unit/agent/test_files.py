"""Files and directories of the agent: what others put there stops no agent and leads no write astray."""

from __future__ import annotations

import errno
import os
import pwd
import signal
import stat
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict
from pathlib import Path

import pytest

from tessera.formulation.base.clock import SystemClock
from tessera.formulation.base.errors import InvalidInput, NotAllowed
from tessera.formulation.job.runtimes import PROFILER
from tessera.service.agent import checkpoint, files
from tessera.service.agent.files import (
    change_mode,
    give_folder,
    make_pipe,
    make_private,
    measure_tree,
    open_folder,
    open_private,
    point_link,
    read_json,
    read_start,
    remove_file,
    remove_tree,
    write_json,
    write_text,
)
from tessera.service.agent.gangs import gang_to_json, key_of
from tessera.service.agent.isolation import UserRule
from tessera.service.agent.keeper.store import JobStore
from tessera.service.agent.main import main
from tessera.service.agent.network.sampling import analysed_apart
from tessera.service.agent.process import Process, identity_of, remove_secrets
from tessera.service.agent.runtimes.handle import ProcessHandle
from tessera.service.agent.runtimes.profiler import ProfilerRuntime
from tessera.service.agent.runtimes.protocol import ExitOutcome, Progress
from tessera.service.agent.state import StateDir
from tessera.service.agent.trainer_certificate import CertificateSource
from tessera.v1 import agents_pb2 as pb
from tests.support.agents import a_gang, launch_leader, until
from tests.support.patience import PATIENCE_S
from tests.support.programs import ProgramBench, end_of, observed, train

DEPTH = 1500
"""More directories in one another than a process may open at a time, or call functions."""


needs_root = pytest.mark.skipif(os.geteuid() != 0, reason="only root can give things to others")


@pytest.fixture
def secret(tmp_path: Path) -> Path:
    path = tmp_path / "secret"
    path.write_text("secret")
    path.chmod(0o640)
    return path


@pytest.fixture
def theirs(tmp_path: Path) -> Path:
    """Return a folder of another user."""
    path = tmp_path / "theirs"
    path.mkdir()
    os.chown(path, nobody().pw_uid, nobody().pw_gid)
    return path


@pytest.fixture
def passable() -> Iterator[Path]:
    """Yield a folder that other users can pass through."""
    with tempfile.TemporaryDirectory(prefix="tessera-paths-") as name:
        Path(name).chmod(0o711)
        yield Path(name)


def nobody() -> pwd.struct_passwd:
    return pwd.getpwnam("nobody")


def assert_untouched(secret: Path) -> None:
    status = secret.stat()
    assert (status.st_uid, stat.S_IMODE(status.st_mode)) == (os.geteuid(), 0o640)
    assert secret.read_text() == "secret"


def a_state(root: Path) -> StateDir:
    state = StateDir(root, root / "checkpoints")
    state.claim()
    return state


def mode_of(path: Path) -> int:
    return path.stat().st_mode & 0o777


def make_deep_tree(top: Path, file: str = "") -> None:
    """Make ``DEPTH`` directories in one another below ``top``, and a file in the last."""
    deep = os.open(top, os.O_RDONLY)
    for _ in range(DEPTH):
        os.mkdir("d", dir_fd=deep)
        inner = os.open("d", os.O_RDONLY, dir_fd=deep)
        os.close(deep)
        deep = inner
    if file:
        os.close(os.open(file, os.O_WRONLY | os.O_CREAT, dir_fd=deep))
    os.close(deep)


def test_all_files_are_private_under_any_umask(tmp_path: Path) -> None:
    root, store = tmp_path / "a" / "data", tmp_path / "shared" / "checkpoints"
    root.mkdir(parents=True, mode=0o755)
    before = os.umask(0)
    try:
        state = StateDir(root, store)
        state.claim()
        gang = a_gang()
        folder = state.add(gang)
        state.save_lease(1.0, 2.0, 1.0)
        assert checkpoint.open_generation(str(state.checkpoints(gang.job)), 1, 7) == 0
        checkpoint.save_checkpoint(str(state.checkpoints(gang.job)), 1, 5, 7)
        errors = folder / "errors.log"
        Process.spawn(["/bin/true"], "", identity=folder / "process.json", errors=errors)
        state.release()
    finally:
        os.umask(before)
    paths = [root, *root.rglob("*"), tmp_path / "shared", *(tmp_path / "shared").rglob("*")]
    assert {"lease.json", "gang.json", "errors.log", "process.json", "checkpoint.json", "lock"} <= {
        path.name for path in paths
    }
    assert [path for path in paths if mode_of(path) & 0o077] == []


def test_a_jobs_process_gets_no_secret_of_ours() -> None:
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
    assert remove_secrets(secrets | kept) == kept


@pytest.mark.parametrize("below", ["", "deep/er"])
def test_a_directory_writable_by_others_is_refused_unless_it_is_sticky(
    tmp_path: Path, below: str
) -> None:
    shared = tmp_path / "shared"
    shared.mkdir()
    shared.chmod(0o777)
    with pytest.raises(InvalidInput, match=f"--data-dir.*chmod o-w {shared}"):
        a_state(shared / below)
    assert not (shared / below / "agent.lock").exists()
    flags = ["--server", "127.0.0.1:1", "--cluster", "c", "--node", "n:a100:1"]
    assert main([*flags, "--data-dir", str(shared / below)]) == 2
    shared.chmod(0o1777)
    a_state(shared / "mine")


@needs_root
@pytest.mark.parametrize("option", ["--data-dir", "--checkpoint-dir"])
@pytest.mark.parametrize("kind", ["theirs", "their group's", "everyone's"])
def test_an_agent_of_root_uses_no_directory_that_others_can_exchange(
    tmp_path: Path, option: str, kind: str
) -> None:
    above = tmp_path / "above"
    above.mkdir()
    if kind == "theirs":
        os.chown(above, nobody().pw_uid, -1)
    else:
        os.chown(above, -1, nobody().pw_gid)
        above.chmod(0o775 if kind == "their group's" else 0o777)
    ours = tmp_path / "ours"
    roots = (above / "x", ours) if option == "--data-dir" else (ours, above / "x" / "c")
    with pytest.raises(InvalidInput, match=rf"{option}.* {above} .*choose another directory"):
        StateDir(*roots).claim()
    assert list(above.iterdir()) == []
    if kind != "theirs":
        above.chmod(0o1777)
        state = StateDir(*roots)
        state.claim()
        state.release()


@pytest.mark.parametrize("cluster", ["../x", "a/b", "..", "", "a" * 101, "c\n"])
def test_a_cluster_name_with_a_path_is_refused(tmp_path: Path, cluster: str) -> None:
    flags = ["--server", "127.0.0.1:1", "--node", "n:a100:1", "--data-dir", str(tmp_path / "d")]
    assert main([*flags, "--cluster", cluster]) == 2
    assert not (tmp_path / "d").exists()


def test_a_data_directory_is_used_by_one_agent_at_a_time(tmp_path: Path) -> None:
    first = a_state(tmp_path)
    with pytest.raises(NotAllowed, match=r"another agent runs.*or choose another --data-dir"):
        a_state(tmp_path)
    first.release()
    a_state(tmp_path)


def test_a_job_with_a_slash_in_its_name_stays_in_its_directory(tmp_path: Path) -> None:
    state = a_state(tmp_path)
    assert state.directory(("../../etc", 1)).parent == tmp_path / "gangs"
    assert state.checkpoints("../x").parent == tmp_path / "checkpoints"


def test_links_and_foreign_files_among_the_gangs_are_cleared_and_not_followed(
    tmp_path: Path,
) -> None:
    state, elsewhere = a_state(tmp_path / "d"), tmp_path / "elsewhere"
    (elsewhere / "gangs").mkdir(parents=True)
    write_json(str(elsewhere / "gang.json"), gang_to_json(a_gang("x")))
    gangs = tmp_path / "d" / "gangs"
    (gangs / "x@1").symlink_to(elsewhere)
    (gangs / "file").write_text("what?")
    (gangs / "b@1").mkdir()  # it was not stored completely
    (gangs / "y@7").mkdir()  # not the directory of the described gang
    (gangs / "y@7" / "gang.json").write_text((elsewhere / "gang.json").read_text())
    state.add(a_gang("a"))
    assert list(state.gangs()) == [a_gang("a")]
    assert [path.name for path in gangs.iterdir()] == ["a@1"]
    assert (elsewhere / "gang.json").exists()
    part = state.write_part(key_of(a_gang("a")), pb.GangNetwork(level=1, levels=8, dscp=10))
    assert mode_of(part) == 0o644  # for a program of another user


@pytest.mark.parametrize(
    "text", ["", "{", "[]", '{"format": 2, "gang": {}}', '{"format": 1, "gang": {"shares": 3}}']
)
def test_a_gang_with_a_broken_description_is_removed_and_its_process_ended(
    tmp_path: Path, text: str
) -> None:
    state = a_state(tmp_path / "d")
    directory = state.add(a_gang("a"))
    (directory / "gang.json").write_text(text)
    with subprocess.Popen(["/bin/sleep", "1000"]) as stray:
        identity = identity_of(stray.pid)
        assert identity is not None
        write_json(str(directory / "process.json"), asdict(identity))
        assert list(state.gangs()) == []
        assert stray.wait(PATIENCE_S) == -signal.SIGKILL
    assert not directory.exists()


PROGRESS: dict[str, str] = {
    "not a number": '{"iterations_done": "many", "iter_time_s": 1}',
    "not JSON": "{",
    "empty": "",
    "a list": "[1, 2]",
    "nothing": "{}",
    "NaN": '{"iterations_done": NaN, "iter_time_s": 1.0}',
    "negative": '{"iterations_done": -5, "iter_time_s": 1.0}',
    "endless": '{"iterations_done": 1e999, "iter_time_s": 1.0}',
    "too large a whole number": '{"iterations_done": %s, "iter_time_s": 1}' % ("9" * 400),
    "a truth value": '{"iterations_done": true, "iter_time_s": 1}',
    "deep": '{"a":' * 20_000,
    "long": '{"iterations_done": 1, "iter_time_s": 1, "x": "%s"}' % ("y" * 70_000),
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
    written = {"iterations_done": 3, "iter_time_s": 0.5, "executed_plan": "{}"}
    write_json(str(tmp_path / "progress.json"), written)
    assert handle.observe() == Progress(
        report=pb.ObservedGang(iterations_done=3.0, iter_time_s=0.5)
    )


@pytest.mark.parametrize(
    "place",
    [
        lambda path: path.symlink_to("/etc/passwd"),
        os.mkfifo,
        Path.mkdir,
        lambda path: path.write_text("{"),
        lambda path: path.write_text("[]"),
        lambda path: path.write_text('{"outcome": "glorious"}'),
        lambda path: path.write_text('{"outcome": null, "error": "x"}'),
    ],
)
async def test_irregular_files_and_meaningless_ends_are_failures_and_block_nothing(
    tmp_path: Path, place: Callable[[Path], object]
) -> None:
    for name in ("progress.json", "exit.json", "errors.log"):
        place(tmp_path / name)
    handle = a_handle(tmp_path)
    assert handle.observe() is None
    assert (await handle.ended()).outcome is ExitOutcome.FAILED
    if not (tmp_path / "exit.json").is_file() or (tmp_path / "exit.json").is_symlink():
        with pytest.raises((ValueError, OSError)):
            read_json(str(tmp_path / "exit.json"))


async def test_only_the_end_of_a_long_log_is_read(tmp_path: Path) -> None:
    script = "import os; os.write(2, b'x' * 1_000_000 + b'\\nlast words\\n'); os._exit(7)"
    errors, argv = tmp_path / "errors.log", [sys.executable, "-c", script]
    process = Process.spawn(argv, "go", identity=tmp_path / "process.json", errors=errors)
    end = await end_of(ProcessHandle(process, tmp_path))
    assert end.error == "the process exited with status 7: last words"
    assert errors.stat().st_size > 1_000_000


def test_a_file_that_cannot_be_written_completely_leaves_nothing_behind(tmp_path: Path) -> None:
    (tmp_path / "x.json").mkdir()
    with pytest.raises(OSError, match="directory"):
        write_json(str(tmp_path / "x.json"), {"a": 1})
    assert [path.name for path in tmp_path.iterdir()] == ["x.json"]


def test_a_gang_without_a_whole_process_identity_is_not_adopted(tmp_path: Path) -> None:
    assert ProcessHandle.adopt(tmp_path) is None
    (tmp_path / "process.json").write_text('{"pid": 1}')
    assert ProcessHandle.adopt(tmp_path) is None


def test_half_of_a_surrogate_pair_is_replaced_and_another_encoding_is_not_read(
    tmp_path: Path,
) -> None:
    path = tmp_path / "file.json"
    path.write_text(r'{"\udfff": [{"text": "\ud83d\ude00"}, "a\ud800b"]}')
    assert read_json(str(path)) == {"?": [{"text": "\N{GRINNING FACE}"}, "a?b"]}
    for stored in (b'{"text": "\xed\xa0\x80"}', '{"text": "x"}'.encode("utf-16")):
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
    state.remove(key_of(a_gang()))
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


@pytest.mark.parametrize("kind", ["hard link", "link", "pipe"])
def test_what_is_not_a_file_of_one_name_is_neither_emptied_nor_opened(
    tmp_path: Path, secret: Path, kind: str
) -> None:
    path = tmp_path / "file"
    match kind:
        case "hard link":
            path.hardlink_to(secret)
        case "link":
            path.symlink_to(secret)
        case _:
            os.mkfifo(path)
    for keep in (False, True):
        with pytest.raises(OSError, match=r"not a regular file with one name|symbolic links"):
            open_private(str(path), keep=keep)
    assert_untouched(secret)


def test_a_file_is_replaced_whatever_has_its_name(tmp_path: Path, secret: Path) -> None:
    for number, place in enumerate((Path.hardlink_to, Path.symlink_to)):
        path = tmp_path / f"file-{number}"
        place(path, secret)
        place(tmp_path / f"{path.name}.{os.getpid()}.tmp", secret)
        write_text(str(path), "new", mode=0o644)
        assert (path.read_text(), path.is_symlink()) == ("new", False)
        assert stat.S_IMODE(path.stat().st_mode) == 0o644
    assert_untouched(secret)


@needs_root
def test_nothing_is_written_into_a_folder_of_another_user(theirs: Path, secret: Path) -> None:
    path = str(theirs / "x")
    for write in (
        lambda: write_text(path, ""),
        lambda: write_json(path, {}),
        lambda: open_private(path),
        lambda: give_folder(path, 1, 1),
        lambda: make_pipe(path, None),
        lambda: point_link(path, str(secret)),
        lambda: change_mode(str(theirs), 0o777),
        lambda: make_private(str(theirs)),
    ):
        with pytest.raises(PermissionError, match=r"belongs to another user.*use it as that user"):
            write()
    assert list(theirs.iterdir()) == []


def test_a_link_on_the_way_is_not_followed(tmp_path: Path) -> None:
    target, link = tmp_path / "target", tmp_path / "link"
    (target / "inner").mkdir(parents=True)
    link.symlink_to(target)
    for use in (
        lambda: make_private(f"{link}/new"),
        lambda: make_private(str(link)),
        lambda: write_text(f"{link}/inner/file", ""),
        lambda: give_folder(f"{link}/new", os.geteuid(), os.getegid()),
        lambda: change_mode(str(link), 0o777),
        lambda: open_folder(f"{link}/inner"),
        lambda: remove_tree(f"{link}/inner"),
        lambda: remove_file(f"{link}/inner"),
    ):
        with pytest.raises(NotADirectoryError, match="is a symbolic link or a file"):
            use()
    assert [path.name for path in target.rglob("*")] == ["inner"]


def test_missing_directories_get_their_mode_under_any_umask(tmp_path: Path) -> None:
    before = os.umask(0o077)
    try:
        make_private(str(tmp_path / "a" / "b"), files.PASSAGE)
        os.umask(0)
        make_private(str(tmp_path / "a" / "c" / "d"))
    finally:
        os.umask(before)
    modes = {path.name: stat.S_IMODE(path.stat().st_mode) for path in tmp_path.rglob("*")}
    assert modes == {"a": 0o711, "b": 0o711, "c": 0o700, "d": 0o700}


def test_a_tree_of_any_depth_is_removed_and_measured_without_following_links(
    tmp_path: Path, secret: Path
) -> None:
    state = a_state(tmp_path / "data")
    top = state.add(a_gang())
    (top / "gang.json").unlink()
    make_deep_tree(top, "file")
    (top / "link").symlink_to(secret.parent)
    assert measure_tree(str(top)) == (2, (top / "link").lstat().st_size)
    state.remove(key_of(a_gang()))
    assert not top.exists()
    assert_untouched(secret)
    remove_tree(str(top))  # it is gone already
    state.release()


def test_a_directory_that_is_moved_away_takes_the_removal_nowhere(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    top, other = tmp_path / "top", tmp_path / "other"
    (top / "a" / "b").mkdir(parents=True)
    other.mkdir()
    (other / "file").touch()
    rmdir = os.rmdir

    def move_and_remove(name: str, *, dir_fd: int) -> None:
        (top / "a").rename(other / "a")
        monkeypatch.setattr(os, "rmdir", rmdir)
        rmdir(name, dir_fd=dir_fd)

    monkeypatch.setattr(os, "rmdir", move_and_remove)
    with pytest.raises(OSError, match="was moved") as caught:
        remove_tree(str(top))
    assert caught.value.errno == errno.EBUSY
    assert sorted(path.name for path in other.iterdir()) == ["a", "file"]


@needs_root
def test_files_and_stores_of_another_owner_are_not_used(theirs: Path, tmp_path: Path) -> None:
    with pytest.raises(PermissionError, match="belongs to another user"):
        JobStore(str(theirs), 1, 7).claim()
    with pytest.raises(InvalidInput, match="belongs to another user"):
        a_state(theirs)
    assert list(theirs.iterdir()) == []
    path = str(theirs / "progress.json")
    Path(path).write_text('{"iterations": 1}')
    for read in (
        lambda: read_json(path, owner=nobody().pw_uid),
        lambda: read_start(path, 10, owner=nobody().pw_uid),
    ):
        with pytest.raises(ValueError, match="belongs to the user 0"):
            read()
    assert read_json(path, owner=0) == {"iterations": 1}
    pipe = make_pipe(str(tmp_path / "rank-0.pipe"), (nobody().pw_uid, nobody().pw_gid))
    status = os.fstat(pipe)
    os.close(pipe)
    assert stat.S_ISFIFO(status.st_mode)
    assert (status.st_uid, stat.S_IMODE(status.st_mode)) == (nobody().pw_uid, 0o600)


@needs_root
def test_a_link_in_the_store_of_a_job_is_not_given_away(tmp_path: Path) -> None:
    target = tmp_path / "target"
    target.mkdir()
    store = JobStore(str(tmp_path / "job"), 1, 7)
    store.claim()
    Path(store.files).symlink_to(target)
    with pytest.raises(NotADirectoryError, match="'files' is a symbolic link"):
        store.make_directories((nobody().pw_uid, nobody().pw_gid))
    assert target.owner() == "root"


@needs_root
async def test_all_files_for_a_program_are_out_of_its_reach_and_those_it_may_read_are_its_own(
    passable: Path,
) -> None:
    bench = ProgramBench(passable)
    source = CertificateSource(SystemClock().wall_s())
    program = f"""
import os
inbox = os.path.dirname(os.environ["TESSERA_CONTROL_FILE"])
for name in ("SERVER_TOKEN", "SERVER_CA_CERT"):
    path = os.environ["KUBEFLOW_TRAINER_" + name]
    print(os.path.dirname(path) == inbox, bool(open(path).read()))
try:
    os.rename(path, path + "x")
except PermissionError:
    print("refused")
{train("import time; time.sleep(0.05)")}
"""
    gang = bench.gang(("/usr/bin/python3", "-c", program), iterations_total=1e9)
    try:
        handle = bench.start(gang, users=UserRule(default="nobody"), certificates=source)
        await handle.begun()
        await until(lambda: "begins at 0" in bench.output())
        assert bench.output() == "True True\nTrue True\nrefused\nbegins at 0\n"
        directory = bench.member(gang).directory
        handle.request_checkpoint()
        await until(lambda: (directory / "in" / "control.json").exists())
        await until(lambda: handle.observe() and observed(handle).checkpoint_iterations)
        token = (directory / "in" / "trainer-token").stat()
        assert (token.st_uid, stat.S_IMODE(token.st_mode)) == (nobody().pw_uid, 0o600)
        others = [p for p in (directory / "in").rglob("*") if p.name != "trainer-token"]
        assert {(p.owner(), p.stat().st_mode & 0o022) for p in others} == {("root", 0)}
        assert {p.owner() for p in (directory / "out").rglob("*")} == {"nobody"}
        handle.stop()
        await end_of(handle)
    finally:
        await bench.clean()


async def test_the_agents_programs_import_nothing_from_the_working_directory(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "json.py").write_text("raise SystemExit('imported')")
    monkeypatch.chdir(tmp_path)
    times_s = [k / 100 for k in range(500)]
    assert await analysed_apart((times_s, [0] * 500)) is None
    gang = a_gang(gpus=1, shares=(("n0", (0,)),), command=("task",), runtime=PROFILER)
    folder = tmp_path / "gang"
    folder.mkdir()
    runtime = ProfilerRuntime(servers=("127.0.0.1:1",), cluster="c", environment=dict(os.environ))
    handle = launch_leader(runtime, gang, folder, tmp_path / "store")
    end = await end_of(handle)
    assert "imported" not in end.error + (folder / "errors.log").read_text()
