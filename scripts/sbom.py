"""Write the bill of materials: the packages that we install, as CycloneDX JSON.

``scripts/sbom.py FILE`` makes it of the installed environment, without a network, and checks it
against CycloneDX's schema. The same environment gives the same bytes: the serial number is derived
from the contents, and only SOURCE_DATE_EPOCH adds a time. Packages of development are optional.
"""

from __future__ import annotations

import json
import os
import sys
import tomllib
import uuid
from collections.abc import Iterable
from datetime import UTC, datetime
from importlib import metadata
from pathlib import Path
from typing import Any

from cyclonedx.contrib.license.factories import LicenseFactory
from cyclonedx.model.bom import Bom
from cyclonedx.model.component import Component, ComponentScope, ComponentType
from cyclonedx.output.json import JsonV1Dot6
from cyclonedx.schema import SchemaVersion
from cyclonedx.validation.json import JsonStrictValidator
from licences import licence_of
from packages import ROOT, installed_closure, required_by
from packageurl import PackageURL
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

NAMESPACE = uuid.UUID("7e55e7a0-5b0c-5f0c-9a53-0d0c5b0c0001")


def main(to: Path) -> None:
    """Write the bill of materials, or exit with the first error of its schema."""
    text = make_bill()
    if error := JsonStrictValidator(SchemaVersion.V1_6).validate_str(text):
        sys.exit(f"the bill of materials does not fit CycloneDX's schema: {error}")
    to.parent.mkdir(parents=True, exist_ok=True)
    to.write_text(text, encoding="utf-8")
    sys.stdout.write(f"{to}: {len(json.loads(text)['components'])} packages\n")


def make_bill() -> str:
    """Return the bill of materials as JSON."""
    product = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    serving, faults = installed_closure(required_by("server"))
    everything, more = installed_closure(required_by("dev"))
    if faults or more:
        sys.exit("\n".join(sorted({*faults, *more})))
    rules = tomllib.loads((ROOT / "scripts" / "licences.toml").read_text(encoding="utf-8"))
    bill = Bom()
    components = {
        name: _component(name, distribution, rules["names"], is_served=name in serving)
        for name, distribution in sorted(everything.items())
    }
    root = Component(
        name=product["name"],
        version=product["version"],
        type=ComponentType.APPLICATION,
        bom_ref=product["name"],
    )
    bill.metadata.component = root
    for component in components.values():
        bill.components.add(component)
    bill.register_dependency(root, _named(components, required_by("dev")))
    for name, distribution in everything.items():
        bill.register_dependency(components[name], _named(components, distribution.requires or ()))
    plain: dict[str, Any] = json.loads(JsonV1Dot6(bill).output_as_string())
    plain.pop("serialNumber")
    plain["metadata"].pop("timestamp")
    plain["metadata"].pop("tools", None)
    content = json.dumps(plain, sort_keys=True)
    plain["serialNumber"] = uuid.uuid5(NAMESPACE, content).urn
    if epoch := os.environ.get("SOURCE_DATE_EPOCH"):
        plain["metadata"]["timestamp"] = datetime.fromtimestamp(int(epoch), UTC).isoformat()
    return json.dumps(plain, sort_keys=True, indent=1) + "\n"


def _component(
    name: str, distribution: metadata.Distribution, names: dict[str, str], *, is_served: bool
) -> Component:
    stated = licence_of(distribution, names)
    return Component(
        name=name,
        version=distribution.version,
        type=ComponentType.LIBRARY,
        scope=ComponentScope.REQUIRED if is_served else ComponentScope.OPTIONAL,
        purl=PackageURL("pypi", None, name, distribution.version),
        bom_ref=f"{name}@{distribution.version}",
        licenses=[LicenseFactory().make_from_string(stated)] if stated else [],
    )


def _named(components: dict[str, Component], requirements: Iterable[str]) -> list[Component]:
    """Return the components that requirements name, as far as they apply here."""
    named = []
    for text in requirements:
        requirement = Requirement(text)
        component = components.get(canonicalize_name(requirement.name))
        marker = requirement.marker
        if component is not None and (marker is None or marker.evaluate({"extra": ""})):
            named.append(component)
    return named


if __name__ == "__main__":
    if len(sys.argv) != 2:
        sys.exit("usage: python scripts/sbom.py FILE")
    main(Path(sys.argv[1]))
