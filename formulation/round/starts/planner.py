"""The planned start of each waiting job, and the time by which it is promised to start."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from dataclasses import replace
from typing import Any, Final

import numpy as np

from tessera.formulation.base.moments import SAME_S
from tessera.formulation.base.tables import Bools
from tessera.formulation.job.lifecycle import ACTIVE
from tessera.formulation.round.draft import Draft
from tessera.formulation.round.starts.holds import is_dated
from tessera.formulation.round.starts.pools import Pools
from tessera.formulation.round.starts.round_timeline import (
    add_schedules,
    add_windows,
    make_timeline,
)
from tessera.formulation.round.starts.shares import running_shares, segments_of_round
from tessera.formulation.round.starts.timeline import Slot, Timeline
from tessera.formulation.round.starts.ways import StartWay, WayFinder, columns_of_starts
from tessera.formulation.state.last_round import PlannedNodes, PlannedStarts, StartPlan
from tessera.formulation.state.node_choices import NodeChoices
from tessera.formulation.state.snapshot import Snapshot

MAX_PLANNED: Final = 256
"""Number of waiting jobs that have planned starts: the first by priority, weight and time of waiting."""
SLACK: Final = 0.05
"""Share of the planned wait by which a start may be late. If other jobs have to shrink for the start,
the time for which the job then runs also counts."""
MAX_SLACK_RUN_S: Final = 3600.0
"""The longest run that counts for the slack of a promise, which is then three minutes longer."""
MOVED_BY_PRIORITY: Final = "a job of a higher priority, or of more weight, goes before it"
MOVED_BY_DELAYS: Final = "jobs that run end later than was estimated, or nodes are away"
LATE_S: Final = 60.0
"""Seconds by which a start may be planned too late before its promise is moved. Clocks and the ends of
programs are not more exact."""


def plan_starts(draft: Draft) -> StartPlan:
    """Return the planned and promised starts of the jobs that wait (Eqs. 39b to 39d).

    The first jobs by priority, weight and time of waiting have one, up to ``MAX_PLANNED``. A start that was
    planned stays while its nodes become free in time. Where they do not, it is planned again, and jobs
    that come after it in that order make room. Then starts are moved forward to where GPUs have become
    free, and new jobs are planned, each as early as possible without a delay of those before it
    (conservative backfilling, Mu'alem and Feitelson 2001). A start for which running jobs would have to
    shrink now is postponed within its promise.
    """
    plan = _Planner(draft)
    plan.load()
    plan.advance()
    plan.insert()
    plan.postpone()
    return plan.result()


def with_plan(snapshot: Snapshot, plan: StartPlan | None) -> Snapshot:
    """Return the snapshot with the planned starts of its round."""
    if plan is None:
        return snapshot
    jobs = replace(snapshot.jobs, start_by_s=plan.start_by_s)
    return replace(
        snapshot,
        jobs=jobs,
        planned_starts=plan.starts,
        planned_nodes=plan.nodes,
        expected_releases=plan.expected_releases,
    )


class _Planner:
    """The starts of a round while they are being planned. Owners of slots are jobs."""

    def __init__(self, draft: Draft) -> None:
        snapshot = draft.snapshot
        self._draft, self._snapshot, self._jobs = draft, snapshot, snapshot.jobs
        self._pools = Pools(draft)
        self._shares = running_shares(draft)
        self._line = make_timeline(draft, self._pools, self._shares)
        add_windows(draft, self._line)
        self._ways, self._nodes = WayFinder(draft, self._pools), NodeChoices(draft.snapshot)
        self._way: dict[int, StartWay] = {}
        self._loaded_s: dict[int, float] = {}
        """The start that the last round planned, by job."""
        self._cause: dict[int, str] = {}
        self._moves: dict[int, str] = {}
        self._waits = _may_be_planned(draft)
        self._waits[list(self._ways.models)] = True
        self._start_by = np.where(self._waits, snapshot.jobs.start_by_s, np.inf)
        self._must_start = draft.must_run & self._waits
        self._bound = self._must_start & (is_dated(draft) | self._jobs.among(ACTIVE))
        self._rank = self._ranks()

    def _ranks(self) -> list[int]:
        """Return the rank of each job: bound ones first, then by priority, weight and time of waiting."""
        count = len(self._waits)
        lacks_start = np.ones(count, dtype=np.bool_)
        lacks_start[self._snapshot.planned_starts.job] = False
        weight, jobs = self._draft.weight, self._jobs
        order = np.lexsort((jobs.queued_s, lacks_start, -weight, jobs.priority, ~self._bound))
        ranks = np.empty(count, dtype=np.int64)
        ranks[order] = np.arange(count)
        result: list[int] = ranks.tolist()
        return result

    def load(self) -> None:
        """Take over the starts that are planned already, and plan those again that no longer fit."""
        table, shares_of = self._snapshot.planned_starts, self._snapshot.planned_nodes.by_start()
        models = self._ways.models
        job_of_cell = [models.get(job, job) for job in table.job.tolist()]
        columns = columns_of_starts(
            self._draft, replace(table, job=np.array(job_of_cell, dtype=np.int64))
        )
        rows = np.flatnonzero((columns >= 0) & self._waits[table.job])
        ways = dict(zip(rows.tolist(), self._ways.on_columns(columns[rows]), strict=True))
        late_jobs = []
        for row in rows[np.argsort(table.start_s[rows], kind="stable")].tolist():
            job = int(table.job[row])
            way = self._way[job] = self._ways.in_array(job, ways[row])
            self._loaded_s[job] = float(table.start_s[row])
            start_s = max(self._loaded_s[job], self._snapshot.now_s)
            slot = Slot(start_s, start_s + way.lasts_s, (*shares_of[row], *way.shape.pools))
            avoids_node = any(node in self._nodes.avoided(job) for node, _ in shares_of[row])
            is_whole = sum(gpus for _, gpus in shares_of[row]) == sum(way.shape.shares)
            own_slot = self._keep(job, slot) if is_whole and not avoids_node else None
            if own_slot is not None:
                self._line.add(job, own_slot)
            else:
                late_jobs.append(job)
        add_schedules(self._draft, self._line)
        self._replan(late_jobs)

    def _keep(self, job: int, slot: Slot) -> Slot | None:
        """Return the slot if its GPUs are free, or else one on them that its promise allows, or None."""
        if self._line.has_room(slot):
            return slot
        own_nodes = np.zeros(len(self._snapshot.nodes), dtype=np.bool_)
        own_nodes[[node for node, _ in slot.shares if node < len(own_nodes)]] = True
        way, before_s = self._way[job], float(self._start_by[job]) + SAME_S
        return self._line.earliest(way.shape, way.lasts_s, own_nodes, before_s)

    def insert(self) -> None:
        """Plan the starts of jobs that have none yet, as far as their number is limited."""
        jobs = sorted(np.flatnonzero(self._waits).tolist(), key=self._rank.__getitem__)
        self._replan([job for job in jobs[:MAX_PLANNED] if job not in self._way])
        self._displace()

    def _displace(self) -> None:
        """Start jobs that are promised a start now in place of running ones, if no planned one is delayed."""
        now_s = self._snapshot.now_s + SAME_S
        late_jobs = [
            job
            for job in np.flatnonzero(self._must_start).tolist()
            if (slot := self._line.slot(job)) is None or slot.start_s > now_s
        ]
        if not late_jobs:
            return
        kept_shares = self._shares.at(self._draft.must_run[self._shares.job])
        free_line = make_timeline(self._draft, self._pools, kept_shares)
        for owner, slot in self._line.slots():
            free_line.add(owner, slot)
        for job in late_jobs:
            self._displace_for(job, free_line)

    def _displace_for(self, job: int, free_line: Timeline) -> None:
        """Start a job now if ``free_line``, without the jobs that may be displaced, has room for it."""
        lines = (self._line, free_line)
        for line in lines:
            if line.slot(job) is not None:
                line.remove(job)
        nodes = self._nodes.make_mask(job)
        slots = [
            (slot.end_s, slot, way)
            for way in self._ways.of_job(job)
            if (slot := free_line.earliest(way.shape, way.lasts_s, nodes))
            and slot.start_s <= self._snapshot.now_s + SAME_S
        ]
        if slots:
            _, slot, self._way[job] = min(slots, key=lambda row: row[0])
            for line in lines:
                line.add(job, slot)
            return
        if self._bound[job]:
            return  # it starts all the same, whoever has to move
        next_slot, way = self._earliest(job)
        if next_slot is not None and way is not None:
            self._way[job] = way
            for line in lines:
                line.add(job, next_slot)
            self._promise(job, next_slot)

    def postpone(self) -> None:
        """Postpone the starts for which running jobs would have to shrink now, within their promises.

        Until such a start is due, the objective chooses whether it is worth the restarts of others.
        """
        now_s, used_gpus = self._snapshot.now_s, Counter[int]()
        for job in sorted(self._way, key=self._rank.__getitem__):
            slot = self._line.slot(job)
            if slot is None or slot.start_s > now_s + SAME_S or self._must_start[job]:
                continue
            spare_gpus = self._spare_unless_shrunk(slot)
            if all(gpus >= used_gpus[node] for node, gpus in spare_gpus.items()):
                used_gpus.update(dict(slot.shares))
                continue
            by_s = min(float(self._start_by[job]), self._loaded_s.get(job, np.inf))
            start_s = min(now_s + self._slack_s(slot), by_s)
            self._line.remove(job)
            due_slot = Slot(start_s, start_s + slot.end_s - slot.start_s, slot.shares)
            has_room = start_s > now_s + SAME_S and self._line.has_room(due_slot)
            self._line.add(job, due_slot if has_room else slot)

    def _spare_unless_shrunk(self, slot: Slot) -> dict[int, int]:
        """Return the GPUs that a slot leaves free on each of its nodes if no running job shrinks for it.

        They are negative where one has to.
        """
        shares, sizes = self._shares, self._snapshot.nodes.gpus
        runs = shares.part_until_s > slot.start_s + SAME_S
        return {
            node: int(sizes[node]) - gpus - int(shares.gpus[runs & (shares.node == node)].sum())
            for node, gpus in slot.shares
            if node < len(sizes)
        }

    def result(self) -> StartPlan:
        """Return the plan as tables."""
        cells, draft = self._draft.cells, self._draft
        rows: list[dict[str, Any]] = []
        shares: list[dict[str, Any]] = []
        for job in sorted(self._way):
            slot = self._line.slot(job)
            if slot is None:
                continue
            cell = int(draft.cell[self._way[job].column])
            for node, gpus in slot.shares:
                if node < len(self._snapshot.nodes):
                    shares.append({"start": len(rows), "node": node, "gpus": gpus})
            fields = {name: int(getattr(cells, name)[cell]) for name in cells.CELL}
            rows.append({"job": job, "start_s": slot.start_s, "end_s": slot.end_s, **fields})
        return StartPlan(
            starts=PlannedStarts.from_rows(rows),
            nodes=PlannedNodes.from_rows(shares),
            start_by_s=self._start_by,
            expected_releases=self._shares.expected_releases,
            moves={job: cause for job, cause in self._moves.items() if self._line.slot(job)},
        )

    def _replan(self, jobs: Iterable[int]) -> None:
        """Plan the starts of jobs that have no slot, in order.

        If a job would start earlier without jobs that come after it, these make room, and are planned
        again after it.
        """
        rank = self._rank
        queue = sorted(jobs, key=rank.__getitem__)
        while queue:
            job = queue.pop(0)
            slot, way = self._earliest(job)
            juniors = [
                junior
                for junior in self._way
                if rank[junior] > rank[job] and self._line.slot(junior) is not None
            ]
            if juniors and (slot is None or slot.start_s > self._snapshot.now_s + SAME_S):
                slot, way, losers = self._go_ahead_of(job, juniors, slot, way)
                self._cause |= {
                    loser: MOVED_BY_PRIORITY
                    for loser in losers
                    if self._goes_before(job, loser) or job in self._cause
                }
                queue = sorted({*queue, *losers}, key=rank.__getitem__)
            if way is not None:
                self._way[job] = way
            if slot is None:
                self._start_by[job] = np.inf
                continue
            self._line.add(job, slot)
            self._promise(job, slot)

    def _go_ahead_of(
        self, job: int, juniors: list[int], slot: Slot | None, way: StartWay | None
    ) -> tuple[Slot | None, StartWay | None, list[int]]:
        """Return the slot of ``job`` before ``juniors``, if that is earlier, and who makes room.

        Nobody makes room for little to a new job. A job with a promise is not overtaken, not even if
        the one before it ends late by so little that its slot no longer fits before the next one.
        """
        slots = {junior: self._line.remove(junior) for junior in juniors}
        sole_slot, sole_way = self._earliest(job)
        min_gain_s = SAME_S if np.isfinite(self._start_by[job]) else LATE_S
        is_earlier = sole_slot is not None and (
            slot is None or sole_slot.start_s < slot.start_s - min_gain_s
        )
        if is_earlier and sole_slot is not None:
            slot, way = sole_slot, sole_way
            self._line.add(job, sole_slot)
        losers = []
        for junior in sorted(juniors, key=lambda junior: slots[junior].start_s):
            if not is_earlier or self._line.has_room(slots[junior]):
                self._line.add(junior, slots[junior])
            else:
                losers.append(junior)
        if is_earlier:
            self._line.remove(job)
        return slot, way, losers

    def advance(self) -> None:
        """Start each job earlier where GPUs have become free."""
        slots = {job: slot for job in self._way if (slot := self._line.slot(job)) is not None}
        for job in sorted(slots, key=lambda job: (slots[job].start_s, job)):
            slot, way = slots[job], self._way[job]
            if slot.start_s <= self._snapshot.now_s + SAME_S:
                continue
            self._line.remove(job)
            earlier = self._line.earliest(
                way.shape, way.lasts_s, self._nodes.make_mask(job), slot.start_s - SAME_S
            )
            self._line.add(job, slot if earlier is None else earlier)

    def _promise(self, job: int, slot: Slot) -> None:
        """Promise a start, unless one was promised and is still kept."""
        is_late = slot.start_s > self._start_by[job] + LATE_S
        if is_late:
            self._moves[job] = self._cause.get(job, MOVED_BY_DELAYS)
        if is_late or np.isinf(self._start_by[job]):
            self._start_by[job] = slot.start_s + self._slack_s(slot)

    def _slack_s(self, slot: Slot) -> float:
        """Return the time by which a start may be later than planned.

        It is longer by a share of the run if other jobs have to shrink for the start.
        """
        run_s = min(slot.end_s - slot.start_s, MAX_SLACK_RUN_S)
        if min(self._spare_unless_shrunk(slot).values(), default=0) >= 0:
            run_s = 0.0
        return SLACK * (slot.start_s - self._snapshot.now_s + run_s)

    def _goes_before(self, job: int, junior: int) -> bool:
        """Return whether ``job`` is of a higher priority than ``junior``, or of the same and more weight."""
        priority, weight = self._jobs.priority, self._draft.weight
        return bool((priority[job], -weight[job]) < (priority[junior], -weight[junior]))

    def _earliest(self, job: int) -> tuple[Slot | None, StartWay | None]:
        """Return the earliest slot of a job on any GPU type, and the way in which it starts there."""
        best: tuple[Slot | None, StartWay | None] = (None, None)
        nodes = self._nodes.make_mask(job)
        for way in self._ways.of_job(job):
            slot = self._line.earliest(way.shape, way.lasts_s, nodes)
            if slot is not None and (
                best[0] is None or (slot.start_s, slot.end_s) < (best[0].start_s, best[0].end_s)
            ):
                best = slot, way
        return best


def _may_be_planned(draft: Draft) -> Bools:
    """Return the jobs that wait for GPUs and may have them, bool[jobs].

    Jobs with a schedule for a deadline are excluded. One that has lost a node, and must start again,
    also waits.
    """
    waits = ~draft.snapshot.jobs.among(ACTIVE) | (draft.current < 0)
    has_schedule = np.zeros(len(draft.current), dtype=np.bool_)
    has_schedule[segments_of_round(draft).job] = True
    return waits & draft.has_columns & (draft.weight > 0) & draft.promisable & ~has_schedule
