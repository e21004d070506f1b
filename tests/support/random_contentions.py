"""Builders of contentions that tests draw at random."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np

from tessera.formulation.network.contention import Contention
from tessera.formulation.tables import Ints


def a_contention(
    *,
    fixed: Sequence[Mapping[int, float]],
    bundles: Sequence[Sequence[Sequence[Sequence[int]]]] = (),
    links: int = 4,
    names: Sequence[str] | None = None,
    sent_bytes: float = 1.0,
) -> Contention:
    """Return jobs with ``fixed`` bytes by link.

    A bundle is a list of paths, and a path is a list of links.
    """
    jobs = len(fixed)
    bundles = bundles or [[] for _ in range(jobs)]
    paths = [path for job in bundles for bundle in job for path in bundle]
    flat = [bundle for job in bundles for bundle in job]
    return Contention(
        jobs=tuple(names or [f"job-{j}" for j in range(jobs)]),
        work_flop=np.ones(jobs),
        compute_s=np.ones(jobs),
        start_s=np.ones(jobs),
        gpus=np.full(jobs, 8),
        fixed_start=_starts([len(f) for f in fixed]),
        fixed_link=np.array([e for f in fixed for e in f], dtype=np.int64),
        fixed_bytes=np.array([b for f in fixed for b in f.values()], dtype=np.float64),
        fixed_delay_s=np.zeros(jobs),
        bundle_start=_starts([len(job) for job in bundles]),
        bundle_bytes=np.full(len(flat), sent_bytes),
        bundle_messages=np.ones(len(flat), np.int64),
        candidate_start=_starts([len(bundle) for bundle in flat]),
        candidate=np.arange(len(paths)),
        path_start=_starts([len(path) for path in paths]),
        path_link=np.array([e for path in paths for e in path], dtype=np.int64),
        path_delay_s=np.zeros(len(paths)),
        link_bytes_per_s=np.ones(links),
    )


def _starts(counts: Sequence[int]) -> Ints:
    return np.cumsum([0, *counts]).astype(np.int64)
