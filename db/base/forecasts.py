"""Forecasts of when jobs start and finish, and what later forecasts learn from."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any, Final

import sqlalchemy as sa

from tessera.db.base.documents import dump_json
from tessera.db.schema.job_columns import UNTIL_EXIT
from tessera.db.schema.tables import LIVE
from tessera.formulation.base.values import PROFILING, Workload
from tessera.formulation.job.lifecycle import JobState
from tessera.formulation.records.forecasts import (
    EVENTS,
    FINISH,
    START,
    Band,
    JobForecast,
    Submission,
)
from tessera.formulation.records.spreads import ClusterForecast, ForecastHistory, PastSpread, Spread

HISTORY_DAYS: Final = 7
"""The days of submissions and earlier forecasts that a forecast learns from."""
MAX_SUBMISSIONS: Final = 5_000
"""The newest submissions that are read."""
MAX_PAST: Final = 500
"""The newest earlier forecasts of each event that are read. Clusters change, so old ones mislead."""

_SUBMISSIONS = sa.text(f"""
SELECT extract(epoch FROM j.created_at)::float8 AS submit_s, w.model, w.params, w.global_batch,
    j.iterations, j.requested_gpus, j.requested_gpu_type, j.tenant, j.priority, j.weight, j.guaranteed,
    CASE WHEN j.ended_at IS NULL THEN 'NaN'::float8
        WHEN {UNTIL_EXIT} AND j.iterations_done = 0 THEN 'NaN'::float8 -- not reported
        ELSE least(1.0, j.iterations_done / greatest(j.iterations, 1)) END AS trained_share
FROM jobs j JOIN workloads w ON w.id = j.workload_id JOIN clusters c ON c.id = j.cluster_id
WHERE c.name = :cluster AND j.created_at > now() - make_interval(days => {HISTORY_DAYS})
    AND w.model <> '{PROFILING}' AND j.state <> '{JobState.REJECTED.value}'
ORDER BY j.id DESC LIMIT {MAX_SUBMISSIONS}
""")  # noqa: S608 - constants only

_OUTCOMES: Final[Mapping[str, str]] = {
    START: "(SELECT min(s.given_at) FROM job_starts s WHERE s.job_id = j.id AND s.given_at > f.created_at)",
    FINISH: "j.ended_at",
}
"""When the event of a forecast (f) of a job (j) happened, or NULL. A job that ends before it starts
never starts, so its start is only known to be later than its end."""

_PAST = {
    event: sa.text(f"""
SELECT f.times_s,
    extract(epoch FROM coalesce({outcome}, j.ended_at, now()) - f.created_at)::float8 AS after_s,
    {outcome} IS NOT NULL AS happened
FROM forecast_spreads f JOIN jobs j ON j.id = f.job_id JOIN clusters c ON c.id = j.cluster_id
WHERE c.name = :cluster AND f.event = '{event}'
    AND f.created_at > now() - make_interval(days => {HISTORY_DAYS})
ORDER BY f.created_at DESC LIMIT {MAX_PAST}
""")  # noqa: S608 - constants only
    for event, outcome in _OUTCOMES.items()
}

_PUT = sa.text(f"""
INSERT INTO forecasts (job_id, created_at, document)
SELECT j.id, to_timestamp(:created_s), r.document
FROM json_to_recordset(CAST(:rows AS json)) AS r(job text, document jsonb)
JOIN clusters c ON c.name = :cluster
JOIN jobs j ON j.cluster_id = c.id AND j.name = r.job AND j.{LIVE}
ORDER BY j.id
ON CONFLICT (job_id) DO UPDATE SET created_at = excluded.created_at, document = excluded.document
    WHERE forecasts.created_at < excluded.created_at
""")  # noqa: S608 - constants only

_PUT_SPREADS = sa.text(f"""
INSERT INTO forecast_spreads (job_id, event, created_at, times_s)
SELECT j.id, r.event, to_timestamp(:created_s), r.times_s
FROM json_to_recordset(CAST(:rows AS json)) AS r(job text, event text, times_s float8[])
JOIN clusters c ON c.name = :cluster
JOIN jobs j ON j.cluster_id = c.id AND j.name = r.job AND j.{LIVE}
ORDER BY j.id
ON CONFLICT DO NOTHING
""")  # noqa: S608 - constants only

FORECAST_COLUMNS: Final = (
    "extract(epoch FROM f.created_at)::float8 AS forecast_s, f.document AS forecast"
)
"""The columns that ``forecast_record`` reads, of the table ``forecasts`` (f)."""


def load_history(connection: sa.Connection, cluster: str) -> ForecastHistory:
    """Return what a forecast of the cluster learns from. It is empty without the cluster."""
    values = {"cluster": cluster}
    submissions = [
        Submission(
            submit_s=row.submit_s,
            workload=Workload(model=row.model, params=row.params, global_batch=row.global_batch),
            iterations=row.iterations,
            requested_gpus=row.requested_gpus,
            requested_gpu_type=row.requested_gpu_type,
            tenant=row.tenant,
            priority=row.priority,
            weight=row.weight,
            guaranteed=row.guaranteed,
            trained_share=row.trained_share,
        )
        for row in connection.execute(_SUBMISSIONS, values)
    ]
    past = {
        event: [
            PastSpread(
                spread=Spread(tuple(row.times_s)),
                after_s=row.after_s,
                happened=row.happened,
            )
            for row in connection.execute(_PAST[event], values)
        ]
        for event in EVENTS
    }
    return ForecastHistory(submissions=submissions[::-1], past=past)


def put_forecast(connection: sa.Connection, cluster: str, forecast: ClusterForecast) -> None:
    """Store the forecasts of jobs that are still live, in place of older ones."""
    values = {"cluster": cluster, "created_s": forecast.created_s}
    rows = [{"job": one.job, "document": _document(one)} for one in forecast.jobs]
    connection.execute(_PUT, values | {"rows": dump_json(rows)})
    spreads = [
        {"job": job, "event": event, "times_s": spread.times_s}
        for (event, job), spread in forecast.spreads.items()
    ]
    connection.execute(_PUT_SPREADS, values | {"rows": dump_json(spreads)})


def forecast_record(row: sa.RowMapping) -> JobForecast | None:
    """Return the forecast in a row with ``FORECAST_COLUMNS``, or None if the job has none."""
    document: dict[str, Any] | None = row["forecast"]
    if document is None:
        return None
    return JobForecast(
        job=row["name"],
        created_s=row["forecast_s"],
        coverage=document["coverage"],
        position=document["position"],
        start=_band(document["start"]),
        finish=_band(document["finish"]),
        why_not=document["why_not"],
    )


def _document(one: JobForecast) -> dict[str, object]:
    return {
        "coverage": one.coverage,
        "position": one.position,
        "start": _times(one.start),
        "finish": _times(one.finish),
        "why_not": one.why_not,
    }


def _times(band: Band | None) -> list[float | None] | None:
    """Return the times of a band, with None for what is not known."""
    if band is None:
        return None
    times = (band.low_s, band.median_s, band.high_s)
    return [at_s if math.isfinite(at_s) else None for at_s in times]


def _band(times: list[float | None] | None) -> Band | None:
    if times is None:
        return None
    low_s, median_s, high_s = (math.inf if at_s is None else at_s for at_s in times)
    return Band(low_s=low_s, median_s=median_s, high_s=high_s)
