"""The network results of a round, or of a new network plan between rounds, for each job."""

from __future__ import annotations

from dataclasses import dataclass, field

from tessera.formulation.answer.check import Violation


@dataclass(frozen=True, slots=True, kw_only=True)
class Route:
    """The path of a job's traffic between two GPUs: vertices of the fabric in order."""

    source: str
    target: str
    via: tuple[str, ...]
    sent_bytes: float  # in one iteration


@dataclass(frozen=True, slots=True, kw_only=True)
class NetworkDecision:
    """One running job's part in a network plan.

    ``rank`` 0 is the most urgent. The higher ``level`` is served first. ``tag`` is the DSCP code
    point that the job's packets carry for the life of its allocation. The fabric can treat a tag
    differently later, but a live connection cannot change its tag.

    ``contending_jobs`` are jobs with which it shares a link. ``note`` says why it has no part in the network,
    or what was measured of its traffic.
    """

    job: str
    generation: int  # of the allocation that this is for
    rank: int
    level: int
    tag: int  # -1 if it needs none, or none was left
    priority: float  # P = k I, flop/s; inf if it has no traffic
    intensity: float  # I = W / t, flop/s
    contending_jobs: tuple[str, ...] = ()
    routes: tuple[Route, ...] = ()
    note: str = ""

    @property
    def contended(self) -> bool:
        """Return whether the job shares a link with another job."""
        return bool(self.contending_jobs)


@dataclass(frozen=True, slots=True, kw_only=True)
class NetworkOutcome:
    """A network plan by names. It must not be carried out if it has ``violations``."""

    levels: int
    decisions: tuple[NetworkDecision, ...]  # of all jobs that run
    violations: tuple[Violation, ...] = ()
    notes: tuple[str, ...] = field(default=())
    """Remarks on the whole network, e.g. that its switches choose paths themselves."""


@dataclass(frozen=True, slots=True, kw_only=True)
class NetworkPlanRecord:
    """A network plan as stored."""

    number: int
    planned_s: float  # since 1970
    cause: str  # round, start, end, topology, measured
    round: int  # the last round before it, or the round that made it
    levels: int
    changed: int  # jobs whose level, rank or routes differ from before
    seconds: float  # duration of planning
    decisions: tuple[NetworkDecision, ...] = ()  # those in force; empty if only plans are listed
    notes: tuple[str, ...] = ()
