"""Kinds of streams in which promises other than starts bind rounds: quotas, deadlines and others."""

from __future__ import annotations

from numpy.random import Generator

from tessera.benchmarks.schedulers.streams import (
    HOUR_S,
    GpuPool,
    JobStream,
    StreamDraft,
    add_crowd,
)
from tessera.formulation.job.arrays import ArrayMember
from tessera.formulation.records.clusters import TenantSpec


def draw_quotas(rng: Generator, jobs: int) -> JobStream:
    """Draw a tenant that borrows the quota of two others, whose guaranteed jobs reclaim it."""
    draft = StreamDraft(GpuPool(nodes=4))
    owner_jobs = jobs // 3
    last_s = add_crowd(draft, rng, jobs - owner_jobs, 0.9, tenant="borrower")
    for i in range(owner_jobs):
        start_s = (0.2 + 0.4 * (i % 2)) * last_s
        draft.add(
            start_s + rng.uniform(0, 0.1) * last_s,
            int(rng.choice([1, 2, 4])),
            rng.uniform(0.2, 1.0) * HOUR_S,
            role="owner",
            tenant=f"owner-{i % 2}",
            guaranteed=True,
        )
    tenants = [TenantSpec(name=f"owner-{k}", quotas={"": 8}) for k in range(2)]
    return draft.finish(
        tenants=[*tenants, TenantSpec(name="borrower", quotas={"": 16})], forces=True
    )


def draw_deadlines(rng: Generator, jobs: int) -> JobStream:
    """Draw ordinary jobs of which a third have deadlines, which are promised by look-ahead."""
    draft = StreamDraft(GpuPool(nodes=3))
    tightness = rng.uniform(1.5, 4.0, jobs)
    limits = [float(tightness[i]) if i % 3 == 0 else float("inf") for i in range(jobs)]
    add_crowd(draft, rng, jobs, 0.9, elastic=True, tightness=limits)
    return draft.finish(settings=["deadlines=look-ahead"], forces=True)


def draw_arrays(rng: Generator, jobs: int) -> JobStream:
    """Draw ordinary jobs, and arrays of which few members may run at the same time."""
    draft = StreamDraft(GpuPool(nodes=2))
    size, arrays = 10, max(1, jobs // 30)
    last_s = add_crowd(draft, rng, jobs - size * arrays, 0.7)
    for k in range(arrays):
        at_s, limit = rng.uniform(0, 0.6) * last_s, int(rng.integers(2, 5))
        for i in range(size):
            member = ArrayMember(array=f"array-{k}", index=i, size=size, max_running=limit)
            draft.add(at_s, 2, 0.4 * HOUR_S, role="member", array=member)
    return draft.finish()


def draw_queues(rng: Generator, jobs: int) -> JobStream:
    """Draw jobs of an important queue at a load of two thirds, and gangs of a lower one."""
    draft = StreamDraft(GpuPool(nodes=3))
    gangs = max(2, jobs // 10)
    last_s = add_crowd(draft, rng, jobs - gangs, 0.65, priority=1, weight=2.0)
    for _ in range(gangs):
        at_s = rng.uniform(0.05, 0.8) * last_s
        draft.add(at_s, int(rng.choice([8, 16])), HOUR_S, role="low", priority=3)
    return draft.finish(settings=["priority_weights=1:4"])


def draw_fair_shares(rng: Generator, jobs: int) -> JobStream:
    """Draw tenants whose gangs of all GPUs take turns by a fair share with a short memory."""
    draft = StreamDraft(GpuPool(nodes=2, node_gpus=6))
    gangs = max(4, jobs // 6)
    last_s = add_crowd(
        draft,
        rng,
        jobs - gangs,
        0.4,
        sizes=(1, 2, 4),
        shares=(0.6, 0.2, 0.2),
        tenant=[f"team-{i % 2}" for i in range(jobs - gangs)],
    )
    for i in range(gangs):
        at_s = rng.uniform(0, 0.7) * last_s
        draft.add(at_s, 12, 0.5 * HOUR_S, role="gang", tenant=f"team-{i % 2}")
    return draft.finish(settings=["fair_share=gpus", "fair_half_life_s=600"])


def draw_preemptible(rng: Generator, jobs: int) -> JobStream:
    """Draw ordinary jobs at a load of a half, and as many that give way to them."""
    draft = StreamDraft(GpuPool(nodes=3))
    add_crowd(draft, rng, jobs // 2, 0.5)
    add_crowd(draft, rng, jobs - jobs // 2, 0.6, role="spare", preemptible=True)
    return draft.finish(forces=True)


def draw_node_selectors(rng: Generator, jobs: int) -> JobStream:
    """Draw jobs of which half need labelled nodes, and a gang of all labelled nodes."""
    draft = StreamDraft(GpuPool(nodes=4, labels={"disk": "ssd"}))
    selectors = ["disk=ssd" if i % 2 else "" for i in range(jobs - 1)]
    last_s = add_crowd(draft, rng, jobs - 1, 0.9, node_selector=selectors)
    at_s = rng.uniform(0.05, 0.4) * last_s
    draft.add(at_s, 16, HOUR_S, role="gang", node_selector="disk=ssd")
    return draft.finish()
