"""First come, first served with EASY backfilling: one reservation, for the first blocked job."""

from __future__ import annotations

from typing import Final

from tessera.formulation.base.tables import Ints
from tessera.solvers.schedulers.backfilling import plan_starts
from tessera.solvers.schedulers.base import SchedulerView

_MAX_RESERVATIONS: Final = 1
"""EASY reserves GPUs for the head of the queue only."""


class Easy:
    """EASY backfilling (Lifka 1995; Mu'alem and Feitelson 2001, section 2).

    Jobs are rigid and run to completion. They start in the order of arrival while they fit. The
    first that does not fit is the head. GPUs are reserved for it from its shadow time on, when
    running jobs are expected to have left enough. A later job starts if it ends before that time,
    or uses only GPUs that are spare then.

    The papers have identical processors and the users' estimates of run times. Here a job ends when
    the rest of its start is over and its work is done at its rate. There is one head for all GPU
    types. If it takes any type, its reservation is on the type with the earliest shadow time, and
    other types are free to later jobs. A later job that takes any type gets the fastest on which
    the rule lets it start. A job that would not fit on an empty cluster is never the head. GPUs are
    counted by type: on which nodes they are is left to placement.

    A choice does not last until the next event, since expected ends shift if a job is slower than
    its estimate.
    """

    name = "easy"

    def choose(self, view: SchedulerView) -> Ints:
        """Return the column of each job, int64[jobs]; -1 means that it waits."""
        return plan_starts(view, _MAX_RESERVATIONS).choice
