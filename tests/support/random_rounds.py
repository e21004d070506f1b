"""Random small rounds with objectives of several stages, promises and limits."""

from __future__ import annotations

from dataclasses import replace
from typing import Final

import numpy as np

from tessera.benchmarks.rounds.small_rounds import draw_snapshot, with_equal_shares
from tessera.formulation.base.errors import InvalidInput
from tessera.formulation.round.grammar import LEXICOGRAPHIC
from tessera.formulation.round.policy import Policy
from tessera.formulation.state.snapshot import Snapshot

MAX_JOBS: Final = 6
MAX_STAGES: Final = 3
MAX_LEVELS: Final = 8
SUM_OBJECTIVES: Final = ("throughput", "jct", "balanced", "balanced:0.25", "cost")
DEADLINE_SHARE: Final = 0.1
"""The share of the rounds that keep deadlines. Each of these may search for schedules."""


def draw_round(rng: np.random.Generator) -> tuple[Snapshot, Policy]:
    """Draw a round of a few jobs and its policy."""
    snapshot = with_equal_shares(
        draw_snapshot(rng, int(rng.integers(1, MAX_JOBS + 1)), int(rng.integers(4, 17)))
    )
    jobs = len(snapshot.jobs)
    changed = replace(
        snapshot.jobs,
        guaranteed=rng.random(jobs) < rng.choice([0.0, 0.5]),
        priority=rng.integers(1, 4, jobs),
        weight=rng.choice([0.0, 0.5, 1.0, 2.0], jobs),
    )
    return replace(snapshot, jobs=changed), draw_policy(rng)


def draw_policy(rng: np.random.Generator) -> Policy:
    """Draw an objective of one to ``MAX_STAGES`` stages, with promises and limits."""
    while True:
        stages = [_stage(rng) for _ in range(int(rng.integers(1, MAX_STAGES + 1)))]
        deadlines = "myopic" if rng.random() < 0.5 else "look-ahead"
        try:
            return Policy(
                objective=" then ".join(stages),
                fairness_levels=int(rng.integers(1, MAX_LEVELS + 1)),
                max_changes=int(rng.choice([-1, -1, 0, 1, 2])),
                keep_requests=bool(rng.random() < 0.5),
                promise_starts=bool(rng.random() < 0.5),
                change_spacing=float(rng.choice([0.0, 0.0, 4.0, 100.0])),
                deadlines=deadlines if rng.random() < DEADLINE_SHARE else "ignore",
            )
        except InvalidInput:  # a stage is named twice
            continue


def _stage(rng: np.random.Generator) -> str:
    if rng.random() < 0.6:
        text = str(rng.choice(LEXICOGRAPHIC))
    else:
        names = rng.choice(SUM_OBJECTIVES, size=int(rng.integers(1, 3)), replace=False).tolist()
        text = " + ".join(f"{rng.choice([0.3, 0.7, 1.0]):g}*{name}" for name in names)
    return text if rng.random() < 0.6 else f"{text} within {rng.choice([0, 1, 5, 50]):g}%"
