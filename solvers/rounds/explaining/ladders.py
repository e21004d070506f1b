"""The steps that could help a job, as ladders from the least to the most effect.

Each function yields the ladders of one kind of change, or nothing if the kind cannot help.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Final

import numpy as np

from tessera.formulation.answer.explanations.changes import Change, ChangeKind
from tessera.formulation.base.resources import (
    HOST_RESOURCES,
    NOT_STATED,
    Demand,
    HostResource,
    amounts_of,
    name_amounts,
)
from tessera.formulation.base.tables import Ints
from tessera.formulation.job.lifecycle import ACTIVE, JobState
from tessera.formulation.round.node_room import smallest_demands
from tessera.formulation.round.policy import MODES_WITHOUT_PROMISES
from tessera.formulation.state.given_demand import demand_on, demands_of_cells
from tessera.formulation.state.hierarchy import lines_of_snapshot
from tessera.formulation.state.host_tables import Demands
from tessera.formulation.state.snapshot import STATES, Snapshot
from tessera.solvers.rounds.explaining.trials import Changes, Ladder
from tessera.solvers.rounds.options import RoundOptions
from tessera.solvers.rounds.plan import RoundOutcome

MAX_WEIGHT: Final = 1e6
"""The largest weight that a job may have."""

WEIGHT_STEP: Final = 1.02
"""The ratio of a weight to the next smaller one that is tried."""

DEADLINE_STEP: Final = 1.03
"""The ratio of a time to a deadline to the next smaller one that is tried."""

SHORTEST_TIME_S: Final = 60.0
LONGEST_TIME_S: Final = 3.2e8
"""The shortest and the longest time to a deadline that is tried, in seconds: a minute, ten years."""


MAX_NODES_ADDED: Final = 8
MAX_JOBS_ENDED: Final = 6


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Situation:
    """The facts that ladders are made from.

    ``rivals`` are jobs with GPUs after the round, first those that displaced the job.
    """

    snapshot: Snapshot
    options: RoundOptions
    job: int
    outcome: RoundOutcome
    rivals: Sequence[int] = ()

    @property
    def line(self) -> tuple[str, ...]:
        """Return the job's tenant and all above it."""
        tenant = self.snapshot.jobs.tenant[self.job]
        return lines_of_snapshot(self.snapshot).get(tenant, (tenant,))

    def own_estimates(self) -> Ints:
        """Return the rows of the job's estimates that run, int64[any]."""
        e = self.snapshot.estimates
        workload = self.snapshot.jobs.workload[self.job]
        return np.flatnonzero((e.workload == workload) & np.isfinite(e.iter_time_s))

    def gpu_counts(self) -> list[int]:
        """Return the GPU counts that the job could run on, rising.

        Without estimates, a job runs on its request only.
        """
        counts = set(self.snapshot.estimates.gpus[self.own_estimates()].tolist())
        return sorted(counts) or [int(self.value_of("requested_gpus"))]

    def value_of(self, column: str) -> float:
        """Return the job's value in a column of the table of jobs."""
        return float(getattr(self.snapshot.jobs, column)[self.job])


Ladders = Iterator[Ladder]


def _one(
    kind: ChangeKind,
    amount: float = 0.0,
    before: float = math.nan,
    subject: str = "",
    tenant: str | None = None,
) -> Changes:
    return (Change(kind=kind, amount=amount, before=before, subject=subject, tenant=tenant),)


def round_up(value: float, digits: int = 3) -> float:
    """Return a positive value rounded up to a number of significant digits."""
    step = 10.0 ** (math.floor(math.log10(value)) - digits + 1)
    return float(f"{math.ceil(value / step - 1e-9) * step:.{digits}g}")


def _weights(s: Situation) -> Ladders:
    now = s.value_of("weight")
    begin = now if now > 0 else 0.01
    count = int(math.log(MAX_WEIGHT / begin) / math.log(WEIGHT_STEP)) if begin < MAX_WEIGHT else 0
    values = [round_up(begin * WEIGHT_STEP**k) for k in range(1, count + 1)]
    kept = sorted({min(value, MAX_WEIGHT) for value in values if value > now})
    yield [_one(ChangeKind.WEIGHT, value, now) for value in kept]


def _queues(s: Situation) -> Ladders:
    now = int(s.value_of("priority"))
    queues = [_one(ChangeKind.PRIORITY, queue, now) for queue in range(now - 1, 0, -1)]
    yield [changes + _some_weight(s) for changes in queues]


def _some_weight(s: Situation) -> Changes:
    """Return a weight of 1 for a job of weight 0, without which nothing helps it."""
    now = s.value_of("weight")
    return () if now > 0 else _one(ChangeKind.WEIGHT, 1, now)


def _deadlines(s: Situation) -> Ladders:
    due_s, now_s = s.value_of("deadline_s"), s.snapshot.now_s
    if not math.isfinite(due_s) or s.options.deadline_mode in MODES_WITHOUT_PROMISES:
        return
    left_s = max(due_s - now_s, SHORTEST_TIME_S)
    count = max(1, math.ceil(math.log(LONGEST_TIME_S / left_s) / math.log(DEADLINE_STEP)))
    times = (math.ceil(now_s + left_s * DEADLINE_STEP**k) for k in range(1, count + 1))
    later = sorted({float(time_s) for time_s in times if time_s > due_s})
    yield [_one(ChangeKind.DEADLINE, time_s, due_s) for time_s in (*later, math.inf)]


def _no_pin(s: Situation) -> Ladders:
    if s.value_of("pinned_gpu_type") and s.value_of("requested_gpu_type") >= 0:
        yield [_one(ChangeKind.ANY_TYPE)]


def _any_node(s: Situation) -> Ladders:
    if (s.snapshot.avoided_nodes.job == s.job).any():
        yield [_one(ChangeKind.ANY_NODE)]


def _any_labels(s: Situation) -> Ladders:
    selector = int(s.value_of("required_selector"))
    if selector < 0 or not s.snapshot.selectors.text[selector]:
        return
    yield [_one(ChangeKind.ANY_LABELS)]
    for other in (*_any_node(s), *_more_types(s)):
        yield [_one(ChangeKind.ANY_LABELS) + changes for changes in other]


def _more_types(s: Situation) -> Ladders:
    """Yield each further GPU type on which the job has estimates, with those that it may run on."""
    allowed, names = s.snapshot.allowed_gpu_types, [kind.name for kind in s.snapshot.gpu_types]
    now = allowed.gpu_type[allowed.job == s.job].tolist()
    own = set(s.snapshot.estimates.gpu_type[s.own_estimates()].tolist())
    for kind in sorted(own - set(now)) if now else ():
        yield [_one(ChangeKind.ALLOW_TYPE, subject=",".join(names[t] for t in (*now, kind)))]


def _fewer_gpus(s: Situation) -> Ladders:
    least = int(s.value_of("min_gpus"))
    yield [_one(ChangeKind.MIN_GPUS, n, least) for n in s.gpu_counts()[::-1] if n < least]


def _more_gpus(s: Situation) -> Ladders:
    most = int(s.value_of("max_gpus"))
    if most:
        yield [_one(ChangeKind.MAX_GPUS, n, most) for n in s.gpu_counts() if n > most]


def _requests(s: Situation) -> Ladders:
    now = int(s.value_of("requested_gpus"))
    yield [_one(ChangeKind.REQUEST, n, now) for n in s.gpu_counts()[::-1] if n < now]


def _stay(s: Situation) -> Ladders:
    if not s.value_of("pinned"):
        yield [_one(ChangeKind.STAY)]


def _release(s: Situation) -> Ladders:
    if STATES[s.snapshot.jobs.state[s.job]] in (JobState.HELD, JobState.HOLDING):
        yield [_one(ChangeKind.RELEASE)]


def _retry(s: Situation) -> Ladders:
    if s.value_of("retry_s") > s.snapshot.now_s:
        yield [_one(ChangeKind.RETRY)]


def _request_types(s: Situation) -> Ladders:
    if s.value_of("unestimated") and s.value_of("requested_gpu_type") < 0:
        for kind in np.flatnonzero(_whole_gpus(s.snapshot)).tolist():
            yield [_one(ChangeKind.REQUEST_TYPE, subject=s.snapshot.gpu_types[kind].name)]


def _best_effort(s: Situation) -> Ladders:
    if s.value_of("guaranteed"):
        yield [_one(ChangeKind.BEST_EFFORT)]


def _any_plan(s: Situation) -> Ladders:
    if s.value_of("plan") >= 0:
        yield [_one(ChangeKind.ANY_PLAN)]


def _quotas(s: Situation) -> Ladders:
    snapshot, whole = s.snapshot, int(s.snapshot.nodes.gpus.sum())
    for tenant, kind, gpus in zip(
        *(getattr(snapshot.quotas, name).tolist() for name in ("tenant", "gpu_type", "gpus")),
        strict=True,
    ):
        name = snapshot.tenants.name[tenant]
        full = name if kind < 0 else f"{name}/{snapshot.gpu_types[kind].name}"
        if name in s.line:
            values = range(gpus + 1, max(gpus + 1, whole) + 1)
            yield [_one(ChangeKind.QUOTA, n, gpus, full, name) for n in values]


def _borrowing(s: Situation) -> Ladders:
    tenants, whole = s.snapshot.tenants, int(s.snapshot.nodes.gpus.sum())
    for name, now in zip(tenants.name, tenants.borrow_gpus.tolist(), strict=True):
        if name in s.line and now >= 0:
            values = range(now + 1, max(now + 1, whole) + 1)
            yield [_one(ChangeKind.BORROW, n, now, name, name) for n in values]


def _lending(s: Situation) -> Ladders:
    tenants = s.snapshot.tenants
    for name, keeps in zip(tenants.name, tenants.keeps_idle_quota.tolist(), strict=True):
        if name not in s.line and keeps:
            yield [_one(ChangeKind.LEND, 0, subject=name, tenant=name)]


def _tenant_weights(s: Situation) -> Ladders:
    tenants = s.snapshot.tenants
    for name, weight in zip(tenants.name, tenants.weight.tolist(), strict=True):
        if name in s.line and weight == 0:
            yield [_one(ChangeKind.TENANT_WEIGHT, 1, 0, name, name) + _some_weight(s)]


def _undraining(s: Situation) -> Ladders:
    """Yield the nodes that are away, of the types that the job may run on: all of each type at most."""
    nodes, e = s.snapshot.nodes, s.snapshot.estimates
    kinds = set(e.gpu_type[s.own_estimates()].tolist())
    for kind in sorted(kinds):
        away = np.flatnonzero(~nodes.schedulable & (nodes.gpu_type == kind))
        away = away[np.argsort(-nodes.gpus[away], kind="stable")]
        names = [nodes.name[n] for n in away.tolist()]
        yield [
            tuple(Change(kind=ChangeKind.UNDRAIN, subject=name) for name in names[:count])
            for count in range(1, len(names) + 1)
        ]


def _new_gpus(s: Situation) -> Ladders:
    nodes, e = s.snapshot.nodes, s.snapshot.estimates
    for kind in sorted(set(e.gpu_type[s.own_estimates()].tolist())):
        own = nodes.gpus[nodes.gpu_type == kind]
        size = int(own.max(initial=0)) or 8
        counts = [*range(1, size + 1), *(k * size for k in range(2, MAX_NODES_ADDED + 1))]
        name = s.snapshot.gpu_types[kind].name
        yield [
            (Change(kind=ChangeKind.ADD_GPUS, subject=name, amount=n, size=size),) for n in counts
        ]


def _more_of(resource: HostResource) -> Callable[[Situation], Ladders]:
    """Return the ladders whose first change adds some of a host resource."""

    def climb(s: Situation) -> Ladders:
        for changes in _more_room(s):
            if changes[0].kind == resource.change:
                yield [changes]

    return climb


def _more_room(s: Situation) -> Iterator[Changes]:
    """Yield the host resources that the job's smallest Cell of a type lacks on free GPUs.

    The nodes with most free GPUs have it. What they lack of all resources is one step.
    """
    nodes = s.snapshot.nodes
    smallest = smallest_demands(s.outcome.problem.cells, int(s.value_of("workload")))
    if not any(any(amounts_of(demand)) for demand in smallest.values()):
        return
    left = _left_on_nodes(s)
    for kind, demand in smallest.items():
        own = np.flatnonzero(nodes.schedulable & (nodes.gpu_type == kind))
        most = np.minimum(left.gpus[own], demand.gpus)
        wanted, lacks = demand.gpus, list[Change]()
        for at in np.lexsort((*(-amount[own] for amount in amounts_of(left)), -most)).tolist():
            node, gpus = int(own[at]), min(wanted, int(most[at]))
            if gpus > 0:
                lacks += _lacks(s.snapshot, left, node, demand.on_node(gpus))
                wanted -= gpus
        if lacks and not wanted:
            yield tuple(sorted(lacks, key=lambda change: change.kind))


def _lacks(snapshot: Snapshot, left: Demands, node: int, share: Demand) -> Iterator[Change]:
    """Yield the changes with which a node has room for its share of a job."""
    nodes = snapshot.nodes
    for resource, needs, has, unused in zip(
        HOST_RESOURCES, amounts_of(share), amounts_of(nodes), amounts_of(left), strict=True
    ):
        now, more, unit = int(has[node]), needs - int(unused[node]), resource.unit
        if now != NOT_STATED and more > 0:
            enough, kind = -(-(now + more) // unit) * unit, ChangeKind(resource.change)
            yield Change(kind=kind, subject=nodes.name[node], amount=enough, before=now)


def _left_on_nodes(s: Situation) -> Demands:
    """Return what each node has left after the round. It means nothing where a node states nothing."""
    nodes, demands = s.snapshot.nodes, demands_of_cells(s.snapshot.estimates)
    gpus, *host = (np.array(has) for has in (nodes.gpus, *amounts_of(nodes)))
    for decision in s.outcome.decisions:
        if decision.gang is None:
            continue
        demand = demand_on(s.snapshot, demands, decision.job, decision.cell)
        for node, indices in decision.gang.members:
            share = demand.on_node(len(indices))
            for amounts, needs in zip((gpus, *host), (share.gpus, *amounts_of(share)), strict=True):
                amounts[node] -= needs
    return Demands(gpus=gpus, **name_amounts(host))


def _whole_gpus(snapshot: Snapshot) -> Ints:
    """Return the GPUs of each type, away or not, int64[types]."""
    nodes, types = snapshot.nodes, len(snapshot.gpu_types)
    return np.bincount(nodes.gpu_type, weights=nodes.gpus, minlength=types).astype(np.int64)


def _new_cells(s: Situation) -> Ladders:
    """Yield a Cell of the request on each type, or of all its GPUs, as fast as a typical estimate."""
    snapshot, e = s.snapshot, s.snapshot.estimates
    asks, whole = int(s.value_of("requested_gpus")), _whole_gpus(snapshot)
    batch = np.array([w.global_batch for w in snapshot.workloads], dtype=np.float64)
    runs = np.isfinite(e.iter_time_s) & (e.iter_time_s > 0)
    rates = batch[e.workload[runs]] / e.iter_time_s[runs] / e.gpus[runs]
    per_gpu = float(np.median(rates)) if len(rates) else 1.0
    for kind in np.flatnonzero(whole).tolist():
        gpus, name = min(asks, int(whole[kind])), snapshot.gpu_types[kind].name
        rate = round_up(per_gpu * gpus)
        yield [(Change(kind=ChangeKind.ADD_CELL, subject=name, amount=gpus, size=rate),)]


def _policies(s: Situation) -> Ladders:
    options, now = s.options, s.options.max_changes

    def option(name: str, value: float, before: float) -> Changes:
        return _one(ChangeKind.POLICY, value, before, subject=name)

    if options.scheduler:
        yield [option("scheduler", 0, math.nan)]
        return
    if now >= 0:
        yield [option("max_changes", n, now) for n in (*range(now + 1, now + 9), -1)]
    if options.change_spacing > 0:
        yield [option("change_spacing", 0, options.change_spacing)]
    if options.keep_requests:
        yield [option("keep_requests", 0, 1)]
    if options.promise_starts:
        yield [option("promise_starts", 0, 1)]
    if options.max_restart_share > 0:
        yield [option("max_restart_share", 0, options.max_restart_share)]
    if math.isfinite(options.solve_limit_s):
        yield [option("solve_limit_s", math.inf, options.solve_limit_s)]
    if options.gap > 1e-6:
        yield [option("gap", 1e-6, options.gap)]


def _ends(s: Situation) -> Ladders:
    name, tenant = s.snapshot.jobs.name, s.snapshot.jobs.tenant
    jobs = [
        Change(kind=ChangeKind.END, subject=name[rival], tenant=tenant[rival])
        for rival in s.rivals[:MAX_JOBS_ENDED]
    ]
    for job in jobs:
        yield [(job,)]
    yield [tuple(jobs[:count]) for count in range(2, len(jobs) + 1)]


def _waits(s: Situation) -> Ladders:
    jobs, now_s = s.snapshot.jobs, s.snapshot.now_s
    times = [s.value_of("retry_s")]
    if s.outcome.admission is not None:
        segments = s.outcome.admission.schedule_segments
        times += segments.start_s[segments.job == s.job].tolist()[:1]
    windows = s.snapshot.reservations
    times += windows.end_s[windows.are_active(now_s)].tolist()
    if s.options.change_spacing > 0:
        young = jobs.among(ACTIVE) & (jobs.since_s > 0)
        settled_s = jobs.since_s + (s.options.change_spacing + 1) * jobs.restart_s
        times += settled_s[young].tolist()
    later = sorted({float(math.ceil(time_s)) for time_s in times if time_s > now_s})
    yield [_one(ChangeKind.WAIT, time_s, now_s) for time_s in later]


LADDERS: Final[dict[ChangeKind, Callable[[Situation], Ladders]]] = {
    ChangeKind.WEIGHT: _weights,
    ChangeKind.PRIORITY: _queues,
    ChangeKind.DEADLINE: _deadlines,
    ChangeKind.ANY_TYPE: _no_pin,
    ChangeKind.ANY_NODE: _any_node,
    ChangeKind.ANY_LABELS: _any_labels,
    ChangeKind.ALLOW_TYPE: _more_types,
    ChangeKind.MIN_GPUS: _fewer_gpus,
    ChangeKind.MAX_GPUS: _more_gpus,
    ChangeKind.STAY: _stay,
    ChangeKind.RELEASE: _release,
    ChangeKind.RETRY: _retry,
    ChangeKind.REQUEST: _requests,
    ChangeKind.REQUEST_TYPE: _request_types,
    ChangeKind.BEST_EFFORT: _best_effort,
    ChangeKind.ANY_PLAN: _any_plan,
    ChangeKind.QUOTA: _quotas,
    ChangeKind.BORROW: _borrowing,
    ChangeKind.LEND: _lending,
    ChangeKind.TENANT_WEIGHT: _tenant_weights,
    ChangeKind.UNDRAIN: _undraining,
    **{ChangeKind(resource.change): _more_of(resource) for resource in HOST_RESOURCES},
    ChangeKind.ADD_GPUS: _new_gpus,
    ChangeKind.ADD_CELL: _new_cells,
    ChangeKind.POLICY: _policies,
    ChangeKind.END: _ends,
    ChangeKind.WAIT: _waits,
}
"""The ladders of each kind of change."""
