"""The entries of contests, and the rounds that they are about."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

import numpy as np

from tessera.benchmarks.rounds.families import NAMED_FAMILIES, draw_family
from tessera.benchmarks.rounds.instances import make_instance
from tessera.formulation.base.errors import InvalidInput
from tessera.formulation.round.goals import Linear
from tessera.formulation.round.policy import Policy
from tessera.formulation.round.problem import Problem
from tessera.formulation.round.statement import Statement, state_round
from tessera.formulation.state.snapshot import Snapshot

OWN_OBJECTIVE: Final = "throughput"
"""The usual objective of entries. Rounds that are stated as problems have values of their own."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ContestEntry:
    """A solver and the rounds that it solves.

    If ``churn`` is above 0, the round after that share of churn is solved cold and warm. A named
    family (``tessera.benchmarks.rounds.families``) has its own number of jobs, GPUs or types where
    that is 0. Its rounds begin on an idle cluster.
    """

    solver: str
    jobs: int
    gpus: int
    types: int
    family: str = "real"
    objective: str = OWN_OBJECTIVE
    time_limit_s: float = 30.0
    gap: float = 1e-4
    workers: int = 2
    seed: int = 0
    repeats: int = 1
    running: float = 0.0
    churn: float = 0.0


def draw_round(entry: ContestEntry) -> Snapshot | Problem:
    """Return the round of ``entry``: a snapshot, or a problem where the family is stated as one.

    Raises:
        InvalidInput: there is no such family, or it does not have rounds of this size.
        MissingData: the family needs data that this machine does not have.
    """
    if entry.family in NAMED_FAMILIES:
        return draw_family(
            entry.family, jobs=entry.jobs, gpus=entry.gpus, types=entry.types, seed=entry.seed
        )
    return make_instance(
        entry.jobs, entry.gpus, entry.types, entry.seed, family=entry.family, running=entry.running
    )


def state_drawn(drawn: Snapshot | Problem, objective: str) -> Statement:
    """Return the statement of a round.

    Raises:
        InvalidInput: the round is a problem, whose values are its own, and an objective is named.
    """
    if isinstance(drawn, Snapshot):
        return state_round(drawn, Policy(objective=objective, promise_starts=False))
    if objective != OWN_OBJECTIVE:
        raise InvalidInput("objective", "of this family is its own; leave the objective out")
    goal = Linear(
        name="value",
        unit=drawn.unit,
        value=drawn.value,
        restart_price=drawn.restart_price,
        scale=drawn.scale,
    )
    return Statement(
        problem=drawn,
        goals=(goal,),
        absent={},
        rejected=frozenset(),
        opportunistic=np.zeros(len(drawn.jobs), np.bool_),
    )
