"""The reason why a job does not run, or is replanned: a code, a sentence, a next step, evidence.

Programs may act on the codes. Evidence is flat, so that it can travel as strings. Texts are rendered
when they are sent, since a caller may not read the names of all tenants.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum
from typing import Final

from tessera.formulation.base.moments import format_rfc3339
from tessera.formulation.base.texts import Text
from tessera.formulation.job.lifecycle import JobState

RESTART_GPU_S_KEY: Final = "restart GPU-s"
LOST_SAMPLES_KEY: Final = "lost samples"
"""Keys of a replan's evidence: GPU-seconds that its restart takes, and samples trained again."""


class ReasonCode(StrEnum):
    """The code of the main reason. The first that applies is used."""

    HELD = "HELD"
    LEAVING = "LEAVING"
    WAITS_FOR_JOBS = "WAITS_FOR_JOBS"  # jobs that must end before it have not ended yet
    DEPENDENCY_BROKEN = "DEPENDENCY_BROKEN"  # one of them did not end as it must; never starts
    ESTIMATING = "ESTIMATING"  # its estimates are still to be computed
    NO_ESTIMATE = "NO_ESTIMATE"  # there is none, and it states no GPU type to run on without one
    NO_RUNNABLE_PLAN = "NO_RUNNABLE_PLAN"  # its runtime can run the plan of no estimate
    NO_FEASIBLE_CELL = "NO_FEASIBLE_CELL"
    FITS_NOWHERE = "FITS_NOWHERE"
    NODES_AWAY = "NODES_AWAY"
    # A rule of the round leaves the job no column.
    BACK_OFF = "BACK_OFF"  # it failed, and is tried again later
    ARRAY_LIMIT = "ARRAY_LIMIT"  # as many members of its array run as may run at the same time
    PLAN_UNUSABLE = "PLAN_UNUSABLE"  # the execution plan that its user states runs nowhere
    RUNTIME_MISSING = "RUNTIME_MISSING"  # too few nodes offer its runtime
    PINS_CONTRADICT = "PINS_CONTRADICT"  # its GPU types, selector and avoided nodes leave no GPUs
    GUARANTEE_UNMET = "GUARANTEE_UNMET"  # no Cell is as fast as the request
    DEADLINE_PAST = "DEADLINE_PAST"
    DEADLINE_UNREACHABLE = "DEADLINE_UNREACHABLE"  # its best Cell would finish too late
    DEADLINE_REFUSED = "DEADLINE_REFUSED"  # meeting it would break earlier promises
    DEADLINE_PLANNED = "DEADLINE_PLANNED"  # promised; its schedule starts it later
    MISSING_DATA = "MISSING_DATA"  # the objective needs unknown data
    RESERVED = "RESERVED"  # the GPUs are for planned starts of other jobs
    HELD_FOR_RESERVATION = "HELD_FOR_RESERVATION"  # a reservation keeps the GPUs for others
    QUOTA_SPENT = "QUOTA_SPENT"
    NO_WEIGHT = "NO_WEIGHT"
    # The job had columns but was not chosen.
    FRAGMENTED = "FRAGMENTED"
    NODES_TAKEN = "NODES_TAKEN"  # others are on the nodes that its selector matches
    PROMISE_GIVEN_UP = "PROMISE_GIVEN_UP"
    OUTPRICED = "OUTPRICED"
    NO_CAPACITY = "NO_CAPACITY"
    NOT_WORTH_RESTART = "NOT_WORTH_RESTART"
    NOT_CHOSEN = "NOT_CHOSEN"  # by the published scheduler that decided
    BUDGET_SPENT = "BUDGET_SPENT"
    # The job runs, and its round says why it changed.
    REPLANNED = "REPLANNED"  # it goes on by another execution plan on the GPUs that it has
    # The job runs. Only an explanation has these codes; a round gives none of them.
    STARTED = "STARTED"
    UNCHANGED = "UNCHANGED"
    GAINED = "GAINED"  # its new Cell is worth more
    GAVE_WAY = "GAVE_WAY"  # it gave up GPUs, or a faster Cell, for other jobs
    NODE_LEFT = "NODE_LEFT"  # a node that it ran on is drained, silent or avoided
    MADE_ROOM = "MADE_ROOM"  # it was moved to other GPUs of the same Cell
    CELL_EXCLUDED = "CELL_EXCLUDED"  # a promise, a pin or a bound excludes the Cell that it ran on


class Cause(StrEnum):
    """The coarse cause that codes belong to, in words for histories."""

    HELD = "held"
    ESTIMATES = "estimates missing"
    NODES = "nodes"
    CAPACITY = "capacity"
    FRAGMENTATION = "fragmentation"
    QUOTA = "quota"
    PIN = "pin"
    PLAN = "execution plan"
    GUARANTEE = "guarantee"
    DEADLINE = "deadline"
    BACK_OFF = "back-off"
    QUEUE = "queue"
    DEPENDENCY = "dependency"
    ARRAY = "array limit"
    RESERVATION = "reservation"
    RESTART = "restart cost"
    WEIGHT = "no weight"
    SCHEDULER = "scheduler"
    TIME = "time of the round"
    NONE = ""  # it runs


CAUSES: Final[dict[ReasonCode, Cause]] = {
    ReasonCode.HELD: Cause.HELD,
    ReasonCode.LEAVING: Cause.HELD,
    ReasonCode.WAITS_FOR_JOBS: Cause.DEPENDENCY,
    ReasonCode.DEPENDENCY_BROKEN: Cause.DEPENDENCY,
    ReasonCode.ESTIMATING: Cause.ESTIMATES,
    ReasonCode.NO_ESTIMATE: Cause.ESTIMATES,
    ReasonCode.NO_RUNNABLE_PLAN: Cause.PLAN,
    ReasonCode.NO_FEASIBLE_CELL: Cause.ESTIMATES,
    ReasonCode.FITS_NOWHERE: Cause.NODES,
    ReasonCode.NODES_AWAY: Cause.NODES,
    ReasonCode.BACK_OFF: Cause.BACK_OFF,
    ReasonCode.ARRAY_LIMIT: Cause.ARRAY,
    ReasonCode.PLAN_UNUSABLE: Cause.PLAN,
    ReasonCode.RUNTIME_MISSING: Cause.NODES,
    ReasonCode.PINS_CONTRADICT: Cause.PIN,
    ReasonCode.GUARANTEE_UNMET: Cause.GUARANTEE,
    ReasonCode.DEADLINE_PAST: Cause.DEADLINE,
    ReasonCode.DEADLINE_UNREACHABLE: Cause.DEADLINE,
    ReasonCode.DEADLINE_REFUSED: Cause.DEADLINE,
    ReasonCode.DEADLINE_PLANNED: Cause.DEADLINE,
    ReasonCode.MISSING_DATA: Cause.ESTIMATES,
    ReasonCode.RESERVED: Cause.QUEUE,
    ReasonCode.HELD_FOR_RESERVATION: Cause.RESERVATION,
    ReasonCode.QUOTA_SPENT: Cause.QUOTA,
    ReasonCode.NO_WEIGHT: Cause.WEIGHT,
    ReasonCode.FRAGMENTED: Cause.FRAGMENTATION,
    ReasonCode.NODES_TAKEN: Cause.NODES,
    ReasonCode.PROMISE_GIVEN_UP: Cause.GUARANTEE,
    ReasonCode.OUTPRICED: Cause.CAPACITY,
    ReasonCode.NO_CAPACITY: Cause.CAPACITY,
    ReasonCode.NOT_WORTH_RESTART: Cause.RESTART,
    ReasonCode.NOT_CHOSEN: Cause.SCHEDULER,
    ReasonCode.BUDGET_SPENT: Cause.TIME,
    ReasonCode.REPLANNED: Cause.NONE,
    ReasonCode.STARTED: Cause.NONE,
    ReasonCode.UNCHANGED: Cause.NONE,
    ReasonCode.GAINED: Cause.NONE,
    ReasonCode.GAVE_WAY: Cause.CAPACITY,
    ReasonCode.NODE_LEFT: Cause.NODES,
    ReasonCode.MADE_ROOM: Cause.FRAGMENTATION,
    ReasonCode.CELL_EXCLUDED: Cause.PIN,
}
"""The cause of each code."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Reason:
    """The reason why a job does not run, or why it is replanned."""

    code: ReasonCode
    message: Text
    next_step: Text
    evidence: tuple[tuple[Text, Text], ...] = ()


def held_reason(state: JobState, name: str, since_s: float | None = None) -> Reason:
    """Return the reason for a job that a user holds.

    ``since_s`` is the start of the hold in seconds since 1970, or None if it is not known.
    """
    since = "" if since_s is None else format_rfc3339(since_s)
    leaves = "; its GPUs are being given back" if state is JobState.HOLDING else ""
    return Reason(
        code=ReasonCode.HELD,
        message=f"a user {f'has held the job since {since}' if since else 'holds the job'}{leaves}",
        next_step=f"release the job: `tessera release {name}`",
        evidence=(("since", since),) if since else (),
    )


def leaving_reason(state: JobState) -> Reason:
    """Return the reason for a job whose GPUs are being given back."""
    return Reason(
        code=ReasonCode.LEAVING,
        message=f"the job is {state}; its GPUs are being given back",
        next_step="wait until the agents report that the job is gone",
    )
