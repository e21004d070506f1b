"""Paths that other users control: links, pipes and second names lead the agent and keepers nowhere."""

from __future__ import annotations

import errno
import os
import pwd
import stat
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from tessera.formulation.clock import SystemClock
from tessera.formulation.errors import InvalidInput
from tessera.formulation.runtimes import PROFILER
from tessera.service.agent import files
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
from tessera.service.agent.isolation import UserRule
from tessera.service.agent.keeper.store import JobStore
from tessera.service.agent.network.sampling import analysed_apart
from tessera.service.agent.runtimes.profiler import ProfilerRuntime
from tessera.service.agent.state import StateDir
from tessera.service.agent.trainer_certificate import CertificateSource
from tests.support.agents import a_gang, launch_leader, until
from tests.support.programs import ProgramBench, end_of, train

DEPTH = 3000
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
    top = tmp_path / "top"
    top.mkdir()
    deep = os.open(top, os.O_RDONLY)
    for _ in range(DEPTH):
        os.mkdir("d", dir_fd=deep)
        inner = os.open("d", os.O_RDONLY, dir_fd=deep)
        os.close(deep)
        deep = inner
    os.close(os.open("file", os.O_WRONLY | os.O_CREAT, dir_fd=deep))
    os.close(deep)
    (top / "link").symlink_to(secret.parent)
    assert measure_tree(str(top)) == (2, (top / "link").lstat().st_size)
    remove_tree(str(top))
    assert not top.exists()
    assert_untouched(secret)
    remove_tree(str(top))  # it is gone already


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


def test_an_end_of_a_gang_survives_a_deep_tree_of_its_program(tmp_path: Path) -> None:
    state = StateDir(tmp_path / "data", tmp_path / "data" / "checkpoints")
    state.claim()
    folder = state.add(a_gang())
    deep = os.open(folder, os.O_RDONLY)
    for _ in range(DEPTH):
        os.mkdir("d", dir_fd=deep)
        inner = os.open("d", os.O_RDONLY, dir_fd=deep)
        os.close(deep)
        deep = inner
    os.close(deep)
    state.remove(a_gang().key)
    assert not folder.exists()
    state.release()


@needs_root
def test_a_file_of_another_owner_is_not_read_from_a_folder_of_a_job(theirs: Path) -> None:
    (theirs / "progress.json").write_text('{"iterations": 1}')
    with pytest.raises(ValueError, match="belongs to the user 0"):
        read_json(str(theirs / "progress.json"), owner=nobody().pw_uid)
    with pytest.raises(ValueError, match="belongs to the user 0"):
        read_start(str(theirs / "progress.json"), 10, owner=nobody().pw_uid)
    assert read_json(str(theirs / "progress.json"), owner=0) == {"iterations": 1}


@needs_root
def test_a_link_in_the_store_of_a_job_is_not_given_away(tmp_path: Path) -> None:
    target = tmp_path / "target"
    target.mkdir()
    store = JobStore(str(tmp_path / "job"), 1, 7)
    store.claim()
    Path(store.files).symlink_to(target)
    with pytest.raises(NotADirectoryError, match="'files' is a symbolic link"):
        store.make_directories(nobody().pw_uid, nobody().pw_gid)
    assert target.owner() == "root"


@needs_root
def test_a_store_that_another_user_has_made_is_not_used(theirs: Path, tmp_path: Path) -> None:
    with pytest.raises(PermissionError, match="belongs to another user"):
        JobStore(str(theirs), 1, 7).claim()
    assert list(theirs.iterdir()) == []


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
        await until(lambda: getattr(handle.observe(), "checkpoint_iterations", None))
        token = (directory / "in" / "trainer-token").stat()
        assert (token.st_uid, stat.S_IMODE(token.st_mode)) == (nobody().pw_uid, 0o600)
        others = [p for p in (directory / "in").rglob("*") if p.name != "trainer-token"]
        assert {(p.owner(), p.stat().st_mode & 0o022) for p in others} == {("root", 0)}
        assert {p.owner() for p in (directory / "out").rglob("*")} == {"nobody"}
        handle.stop()
        await end_of(handle)
    finally:
        await bench.clean()


@needs_root
def test_the_pipe_of_a_rank_belongs_to_its_user_in_a_folder_that_does_not(tmp_path: Path) -> None:
    descriptor = make_pipe(str(tmp_path / "rank-0.pipe"), (nobody().pw_uid, nobody().pw_gid))
    status = os.fstat(descriptor)
    os.close(descriptor)
    assert stat.S_ISFIFO(status.st_mode)
    assert (status.st_uid, stat.S_IMODE(status.st_mode)) == (nobody().pw_uid, 0o600)


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
