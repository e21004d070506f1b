"""First come, first served with conservative backfilling: a reservation for each waiting job."""

from __future__ import annotations

from tessera.formulation.base.tables import Floats, Ints
from tessera.solvers.schedulers.backfilling import plan_starts
from tessera.solvers.schedulers.base import SchedulerView


class Conservative:
    """Conservative backfilling (Mu'alem and Feitelson 2001, section 2).

    Jobs are rigid and run to completion. Each waiting job, in the order of arrival, gets the
    earliest start that delays no earlier job, in a profile of the GPUs that are free over time. A
    job whose start is now starts.

    The paper keeps reservations, and only moves them forward when a job ends early. Here all starts
    are planned again in each round. If jobs end as expected, they are the same. Rates, types and
    nodes are treated as by ``Easy``. A job that takes any type gets the type with the earliest
    start, among equals the fastest.

    A choice does not last until the next event, since expected ends shift if a job is slower than
    its estimate.
    """

    name = "conservative"

    def choose(self, view: SchedulerView) -> Ints:
        """Return the column of each job, int64[jobs]; -1 means that it waits."""
        return plan_starts(view).choice


def planned_starts(view: SchedulerView) -> Floats:
    """Return the planned start of each waiting job, float64[jobs], in seconds since 1970.

    It is NaN for a job that runs already, and inf for one that could not start even if all others
    had ended. A job starts in the first round from then on.
    """
    return plan_starts(view).start_s
