"""Steps that give the jobs of a trace other models, GPU counts and types, at equal GPU-hours.

The method is that of Morphling, section 7.3. Each job of the trace gets a model at random. A GPU
count on which that model does not run is replaced by one on which it does. The duration is adjusted
so that the GPU-hours stay the same. If the requests are kept, only models that run on them are drawn.
"""

from __future__ import annotations

import math
import re
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from functools import cache
from itertools import chain
from typing import Final

import numpy as np
from numpy.random import Generator

from tessera.formulation.base.errors import InvalidInput
from tessera.formulation.base.values import Workload
from tessera.simulator.traces.speeds import Speeds
from tessera.simulator.traces.trace import PLAN_LABEL, Arrival, DurationJob

LARGE_FROM: Final = 6e9
"""Number of parameters from which a model counts as large by default. Morphling's large models are
LLaMA-7B and LLaMA-30B (section 7.4), and 6.7B is the smallest of Arena's models that data
parallelism cannot run."""

_SIZE: Final = re.compile(r"([0-9]+(?:\.[0-9]+)?)([KMBT])", re.ASCII)
_UNITS: Final = {"K": 1e3, "M": 1e6, "B": 1e9, "T": 1e12}

Size = tuple[str, str]
"""A model and its size."""


def parameter_count(params: str) -> float:
    """Return the number of parameters of a size such as ``690M`` or ``1.3B``.

    Raises:
        InvalidInput: the text is not a size.
    """
    match = _SIZE.fullmatch(params)
    if match is None:
        raise InvalidInput("params", f"{params!r} is not a size such as 690M or 1.3B")
    return float(match[1]) * _UNITS[match[2]]


def count_sizes(arrivals: Iterable[Arrival]) -> Counter[Size]:
    """Return the number of jobs of each model and size."""
    return Counter((a.spec.workload.model, a.spec.workload.params) for a in arrivals)


def job_requests(arrivals: Sequence[Arrival], speeds: Speeds) -> list[DurationJob]:
    """Return the requests of the jobs without their models.

    Raises:
        InvalidInput: a job does not run as requested, so that its GPU-hours are unknown.
    """
    duration_s = speeds.requested_s(arrivals).tolist()
    requests = [
        DurationJob(a.arrival_s, s, a.spec) for a, s in zip(arrivals, duration_s, strict=True)
    ]
    if missing := [one.spec.name for one in requests if one.duration_s == math.inf]:
        raise InvalidInput(
            "arrivals",
            f"have {len(missing):,} jobs that do not run as requested"
            f" ({', '.join(missing[:5])}); drop them",
        )
    return requests


def redraw_models(
    jobs: Sequence[DurationJob],
    speeds: Speeds,
    seed: int,
    among: Callable[[Workload], bool] = lambda _: True,
    *,
    keep_requests: bool = False,
) -> list[Arrival]:
    """Return the jobs with models, GPU counts and types drawn by ``seed``, at equal GPU-hours.

    Three uniform draws are made for each job: one of the model sizes that run and are ``among`` the
    allowed ones, one of its batches, and one of the GPU types that run it on the job's number of
    GPUs. If no type does, the nearest number by ratio is taken (the larger of two). Iterations are
    rounded to at least one. A job's GPU-seconds therefore change by at most half an iteration, or
    to those of one iteration if the job is shorter. Deadlines stay as tight as they were.

    With ``keep_requests``, only models are drawn that run on the job's GPUs of its GPU type. If none
    does, the type is drawn, and if none runs on the number of GPUs, the nearest on which any does is
    taken.

    Raises:
        InvalidInput: nothing that may be drawn runs, or a job's duration is not a positive number.
    """
    menu: dict[Size, list[Workload]] = defaultdict(list)
    for work in filter(among, speeds.workloads()):
        menu[work.model, work.params].append(work)
    if not menu:
        raise InvalidInput("profiles", "have no model that may be drawn and runs on the cluster")
    if wrong := [one.spec.name for one in jobs if not 0 < one.duration_s < math.inf]:
        raise InvalidInput(
            "jobs", f"must have finite durations above 0; {', '.join(wrong[:5])} do not"
        )
    rng, every = np.random.default_rng(seed), list(menu.values())
    if not keep_requests:
        return [_redrawn(rng, one, every, speeds) for one in jobs]

    counts = {n for work in chain(*every) for _, n in speeds.cells(work)}

    @cache
    def fitting(kind: str, gpus: int) -> Sequence[Sequence[Workload]]:
        """Return the part of the menu that runs on these GPUs, of any type if ``kind`` is ""."""
        chosen = [
            [w for w in batches if any(n == gpus and kind in ("", k) for k, n in speeds.cells(w))]
            for batches in every
        ]
        return [batches for batches in chosen if batches]

    drawn = []
    for job in jobs:
        kind, gpus = job.spec.requested_gpu_type, _nearest(counts, job.spec.requested_gpus)
        kept = kind if fitting(kind, gpus) else ""
        drawn.append(_redrawn(rng, job, fitting(kept, gpus), speeds, kept))
    return drawn


def _redrawn(
    rng: Generator,
    job: DurationJob,
    menu: Sequence[Sequence[Workload]],
    speeds: Speeds,
    gpu_type: str = "",
) -> Arrival:
    """Return the job with a model of ``menu``, on ``gpu_type``, or on any type if that is ""."""
    batches = menu[int(rng.integers(len(menu)))]
    work = batches[int(rng.integers(len(batches)))]
    cells = speeds.cells(work)
    wanted = job.spec.requested_gpus
    gpus = _nearest({n for _, n in cells}, wanted)
    kinds = [kind for kind, n in cells if n == gpus]
    kind = gpu_type or kinds[int(rng.integers(len(kinds)))]
    duration_s = job.duration_s * wanted / gpus
    spec = replace(
        job.spec,
        workload=work,
        requested_gpus=gpus,
        requested_gpu_type=kind,
        submitted_plan="",
        labels={k: v for k, v in job.spec.labels.items() if k != PLAN_LABEL},
        iterations=max(1, round(duration_s / cells[kind, gpus])),
        deadline_s=job.spec.deadline_s * wanted / gpus,
    )
    return Arrival(job.arrival_s, spec)


def _nearest(counts: Iterable[int], wanted: int) -> int:
    """Return the count nearest to ``wanted`` by ratio, and of two the larger."""
    return min(counts, key=lambda n: (abs(math.log2(n / wanted)), -n))


def with_large_share(
    arrivals: Sequence[Arrival],
    speeds: Speeds,
    share: float,
    seed: int,
    large_from: float = LARGE_FROM,
) -> list[Arrival]:
    """Return the jobs with the given share of large models (Morphling, section 7.4, Figure 11).

    As few jobs as possible, drawn uniformly, are redrawn at equal GPU-hours, from small models to
    large ones or the reverse.
    """
    if not 0 <= share <= 1:
        raise InvalidInput("share", "must be from 0 to 1")

    def large(work: Workload) -> bool:
        return parameter_count(work.params) >= large_from

    is_large = np.array([large(a.spec.workload) for a in arrivals], bool)
    missing = round(share * len(arrivals)) - int(is_large.sum())
    if missing == 0:
        return list(arrivals)
    rng = np.random.default_rng(seed)
    candidates = np.flatnonzero(~is_large if missing > 0 else is_large)
    chosen = np.sort(rng.permutation(candidates)[: abs(missing)]).tolist()
    drawn = redraw_models(
        job_requests([arrivals[i] for i in chosen], speeds),
        speeds,
        int(rng.integers(2**31)),
        among=lambda work: large(work) == (missing > 0),
    )
    changed = dict(zip(chosen, drawn, strict=True))
    return [changed.get(i, a) for i, a in enumerate(arrivals)]
