"""Check that every package we install has a licence that ``scripts/licences.toml`` allows."""

from __future__ import annotations

import argparse
import re
import sys
import tomllib
from importlib import metadata
from pathlib import Path

from license_expression import ExpressionError, LicenseExpression, get_spdx_licensing
from packages import EXTRAS, installed_closure, required_by

ROOT = Path(__file__).resolve().parents[1]
SPDX = get_spdx_licensing()


def main() -> None:
    """Name each package without an allowed licence."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument(
        "--list", type=Path, default=ROOT / "scripts" / "licences.toml", dest="file"
    )
    options = parser.parse_args()
    rules = tomllib.loads(options.file.read_text(encoding="utf-8"))
    needed, faults = installed_closure(required_by(EXTRAS[-1]))
    allowed, exceptions = set(rules["allowed"]), rules.get("exceptions", {})
    for name, distribution in sorted(needed.items()):
        stated = licence_of(distribution, rules["names"])
        exception = exceptions.get(name)
        if exception is not None:
            if exception["states"] != stated:
                faults.append(f"{name} states {stated!r} now, and not {exception['states']!r}")
        elif not is_allowed(stated, allowed):
            faults.append(f"{name} {distribution.version} states {stated!r}, which is not allowed")
    faults += [
        f"{name} has an exception, but nothing needs it" for name in exceptions.keys() - needed
    ]
    if faults:
        sys.exit("\n".join(faults) + f"\ncompare {options.file}")


def licence_of(distribution: metadata.Distribution, names: dict[str, str]) -> str:
    """Return the licence of a package as an SPDX expression if possible, or its own words, or "".

    ``names`` are expressions for the words of packages that use no SPDX.
    """
    fields = distribution.metadata
    if expression := fields.get("License-Expression"):
        return str(expression)
    text = " ".join((fields.get("License") or "").split())
    if text and len(text) < 100 and text != "UNKNOWN":  # a longer one is the licence itself
        return names.get(text, text)
    prefix = "License :: "
    classes = [value for value in fields.get_all("Classifier") or () if value.startswith(prefix)]
    words = [value.rpartition(" :: ")[2] for value in classes if value != "License :: OSI Approved"]
    return " AND ".join(names.get(word, word) for word in words)


def is_allowed(stated: str, allowed: set[str]) -> bool:
    """Return whether an expression can be met with allowed licences only."""
    try:
        parsed = SPDX.parse(stated, validate=True)
    except ExpressionError:
        return False
    return parsed is not None and _is_met(parsed, allowed)


def _is_met(parsed: LicenseExpression, allowed: set[str]) -> bool:
    operator = getattr(parsed, "operator", "").strip()
    if operator in {"AND", "OR"}:
        parts = [_is_met(part, allowed) for part in parsed.args]
        return all(parts) if operator == "AND" else any(parts)
    return re.sub(r"\s+", " ", str(parsed)) in allowed


if __name__ == "__main__":
    main()
