"""Random cases of five jobs on at most 20 hosts, small enough to try all paths and levels.

Crux (6) gives only the size of its 1,500 cases: at most 20 hosts of 8 GPUs, a two-layer Clos of
2 to 4 ToRs and 2 aggregation switches, 5 jobs and 3 levels. The properties of the jobs are our
own, see ``CaseRanges``.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Final

import numpy as np

from tessera.benchmarks.network.fabrics import host_names
from tessera.formulation.answer.network.contention import Contention
from tessera.formulation.answer.network.flows import NetworkJob, build_contention
from tessera.formulation.base.errors import InvalidInput
from tessera.formulation.base.tables import Floats, Ints, run_starts
from tessera.formulation.state.topologies.builders import build_clos, build_torus
from tessera.formulation.state.topologies.shapes import A100_HOST, GBIT_BYTES
from tessera.formulation.state.topologies.topology import Tier, Topology
from tessera.formulation.state.traffic import Exchange, Pattern, Traffic

JOBS_PER_CASE: Final = 5
AGGREGATIONS: Final = 2
MAX_HOSTS: Final = 20
TORUS_SIZES: Final = ((3, 3), (3, 4), (3, 5), (4, 4), (3, 6), (4, 5))
"""Tori in ascending order of size. A case takes the first that holds its jobs."""
PLACEMENT_COUNT: Final = 3
MAX_DRAWS: Final = 10_000


Placement = tuple[tuple[int, ...], ...]
"""The hosts of each job."""


@dataclass(frozen=True, slots=True, kw_only=True)
class CaseRanges:
    """The distributions from which cases are drawn. A pair of numbers is a range."""

    tors: tuple[int, ...] = (2, 3, 4)
    hosts: tuple[int, ...] = (2, 3, 4, 6)  # whole hosts of a job
    cable_gbit: tuple[int, ...] = (
        200,
        400,
        800,
    )  # from ToR to aggregation switch; the NICs of a host have 800
    compute_s: tuple[float, float] = (0.25, 2.0)  # log uniform
    comm_share: tuple[float, float] = (
        0.15,
        1.2,
    )  # seconds of communication over compute_s, log uniform
    begins: tuple[float, float] = (0.3, 1.0)  # start_s over compute_s; at 1 there is no overlap
    gpu_flop_per_s: tuple[float, float] = (60e12, 160e12)
    least_load: float = 1.0  # of the busiest link if all jobs took one aggregation switch


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class SmallJob:
    """A job's compute and communication in one iteration, independent of its placement."""

    hosts: int
    compute_s: float
    start_s: float
    comm_s: float  # over one cable from a ToR
    work_flop: float


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class SmallCase:
    """A case: jobs and their placements on whole hosts. A job's hosts are in ascending order."""

    tors: int
    hosts: int
    cable_bytes_per_s: float
    jobs: tuple[SmallJob, ...]
    placements: tuple[Placement, ...]  # on the Clos; there are ``PLACEMENT_COUNT`` of them
    torus_sizes: tuple[int, int]
    torus_placement: Placement


def draw_case(seed: int, number: int, *, ranges: CaseRanges | None = None) -> SmallCase:
    """Return case ``number`` of a seed, in which every job crosses ToRs in each placement.

    The hosts of a placement are drawn again until that holds and the network is busy enough: if
    all jobs took one aggregation switch, the busiest link would be offered ``least_load``.
    Otherwise the decisions would hardly matter.

    Raises:
        InvalidInput: no such case was found.
    """
    r, rng = ranges or CaseRanges(), np.random.default_rng((seed, number))
    for _ in range(MAX_DRAWS):
        tors = int(rng.choice(r.tors))
        counts = rng.choice(r.hosts, JOBS_PER_CASE)
        if counts.sum() > MAX_HOSTS:
            continue
        hosts = int(rng.integers(counts.sum(), MAX_HOSTS + 1))
        speed = float(rng.choice(r.cable_gbit)) * GBIT_BYTES
        jobs = tuple(_job(count, r, rng) for count in counts.tolist())
        # More placements are drawn than needed, since many do not meet the conditions.
        tried = [_placed(counts, rng.permutation(hosts)) for _ in range(10 * PLACEMENT_COUNT)]
        fit = [one for one in tried if _meets(jobs, one, tors, hosts, r.least_load)]
        if len(fit) >= PLACEMENT_COUNT:
            sizes = next(s for s in TORUS_SIZES if s[0] * s[1] >= counts.sum())
            return SmallCase(
                tors=tors,
                hosts=hosts,
                cable_bytes_per_s=speed,
                jobs=jobs,
                placements=tuple(fit[:PLACEMENT_COUNT]),
                torus_sizes=sizes,
                torus_placement=_placed(counts, rng.permutation(sizes[0] * sizes[1])),
            )
    raise InvalidInput("ranges", f"gave no case in {MAX_DRAWS} draws; request less load")


def on_clos(case: SmallCase, placement: int = 0) -> Contention:
    """Return the jobs on the two-layer Clos, where each job takes one aggregation switch.

    Each job reduces gradients in rings over its hosts, one ring for each GPU of a host. The hosts
    of a ring are in order, so each ring enters and leaves each of the job's ToRs once.
    """
    topology = build_clos(
        host_names(case.hosts),
        A100_HOST,
        tors=case.tors,
        aggregations=AGGREGATIONS,
        tor_bytes_per_s=case.cable_bytes_per_s,
    )
    result, _ = build_contention(topology, _jobs(case, case.placements[placement]))
    return one_choice(topology, result)


def on_torus(case: SmallCase) -> Contention:
    """Return the same jobs on a torus with the same cables, where each flow chooses its path."""
    topology = build_torus(
        host_names(case.torus_sizes[0] * case.torus_sizes[1]),
        A100_HOST,
        sizes=case.torus_sizes,
        link_bytes_per_s=case.cable_bytes_per_s,
    )
    return build_contention(topology, _jobs(case, case.torus_placement))[0]


def one_choice(topology: Topology, found: Contention) -> Contention:
    """Merge the bundles of each job into one bundle, which takes one aggregation switch.

    Raises:
        InvalidInput: links of a job would carry different numbers of bytes, which is not a bundle.
    """
    c = found
    through = _switch_of(topology)
    bytes_of: list[float] = []
    links_of: list[Ints] = []
    owner: list[int] = []
    for job in range(len(c.jobs)):
        bundles = range(*c.bundle_start[job : job + 2].tolist())
        if not bundles:
            continue
        # Add up the bytes on each link, separately for each aggregation switch that paths take.
        sent: dict[int, Floats] = {}
        for bundle in bundles:
            for path in c.candidate[slice(*c.candidate_start[bundle : bundle + 2])].tolist():
                links = c.path_link[slice(*c.path_start[path : path + 2])]
                switch = int(through[links].max())
                load = sent.setdefault(switch, np.zeros(len(c.link_bytes_per_s)))
                load[links] += c.bundle_bytes[bundle]
        amounts = {float(x) for load in sent.values() for x in load[load > 0]}
        if max(amounts) > min(amounts) * (1 + 1e-9):
            raise InvalidInput("placement", f"{c.jobs[job]} loads its links differently")
        owner.append(job)
        bytes_of.append(min(amounts))
        links_of += [np.flatnonzero(sent[switch]) for switch in sorted(sent)]
    many = len(links_of) // max(len(owner), 1)
    return replace(
        c,
        bundle_start=np.searchsorted(owner, np.arange(len(c.jobs) + 1)),
        bundle_bytes=np.array(bytes_of),
        bundle_messages=np.ones(len(owner), np.int64),
        candidate_start=np.arange(len(owner) + 1) * many,
        candidate=np.arange(len(links_of)),
        path_start=run_starts(np.array([len(links) for links in links_of], np.int64)),
        path_link=np.concatenate([*links_of, np.zeros(0, np.int64)]),
        path_delay_s=np.zeros(len(links_of)),
        bundle_source=np.zeros(0, np.int64),
        bundle_target=np.zeros(0, np.int64),
    )


def _job(hosts: int, r: CaseRanges, rng: np.random.Generator) -> SmallJob:
    compute_s = float(np.exp(rng.uniform(*np.log(r.compute_s))))
    comm_s = compute_s * float(np.exp(rng.uniform(*np.log(r.comm_share))))
    rate = float(rng.uniform(*r.gpu_flop_per_s))
    return SmallJob(
        hosts=hosts,
        compute_s=compute_s,
        start_s=compute_s * float(rng.uniform(*r.begins)),
        comm_s=comm_s,
        work_flop=hosts * A100_HOST.gpus * compute_s * rate,
    )


def _placed(counts: Ints, hosts: Ints) -> Placement:
    ends = np.cumsum(counts)
    return tuple(
        tuple(sorted(hosts[end - count : end].tolist()))
        for end, count in zip(ends.tolist(), counts.tolist(), strict=True)
    )


def _meets(
    jobs: tuple[SmallJob, ...], placed: Placement, tors: int, hosts: int, least: float
) -> bool:
    """Return whether each job crosses ToRs and the highest cable load is at least ``least``."""
    load = np.zeros(tors)
    for job, at in zip(jobs, placed, strict=True):
        mine = {host * tors // hosts for host in at}
        if len(mine) < 2:
            return False
        load[list(mine)] += job.comm_s / max(job.compute_s, job.start_s + job.comm_s)
    return bool(load.max() >= least)


def _jobs(case: SmallCase, placed: Placement) -> list[NetworkJob]:
    gpus = A100_HOST.gpus
    result = []
    for number, (job, hosts) in enumerate(zip(case.jobs, placed, strict=True)):
        members = np.arange(len(hosts) * gpus, dtype=np.int64).reshape(len(hosts), gpus).T
        sent_bytes = job.comm_s * case.cable_bytes_per_s / gpus
        ring = Exchange(pattern=Pattern.RING, members=members, sent_bytes=sent_bytes)
        traffic = Traffic(
            work_flop=job.work_flop, compute_s=job.compute_s, start_s=job.start_s, exchanges=(ring,)
        )
        gang = tuple((f"host-{host}", tuple(range(gpus))) for host in hosts)
        result.append(NetworkJob(name=f"job-{number}", gang=gang, traffic=traffic))
    return result


def _switch_of(topology: Topology) -> Ints:
    """Return the aggregation switch at which each link begins or ends, or -1 otherwise."""
    tier, e = topology.vertices.tier, topology.links
    result = np.where(tier[e.source] == Tier.AGGREGATION, e.source, -1)
    return np.where(tier[e.target] == Tier.AGGREGATION, e.target, result).astype(np.int64)
