"""The packages of interpreters that run Alpa: exact versions, which Alpa's own requirements allow."""

from __future__ import annotations

import email
import os
import zipfile
from pathlib import Path
from typing import Final

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name
from packaging.version import Version

ROOT: Final = Path(__file__).parents[2]
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


def test_the_project_names_the_file() -> None:
    assert "requirements/alpa.txt" in (ROOT / "pyproject.toml").read_text()


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
