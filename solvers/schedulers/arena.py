"""Arena's scheduler (section 3.5), first published as Crius (section 6.1, Algorithm 1)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, Final, Literal, get_args

import numpy as np

from tessera.formulation.base.tables import Bools, Floats, Ints
from tessera.formulation.round.objectives.throughput import throughput_values
from tessera.formulation.round.promises.launched import is_launched
from tessera.solvers.schedulers.base import SchedulerView
from tessera.solvers.schedulers.packing import options_of
from tessera.solvers.schedulers.parameters import ParameterRule
from tessera.solvers.schedulers.scaling import ScalingSearch
from tessera.solvers.schedulers.slots import Slots, jobs_in_order, slots_of

Performance = Literal["priced", "normalised", "samples"]
PERFORMANCES: Final[tuple[Performance, ...]] = get_args(Performance)


@dataclass(frozen=True, slots=True, kw_only=True)
class Arena:
    """A scheduler that launches jobs one by one, scales others down for each, and then scales up.

    A round handles departures and arrivals together. (1) Waiting jobs are taken by queue, then
    arrival (Arena section 3.5). Each gets the type and count that it requested if they are free.
    Otherwise it gets its best Cell of half, the same or twice that count (Crius section 6.1) that
    fits. Otherwise running or newly placed jobs are scaled down for it in up to ``depth`` steps
    (``tessera.solvers.schedulers.scaling``), and the best of all such sets of steps is taken.
    Launched jobs run to completion: none is scaled to a count at which it has no Cell, and none is
    suspended unless it was started opportunistically. (2) Then, for at most ``max_upgrades`` steps,
    the single scaling of largest gain is taken: twice the GPUs, or another type at the same count.

    Opportunism (Crius section 6.1): a job that cannot be launched waits, and later jobs are
    launched past it. Of those, jobs of the same queue may scale others down as well, but jobs of
    lower queues use only what is idle (Arena section 3.5). Once the least that the blocked job
    needs is there, the jobs started past it are suspended, latest first (``Jobs.opportunistic``;
    ``gives_way`` returns the jobs to mark).

    The papers leave some points open. These choices were made:

    * "Performance" is the value in the round's own problem, restart cost included (``priced``), so
      that solutions can be compared. ``normalised`` leaves the restart cost out; ``samples`` adds
      raw samples/s (Arena Eq. 5).
    * A launch need not raise the total; if some set of steps makes it possible, the job is
      launched.
    * Steps scale to any count that has a Cell, not only to half and twice the request. Crius
      initializes three counts per job, and Arena states no limit. A job with no Cell at the three
      may be launched at any count.
    * The count to launch at may itself be halved below them; each halving is one of the steps.
    * For a blocked job, jobs started past it are suspended before others are scaled down.
    * ``max_upgrades`` is the artifact's 10; the papers give no number.
    * Pending jobs do not stop the scaling up. Crius's text says that they do, but its Algorithm 1
      and Arena's do not. GPUs that are given now can be taken back by later steps.
    * Migration against fragmentation is left to placement.

    The ablations are as follows. Without ``elasticity``, jobs are launched at the requested count
    and keep the count that they have; without ``heterogeneity``, the same holds for the type.
    Without ``opportunism``, nothing is launched past a blocked job, and nothing is suspended.
    """

    name: str = "arena"
    depth: Annotated[
        int,
        ParameterRule(
            kind="whole",
            low=0,
            high=16,
            meaning="Largest number of steps that scale jobs down for a launch. 0: none is scaled down.",
            source="Arena, section 3.5; the default is the artifact's",
        ),
    ] = 3
    breadth: Annotated[
        int,
        ParameterRule(
            kind="whole",
            low=1,
            high=256,
            meaning="Number of partial results that the search keeps at each depth.",
            source="ours; the papers do not limit it",
        ),
    ] = 16
    max_upgrades: Annotated[
        int,
        ParameterRule(
            kind="whole",
            low=0,
            high=10_000,
            meaning="Largest number of steps in a round that scale jobs up. 0: none is scaled up.",
            source="the artifact's MAX_UPGRADE_STEP_NUM; the papers give no number",
        ),
    ] = 10
    performance: Annotated[
        Performance,
        ParameterRule(
            kind="word",
            words=PERFORMANCES,
            meaning="Value of a Cell: normalised throughput less restarts, without them, or samples/s.",
            source="Arena, Eq. 5 (samples); the others are ours",
        ),
    ] = "priced"
    elasticity: bool = True
    heterogeneity: bool = True
    opportunism: bool = True

    def choose(self, seen: SchedulerView) -> Ints:
        """Return the column of each job, int64[jobs]; -1 means that it waits."""
        draft, jobs = seen.draft, seen.draft.snapshot.jobs
        slots = slots_of(options_of(seen), self._value_of(seen), len(draft.snapshot.gpu_types))
        state = ScalingSearch(
            slots,
            seen.capacity,
            depth=self.depth,
            breadth=self.breadth,
            resize=self.elasticity,
            retype=self.heterogeneity,
        )
        state.keep_running()
        priority, order = jobs.priority, jobs_in_order(seen)
        rank = np.empty(len(order), dtype=np.int64)
        rank[order] = np.arange(len(order))
        past = is_launched(draft.snapshot) & jobs.opportunistic & self.opportunism
        blocked_priority = np.inf
        for job in order.tolist():
            seen.check()
            if state.at[job] >= 0 or not draft.has_columns[job]:
                continue
            requested, halvings = self._launch_slots(
                slots, job, int(jobs.requested_gpus[job]), int(jobs.requested_gpu_type[job])
            )
            if np.all(halvings < 0):
                continue  # no event that it waits for would let it run
            if state.place_best(job, requested) or state.place_best(job, halvings == 0):
                continue
            later = np.flatnonzero(past & (rank > rank[job]))
            if priority[job] <= blocked_priority and (
                state.suspend_for(job, halvings == 0, later[np.argsort(-jobs.since_s[later])])
                or state.scale_down_for(job, halvings)
            ):
                continue
            if not self.opportunism:
                break
            blocked_priority = min(blocked_priority, priority[job])
        for _ in range(self.max_upgrades):
            seen.check()
            if not state.scale_up():
                break
        return _columns(slots, state.at)

    def gives_way(self, seen: SchedulerView, choice: Ints) -> Bools:
        """Return which jobs ``choice`` starts past one that waits, bool[jobs]."""
        order, waits = jobs_in_order(seen), (choice < 0) & seen.draft.has_columns
        past = np.zeros(len(order), dtype=np.bool_)
        past[order] = np.cumsum(waits[order]) > 0
        return past & (choice >= 0) & ~is_launched(seen.draft.snapshot) & self.opportunism

    def _launch_slots(
        self, slots: Slots, job: int, count: int, gpu_type: int
    ) -> tuple[Bools, Ints]:
        """Return the slots as requested, bool[slots], and the halvings to each slot, int64[slots].

        Halvings are counted from the lowest of the three counts. They are -1 if the job may not be
        launched there.
        """
        gpus, has = slots.gpus, slots.column[job] >= 0
        on_type = (slots.gpu_type == gpu_type) | (gpu_type < 0)
        if not self.heterogeneity:
            has &= on_type
        requested = has & on_type & (gpus == count)
        if not self.elasticity:
            return requested, np.where(has & (gpus == count), 0, -1)
        three = has & ((2 * gpus == count) | (gpus == count) | (gpus == 2 * count))
        if not three.any():
            return requested, np.where(has, 0, -1)
        below = np.log2(count / (2.0 * gpus))
        halvings = np.where(has & (below >= 1) & (below == np.floor(below)), below, -1)
        return requested, np.where(three, 0, halvings).astype(np.int64)

    def _value_of(self, seen: SchedulerView) -> Floats:
        draft = seen.draft
        if self.performance == "samples":
            return draft.rate
        valued = throughput_values(draft)
        return valued.gross - valued.price if self.performance == "priced" else valued.gross


def _columns(slots: Slots, at: Ints) -> Ints:
    if not slots.column.size:
        return np.full(len(at), -1, dtype=np.int64)
    column = np.take_along_axis(slots.column, np.maximum(at, 0)[:, None], axis=1)[:, 0]
    return np.where(at >= 0, column, -1)
