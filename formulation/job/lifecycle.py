"""The life of a job as one table. No other module knows which event leads to which state.

The table is the documentation. The database's CHECK constraint and its transition trigger are
generated from it (``docs/internals/database.md``), so code and database cannot disagree.
"""

from __future__ import annotations

from enum import StrEnum
from typing import Final

from tessera.formulation.base.errors import NotAllowed


class JobState(StrEnum):
    """The state of a job."""

    QUEUED = "queued"  # waits for GPUs
    HELD = "held"  # waits for its user
    STARTING = "starting"  # GPUs are reserved or held; the gang has not reported yet
    RUNNING = "running"  # the gang reports progress
    STOPPING = "stopping"  # loses its GPUs, then queues again
    HOLDING = "holding"  # loses its GPUs, then is held
    CANCELLING = "cancelling"  # loses its GPUs, then is cancelled
    FAILING = "failing"  # loses its GPUs, then has failed
    SUCCEEDED = "succeeded"
    FAILED = "failed"
    CANCELLED = "cancelled"
    REJECTED = "rejected"  # can never run; the reason says why


class JobEvent(StrEnum):
    """An event that can happen to a job."""

    HOLD = "hold"
    RELEASE = "release"
    START = "start"
    MOVE = "move"
    RAN = "ran"
    SUSPEND = "suspend"
    GONE = "gone"  # every agent has reported that the gang is gone
    LOST = "lost"  # a node that ran part of it is gone
    CANCEL = "cancel"
    FINISH = "finish"
    CRASH = "crash"  # exited with an error, a retry is left
    FAIL = "fail"  # exited with an error, no retry is left
    TIME_OUT = "time_out"  # has run for its longest run time
    REJECT = "reject"


_S, _E = JobState, JobEvent

TRANSITIONS: Final[dict[tuple[JobState, JobEvent], JobState]] = {
    (_S.QUEUED, _E.START): _S.STARTING,
    (_S.QUEUED, _E.HOLD): _S.HELD,
    (_S.QUEUED, _E.CANCEL): _S.CANCELLED,
    (_S.QUEUED, _E.REJECT): _S.REJECTED,
    (_S.QUEUED, _E.TIME_OUT): _S.FAILED,
    (_S.HELD, _E.RELEASE): _S.QUEUED,
    (_S.HELD, _E.CANCEL): _S.CANCELLED,
    (_S.HELD, _E.REJECT): _S.REJECTED,
    (_S.STARTING, _E.RAN): _S.RUNNING,
    (_S.STARTING, _E.MOVE): _S.STARTING,
    (_S.STARTING, _E.SUSPEND): _S.STOPPING,
    (_S.STARTING, _E.HOLD): _S.HOLDING,
    (_S.STARTING, _E.CANCEL): _S.CANCELLING,
    (_S.STARTING, _E.FINISH): _S.SUCCEEDED,
    (_S.STARTING, _E.CRASH): _S.STOPPING,
    (_S.STARTING, _E.FAIL): _S.FAILING,
    (_S.STARTING, _E.TIME_OUT): _S.FAILING,
    (_S.STARTING, _E.LOST): _S.STOPPING,
    (_S.RUNNING, _E.MOVE): _S.STARTING,
    (_S.RUNNING, _E.SUSPEND): _S.STOPPING,
    (_S.RUNNING, _E.HOLD): _S.HOLDING,
    (_S.RUNNING, _E.CANCEL): _S.CANCELLING,
    (_S.RUNNING, _E.FINISH): _S.SUCCEEDED,
    (_S.RUNNING, _E.CRASH): _S.STOPPING,
    (_S.RUNNING, _E.FAIL): _S.FAILING,
    (_S.RUNNING, _E.TIME_OUT): _S.FAILING,
    (_S.RUNNING, _E.LOST): _S.STOPPING,
    (_S.STOPPING, _E.GONE): _S.QUEUED,
    (_S.STOPPING, _E.START): _S.STARTING,
    (_S.STOPPING, _E.HOLD): _S.HOLDING,
    (_S.STOPPING, _E.CANCEL): _S.CANCELLING,
    (_S.STOPPING, _E.FINISH): _S.SUCCEEDED,
    (_S.STOPPING, _E.TIME_OUT): _S.FAILING,
    (_S.HOLDING, _E.GONE): _S.HELD,
    (_S.HOLDING, _E.RELEASE): _S.STOPPING,
    (_S.HOLDING, _E.CANCEL): _S.CANCELLING,
    (_S.HOLDING, _E.FINISH): _S.SUCCEEDED,
    (_S.CANCELLING, _E.GONE): _S.CANCELLED,
    (_S.CANCELLING, _E.FINISH): _S.SUCCEEDED,
    (_S.FAILING, _E.GONE): _S.FAILED,
}
"""(state, event) -> next state. A pair that is absent is not allowed."""

TIMES_OUT: Final = frozenset(s for s, event in TRANSITIONS if event is _E.TIME_OUT)
"""States in which a job ends once it has run for its longest run time."""

TERMINAL: Final = frozenset({_S.SUCCEEDED, _S.FAILED, _S.CANCELLED, _S.REJECTED})
"""States that no event leaves."""

SCHEDULABLE: Final = frozenset({_S.QUEUED, _S.STARTING, _S.RUNNING, _S.STOPPING})
"""States in which a round may give the job GPUs."""

ACTIVE: Final = frozenset({_S.STARTING, _S.RUNNING})
"""States in which the job has its own GPUs, reserved or held."""

WAITING: Final = SCHEDULABLE - ACTIVE
"""States in which the job waits for GPUs that a round may give it."""

LEAVING: Final = frozenset({_S.STOPPING, _S.HOLDING, _S.CANCELLING, _S.FAILING})
"""States in which the job may still hold GPUs that it has to give back."""


def is_allowed(state: JobState, event: JobEvent) -> bool:
    """Return whether ``event`` may happen to a job in ``state``."""
    return (state, event) in TRANSITIONS


def advance_state(state: JobState, event: JobEvent) -> JobState:
    """Return the state after ``event``.

    Raises:
        NotAllowed: the table has no such transition.
    """
    try:
        return TRANSITIONS[state, event]
    except KeyError:
        raise NotAllowed(f"a job that is {state} cannot {event}") from None


def next_states() -> dict[JobState, frozenset[JobState]]:
    """Return, for each state, the other states one event away. The database enforces this."""
    following: dict[JobState, set[JobState]] = {state: set() for state in JobState}
    for (before, _), after in TRANSITIONS.items():
        if after is not before:
            following[before].add(after)
    return {state: frozenset(after) for state, after in following.items()}
