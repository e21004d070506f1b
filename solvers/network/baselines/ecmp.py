"""Plain ECMP: switches hash each flow to a path, and all jobs share one priority level."""

from __future__ import annotations

import hashlib

import numpy as np

from tessera.formulation.answer.network.contention import Contention
from tessera.formulation.answer.network.plan import NetworkPlan
from tessera.formulation.base.tables import Ints


def hash_bundles(contention: Contention, seed: int = 0) -> Ints:
    """Return the candidate that each bundle is hashed to, (B,).

    It does not change when other jobs come or go. It depends on the job's name, the bundle's index
    within the job, and ``seed`` (the switches' hash function).
    """
    c = contention
    digests = b"".join(
        hashlib.blake2b(
            name.encode(), digest_size=8, salt=(seed % 2**64).to_bytes(8, "little")
        ).digest()
        for name in c.jobs
    )
    job = c.bundle_job
    within = np.arange(len(job), dtype=np.uint64) - c.bundle_start[job].astype(np.uint64)
    key = np.frombuffer(digests, dtype="<u8")[job] + within * np.uint64(0x9E3779B97F4A7C15)
    hashed: Ints = (_mixed(key) % np.diff(c.candidate_start).astype(np.uint64)).astype(np.int64)
    return hashed


def _mixed(key: np.typing.NDArray[np.uint64]) -> np.typing.NDArray[np.uint64]:
    """Return 64 pseudorandom bits by a bijection (the finalizer of SplitMix64)."""
    key = (key ^ (key >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    key = (key ^ (key >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return key ^ (key >> np.uint64(31))


def plan(contention: Contention, *, levels: int, seed: int = 0) -> NetworkPlan:
    """Return hashed paths and a single priority level, however many ``levels`` there are."""
    jobs = len(contention.jobs)
    return NetworkPlan(
        chosen=hash_bundles(contention, seed),
        priority=np.zeros(jobs),
        order=np.arange(jobs, dtype=np.int64),
        level=np.zeros(jobs, dtype=np.int64),
        levels=levels,
    )
