"""Update the locks in ``requirements``, or check with ``--check`` that they are complete.

A lock has the version of each package that an extra needs, on all platforms, and the hashes of the
files of that version. ``dev.lock`` includes ``server.lock``. An update keeps the versions that still
fit; ``--upgrade`` takes the newest. It asks the package index that pip is configured for, through
uv, which is installed in ``build/`` unless it is on PATH. The check needs no network.
"""

from __future__ import annotations

import argparse
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

from packages import EXTRAS, LOCKS, ROOT, installed_closure, read_lock, required_by

OLDEST_PYTHON = "3.11.5"
"""The oldest Python whose packages are locked: of older ones some tools have no release."""

TOOLS = ROOT / "build" / "lock-tools"
HEADER = "# Made by `make lock` from pyproject.toml. Do not edit.\n"


def main() -> None:
    """Update the locks, or check them."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--check", action="store_true", help="only check, without a network")
    parser.add_argument("--upgrade", action="store_true", help="take the newest versions")
    parser.add_argument("--folder", type=Path, default=LOCKS, help="the folder of the locks")
    options = parser.parse_args()
    if not options.check:
        _update(options.folder, upgrade=options.upgrade)
    elif faults := find_faults(options.folder):
        sys.exit("\n".join(faults) + "\nrun `make lock`, and then `make setup`")


def find_faults(folder: Path) -> list[str]:
    """Return a sentence for each way in which the locks, the extras and this environment differ."""
    faults: list[str] = []
    locked: set[str] = set()
    for extra in EXTRAS:
        try:
            lines = read_lock(folder, extra)
        except (OSError, ValueError) as error:
            return [f"{extra}.lock cannot be used: {error}"]
        faults += [f"{extra}.lock: {line.name} has no hash" for line in lines if not line.hashes]
        needed, unmet = installed_closure(required_by(extra))
        faults += unmet
        here = {line.name: line.version for line in lines if line.applies()}
        for name, distribution in sorted(needed.items()):
            if name in locked:
                continue
            if name not in here:
                faults.append(f"{extra}.lock: {name} is missing, which the extra {extra} needs")
            elif here[name] != distribution.version:
                faults.append(
                    f"{extra}.lock: {name} is locked at {here[name]}, but {distribution.version} is installed"
                )
        faults += [f"{extra}.lock: nothing needs {name}" for name in sorted(here.keys() - needed)]
        locked |= here.keys()
    return sorted(set(faults))


def _update(folder: Path, *, upgrade: bool) -> None:
    uv = _uv()
    with tempfile.TemporaryDirectory() as name:
        scratch = Path(name)
        all_pins = scratch / "pins"  # of all locks, which uv prefers
        before = [(folder / f"{extra}.lock") for extra in EXTRAS]
        all_pins.write_text(
            "".join(_entries(file.read_text()) for file in before if file.exists() and not upgrade)
        )
        _compile(uv, required_by(EXTRAS[-1]), all_pins)
        written: set[str] = set()
        for extra in EXTRAS:
            pins = scratch / extra
            _compile(uv, required_by(extra), pins, "--constraints", str(all_pins))
            entries = [entry for entry in _split(pins.read_text()) if entry not in written]
            includes = [f"-r {other}.lock\n" for other in EXTRAS[: EXTRAS.index(extra)][-1:]]
            (folder / f"{extra}.lock").write_text(HEADER + "".join([*includes, *entries]))
            written.update(entries)
        tool = scratch / "tool"
        _compile(uv, ["uv"], tool)
        (folder / "uv.lock").write_text(HEADER + tool.read_text())


def _compile(uv: str, requirements: list[str], to: Path, *arguments: str) -> None:
    """Resolve the requirements for all platforms. What the file ``to`` holds is preferred."""
    subprocess.run(
        [
            *(uv, "pip", "compile", "--quiet", "--universal", "--python-version", OLDEST_PYTHON),
            *("--fork-strategy", "fewest", "--generate-hashes", "--no-header", "--no-annotate"),
            *("--output-file", str(to), *arguments, "-"),
        ],
        input="\n".join(requirements),
        text=True,
        cwd=to.parent,  # our own settings, if any, are not for this
        check=True,
    )


def _uv() -> str:
    """Return the path of uv. If it is not on PATH, install the locked one."""
    if there := shutil.which("uv"):
        return there
    if not (TOOLS / "bin" / "uv").exists():
        subprocess.run([sys.executable, "-m", "venv", str(TOOLS)], check=True)
        pip = [str(TOOLS / "bin" / "python"), "-m", "pip", "install", "--quiet"]
        subprocess.run([*pip, "--require-hashes", "-r", str(LOCKS / "uv.lock")], check=True)
    return str(TOOLS / "bin" / "uv")


def _entries(text: str) -> str:
    return "".join(_split(text))


def _split(text: str) -> list[str]:
    """Return the entries of a lock, each with its hashes."""
    entries: list[str] = []
    for line in text.splitlines(keepends=True):
        if line.startswith((" ", "\t")):
            entries[-1] += line
        elif not line.startswith(("#", "-r ")):
            entries.append(line)
    return entries


if __name__ == "__main__":
    main()
