"""What a round, or a re-plan between rounds, says about the network: by job, with what it rests on."""

from __future__ import annotations

from dataclasses import dataclass, field

from tessera.formulation.check import Violation


@dataclass(frozen=True, slots=True, kw_only=True)
class Route:
    """The way that a job's traffic between two GPUs takes: vertices of the fabric in order."""

    source: str
    target: str
    via: tuple[str, ...]
    sent_bytes: float  # in one iteration


@dataclass(frozen=True, slots=True, kw_only=True)
class NetworkDecision:
    """One running job's part in a network plan.

    ``rank`` 0 is the most urgent; of ``level`` the higher is served first. ``tag`` is the DSCP code point
    that its packets carry as long as its allocation lasts; what the fabric does with a tag can change, a live
    connection's tag cannot. ``meets`` are jobs with which it shares a link, ``note`` says why it has no part
    in the network, or what was measured of its traffic.
    """

    job: str
    generation: int  # of the allocation that this is for
    rank: int
    level: int
    tag: int  # -1: none was left, or it needs none
    priority: float  # P = k I, flop/s; inf: no traffic
    intensity: float  # I = W / t, flop/s
    meets: tuple[str, ...] = ()
    routes: tuple[Route, ...] = ()
    note: str = ""

    @property
    def contended(self) -> bool:
        """Return whether it shares a link with another job."""
        return bool(self.meets)


@dataclass(frozen=True, slots=True, kw_only=True)
class NetworkOutcome:
    """A network plan by names. With ``violations`` it must not be carried out."""

    levels: int
    decisions: tuple[NetworkDecision, ...]  # of all jobs that run
    violations: tuple[Violation, ...] = ()
    notes: tuple[str, ...] = field(default=())
    """Of the network as a whole, e.g. that its switches choose paths by themselves."""


@dataclass(frozen=True, slots=True, kw_only=True)
class NetworkPlanRecord:
    """A network plan as stored."""

    number: int
    planned_s: float  # since 1970
    cause: str  # round, start, end, topology, measured
    round: int  # the last round before it, or that made it
    levels: int
    changed: int  # jobs whose level, rank or routes are others than before
    seconds: float  # planning took
    decisions: tuple[NetworkDecision, ...] = ()  # those in force; empty where only plans are listed
    notes: tuple[str, ...] = ()
