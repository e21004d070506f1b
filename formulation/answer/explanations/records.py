"""The explanation of a job in a round: its reason, who displaced it, and steps that were tried."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum

from tessera.formulation.answer.decisions import DecisionKind
from tessera.formulation.answer.explanations.changes import Actor, Change
from tessera.formulation.base.texts import Name, Text
from tessera.formulation.job.reasons import Reason, ReasonCode


class Claim(StrEnum):
    """The effect of a step on the job, which a round on the changed snapshot shows."""

    RUNS = "RUNS"  # the job runs
    KEEPS_RATE = "KEEPS_RATE"  # it runs at least as fast as before the round
    STAYS = "STAYS"  # it keeps its Cell and its GPUs
    OTHER_REASON = "OTHER_REASON"  # it still does not run, but for the reason ``then``


class DisplacedBy(StrEnum):
    """The rule by which another job has the GPUs that the job would have had."""

    VALUE = "VALUE"  # they are worth more there
    GUARANTEE = "GUARANTEE"  # that job is guaranteed
    DEADLINE = "DEADLINE"  # that job's deadline is promised
    LIMIT = "LIMIT"  # that job keeps its request, or may not change yet
    PLAN = "PLAN"  # that job has waited for its planned start
    SCHEDULER = "SCHEDULER"  # a published scheduler chose so


@dataclass(frozen=True, slots=True, kw_only=True)
class Displacement:
    """A job that has GPUs which the explained job had, or would have with the first step.

    ``gpus`` of ``gpu_type`` are what that job holds after the round. ``taken`` is the number of
    them that the explained job held before; it is 0 if the job held none of them.
    ``value_per_gpu`` is in units of the round's goal. It is NaN if the goals have no common unit.
    """

    job: Name
    gpu_type: str
    gpus: int
    by: DisplacedBy
    taken: int = 0
    value_per_gpu: float = float("nan")


@dataclass(frozen=True, slots=True, kw_only=True)
class Effect:
    """The effect of a step on a job that would stop or run more slowly.

    ``cell`` is what it would run on, e.g. ``2 x a100``. It is "" if the job would wait.
    """

    job: Name
    kind: DecisionKind
    cell: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Step:
    """A step that would help, which was tried: a round on the changed snapshot has shown it.

    ``then`` is the reason code that the job would have, if the claim is ``OTHER_REASON``.
    """

    changes: tuple[Change, ...]
    claim: Claim
    message: Text
    then: ReasonCode | None = None
    effects: tuple[Effect, ...] = ()

    @property
    def actor(self) -> Actor:
        """Return who can make the step."""
        return self.changes[0].actor


@dataclass(frozen=True, slots=True, kw_only=True)
class Explanation:
    """The explanation of a round's decision on a job.

    ``steps`` have been tried, the best first. The list is empty if nothing would help, or if the job
    needs no help. ``is_complete`` is false if time was too short to try everything. ``unit`` is that of
    ``value_per_gpu``, which is the job's best offer, as in ``Displacement``.
    """

    kind: DecisionKind
    reason: Reason
    displaced_by: tuple[Displacement, ...] = ()
    steps: tuple[Step, ...] = ()
    value_per_gpu: float = float("nan")
    unit: str = ""
    is_complete: bool = True
    rounds_tried: int = 0
