"""Shadows: policies that decide on the states of committed rounds, without any effect.

A shadow decides in a process of its own with the lowest priority, after the round is committed. It
therefore delays no round and no call, and its failure is only a remark in its comparison. Its time
is limited to a share of the time that passes.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Final

from tessera.formulation.cancellation import never_cancelled
from tessera.formulation.clock import Clock, SystemClock
from tessera.formulation.errors import NotAllowed, NotFound, TesseraError
from tessera.formulation.records.policies import DecisionFigures, ShadowRound
from tessera.formulation.records.rounds import RoundRecord, RoundSummary
from tessera.formulation.snapshot import Snapshot
from tessera.service.background import run_in_process
from tessera.service.deciding import decide_again
from tessera.service.ports.store import Store
from tessera.service.standing_policy import StandingPolicies
from tessera.solvers.base import Budget
from tessera.solvers.plugins import load_named
from tessera.solvers.rounds.measuring import count_effective_gpus, measure_decisions
from tessera.solvers.rounds.options import RoundOptions, recorded_options

log = logging.getLogger(__name__)

PERIOD_S: Final = 15.0
"""Seconds between checks whether a round was committed that a shadow has not decided."""
PATIENCE: Final = 4.0
"""Multiple of a round's time limit after which a shadow is ended. It runs at the lowest priority."""
DECIDING: Final = ("build", "greedy", "solve", "place", "check", "network")
"""The phases of a round that its policy decides in."""

_CLOCK: Final = SystemClock()


@dataclass(frozen=True, slots=True, kw_only=True)
class ShadowOrder:
    """A round for a shadow to decide: its state, its decisions and the shadow's options."""

    snapshot: Snapshot
    record: RoundRecord
    options: RoundOptions
    limit_s: float  # the time that a round may take


Decide = Callable[[ShadowOrder, Callable[[], bool]], ShadowRound | None]


class ShadowKeeper:
    """A keeper of the shadows of clusters. Its methods block, and one thread uses it at a time.

    A round may take ``limit_s`` seconds. The shadows of a cluster use up to ``share`` of the time,
    so they leave out rounds if there are too many. ``decide`` is the function that decides.
    """

    def __init__(
        self,
        store: Store,
        policies: StandingPolicies,
        clock: Clock,
        *,
        limit_s: float,
        share: float,
        decide: Decide | None = None,
    ) -> None:
        self._store, self._policies, self._clock = store, policies, clock
        self._limit_s, self._share = limit_s, share
        self._decide = decide or partial(_decide_in_process, limit_s * PATIENCE)
        self._rests_until_s: dict[str, float] = {}

    def follow(
        self,
        cluster: str,
        cancelled: Callable[[], bool],
        _woken: Callable[[], bool] = lambda: False,
    ) -> None:
        """Let the cluster's shadow decide the newest round, if it has not decided it.

        Raises:
            NotFound: the cluster.
        """
        began_s = self._clock.monotonic_s()
        shadow = self._store.find_shadow(cluster)
        if shadow is None:
            self.forget(cluster)
            return
        if began_s < self._rests_until_s.get(cluster, -math.inf):
            return
        newest = next(iter(self._store.list_rounds(cluster, 0, 1)), None)
        if newest is None or newest.number <= shadow.last_round or newest.created_s < shadow.set_s:
            return
        try:
            options = self._policies.read_shadow(shadow.options)
            decided = self._shadow_round(newest, options, cancelled)
        except (NotFound, NotAllowed) as gone:  # retention was faster
            log.info(
                "a round is left out of a shadow",
                extra={
                    "event": "shadow_round_skipped",
                    "cluster": cluster,
                    "round": newest.number,
                    "error": gone,
                },
            )
            return
        except TesseraError as error:
            log.warning(
                "the shadow failed on a round",
                extra={
                    "event": "shadow_failed",
                    "cluster": cluster,
                    "round": newest.number,
                    "error": error,
                },
            )
            decided = ShadowRound(
                number=newest.number, created_s=newest.created_s, problem=str(error)
            )
        if decided is not None:
            self._store.add_shadow_round(shadow.key, decided)
        now_s = self._clock.monotonic_s()
        self._rests_until_s[cluster] = now_s + (now_s - began_s) * (1.0 / self._share - 1.0)

    def forget(self, cluster: str) -> None:
        """Drop what is remembered about a cluster."""
        self._rests_until_s.pop(cluster, None)

    def _shadow_round(
        self, newest: RoundSummary, options: RoundOptions, cancelled: Callable[[], bool]
    ) -> ShadowRound | None:
        """Return the shadow's round, or None if it was cancelled or the round was refused."""
        if newest.outcome != "committed":
            return None
        order = ShadowOrder(
            snapshot=self._store.round_snapshot(newest.cluster, newest.number),
            record=self._store.get_round(newest.cluster, newest.number),
            options=options,
            limit_s=self._limit_s,
        )
        return self._decide(order, cancelled)


def decide_ordered_round(order: ShadowOrder) -> ShadowRound:
    """Return the shadow's decisions on the state of a round, compared with the round's own."""
    end_s = _CLOCK.monotonic_s() + order.limit_s
    policy = recorded_options(order.record.summary.options)
    for options in (order.options, policy):
        load_named(options.scheduler, options.objective)  # the server allowed them
    shadow = decide_again(
        order.snapshot,
        order.options,
        _CLOCK,
        remaining_s=lambda: end_s - _CLOCK.monotonic_s(),
        cancelled=never_cancelled,
    )
    summary = order.record.summary
    decisions = [order.record.decisions, shadow.decisions]
    by_policy, by_shadow = (
        measure_decisions(order.snapshot, options, decisions, Budget(remaining_s=lambda: math.inf))
        for options in (policy, order.options)
    )
    effective = count_effective_gpus(order.snapshot, decisions)
    sides = [
        DecisionFigures(
            by_policy=of_policy.values,
            by_shadow=of_shadow.values,
            effective_gpus=gpus,
            used_gpus=sum(d.allocation.cell.gpus for d in side.decisions if d.allocation),
            running=side.summary.running,
            waiting=side.summary.waiting,
            started=side.summary.started,
            suspended=side.summary.suspended,
            changed=side.summary.changed,
            solve_s=sum(side.summary.seconds.get(phase, 0.0) for phase in DECIDING),
            gap=math.nan if side.summary.bound_is_trivial else side.summary.gap,
        )
        for side, of_policy, of_shadow, gpus in zip(
            (order.record, shadow), by_policy, by_shadow, effective, strict=True
        )
    ]
    return ShadowRound(
        number=summary.number,
        created_s=summary.created_s,
        policy_goals=by_policy[0].names,
        shadow_goals=by_shadow[0].names,
        policy=sides[0],
        shadow=sides[1],
        problem="; ".join(shadow.summary.violations),
    )


def _decide_in_process(
    patience_s: float, order: ShadowOrder, cancelled: Callable[[], bool]
) -> ShadowRound | None:
    return run_in_process(decide_ordered_round, order, cancelled, name="shadow", limit_s=patience_s)
