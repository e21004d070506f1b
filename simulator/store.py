"""The service's store without a database: the state of one cluster and its rounds."""

from __future__ import annotations

import math
from bisect import bisect_left, insort
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, fields, replace
from typing import TypeVar

import numpy as np
from numpy.typing import ArrayLike

from tessera.formulation.decayed_use import NO_USES, Stint, UseMeter, Uses
from tessera.formulation.decisions import CHANGES_GPUS, Decision, DecisionKind
from tessera.formulation.demand import NOT_STATED
from tessera.formulation.given_demand import demands_of_cells
from tessera.formulation.hierarchy import lines_of_tenants
from tessera.formulation.lifecycle import JobState
from tessera.formulation.permissions import AllowedTypes
from tessera.formulation.placement import Gang
from tessera.formulation.records.estimates import EstimateRecord
from tessera.formulation.records.jobs import JobSpec
from tessera.formulation.reserved import Entitlements, Reservations, ReservedNodes
from tessera.formulation.snapshot import (
    NO_LEGS,
    STATE_CODE,
    WITHOUT_CELL,
    Allocations,
    Avoids,
    Estimates,
    Jobs,
    Legs,
    Nodes,
    PlanKinds,
    Prices,
    Quotas,
    Snapshot,
    Tenants,
)
from tessera.formulation.tables import Bools, Floats, Ints, array_columns
from tessera.formulation.values import (
    NO_CELL,
    PROFILING,
    Cell,
    CellKey,
    EstimateSource,
    Hold,
    Workload,
)
from tessera.simulator.measured_times import find_shapes, with_measured_time
from tessera.simulator.permissions import avoids_of, selectors_of, types_of
from tessera.simulator.scenario import Scenario
from tessera.simulator.truth import estimates_table
from tessera.simulator.waiting import WaitingJobs, number_limited_arrays

EPOCH_S = 1_500_000_000.0
"""The time at which every world begins, in seconds since 1970: a whole number of rounds."""


class InvariantBroken(AssertionError):
    """An error for a world that contradicts itself, because of a defect of the simulator or a round."""


@dataclass(frozen=True, slots=True, kw_only=True)
class AllocationChange:
    """A change that a round made to a job's GPUs. If ``gang`` is None, the job no longer has GPUs."""

    job: int  # index into the scenario's arrivals
    kind: DecisionKind
    cell: CellKey = NO_CELL
    gang: Gang | None = None
    needs: tuple[int, int] = (0, 0)
    """The CPU cores and the bytes of host memory that the job is given with ``cell``."""


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
        self.specs = [*(one.spec for one in scenario.arrivals), *tasks]
        self.gpu_types = tuple(scenario.gpu_types)
        self.workloads = _workloads(scenario, tasks)
        known = set(self.workloads)  # no job has any other workload
        visible_records = scenario.profiles if visible is None else visible
        profiles = [e for e in visible_records if e.workload in known]
        self.plans = tuple(
            sorted({"", *(e.cell.plan for e in profiles), *_named_plans(self.specs)})
        )
        self._plan_kinds = _plan_kinds(profiles, self.plans)
        self._nodes = _nodes(scenario)
        self.estimates = estimates_table(
            profiles, self.gpu_types, self._nodes, self.workloads, self.plans
        )
        self._demands = demands_of_cells(self.estimates)  # measuring a time changes none
        self._estimated = np.zeros(len(self.workloads), dtype=np.bool_)
        self._estimated[self.estimates.workload] = True
        self._hidden = self.estimates.at(np.zeros(0, dtype=np.int64))  # until they are profiled
        self._first_gpu = np.append(0, np.cumsum(self._nodes.gpus))
        self._node_of = np.repeat(np.arange(len(self._nodes)), self._nodes.gpus)  # of each GPU
        self.owner = np.full(int(self._first_gpu[-1]), -1, dtype=np.int64)
        self._set_up_jobs(scenario, np.append(restart_s, np.zeros(len(tasks))))
        self._waits = WaitingJobs(self.specs)
        self.unmet = self._waits.unmet
        self.array, self.array_limit = number_limited_arrays(self.specs)
        names = [kind.name for kind in self.gpu_types]
        self._avoids = avoids_of(self.specs, self._nodes)
        self._allowed = types_of(self.specs, names)
        labels = {node.name: node.labels for node in scenario.nodes}
        self._selectors, self._unmatched, of_jobs = selectors_of(
            self.specs, [labels[name] for name in self._nodes.name]
        )
        self._stated |= of_jobs
        self._tenants, self._quotas = self._set_up_tenants(scenario)
        self._reservations = _reservations(scenario, self.specs, self._nodes)
        self.gangs: dict[int, Gang] = {}
        # job -> node and index of each GPU that it holds
        self._gpus: dict[int, tuple[Ints, Ints]] = {}
        self._legs: Legs = NO_LEGS  # by indices into the arrivals
        self._prices: dict[str, float] = {}
        self._meter: UseMeter | None = None  # counts only if rounds need it
        self._use_half_life_s = 0.0
        self.rounds = 0  # rounds that were decided or refused
        self._shown = np.zeros(0, dtype=np.int64)  # the jobs of the last snapshot

    def count_use(self, half_life_s: float) -> None:
        """Let snapshots have the use of tenants from now on, which decays by ``half_life_s``.

        No job may have GPUs yet.
        """
        self._use_half_life_s, self._meter = half_life_s, UseMeter(half_life_s)

    # reports of the world

    def arrive(self, job: int, now_s: float) -> None:
        """Record the arrival of a job, so that rounds see it from now on."""
        self.state[job] = _QUEUED
        self.queued_s[job] = EPOCH_S + now_s
        if self.is_task(job):
            self.submit_s[job] = EPOCH_S + now_s
        insort(self.live, job)
        if self._waits.is_broken(job):
            self._end(job, JobState.REJECTED, now_s)

    def finish(self, job: int, now_s: float) -> None:
        """Record the end of a job. It has succeeded if it has trained all of its iterations."""
        is_done = self.done[job] >= self.iterations[job]
        self._end(job, JobState.SUCCEEDED if is_done else JobState.CANCELLED, now_s)

    def lose(self, job: int, now_s: float) -> None:
        """Record that a job has lost its GPUs, and queue it again."""
        self._release(job, now_s)
        self.opportunistic[job] = False
        self._queue(job, now_s)

    def hide_estimates(self) -> None:
        """Hide the estimates of all jobs from rounds, except for those of profiling tasks."""
        tasks = np.array([w.model == PROFILING for w in self.workloads], dtype=np.bool_)
        shown = tasks[self.estimates.workload]
        self._hidden, self.estimates = self.estimates.at(~shown), self.estimates.at(shown)

    def show_estimates(self, covers: Callable[[Workload, str], bool]) -> None:
        """Let rounds see the hidden estimates of the workloads and GPU types that were profiled."""
        h = self._hidden
        pairs = set(zip(h.workload.tolist(), h.gpu_type.tolist(), strict=True))
        now = {(w, t) for w, t in pairs if covers(self.workloads[w], self.gpu_types[t].name)}
        shown = np.array(
            [pair in now for pair in zip(h.workload.tolist(), h.gpu_type.tolist(), strict=True)],
            dtype=np.bool_,
        )
        self._hidden = h.at(~shown)
        self._add_estimates({f.name: getattr(h, f.name)[shown] for f in fields(h)})

    def is_task(self, job: int) -> bool:
        """Return whether the job is a profiling task, and not one of the scenario's."""
        return job >= self.users_jobs

    def live_jobs(self) -> int:
        """Return how many of the scenario's jobs have arrived and not ended."""
        return bisect_left(self.live, self.users_jobs)

    def time_out(self, job: int, now_s: float) -> None:
        """Record that a job has held GPUs for its longest run time, which ends it."""
        self._end(job, JobState.FAILED, now_s)

    def run_left_s(self, job: int) -> float:
        """Return the seconds for which a job may hold GPUs after the runs that have ended, or inf."""
        return max(0.0, self.specs[job].longest_run_s - float(self.run_s[job]))

    def does_not_run(self, job: int) -> None:
        """Record that the Cell of a job does not run on its shape, contrary to its estimate."""
        self.measure(job, np.inf)

    def is_unestimated(self, job: int) -> bool:
        """Return whether the job's workload has no estimates."""
        return not self._estimated[self.workload[job]]

    def measure(self, job: int, iter_time_s: float) -> None:
        """Record the iteration time of a job on its Cell and shape. It is inf if it does not run."""
        workload, cell = int(self.workload[job]), self._current(job)
        nodes = self.gangs[job].nodes
        e = self.estimates
        if (find_shapes(e, workload, cell) & (e.nodes == nodes)).any():
            self.estimates = with_measured_time(e, workload, cell, nodes, iter_time_s)
            return
        tried = {"workload": workload, **cell._asdict(), "nodes": nodes}
        known = {"iter_time_s": iter_time_s, "source": int(EstimateSource.MEASURED)}
        unknown = {"sd": np.nan, "complete": False, "cpus": 0, "host_bytes": 0}
        self._add_estimates(tried | known | unknown)
        self._estimated[workload] = True

    def _add_estimates(self, rows: Mapping[str, ArrayLike]) -> None:
        """Add rows, given as columns by name, to the estimates that rounds see."""
        e, keys = self.estimates, ("workload", *Estimates.CELL, "nodes")
        longer = {f.name: np.append(getattr(e, f.name), rows[f.name]) for f in fields(e)}
        order = np.lexsort([longer[name] for name in reversed(keys)])  # the last key counts first
        self.estimates = Estimates(**{name: column[order] for name, column in longer.items()})

    def set_schedulable(self, node: int, schedulable: bool) -> None:
        """Record that a node has gone away or come back."""
        now = np.array(self._nodes.schedulable)
        now[node] = schedulable
        self._nodes = replace(self._nodes, schedulable=now)

    @property
    def schedulable(self) -> Bools:
        """Return which nodes can be used, bool[nodes]."""
        return self._nodes.schedulable

    @property
    def node_names(self) -> tuple[str, ...]:
        """Return the names of the nodes in the order of their indices."""
        return self._nodes.name

    def cell(self, key: CellKey) -> Cell:
        """Return the Cell of a key, with names in place of indices."""
        return key.named(self.gpu_types, self.plans)

    # the input and the outcome of a round

    def snapshot(self, now_s: float) -> Snapshot:
        """Return the snapshot that a round sees ``now_s`` seconds after the world began."""
        self._shown = live = np.array(self.live, dtype=np.int64)
        local = np.full(len(self.specs), -1, dtype=np.int64)
        local[live] = np.arange(len(live))
        return Snapshot(
            cluster=self.cluster,
            epoch=self.rounds + 1,
            round_number=self.rounds + 1,
            now_s=EPOCH_S + now_s,
            gpu_types=self.gpu_types,
            nodes=self._nodes,
            workloads=self.workloads,
            plans=self.plans,
            estimates=self.estimates,
            jobs=self._jobs(live, now_s),
            allocations=self._allocations(local),
            plan_kinds=self._plan_kinds,
            tenants=self._tenants,
            quotas=self._quotas,
            avoids=renumber_jobs(self._avoids, local),
            allowed_types=renumber_jobs(self._allowed, local),
            selectors=self._selectors,
            unmatched_nodes=self._unmatched,
            reservations=self._reservations.table,
            reserved_nodes=self._reservations.nodes,
            entitlements=renumber_jobs(self._reservations.entitlements, local),
            legs=renumber_jobs(self._legs, local),
            dependencies=self._waits.table(local),
            uses=self._uses(now_s),
            use_half_life_s=self._use_half_life_s,
            prices=Prices(
                name=tuple(sorted(self._prices)),
                price=np.array([self._prices[name] for name in sorted(self._prices)]),
            ),
        )

    def commit(
        self,
        decisions: Sequence[Decision],
        now_s: float,
        legs: Legs = NO_LEGS,
        prices: dict[str, float] | None = None,
    ) -> list[AllocationChange]:
        """Carry out the decisions on the last snapshot, and return the changes that they made.

        Raises:
            InvariantBroken: a GPU would be held twice, or a job would run on a node that is away.
        """
        self.rounds += 1
        self._prices = {
            name: max(price, 0.0) for name, price in (prices or {}).items() if math.isfinite(price)
        }
        self._mark(decisions)
        stay = (DecisionKind.KEEP, DecisionKind.WAIT)
        changes = [self._change(d) for d in decisions if d.kind not in stay]
        self._legs = self._promised(legs)
        for change in changes:  # release all GPUs before any are taken
            if change.job in self.gangs:
                self._release(change.job, now_s)
        for change in changes:
            if change.kind is DecisionKind.REJECT:
                self._end(change.job, JobState.REJECTED, now_s)
            elif change.gang is None:
                self._queue(change.job, now_s)
            else:
                self._take(change, change.gang, now_s)
        return changes

    def pass_round(self) -> None:
        """Count a round that changes nothing or was refused."""
        self.rounds += 1

    def _promised(self, legs: Legs) -> Legs:
        """Return the legs of admitted jobs, grouped by job, with indices into the arrivals."""
        if not len(legs):
            return NO_LEGS
        job = self._shown[legs.job]
        rows = np.flatnonzero(self.admitted[job])
        rows = rows[np.argsort(job[rows], kind="stable")]
        kept = {f.name: getattr(legs, f.name)[rows] for f in fields(legs)}
        return Legs(**kept | {"job": job[rows]})

    def _mark(self, decisions: Sequence[Decision]) -> None:
        """Record which jobs have promised deadlines, and which jobs run opportunistically."""
        job = self._shown[np.array([d.job for d in decisions], dtype=np.int64)]
        self.admitted[job] = [d.admitted and d.kind is not DecisionKind.REJECT for d in decisions]
        self.promised[job] |= self.admitted[job]
        self.opportunistic[job] = [d.opportunistic and d.gang is not None for d in decisions]

    def _change(self, decision: Decision) -> AllocationChange:
        kept = decision.gang if decision.kind in CHANGES_GPUS else None
        job, cell = int(self._shown[decision.job]), decision.cell
        needs = self._demands.get((int(self.workload[job]), cell), (0, 0))
        if job in self.gangs and self._current(job) == cell:
            needs = int(self.current_cpus[job]), int(self.current_host_bytes[job])
        return AllocationChange(job=job, kind=decision.kind, cell=cell, gang=kept, needs=needs)

    def _take(self, change: AllocationChange, gang: Gang, now_s: float) -> None:
        job = change.job
        nodes = np.repeat([n for n, _ in gang.members], [len(g) for _, g in gang.members])
        gpus = np.concatenate([np.array(g, dtype=np.int64) for _, g in gang.members])
        if (gpus < 0).any() or (gpus >= self._nodes.gpus[nodes]).any():
            raise InvariantBroken(f"{self.specs[job].name} was given GPUs that do not exist")
        where = self._first_gpu[nodes] + gpus
        if len(np.unique(where)) < len(where) or (self.owner[where] >= 0).any():
            raise InvariantBroken(f"{self.specs[job].name} was given a GPU that is already held")
        if not self._nodes.schedulable[nodes].all():
            raise InvariantBroken(f"{self.specs[job].name} was placed on a node that is away")
        if (
            len(where) != change.cell.gpus
            or (self._nodes.gpu_type[nodes] != change.cell.gpu_type).any()
        ):
            raise InvariantBroken(
                f"{self.specs[job].name} was given GPUs other than those of its Cell"
            )
        self.owner[where] = job
        self.gangs[job], self._gpus[job] = gang, (nodes, gpus)
        self.state[job] = _RUNNING
        self.began_s[job] = now_s
        self.generation[job] += 1
        self.version[job] += 1
        self._set_current(job, change.cell)
        self.current_cpus[job], self.current_host_bytes[job] = change.needs

    def _uses(self, now_s: float) -> Uses:
        if self._meter is None:
            return NO_USES
        return self._meter.read(EPOCH_S + now_s, map(self._stint, self.gangs))

    def _stint(self, job: int) -> Stint:
        """Return what a job holds."""
        return Stint(
            tenant=self.specs[job].tenant,
            gpu_type=int(self.current_type[job]),
            gpus=int(self.current_gpus[job]),
            cpus=max(0, int(self.current_cpus[job])),
            host_bytes=max(0, int(self.current_host_bytes[job])),
            began_s=EPOCH_S + float(self.began_s[job]),
        )

    def _release(self, job: int, now_s: float) -> None:
        if self._meter is not None:
            self._meter.add(self._stint(job), EPOCH_S + now_s)
        nodes, gpus = self._gpus.pop(job)
        del self.gangs[job]
        self.owner[self._first_gpu[nodes] + gpus] = -1
        self.service_gpu_s[job] += self.current_gpus[job] * (now_s - self.began_s[job])
        self.run_s[job] += now_s - self.began_s[job]
        self.began_s[job] = np.nan
        for column, value in WITHOUT_CELL.items():
            getattr(self, column)[job] = value

    def _current(self, job: int) -> CellKey:
        return CellKey._make(int(getattr(self, column)[job]) for column in Jobs.CELL)

    def _set_current(self, job: int, cell: CellKey) -> None:
        for column, value in zip(Jobs.CELL, cell, strict=True):
            getattr(self, column)[job] = value

    def _queue(self, job: int, now_s: float) -> None:
        self.state[job] = _QUEUED
        self.queued_s[job] = EPOCH_S + now_s
        self.version[job] += 1

    def _end(self, job: int, state: JobState, now_s: float) -> None:
        if job in self.gangs:
            self._release(job, now_s)
        self.state[job] = STATE_CODE[state]
        self.ended_s[job] = now_s
        self.live.remove(job)
        freed, broken = self._waits.end(job, succeeded=state is JobState.SUCCEEDED)
        self.queued_s[freed] = EPOCH_S + now_s
        for other in broken:
            if self.state[other] == _QUEUED:
                self._end(other, JobState.REJECTED, now_s)

    def _jobs(self, live: Ints, now_s: float) -> Jobs:
        began_s = self.began_s[live]
        holds = np.isfinite(began_s)
        held_s = np.where(holds, now_s - began_s, 0.0)
        return Jobs(
            name=tuple(self._names[live]),
            tenant=tuple(self._tenant_names[live]),
            iterations_left=np.maximum(self.iterations[live] - self.done[live], 0.0),
            service_gpu_s=self.service_gpu_s[live] + self.current_gpus[live] * held_s,
            since_s=np.where(holds, EPOCH_S + began_s, 0.0),
            run_left_s=np.maximum(self._longest_run_s[live] - self.run_s[live] - held_s, 0.0),
            unestimated=~self._estimated[self.workload[live]],
            **{name: getattr(self, name)[live] for name in _STORED_COLUMNS},
            **{name: column[live] for name, column in self._stated.items()},
        )

    def _allocations(self, local: Ints) -> Allocations:
        held = np.flatnonzero(self.owner >= 0)  # GPUs are ordered by node, then by index
        job, node = self.owner[held], self._node_of[held]
        return Allocations(
            job=local[job],
            node=node,
            gpu=held - self._first_gpu[node],
            hold=np.full(len(held), int(Hold.HELD), dtype=np.int64),
            generation=self.generation[job],
        )

    # the scenario's statements as columns

    def _type(self, name: str) -> int:
        names = [kind.name for kind in self.gpu_types]
        return names.index(name) if name in names else -1

    def _set_up_jobs(self, scenario: Scenario, restart_s: Floats) -> None:
        specs, count = self.specs, len(self.specs)
        work = {w: i for i, w in enumerate(self.workloads)}
        self._names = np.array([s.name for s in specs], dtype=object)
        self._tenant_names = np.array([s.tenant for s in specs], dtype=object)
        self.live: list[int] = []
        self.ended_s = np.full(count, np.inf)
        self.done = np.zeros(count)
        self.iterations = np.array([float(s.iterations) for s in specs])
        self.workload = np.array([work[s.workload] for s in specs], dtype=np.int64)
        self.requested_type = np.array(
            [self._type(s.requested_type) for s in specs], dtype=np.int64
        )
        self._stated = {
            name: np.array([getattr(s, name) for s in specs], dtype=dtype)
            for name, dtype in array_columns(Jobs).items()
            if name in _STATED_COLUMNS
        }
        plans = {digest: i for i, digest in enumerate(self.plans)}
        self._stated["stated_plan"] = np.array(
            [plans[s.stated_plan.digest] if s.stated_plan else -1 for s in specs], dtype=np.int64
        )
        self._stated["submitted_plan"] = np.array(
            [plans[plan] if (plan := s.submitted_plan_id) else -1 for s in specs], dtype=np.int64
        )
        arrival_s = np.zeros(count)  # of tasks, until they are created
        arrival_s[: self.users_jobs] = [one.arrival_s for one in scenario.arrivals]
        self.deadline_s = EPOCH_S + arrival_s + np.array([s.deadline_s for s in specs])
        self.submit_s = EPOCH_S + arrival_s
        self.queued_s = np.array(self.submit_s)
        self.restart_s = np.array(restart_s)
        self.began_s = np.full(count, np.nan)  # time at which it got its GPUs; NaN: it has none
        self.service_gpu_s = np.zeros(count)  # of the runs that have ended
        self.run_s = np.zeros(count)  # duration of the runs that have ended
        self._longest_run_s = np.array([s.longest_run_s for s in specs], dtype=np.float64)
        self.admitted = np.zeros(count, dtype=np.bool_)
        self.promised = np.zeros(count, dtype=np.bool_)  # its deadline was admitted at some time
        self.opportunistic = np.zeros(count, dtype=np.bool_)
        self.state = np.full(count, STATE_CODE[JobState.HELD], dtype=np.int64)  # not yet arrived
        self.version = np.ones(count, dtype=np.int64)
        self.generation = np.zeros(count, dtype=np.int64)
        self.current_type = np.full(count, -1, dtype=np.int64)
        self.current_gpus = np.zeros(count, dtype=np.int64)
        self.current_degree = np.zeros(count, dtype=np.int64)
        self.current_plan = np.zeros(count, dtype=np.int64)
        self.current_cpus = np.full(count, NOT_STATED, dtype=np.int64)
        self.current_host_bytes = np.full(count, NOT_STATED, dtype=np.int64)

    def _set_up_tenants(self, scenario: Scenario) -> tuple[Tenants, Quotas]:
        tenants = sorted(scenario.tenants, key=lambda t: t.name)
        quotas = [
            (i, self._type(kind), gpus)
            for i, t in enumerate(tenants)
            for kind, gpus in sorted(t.quotas.items(), key=lambda q: self._type(q[0]))
        ]
        rows = np.array(quotas, dtype=np.int64).reshape(-1, 3)
        return Tenants(
            name=tuple(t.name for t in tenants),
            weight=np.array([t.weight for t in tenants]),
            borrow_gpus=np.array([t.borrow_gpus for t in tenants], dtype=np.int64),
            lends=np.array([t.lends for t in tenants], dtype=np.bool_),
            parent=np.array(
                [
                    -1 if not t.parent else [o.name for o in tenants].index(t.parent)
                    for t in tenants
                ],
                dtype=np.int64,
            ),
        ), Quotas(tenant=rows[:, 0], gpu_type=rows[:, 1], gpus=rows[:, 2])


_OfJobs = TypeVar("_OfJobs", AllowedTypes, Avoids, Entitlements, Legs)

_QUEUED, _RUNNING = STATE_CODE[JobState.QUEUED], STATE_CODE[JobState.RUNNING]

_STORED_COLUMNS = (
    "version",
    "state",
    "workload",
    "iterations",
    "requested_type",
    "deadline_s",
    "admitted",
    "opportunistic",
    "submit_s",
    "queued_s",
    "restart_s",
    "generation",
    *Jobs.CELL,
    "current_cpus",
    "current_host_bytes",
    "unmet",
    "array",
    "array_limit",
)
"""The columns of a snapshot's jobs that are stored exactly as the snapshot shows them."""

_STATED_COLUMNS = {f.name for f in fields(JobSpec)} & array_columns(Jobs).keys() - {
    "workload",
    "stated_plan",
    "submitted_plan",
    *_STORED_COLUMNS,
}
"""The columns that users state. They never change."""


def _named_plans(specs: Iterable[JobSpec]) -> set[str]:
    """Return the ids of the plans that users state for jobs, or that jobs were submitted with."""
    return {
        plan
        for spec in specs
        for plan in (spec.stated_plan.digest if spec.stated_plan else "", spec.submitted_plan_id)
        if plan
    }


def _plan_kinds(profiles: Iterable[EstimateRecord], plans: Sequence[str]) -> PlanKinds:
    kinds = {e.cell.plan: e.plan_kind for e in profiles if e.plan_kind}
    return PlanKinds.from_rows(
        [{"plan": i, "kind": kinds[plan]} for i, plan in enumerate(plans) if plan in kinds]
    )


def _workloads(scenario: Scenario, tasks: Iterable[JobSpec]) -> tuple[Workload, ...]:
    workloads = {e.workload for e in scenario.profiles} | {task.workload for task in tasks}
    workloads |= {one.spec.workload for one in scenario.arrivals}
    return tuple(sorted(workloads, key=lambda w: (w.model, w.params, w.global_batch)))


def _nodes(scenario: Scenario) -> Nodes:
    types = {kind.name: i for i, kind in enumerate(scenario.gpu_types)}
    nodes = sorted(scenario.nodes, key=lambda n: n.name)
    return Nodes(
        name=tuple(n.name for n in nodes),
        rack=tuple(n.rack for n in nodes),
        gpu_type=np.array([types[n.gpu_type] for n in nodes], dtype=np.int64),
        gpus=np.array([n.gpus for n in nodes], dtype=np.int64),
        schedulable=np.ones(len(nodes), dtype=np.bool_),
        version=np.ones(len(nodes), dtype=np.int64),
        cpus=np.array([_stated(n.cpus) for n in nodes], dtype=np.int64),
        host_bytes=np.array([_stated(n.host_bytes) for n in nodes], dtype=np.int64),
    )


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class _ReservationTables:
    """The reservations of a scenario. ``entitlements`` has indices into its arrivals."""

    table: Reservations
    nodes: ReservedNodes
    entitlements: Entitlements


def _reservations(scenario: Scenario, specs: Sequence[JobSpec], nodes: Nodes) -> _ReservationTables:
    own = sorted(scenario.reservations, key=lambda one: (one.start_s, one.name))
    types = {"": -1} | {kind.name: i for i, kind in enumerate(scenario.gpu_types)}
    index = {name: i for i, name in enumerate(nodes.name)}
    named = [(r, index[name]) for r, one in enumerate(own) for name in one.nodes]
    lines = lines_of_tenants({t.name: t.parent for t in scenario.tenants})
    served = [
        (r, job)
        for r, one in enumerate(own)
        for job, spec in enumerate(specs)
        if one.serves(lines.get(spec.tenant, (spec.tenant,)), spec.labels)
    ]
    of_nodes, of_jobs = (np.array(rows, dtype=np.int64).reshape(-1, 2) for rows in (named, served))
    return _ReservationTables(
        table=Reservations(
            name=tuple(one.name for one in own),
            start_s=np.array([EPOCH_S + one.start_s for one in own], dtype=np.float64),
            end_s=np.array([EPOCH_S + one.end_s for one in own], dtype=np.float64),
            gpu_type=np.array([types[one.gpu_type] for one in own], dtype=np.int64),
            gpus=np.array([one.gpus for one in own], dtype=np.int64),
            maintenance=np.array([one.maintenance for one in own], dtype=np.bool_),
        ),
        nodes=ReservedNodes(reservation=of_nodes[:, 0], node=of_nodes[:, 1]),
        entitlements=Entitlements(reservation=of_jobs[:, 0], job=of_jobs[:, 1]),
    )


def _stated(capacity: int | None) -> int:
    return NOT_STATED if capacity is None else capacity


def renumber_jobs(table: _OfJobs, local: Ints) -> _OfJobs:
    """Return the rows of the jobs in a snapshot, with their indices in it.

    ``local`` is int64[jobs], the index of each job in the snapshot, or -1.
    """
    if not len(table):
        return table
    shown = local[table.job] >= 0
    rows = {f.name: getattr(table, f.name)[shown] for f in fields(table)}
    return replace(table, **rows | {"job": local[table.job[shown]]})
