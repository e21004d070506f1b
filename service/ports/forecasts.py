"""Forecasts of when jobs start and finish."""

from __future__ import annotations

from typing import Protocol

from tessera.formulation.spreads import ClusterForecast, ForecastHistory


class ForecastStore(Protocol):
    """The part of a store that keeps forecasts."""

    def forecast_history(self, cluster: str) -> ForecastHistory:
        """Return what a forecast learns from: submissions of the last days, and past forecasts."""
        ...

    def put_forecast(self, cluster: str, forecast: ClusterForecast) -> None:
        """Store the forecasts of jobs that are still live, in place of older ones."""
        ...
