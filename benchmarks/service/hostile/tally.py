"""A count of calls by their answers, which attackers send to the benchmark as JSON."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any, Final

LEFT_CODE: Final = "LEFT"
"""The code of calls whose caller left before the answer arrived."""

INTERNAL_CODES: Final = frozenset({"INTERNAL", "UNKNOWN", "DATA_LOSS"})
"""The codes of failures that the server did not expect."""

MAX_EXAMPLES: Final = 5
"""The number of internal errors that a tally keeps verbatim."""


@dataclass(slots=True)
class CallTally:
    """The answers to one kind of hostile call."""

    codes: Counter[str] = field(default_factory=Counter)
    slowest_s: dict[str, float] = field(default_factory=dict)
    """The seconds of the slowest call of each kind, whether or not it was answered."""
    examples: list[str] = field(default_factory=list)
    """The first internal errors."""

    def record(self, what: str, code: str, seconds: float, details: str = "") -> None:
        """Count one answer."""
        self.codes[code] += 1
        self.slowest_s[what] = max(seconds, self.slowest_s.get(what, 0.0))
        if code in INTERNAL_CODES and len(self.examples) < MAX_EXAMPLES:
            self.examples.append(f"{what}: {code} {details[:300]}")

    @property
    def calls(self) -> int:
        """Return the number of calls."""
        return self.codes.total()

    @property
    def internal(self) -> int:
        """Return the number of internal errors among the answers."""
        return sum(count for code, count in self.codes.items() if code in INTERNAL_CODES)

    @property
    def slowest(self) -> tuple[str, float]:
        """Return the kind and the seconds of the slowest call, or ("", 0.0) before any call."""
        return max(self.slowest_s.items(), key=lambda item: item[1], default=("", 0.0))

    def to_json(self) -> dict[str, Any]:
        """Return the tally as values that JSON can hold."""
        return {
            "codes": dict(self.codes),
            "slowest_s": self.slowest_s,
            "examples": self.examples,
        }

    @classmethod
    def from_json(cls, values: dict[str, Any]) -> CallTally:
        """Return the tally from values written by ``to_json``."""
        return cls(Counter(values["codes"]), dict(values["slowest_s"]), list(values["examples"]))


def merge_tallies(tallies: Iterable[CallTally]) -> CallTally:
    """Return one tally of the calls of several tallies."""
    merged = CallTally()
    for tally in tallies:
        merged.codes.update(tally.codes)
        for what, seconds in tally.slowest_s.items():
            merged.slowest_s[what] = max(seconds, merged.slowest_s.get(what, 0.0))
        merged.examples += tally.examples
    merged.examples = merged.examples[:MAX_EXAMPLES]
    return merged
