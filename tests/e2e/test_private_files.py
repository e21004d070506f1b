"""``tessera up`` under the loosest umask: other users see nothing, and the password stays inside."""

from __future__ import annotations

import os
import pwd
import re
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest
import sqlalchemy as sa
from typer.testing import CliRunner

from tessera.db.engine import Database
from tessera.service.cli.main import app
from tests.support.patience import PATIENCE_S
from tests.support.system import until

PASSWORD = "hunter2" + "-of-the-database"

LIST = """
import os, sys
nobody = int(sys.argv[1])
os.setgroups([]); os.setgid(nobody); os.setuid(nobody)
print(os.listdir(sys.argv[2]))
"""

pytestmark = pytest.mark.slow


@pytest.fixture
def folder() -> Iterator[Path]:
    """Yield a folder that other users can pass through."""
    with tempfile.TemporaryDirectory(prefix="tessera-private-") as name:
        Path(name).chmod(0o711)
        yield Path(name)


@pytest.fixture
def url(database: Database) -> str:
    """Return the test database's URL with a password, which its server does not ask for."""
    with_password = sa.make_url(database.url).set(drivername="postgresql", password=PASSWORD)
    return with_password.render_as_string(hide_password=False)


def family_of(process: subprocess.Popen[str]) -> list[psutil.Process]:
    """Return the process and everything that it and its children have started."""
    parent = psutil.Process(process.pid)
    return [parent, *parent.children(recursive=True)]


def variable_of(process: psutil.Process, name: str) -> str | None:
    return process.environ().get(name)


def test_nothing_of_a_running_system_is_open_to_other_users_or_shows_the_password(
    folder: Path, url: str
) -> None:
    home = folder / "above" / "home"
    with (folder / "messages").open("w") as messages:
        process = subprocess.Popen(
            [
                *(sys.executable, "-m", "tessera.service.cli.main", "up"),
                *("--data-dir", str(home), "--listen", "127.0.0.1:0", "--period", "0"),
                *("--clock-factor", "1"),
            ],
            stdout=subprocess.PIPE,
            stderr=messages,
            text=True,
            umask=0,
            env={**os.environ, "TESSERA_DATABASE_URL": url},
        )
    assert process.stdout is not None
    try:
        address = process.stdout.readline().strip()
        assert re.fullmatch(r"127\.0\.0\.1:\d+", address), (folder / "messages").read_text()
        job = "submit a --model bert --params 1.3B --batch 256 --iterations 100000 --gpus 4"
        for command in (job, "round"):
            done = CliRunner().invoke(app, command.split(), env={"TESSERA_SERVER": address})
            assert done.exit_code == 0, (done.stdout, done.stderr)
        until(lambda: any(home.rglob("progress.json")), "the job runs")
        family = family_of(process)
        gangs = [p for p in family if "replay_job" in " ".join(p.cmdline())]
        agents = [p for p in family if "tessera.service.agent.main" in p.cmdline()]
        assert gangs
        assert agents
        assert [p.cmdline() for p in family if PASSWORD in " ".join(p.cmdline())] == []
        assert [p.cmdline() for p in (*gangs, *agents) if PASSWORD in str(p.environ())] == []
        assert all(variable_of(p, "TESSERA_DATABASE_URL") is None for p in (*gangs, *agents))
    finally:
        process.terminate()
        process.wait(PATIENCE_S)
        process.stdout.close()
    made = [home.parent, *home.parent.rglob("*")]
    assert {"up.json", "server.log", "agent-0.log", "checkpoint.json"} <= {p.name for p in made}
    assert [p for p in made if p.lstat().st_mode & 0o077] == []
    texts = [p.read_text(errors="replace") for p in made if p.is_file()]
    assert not any(PASSWORD in text for text in (*texts, (folder / "messages").read_text()))


@pytest.mark.skipif(os.geteuid() != 0, reason="needs root to become another user")
def test_another_user_does_not_see_a_data_directory(folder: Path) -> None:
    home = folder / "home"
    done = subprocess.run(
        [
            *(sys.executable, "-m", "tessera.service.cli.main", "up", "--data-dir", str(home)),
            *("--database-url", f"postgresql://me:{PASSWORD}@127.0.0.1:1/none"),
        ],
        capture_output=True,
        text=True,
        check=False,
        umask=0,
    )
    assert done.returncode != 0
    assert PASSWORD not in done.stdout + done.stderr
    nobody = str(pwd.getpwnam("nobody").pw_uid)
    looked = subprocess.run(
        [sys.executable, "-I", "-c", LIST, nobody, str(home)],
        capture_output=True,
        text=True,
        check=False,
    )
    assert "PermissionError" in looked.stderr


@pytest.mark.parametrize("kind", ["open", "theirs", "link"])
def test_a_data_directory_in_which_others_could_write_is_refused(folder: Path, kind: str) -> None:
    home = folder / "home"
    home.mkdir(mode=0o700)
    match kind:
        case "open":
            home.chmod(0o777)
            message = "every user may write to"
        case "theirs":
            if os.geteuid() != 0:
                pytest.skip("needs root to give a directory away")
            os.chown(home, pwd.getpwnam("nobody").pw_uid, -1)
            message = "belongs to another user"
        case _:
            (home / ".up.lock").symlink_to(folder / "target")
            message = "cannot be written"
    done = CliRunner().invoke(app, ["up", "--data-dir", str(home), "--listen", "127.0.0.1:0"])
    assert done.exit_code == 2
    assert message in done.stderr
    assert not (folder / "target").exists()
