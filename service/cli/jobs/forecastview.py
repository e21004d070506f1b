"""Views of a job's forecast: when it starts and finishes, as spans from now and as times."""

from __future__ import annotations

from typing import Final, Literal

from google.protobuf.timestamp_pb2 import Timestamp

from tessera.service.cli.render import format_age, format_span, format_time
from tessera.v1 import jobs_pb2

STALE_S: Final = 900.0
"""The age in seconds from which a forecast is shown as out of date."""


def seconds_between(later: Timestamp, earlier: Timestamp) -> float:
    """Return the seconds from ``earlier`` to ``later``."""
    return (later.ToNanoseconds() - earlier.ToNanoseconds()) / 1e9


def span_until(moment: Timestamp, time: Timestamp) -> str:
    """Return when a promised or planned moment is, e.g. ``in 2h``, or ``10m ago`` if it has passed."""
    seconds = seconds_between(moment, time)
    return f"in {format_span(seconds)}" if seconds >= 0 else f"{format_span(-seconds)} ago"


def is_stale(forecast: jobs_pb2.Forecast, now: Timestamp) -> bool:
    """Return whether a forecast is too old to be relied upon."""
    return seconds_between(now, forecast.create_time) > STALE_S


def band_span(band: jobs_pb2.TimeBand, now: Timestamp) -> str:
    """Return a band from now on, e.g. ``10m-1h20m``, or ``after 2d`` if its end is not known."""
    first = format_span(seconds_between(band.earliest, now))
    if not band.HasField("latest"):
        return f"after {first}"
    last = format_span(seconds_between(band.latest, now))
    return last if last == first else f"{first}-{last}"


def listed_band(job: jobs_pb2.Job, event: Literal["start", "finish"], now: Timestamp) -> str:
    """Return the band of ``start`` or ``finish`` for a list, with its age if it is out of date."""
    forecast = job.forecast
    if not forecast.HasField(event):
        return ""
    text = band_span(getattr(forecast, event), now)
    if is_stale(forecast, now):
        text += f", {format_age(forecast.create_time, now)} old"
    return text


def listed_position(job: jobs_pb2.Job) -> str:
    """Return the place of a waiting job, or "" for any other."""
    return str(job.forecast.position) if job.forecast.position else ""


def forecast_facts(job: jobs_pb2.Job, now: Timestamp) -> list[tuple[str, str]]:
    """Return what is forecast of a job, or nothing without a forecast."""
    forecast = job.forecast
    if not job.HasField("forecast"):
        return []
    age = f"made {format_age(forecast.create_time, now)} ago"
    if is_stale(forecast, now):
        age += "; it is out of date, so look at it again after the next one"
    place = f"{forecast.position}, by expected start" if forecast.position else ""
    return [
        ("position", place),
        ("starts", _band_text(forecast, "start", now)),
        ("finishes", _band_text(forecast, "finish", now)),
        ("forecast", f"none: {forecast.why_not}" if forecast.why_not else age),
    ]


def _band_text(
    forecast: jobs_pb2.Forecast, event: Literal["start", "finish"], now: Timestamp
) -> str:
    """Return a band with its times and its coverage, or "" without one."""
    if not forecast.HasField(event):
        return ""
    band = getattr(forecast, event)
    first = format_time(band.earliest)
    if not band.HasField("latest"):
        share = (1 + forecast.coverage) / 2  # only the lower end is stated
        return f"{band_span(band, now)}: not before {first} ({share:.0%})"
    times = f"{first} to {format_time(band.latest)}"
    return f"in {band_span(band, now)}: {times} ({forecast.coverage:.0%})"
