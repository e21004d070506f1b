"""Deadline schedules without promises: earliest deadline first, or a list that meets more weight.

A list states the order in which jobs are served and how each chooses among its Cells. It is
followed to its end (``tessera.solvers.kernels.rollout``) as if no other job came, which shows the
deadlines that it would meet. The best of several lists is kept, and changed while that helps
(rollout; Bertsekas, Tsitsiklis and Wu 1997, J. Heuristics 3).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

import numpy as np

from tessera.formulation.lookahead import Lookahead
from tessera.formulation.snapshot import Jobs, Legs
from tessera.formulation.tables import Bools, Floats, Ints
from tessera.solvers.kernels.jit import as_fixed_array
from tessera.solvers.kernels.rollout import (
    DRAWS_PER_CHANGE,
    MET,
    LegLog,
    RolloutProblem,
    follow_jobs,
    improve_list,
)

TRIES: Final = 200
"""Changes of the list that are tried."""
MOST_VISITS: Final = 4_000_000
"""Maximum number of visits of a job at a moment in all tries, if one job ends at each moment.

It takes about 0.3 s."""
SEED: Final = 1


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Rollout:
    """The jobs whose deadlines a list meets, and their legs.

    Legs are those of met jobs only, and follow one another. Times are seconds from now.
    """

    met: Bools  # bool[jobs]
    job: Ints  # int64[legs]
    option: Ints  # int64[legs]
    span_s: Floats  # float64[legs, 2]

    def legs(self, ahead: Lookahead) -> Legs:
        """Return the legs in absolute time."""
        cell, now_s = ahead.cell[self.option], float(ahead.boundary_s[0])
        return Legs(
            job=ahead.job[self.job],
            start_s=now_s + self.span_s[:, 0],
            end_s=now_s + self.span_s[:, 1],
            gpu_type=ahead.cells.gpu_type[cell],
            gpus=ahead.cells.gpus[cell],
            pipeline_degree=ahead.cells.pipeline_degree[cell],
            plan=ahead.cells.plan[cell],
        )


def roll_out(ahead: Lookahead, jobs: Jobs, free: Ints, among: Bools, round_s: float) -> Rollout:
    """Return the best list found for the jobs ``among``, followed to its end.

    ``among`` is bool[jobs of ``ahead``]; ``free`` is int64[resources, slots]. The first list is EDF
    as in ``tessera.solvers.schedulers.edf``: by deadline, each job on what it runs on, else as
    requested, else on its fastest Cell. Another list takes its place only if it meets more weight.
    So if no other job comes, no deadline is lost that EDF would meet.
    """
    if not among.any():
        none = np.zeros(0, np.int64)
        return Rollout(met=among, job=none, option=none, span_s=np.zeros((0, 2)))
    world = _rollout_problem(ahead, jobs, free, among, round_s)
    no_log = LegLog(np.zeros(0, np.int64), np.zeros(0, np.int64), np.zeros((0, 2)))
    best = -1.0
    fate = np.zeros(len(ahead.job), np.int64)
    for order in _orders(ahead, among):
        for taste in range(len(world.lists)):
            tastes = np.full(len(fate), taste)
            follow_jobs(world, order, tastes, fate, no_log)
            met = float(ahead.weight[(fate == MET) & among].sum())
            if met > best * (1 + 1e-9):
                best, chosen = met, (order, tastes)
    visits = len(fate) * world.most
    tries = min(TRIES, MOST_VISITS // visits)
    draws = np.random.default_rng(SEED).random((tries, 1 + 2 * DRAWS_PER_CHANGE))
    _, order, tastes = improve_list(world, *chosen, draws, no_log)
    return _followed(world, order, tastes)


def _rollout_problem(
    ahead: Lookahead, jobs: Jobs, free: Ints, among: Bools, round_s: float
) -> RolloutProblem:
    now_s, owner = ahead.boundary_s[0], ahead.owner
    changes = np.flatnonzero(np.append(True, (free[:, 1:] != free[:, :-1]).any(axis=0)))
    trains = ahead.rate > 0
    # Jobs that do not take part count as lost.
    deadline_s = np.where(among, ahead.deadline_s - now_s, -1.0)
    return RolloutProblem(
        option_start=as_fixed_array(ahead.option_start),
        lists=as_fixed_array(_lists(ahead, jobs)),
        use=as_fixed_array(ahead.use),
        rate=as_fixed_array(np.where(trains, ahead.rate, 1e-300)),
        stays=as_fixed_array(ahead.stays & among[owner]),
        now=as_fixed_array(ahead.now),
        lag_s=as_fixed_array(ahead.lag_s),
        work=as_fixed_array(ahead.work),
        deadline_s=as_fixed_array(deadline_s),
        restart_s=as_fixed_array(ahead.restart_s),
        weight=as_fixed_array(np.where(among, ahead.weight, 0.0)),
        step_s=as_fixed_array(ahead.boundary_s[changes] - now_s),
        free=as_fixed_array(free[:, changes].T),
        round_s=float(round_s),
        most=max(1, min(2 * len(among) + len(changes), MOST_VISITS // (10 * len(among)))),
    )


def _lists(ahead: Lookahead, jobs: Jobs) -> Ints:
    """Return each job's options in the order of each taste.

    The tastes are: as requested and then the fastest; the leanest; the fastest.
    """
    owner, kind = ahead.owner, ahead.cells.gpu_type[ahead.cell]
    gpus, wanted = ahead.cells.gpus[ahead.cell], jobs.requested_type[ahead.job][owner]
    requested = (gpus == jobs.requested_gpus[ahead.job][owner]) & ((wanted < 0) | (kind == wanted))
    per_rate = gpus / np.maximum(ahead.rate, 1e-300)
    return np.stack(
        [
            np.lexsort((-ahead.rate, ~requested, owner)),
            np.lexsort((per_rate, owner)),
            np.lexsort((-ahead.rate, owner)),
        ]
    )


def _orders(ahead: Lookahead, among: Bools) -> list[Ints]:
    """Return three orders of the jobs, in which jobs that do not count come last.

    They are by deadline, by latest start on the fastest Cell, and by GPU time per weight.
    """
    fastest, lean = np.full(len(ahead.job), 1e-300), np.full(len(ahead.job), np.inf)
    np.maximum.at(fastest, ahead.owner, ahead.rate)
    gpus = ahead.cells.gpus[ahead.cell]
    np.minimum.at(lean, ahead.owner, gpus / np.maximum(ahead.rate, 1e-300))
    latest_s = ahead.deadline_s - ahead.restart_s - ahead.work / fastest
    dear = lean * ahead.work / np.maximum(ahead.weight, 1e-12)
    last = ~among | (ahead.weight <= 0)
    return [np.lexsort((key, last)) for key in (ahead.deadline_s, latest_s, dear)]


def _followed(world: RolloutProblem, order: Ints, tastes: Ints) -> Rollout:
    fate, room = np.zeros(len(order), np.int64), 4 * len(order) + 16
    while True:
        log = LegLog(np.zeros(room, np.int64), np.zeros(room, np.int64), np.zeros((room, 2)))
        count = follow_jobs(world, order, tastes, fate, log)
        if count < room:
            break
        room *= 4
    is_met = fate[log.job[:count]] == MET
    return Rollout(
        met=fate == MET,
        job=log.job[:count][is_met],
        option=log.option[:count][is_met],
        span_s=log.span_s[:count][is_met],
    )
