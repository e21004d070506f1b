"""Forecasts as jobs' messages, and as lists and details show them."""

from __future__ import annotations

import math

import pytest
from google.protobuf.timestamp_pb2 import Timestamp

from tessera.formulation.records.forecasts import Band, JobForecast
from tessera.service.cli.forecastview import STALE_S, band_span, forecast_facts, listed_band
from tessera.service.cli.jobview import job_columns
from tessera.service.rpc.convert.jobs import of_forecast
from tessera.v1 import jobs_pb2

NOW_S = 1_800_000_000
NOW = Timestamp(seconds=NOW_S)


def a_job(made_s: float = NOW_S - 60.0, high_s: float = NOW_S + 5400.0) -> jobs_pb2.Job:
    """Return a waiting job that starts in 10 to 90 minutes, and whose finish is too far away."""
    forecast = JobForecast(
        job="a",
        made_s=made_s,
        coverage=0.8,
        position=3,
        start=Band(low_s=NOW_S + 600.0, median_s=NOW_S + 1800.0, high_s=high_s),
        finish=Band(low_s=NOW_S + 86_400.0, median_s=math.inf, high_s=math.inf),
    )
    return jobs_pb2.Job(name="clusters/c/jobs/a", forecast=of_forecast(forecast))


def test_a_message_leaves_out_the_times_that_are_too_far_away() -> None:
    forecast = a_job().forecast
    assert (forecast.position, forecast.coverage) == (3, 0.8)
    assert forecast.start.latest.seconds == NOW_S + 5400
    assert forecast.finish.HasField("earliest")
    assert not forecast.finish.HasField("median")
    assert not forecast.finish.HasField("latest")


def test_details_state_spans_times_and_coverage() -> None:
    facts = dict(forecast_facts(a_job(), NOW))
    assert facts == {
        "position": "3, by expected start",
        "starts": "in 10m-1h30m: 2027-01-15T08:10:00Z to 2027-01-15T09:30:00Z (80%)",
        "finishes": "after 1d: not before 2027-01-16T08:00:00Z (90%)",
        "forecast": "made 1m ago",
    }


def test_a_stale_forecast_is_shown_as_such() -> None:
    job = a_job(made_s=NOW_S - STALE_S - 60.0)
    assert listed_band(job, "start", NOW) == "10m-1h30m, 16m old"
    assert "out of date" in dict(forecast_facts(job, NOW))["forecast"]


def test_a_job_without_bands_says_why() -> None:
    forecast = JobForecast(job="a", made_s=NOW_S, coverage=0.8, why_not="nobody knows")
    job = jobs_pb2.Job(forecast=of_forecast(forecast))
    facts = {name: text for name, text in forecast_facts(job, NOW) if text}
    assert facts == {"forecast": "none: nobody knows"}
    assert listed_band(job, "finish", NOW) == ""


def test_a_band_that_has_begun_starts_now() -> None:
    later = Timestamp(seconds=NOW_S + 1200)
    assert band_span(a_job().forecast.start, later) == "0s-1h10m"


@pytest.mark.parametrize(("jobs", "shown"), [([a_job()], True), ([jobs_pb2.Job()], False)])
def test_lists_have_columns_of_forecasts_if_a_job_has_one(
    jobs: list[jobs_pb2.Job], shown: bool
) -> None:
    titles = [column.title for column in job_columns(jobs, NOW)]
    assert ("STARTS IN" in titles) is shown
    assert ("POSITION" in titles) is shown
