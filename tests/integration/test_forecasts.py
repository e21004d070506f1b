"""Forecasts: stored for live jobs, learned from by later ones, and made in a process of their own."""

from __future__ import annotations

import asyncio
import math
import statistics
from collections.abc import Callable
from dataclasses import replace

import pytest

from tessera.db.engine import Database
from tessera.db.store import PostgresStore
from tessera.formulation.lifecycle import JobEvent
from tessera.formulation.records.forecasts import FINISH, START, Band, JobForecast
from tessera.formulation.spreads import ClusterForecast, ForecastHistory, Spread
from tessera.service.config import Config
from tessera.service.forecaster import (
    Forecaster,
    ForecastOrder,
    forecast_rhythm,
    make_ordered_forecast,
)
from tessera.service.standing_policy import StandingPolicies
from tessera.service.wiring import run_server
from tests.support.patience import PATIENCE_S
from tests.support.stored_cluster import (
    BERT,
    C,
    a_cluster,
    a_spec,
    apply_event,
    execute,
    job,
    run,
    submit,
)

A0 = "a100-0"
SPREAD = Spread((10.0, 20.0, 40.0))


@pytest.fixture
def store(database: Database) -> PostgresStore:
    """Return a store whose agents do not expire, however slow the machine is."""
    return PostgresStore(database, lease_s=3600.0)


@pytest.fixture
def busy(store: PostgresStore) -> PostgresStore:
    """Return a store with a node of four GPUs, on which a runs while b waits for it."""
    a_cluster(store, nodes=1, gpus=4)
    submit(store, a_spec("a", requested_gpus=4), a_spec("b", requested_gpus=4))
    run(store, a=[(A0, range(4))])
    return store


def a_forecast(made_s: float, *names: str) -> ClusterForecast:
    """Return a forecast that says the same of each of ``names``."""
    band = Band(low_s=made_s + 10, median_s=made_s + 20, high_s=math.inf)
    return ClusterForecast(
        made_s=made_s,
        futures=8,
        jobs=tuple(
            JobForecast(job=name, made_s=made_s, coverage=0.8, position=1, start=band)
            for name in names
        ),
        spreads={(event, name): SPREAD for event in (START, FINISH) for name in names},
    )


def test_a_job_has_its_newest_forecast(busy: PostgresStore) -> None:
    assert job(busy, "b").forecast is None
    busy.put_forecast(C, a_forecast(1000.0, "a", "b", "unheard"))
    busy.put_forecast(C, a_forecast(3000.0, "b"))
    busy.put_forecast(C, a_forecast(2000.0, "b"))  # of a replica that was late
    assert job(busy, "a").forecast == a_forecast(1000.0, "a").jobs[0]
    assert job(busy, "b").forecast == a_forecast(3000.0, "b").jobs[0]


def test_later_forecasts_learn_the_first_spreads_and_what_became_of_them(
    busy: PostgresStore, database: Database
) -> None:
    now_s = busy.snapshot(C).now_s
    busy.put_forecast(C, a_forecast(now_s - 100.0, "a", "b"))
    later = ClusterForecast(
        made_s=now_s,
        futures=8,
        jobs=(),
        spreads={(START, "b"): Spread((1.0, 2.0, 3.0))},
    )
    busy.put_forecast(C, later)
    execute(database, "UPDATE job_starts SET given_at = now() - interval '40 s'")
    past = busy.forecast_history(C).past
    starts = {one.happened: one for one in past[START]}
    assert starts[True].after_s == pytest.approx(60.0, abs=30.0)  # a has started
    assert starts[False].after_s >= 100.0  # b has not, until now
    assert all(one.spread == SPREAD for one in past[START])
    assert [one.happened for one in past[FINISH]] == [False, False]
    apply_event(busy, "b", JobEvent.CANCEL)
    ended = busy.forecast_history(C).past
    assert sorted(one.happened for one in ended[FINISH]) == [False, True]
    assert sorted(one.happened for one in ended[START]) == [False, True]  # b never starts


def test_submissions_tell_what_ended_jobs_had_trained(
    busy: PostgresStore, database: Database
) -> None:
    apply_event(busy, "b", JobEvent.CANCEL)
    execute(database, "UPDATE jobs SET iterations_done = 250 WHERE name = 'b'")
    submit(busy, a_spec("old"))
    execute(database, "UPDATE jobs SET created_at = now() - interval '9 days' WHERE name = 'old'")
    first, second = busy.forecast_history(C).submissions
    assert math.isnan(first.trained_share)
    assert second.trained_share == 0.25
    assert (first.workload, first.requested_gpus, first.iterations) == (BERT, 4, 1000)


def test_the_forecaster_tells_a_waiting_job_when_it_starts(busy: PostgresStore) -> None:
    policies = StandingPolicies(busy)
    forecaster = Forecaster(busy, policies, forecast_rhythm(3.0, 300.0), limit_s=600.0)
    forecaster.refresh(C, lambda: False)
    now_s = busy.snapshot(C).now_s
    running, waiting = job(busy, "a").forecast, job(busy, "b").forecast
    assert running is not None
    assert waiting is not None
    assert (running.position, waiting.position) == (0, 1)
    assert running.start is None
    assert running.finish is not None
    assert waiting.start is not None
    assert waiting.finish is not None
    assert waiting.finish.median_s >= waiting.start.median_s
    assert waiting.made_s == pytest.approx(now_s, abs=600.0)
    assert waiting.why_not == ""


def test_forecasts_are_in_real_seconds_under_a_clock_factor(busy: PostgresStore) -> None:
    made: list[ClusterForecast] = []

    def make_without_history(
        order: ForecastOrder, _cancelled: Callable[[], bool]
    ) -> ClusterForecast | None:
        """Make a forecast without arrivals, whose gaps are times of the machine's clock."""
        forecast = make_ordered_forecast(replace(order, history=ForecastHistory()))
        made.extend([] if forecast is None else [forecast])
        return forecast

    for factor in (1.0, 10.0):
        Forecaster(
            busy,
            StandingPolicies(busy),
            forecast_rhythm(3.0, 300.0),
            limit_s=600.0,
            clock_factor=factor,
            make=make_without_history,
        ).refresh(C, lambda: False)
    # The bands themselves are wider by corrections in seconds, which no clock factor divides.
    slow_s, fast_s = (statistics.median(one.spreads[FINISH, "a"].times_s) for one in made)
    assert slow_s == pytest.approx(10 * fast_s, rel=0.1)


def test_without_time_for_futures_the_old_forecast_stays(busy: PostgresStore) -> None:
    busy.put_forecast(C, a_forecast(1000.0, "b"))
    policies = StandingPolicies(busy)
    Forecaster(busy, policies, forecast_rhythm(3.0, 300.0), limit_s=0.0).refresh(C, lambda: False)
    assert job(busy, "b").forecast == a_forecast(1000.0, "b").jobs[0]


def test_a_forecast_that_is_cancelled_stores_nothing(busy: PostgresStore) -> None:
    policies = StandingPolicies(busy)
    Forecaster(busy, policies, forecast_rhythm(3.0, 300.0), limit_s=600.0).refresh(C, lambda: True)
    assert job(busy, "b").forecast is None


async def test_a_server_forecasts_its_jobs_in_the_background(
    busy: PostgresStore, database: Database
) -> None:
    config = Config(
        listen="127.0.0.1:0",
        database_url=database.url,
        period_s=3600.0,
        forecast_period_s=3600.0,
        estimate_cells=False,
        grace_s=2.0,
        store_threads=4,
        lease_s=3600.0,
    )
    async with run_server(config):
        async with asyncio.timeout(PATIENCE_S):
            while (await asyncio.to_thread(job, busy, "a")).forecast is None:
                await asyncio.sleep(0.1)
    forecast = job(busy, "a").forecast
    assert forecast is not None
    assert forecast.finish is not None
