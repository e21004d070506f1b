"""Forecasts of when jobs start and finish, kept up to date in the background.

Futures are followed in a process of its own with the lowest priority, so that they delay neither
rounds nor calls. Its time is limited to a share of the time between forecasts.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Final

from tessera.db.base import forecasts
from tessera.db.store.store import Store
from tessera.formulation.answer.pace import to_real_pace
from tessera.formulation.base.clock import SystemClock
from tessera.formulation.records.spreads import ClusterForecast, ForecastHistory
from tessera.formulation.state.snapshot import Snapshot
from tessera.service.server.rounds.background import run_in_process
from tessera.service.server.rounds.standing_policy import StandingPolicies
from tessera.simulator.forecasts.calibration import learn_corrections
from tessera.simulator.forecasts.draws import History
from tessera.simulator.forecasts.forecast import make_forecast, sample_times
from tessera.simulator.forecasts.rhythm import RoundRhythm
from tessera.simulator.run import Decider
from tessera.solvers.plugins import load_named
from tessera.solvers.rounds.options import RoundOptions

log = logging.getLogger(__name__)

FUTURES: Final = 32
"""The sampled futures of a forecast, if there is time for all."""
LEAST_FUTURES: Final = 8
"""The futures below which no forecast is made, since its bands would be arbitrary."""
COVERAGE: Final = 0.8
"""The share of events that lie in their bands."""
HORIZON_S: Final = 7 * 86_400.0
"""The time for which futures are followed."""
COARSENING: Final = 0.02
"""The share of the time from now by which rounds of futures are apart (``RoundRhythm``)."""
SOLVER: Final = "pricing"
"""The solver of the rounds of futures, unless the standing policy has a published scheduler. It is
about as good as the default and takes half as long."""

_CLOCK: Final = SystemClock()


@dataclass(frozen=True, slots=True, kw_only=True)
class ForecastOrder:
    """A forecast to make. It must end before ``end_s`` of the machine's monotonic clock."""

    snapshot: Snapshot
    history: ForecastHistory
    options: RoundOptions
    rhythm: RoundRhythm
    end_s: float


class Forecaster:
    """A keeper of a cluster's forecasts. Its methods block, and one thread uses it at a time.

    ``policies`` are the standing policies, and ``rhythm`` says when rounds take place. A forecast may
    take ``limit_s`` seconds. Agents replay ``clock_factor`` seconds of training in one second. ``make``
    is the function that makes the forecast.
    """

    def __init__(
        self,
        store: Store,
        policies: StandingPolicies,
        rhythm: RoundRhythm,
        limit_s: float,
        clock_factor: float = 1.0,
        make: Callable[[ForecastOrder, Callable[[], bool]], ClusterForecast | None] | None = None,
    ) -> None:
        self._store, self._policies, self._rhythm = store, policies, rhythm
        self._limit_s, self._clock_factor = limit_s, clock_factor
        self._make = make or forecast_in_process

    def refresh(
        self,
        cluster: str,
        cancelled: Callable[[], bool],
        _woken: Callable[[], bool] = lambda: False,
    ) -> None:
        """Forecast the cluster's jobs again.

        If there is no time for enough futures, the old forecasts stay, with their time.

        Raises:
            NotFound: the cluster.
        """
        options = forecast_options(self._policies.of(cluster).options)
        present = self._store.snapshot(cluster, options.use_half_life_s)
        snapshot = to_real_pace(replace(present, clock_factor=self._clock_factor))
        if not len(snapshot.jobs):
            return
        order = ForecastOrder(
            snapshot=snapshot,
            history=self._store.read(forecasts.load_history, cluster),
            options=options,
            rhythm=self._rhythm,
            end_s=_CLOCK.monotonic_s() + self._limit_s,
        )
        made = self._make(order, cancelled)
        if made is not None:
            self._store.update(forecasts.put_forecast, cluster, made)
        elif not cancelled():
            log.info(
                "made no forecast, because too few futures were followed in time; raise the setting"
                " forecast_share",
                extra={
                    "event": "forecast_too_slow",
                    "cluster": cluster,
                    "least_futures": LEAST_FUTURES,
                    "limit_s": self._limit_s,
                },
            )


def make_ordered_forecast(order: ForecastOrder) -> ClusterForecast | None:
    """Return the forecast, or None if there was no time for enough futures."""
    load_named(order.options.scheduler, order.options.objective)  # the server allowed them
    sampled = sample_times(
        order.snapshot,
        History.of(order.history.submissions, order.snapshot),
        Decider(order.options),
        futures=FUTURES,
        seed=order.snapshot.round_number,
        rhythm=order.rhythm,
        wanted=lambda: _CLOCK.monotonic_s() < order.end_s,
    )
    if len(sampled.start_s) < LEAST_FUTURES:
        return None
    corrections = learn_corrections(order.history.past, COVERAGE)
    return make_forecast(sampled, corrections, COVERAGE)


def forecast_in_process(
    order: ForecastOrder, cancelled: Callable[[], bool]
) -> ClusterForecast | None:
    """Return the forecast as ``make_ordered_forecast`` does, from a process of its own.

    None if it was cancelled.

    Raises:
        Unavailable: the process has died.
    """
    return run_in_process(make_ordered_forecast, order, cancelled, name="forecast")


def forecast_options(standing: RoundOptions) -> RoundOptions:
    """Return the standing policy with a fast solver."""
    return replace(standing, solver=SOLVER)


def forecast_rhythm(spacing_s: float, period_s: float) -> RoundRhythm:
    """Return when rounds of futures take place, by the settings of a server."""
    return RoundRhythm(
        spacing_s=spacing_s,
        period_s=period_s or math.inf,
        horizon_s=HORIZON_S,
        coarsening=COARSENING,
    )
