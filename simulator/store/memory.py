"""The jobs, nodes and allocations of one cluster in memory, as ``db`` would store them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from types import MappingProxyType
from typing import Any

import numpy as np

from tessera.formulation.answer.decisions import CHANGES_GPUS, Decision, DecisionKind
from tessera.formulation.base.tables import Bools, Floats, Ints
from tessera.formulation.job.lifecycle import JobState
from tessera.formulation.records.estimates import EstimateRecord
from tessera.formulation.records.jobs import JobSpec
from tessera.formulation.round.starts.planner import MOVED_BY_PRIORITY
from tessera.formulation.state.decayed_use import NO_DECAYED_USE, DecayedUse, UseMeter
from tessera.formulation.state.last_round import (
    NO_PLANNED_NODES,
    NO_PLANNED_STARTS,
    NO_PRICES,
    NO_SEGMENTS,
    Prices,
    ScheduleSegments,
    StartPlan,
    keep_starts,
)
from tessera.formulation.state.snapshot import STATE_CODE, Snapshot
from tessera.simulator.renumbering import renumber_jobs
from tessera.simulator.scenario import EPOCH_S, Scenario
from tessera.simulator.store.cluster import nodes_of, quotas_of, reservations_of, tenants_of
from tessera.simulator.store.estimates import VisibleEstimates
from tessera.simulator.store.gpus import AllocationChange, HeldGpus
from tessera.simulator.store.jobs import StoredJobs
from tessera.simulator.store.names import Names, plan_kinds_of, plans_of, workloads_of
from tessera.simulator.store.permissions import avoids_of, selectors_of, types_of


class MemoryStore:
    """The jobs, profiling tasks, nodes and allocations of one cluster.

    It stores what ``db`` would store, and makes the same snapshots of it. Nodes are sorted by name,
    workloads by model, size and batch, and jobs by arrival. The agents of this world answer
    immediately. Between rounds, a job is therefore queued, running or over, and no GPU is being
    released.

    Jobs are indices into the scenario's arrivals, in order of time. The world reports progress,
    ends and lost nodes by calling methods.
    """

    def __init__(
        self,
        scenario: Scenario,
        restart_s: Floats,
        visible: Sequence[EstimateRecord] | None = None,
        cluster: str = "simulated",
        tasks: Sequence[JobSpec] = (),
    ) -> None:
        """Set up the cluster of ``scenario`` before any job has arrived.

        ``restart_s`` has the seconds that a restart of each job takes, float64[jobs]. ``visible``
        are the estimates that rounds see. If it is None, rounds see the true ones. ``tasks`` are
        the profiling tasks that may be created, whose indices follow those of the arrivals.
        """
        self.cluster = cluster
        self.users_jobs = len(scenario.arrivals)
        specs = self.specs = [*(one.spec for one in scenario.arrivals), *tasks]
        workloads = workloads_of(scenario, specs)
        known = set(workloads)  # no job has any other workload
        records = scenario.profiles if visible is None else visible
        profiles = [e for e in records if e.workload in known]
        self.names = Names(
            gpu_types=tuple(scenario.gpu_types),
            workloads=workloads,
            plans=plans_of(profiles, specs),
        )
        self._plan_kinds = plan_kinds_of(profiles, self.names.plans)
        self._nodes = nodes_of(scenario, self.names)
        self._tenants, self._quotas = tenants_of(scenario), quotas_of(scenario, self.names)
        self._reservations = reservations_of(scenario, self.names, specs, self._nodes)
        self._avoids = avoids_of(specs, self._nodes)
        self._allowed = types_of(specs, [kind.name for kind in scenario.gpu_types])
        labels = {node.name: node.labels for node in scenario.nodes}
        self._selectors, self._unmatched, selected = selectors_of(
            specs, [labels[name] for name in self._nodes.name]
        )
        arrival_s = np.zeros(len(specs))  # of tasks, until they are created
        arrival_s[: self.users_jobs] = [one.arrival_s for one in scenario.arrivals]
        restarts_s = np.append(restart_s, np.zeros(len(tasks)))
        self.jobs = StoredJobs(specs, self.names, arrival_s, restarts_s, selected)
        self.gpus = HeldGpus(self._nodes)
        self.estimates = VisibleEstimates(profiles, self.names, self._nodes)
        self._segments: ScheduleSegments = NO_SEGMENTS  # by indices into the arrivals
        self._start_rows, self._start_nodes = NO_PLANNED_STARTS, NO_PLANNED_NODES
        self._prices: Prices = NO_PRICES
        self._meter: UseMeter | None = None  # counts only if rounds need it
        self._use_half_life_s = 0.0
        self.rounds = 0  # rounds that were decided or refused
        self._shown = np.zeros(0, dtype=np.int64)  # the jobs of the last snapshot

    def count_use(self, half_life_s: float) -> None:
        """Let snapshots have the use of tenants from now on, which decays by ``half_life_s``.

        No job may have GPUs yet.
        """
        self._use_half_life_s, self._meter = half_life_s, UseMeter(half_life_s)

    def is_task(self, job: int) -> bool:
        """Return whether the job is a profiling task, and not one of the scenario's."""
        return job >= self.users_jobs

    def live_jobs(self) -> int:
        """Return how many of the scenario's jobs have arrived and not ended."""
        return self.jobs.live_below(self.users_jobs)

    def is_unestimated(self, job: int) -> bool:
        """Return whether the job's workload has no estimates."""
        return not self.estimates.are_known[self.jobs.workload[job]]

    @property
    def schedulable(self) -> Bools:
        """Return which nodes can be used, bool[nodes]."""
        return self._nodes.schedulable

    @property
    def node_names(self) -> tuple[str, ...]:
        """Return the names of the nodes in the order of their indices."""
        return self._nodes.name

    # reports of the world

    def arrive(self, job: int, now_s: float) -> None:
        """Record the arrival of a job, so that rounds see it from now on."""
        if self.is_task(job):
            self.jobs.submit_s[job] = EPOCH_S + now_s
        if not self.jobs.arrive(job, now_s):
            self._end(job, JobState.REJECTED, now_s)

    def finish(self, job: int, now_s: float) -> None:
        """Record the end of a job. It has succeeded if it has trained all of its iterations."""
        is_done = self.jobs.has_trained(job)
        self._end(job, JobState.SUCCEEDED if is_done else JobState.CANCELLED, now_s)

    def time_out(self, job: int, now_s: float) -> None:
        """Record that a job has held GPUs for its longest run time, which ends it."""
        self._end(job, JobState.FAILED, now_s)

    def lose(self, job: int, now_s: float) -> None:
        """Record that a job has lost its GPUs, and queue it again."""
        self._release(job, now_s)
        self.jobs.opportunistic[job] = False
        self.jobs.queue(job, now_s)

    def measure(self, job: int, iter_time_s: float) -> None:
        """Record the iteration time of a job on its Cell and shape. It is inf if it does not run."""
        workload, nodes = int(self.jobs.workload[job]), self.gpus.gangs[job].nodes
        self.estimates.measure(workload, self.jobs.cell(job), nodes, iter_time_s)

    def set_schedulable(self, node: int, schedulable: bool) -> None:
        """Record that a node has gone away or come back."""
        now = np.array(self._nodes.schedulable)
        now[node] = schedulable
        self._nodes = replace(self._nodes, schedulable=now)

    # the input and the outcome of a round

    def snapshot(self, now_s: float) -> Snapshot:
        """Return the snapshot that a round sees ``now_s`` seconds after the world began."""
        self._shown = live = np.array(self.jobs.live, dtype=np.int64)
        local = np.full(len(self.specs), -1, dtype=np.int64)
        local[live] = np.arange(len(live))
        return Snapshot(
            cluster=self.cluster,
            epoch=self.rounds + 1,
            round_number=self.rounds + 1,
            now_s=EPOCH_S + now_s,
            gpu_types=self.names.gpu_types,
            nodes=self._nodes,
            workloads=self.names.workloads,
            plans=self.names.plans,
            estimates=self.estimates.table,
            jobs=self.jobs.table(live, self.estimates.are_known, now_s),
            allocations=self.gpus.table(local, self.jobs.generation),
            plan_kinds=self._plan_kinds,
            tenants=self._tenants,
            quotas=self._quotas,
            avoided_nodes=renumber_jobs(self._avoids, local),
            allowed_gpu_types=renumber_jobs(self._allowed, local),
            selectors=self._selectors,
            unmatched_nodes=self._unmatched,
            reservations=self._reservations.table,
            reserved_nodes=self._reservations.nodes,
            entitlements=renumber_jobs(self._reservations.entitlements, local),
            schedule_segments=renumber_jobs(self._segments, local),
            **self._planned_starts(local),
            dependencies=self.jobs.dependencies(local),
            decayed_use=self._uses(now_s),
            use_half_life_s=self._use_half_life_s,
            prices=self._prices,
        )

    def commit(
        self,
        decisions: Sequence[Decision],
        now_s: float,
        segments: ScheduleSegments = NO_SEGMENTS,
        prices: Mapping[str, float] = MappingProxyType({}),
        plan: StartPlan | None = None,
    ) -> list[AllocationChange]:
        """Carry out the decisions on the last snapshot, and return the changes that they made.

        Raises:
            InvariantBroken: a GPU would be held twice, or a job would run on a node that is away.
        """
        self.rounds += 1
        self._prices = Prices.after_round(prices)
        self._mark(decisions)
        stay = (DecisionKind.KEEP, DecisionKind.WAIT)
        changes = [self._change(d) for d in decisions if d.kind not in stay]
        self._segments = self._promised(segments)
        self._plan_starts(plan)
        for change in changes:  # release all GPUs before any are taken
            if change.job in self.gpus.gangs:
                self._release(change.job, now_s)
        for change in changes:
            if change.kind is DecisionKind.REJECT:
                self._end(change.job, JobState.REJECTED, now_s)
            elif change.gang is None:
                self.jobs.queue(change.job, now_s)
            else:
                name = self.specs[change.job].name
                self.gpus.take(change.job, change.cell, change.gang, self._nodes, name)
                self.jobs.start(change.job, change.cell, change.needs, now_s)
        waits = self.jobs.state[self._start_rows.job] == STATE_CODE[JobState.QUEUED]
        self._start_rows, self._start_nodes = keep_starts(
            self._start_rows, self._start_nodes, waits
        )
        return changes

    def pass_round(self) -> None:
        """Count a round that changes nothing or was refused."""
        self.rounds += 1

    def _promised(self, segments: ScheduleSegments) -> ScheduleSegments:
        """Return the segments of admitted jobs, grouped by job, with indices into the arrivals."""
        if not len(segments):
            return NO_SEGMENTS
        job = self._shown[segments.job]
        rows = np.flatnonzero(self.jobs.admitted[job])
        rows = rows[np.argsort(job[rows], kind="stable")]
        return replace(segments.at(rows), job=job[rows])

    def _plan_starts(self, plan: StartPlan | None) -> None:
        """Record what the round has planned and promised for the jobs that wait.

        Rows are in order of jobs and nodes.
        """
        if plan is None:
            return
        order = np.argsort(plan.starts.job, kind="stable")
        starts, position = plan.starts.at(order), np.argsort(order)
        nodes = replace(plan.nodes, start=position[plan.nodes.start])
        self._start_rows = replace(starts, job=self._shown[starts.job])
        self._start_nodes = nodes.at(np.lexsort((nodes.node, nodes.start)))
        is_new = np.isinf(self.jobs.first_start_by_s[self._shown])
        is_new[[job for job, cause in plan.moves.items() if cause == MOVED_BY_PRIORITY]] = True
        self.jobs.start_by_s[self._shown] = plan.start_by_s
        self.jobs.first_start_by_s[self._shown[is_new]] = plan.start_by_s[is_new]

    def _planned_starts(self, local: Ints) -> dict[str, Any]:
        """Return the planned starts of live jobs, as a snapshot has them."""
        live = local[self._start_rows.job] >= 0
        starts, nodes = keep_starts(self._start_rows, self._start_nodes, live)
        return {
            "planned_starts": replace(starts, job=local[starts.job]),
            "planned_nodes": nodes,
        }

    def _mark(self, decisions: Sequence[Decision]) -> None:
        """Record which jobs have promised deadlines, and which jobs run opportunistically."""
        jobs, job = self.jobs, self._shown[np.array([d.job for d in decisions], dtype=np.int64)]
        jobs.admitted[job] = [d.admitted and d.kind is not DecisionKind.REJECT for d in decisions]
        jobs.promised[job] |= jobs.admitted[job]
        jobs.opportunistic[job] = [d.opportunistic and d.gang is not None for d in decisions]

    def _change(self, decision: Decision) -> AllocationChange:
        """Return what a decision changes. A job that stays on its Cell keeps what it was given."""
        jobs, job, cell = self.jobs, int(self._shown[decision.job]), decision.cell
        needs = self.estimates.needs(int(jobs.workload[job]), cell)
        if job in self.gpus.gangs and jobs.cell(job) == cell:
            needs = jobs.host_needs(job)
        return AllocationChange(
            job=job,
            kind=decision.kind,
            cell=cell,
            gang=decision.gang if decision.kind in CHANGES_GPUS else None,
            needs=needs,
        )

    def _uses(self, now_s: float) -> DecayedUse:
        if self._meter is None:
            return NO_DECAYED_USE
        return self._meter.read(EPOCH_S + now_s, map(self.jobs.stint, self.gpus.gangs))

    def _release(self, job: int, now_s: float) -> None:
        if self._meter is not None:
            self._meter.add(self.jobs.stint(job), EPOCH_S + now_s)
        self.gpus.release(job)
        self.jobs.stop(job, now_s)

    def _end(self, job: int, state: JobState, now_s: float) -> None:
        """End a job, and reject those that can no longer start because of that."""
        if job in self.gpus.gangs:
            self._release(job, now_s)
        for other in self.jobs.end(job, state, now_s):
            if self.jobs.is_queued(other):  # it has not ended meanwhile because of another one
                self._end(other, JobState.REJECTED, now_s)
