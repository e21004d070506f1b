"""The service's answers to questions about what would happen: from the store to a process and back."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Final

from tessera.db.base import forecasts
from tessera.db.store.store import Store
from tessera.formulation.answer.hypotheses import require_consistent
from tessera.formulation.base.clock import Clock
from tessera.formulation.base.errors import DeadlineTooShort
from tessera.formulation.records.jobs import JobSpec
from tessera.formulation.records.what_if import WhatIfAnswer
from tessera.formulation.state.snapshot import Snapshot
from tessera.service.server.rounds.background import FOR_CALLER, run_in_process
from tessera.service.server.rounds.deciding import require_known_options
from tessera.service.server.rounds.forecaster import forecast_rhythm
from tessera.service.server.settings.config import Config
from tessera.service.server.what_if.answering import answer_question
from tessera.service.server.what_if.orders import FuturesOrder, HypothesisQuestion, WhatIfOrder
from tessera.service.server.what_if.previewing import JobPreviewer
from tessera.simulator.forecasts.rhythm import RoundRhythm
from tessera.solvers.rounds.options import RoundOptions

ANSWER_S: Final = 1.0
"""Seconds that are kept for the way of the answer from its process to the caller."""

Compute = Callable[[WhatIfOrder, Callable[[], bool]], WhatIfAnswer | None]


@dataclass(frozen=True, slots=True, kw_only=True)
class Lookahead:
    """The futures that a caller asks for. Without a horizon, none are followed."""

    horizon_s: float
    futures: int


class WhatIfAsker:
    """An asker of questions about clusters. Its methods block.

    ``rhythm`` says when futures have rounds.
    """

    def __init__(
        self,
        store: Store,
        previewer: JobPreviewer,
        clock: Clock,
        *,
        rhythm: RoundRhythm,
        clock_factor: float = 1.0,
        compute: Compute | None = None,
    ) -> None:
        self._store, self._previewer, self._clock = store, previewer, clock
        self._rhythm, self._clock_factor = rhythm, clock_factor
        self._compute = compute or _answer_in_process

    def ask(
        self,
        cluster: str,
        question: HypothesisQuestion,
        jobs: Sequence[JobSpec],
        ahead: Lookahead,
        *,
        standing: RoundOptions,
        remaining_s: Callable[[], float],
        cancelled: Callable[[], bool],
    ) -> WhatIfAnswer:
        """Return the answer to ``question`` about the present state, with ``jobs`` submitted.

        ``standing`` are the options of rounds without the changes.

        Raises:
            NotFound, AlreadyExists, InvalidInput, LimitReached: what a change names does not exist
                or contradicts something. NotAllowed: a round would be refused.
            DeadlineTooShort: the time ended, or the call was cancelled.
        """
        require_known_options(question.options, commits=False)
        half_life_s = standing.use_half_life_s or question.options.use_half_life_s
        snapshot = replace(
            self._previewer.snapshot_with(cluster, jobs, half_life_s, cancelled),
            clock_factor=self._clock_factor,
        )
        require_consistent(snapshot, question.hypotheses)
        order = WhatIfOrder(
            snapshot=snapshot,
            options=standing,
            question=question,
            end_s=self._clock.monotonic_s() + remaining_s() - ANSWER_S,
            futures=self._futures(cluster, snapshot, ahead),
        )
        answer = self._compute(order, lambda: cancelled() or remaining_s() <= 0)
        if answer is None:
            raise DeadlineTooShort(
                "the call's time ended before there was an answer; call again with a longer deadline"
            )
        return answer

    def _futures(self, cluster: str, snapshot: Snapshot, ahead: Lookahead) -> FuturesOrder | None:
        if not ahead.horizon_s:
            return None
        return FuturesOrder(
            history=self._store.read(forecasts.load_history, cluster),
            rhythm=replace(self._rhythm, horizon_s=ahead.horizon_s),
            futures=ahead.futures,
            seed=snapshot.round_number,
        )


def make_asker(config: Config, store: Store, clock: Clock) -> WhatIfAsker:
    """Return the asker of a server with the settings ``config``."""
    previewer = JobPreviewer(
        store,
        config.catalogue(),
        config.estimate_multiples(),
        derives=config.estimate_cells,
        learns=config.learn,
    )
    return WhatIfAsker(
        store,
        previewer,
        clock,
        rhythm=forecast_rhythm(config.round_spacing_s, config.period_s),
        clock_factor=config.clock_factor,
    )


def _answer_in_process(order: WhatIfOrder, cancelled: Callable[[], bool]) -> WhatIfAnswer | None:
    return run_in_process(answer_question, order, cancelled, name="what-if", niceness=FOR_CALLER)
