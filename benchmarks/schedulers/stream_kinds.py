"""Kinds of adversarial streams: each is drawn by a seed, and tries to break a promise of starts."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Final

import numpy as np
from numpy.random import Generator

from tessera.benchmarks.schedulers.bound_streams import (
    draw_arrays,
    draw_deadlines,
    draw_fair_shares,
    draw_node_selectors,
    draw_preemptible,
    draw_queues,
    draw_quotas,
)
from tessera.benchmarks.schedulers.streams import (
    HOUR_S,
    SIZE_SHARES,
    SIZES,
    GpuPool,
    JobStream,
    ScalingModel,
    StreamDraft,
    add_crowd,
    draw_durations_s,
)
from tessera.formulation.records.estimates import EstimateRecord
from tessera.simulator.hazards import Hazards, Straggler, draw_failures
from tessera.simulator.overheads import preset_overheads
from tessera.simulator.truth import perturb_estimates

MAX_ERROR_FACTOR: Final = 3.0
"""The largest factor by which wrong estimates are off."""

Drawer = Callable[[Generator, int], JobStream]


def draw_one_gang(rng: Generator, jobs: int) -> JobStream:
    """Draw jobs of ten minutes at a load of three quarters, and a gang of all GPUs among the first."""
    draft = StreamDraft(GpuPool(nodes=2))
    last_s = add_crowd(
        draft, rng, jobs - 1, 0.75, sizes=(1,), shares=(1.0,), median_s=HOUR_S / 6, sigma=0.3
    )
    draft.add(rng.uniform(0.05, 0.2) * last_s, 16, HOUR_S, role="gang")
    return draft.finish()


def draw_several_gangs(rng: Generator, jobs: int) -> JobStream:
    """Draw small jobs at a load of three quarters, and gangs of half or all GPUs among them."""
    draft = StreamDraft(GpuPool(nodes=4))
    gangs = max(2, jobs // 15)
    last_s = add_crowd(draft, rng, jobs - gangs, 0.75, sizes=(1, 2), shares=(0.7, 0.3))
    for _ in range(gangs):
        gpus = int(rng.choice([16, 24, 32]))
        draft.add(rng.uniform(0.05, 0.9) * last_s, gpus, rng.uniform(0.3, 1) * HOUR_S, role="gang")
    return draft.finish()


def draw_every_size(rng: Generator, jobs: int) -> JobStream:
    """Draw gangs of every size at full load, including sizes that fill no node."""
    draft = StreamDraft(GpuPool(nodes=4))
    sizes = (1, 2, 3, 4, 5, 6, 8, 12, 16, 24, 32)
    shares = np.array([1 / size for size in sizes])
    add_crowd(draft, rng, jobs, 1.0, sizes=sizes, shares=(shares / shares.sum()).tolist())
    return draft.finish()


def draw_pinned_types(rng: Generator, jobs: int) -> JobStream:
    """Draw jobs pinned to alternating GPU types or to none, and a pinned gang of a whole type."""
    draft = StreamDraft(GpuPool(nodes=2), GpuPool(gpu_type="h100", nodes=2))
    types = [("a100", "h100", "")[i % 3] for i in range(jobs - 1)]
    last_s = add_crowd(
        draft,
        rng,
        jobs - 1,
        1.1,
        sizes=(1, 2, 4),
        shares=(0.6, 0.2, 0.2),
        requested_gpu_type=types,
        pinned_gpu_type=[bool(name) for name in types],
    )
    draft.add(
        rng.uniform(0.05, 0.3) * last_s,
        16,
        HOUR_S,
        role="gang",
        requested_gpu_type="h100",
        pinned_gpu_type=True,
    )
    return draft.finish()


def draw_any_type(rng: Generator, jobs: int) -> JobStream:
    """Draw elastic jobs for any of three GPU types, with models that favor different ones."""
    models = [
        ScalingModel(name="wide", power=0.95, favors={"v100": 0.6}),
        ScalingModel(name="deep", power=0.8, favors={"a40": 1.5}),
    ]
    pools = [GpuPool(nodes=2), GpuPool(gpu_type="v100", nodes=2), GpuPool(gpu_type="a40", nodes=2)]
    draft = StreamDraft(*pools, models=models)
    names = [models[k].name for k in rng.integers(2, size=jobs).tolist()]
    add_crowd(draft, rng, jobs, 0.7, model=names, elastic=True)
    return draft.finish()


def draw_unestimated(rng: Generator, jobs: int) -> JobStream:
    """Draw ordinary jobs, a third of which run at a rate that no round knows before they run.

    Each of these has a model of its own: once a round knows a model on some GPUs, it takes the
    model for one that runs on these GPUs only.
    """
    unknown = [ScalingModel(name=f"unknown-{i}") for i in range(0, jobs, 3)]
    draft = StreamDraft(GpuPool(nodes=3), models=[ScalingModel(), *unknown])
    names = ["" if i % 3 else f"unknown-{i}" for i in range(jobs)]
    add_crowd(draft, rng, jobs, 0.9, model=names, requested_gpu_type="a100")
    stream = draft.finish()
    visible = [e for e in stream.scenario.profiles if e.workload == ScalingModel().workload]
    return stream.change_conditions(visible=visible)


def draw_wrong_estimates(rng: Generator, jobs: int) -> JobStream:
    """Draw elastic jobs whose estimates are wrong by a factor of up to three, in each Cell."""
    models = [ScalingModel(name=f"model-{k}", power=0.7 + 0.05 * k) for k in range(5)]
    draft = StreamDraft(GpuPool(nodes=2), GpuPool(gpu_type="v100", nodes=2), models=models)
    add_crowd(
        draft,
        rng,
        jobs,
        0.8,
        elastic=True,
        model=[models[k].name for k in rng.integers(5, size=jobs).tolist()],
    )
    stream = draft.finish()
    guesses = perturb_estimates(stream.scenario.profiles, 0.45, int(rng.integers(2**31)))
    visible = [_limit_error(e, t) for e, t in zip(guesses, stream.scenario.profiles, strict=True)]
    return stream.change_conditions(visible=visible, measures=True)


def _limit_error(guess: EstimateRecord, truth: EstimateRecord) -> EstimateRecord:
    lowest_s, highest_s = truth.iter_time_s / MAX_ERROR_FACTOR, truth.iter_time_s * MAX_ERROR_FACTOR
    return replace(guess, iter_time_s=float(np.clip(guess.iter_time_s, lowest_s, highest_s)))


def draw_underestimates(rng: Generator, jobs: int) -> JobStream:
    """Draw rigid jobs that take up to three times as long as estimated, and gangs among them."""
    models = [ScalingModel(name=f"model-{k}") for k in range(8)]
    draft = StreamDraft(GpuPool(nodes=3), models=models)
    names = [models[k].name for k in rng.integers(8, size=jobs).tolist()]
    sizes, shares = (1, 2, 4, 8, 16), (0.4, 0.2, 0.2, 0.15, 0.05)
    add_crowd(draft, rng, jobs, 0.8, model=names, sizes=sizes, shares=shares)
    stream = draft.finish()
    factor = {model.name: rng.uniform(1.0, MAX_ERROR_FACTOR) for model in models}
    visible = [
        replace(e, iter_time_s=e.iter_time_s / factor[e.workload.model])
        for e in stream.scenario.profiles
    ]
    return stream.change_conditions(visible=visible, measures=True)


def draw_early_ends(rng: Generator, jobs: int) -> JobStream:
    """Draw jobs of which half end long before their estimate, and gangs among them."""
    draft = StreamDraft(GpuPool(nodes=3))
    sizes, shares = (1, 2, 4, 8, 16), (0.4, 0.2, 0.2, 0.15, 0.05)
    add_crowd(draft, rng, jobs, 1.1, sizes=sizes, shares=shares)
    stream = draft.finish()
    names = [arrival.spec.name for arrival in stream.scenario.arrivals]
    ends = {name: float(rng.uniform(0.05, 0.9)) for name in names if rng.random() < 0.5}
    return stream.change_conditions(exact=True, ended_early=ends)


def draw_failing_nodes(rng: Generator, jobs: int) -> JobStream:
    """Draw jobs on nodes that come and go, with gangs that need nearly all of them."""
    draft = StreamDraft(GpuPool(nodes=4))
    last_s = add_crowd(draft, rng, jobs - 2, 0.6)
    for _ in range(2):
        draft.add(rng.uniform(0.1, 0.8) * last_s, 24, HOUR_S, role="gang")
    stream = draft.finish()
    hazards = Hazards(between_failures_s=12 * HOUR_S, repair_s=0.5 * HOUR_S)
    seed, nodes = int(rng.integers(2**31)), stream.scenario.nodes
    return stream.change_conditions(failures=draw_failures(nodes, 3 * last_s, seed, hazards))


def draw_slow_nodes(rng: Generator, jobs: int) -> JobStream:
    """Draw jobs on nodes of which some take up to three times as long for a while."""
    draft = StreamDraft(GpuPool(nodes=3))
    last_s = add_crowd(draft, rng, jobs, 0.7)
    stream = draft.finish()
    lags = []
    for node in stream.scenario.nodes[:2]:
        start_s = rng.uniform(0.1, 0.6) * last_s
        factor = rng.uniform(1.5, MAX_ERROR_FACTOR)
        end_s = start_s + 0.3 * last_s
        lags.append(Straggler(node=node.name, start_s=start_s, end_s=end_s, factor=factor))
    return stream.change_conditions(stragglers=lags)


def draw_bursts(rng: Generator, jobs: int) -> JobStream:
    """Draw jobs that arrive all at once, some hours apart, with a gang in the middle of a burst."""
    draft = StreamDraft(GpuPool(nodes=3))
    bursts = 4
    for k in range(bursts):
        count = jobs // bursts
        gpus, durations_s = (
            rng.choice(SIZES, count, p=SIZE_SHARES),
            draw_durations_s(rng, count, 0.6 * HOUR_S),
        )
        gpus[count // 2] = 24
        for i in range(count):
            at_s = k * 4 * HOUR_S + rng.uniform(0, 120)
            draft.add(at_s, int(gpus[i]), float(durations_s[i]), role=f"burst-{k}")
    return draft.finish()


def draw_heavy_tails(rng: Generator, jobs: int) -> JobStream:
    """Draw minutes next to days: most jobs are short, and few have nearly all of the work."""
    draft = StreamDraft(GpuPool(nodes=3))
    add_crowd(draft, rng, jobs, 1.0, median_s=0.2 * HOUR_S, sigma=1.8, elastic=True)
    return draft.finish()


def draw_long_first(rng: Generator, jobs: int) -> JobStream:
    """Draw long jobs that fill the cluster and queue up, and then only short ones."""
    draft = StreamDraft(GpuPool(nodes=2))
    count = jobs // 6
    for _ in range(count):
        draft.add(
            rng.uniform(0, 0.5) * HOUR_S,
            int(rng.choice([4, 8, 16])),
            rng.uniform(2, 5) * HOUR_S,
            role="long",
        )
    for _ in range(jobs - count):
        at_s = rng.uniform(0.5, 12) * HOUR_S
        draft.add(at_s, int(rng.choice([1, 2])), rng.uniform(0.05, 0.5) * HOUR_S, role="short")
    return draft.finish()


def draw_fragments(rng: Generator, jobs: int) -> JobStream:
    """Draw jobs smaller than a node next to gangs that need whole nodes, and run on no others."""
    models = [ScalingModel(), ScalingModel(name="whole-nodes", compact=True)]
    draft = StreamDraft(GpuPool(nodes=6), models=models)
    gangs = max(3, jobs // 8)
    last_s = add_crowd(
        draft, rng, jobs - gangs, 0.6, sizes=(1, 2, 3, 5), shares=(0.4, 0.2, 0.2, 0.2)
    )
    for _ in range(gangs):
        at_s, gpus = rng.uniform(0.05, 0.9) * last_s, int(rng.choice([8, 16, 24]))
        draft.add(at_s, gpus, rng.uniform(0.3, 1.5) * HOUR_S, role="gang", model="whole-nodes")
    return draft.finish()


def draw_elastic(rng: Generator, jobs: int) -> JobStream:
    """Draw elastic jobs at a load of one and a half, which gain by ever other shares of GPUs."""
    draft = StreamDraft(GpuPool(nodes=4), models=[ScalingModel(power=0.85)])
    add_crowd(draft, rng, jobs, 1.5, elastic=True)
    return draft.finish()


def draw_overload(rng: Generator, jobs: int) -> JobStream:
    """Draw rigid jobs of one to sixteen GPUs at a load of two."""
    draft = StreamDraft(GpuPool(nodes=3))
    sizes, shares = (1, 2, 4, 8, 16), (0.35, 0.2, 0.2, 0.15, 0.1)
    add_crowd(draft, rng, jobs, 2.0, sizes=sizes, shares=shares)
    return draft.finish()


def draw_costly_restarts(rng: Generator, jobs: int) -> JobStream:
    """Draw elastic jobs of an hour whose starts take half an hour."""
    draft = StreamDraft(GpuPool(nodes=3))
    add_crowd(draft, rng, jobs, 0.9, median_s=1.5 * HOUR_S, elastic=True)
    return draft.finish().change_conditions(exact=True, overheads=preset_overheads("full-search"))


STREAMS: Final[Mapping[str, Drawer]] = {
    drawer.__name__.removeprefix("draw_").replace("_", "-"): drawer
    for drawer in (
        draw_one_gang,
        draw_several_gangs,
        draw_every_size,
        draw_pinned_types,
        draw_any_type,
        draw_node_selectors,
        draw_quotas,
        draw_deadlines,
        draw_arrays,
        draw_unestimated,
        draw_wrong_estimates,
        draw_underestimates,
        draw_early_ends,
        draw_failing_nodes,
        draw_slow_nodes,
        draw_bursts,
        draw_heavy_tails,
        draw_long_first,
        draw_queues,
        draw_fragments,
        draw_elastic,
        draw_overload,
        draw_costly_restarts,
        draw_fair_shares,
        draw_preemptible,
    )
}
"""The kinds of streams by name."""


def draw_stream(name: str, seed: int, jobs: int) -> JobStream:
    """Return the stream of a kind and seed with about this number of jobs.

    Raises:
        KeyError: there is no such kind.
    """
    return STREAMS[name](np.random.default_rng([seed, *name.encode()]), jobs)
