"""Deadlines over several rounds: time in slots, who could run when, and an independent check of schedules.

Equations (22) to (29) of ``formulation/README.md``. Slots are a grid of absolute time that is fine near now
and doubles with the distance; a later grid contains every boundary that an earlier one had beyond
it, so a schedule that was promised can always be told again.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Final

import numpy as np

from formulation.cells import Cells, build_cells
from formulation.check import Violation
from formulation.draft import Draft
from formulation.lifecycle import ACTIVE
from formulation.placement import current_gangs
from formulation.rates import work_left
from formulation.snapshot import STATE_CODE, Hold, Legs, Snapshot
from formulation.tables import Bools, Floats, Ints

FINE: Final = 4
"""A slot is at most a quarter as long as its end is away, so little is lost to whole slots."""
MAX_DOUBLINGS: Final = 12
"""The horizon is 32,768 rounds: 113 days of 300 s, in 57 slots."""
NEED: Final = 10**8
"""A job's remaining work in integers; rounding loses less than a millionth of it."""
MILLIONTH: Final = 1e-6
"""Share of a job's whole work by which a schedule may fall short: rounding, not a promise."""
_SAME_S: Final = 1e-3
"""Moments nearer than this are one."""


def spacing(distance: float) -> int:
    """Return how many rounds apart the boundaries lie that are ``distance`` rounds away (Eq. 22)."""
    return 1 if distance < 2 * FINE else 2 ** int(math.log2(distance / FINE))


def boundaries(now_s: float, until_s: float, round_s: float) -> Floats:
    """Return now and the slot boundaries after it up to the first at or beyond ``until_s``.

    A multiple b of the round belongs to the grid where the spacing at its distance divides it. The spacing
    only shrinks as b comes nearer, to divisors of itself, so b stays (``test_lookahead`` proves it by
    cases). At least one slot; none ends beyond the horizon.
    """
    now = now_s / round_s
    b = math.floor(now) + 1
    if b * round_s - now_s < _SAME_S:
        b += 1
    found, horizon = [now_s, b * round_s], FINE * 2.0 ** (MAX_DOUBLINGS + 1)
    while found[-1] < until_s:
        step = spacing(b - now)
        b = (b // step + 1) * step
        while b % spacing(b - now):
            b += step
        if b - now > horizon:
            break
        found.append(b * round_s)
    return np.array(found)


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Lookahead:
    """Jobs with deadlines, what each could run on, and what is free in each slot.

    A job's options are ``option_start[j] : option_start[j + 1]``. An option that ``stays`` is the Cell that
    the job runs on, on its own GPUs: it has no restart to pay but what is left of the last one (``lag_s``),
    and goes on from now without a break or not at all. A steady job (guaranteed, or jobs run to
    completion) keeps ``floor`` GPUs of each type that it was ever given, up to the horizon; ``held`` is
    the type of which it has some already, -1: none. Resources are the GPU types, then those rows of the
    round that count columns alone.
    """

    boundary_s: Floats  # float64[slots + 1]; the first is now
    names: tuple[str, ...]
    job: Ints  # int64[jobs], index into Snapshot.jobs
    work: Floats  # samples left
    total_work: Floats  # samples of the whole job
    deadline_s: Floats
    restart_s: Floats
    weight: Floats
    promised: Bools
    steady: Bools
    held: Ints
    option_start: Ints  # int64[jobs + 1]
    cells: Cells
    cell: Ints  # int64[options], index into cells
    rate: Floats  # float64[options], samples/s
    stays: Bools
    now: Bools  # bool[options], False: a rule of this round keeps it from the first slot
    lag_s: Floats  # float64[options]
    floor: Ints  # int64[options], GPUs of its type that a steady job keeps
    use: Ints  # int64[options, resources]
    capacity: Ints  # int64[resources, slots], less what jobs without deadlines were promised

    @property
    def slots(self) -> int:
        """Return the number of slots."""
        return len(self.boundary_s) - 1

    @property
    def owner(self) -> Ints:
        """Return the job of each option, int64[options]."""
        return np.repeat(np.arange(len(self.job), dtype=np.int64), np.diff(self.option_start))

    def options_of(self, job: int) -> range:
        """Return the options of ``job``."""
        return range(int(self.option_start[job]), int(self.option_start[job + 1]))

    def trains(self) -> Floats:
        """Return the samples of each option in each slot before the deadline (Eq. 25).

        float64[options, slots]; what is left of an earlier restart is taken off the first slot of those that
        stay, which may make it negative.
        """
        start, end = self.boundary_s[:-1], self.boundary_s[1:]
        last = self.deadline_s[self.owner][:, None]
        seconds = np.maximum(np.minimum(end, last) - start, 0.0)
        seconds[:, 0] -= self.lag_s
        return self.rate[:, None] * seconds

    def start_costs(self) -> Floats:
        """Return the samples that a start of each option costs, float64[options]; 0 for those that stay."""
        return np.where(self.stays, 0.0, self.rate * self.restart_s[self.owner])

    def allowed(self) -> Bools:
        """Return, bool[options, slots], which options may be used when.

        Not after the deadline, not where they do not fit alone, and a Cell that a job runs on already is
        not started anew in the first slot.
        """
        before = self.boundary_s[:-1] < self.deadline_s[self.owner][:, None] - _SAME_S
        fits = np.all(self.use[:, :, None] <= self.capacity[None], axis=1)
        ok = before & fits
        ok[~self.now, 0] = False
        running = np.full(len(self.job), -1, dtype=np.int64)
        running[self.owner[self.stays]] = self.cell[self.stays]
        ok[~self.stays & (self.cell == running[self.owner]), 0] = False
        ok[self.stays] = np.logical_and.accumulate(ok[self.stays], axis=1)
        return np.asarray(ok, dtype=np.bool_)


Picks = Ints
"""int64[jobs, slots]: the option of each job in each slot, -1: it waits."""


def samples(ahead: Lookahead, job: int, pick: Ints, first: int = 0) -> float:
    """Return what ``job`` trains by its deadline with the options ``pick`` (int64[slots]).

    ``first`` leaves out the slots before it, but not that a leg which began there goes on.
    """
    gain, cost = ahead.trains(), ahead.start_costs()
    total = 0.0
    for slot in range(first, ahead.slots):
        option = int(pick[slot])
        if option >= 0:
            begins = slot == 0 or int(pick[slot - 1]) != option
            total += float(gain[option, slot]) - (float(cost[option]) if begins else 0.0)
    return total


def usage(ahead: Lookahead, picks: Picks) -> Ints:
    """Return what the schedules use, int64[resources, slots], with what steady jobs keep (Eq. 27)."""
    used = np.zeros_like(ahead.capacity)
    for job in range(len(ahead.job)):
        used += usage_of(ahead, job, picks[job])
    return used


def usage_of(ahead: Lookahead, job: int, pick: Ints) -> Ints:
    """Return what ``job`` uses with the options ``pick`` (int64[slots]), int64[resources, slots]."""
    used = np.zeros_like(ahead.capacity)
    runs = np.flatnonzero(pick >= 0)
    used[:, runs] = ahead.use[pick[runs]].T
    if ahead.steady[job]:
        kept = {int(ahead.cells.gpu_type[ahead.cell[o]]): int(ahead.floor[o]) for o in pick[runs]}
        for option in ahead.options_of(job):
            kind = int(ahead.cells.gpu_type[ahead.cell[option]])
            if kind == ahead.held[job]:
                kept[kind] = int(ahead.floor[option])
        for kind, gpus in kept.items():
            used[kind] = np.maximum(used[kind], gpus)
    return used


def legs_of(ahead: Lookahead, picks: Picks) -> Legs:
    """Return the schedules as legs, one for each run of slots on one option."""
    rows = []
    for job in range(len(ahead.job)):
        edges = np.flatnonzero(np.diff(picks[job], prepend=-2, append=-2))
        for first, after in zip(edges[:-1].tolist(), edges[1:].tolist(), strict=True):
            option = int(picks[job, first])
            if option >= 0:
                cell = int(ahead.cell[option])
                rows.append(
                    {"job": int(ahead.job[job]), "start_s": float(ahead.boundary_s[first]),
                     "end_s": float(ahead.boundary_s[after]),
                     "gpu_type": int(ahead.cells.gpu_type[cell]),
                     "gpus": int(ahead.cells.gpus[cell]),
                     "pipeline_degree": int(ahead.cells.pipeline_degree[cell]),
                     "plan": int(ahead.cells.plan[cell])}
                )  # fmt: skip
    return Legs.from_rows(rows)


def picks_of(ahead: Lookahead, legs: Legs) -> Picks:
    """Return the legs told in slots of this grid.

    What has passed, what begins after the deadline (a slot that was one is two now) and what has no option
    is left out.
    """
    picks = np.full((len(ahead.job), ahead.slots), -1, dtype=np.int64)
    mine = {int(job): index for index, job in enumerate(ahead.job.tolist())}
    start, end = ahead.boundary_s[:-1], ahead.boundary_s[1:]
    cells = ahead.cells
    for leg in range(len(legs)):
        job = mine.get(int(legs.job[leg]))
        if job is None:
            continue
        inside = (start >= legs.start_s[leg] - _SAME_S) | (start == ahead.boundary_s[0])
        inside &= start < ahead.deadline_s[job] - _SAME_S
        covers = inside & (end > legs.start_s[leg]) & (end <= legs.end_s[leg] + _SAME_S)
        wanted = (legs.gpu_type[leg], legs.gpus[leg], legs.pipeline_degree[leg], legs.plan[leg])
        for option in ahead.options_of(job):
            cell = int(ahead.cell[option])
            has = (cells.gpu_type[cell], cells.gpus[cell], cells.pipeline_degree[cell],
                   cells.plan[cell])  # fmt: skip
            if has == wanted and bool(ahead.stays[option]) <= bool(covers[0]):
                picks[job, covers] = option
                if ahead.stays[option]:
                    break
    return picks


def staying(draft: Draft, among: Ints) -> tuple[Floats, Floats]:
    """Return what the jobs ``among`` have that stay as they are: samples/s, seconds left of the last restart.

    Both float64[all jobs]; the rate is that of the shape they lie on, never above their Cell's own, and 0
    for jobs that have no current column.
    """
    snapshot = draft.snapshot
    jobs, a = snapshot.jobs, snapshot.allocations
    own = (a.hold != Hold.RELEASING) & (a.job >= 0)
    pair = np.unique(a.job[own] * max(1, len(snapshot.nodes)) + a.node[own])
    nodes = np.bincount(pair // max(1, len(snapshot.nodes)), minlength=len(jobs))
    rate = np.zeros(len(jobs))
    for job in among[draft.current[among] >= 0].tolist():
        cell = int(draft.cell[draft.current[job]])
        spread = int(nodes[job]) or int(draft.cells.nodes[cell])
        rate[job] = min(draft.cells.rate_on(cell, spread), float(draft.cells.rate[cell]))
    left_s = np.where(jobs.since_s > 0, jobs.since_s + jobs.restart_s - snapshot.now_s, 0.0)
    return rate, np.clip(left_s, 0.0, jobs.restart_s)


def look_ahead(base: Draft, draft: Draft) -> Lookahead:
    """State the plan of the jobs with deadlines.

    ``base`` has the columns that are physically there, ``draft`` those that the rules leave this round. What
    was promised and is bound to its column for now, or has none, may use the former later on. Those that were
    promised and those that have columns take part, where their deadlines lie ahead; new ones that are bound
    do not.
    """
    snapshot, policy = base.snapshot, base.policy
    jobs = snapshot.jobs
    steady = jobs.guaranteed | policy.run_to_completion
    bound = draft.must_run & ~steady
    whole = jobs.admitted & (bound | ~draft.has_columns)
    open_ = np.isfinite(jobs.deadline_s) & (jobs.deadline_s > snapshot.now_s)
    has = np.where(whole, base.has_columns, draft.has_columns & (jobs.admitted | ~bound))
    taking = np.flatnonzero(open_ & has & (work_left(snapshot) > 0))
    until_s = float(jobs.deadline_s[taking].max(initial=snapshot.now_s))
    boundary_s = boundaries(snapshot.now_s, until_s, policy.round_s)
    # one slot beyond all deadlines: what is free there is free for good
    boundary_s = boundaries(snapshot.now_s, boundary_s[-1] + _SAME_S, policy.round_s)
    columns = [(base if whole[j] else draft) for j in taking.tolist()]
    stay_rate, lag_s = staying(base, taking)
    cell, rate, stays, now, lag, floor, owner = [], [], [], [], [], [], []
    for index, (job, source) in enumerate(zip(taking.tolist(), columns, strict=True)):
        span = slice(int(source.job_start[job]), int(source.job_start[job + 1]))
        kinds, gpus = source.gpu_type[span], source.gpus[span]
        least = np.array([gpus[kinds == kind].min() for kind in kinds], dtype=np.int64)
        current = int(source.current[job]) - span.start if source.current[job] >= 0 else -1
        left = set(draft.cell[draft.columns_of(job)].tolist())
        order = [*([current] if current >= 0 else []), *range(span.stop - span.start)]
        for position, column in enumerate(order):
            stay = position == 0 and current >= 0
            cell.append(int(source.cell[span.start + column]))
            rate.append(float(stay_rate[job]) if stay else float(source.rate[span.start + column]))
            stays.append(stay)
            now.append(cell[-1] in left)
            lag.append(float(lag_s[job]) if stay else 0.0)
            floor.append(int(least[column]))
            owner.append(index)
    rows = [row for row in draft.rows if not len(row.idle_job)]
    option_cell, option_owner = np.array(cell, np.int64), np.array(owner, np.int64)
    keeps = steady[taking]
    return Lookahead(
        boundary_s=boundary_s, names=tuple(jobs.name[j] for j in taking.tolist()), job=taking,
        work=work_left(snapshot)[taking],
        total_work=(jobs.iterations * snapshot.global_batch)[taking],
        deadline_s=jobs.deadline_s[taking], restart_s=jobs.restart_s[taking],
        weight=draft.weight[taking], promised=jobs.admitted[taking], steady=keeps,
        held=np.where(keeps & draft.must_run[taking], jobs.current_type[taking], -1),
        option_start=np.searchsorted(option_owner, np.arange(len(taking) + 1)).astype(np.int64),
        cells=base.cells, cell=option_cell, rate=np.array(rate), stays=np.array(stays, np.bool_),
        now=np.array(now, np.bool_), lag_s=np.array(lag), floor=np.array(floor, np.int64),
        use=_use(draft, taking, option_owner, option_cell),
        capacity=_free(draft, taking, boundary_s, [row.capacity for row in rows]),
    )  # fmt: skip


def _use(draft: Draft, taking: Ints, owner: Ints, cell: Ints) -> Ints:
    """Return what each option uses of each resource, int64[options, resources]."""
    types = len(draft.snapshot.gpu_types)
    rows = [row for row in draft.rows if not len(row.idle_job)]
    use = np.zeros((len(cell), types + len(rows)), dtype=np.int64)
    use[np.arange(len(cell)), draft.cells.gpu_type[cell]] = draft.cells.gpus[cell]
    for r, row in enumerate(rows):
        amount = {
            (int(draft.job[c]), int(draft.cell[c])): int(a)
            for c, a in zip(row.column.tolist(), row.amount.tolist(), strict=True)
        }
        for option, (job, which) in enumerate(zip(owner.tolist(), cell.tolist(), strict=True)):
            use[option, types + r] = amount.get((int(taking[job]), which), 0)
    return use


def _free(draft: Draft, taking: Ints, boundary_s: Floats, limits: list[int]) -> Ints:
    """Return what is left in each slot beside jobs that must run and are not planned (Eq. 28)."""
    snapshot, types = draft.snapshot, len(draft.snapshot.gpu_types)
    rows = [row for row in draft.rows if not len(row.idle_job)]
    whole = np.append(snapshot.schedulable_gpus(), np.array(limits, np.int64))
    free = np.repeat(whole[:, None], len(boundary_s) - 1, axis=1)
    planned = np.zeros(len(snapshot.jobs), dtype=np.bool_)
    planned[taking] = True
    for column, until_s in reserved(draft, ~planned):
        slots = boundary_s[:-1] < until_s
        free[int(draft.gpu_type[column]), slots] -= int(draft.gpus[column])
        for r, row in enumerate(rows):
            free[types + r, slots] -= int(row.amount[row.column == column].sum())
    return np.maximum(free, 0)


def reserved(draft: Draft, among: Bools) -> list[tuple[int, float]]:
    """Return (column, until when) that is kept for each job of ``among`` that must run (Eq. 28).

    Its smallest column on its own type, else its smallest: what a round can always shrink it to. Steady
    jobs keep it for good, others (in their minimum run) until that is over. Jobs with no work left are
    about to end and keep nothing.
    """
    jobs, found = draft.snapshot.jobs, []
    for job in np.flatnonzero(draft.must_run & among & (work_left(draft.snapshot) > 0)).tolist():
        columns = np.arange(int(draft.job_start[job]), int(draft.job_start[job + 1]))
        own = columns[draft.gpu_type[columns] == jobs.current_type[job]]
        choice = own if len(own) else columns
        least = int(choice[np.argmin(draft.gpus[choice])])
        steady = bool(jobs.guaranteed[job]) or draft.policy.run_to_completion
        until_s = math.inf if steady else float(jobs.since_s[job]) + draft.policy.min_run_s
        found.append((least, until_s))
    return found


def spare_gpus(draft: Draft, legs: Legs) -> Ints:
    """Return the GPUs of each type that no leg and no reservation needs at any time, int64[types].

    Jobs that will keep what they are given once may start on these alone, or certificates would be broken
    by the rounds after this one.
    """
    snapshot, jobs = draft.snapshot, draft.snapshot.jobs
    steady = jobs.guaranteed | draft.policy.run_to_completion
    planned = np.zeros(len(jobs), dtype=np.bool_)
    planned[legs.job] = True
    least: dict[tuple[int, int], int] = {}
    for job in np.flatnonzero(planned & steady).tolist():
        for c in range(int(draft.job_start[job]), int(draft.job_start[job + 1])):
            key = job, int(draft.gpu_type[c])
            least[key] = min(least.get(key, 2**62), int(draft.gpus[c]))
    moments = sorted({snapshot.now_s, *legs.start_s.tolist()})
    used = np.zeros((len(snapshot.gpu_types), len(moments)), dtype=np.int64)
    held: dict[tuple[int, int], int] = {}
    for leg in range(len(legs)):
        job, kind, gpus = int(legs.job[leg]), int(legs.gpu_type[leg]), int(legs.gpus[leg])
        kept = min(least.get((job, kind), gpus), gpus) if steady[job] else 0
        held[job, kind] = kept
        on = [legs.start_s[leg] <= at < legs.end_s[leg] for at in moments]
        used[kind, on] += gpus - kept
    for job in np.flatnonzero(planned & steady & draft.must_run).tolist():
        kind = int(jobs.current_type[job])
        held.setdefault((job, kind), least.get((job, kind), 0))
    for (_, kind), kept in held.items():
        used[kind] += kept
    for column, until_s in reserved(draft, ~planned):
        used[int(draft.gpu_type[column]), np.array(moments) < until_s] += int(draft.gpus[column])
    spare: Ints = np.maximum(snapshot.schedulable_gpus() - used.max(axis=1), 0)
    return spare


def schedule_violations(
    snapshot: Snapshot, legs: Legs, promised: Bools,
    reserved_gpus: Mapping[int, int] = MappingProxyType({}),
) -> list[Violation]:  # fmt: skip
    """Return every way in which ``legs`` fail to meet the deadlines of ``promised`` (bool[jobs]) together.

    Plain loops over the legs, independent of the slots: one Cell at a time, capacity at every moment, restart
    time charged to each leg that does not go on from what runs now, all work done by the deadline.
    ``reserved_gpus``: GPU type -> GPUs that others hold throughout.
    """
    found: list[Violation] = []
    cells, gangs = build_cells(snapshot), current_gangs(snapshot)
    schedulable = snapshot.schedulable_gpus()
    known = {
        (int(cells.workload[c]), int(cells.gpu_type[c]), int(cells.gpus[c]),
         int(cells.pipeline_degree[c]), int(cells.plan[c])): c
        for c in range(len(cells))
    }  # fmt: skip
    disturbed, jobs = snapshot.disturbed(), snapshot.jobs
    active = {STATE_CODE[state] for state in ACTIVE}
    order: dict[int, list[int]] = {}
    for leg in range(len(legs)):
        order.setdefault(int(legs.job[leg]), []).append(leg)
    for job in range(len(jobs)):
        if not promised[job]:
            if job in order:
                found.append(
                    Violation(rule="promised", detail=f"{jobs.name[job]} has legs, no promise")
                )
            continue
        trained, ends_s = 0.0, -math.inf
        for leg in sorted(order.get(job, []), key=lambda k: float(legs.start_s[k])):
            start_s = max(float(legs.start_s[leg]), snapshot.now_s)
            end_s = float(legs.end_s[leg])
            if start_s < ends_s - _SAME_S:
                detail = f"{jobs.name[job]} has two Cells at {start_s:.3f}"
                found.append(Violation(rule="one Cell at a time", detail=detail))
            ends_s = end_s
            spec = (int(legs.gpu_type[leg]), int(legs.gpus[leg]), int(legs.pipeline_degree[leg]),
                    int(legs.plan[leg]))  # fmt: skip
            cell = known.get((int(jobs.workload[job]), *spec))
            if cell is None:
                found.append(Violation(rule="Cell exists", detail=f"{jobs.name[job]}: {spec}"))
                continue
            rate, pause_s = float(cells.rate[cell]), float(jobs.restart_s[job])
            runs = (int(jobs.current_type[job]), int(jobs.current_gpus[job]),
                    int(jobs.current_degree[job]), int(jobs.current_plan[job]))  # fmt: skip
            runs_now = int(jobs.state[job]) in active and not disturbed[job]
            if start_s - snapshot.now_s < _SAME_S and runs == spec and runs_now:
                if job in gangs:
                    rate = min(rate, cells.rate_on(cell, gangs[job].nodes))
                since_s = float(jobs.since_s[job])
                pause_s = max(0.0, since_s + pause_s - snapshot.now_s) if since_s > 0 else 0.0
            usable_s = min(end_s, float(jobs.deadline_s[job])) - start_s
            trained += rate * max(0.0, usable_s - pause_s)
        batch = snapshot.workloads[int(jobs.workload[job])].global_batch
        left = float(jobs.iterations_left[job]) * batch
        if trained < left - MILLIONTH * float(jobs.iterations[job]) * batch:
            detail = f"{jobs.name[job]} trains {trained:.6g} of {left:.6g} samples by its deadline"
            found.append(Violation(rule="deadline", detail=detail))
    for at in sorted({max(s, snapshot.now_s) for s in legs.start_s.tolist()}):
        for kind, gpu_type in enumerate(snapshot.gpu_types):
            used = reserved_gpus.get(kind, 0)
            for leg in range(len(legs)):
                on = legs.start_s[leg] <= at + _SAME_S and at + _SAME_S < legs.end_s[leg]
                used += int(legs.gpus[leg]) if on and legs.gpu_type[leg] == kind else 0
            if used > schedulable[kind]:
                detail = f"{gpu_type.name}: {used} used of {schedulable[kind]} at {at:.3f}"
                found.append(Violation(rule="capacity", detail=detail))
    return found
