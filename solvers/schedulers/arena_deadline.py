"""Arena's scheduler with deadlines (Arena section 3.5, Eq. 6; first Crius-DDL, section 8.5)."""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np

from tessera.formulation.base.tables import Bools, Ints
from tessera.formulation.round.promises.deadlines import finishes_in_time
from tessera.solvers.schedulers.arena import Arena
from tessera.solvers.schedulers.base import SchedulerView


@dataclass(frozen=True, slots=True, kw_only=True)
class ArenaDeadline(Arena):
    """``Arena`` on the Cells that end a job by its deadline, a restart included (Eq. 6).

    So a job is launched only if the launch meets its deadline. It is later scaled or moved only to
    Cells that still meet it. A waiting job that no Cell can end in time is dropped early. The
    papers do not say what happens to a running job that can no longer end in time because nodes
    were lost. Here it continues as if it had no deadline. Opportunistic jobs may be suspended and
    then miss their deadlines, as in Algorithm 1.
    """

    name: str = "arena-deadline"

    def choose(self, seen: SchedulerView) -> Ints:
        """Return the column of each job, int64[jobs]; -1 means that it waits."""
        keep = _serves(seen)
        choice = Arena.choose(self, _only(seen, keep))
        return _renamed(np.flatnonzero(keep), choice)

    def gives_way(self, seen: SchedulerView, choice: Ints) -> Bools:
        """Return which jobs ``choice`` starts past one that could still end in time, bool[jobs]."""
        return Arena.gives_way(self, _only(seen, _serves(seen)), choice)


def _serves(seen: SchedulerView) -> Bools:
    """Return the columns that end in time, bool[columns].

    If a running job has no such column, all its columns are included.
    """
    draft = seen.draft
    ends_in_time = finishes_in_time(draft)
    served = np.zeros(len(draft.current), dtype=np.bool_)
    served[draft.job[ends_in_time]] = True
    lapsed = ~served & (draft.current >= 0)
    kept: Bools = ends_in_time | lapsed[draft.job]
    return kept


def _only(seen: SchedulerView, keep: Bools) -> SchedulerView:
    return replace(seen, draft=seen.draft.only(keep))


def _renamed(kept: Ints, choice: Ints) -> Ints:
    if not len(kept):
        return choice
    return np.where(choice >= 0, kept[choice], -1)
