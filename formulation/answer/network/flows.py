"""Contention of placed jobs: their traffic as flows over a topology's links."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

import numpy as np

from tessera.formulation.answer.network.contention import Contention
from tessera.formulation.answer.network.patterns import Flows, PlacedExchange, flows_of
from tessera.formulation.base.errors import InvalidInput
from tessera.formulation.base.tables import (
    Bools,
    Floats,
    Ints,
    concatenate_ranges,
    run_starts,
    sum_by_group,
)
from tessera.formulation.state.topologies.routes import MAX_PATHS, Routes, Ways
from tessera.formulation.state.topologies.topology import Topology
from tessera.formulation.state.traffic import Traffic

_SHARES_NO_LINK: Final = "it is assumed to share no link with another job"

Note = tuple[str, str]
"""A job, and a sentence about what the network plan does not cover of it.

If the job is "", the sentence is about all jobs.
"""


@dataclass(frozen=True, slots=True, kw_only=True)
class NetworkJob:
    """A job, its GPUs as (host, indices of GPUs on it), and its traffic in one iteration.

    Ranks count the GPUs in this order, from 0.
    """

    name: str
    gang: tuple[tuple[str, tuple[int, ...]], ...]
    traffic: Traffic

    @property
    def gpus(self) -> int:
        """Return the number of GPUs."""
        return sum(len(indices) for _, indices in self.gang)


def build_contention(
    topology: Topology,
    jobs: Sequence[NetworkJob],
    *,
    most: int = MAX_PATHS,
    qps_per_connection: int = 1,
    routes: Routes | None = None,
) -> tuple[Contention, list[Note]]:
    """Return all jobs with their loads and choices, and notes on them.

    A job stays in the list without traffic if it is on a host or GPU that the topology lacks, or on
    GPUs that no path joins. It then shares no link with other jobs. Bundles are in order of job,
    source and target. A flow with only one way is not a bundle; its links are fixed. The delay that
    a job always pays is the largest of its flows' delays.

    Args:
        most: the number of paths that a flow may choose from.
        qps_per_connection: the number of equal bundles that a flow is split into
            (NCCL_IB_QPS_PER_CONNECTION).
        routes: routes of the same topology, kept for later calls. Their ``most`` then applies.

    Raises:
        InvalidInput: a name repeats, or an exchange names a rank that its job lacks.
    """
    if qps_per_connection < 1:
        raise InvalidInput("qps_per_connection", f"is {qps_per_connection}; it must be at least 1")
    if twice := [name for name, times in Counter(j.name for j in jobs).items() if times > 1]:
        raise InvalidInput("jobs", f"must have unique names; {twice[0]} repeats")
    routes = Routes(topology, most) if routes is None else routes
    placed, notes = _placed(topology, jobs)
    flows = flows_of(placed, topology.vertices.host)
    ways = routes.ways(flows.source, flows.target)
    if gaps := _gaps(flows, ways, routes):
        notes += [(jobs[number].name, note) for number, note in gaps.items()]
        # A job with a gap loads nothing, so list the flows again without such jobs.
        flows = flows_of([p for p in placed if p.job not in gaps], topology.vertices.host)
        ways = routes.ways(flows.source, flows.target)
    notes += _silent_notes(jobs, flows, ways, {name for name, _ in notes})
    if len(cut := np.flatnonzero(ways.total > routes.most)):
        notes.append(
            (
                "",
                f"{len(cut):,} flows have up to {ways.total.max():,.0f} equal-cost paths, but they choose"
                f" from {routes.most} only",
            )
        )
    if topology.adaptive and ways.crosses.any():
        notes.append(
            (
                "",
                "the network is adaptive: its switches choose the paths, so no path can be chosen here;"
                " traffic is assumed to spread evenly over all paths",
            )
        )
    return _assembled(topology, jobs, flows, ways, qps_per_connection), notes


def sent_by_hosts(topology: Topology, jobs: Sequence[NetworkJob]) -> list[dict[str, float]]:
    """Return, for each job, the bytes that each of its hosts sends to others in one iteration.

    Hosts that send nothing to others are absent.

    Raises:
        InvalidInput: an exchange names a rank that its job lacks.
    """
    placed, _ = _placed(topology, jobs)
    host = topology.vertices.host
    flows = flows_of(placed, host)
    source, target = host[flows.source], host[flows.target]
    out = np.flatnonzero(source != target)
    hosts = len(topology.hosts)
    key, which = np.unique(flows.job[out] * hosts + source[out], return_inverse=True)
    total = sum_by_group(which, flows.sent_bytes[out], len(key))
    sent_by_host: list[dict[str, float]] = [{} for _ in jobs]
    for job, at, sent_bytes in zip(
        (key // hosts).tolist(), (key % hosts).tolist(), total, strict=True
    ):
        sent_by_host[job][topology.hosts[at]] = float(sent_bytes)
    return sent_by_host


def _placed(
    topology: Topology, jobs: Sequence[NetworkJob]
) -> tuple[list[PlacedExchange], list[Note]]:
    """Return exchanges on vertices, and notes on jobs that are not in the topology."""
    host_of = {name: i for i, name in enumerate(topology.hosts)}
    counts = [len(topology.gpus_of(i)) for i in range(len(host_of))]
    placed: list[PlacedExchange] = []
    notes: list[Note] = []
    for number, job in enumerate(jobs):
        if (problem := _missing(job, host_of, counts)) is not None:
            notes.append((job.name, f"{problem}; {_SHARES_NO_LINK}"))
            continue
        parts = [topology.gpus_of(host_of[host])[list(indices)] for host, indices in job.gang]
        vertex = np.concatenate(parts) if parts else np.empty(0, dtype=np.int64)
        for exchange in job.traffic.exchanges:
            if not exchange.members.size or exchange.sent_bytes == 0:
                continue
            if exchange.members.min() < 0 or exchange.members.max() >= len(vertex):
                raise InvalidInput(
                    f"{job.name}: members",
                    f"must be ranks, 0 to {len(vertex) - 1} for {len(vertex)} GPUs",
                )
            placed.append(
                PlacedExchange(job=number, exchange=exchange, vertex=vertex[exchange.members])
            )
    return placed, notes


def _gaps(flows: Flows, ways: Ways, routes: Routes) -> dict[int, str]:
    """Return a note on each job with a flow that has no way."""
    lost = np.flatnonzero(ways.total == 0)
    numbers, first = np.unique(flows.job[lost], return_index=True)
    return {
        number: f"{routes.gap(int(flows.source[flow]), int(flows.target[flow]))}; {_SHARES_NO_LINK}"
        for number, flow in zip(numbers.tolist(), lost[first].tolist(), strict=True)
    }


def _missing(job: NetworkJob, host_of: dict[str, int], counts: list[int]) -> str | None:
    for host, indices in job.gang:
        if host not in host_of:
            return f"its host {host} is not in the topology"
        count = counts[host_of[host]]
        if indices and not 0 <= min(indices) <= max(indices) < count:
            wrong = next(i for i in indices if not 0 <= i < count)
            return (
                f"it has GPU {wrong} of {host}, but the topology has only {count} GPUs there,"
                " counted from 0"
            )
    return None


def _silent_notes(
    jobs: Sequence[NetworkJob], flows: Flows, ways: Ways, noted: set[str]
) -> list[Note]:
    """Return notes on jobs that load no links, or only links within their hosts."""
    sends = np.bincount(flows.job, minlength=len(jobs))
    crosses = np.bincount(flows.job, ways.crosses, minlength=len(jobs))
    notes = []
    for number in np.flatnonzero(crosses == 0).tolist():
        job = jobs[number]
        if job.name in noted:
            continue
        if not sends[number]:
            sentence = "it sends nothing, so it shares no link with another job"
        elif len({host for host, _ in job.gang}) == 1:
            sentence = f"it runs on {job.gang[0][0]} alone, so it loads no link between hosts"
        else:
            sentence = "it sends nothing from host to host, so it loads no link between them"
        notes.append((job.name, sentence))
    return notes


def _assembled(
    topology: Topology, jobs: Sequence[NetworkJob], flows: Flows, ways: Ways, qps: int
) -> Contention:
    e = topology.links
    count, links = len(jobs), len(e)
    flow, link = ways.fixed_flow, ways.fixed_link
    delay_s = sum_by_group(flow, e.delay_s[link], len(flows))
    carried = [(flows.job[flow], link, flows.sent_bytes[flow])]
    lengths = np.diff(ways.path_start)
    path_of = np.repeat(np.arange(len(lengths)), lengths)
    path_delay_s = sum_by_group(path_of, e.delay_s[ways.path_link], len(lengths))
    chooses = ways.choice >= 0
    if topology.adaptive:
        carried.append(_spread(flows, ways, chooses, links))
        delay_s[chooses] += _longest(ways, path_delay_s)[ways.choice[chooses]]
        chooses = np.zeros_like(chooses)
    fixed_start, fixed_link, fixed_bytes = _summed(carried, count, links)
    fixed_delay_s = np.zeros(count)
    np.maximum.at(fixed_delay_s, flows.job, flows.messages * delay_s)
    bundle = np.repeat(np.flatnonzero(chooses), qps)
    choice = ways.choice[bundle]
    many = np.diff(ways.choice_start)[choice]
    traffic = [job.traffic for job in jobs]
    return Contention(
        jobs=tuple(job.name for job in jobs),
        work_flop=np.array([t.work_flop for t in traffic], dtype=np.float64),
        compute_s=np.array([t.compute_s for t in traffic], dtype=np.float64),
        start_s=np.array([t.start_s for t in traffic], dtype=np.float64),
        gpus=np.array([job.gpus for job in jobs], dtype=np.int64),
        fixed_start=fixed_start,
        fixed_link=fixed_link,
        fixed_bytes=fixed_bytes,
        fixed_delay_s=fixed_delay_s,
        bundle_start=np.searchsorted(flows.job[bundle], np.arange(count + 1)),
        bundle_bytes=flows.sent_bytes[bundle] / qps,
        bundle_messages=flows.messages[bundle],
        candidate_start=run_starts(many),
        candidate=concatenate_ranges(ways.choice_start[choice], many),
        path_start=ways.path_start,
        path_link=ways.path_link,
        path_delay_s=path_delay_s,
        link_bytes_per_s=e.bytes_per_s,
        bundle_source=flows.source[bundle],
        bundle_target=flows.target[bundle],
    )


def _spread(flows: Flows, ways: Ways, chooses: Bools, links: int) -> tuple[Ints, Ints, Floats]:
    """Return (job, link, bytes) of flows that are spread evenly over all of their paths."""
    many = np.diff(ways.choice_start)
    lengths = np.diff(ways.path_start)
    of_link = np.repeat(np.repeat(np.arange(len(many)), many), lengths)
    key, times = np.unique(of_link * links + ways.path_link, return_counts=True)
    choice, link = key // links, key % links
    share = times / many[choice]
    start = np.searchsorted(choice, np.arange(len(many) + 1))
    flow = np.flatnonzero(chooses)
    count = np.diff(start)[ways.choice[flow]]
    at = concatenate_ranges(start[ways.choice[flow]], count)
    flow = np.repeat(flow, count)
    return flows.job[flow], link[at], flows.sent_bytes[flow] * share[at]


def _longest(ways: Ways, path_delay_s: Floats) -> Floats:
    """Return the longest delay of each choice's paths."""
    if not len(path_delay_s):
        return path_delay_s
    longest: Floats = np.maximum.reduceat(path_delay_s, ways.choice_start[:-1])
    return longest


def _summed(
    carried: list[tuple[Ints, Ints, Floats]], jobs: int, links: int
) -> tuple[Ints, Ints, Floats]:
    """Return the start of each job's links, the links (rising), and the bytes on each."""
    key = np.concatenate([job * links + link for job, link, _ in carried])
    key, which = np.unique(key, return_inverse=True)
    sent = sum_by_group(which, np.concatenate([b for *_, b in carried]), len(key))
    return np.searchsorted(key, np.arange(jobs + 1) * links), key % max(links, 1), sent
