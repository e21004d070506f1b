"""The embedded server: started without a plain fork, shared, and started again however it ended."""

from __future__ import annotations

import os
import pwd
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

import psutil
import psycopg2
import pytest
import sqlalchemy as sa

from tessera.db import embedded, pgserver
from tessera.formulation.errors import Unavailable
from tests.support.data_directories import MakeDataDirectory
from tests.support.patience import PATIENCE_S
from tests.support.system import kill_postgres, until

PROGRAM = """
import ctypes, os, signal, subprocess, sys
from pathlib import Path
from tessera.db import embedded
place = Path(sys.argv[1])
"""

FORK_IS_DEADLY = """
libc = ctypes.CDLL(None)
if libc.__register_atfork(None, None, libc.abort, None):  # in the child of every fork, of no vfork
    raise SystemExit("no handler")
"""


@pytest.fixture
def folder() -> Iterator[Path]:
    """Yield a folder that can be opened to the server's user. Pytest closes those of ``tmp_path``."""
    with tempfile.TemporaryDirectory(prefix="tessera-pg-") as name:
        yield Path(name)


@pytest.fixture
def new_place(folder: Path) -> Iterator[Path]:
    """Yield the path of a server's directory, and check that no process is left there at the end."""
    yield folder / "pg"
    embedded.stop_server(folder / "pg")
    until(lambda: not processes_in(folder / "pg"), "all processes have ended")


@pytest.fixture
def place(new_place: Path, make_data_directory: MakeDataDirectory) -> Path:
    """Return the initialised directory of a server that does not run yet."""
    return make_data_directory(new_place)


def processes_in(place: Path) -> list[psutil.Process]:
    return [p for p in psutil.process_iter(["cwd"]) if p.info["cwd"] == str(place)]


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


def test_stored_data_survives_a_kill_of_every_process(place: Path) -> None:
    query_scalar(embedded.start_server(place), "CREATE TABLE kept AS SELECT 7 AS value")
    kill_postgres(place)
    assert query_scalar(embedded.start_server(place), "SELECT value FROM kept") == (7,)


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


def test_a_server_is_alive_until_its_first_process_has_ended(place: Path) -> None:
    assert not embedded.is_running(place)
    embedded.start_server(place)
    first = embedded.find_process(place)
    assert first is not None
    assert embedded.is_running(place)
    kill_postgres(place)
    assert not embedded.is_running(place)
    embedded.start_server(place)
    assert not embedded.is_alive(first)
    assert embedded.is_running(place)


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


def test_the_server_stays_while_a_user_remains(place: Path) -> None:
    url = embedded.start_server(place)
    run_program("embedded.start_server(place); embedded.stop_server(place)", place)
    run_program("embedded.stop_server(place)", place)
    run_program("embedded.start_server(place)", place)
    assert query_scalar(url, "SELECT 1") == (1,)


def test_a_forked_child_does_not_count_as_a_user(place: Path) -> None:
    program = """
url = embedded.start_server(place)
if pid := os.fork():
    os.waitpid(pid, 0)
    print(embedded.pgserver.settled_url(place) == url)
"""
    assert run_program(program, place) == ["True"]


def test_a_removed_directory_is_no_error_at_exit_and_does_not_block_a_new_one(
    place: Path,
) -> None:
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


@pytest.mark.parametrize("lines", [1, 3, 5, 7])
def test_a_half_written_file_of_a_killed_server_does_no_harm(place: Path, lines: int) -> None:
    embedded.start_server(place)
    kill_postgres(place)
    file = place / "postmaster.pid"
    file.write_text("".join(file.read_text().splitlines(keepends=True)[:lines]).rstrip())
    assert query_scalar(embedded.start_server(place), "SELECT 1") == (1,)


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


def test_a_failure_names_the_program_its_output_and_the_log(place: Path) -> None:
    embedded.start_server(place)
    kill_postgres(place)
    (place / "postmaster.pid").write_text("")
    with pytest.raises(Unavailable, match=r"pg_ctl ended with status 1: .* is empty.*see .*pg/log"):
        embedded.start_server(place)
    (place / "postmaster.pid").unlink()


@pytest.mark.skipif(
    os.geteuid() != 0, reason="needs root; without it, all other tests run as another user"
)
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
