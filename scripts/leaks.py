"""Find secrets in the tracked files that ``scripts/leaks.toml`` does not list as reviewed.

A secret is a private key, a token of Tessera or of a well-known service, a password in a URL, or a
random text that is assigned to a name such as ``password``. ``--list`` prints an entry for each new
finding. An entry has the file and a part of the finding's SHA-256, so the list holds no secret.
"""

from __future__ import annotations

import argparse
import hashlib
import re
import subprocess
import sys
import tomllib
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from tessera.formulation.base.secrets import SERVICE_SECRETS, is_random

ROOT = Path(__file__).resolve().parents[1]
MAX_BYTES: Final = 4 * 2**20
"""Size above which a file is data, and not read."""

RULES: Final = {
    "a token of Tessera": r"tessera_(?:token|join)_[a-z0-9]{12}_[A-Za-z0-9_-]{16,}",
    "a private key": r"-----BEGIN [A-Z ]*PRIVATE KEY-----\s*[A-Za-z0-9+/=\s]{32,}",
    "a JSON web token": r"\beyJ[A-Za-z0-9_-]{8,}\.eyJ[A-Za-z0-9_-]{8,}\.[A-Za-z0-9_-]{8,}",
    **SERVICE_SECRETS,
    "a password in a URL": r"\b[a-z][a-z0-9+]*://[^\s/:@'\"`]*:[^\s/@'\"`$<>{}]+@[A-Za-z0-9.\[]",
}
ASSIGNMENT: Final = re.compile(
    r"""(?i)(?:passw(?:or)?d|passphrase|secret|token|api_?key|private_?key)[a-z_]{0,12}["']?\s*[:=]{1,2}\s*"""
    r"""(?:["']([^\s"'{}]{12,200})["']|([A-Za-z0-9+/_=-]{20,200})(?=\s*$))""",
    re.MULTILINE,
)
PATTERN: Final = re.compile("|".join(f"(?P<r{k}>{rule})" for k, rule in enumerate(RULES.values())))


@dataclass(frozen=True, slots=True)
class Finding:
    """A text in a file that looks like a secret. ``digest`` is a part of its SHA-256."""

    file: str
    line: int
    kind: str
    digest: str


def main() -> None:
    """Compare the findings with the reviewed ones."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--root", type=Path, default=ROOT, help="the checkout")
    parser.add_argument("--list", action="store_true", help="print entries for new findings")
    options = parser.parse_args()
    text = (options.root / "scripts" / "leaks.toml").read_text(encoding="utf-8")
    reviewed = {
        (entry["file"], entry["digest"]) for entry in tomllib.loads(text).get("reviewed", ())
    }
    findings = [
        found for file in tracked_files(options.root) for found in scan_file(options.root, file)
    ]
    new = [found for found in findings if (found.file, found.digest) not in reviewed]
    stale = reviewed - {(found.file, found.digest) for found in findings}
    if options.list:
        for found in new:
            sys.stdout.write(
                f'\n[[reviewed]]\nfile = "{found.file}"\ndigest = "{found.digest}"\nwhy = "line {found.line}:'
                f' {found.kind}"\n'
            )
        return
    faults = [f"{found.file}:{found.line}: {found.kind}" for found in new]
    faults += [
        f"scripts/leaks.toml: {file} no longer has {digest}" for file, digest in sorted(stale)
    ]
    if faults:
        sys.exit(
            "\n".join(faults)
            + "\nrevoke and remove a real secret; list a false one in scripts/leaks.toml"
            " (`scripts/leaks.py --list` prints the entry)"
        )


def tracked_files(root: Path) -> Iterator[str]:
    """Yield the names of the files that git tracks or would add."""
    command = ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"]
    done = subprocess.run(command, cwd=root, capture_output=True, check=True)
    yield from sorted(name for name in done.stdout.decode().split("\0") if name)


def scan_file(root: Path, name: str) -> Iterator[Finding]:
    """Yield what looks like a secret in a text file."""
    path = root / name
    if path.is_symlink() or not path.is_file() or path.stat().st_size > MAX_BYTES:
        return
    data = path.read_bytes()
    if b"\0" in data[:8192]:
        return
    text = data.decode(errors="replace")
    kinds = list(RULES)
    for match in PATTERN.finditer(text):
        kind = kinds[int(str(match.lastgroup)[1:])]
        yield _finding(name, text, match.start(), kind, match[0])
    for match in ASSIGNMENT.finditer(text):
        value = match[1] or match[2]
        if is_random(value):
            yield _finding(name, text, match.start(), "a random text under a secret's name", value)


def _finding(name: str, text: str, start: int, kind: str, value: str) -> Finding:
    digest = hashlib.sha256(value.encode()).hexdigest()[:16]
    return Finding(name, text.count("\n", 0, start) + 1, kind, digest)


if __name__ == "__main__":
    main()
