"""Arena's scaling of jobs in number and type of GPUs, and the search for jobs to scale down."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field

import numpy as np

from tessera.formulation.base.tables import Bools, Floats, Ints
from tessera.solvers.schedulers.slots import Slots

_LEAST_GAIN = 1e-9
"""The least gain of a scaling up."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ScalingStep:
    """A single scaling: ``job`` goes to slot ``to``, which loses ``loss`` of the objective."""

    job: int
    to: int
    loss: float


@dataclass(frozen=True, slots=True, kw_only=True)
class PartialScaling:
    """Scalings that free GPUs of one type: the free GPUs after them, by type, and their loss."""

    free: tuple[int, ...]
    loss: float = 0.0
    moved: dict[int, int] = field(default_factory=dict)  # job -> slot
    steps: int = 0


class ScalingSearch:
    """The slot of each job, and the loss or gain of scaling it in one step.

    The search frees GPUs of one type t. A step halves a job on t, or moves it to an equal number of
    idle GPUs of another type. Jobs on one slot free the same number of GPUs by the same steps, so
    only those that lose least are tried. Of partial results with equally many free GPUs of t, the
    one that loses least is kept; of each depth, the ``breadth`` that lose least per GPU freed are
    kept. Steps on other types that only make room for a move are not tried.

    (The artifact keeps only each type's best step, expands results of earlier depths again, and
    counts a moved job's gain twice. None of this is copied.)
    """

    def __init__(
        self, slots: Slots, capacity: Ints, *, depth: int, breadth: int, resize: bool, retype: bool
    ) -> None:
        self.slots = slots
        self.at: Ints = np.full(len(slots.current), -1, dtype=np.int64)
        self._free: list[int] = capacity.tolist()
        self._depth, self._breadth = depth, breadth
        self._resize, self._retype = resize, retype
        self._gpus: list[int] = slots.gpus.tolist()
        self._type: list[int] = slots.gpu_type.tolist()
        self._half: list[int] = slots.half.tolist()
        self._partials: dict[int, list[PartialScaling]] = {}  # by type, of the present state
        self._groups: dict[
            int, list[list[ScalingStep]]
        ] = {}  # by slot, of the jobs that are on it now

    def keep_running(self) -> None:
        """Let jobs keep their slots, in their order if lost nodes leave too little room."""
        for job in np.flatnonzero(self.slots.current >= 0).tolist():
            slot = int(self.slots.current[job])
            if self._gpus[slot] <= self._free[self._type[slot]]:
                self._put(job, slot)

    def _put(self, job: int, slot: int) -> None:
        has = int(self.at[job])
        if has >= 0:
            self._free[self._type[has]] += self._gpus[has]
        if slot >= 0:
            self._free[self._type[slot]] -= self._gpus[slot]
        self.at[job] = slot
        self._partials.clear()
        self._groups.pop(has, None)
        self._groups.pop(slot, None)

    def place_best(self, job: int, allowed: Bools) -> bool:
        """Give ``job`` its best fitting slot of ``allowed`` (bool[slots]).

        Return whether any fits.
        """
        free = np.array(self._free, dtype=np.int64)[self.slots.gpu_type]
        fits = np.flatnonzero(allowed & (self.slots.gpus <= free))
        if not len(fits):
            return False
        self._put(job, int(fits[np.argmax(self.slots.worth[job, fits])]))
        return True

    def suspend_for(self, job: int, allowed: Bools, others: Ints) -> bool:
        """Place ``job`` by suspending as many of ``others`` as its least need takes.

        They are suspended in their order. The type is the one that leaves the largest total. Return
        whether there was one.
        """
        best: tuple[float, int, Ints] | None = None
        for gpu_type in range(self.slots.types):
            own = allowed & (self.slots.gpu_type == gpu_type)
            if not own.any():
                continue
            here = others[self.at[others] >= 0]
            here = here[self.slots.gpu_type[self.at[here]] == gpu_type]
            gained = np.cumsum(self.slots.gpus[self.at[here]]) + self._free[gpu_type]
            least = int(self.slots.gpus[own].min())
            enough = np.flatnonzero(gained >= least)
            if not len(enough):
                continue
            away = here[: int(enough[0]) + 1]
            lost = float(self.slots.worth[away, self.at[away]].sum())
            fits = np.flatnonzero(own & (self.slots.gpus <= gained[enough[0]]))
            slot = int(fits[np.argmax(self.slots.worth[job, fits])])
            total = float(self.slots.worth[job, slot]) - lost
            if best is None or total > best[0]:
                best = (total, slot, away)
        if best is None:
            return False
        for other in best[2].tolist():
            self._put(other, -1)
        self._put(job, best[1])
        return True

    def scale_down_for(self, job: int, halvings: Ints) -> bool:
        """Place ``job`` by the scalings of at most ``depth`` steps with the largest total, if any.

        ``halvings`` (int64[slots]) is the number of its own steps to a slot, or -1 if it is not
        allowed. Return whether it was placed.
        """
        best: tuple[float, int, PartialScaling] | None = None
        for slot in np.flatnonzero((halvings >= 0) & (halvings <= self._depth)).tolist():
            gpu_type, need = self._type[slot], self._gpus[slot]
            steps = self._depth - int(halvings[slot])
            for plan in self._plans(gpu_type):
                if plan.steps > steps or plan.free[gpu_type] < need:
                    continue
                total = float(self.slots.worth[job, slot]) - plan.loss
                if best is None or total > best[0]:
                    best = (total, slot, plan)
        if best is None:
            return False
        for other in best[2].moved:
            self._put(other, -1)
        for other, to in best[2].moved.items():
            self._put(other, to)
        self._put(job, best[1])
        return True

    def _plans(self, gpu_type: int) -> list[PartialScaling]:
        """Return the partial results that free GPUs of ``gpu_type``.

        The result without steps is first.
        """
        partials = self._partials.get(gpu_type)
        if partials is None:
            partials = self._partials[gpu_type] = self._search(gpu_type)
        return partials

    def _search(self, gpu_type: int) -> list[PartialScaling]:
        groups, enough = self._cheapest(gpu_type), int(self.slots.gpus.max())
        level = [PartialScaling(free=tuple(self._free))]
        base, partials = self._free[gpu_type], list(level)
        for _ in range(self._depth):
            # Find the best partial result for each number of GPUs of the type that are then free.
            best: dict[int, tuple[float, PartialScaling, ScalingStep]] = {}
            for plan in (p for p in level if p.free[gpu_type] < enough):
                for step in self._steps(plan, gpu_type, groups):
                    has = plan.moved.get(step.job, int(self.at[step.job]))
                    kept = self._gpus[step.to] if self._type[step.to] == gpu_type else 0
                    free = plan.free[gpu_type] + self._gpus[has] - kept
                    loss = plan.loss + step.loss
                    if free not in best or loss < best[free][0]:
                        best[free] = (loss, plan, step)
            cheapest = sorted(best, key=lambda free: best[free][0] / (free - base))[: self._breadth]
            level = [self._after(*best[free][1:]) for free in cheapest]
            partials += level
        return partials

    def _after(self, plan: PartialScaling, step: ScalingStep) -> PartialScaling:
        free, has = list(plan.free), plan.moved.get(step.job, int(self.at[step.job]))
        free[self._type[has]] += self._gpus[has]
        free[self._type[step.to]] -= self._gpus[step.to]
        return PartialScaling(
            free=tuple(free),
            loss=plan.loss + step.loss,
            moved={**plan.moved, step.job: step.to},
            steps=plan.steps + 1,
        )

    def _steps(
        self, plan: PartialScaling, gpu_type: int, groups: list[list[ScalingStep]]
    ) -> Iterator[ScalingStep]:
        """Yield the steps worth trying after ``plan``.

        They are the cheapest of each group, and further steps of the jobs already moved.
        """
        for group in groups:
            for step in group:
                if step.job not in plan.moved:
                    if self._room(plan, step, gpu_type):
                        yield step
                    break
        for job, slot in plan.moved.items():
            if self._type[slot] == gpu_type:
                for to in self._targets(slot):
                    loss = float(self.slots.worth[job, slot] - self.slots.worth[job, to])
                    step = ScalingStep(job=job, to=to, loss=loss)
                    if self.slots.column[job, to] >= 0 and self._room(plan, step, gpu_type):
                        yield step

    def _room(self, plan: PartialScaling, step: ScalingStep, gpu_type: int) -> bool:
        to = self._type[step.to]
        return to == gpu_type or self._gpus[step.to] <= plan.free[to]

    def _targets(self, slot: int) -> list[int]:
        """Return the slots that a job on ``slot`` may be scaled down or moved to."""
        size = slot % len(self.slots.sizes)
        targets = [self._half[slot]] if self._resize and self._half[slot] >= 0 else []
        if self._retype:
            targets += [
                t * len(self.slots.sizes) + size
                for t in range(self.slots.types)
                if t != self._type[slot]
            ]
        return targets

    def _cheapest(self, gpu_type: int) -> list[list[ScalingStep]]:
        """Return the ``depth`` steps that lose least, per (slot of ``gpu_type``, next slot)."""
        width, groups = len(self.slots.sizes), []
        for slot in range(gpu_type * width, (gpu_type + 1) * width):
            if slot not in self._groups:
                self._groups[slot] = self._cheapest_of(slot)
            groups += self._groups[slot]
        return groups

    def _cheapest_of(self, slot: int) -> list[list[ScalingStep]]:
        jobs, groups = np.flatnonzero(self.at == slot), []
        for to in self._targets(slot) if len(jobs) else ():
            able = jobs[self.slots.column[jobs, to] >= 0]
            loss = self.slots.worth[able, slot] - self.slots.worth[able, to]
            least = np.argsort(loss, kind="stable")[: self._depth]
            if len(least):
                groups.append(
                    [
                        ScalingStep(job=int(able[k]), to=to, loss=float(loss[k]))
                        for k in least.tolist()
                    ]
                )
        return groups

    def scale_up(self) -> bool:
        """Take the scaling up, or change of type, that gains most; return whether one gains."""
        placed = np.flatnonzero(self.at >= 0)
        slot, free = self.at[placed], np.array(self._free, dtype=np.int64)
        best, winner = _LEAST_GAIN, (-1, -1)
        for to, takes in self._larger(slot):
            room = (to >= 0) & (takes <= free[self.slots.gpu_type[to]])
            gain = np.where(room, self._gain(placed, slot, to), -np.inf)
            k = int(np.argmax(gain)) if len(gain) else -1
            if k >= 0 and gain[k] > best:
                best, winner = float(gain[k]), (int(placed[k]), int(to[k]))
        if winner[0] < 0:
            return False
        self._put(*winner)
        return True

    def _gain(self, jobs: Ints, slot: Ints, to: Ints) -> Floats:
        gain: Floats = self.slots.worth[jobs, to] - self.slots.worth[jobs, slot]
        return gain

    def _larger(self, slot: Ints) -> Iterator[tuple[Ints, Ints]]:
        """Yield the next slot of each job and the GPUs that it takes of its type, each int64[jobs].

        The slot is -1 if a job has no such slot.
        """
        gpus, width = self.slots.gpus[slot], len(self.slots.sizes)
        if self._resize:
            yield self.slots.double[slot], gpus
        for t in range(self.slots.types if self._retype else 0):
            yield np.where(slot // width == t, -1, t * width + slot % width), gpus
