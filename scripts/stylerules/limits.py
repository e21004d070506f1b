"""The number of times that each file may break each rule, which may only fall."""

from __future__ import annotations

import tomllib
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Final

from stylerules.findings import StyleFinding

Counts = Mapping[str, Mapping[str, int]]
"""For each file, the number of findings by rule. Neither has zeros."""

FILE_NAME: Final = "style_limits.toml"
HEADER: Final = """\
# The names and phrases of each file that break a rule of style, by rule: see scripts/stylerules/words.py.
# They may only fall. `python scripts/style.py --lower` lowers them, and removes those that are reached.
"""
LOWER: Final = "python scripts/style.py --lower"


def count_findings(findings: Iterable[StyleFinding]) -> dict[str, Counter[str]]:
    """Return the number of findings by file and rule."""
    counts: dict[str, Counter[str]] = defaultdict(Counter)
    for finding in findings:
        counts[finding.path][finding.rule] += 1
    return dict(counts)


def load_limits(file: Path) -> Counts:
    """Return the stored limits."""
    limits: Counts = tomllib.loads(file.read_text(encoding="utf-8"))
    return limits


def store_limits(file: Path, limits: Counts) -> None:
    """Store limits, one line for each file, in order."""
    lines = [
        f'"{path}" = {{ {", ".join(f"{rule} = {count}" for rule, count in sorted(rules.items()))} }}\n'
        for path, rules in sorted(limits.items())
        if rules
    ]
    file.write_text(HEADER + "".join(lines), encoding="utf-8")


def lower_limits(limits: Counts, counts: Counts) -> dict[str, dict[str, int]]:
    """Return limits that are at most the counts. None is raised, none is added."""
    return {
        path: {
            rule: min(limit, counts[path][rule])
            for rule, limit in rules.items()
            if counts.get(path, {}).get(rule)
        }
        for path, rules in limits.items()
    }


def find_excess(limits: Counts, findings: Sequence[StyleFinding]) -> Iterator[str]:
    """Yield an error for each file and rule with more findings than its limit, with the places."""
    counts = count_findings(findings)
    for path, rules in sorted(counts.items()):
        for rule, count in sorted(rules.items()):
            limit = limits.get(path, {}).get(rule, 0)
            if count > limit:
                yield f"{path}: the count of {rule!r} is {count}, its limit {limit}:"
                yield from (str(f) for f in findings if (f.path, f.rule) == (path, rule))
        if path not in limits:
            yield f"If {path} was moved or split, move its limits in scripts/{FILE_NAME} by hand."


def find_slack(limits: Counts, counts: Counts) -> Iterator[str]:
    """Yield an error for each limit that is higher than its count."""
    for path, rules in limits.items():
        for rule, limit in rules.items():
            count = counts.get(path, {}).get(rule, 0)
            if count < limit:
                yield f"{path}: the limit of {rule!r} is {limit}, its count {count}. Run `{LOWER}`."


def check_limits(
    file: Path, findings: Sequence[StyleFinding], *, is_to_lower: bool = False
) -> list[str]:
    """Return an error for each limit that is passed or too high; first lower the limits if asked.

    Nothing is lowered while a count is above its limit, for the line of a moved file would be lost.
    """
    limits, counts = load_limits(file), count_findings(findings)
    errors = list(find_excess(limits, findings))
    if is_to_lower and errors:
        errors.append("Nothing was lowered: --lower raises no limit, so mend these names first.")
    elif is_to_lower:
        limits = lower_limits(limits, counts)
        store_limits(file, limits)
    return [*errors, *find_slack(limits, counts)]
