"""The decisions of a round that still hold when it is committed.

What changed in the meantime is left alone.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Final

from tessera.formulation.answer.decisions import CHANGES_GPUS, Decision, DecisionKind
from tessera.formulation.base.resources import Demand, HostCapacity, HostNeeds
from tessera.formulation.job.lifecycle import ACTIVE, TERMINAL, JobEvent, JobState, is_allowed
from tessera.formulation.state.snapshot import Snapshot

NO_DEMAND: Final = Demand(gpus=0)

GpuKey = tuple[int, int]  # (node's key, GPU index)


@dataclass(frozen=True, slots=True, kw_only=True)
class CurrentJob:
    """A job's state while the round is committed. ``needs`` is its demand on its present Cell."""

    key: int
    version: int
    state: JobState
    generation: int
    needs: Demand = NO_DEMAND


@dataclass(frozen=True, slots=True, kw_only=True)
class CurrentNode(HostCapacity):
    """A node's state while the round is committed. Amounts that nobody knows are None."""

    key: int
    version: int


@dataclass(frozen=True, slots=True, kw_only=True)
class CommitState:
    """The data that the guards need: jobs, nodes, and the owner of each held or reserved GPU."""

    jobs: Mapping[str, CurrentJob]
    nodes: Mapping[str, CurrentNode]
    owner: Mapping[GpuKey, int]  # the job's key
    types: Mapping[str, int]
    plans: Mapping[str, int]


def event_of(decision: Decision, state: JobState) -> JobEvent | None:
    """Return the event that the decision causes for a job in ``state``, or None."""
    if decision.kind in CHANGES_GPUS:
        return JobEvent.MOVE if state in ACTIVE else JobEvent.START
    events = {DecisionKind.SUSPEND: JobEvent.SUSPEND, DecisionKind.REJECT: JobEvent.REJECT}
    return events.get(decision.kind)


def find_skipped(
    snapshot: Snapshot,
    decisions: tuple[Decision, ...],
    world: CommitState,
    needs: Sequence[Demand] = (),
) -> dict[int, str]:
    """Return why decisions are not applied, by position in ``decisions``.

    A decision is skipped if its job or one of its nodes has another version than in the snapshot,
    or if its execution plan is not stored any more. It is also skipped if it needs a GPU whose owner
    keeps it because the owner's own decision is skipped, or, for the same reason, CPU cores or host
    memory of a node. This repeats until nothing more is skipped.

    ``needs`` are the jobs' demands on the Cells of the decisions. Without any, only GPUs count.
    """
    skipped: dict[int, str] = {}
    for i, decision in enumerate(decisions):
        reason = (
            _stale_job(snapshot, decision, world)
            or _stale_node(snapshot, decision, world)
            or _stale_plan(snapshot, decision, world)
        )
        if reason:
            skipped[i] = reason
    _keep_owners(snapshot, decisions, world, skipped)
    while skipped and (over := _overfull_nodes(snapshot, decisions, world, skipped, needs)):
        news = {
            i: f"node {name} would lack CPU cores or host memory, which other jobs keep"
            for i, name in _places(snapshot, decisions, skipped)
            if name in over
        }
        if not news:
            break
        skipped |= news
        _keep_owners(snapshot, decisions, world, skipped)
    return skipped


def _places(
    snapshot: Snapshot, decisions: tuple[Decision, ...], skipped: Mapping[int, str]
) -> Iterator[tuple[int, str]]:
    """Yield (position, name of a node) for each node of each decision that gives GPUs."""
    for i, decision in enumerate(decisions):
        if i not in skipped and decision.kind in CHANGES_GPUS and decision.gang is not None:
            yield from ((i, snapshot.nodes.name[n]) for n, _ in decision.gang.members)


def _overfull_nodes(
    snapshot: Snapshot,
    decisions: tuple[Decision, ...],
    world: CommitState,
    skipped: Mapping[int, str],
    needs: Sequence[Demand],
) -> set[str]:
    """Return the names of the nodes that would have too few cores or too little host memory."""
    names = {node.key: name for name, node in world.nodes.items() if not node.limits_nothing}
    if not (names and needs):
        return set()
    leaves, shares = set[int](), list[tuple[str, Demand]]()
    for i, decision in enumerate(decisions):
        job = world.jobs.get(snapshot.jobs.name[decision.job])
        if i in skipped or job is None or event_of(decision, job.state) is None:
            continue
        leaves.add(job.key)
        if decision.kind in CHANGES_GPUS and decision.gang is not None:
            shares += (
                (snapshot.nodes.name[n], needs[i].on_node(len(gpus)))
                for n, gpus in decision.gang.members
            )
    present = {
        job.key: job.needs
        for job in world.jobs.values()
        if job.needs.gpus and job.key not in leaves
    }
    kept = Counter((node, job) for (node, _), job in world.owner.items())
    shares += (
        (names[node], present[job].on_node(gpus))
        for (node, job), gpus in kept.items()
        if node in names and job in present
    )
    used: dict[str, HostNeeds] = {}
    for name, share in shares:
        used[name] = used.get(name, NO_DEMAND).plus_host(share)
    return {name for name, total in used.items() if not world.nodes[name].has(total)}


def _stale_job(snapshot: Snapshot, decision: Decision, world: CommitState) -> str:
    job = world.jobs.get(snapshot.jobs.name[decision.job])
    if job is None:
        return "the job was deleted during the solve"
    before = int(snapshot.jobs.version[decision.job])
    if job.version != before or job.state in TERMINAL:
        return f"the job changed during the solve (etag {before}, now {job.version}; {job.state})"
    event = event_of(decision, job.state)
    if event is not None and not is_allowed(job.state, event):
        return f"a job that is {job.state} cannot {event}"
    return ""


def _stale_node(snapshot: Snapshot, decision: Decision, world: CommitState) -> str:
    if decision.kind not in CHANGES_GPUS or decision.gang is None:
        return ""
    for n, _ in decision.gang.members:
        name, before = snapshot.nodes.name[n], int(snapshot.nodes.version[n])
        node = world.nodes.get(name)
        if node is None or node.version != before:
            return f"node {name} changed during the solve"
    return ""


def _stale_plan(snapshot: Snapshot, decision: Decision, world: CommitState) -> str:
    if decision.kind not in CHANGES_GPUS or snapshot.plans[decision.cell.plan] in world.plans:
        return ""
    return "its execution plan was deleted during the solve"


def _keep_owners(
    snapshot: Snapshot, decisions: tuple[Decision, ...], world: CommitState, found: dict[int, str]
) -> dict[int, str]:
    """Add to ``found`` the decisions that need a GPU which its owner does not give up."""
    names = {job.key: name for name, job in world.jobs.items()}
    position: dict[int, int] = {}  # job's key -> its decision, if that gives up GPUs
    wanted: dict[GpuKey, int] = {}
    for i, decision in enumerate(decisions):
        job = world.jobs.get(snapshot.jobs.name[decision.job])
        if i in found or job is None:
            continue
        if event_of(decision, job.state) is not None:
            position[job.key] = i
        if decision.kind in CHANGES_GPUS and decision.gang is not None:
            for n, gpus in decision.gang.members:
                key = world.nodes[snapshot.nodes.name[n]].key
                wanted.update({(key, gpu): i for gpu in gpus})
    owned: dict[int, list[GpuKey]] = {}
    for gpu, owner in world.owner.items():
        owned.setdefault(owner, []).append(gpu)
    # An owner that gives nothing up blocks the decisions that need its GPUs. Their jobs keep their
    # own GPUs, too, which may block further decisions.
    keeping = [owner for owner in owned if owner not in position]
    while keeping:
        owner = keeping.pop()
        for gpu in owned.get(owner, ()):
            loses = wanted.get(gpu)
            if loses is None or loses in found:
                continue
            found[loses] = f"the GPUs that it needs stay with {names.get(owner, 'another job')}"
            loser = world.jobs[snapshot.jobs.name[decisions[loses].job]].key
            keeping.append(loser)
    return found
