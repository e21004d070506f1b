"""The figures of a run under attack, computed from the measurements of its phases."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Final

from tessera.benchmarks.service.hostile.neighbour import CallSample
from tessera.benchmarks.service.hostile.tally import CallTally
from tessera.simulator.figures import Figure

QUIET_WITHIN_S: Final = 10.0
"""The time within which the server must stop working for callers that have left."""

ROUND_FACTOR: Final = 2.0
ROUND_EXTRA_S: Final = 1.0
"""Another cluster's round may take this factor of its longest time alone, plus this time."""

OTHER_CALLS: Final = ("submit", "list", "get", "cancel")
"""The calls of the well-behaved caller, except rounds."""

BUSY_MACHINE_S: Final = 0.25
"""The delay of a server without work above which times are not meaningful.

The machine is then too busy with other work.
"""


@dataclass(frozen=True, slots=True, kw_only=True)
class AttackPhase:
    """The measurements during one kind of attack, or without any."""

    name: str
    samples: Sequence[CallSample]
    """The calls of the well-behaved callers."""
    tally: CallTally = field(default_factory=CallTally)
    """The answers to the hostile callers."""
    rss_before_mib: float = 0.0
    rss_peak_mib: float = 0.0
    rss_after_mib: float = 0.0
    quiet_after_s: float = 0.0
    threads_stuck: int = 0
    transactions_stuck: int = 0
    silence_s: float = 0.0
    """The longest silence of an agent, by the database."""
    leases_lost: int = 0
    logged: Sequence[str] = ()
    """Unexpected errors in the server's log."""
    broken: Sequence[str] = ()
    """Invariants that did not hold."""
    server_ended: bool = False

    def longest_s(self, *kinds: str) -> float:
        """Return the seconds of the longest call of these kinds, or 0 if there was none."""
        return max((s.seconds for s in self.samples if s.kind in kinds), default=0.0)

    @property
    def failures(self) -> list[str]:
        """Return the failures of calls of well-behaved callers."""
        return [s.failure for s in self.samples if s.failure]

    @property
    def rss_growth_mib(self) -> float:
        """Return the memory that was not released after the phase, in MiB."""
        return self.rss_after_mib - self.rss_before_mib

    def row(self) -> dict[str, Figure | str]:
        """Return the phase as a row of the table."""
        codes = sorted(self.tally.codes.items(), key=lambda item: -item[1])
        what, seconds = self.tally.slowest
        return {
            "phase": self.name,
            "calls": self.tally.calls,
            "answers": ", ".join(f"{code} {count}" for code, count in codes),
            "slowest": what,
            "slowest_s": seconds,
            "health_max_s": self.longest_s("health"),
            "control_max_s": self.longest_s("control"),
            "other_rounds": sum(s.kind == "round" for s in self.samples),
            "other_round_max_s": self.longest_s("round"),
            "other_call_max_s": self.longest_s(*OTHER_CALLS),
            "other_failures": len(self.failures),
            "rss_peak_mib": self.rss_peak_mib,
            "rss_growth_mib": self.rss_growth_mib,
            "quiet_after_s": self.quiet_after_s,
            "threads_stuck": self.threads_stuck,
            "transactions_stuck": self.transactions_stuck,
            "silence_s": self.silence_s,
            "leases_lost": self.leases_lost,
            "internal_errors": self.tally.internal + len(self.logged),
            "invariants_broken": len(self.broken),
            "server_ended": self.server_ended,
        }


def sum_up(
    alone: AttackPhase, phases: Sequence[AttackPhase], *, sigterm_s: float, grace_s: float
) -> dict[str, Figure]:
    """Return the figures of the whole run: the worst phase of each, or the sum of counts."""
    alone_s = alone.longest_s("round")
    longest_s = max(phase.longest_s("round") for phase in phases)
    return {
        "health_max_s": max(phase.longest_s("health") for phase in phases),
        "health_alone_max_s": alone.longest_s("health"),
        "control_max_s": max(phase.longest_s("control") for phase in phases),
        "other_round_alone_s": alone_s,
        "other_round_max_s": longest_s,
        "other_round_excess_s": max(0.0, longest_s - ROUND_FACTOR * alone_s - ROUND_EXTRA_S),
        "other_call_max_s": max(phase.longest_s(*OTHER_CALLS) for phase in phases),
        "other_failures": sum(len(phase.failures) for phase in phases),
        "leases_lost": sum(phase.leases_lost for phase in phases),
        "silence_max_s": max(phase.silence_s for phase in phases),
        "rss_growth_mib": max(phase.rss_growth_mib for phase in phases),
        "rss_peak_mib": max(phase.rss_peak_mib for phase in phases),
        "threads_stuck": max(phase.threads_stuck for phase in phases),
        "transactions_stuck": max(phase.transactions_stuck for phase in phases),
        "quiet_after_max_s": max(phase.quiet_after_s for phase in phases),
        "internal_errors": sum(p.tally.internal + len(p.logged) for p in phases),
        "invariants_broken": sum(len(phase.broken) for phase in phases),
        "servers_ended": sum(phase.server_ended for phase in phases),
        "sigterm_s": sigterm_s,
        "sigterm_over_grace_s": max(0.0, sigterm_s - grace_s),
        "hostile_calls": sum(phase.tally.calls for phase in phases),
    }


def waived_figures(figures: dict[str, Figure]) -> frozenset[str]:
    """Return the figures whose bounds do not count, since the machine was busy with other work."""
    if figures["control_max_s"] <= BUSY_MACHINE_S:
        return frozenset()
    return frozenset({"health_max_s", "other_round_excess_s"})
