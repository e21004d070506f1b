"""The packages that Tessera requires: from ``pyproject.toml``, as installed, and as locked.

The other scripts import it. It needs the installed environment only, and no network.
"""

from __future__ import annotations

import re
import tomllib
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path

from packaging.markers import Marker
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

ROOT = Path(__file__).resolve().parents[1]
LOCKS = ROOT / "requirements"

OURS = frozenset({"tessera-scheduler", "tessera-client"})
"""Our own distributions, which are installed from the checkout."""

EXTRAS = ("server", "dev")
"""The extras with a lock. Each includes the one before, and its lock has only what it adds."""

_PIN = re.compile(r"(?P<name>[A-Za-z0-9._-]+)==(?P<version>[^ ;\\]+)(?: *; *(?P<marker>[^\\]+))?")


@dataclass(frozen=True, slots=True)
class LockedPackage:
    """A line of a lock: a version, the environments it is for, and the hashes of its files."""

    name: str
    version: str
    marker: str  # "" for every environment
    hashes: tuple[str, ...]

    def applies(self) -> bool:
        """Return whether the line is for this environment."""
        return not self.marker or Marker(self.marker).evaluate()


def required_by(extra: str) -> list[str]:
    """Return the requirements of ``extra`` on other projects, and those of building our own."""
    scheduler, client = _project(ROOT), _project(ROOT / "proto")
    optional = scheduler["project"]["optional-dependencies"]
    collected: dict[str, None] = {}

    def collect(requirements: Iterable[str]) -> None:
        for text in requirements:
            requirement = Requirement(text)
            if requirement.name == "tessera-client":
                collect(client["project"]["dependencies"])
                for name in sorted(requirement.extras):
                    collect(client["project"]["optional-dependencies"][name])
            elif requirement.name == "tessera-scheduler":
                for name in sorted(requirement.extras):
                    collect(optional[name])
            else:
                collected[text] = None

    collect(scheduler["project"]["dependencies"])
    collect(optional[extra])
    for project in (scheduler, client):
        collect(project["build-system"]["requires"])
    return list(collected)


def installed_closure(
    requirements: Iterable[str],
) -> tuple[dict[str, metadata.Distribution], list[str]]:
    """Return what the requirements need here, by name, and a sentence for each that is not met."""
    found: dict[str, metadata.Distribution] = {}
    faults: list[str] = []
    waiting = [(Requirement(text), "", "pyproject.toml") for text in requirements]
    seen: set[tuple[str, str]] = set()
    while waiting:
        requirement, extra, source = waiting.pop()
        if requirement.marker and not requirement.marker.evaluate({"extra": extra}):
            continue
        name = canonicalize_name(requirement.name)
        try:
            distribution = found.get(name) or metadata.distribution(name)
        except metadata.PackageNotFoundError:
            faults.append(f"{name}, which {source} requires, is not installed; run `make setup`")
            continue
        if not requirement.specifier.contains(distribution.version, prereleases=True):
            faults.append(f"{name} is {distribution.version}, but {source} requires {requirement}")
        found[name] = distribution
        for wanted in ("", *requirement.extras):
            if (name, wanted) not in seen:
                seen.add((name, wanted))
                needs = [Requirement(text) for text in distribution.requires or ()]
                waiting += [(need, wanted, name) for need in needs]
    return found, faults


def read_lock(folder: Path, extra: str) -> list[LockedPackage]:
    """Return the lines of a lock, without those of the locks that it includes.

    Raises:
        ValueError: a line is not a pinned version.
    """
    text = (folder / f"{extra}.lock").read_text(encoding="utf-8").replace("\\\n", " ")
    return list(_packages(text))


def _packages(text: str) -> Iterator[LockedPackage]:
    for line in text.splitlines():
        if not line.strip() or line.startswith(("#", "-r ")):
            continue
        pin, *hashes = line.split("--hash=")
        match = _PIN.fullmatch(pin.strip())
        if match is None:
            raise ValueError(f"{pin.strip()!r} is not pinned to a version")
        yield LockedPackage(
            canonicalize_name(match["name"]),
            match["version"],
            (match["marker"] or "").strip(),
            tuple(text.strip() for text in hashes),
        )


def _project(folder: Path) -> dict[str, dict[str, object]]:
    return tomllib.loads((folder / "pyproject.toml").read_text(encoding="utf-8"))
