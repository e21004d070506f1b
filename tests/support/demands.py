"""Builders of demands from the links that jobs load."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from tessera.formulation.answer.network.contention import Contention, LinkDemand
from tessera.formulation.base.tables import Floats, Ints


def a_demand(
    links_of: Sequence[Sequence[int]],
    intensity: Sequence[float] | Floats,
    *,
    links: int | None = None,
) -> LinkDemand:
    """Return jobs that keep each of their links busy for 1 s, so that work equals intensity."""
    counts = [len(own) for own in links_of]
    loaded = [link for own in links_of for link in sorted(own)]
    ones = np.ones(len(links_of))
    return LinkDemand(
        work_flop=np.asarray(intensity, dtype=np.float64),
        compute_s=ones,
        start_s=ones,
        delay_s=np.zeros(len(links_of)),
        link_start=np.cumsum([0, *counts]),
        link=np.array(loaded, dtype=np.int64),
        busy_s=np.ones(len(loaded)),
        links=max(loaded, default=-1) + 1 if links is None else links,
    )


def a_demand_of_pairs(
    pairs: Sequence[tuple[int, int]], intensity: Sequence[float] | Floats
) -> LinkDemand:
    """Return jobs where exactly these pairs share a link, with one link for each pair."""
    links_of: list[list[int]] = [[] for _ in intensity]
    for link, pair in enumerate(pairs):
        for job in pair:
            links_of[job].append(link)
    return a_demand(links_of, intensity)


def random_pairs(rng: np.random.Generator, jobs: int, density: float) -> list[tuple[int, int]]:
    """Return random pairs of jobs, each with this probability."""
    return [(a, b) for a in range(jobs) for b in range(a + 1, jobs) if rng.random() < density]


def urgency(demand: LinkDemand) -> Ints:
    """Return jobs in descending order of intensity, with ties by index."""
    return np.argsort(-demand.intensity, kind="stable")


def a_contention(demand: LinkDemand) -> Contention:
    """Return jobs that load the links of ``demand`` and have no choice of paths."""
    none, jobs = np.zeros(0, np.int64), demand.jobs
    return Contention(
        jobs=tuple(f"job-{j}" for j in range(jobs)),
        work_flop=demand.work_flop,
        compute_s=demand.compute_s,
        start_s=demand.start_s,
        gpus=np.ones(jobs, np.int64),
        fixed_start=demand.link_start,
        fixed_link=demand.link,
        fixed_bytes=demand.busy_s,
        fixed_delay_s=demand.delay_s,
        bundle_start=np.zeros(jobs + 1, np.int64),
        bundle_bytes=np.zeros(0),
        bundle_messages=none,
        candidate_start=np.zeros(1, np.int64),
        candidate=none,
        path_start=np.zeros(1, np.int64),
        path_link=none,
        path_delay_s=np.zeros(0),
        link_bytes_per_s=np.ones(demand.links),
    )
